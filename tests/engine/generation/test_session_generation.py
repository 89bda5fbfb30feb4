"""Generation in a session: a second turn computes only the new tokens and gives the same result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import write_json

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac.errors import ArgumentError, BusyError, ClosedError, ContextFullError

Script = Callable[..., llamac.Model]
BOS = 1
CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def chat_model(tmp_path: Path) -> llamac.Model:
    made = checkpoint(llama_config())
    made.chat_template = CHAT
    return llamac.load(write_model(tmp_path / "chat.bin", made))


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in each prefill."""
    counts: list[int] = []
    prefill = llamac.Session.prefill

    def count(session: llamac.Session, ids: Any) -> None:
        counts.append(len(ids))
        prefill(session, ids)

    monkeypatch.setattr(llamac.Session, "prefill", count)
    return counts


# ---- cached tokens


def test_a_second_turn_computes_only_the_new_tokens(tiny: Path, prefills: list[int]) -> None:
    prompt, more = some_ids(50), some_ids(20, seed=2)
    with llamac.load(tiny) as model, model.session() as session:
        first = session.generate(prompt, max_tokens=10, seed=1)
        assert (first.usage.prompt_tokens, first.usage.cached_tokens) == (50, 0)
        assert session.tokens() == prompt + first.tokens[:-1]  # the last token was not evaluated
        whole = prompt + first.tokens + more
        second = session.generate(whole, max_tokens=10, seed=2)
        assert prefills == [50, 21]
        assert (second.usage.prompt_tokens, second.usage.cached_tokens) == (80, 59)
        assert second.tokens == model.generate(whole, max_tokens=10, seed=2).tokens


def test_a_different_prompt_reuses_the_common_prefix(tiny: Path, prefills: list[int]) -> None:
    prompt = some_ids(50)
    other = [*prompt[:30], (prompt[30] + 1) % 280, *prompt[31:]]
    with llamac.load(tiny) as model, model.session() as session:
        session.generate(prompt, max_tokens=5, seed=1)
        found = session.generate(other, max_tokens=5, seed=1)
        assert (prefills, found.usage.cached_tokens) == ([50, 20], 30)
        assert found.tokens == model.generate(other, max_tokens=5, seed=1).tokens
        prefills.clear()
        unrelated = [(other[0] + 1) % 280, *other]
        found = session.generate(unrelated, max_tokens=5, seed=1)
        assert (prefills, found.usage.cached_tokens) == ([51], 0)
        assert found.tokens == model.generate(unrelated, max_tokens=5, seed=1).tokens


def test_a_cached_prompt_computes_only_its_last_token(tiny: Path, prefills: list[int]) -> None:
    prompt = some_ids(50)
    with llamac.load(tiny) as model, model.session() as session:
        first = session.generate(prompt, max_tokens=5, seed=1)
        again = session.generate(prompt, max_tokens=5, seed=1)
        shorter = session.generate(prompt[:20], max_tokens=5, seed=1)
        assert prefills == [50, 1, 1]
        assert again.tokens == first.tokens
        assert shorter.tokens == model.generate(prompt[:20], max_tokens=5, seed=1).tokens


def test_evals_and_truncations_update_the_cached_tokens(tiny: Path, prefills: list[int]) -> None:
    ids = some_ids(60)
    with llamac.load(tiny) as model, model.session(sequences=2) as session:
        session.eval(ids[:20], logits=None)
        session.eval_rows([(token, 0, 20 + at, False) for at, token in enumerate(ids[20:30])])
        session.eval_rows([(token, 1, at, False) for at, token in enumerate(ids[40:45])])
        session.observe(ids[30:40], ["q"])
        session.step(ids[40])
        assert (session.tokens(), session.tokens(1)) == (ids[:41], ids[40:45])
        session.truncate(35)
        assert session.tokens() == ids[:35]
        found = session.generate(ids, max_tokens=3, seed=1)
        assert prefills == [25]
        assert found.tokens == model.generate(ids, max_tokens=3, seed=1).tokens
        assert session.tokens(1) == ids[40:45]
        with pytest.raises(ArgumentError, match="sequence"):
            session.tokens(2)


def test_a_cancelled_prefill_keeps_the_computed_tokens(big_llama: Path) -> None:
    ids = some_ids(700)
    with llamac.load(big_llama, threads=1) as model, model.session() as session:
        stream = session.stream(ids, max_tokens=1)
        eval_rows = session._core.eval_rows

        class Core:
            """The session's core, which reports a cancellation after the first chunk."""

            def __getattr__(self, name: str) -> Any:
                return getattr(core, name)

            def eval_rows(self, rows: Any, *rest: Any) -> None:
                eval_rows(rows[: 4 * 256], *rest)
                raise llamac.CancelledError("cancelled: 256 of 700 rows were computed and kept", 256)

        core, session._core = session._core, Core()  # type: ignore[assignment]
        assert list(stream) == []
        session._core = core
        assert stream.completion.finish_reason == "cancelled"
        assert session.tokens() == ids[:256]
        assert session.generate(ids, max_tokens=1, seed=1).usage.cached_tokens == 256


