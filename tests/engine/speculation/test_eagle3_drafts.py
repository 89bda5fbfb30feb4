"""Drafts of an EAGLE-3 head beside a model: results stay the same, and a head that knows the text predicts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle3_models import CONFIG, fused, head_tensors, reference, write_head

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from golden.tiny_checkpoints import changed, random_tensor
from llamac import _core
from llamac.engine.memory import SESSION_BYTES, plan_memory
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.speculation.mtp import MtpDrafter
from llamac.errors import ClosedError
from llamac.export.checkpoint import LazyTensor
from llamac.export.convert import export
from prophet import draft_with_models, results

PROMPT = some_ids(70)
GREEDY: dict[str, Any] = {"max_tokens": 61, "temperature": 0, "ignore_eos": True}
EMBEDDING = random_tensor("embedding", (301, 48))
EMBEDDING /= np.linalg.norm(EMBEDDING, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def made() -> Any:
    return checkpoint(llama_config(n_layers=4))


@pytest.fixture(scope="module")
def pair(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A random model with a random head."""
    folder = tmp_path_factory.mktemp("eagle3")
    export(write_head(folder / "head", CONFIG, head_tensors(CONFIG)), folder / "head.bin", dtype="f32")
    with llamac.load(write_model(folder / "model.bin", made), draft_model=folder / "head.bin") as model:
        yield model


@pytest.fixture(scope="module")
def knowing(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A model in which token t is followed by t + 7, with a head that predicts t + 14 from its state after t.

    All branches of the layers are zero, so the residual stream is the embedding of the token.
    """
    folder, ids = tmp_path_factory.mktemp("knowing"), np.arange(301)
    n = made.config.n_token_ids
    given = {"token_embedding.weight": EMBEDDING, "output.weight": EMBEDDING[(ids - 7) % n] * 20}
    given |= {
        name: np.zeros(tensor.shape, np.float32)
        for name, tensor in made.tensors.items()
        if name.endswith(("attn_out.weight", "ffn_down.weight"))
    }
    given["output_norm.weight"] = np.ones(48, np.float32)
    tensors = {**made.tensors, **{name: LazyTensor.of(values) for name, values in given.items()}}
    config = changed(CONFIG, draft_vocab_size=290)
    head = head_tensors(config)
    drafted = ids[11:]
    head["d2t"] = np.full(290, 11, np.int64)
    head["t2d"] = np.isin(ids, drafted)
    head["lm_head.weight"] = EMBEDDING[(drafted - 14) % n] * 20
    head["norm.weight"] = np.ones(48, np.float32)
    head["fc.weight"] = np.hstack([np.zeros((48, 48)), np.eye(48), np.zeros((48, 48))]).astype(np.float32)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        head[name] = np.zeros_like(head[name])
    export(write_head(folder / "head", config, head), folder / "head.bin", dtype="f32")
    path = write_model(folder / "model.bin", replace(made, tensors=tensors))
    with llamac.load(path, draft_model=folder / "head.bin") as model:
        yield model


@pytest.fixture(autouse=True)
def always(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the head from the first step on, whatever they cost, and none of prompt lookup."""
    most = 1 if "knowing" in request.fixturenames else 5
    draft_with_models(monkeypatch, most)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "seed": 2},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "seed": 5, "stop_token_ids": list(range(0, 280, 19)), "min_tokens": 10},
]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda options: f"{options['temperature']}")
def test_drafts_change_nothing(pair: llamac.Model, options: dict[str, Any]) -> None:
    with pair.session() as plain, pair.session() as drafting:
        expected = plain.generate(PROMPT, max_tokens=90, speculation=False, **options)
        found = drafting.generate(PROMPT, max_tokens=90, **options)
        assert results(found) == results(expected)
        assert found.usage.drafted_tokens > 0
        assert expected.usage.drafted_tokens == 0
        assert drafting.tokens() == plain.tokens()
        assert drafting.eval([3]).tobytes() == plain.eval([3]).tobytes()


