"""Requests that need more positions than the context has: errors, cut prompts and shifted contexts."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_engines import held

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac import ArgumentError, ArgumentTypeError, ContextFullError, SamplingParams, UnsupportedError
from llamac.engine.prompts.overflow import fit_prompt
from llamac.engine.sampling.params import resolve
from llamac.export.checkpoint import LayerConfig

GREEDY: Any = {"temperature": 0.0, "ignore_eos": True}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Iterator[llamac.Model]:
    with llamac.load(tiny_llama, context=64) as opened:
        yield opened


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A model with a window that is more than half of its context of 1200."""
    gated = LayerConfig("gated", 76, rope=0)
    config = replace(llama_config(context=1200), layers=(gated, replace(gated, window=700)))
    with llamac.load(write_model(tmp_path_factory.mktemp("windowed") / "m.bin", checkpoint(config))) as opened:
        yield opened


@pytest.fixture
def chatting(tmp_path: Path) -> Iterator[llamac.Model]:
    made = checkpoint(llama_config())
    made.chat_template = TEMPLATE
    with llamac.load(write_model(tmp_path / "chat.bin", made), context=200) as opened:
        yield opened


# ---- which tokens of a prompt are kept


@pytest.mark.parametrize(
    ("given", "params", "expected"),
    [
        (100, {"context_overflow": "truncate_middle"}, (100, 0)),
        (101, {"context_overflow": "truncate_middle"}, (76, 38)),  # room for a quarter of the context
        (101, {"context_overflow": "truncate_middle", "context_keep": 5}, (76, 5)),
        (101, {"context_overflow": "truncate_middle", "context_keep": 0}, (76, 0)),
        (91, {"context_overflow": "truncate_middle", "max_tokens": 10}, (91, 0)),
        (92, {"context_overflow": "truncate_middle", "max_tokens": 10}, (91, 45)),
        (51, {"context_overflow": "truncate_middle", "max_tokens": 90}, (51, 0)),
        (52, {"context_overflow": "truncate_middle", "max_tokens": 90}, (51, 25)),  # never less than half
        (100, {"context_overflow": "shift", "max_tokens": 90}, (100, 0)),
        (101, {"context_overflow": "shift", "max_tokens": 10}, (91, 4)),
        (101, {"context_overflow": "shift", "context_keep": 20}, (76, 20)),
    ],
)
def test_a_prompt_is_cut_in_its_middle(given: int, params: dict[str, Any], expected: tuple[int, int]) -> None:
    ids = array("i", range(given))
    fitted = fit_prompt(ids, resolve(SamplingParams(**params), SamplingParams()), 100)
    length, head = expected
    assert len(fitted.ids) == length
    assert fitted.truncated == given - length
    if fitted.truncated:
        assert list(fitted.ids) == [*range(head), *range(given - length + head, given)]


@pytest.mark.parametrize("context", [1, 2, 3])
def test_tiny_contexts_have_room(context: int) -> None:
    params = resolve(SamplingParams(context_overflow="truncate_middle"), SamplingParams())
    assert 1 <= len(fit_prompt(array("i", range(9)), params, context).ids) <= context


@pytest.mark.parametrize("mode", ["shift", "truncate_middle"])
def test_what_is_kept_must_leave_room(model: llamac.Model, mode: Any) -> None:
    with pytest.raises(ContextFullError, match=r"the first 80 tokens of the prompt are kept \(context_keep\)"):
        model.generate(some_ids(100), context_overflow=mode, context_keep=80)
    with pytest.raises(ContextFullError, match="the first 64 tokens"):
        model.generate(some_ids(64), context_overflow="shift", context_keep=64)


def test_wrong_values_are_refused(model: llamac.Model) -> None:
    with pytest.raises(ArgumentError, match="context_overflow is 'drop', expected one of 'error', 'shift', 'trunc"):
        SamplingParams(context_overflow="drop")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="context_overflow"):
        SamplingParams(context_overflow=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="context_keep is -1"):
        SamplingParams(context_keep=-1)


# ---- errors


def test_an_error_has_the_numbers_and_says_what_to_do(model: llamac.Model) -> None:
    message = "the prompt has 65 tokens, but the context holds 64, and max_tokens is 9: shorten it, .*context_overflow"
    with pytest.raises(ContextFullError, match=message):
        model.generate(some_ids(65), max_tokens=9)
    with llamac.Engine(model) as engine, pytest.raises(ContextFullError, match=r"has 65 tokens.* holds 64: shorten it"):
        engine.submit(some_ids(65))
    found = model.generate(some_ids(60), max_tokens=99, **GREEDY)
    assert (found.finish_reason, len(found.tokens)) == ("context", 5)


# ---- a prompt without its middle