# ---- limits and errors


def test_the_sessions_context_limits_prompt_and_generation(scripted: Script) -> None:
    model = scripted("abcdefghijklmnop")
    with model.session(context=8) as session:
        result = session.generate([BOS, 5, 6])
        assert (result.text, result.finish_reason) == ("cdefgh", "context")
        with pytest.raises(ContextFullError, match="the prompt has 9 tokens, but the context holds 8"):
            session.generate([BOS] * 9)
        assert session.length() == 8  # the refused request changed nothing


def test_a_new_request_ends_an_unfinished_stream(scripted: Script) -> None:
    model = scripted("abcdefghijklmnop")
    with model.session() as session:
        for use in (
            lambda: session.generate([BOS, 5], max_tokens=2),
            lambda: session.eval([7]),
            lambda: session.truncate(1),
        ):
            stream = session.stream([BOS])
            assert [next(stream), next(stream)] == ["a", "b"]
            use()
            for _ in range(2):
                with pytest.raises(ClosedError, match="its session has been used for something else"):
                    next(stream)
            stream.close()
            session.truncate(0)


def test_closing_a_stream_leaves_its_session_open(scripted: Script) -> None:
    with scripted("abcdefgh").session() as session:
        with session.stream([BOS]) as stream:
            next(stream)
        assert not session.closed
        assert stream.completion.text == "a"
        assert session.generate([BOS], max_tokens=3).text == "abc"


def test_a_closed_session_does_not_generate(scripted: Script) -> None:
    session = scripted("abcdefgh").session()
    stream = session.stream([BOS])
    session.close()
    for use in (lambda: next(stream), lambda: session.generate([BOS]), lambda: session.stream([BOS])):
        with pytest.raises(ClosedError, match="the session is closed"):
            use()


# ---- prefill, sample and step


def test_prefill_sample_and_step_reproduce_generate(tiny_llama: Path) -> None:
    prompt = some_ids(20)
    with llamac.load(tiny_llama) as model, model.session() as session:
        params = llamac.SamplingParams(temperature=0.9, top_p=0.8, seed=5)
        session.prefill(prompt)
        found = [session.sample(params)]
        for _ in range(7):
            session.step(found[-1])
            found.append(session.sample(params))
        assert found == model.generate(prompt, params, max_tokens=8).tokens
        assert session.sample(params, temperature=0) == session.sample(temperature=0)


def test_sampling_needs_logits(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        for use in (lambda: None, lambda: session.eval([1, 2]), lambda: session.truncate(1)):
            use()
            with pytest.raises(ArgumentError, match="there are no logits to sample from"):
                session.sample(temperature=0)


# ---- chat


def test_chat_uses_the_models_template(chat_model: llamac.Model) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with chat_model as model:
        prompt = model.chat_ids(messages)
        expected = model.generate(prompt, max_tokens=9, seed=3)
        for found in (
            model.chat(messages, max_tokens=9, seed=3),
            model.chat(messages, llamac.SamplingParams(max_tokens=9, seed=3)),
            model.session().chat(messages, max_tokens=9, seed=3),
        ):
            assert (found.tokens, found.usage.prompt_tokens) == (expected.tokens, len(prompt))
        for stream in (
            model.chat_stream(messages, max_tokens=9, seed=3),
            model.session().chat_stream(messages, max_tokens=9, seed=3),
        ):
            assert "".join(stream) == expected.text


def test_a_second_turn_of_a_chat_computes_only_the_new_tokens(chat_model: llamac.Model) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    with chat_model as model, model.session() as session:
        first = session.chat(messages, max_tokens=3, temperature=0)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "The end"}]
        second = session.chat(messages, max_tokens=3, temperature=0)
        assert second.usage.cached_tokens >= first.usage.prompt_tokens
        assert second.tokens == model.chat(messages, max_tokens=3, temperature=0).tokens


def test_messages_cannot_write_special_tokens(checkpoint_folder: Path) -> None:
    messages = [{"role": "user", "content": "a<s>b</s>"}]
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    write_json(checkpoint_folder, tokenizer_config=config)
    with llamac.load(checkpoint_folder, cache_dir=False) as model, model.session() as session:
        bos = model.special.bos_id
        assert bos is not None
        session.chat(messages, max_tokens=1)
        assert session.tokens().count(bos) == 1
        assert model.chat_ids(messages, parse_special=True).count(bos) == 2


