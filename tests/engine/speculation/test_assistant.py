"""Gemma 4's assistants as drafters: transformers' results, drafts that change nothing, and pairs that are refused."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from golden import assistant
from golden.assistant import ASSISTANTS, N_DRAFTS, PROMPT, TRUNK
from llamac import _core
from llamac.engine import session as session_module
from llamac.engine.rows import appended_rows, as_ids
from llamac.engine.speculation.assistant import AssistantDrafter
from llamac.errors import ArgumentError, ClosedError, ExportError, OutOfMemoryError, UnsupportedError
from llamac.export import export
from prophet import draft_with_models, results
from torch_samples import storage, torch_tensor, write_archive

MOST = 5  # drafts of a pass
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's file ("trunk") and those of its assistants."""
    folder = tmp_path_factory.mktemp("assistants")
    found = {}
    for name, config in {"trunk": TRUNK, **ASSISTANTS}.items():
        found[name] = folder / f"{name}.bin"
        export(assistant.write(folder / name, config), found[name], probe_source=None)
    return found


@pytest.fixture(params=ASSISTANTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(files: dict[str, Path], kind: str) -> Iterator[llamac.Model]:
    with llamac.load(files["trunk"], draft_model=files[kind], kv_dtype="f32") as model:
        yield model


@pytest.mark.parametrize("threads", [1, 2])
def test_drafts_in_a_row_are_those_of_transformers(
    files: dict[str, Path], model: llamac.Model, kind: str, threads: int
) -> None:
    references = assistant.references()
    with model.session(threads=threads) as session:
        state = np.empty((1, model.config["dim"]), np.float32)
        session._core.eval_rows(appended_rows(as_ids(PROMPT[:-1]), 0, 0, "last"), hidden=state.data)
        assert session._head is not None
        token = PROMPT[-1]
        for i in range(N_DRAFTS):
            logits, hidden = np.empty(model.config["vocab_size"], np.float32), np.empty_like(state)
            row = array("i", (token, 0, len(PROMPT) - 1, 1))
            session._head.core().eval_rows(row, logits.data, inputs=state.data, hidden=hidden.data)
            np.testing.assert_allclose(logits, references[f"{kind}.logits"][i], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(hidden[0], references[f"{kind}.states"][i], rtol=1e-4, atol=1e-4)
            token, state = int(np.argmax(logits)), hidden
        assert session._core.length() == len(PROMPT) - 1


def test_an_assistant_keeps_no_lists_of_tokens(files: dict[str, Path], kind: str) -> None:
    """It has no positions of its own: the session that it drafts for has them, and their tokens."""
    with llamac.load(files["trunk"], kv_dtype="f32") as model, llamac.load(files[kind]) as drafter:
        trunk = _core.Session(model._core, sequences=2)
        core = _core.Session(drafter._core, sequences=2, trunk=trunk)
        state = np.zeros((1, model.config["dim"]), np.float32)
        allocations = []
        for sequence in range(2):
            trunk.eval_rows(appended_rows(as_ids(PROMPT), sequence, 0, "last"))
            for _ in range(2):
                _core.fail_allocation(0)
                core.eval_rows(array("i", (5, sequence, len(PROMPT), 1)), inputs=state.data)
                allocations.append(_core.fail_allocation(0))
            assert core.length(sequence) == 0
            assert core.tokens(sequence) == []
        assert allocations[1] == allocations[2]  # the first eval of the second sequence needs no memory of its own
        core.close()
        trunk.close()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the assistant from the first step on, whatever they cost, and none of prompt lookup."""
    draft_with_models(monkeypatch, MOST)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "options", [{"temperature": 0, "seed": 2}, {"temperature": 0.7, "seed": 3, "logprobs": 2}], ids=["greedy", "drawn"]
)
def test_drafts_change_nothing(model: llamac.Model, options: dict[str, Any]) -> None:
    with model.session() as plain, model.session() as drafting:
        for prompt in (PROMPT, PROMPT[:9], PROMPT):  # the last one is cut off the second one's text
            expected = plain.generate(prompt, max_tokens=25, speculation=False, **options)
            found = drafting.generate(prompt, max_tokens=25, **options)
            assert results(found) == results(expected)
            assert found.usage.drafted_tokens > 0
            assert drafting.tokens() == plain.tokens()
        assert drafting.eval([3]).tobytes() == plain.eval([3]).tobytes()


@pytest.mark.usefixtures("always")
def test_drafts_of_an_engine_are_those_of_each_text(model: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's requests are in other sequences of its session, and the assistant reads those."""
    calls: list[tuple[list[int], list[int]]] = []
    draft = AssistantDrafter.draft

    def recording(self: AssistantDrafter, ids: Any, n: int, sampling: Any) -> list[int]:
        calls.append((list(ids), found := draft(self, ids, n, sampling)))
        return found

    monkeypatch.setattr(AssistantDrafter, "draft", recording)
    prompts = [PROMPT, PROMPT[3:], PROMPT[8:20]]
    alone = [model.generate(prompt, max_tokens=20, temperature=0) for prompt in prompts]
    drafts = {tuple(ids): found for ids, found in calls}
    calls.clear()
    with llamac.Engine(model, max_sequences=3) as engine:
        found = [stream.result() for stream in [engine.submit(p, max_tokens=20, temperature=0) for p in prompts]]
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    shared = [(drafts[tuple(ids)], found) for ids, found in calls if found and drafts.get(tuple(ids))]
    assert len(shared) > 3
    for one, other in shared:
        n = min(len(one), len(other))
        assert one[:n] == other[:n]


def test_an_assistant_alone_is_refused(files: dict[str, Path], kind: str) -> None:
    with llamac.load(files[kind]) as model:
        assert model.config["drafter"] == "assistant"
        with pytest.raises(UnsupportedError, match=r"a drafter, which cannot run alone: .*\(--draft\)"):
            model.generate(PROMPT, max_tokens=3)
        with pytest.raises(UnsupportedError, match="a drafter, which cannot run alone"):
            llamac.Engine(model)


def test_a_pair_that_does_not_match_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    text = {**ASSISTANTS["plain"]["text_config"], "sliding_window": 6}
    folder = assistant.write(tmp_path / "other", {**ASSISTANTS["plain"], "text_config": text})
    with pytest.raises(ArgumentError, match="the drafter does not belong to this model: its layer 0 has window 6"):
        llamac.load(files["trunk"], draft_model=folder, cache_dir=False)


def test_a_drafter_ends_with_its_session(files: dict[str, Path], model: llamac.Model) -> None:
    with model.session() as session, model.session() as other:
        session.eval(PROMPT)
        other.eval(PROMPT)
        assert session._head is not None
        core, row = session._head.core(), array("i", (3, 0, len(PROMPT), 1))
        state = np.zeros((1, model.config["dim"]), np.float32)
        core.eval_rows(row, inputs=state.data)
        session._core.exchange(other._core)
        with pytest.raises(ClosedError, match="belongs to a session that has moved"):
            core.eval_rows(row, inputs=state.data)
        session._core.exchange(other._core)
        core.eval_rows(row, inputs=state.data)
        session._core.close()
        with pytest.raises(ClosedError, match="the session is closed"):
            core.eval_rows(row, inputs=state.data)
        assert _core.memory_limits(core, 1)[0] > 0


def test_a_drafter_that_was_closed_is_named_and_ends_drafts_by_default(files: dict[str, Path], kind: str) -> None:
    with llamac.load(files[kind]) as drafter, llamac.load(files["trunk"], draft_model=drafter) as model:
        expected = model.generate(PROMPT, max_tokens=9, temperature=0, speculation=False)
        with model.session() as session:
            session.eval(PROMPT)
            drafter.close()
            with session.fork() as fork:
                assert fork.tokens() == PROMPT
        assert model.generate(PROMPT, max_tokens=9, temperature=0).tokens == expected.tokens
        with pytest.raises(ClosedError, match="the draft model is closed"):
            model.session(draft_model=drafter)


def test_a_session_whose_drafter_cannot_open_leaves_no_session_in_the_core(
    files: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[_core.Session] = []

    def fail(session: llamac.Session, draft_model: llamac.Model | None) -> None:
        opened.append(session._core)
        raise OutOfMemoryError("no memory for the drafter")

    with llamac.load(files["trunk"], draft_model=files[kind]) as model:
        monkeypatch.setattr(session_module, "head_of", fail)
        with pytest.raises(OutOfMemoryError, match="no memory for the drafter"):
            model.session()
        assert [core.closed for core in opened] == [True]
        assert all(session.closed for session in model._sessions)


def test_a_limit_holds_without_a_drafter_that_was_closed(files: dict[str, Path], kind: str) -> None:
    with llamac.load(files["trunk"]) as plain:
        limit = 4 * plain.plan_memory(context=64).total
    for path in files[kind], files["trunk"]:
        with (
            llamac.load(path) as drafter,
            llamac.load(files["trunk"], draft_model=drafter, max_memory=limit, context=64) as model,
        ):
            first, second = model.session(context=64), model.session(context=64)
            first.eval(PROMPT)
            assert model.plan_memory(context=64).draft > 0
            drafter.close()
            assert model.plan_memory(context=64).draft == 0
            second.close()
            with model.session(context=64) as third:
                third.eval(PROMPT)


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"backbone_hidden_size": None}, {}, ExportError, "backbone_hidden_size is missing"),
    ({"num_centroids": 5}, {}, ExportError, "num_centroids is 5, expected a divisor of vocab_size"),
    ({"num_centroids": 12}, {}, ExportError, "with a multiple of 16 tokens per cluster"),
    ({"centroid_intermediate_top_k": 7}, {}, ExportError, r"expected at most num_centroids \(6\)"),
    ({"something": 1}, {}, ExportError, "something is 1: llamac does not know this key"),
    ({}, {"num_kv_shared_layers": 2}, UnsupportedError, "num_kv_shared_layers is 2, expected num_hidden_layers"),
    ({}, {"model_type": "gemma4_text"}, UnsupportedError, "the language model's model_type is"),
]