def test_drafts_are_those_of_the_definition(made: Any, pair: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are (token at i + 1, states at i) from the first position on; drafts go on from the head's stream."""
    tensors, embedding = head_tensors(CONFIG), made.tensors["token_embedding.weight"].array()
    calls: list[tuple[list[int], list[int]]] = []
    draft = MtpDrafter.draft

    def recording(self: MtpDrafter, ids: Any, n: int, sampling: Any) -> list[int]:
        calls.append((list(ids), found := draft(self, ids, n, sampling)))
        return found

    monkeypatch.setattr(MtpDrafter, "draft", recording)
    pair.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
    assert len(calls) > 3
    assert all(found for _, found in calls)
    for ids, found in calls:
        states = np.empty((len(ids) - 1, 3 * 48), np.float32)
        with pair.session() as session:
            session._core.eval_rows(appended_rows(as_ids(ids[:-1]), 0, 0, "last"), hidden=states.data)
        inputs, tokens = fused(CONFIG, tensors, states.astype(np.float64)), ids[1:]
        for token in found:
            stream, logits = reference(CONFIG, tensors, tokens, inputs, embedding)
            best = np.argsort(logits[-1, : pair.n_token_ids])[-2:]
            assert token == best[1] or logits[-1, best[1]] - logits[-1, token] < 1e-3
            inputs, tokens = np.vstack([inputs, stream[-1:]]), [*tokens, token]


def test_a_head_that_knows_the_text_has_its_drafts_accepted(knowing: llamac.Model) -> None:
    """Also in a text that continues the last one, in one that parts from it, in a fork, and in an engine."""
    n = knowing.n_token_ids

    def check(found: llamac.Completion, prompt: list[int]) -> list[int]:
        assert found.tokens == [(prompt[-1] + 7 * i) % n for i in range(1, 62)]
        unknown = sum(token < 11 for token in found.tokens)  # of which the head has no logits
        assert found.usage.drafted_tokens >= 30
        assert found.usage.drafted_tokens - found.usage.accepted_tokens <= unknown
        return [*prompt, *found.tokens]

    with knowing.session() as session:
        text = check(session.generate(PROMPT, **GREEDY), PROMPT)
        text = check(session.generate(text, **GREEDY), text)
        text = check(session.generate([*text[:80], 9, 9], **GREEDY), [*text[:80], 9, 9])
        with session.fork(length=60) as fork:
            check(fork.generate(text[:75], **GREEDY), text[:75])
    with llamac.Engine(knowing, max_sequences=2) as engine:
        for prompts in ([PROMPT], [some_ids(30), some_ids(300)], [PROMPT]):  # the last from the prefix cache
            for request in [engine.submit(prompt, **GREEDY) for prompt in prompts]:
                assert request.result(60).usage.accepted_tokens > 20


def test_requests_of_an_engine_get_the_tokens_that_they_get_alone(pair: llamac.Model) -> None:
    prompts = [some_ids(20 + 30 * i, seed=i) for i in range(4)]
    options = [{"max_tokens": 20, **SETTINGS[i % len(SETTINGS)]} for i in range(4)]
    expected = [pair.generate(ids, speculation=False, **chosen) for ids, chosen in zip(prompts, options, strict=True)]
    with llamac.Engine(pair, max_sequences=3) as engine:
        requests = [engine.submit(ids, **chosen) for ids, chosen in zip(prompts, options, strict=True)]
        for request, alone in zip(requests, expected, strict=True):
            assert results(request.result(60))[:4] == results(alone)[:4]
        assert engine.stats().drafted_tokens > 0


def test_a_text_is_cut_to_before_the_windows_of_its_head(pair: llamac.Model, tmp_path: Path) -> None:
    """The layers with windows have dropped the positions that the rows after the cut would see."""
    config = changed(CONFIG, layer_types=["sliding_attention"], sliding_window=4, norm_before_fc=True, norm_output=True)
    export(write_head(tmp_path / "head", config, head_tensors(config)), tmp_path / "head.bin", dtype="f32")
    with llamac.load(tmp_path / "head.bin") as head, pair.session(draft_model=head) as session, pair.session() as plain:
        text = [*PROMPT, *session.generate(PROMPT, **GREEDY | {"max_tokens": 330}).tokens]
        assert session._head is not None
        assert session._head.core().shortest_length() > 0
        for length in (len(text) - 3, 60):
            found = session.generate(text[:length], **GREEDY)
            assert found.usage.drafted_tokens > 0
            assert found.tokens == plain.generate(text[:length], speculation=False, **GREEDY).tokens


def test_memory_counts_the_head(pair: llamac.Model) -> None:
    with pair.session() as session:
        session.generate(PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
        used = pair.memory().draft
        assert session._head is not None
        assert session._head.file is not None
        *_, activations, pages = session._head.core().describe()
        size = session._head.file.file.header["file_bytes"]
        assert used == size + activations + pages + SESSION_BYTES * session._core.vocab_size
    assert pages > 0
    assert used <= plan_memory(pair, None, pair.config["context"]).draft


def test_a_head_ends_with_the_session_that_it_drafts_for(pair: llamac.Model) -> None:
    head = pair._session_defaults.draft_model
    assert head is not None
    with pair.session() as session:
        drafting = _core.Session(head._core, trunk=session._core)
    row, state = appended_rows(as_ids([1]), 0, 0, "last"), np.zeros((1, 48), np.float32)
    with pytest.raises(llamac.ClosedError):
        drafting.eval_rows(row, inputs=state.data)


def test_a_session_is_not_opened_for_a_head_that_was_closed(pair: llamac.Model, tmp_path: Path) -> None:
    """Another thread can close it after the check in Python: a session without its layers' states would never draft."""
    export(write_head(tmp_path / "head", CONFIG, head_tensors(CONFIG)), tmp_path / "head.bin", dtype="f32")
    with llamac.load(tmp_path / "head.bin") as head:
        pass
    with pytest.raises(ClosedError, match="the draft model is closed"):
        _core.Session(pair._core, drafter=head._core)