def test_chat_passes_tools_and_options_to_the_template(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.chat_template = "{{ tools or 'no tools' }}, {{ mood }}, {{ messages[0].content }}"
    messages = [{"role": "user", "content": "x"}]
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f"}}]
    options: dict[str, Any] = {"mood": "calm"}
    with llamac.load(write_model(tmp_path / "m.bin", made)) as model, model.session() as session:
        session.chat(messages, tools=tools, template_options=options, max_tokens=1)
        assert model.detokenize(session.tokens()) == f"{tools}, calm, x"
        session.chat(messages, template_options=options, max_tokens=1)
        assert model.detokenize(session.tokens()) == "no tools, calm, x"
        found_ids = model.chat(messages, tools=tools, template_options=options, max_tokens=1).usage.prompt_tokens
        assert found_ids == len(model.chat_ids(messages, tools=tools, **options))
        for name in ("messages", "tools", "parse_special"):
            with pytest.raises(ArgumentError, match=f"template_options holds '{name}'"):
                model.chat(messages, template_options={name: True})
        with pytest.raises(llamac.ArgumentTypeError, match="template_options must be a dict, not list"):
            model.chat(messages, template_options=[1])  # type: ignore[arg-type]


def test_chat_needs_a_template(tiny_llama: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    with llamac.load(tiny_llama) as model, model.session() as session:
        for use in (model.chat, model.chat_stream, session.chat, session.chat_stream):
            with pytest.raises(ArgumentError, match="has no chat template"):
                use(messages)


# ---- long prompts


def test_a_prompt_that_must_exceed_the_context_is_not_tokenized(
    chat_model: llamac.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "hello world " * 100_000
    encoded: list[int] = []
    encode = llamac.Tokenizer.encode

    def count(tokenizer: llamac.Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(llamac.Tokenizer, "encode", count)
    with chat_model as model, model.session() as session:
        for use in (
            lambda: model.generate(text),
            lambda: model.stream(text),
            lambda: session.generate(text),
            lambda: model.chat([{"role": "user", "content": text}]),
            lambda: session.chat([{"role": "user", "content": text}]),
        ):
            with pytest.raises(ContextFullError, match=r"prompt has at least \d+ tokens, but the context holds 600"):
                use()
    assert encoded == []


def test_numpy_ids_are_accepted_as_a_prompt(tiny_llama: Path) -> None:
    ids = np.array(some_ids(9))
    with llamac.load(tiny_llama) as model, model.session() as session:
        found = session.generate(ids, max_tokens=2, temperature=0)  # type: ignore[arg-type]
        assert found.tokens == session.generate(ids.tolist(), max_tokens=2, temperature=0).tokens


def test_other_sequences_leave_no_logits_for_sampling(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session(sequences=2) as session:
        session.prefill([1, 2, 3])
        session.step(5, sequence=1)
        with pytest.raises(ArgumentError, match="no logits to sample from: call prefill or step first"):
            session.sample(temperature=0)
        session.step(4)
        assert session.sample(temperature=0) == model.generate([1, 2, 3, 4], temperature=0, max_tokens=1).tokens[0]


@pytest.mark.parametrize("n", [1, 2])
def test_another_thread_cannot_change_a_session_that_generates(tiny_llama: Path, n: int) -> None:
    prompt, options = some_ids(40), {"max_tokens": 4, "seed": 1, "ignore_eos": True, "n": n}
    refused: list[str] = []

    with llamac.load(tiny_llama) as model, model.session() as session:

        def change() -> None:
            for call in (
                lambda: session.truncate(0),
                lambda: session.eval([5]),
                lambda: session.step(5),
                lambda: session.shift(1, 2),
                lambda: session.eval_drafts([5], [-1]),
                lambda: session.copy_sequence(0, 0, length=1),
            ):
                try:
                    call()
                except BusyError as error:
                    refused.append(str(error))

        def from_another_thread(ids: object, logits: object) -> None:
            thread = threading.Thread(target=change)
            thread.start()
            thread.join()

        found = session.generate(prompt, logits_processors=from_another_thread, **options)
        expected = model.generate(prompt, logits_processors=lambda ids, logits: None, **options)
        assert [choice.tokens for choice in found.choices] == [choice.tokens for choice in expected.choices]
        assert len(refused) == 6 * 4 * n
        assert "in use by another thread" in refused[0]
        change()
        assert len(refused) == 6 * 4 * n