def test_a_cut_prompt_is_computed_like_any_other(model: llamac.Model) -> None:
    ids = some_ids(200)
    found = model.generate(ids, max_tokens=10, context_overflow="truncate_middle", **GREEDY)
    kept = ids[:27] + ids[-28:]
    assert found.tokens == model.generate(kept, max_tokens=10, **GREEDY).tokens
    assert (found.usage.prompt_tokens, found.usage.truncated_tokens, found.finish_reason) == (55, 145, "length")
    with model.session() as session:
        assert session.generate(ids, max_tokens=10, context_overflow="truncate_middle", **GREEDY).tokens == found.tokens
    with llamac.Engine(model) as engine:
        assert engine.generate([ids], max_tokens=10, context_overflow="truncate_middle", **GREEDY)[0].tokens == (
            found.tokens
        )


def test_a_long_text_is_cut(model: llamac.Model) -> None:
    found = model.generate("The end " * 500, max_tokens=4, context_overflow="truncate_middle", **GREEDY)
    assert found.usage.prompt_tokens == 61
    assert found.usage.prompt_tokens + found.usage.truncated_tokens == len(model.tokenize("The end " * 500))


@pytest.mark.parametrize("mode", ["shift", "truncate_middle"])
def test_a_chat_keeps_the_system_message_and_what_was_said_last(chatting: llamac.Model, mode: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    turns = [{"role": "user", "content": f"Message {i}: " + "hello world " * 8} for i in range(12)]
    with pytest.raises(ContextFullError, match="the prompt has at least"):
        chatting.chat([system, *turns])
    start = chatting.chat_ids([system, {"role": "user", "content": ""}])
    whole = chatting.chat_ids([system, *turns])
    settings: Any = {"max_tokens": 8, "context_overflow": mode, **GREEDY}
    found = chatting.chat([system, *turns], **settings)
    head = next(i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b)
    assert chatting.detokenize(whole[:head]).startswith("system: Be brief.\nuser:")
    kept = whole[:head] + whole[-(193 - head) :]
    assert found.tokens == chatting.generate(kept, max_tokens=8, **GREEDY).tokens
    assert found.usage.prompt_tokens == 193
    with chatting.session() as session, llamac.Engine(chatting) as engine:
        assert session.chat([system, *turns], **settings).tokens == found.tokens
        assert engine.chat([system, *turns], **settings).result(60).tokens == found.tokens


def test_a_template_that_refuses_an_empty_message_keeps_the_first_tokens(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.chat_template = "{% if not messages[0].content %}{{ raise_exception('empty') }}{% endif %}" + TEMPLATE
    with llamac.load(write_model(tmp_path / "chat.bin", made), context=200) as refusing:
        messages = [{"role": "user", "content": "hello world " * 200}]
        whole = refusing.chat_ids(messages)
        found = refusing.chat(messages, max_tokens=8, context_overflow="truncate_middle", **GREEDY)
        assert found.tokens == refusing.generate(whole[:4] + whole[-189:], max_tokens=8, **GREEDY).tokens


# ---- a shifted context


def shifted(model: llamac.Model, ids: list[int], n: int, keep: int, context: int) -> list[int]:
    """Greedy generation by hand: half of what is not kept is dropped whenever the context is full."""
    with model.session(context=context) as session:
        logits, tokens = session.eval(ids), []
        while True:
            tokens.append(int(np.argmax(logits[: model.n_token_ids])))
            if len(tokens) == n:
                return tokens
            if session.length() == context:
                longest = session._core.longest_shift(keep)
                session.shift(keep, keep + min(longest, (context - keep) // 2))
            logits = session.eval([tokens[-1]])


def test_generation_goes_on_past_the_context(model: llamac.Model) -> None:
    ids = some_ids(30)
    for keep, given in ((4, None), (0, 0), (20, 20), (30, 99)):
        found = model.generate(ids, max_tokens=150, context_overflow="shift", context_keep=given, **GREEDY)
        assert found.tokens == shifted(model, ids, 150, keep, 64)
        assert (found.finish_reason, len(found.tokens)) == ("length", 150)
        half = (64 - keep) // 2
        assert found.usage.shifted_tokens == -(-(30 + 149 - 64) // half) * half
    short = model.generate(ids, max_tokens=35, context_overflow="shift", **GREEDY)
    assert short.usage.shifted_tokens == 0
    assert short.tokens == model.generate(ids, max_tokens=35, **GREEDY).tokens
    assert model.generate(ids, max_tokens=36, context_overflow="shift", **GREEDY).usage.shifted_tokens == 30


def test_a_window_limits_what_is_dropped(windowed: llamac.Model) -> None:
    ids = some_ids(1190)
    found = windowed.generate(ids, max_tokens=30, context_overflow="shift", **GREEDY)
    assert found.usage.shifted_tokens == 1201 - 700 - 4  # less than half
    assert found.tokens == shifted(windowed, ids, 30, 4, 1200)


def test_draws_do_not_repeat_after_a_shift(model: llamac.Model) -> None:
    found = model.generate(some_ids(60), max_tokens=90, temperature=1e6, seed=3, context_overflow="shift")
    for period in range(1, 60):
        assert found.tokens[20:40] != found.tokens[20 + period : 40 + period]


def test_a_shifted_session_is_not_reused_as_a_prefix(model: llamac.Model) -> None:
    ids = some_ids(40)
    with model.session() as session:
        first = session.generate(ids, max_tokens=60, context_overflow="shift", **GREEDY)
        again = session.generate(ids, max_tokens=60, context_overflow="shift", **GREEDY)
        assert again.usage.cached_tokens == 4
        assert again.tokens == first.tokens


def test_models_that_cannot_shift_say_so_at_once(tiny_gpt2: Path) -> None:
    with llamac.load(tiny_gpt2) as gpt2, llamac.Engine(gpt2) as engine:
        for call in (gpt2.stream, engine.submit):
            with pytest.raises(UnsupportedError, match="learned positions"):
                call([1, 2, 3], context_overflow="shift")
        found = gpt2.generate(some_ids(900), max_tokens=3, context_overflow="truncate_middle", **GREEDY)
        assert found.usage.prompt_tokens == 598


def test_logits_processors_get_all_tokens_after_a_shift(model: llamac.Model) -> None:
    given: list[list[int]] = []

    def note(ids: Any, logits: Any) -> None:
        given.append(ids.tolist())

    ids = some_ids(30)
    found = model.generate(ids, max_tokens=50, context_overflow="shift", logits_processors=note, **GREEDY)
    expected = [ids + found.tokens[:n] for n in range(50)]
    assert given == expected
    given.clear()
    with llamac.Engine(model) as engine:
        engine.submit(ids, max_tokens=50, context_overflow="shift", logits_processors=note, **GREEDY).result(60)
    assert given == expected


# ---- in an engine


def test_an_engine_gives_each_request_the_tokens_that_it_gets_alone(model: llamac.Model) -> None:
    start = some_ids(40)
    requests: list[tuple[list[int], dict[str, Any]]] = [
        (start, {"max_tokens": 120, "temperature": 0.9, "seed": 5, "context_overflow": "shift"}),
        (start, {"max_tokens": 20, "temperature": 0.9, "seed": 6}),
        (
            [*start, 7],
            {"max_tokens": 90, "temperature": 1.0, "seed": 7, "context_overflow": "shift", "context_keep": 41},
        ),
        (start[:20], {"max_tokens": 150, "temperature": 0.7, "seed": 8, "context_overflow": "shift"}),
        (some_ids(100, seed=2), {"max_tokens": 70, "temperature": 0.7, "seed": 9, "context_overflow": "shift"}),
        (start, {"max_tokens": 120, "temperature": 0.9, "seed": 5, "context_overflow": "shift"}),
    ]
    alone = [model.generate(ids, ignore_eos=True, context=64, **params) for ids, params in requests]
    for settings in ({}, {"max_sequences": 2}, {"kv_tokens": 192}, {"prefix_cache": False}):
        with llamac.Engine(model, **settings) as engine:
            for _ in range(2):  # the second time from the prefix cache
                running = [engine.submit(ids, ignore_eos=True, **params) for ids, params in requests]
                for request, expected in zip(running, alone, strict=True):
                    found = request.result(60)
                    assert found.tokens == expected.tokens
                    assert found.usage.shifted_tokens == expected.usage.shifted_tokens


def test_a_paused_request_repeats_its_shifts(model: llamac.Model) -> None:
    ids = some_ids(50)
    settings: Any = {"max_tokens": 300, "temperature": 0.9, "seed": 4, "ignore_eos": True}
    alone = model.generate(ids, SamplingParams(context_overflow="shift", **settings))
    for prefix_cache in (False, True):
        with llamac.Engine(model, max_sequences=1, prefix_cache=prefix_cache) as engine:
            with held(engine, after=100) as is_held:
                low = engine.submit(ids, SamplingParams(context_overflow="shift", **settings))
                assert is_held.wait(60)
                pieces = [next(low)]
                high = engine.submit(ids, priority=1, max_tokens=3, **GREEDY)
            assert high.result(60).finish_reason == "length"
            assert engine.stats().preemptions == 1
            assert "".join([*pieces, *low]).startswith(alone.text)
            assert low.result(60).tokens == alone.tokens
            assert low.result().usage.shifted_tokens == alone.usage.shifted_tokens > 200