@pytest.mark.parametrize(("keys", "text", "error", "message"), REFUSALS, ids=lambda part: str(part)[:40])
def test_keys_that_differ_are_refused(
    tmp_path: Path, keys: dict[str, Any], text: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = {**assistant.CLUSTERED, **keys, "text_config": {**assistant.CLUSTERED["text_config"], **text}}
    assistant.write(tmp_path, assistant.CLUSTERED)
    assistant.write_config(tmp_path, {key: value for key, value in config.items() if value is not None})
    with pytest.raises(error, match=message):
        export(tmp_path, tmp_path / "m.bin")


def test_exports_that_an_assistant_cannot_have_are_refused(tmp_path: Path) -> None:
    folder = assistant.write(tmp_path / "hf", assistant.PLAIN)
    for to in ("hf", "gguf"):
        with pytest.raises(UnsupportedError, match=f"to='{to}' writes language models, and this is a drafter"):
            export(folder, tmp_path / "out", to=to)
    with pytest.raises(UnsupportedError, match="calibrate needs a model's logits, and a drafter has none"):
        export(folder, tmp_path / "m.bin", dtype="q4", calibrate="self")
    with pytest.raises(ArgumentError, match=r"the tokenizer .* has no effect: a drafter has none"):
        export(folder, tmp_path / "m.bin", tokenizer=tmp_path)


def test_the_order_of_tokens_is_read_with_its_strides(files: dict[str, Path], tmp_path: Path) -> None:
    """torch may store a vector with other numbers between its own."""
    tensors = assistant.tensors(assistant.CLUSTERED)
    document, storages = {}, {}
    for name, values in tensors.items():
        kind = {"int64": "LongStorage", "float32": "FloatStorage"}[values.dtype.name]
        step = 2 if values.ndim == 1 else 1
        spread = np.full((values.size, step), 1, values.dtype)
        spread[:, 0] = values.reshape(-1)
        strides = (step,) if values.ndim == 1 else (values.shape[1], 1)
        document[name] = torch_tensor(storage(name, spread.size, kind), values.shape, strides)
        storages[name] = spread.tobytes()
    assistant.write_config(tmp_path, assistant.CLUSTERED)
    write_archive(tmp_path / "pytorch_model.bin", document, storages)
    export(tmp_path, tmp_path / "m.bin", probe_source=None)
    with llamac.load(tmp_path / "m.bin") as found, llamac.load(files["clustered"]) as expected:
        for tensor in expected.file.tensors:
            assert (found.file.tensor(tensor.name) == expected.file.tensor(tensor.name)).all()
