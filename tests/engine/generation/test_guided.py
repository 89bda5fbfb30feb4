"""Guided generation: the same tokens in every API and batch; limits, stops, penalties; errors of one request."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_engines import held

import llamac
from builders import checkpoint, llama_config, write_model
from llamac import ArgumentError, UnsupportedError
from llamac.engine.sampling.params import resolve
from llamac.engine.sampling.sampler import Sampler, draw_rows
from llamac.guided import constraint, vocabulary
from processes import TIMEOUT

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDES = [
    llamac.Json(PERSON),
    llamac.Regex(r"[A-Z][a-z]+ the [a-z]+, \d\d years"),
    llamac.Choice(["yes, of course", "no", "never"]),
    llamac.Grammar('root ::= "(" (root | [a-z]+) ")"'),
]


@pytest.fixture(scope="module", params=["stories", "stories-gpt2"])
def stories(request: pytest.FixtureRequest) -> Iterator[llamac.Model]:
    with llamac.load(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def bpe() -> Iterator[llamac.Model]:
    with llamac.load("stories-gpt2") as model:
        yield model


# ---- one text in every API


def by_steps(model: llamac.Model, prompt: str, n: int, **options: Any) -> list[int]:
    """The tokens of a loop with Session.sample."""
    tokens: list[int] = []
    with model.session() as session:
        session.prefill(model.tokenize(prompt))
        while len(tokens) < n and (token := session.sample(**options)) not in model.special.stop_ids:
            tokens.append(token)
            session.step(token)
    return tokens


def test_sessions_engines_and_batches_give_the_same_tokens(stories: llamac.Model) -> None:
    prompts = ["Once upon a time", "The dog said:", "Once upon a time there", "Lily"]
    alone = [
        stories.generate(prompt, guide=guide, max_tokens=50, seed=i)
        for i, (prompt, guide) in enumerate(zip(prompts, GUIDES, strict=True))
    ]
    assert [completion.finish_reason for completion in alone] == ["stop"] * 4
    with llamac.Engine(stories, max_sequences=3) as engine:
        requests = [
            engine.submit(prompt, guide=guide, max_tokens=50, seed=i)
            for i, (prompt, guide) in enumerate(zip(prompts, GUIDES, strict=True))
        ]
        free = engine.submit("Once upon a time", max_tokens=30, seed=9)
        assert [request.result(TIMEOUT).tokens for request in requests] == [found.tokens for found in alone]
        assert [request.result().text for request in requests] == [found.text for found in alone]
        assert free.result(TIMEOUT).tokens == stories.generate("Once upon a time", max_tokens=30, seed=9).tokens
    for i in (1, 2):
        assert by_steps(stories, prompts[i], len(alone[i].tokens), guide=GUIDES[i], seed=i) == alone[i].tokens
    with stories.session() as session:
        pieces = list(session.stream(prompts[1], guide=GUIDES[1], max_tokens=50, seed=1))
    assert "".join(pieces) == alone[1].text


def test_an_async_engine_gives_them_too(bpe: llamac.Model) -> None:
    async def run() -> str:
        async with llamac.AsyncEngine(bpe, max_sequences=2) as engine:
            completion = await engine.generate("Once", guide=GUIDES[2], seed=3)
            other = await engine.generate("Once", llamac.SamplingParams(guide=GUIDES[2], seed=3))
            assert completion.tokens == other.tokens
            return completion.text

    assert asyncio.run(run()) == bpe.generate("Once", guide=GUIDES[2], seed=3).text


def test_preempted_requests_keep_their_guide(bpe: llamac.Model) -> None:
    """A budget of little more than one context makes requests pause and resume."""
    guide = llamac.Regex(r"([a-z]+ ){50}\.")
    alone = [bpe.generate("Once upon", guide=guide, max_tokens=180, seed=seed).tokens for seed in range(4)]
    with llamac.Engine(bpe, max_sequences=4, context=192, kv_tokens=256, prefix_cache=False) as engine:
        with held(engine):
            requests = [engine.submit("Once upon", guide=guide, max_tokens=180, seed=seed) for seed in range(4)]
        assert [request.result(TIMEOUT).tokens for request in requests] == alone
        assert engine.stats().preemptions > 0


def test_chats_are_guided(tmp_path: Path) -> None:
    path = write_model(tmp_path / "chat.bin", checkpoint(llama_config()), chat_templates={"default": "{{ messages }}"})
    with llamac.load(path) as model, llamac.Engine(model) as engine:
        messages = [{"role": "user", "content": "Yes?"}]
        found = model.chat(messages, guide=GUIDES[2], max_tokens=40)
        assert found.text in ("yes, of course", "no", "never")
        assert (
            engine.chat(messages, guide=GUIDES[2], max_tokens=40, seed=found.seed).result(TIMEOUT).tokens
            == found.tokens
        )


def test_fewer_passes_than_tokens_where_text_is_forced(bpe: llamac.Model) -> None:
    guide = llamac.Choice([" Once upon a time there was a little girl named Lily.", "x"])
    with llamac.Engine(bpe) as engine:
        found = engine.generate(
            "The story:", guide=guide, temperature=0, logit_bias={bpe.tokenizer.encode("x")[0]: -50}
        )
        assert len(found.tokens) > 8
        assert engine.stats().steps <= 3


NUMBER = llamac.Json(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def helper() -> Iterator[llamac.Model]:
    with llamac.load("helper") as model:
        yield model


@pytest.mark.parametrize("text", ["Hi", "Hello!", "Thanks!"])
def test_a_guide_begins_no_reasoning_that_the_model_would_not_begin(text: str, helper: llamac.Model) -> None:
    chat = [{"role": "user", "content": text}]
    assert not helper.chat(chat, max_tokens=20).text.startswith("<think>")
    found = helper.chat(chat, guide=NUMBER, max_tokens=40)
    assert list(json.loads(found.text)) == ["a"]
    with helper.session() as session:
        session.prefill(helper.chat_ids(chat))
        assert session.sample(guide=NUMBER) == found.tokens[0]
    with llamac.Engine(helper) as engine:
        assert engine.chat(chat, guide=NUMBER, max_tokens=40).result(TIMEOUT).tokens == found.tokens
        beams = engine.chat(chat, guide=NUMBER, max_tokens=40, beam_width=2).result(TIMEOUT)
    assert list(json.loads(beams.text)) == ["a"]
    assert helper.chat(chat, guide=NUMBER, max_tokens=40, beam_width=2).tokens == beams.tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "mirostat_tau": 3.0},
        {"temperature": 1.0, "logits_processors": lambda ids, logits: None},
    ],
)
def test_a_guided_answer_reasons_where_the_model_would(options: dict[str, Any], helper: llamac.Model) -> None:
    opening = helper.tokenizer.id_of("<think>")
    assert opening is not None
    chat = [{"role": "user", "content": "Hi"}]
    reasons = []
    with llamac.Engine(helper) as engine:
        for seed in range(12):
            for bias in (5, 6, 30):
                same = {"seed": seed, "logit_bias": {opening: bias}, **options}
                free = helper.chat(chat, max_tokens=2, **same)
                found = helper.chat(chat, guide=NUMBER, max_tokens=50, reasoning_budget=4, **same)
                assert found.message is not None
                assert (found.message.reasoning is not None) == (free.tokens[0] == opening)
                assert list(json.loads(found.message.content or "")) == ["a"]
                if free.tokens[0] == opening:
                    assert found.tokens[:2] == free.tokens
                again = engine.chat(chat, guide=NUMBER, max_tokens=50, reasoning_budget=4, **same)
                assert again.result(TIMEOUT).tokens == found.tokens
                reasons.append(found.message.reasoning is not None)
    assert {*reasons} == {True, False}


def test_an_answer_without_reasoning_has_the_distribution_of_the_mask(helper: llamac.Model) -> None:
    """The random numbers that lead to the tag, half of all, change nothing about the other tokens."""
    opening = helper.tokenizer.id_of("<think>")
    letters = [token for letter in "abcd" if (token := helper.tokenizer.id_of(letter)) is not None]
    assert opening is not None
    assert len(letters) == 4
    row = np.full((1, helper.n_token_ids), -30, np.float32)
    row[0, letters], row[0, opening] = 0, math.log(4)
    guide, drawn = llamac.Regex("[abcd]"), []
    for seed in range(2000):
        params = resolve(llamac.SamplingParams(guide=guide, temperature=1, seed=seed), llamac.SamplingParams())
        drawn += draw_rows([Sampler(helper, params, [1])], row, row.size, [[1]], [1])
    counts = Counter(drawn)
    assert set(counts) == {opening, *letters}
    assert abs(counts[opening] - 1000) < 5 * math.sqrt(500)
    for letter in letters:
        assert abs(counts[letter] - 250) < 5 * math.sqrt(220)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_processors_see_the_mask_where_a_model_does_not_begin_to_reason(
    temperature: float, helper: llamac.Model
) -> None:
    rows: list[Any] = []

    def best(ids: Any, row: Any) -> None:
        rows.append(row.copy())
        row[row < np.partition(row, -5)[-5]] = -np.inf

    chat = [{"role": "user", "content": "Hi"}]
    options: dict[str, Any] = {"guide": NUMBER, "temperature": temperature, "seed": 1, "logits_processors": best}
    found = helper.chat(chat, max_tokens=40, **options)
    assert list(json.loads(found.text)) == ["a"]
    assert np.isfinite(rows[0]).all()  # of the draw without the guide
    guided = constraint.Constraint(NUMBER, helper.tokenizer, helper.special.stop_ids, helper.chat_ids(chat))
    allowed = np.unpackbits(np.frombuffer(guided.mask() or b"", np.uint8), count=rows[1].size, bitorder="little")
    assert np.array_equal(rows[1], np.where(allowed, rows[0], -np.inf))
    with llamac.Engine(helper) as engine:
        assert engine.chat(chat, max_tokens=40, **options).result(TIMEOUT).tokens == found.tokens


@pytest.mark.parametrize("options", [{}, {"reasoning_effort": "high"}, {"reasoning_effort": "none"}])
@pytest.mark.parametrize("forced", [False, True])
def test_answers_that_a_model_would_end_within_its_reasoning_match(options: dict[str, Any], forced: bool) -> None:
    properties = {"a": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "description": "Add", "parameters": schema}}
    more: dict[str, Any] = {"tools": [tool], "tool_choice": "required"} if forced else {"guide": llamac.Json(schema)}
    with llamac.load("helper") as model:
        for text in ("Hello", "Thanks!"):
            chat = [{"role": "user", "content": text}]
            found = model.chat(chat, template_options=options, temperature=0, max_tokens=200, **more)
            assert found.finish_reason == "stop"
            assert found.message is not None
            if forced:
                assert found.message.tool_calls[0].parsed in ({"a": 1}, {"a": 2})
            else:
                assert json.loads(found.message.content or "") in ({"a": 1}, {"a": 2})
            if options.get("reasoning_effort") == "none":
                assert found.message.reasoning is None


def test_a_reasoning_budget_of_the_request_counts_where_options_turn_reasoning_off() -> None:
    chat = [{"role": "user", "content": "Think: is a whale a fish?"}]
    off = {"reasoning_effort": "none"}
    with llamac.load("helper") as model:
        guide = llamac.Json({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
        found = model.chat(chat, template_options=off, guide=guide, reasoning_budget=3, temperature=0, max_tokens=40)
    assert found.text.startswith("<think>")


def test_a_slow_guide_holds_up_no_other_request(bpe: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bpe.generate("Once", guide=GUIDES[1], max_tokens=30, seed=1).tokens
    released = threading.Event()
    workers = constraint._workers()

    class Slow:
        def submit(self, function: Any) -> Future[None]:
            return workers.submit(lambda: (released.wait(TIMEOUT), function())[1])

    monkeypatch.setattr(constraint, "_workers", Slow)
    with llamac.Engine(bpe, max_sequences=2) as engine:
        guided = engine.submit("Once", guide=GUIDES[1], max_tokens=30, seed=1)
        cancelled = engine.submit("Once", guide=GUIDES[1], max_tokens=30, seed=2)
        free = engine.submit("Once", max_tokens=20, seed=1)
        cancelled.cancel()
        assert cancelled.result(TIMEOUT).finish_reason == "cancelled"
        assert free.result(TIMEOUT).finish_reason == "length"
        assert not guided.done
        released.set()
        assert guided.result(TIMEOUT).tokens == expected


# ---- ends


def test_texts_are_completed_within_max_tokens(stories: llamac.Model) -> None:
    for seed in range(10):
        found = stories.generate("Once", guide=GUIDES[0], max_tokens=30, seed=seed)
        assert found.finish_reason == "stop"
        assert len(found.tokens) <= 30
        assert list(json.loads(found.text)) == ["name", "age"]


def test_a_text_that_cannot_be_completed_ends_with_length(stories: llamac.Model) -> None:
    found = stories.generate("Once", guide=GUIDES[0], max_tokens=4, seed=1)
    assert (found.finish_reason, len(found.tokens)) == ("length", 4)


def test_texts_are_completed_within_the_context(bpe: llamac.Model) -> None:
    with bpe.session(context=40) as session:
        found = session.generate("Once upon a time", guide=GUIDES[0], seed=1)
    assert found.finish_reason == "stop"
    json.loads(found.text)


def test_a_text_ends_where_nothing_can_follow(bpe: llamac.Model) -> None:
    found = bpe.generate("Once", guide=llamac.Regex("[ab]{5}"), seed=1)
    assert len(found.text) == 5
    assert (found.finish_reason, found.stopped_by) == ("stop", None)


def test_a_stop_token_ends_a_complete_text_only(bpe: llamac.Model) -> None:
    bias = dict.fromkeys(bpe.special.stop_ids, 100.0)
    found = bpe.generate("Once", guide=llamac.Regex("a[ab]*"), logit_bias=bias)
    assert (found.text, found.finish_reason, found.stopped_by) == ("a", "stop", bpe.special.stop_ids[0])
    found = bpe.generate("Once", guide=llamac.Regex("a[ab]*"), logit_bias=bias, ignore_eos=True, max_tokens=9, seed=1)
    assert len(found.tokens) == 9
    found = bpe.generate("Once", guide=llamac.Regex("a[ab]*"), logit_bias=bias, min_tokens=5, max_tokens=9, seed=1)
    assert len(found.tokens) == 5


def test_stop_strings_end_a_guided_text(bpe: llamac.Model) -> None:
    found = bpe.generate("Once", guide=llamac.Choice(["Hello. World."]), stop=". W")
    assert (found.text, found.finish_reason, found.stopped_by) == ("Hello", "stop", ". W")
    found = bpe.generate("Once", guide=llamac.Regex("[a-m]+;[n-z]+"), stop=";", max_tokens=60, seed=1)
    assert found.stopped_by == ";"


def test_a_space_that_the_guide_asks_for_is_there(stories: llamac.Model) -> None:
    assert stories.generate("", guide=llamac.Choice([" yes"])).text == " yes"
    assert stories.generate("", guide=llamac.Choice(["yes"])).text == "yes"


# ---- other parameters


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"top_k": 3, "temperature": 2.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"dry_multiplier": 1.0},
        {"mirostat_tau": 3.0},
        {"xtc_probability": 0.5, "typical_p": 0.9},
        {"banned_strings": ["e", "'"]},
        {"logits_processors": lambda ids, logits: np.copyto(logits, -logits)},
    ],
)
def test_guides_work_with_every_parameter(options: dict[str, Any], stories: llamac.Model) -> None:
    guide = llamac.Regex(r"[a-z' ]{4,30}\.")
    found = stories.generate("Once", guide=guide, seed=5, max_tokens=400, **options)
    assert found.text.endswith(".")
    if "banned_strings" in options:
        assert not set("e'") & set(found.text)
    with llamac.Engine(stories) as engine:
        assert engine.generate("Once", guide=guide, seed=5, max_tokens=400, **options).tokens == found.tokens


def test_a_processor_cannot_bring_back_what_the_guide_excludes(bpe: llamac.Model) -> None:
    def flatten(ids: Any, logits: Any) -> None:
        logits[:] = 0

    found = bpe.generate("Once", guide=llamac.Regex("[xyz]{8}"), logits_processors=flatten, seed=1)
    assert set(found.text) <= set("xyz")


def test_text_that_is_forced_and_banned_is_an_error(bpe: llamac.Model) -> None:
    with pytest.raises(ArgumentError, match="after the bias, penalties and bans of the request"):
        bpe.generate("Once", guide=llamac.Choice(["Hello."]), banned_strings="ell")
    with llamac.Engine(bpe) as engine:
        failing = engine.submit("Once", guide=llamac.Choice(["Hello."]), banned_strings="ell")
        other = engine.submit("Once", max_tokens=5, seed=1)
        with pytest.raises(ArgumentError, match="bans of the request"):
            failing.result(TIMEOUT)
        assert len(other.result(TIMEOUT).tokens) == 5


@pytest.mark.parametrize("name", ["banned_tokens", "logit_bias", "stop_token_ids"])
def test_a_banned_token_is_not_forced(name: str, stories: llamac.Model) -> None:
    guide = llamac.Choice(["hello"])
    first = stories.generate("Say ", guide=guide).tokens[0]
    options: dict[str, dict[str, Any]] = {
        "banned_tokens": {"banned_tokens": [first]},
        "logit_bias": {"logit_bias": {first: -math.inf}},
        "stop_token_ids": {"stop_token_ids": [first], "min_tokens": 3},
    }
    with pytest.raises(ArgumentError, match="no token can be chosen"):
        stories.generate("Say ", guide=guide, **options[name])


@pytest.mark.parametrize("name", ["banned_strings", "banned_tokens", "logit_bias"])
def test_a_completion_has_nothing_that_is_banned(name: str, stories: llamac.Model) -> None:
    dots = [token for token in range(stories.n_token_ids) if b"." in stories.tokenizer.token_bytes(token)]
    options: dict[str, Any] = {
        "banned_strings": ["."],
        "banned_tokens": dots,
        "logit_bias": dict.fromkeys(dots, -math.inf),
    }
    guide = llamac.Regex("[a-z ]{3,60}[.!]")
    for most in (6, 12, 30):
        asked: dict[str, Any] = {name: options[name], "max_tokens": most, "temperature": 0}
        found = stories.generate("Once upon a time", guide=guide, **asked)
        assert found.text.endswith("!")


def test_a_completion_does_not_complete_a_banned_string(stories: llamac.Model) -> None:
    guide = llamac.Regex("[ab]{2,60}[.!]")
    asked: dict[str, Any] = {"guide": guide, "max_tokens": 6, "temperature": 0}
    assert stories.generate("Once", **asked).text.endswith(".")
    assert "." not in stories.generate("Once", banned_strings=["a.", "b."], **asked).text


def test_an_error_of_a_guide_ends_its_own_request(bpe: llamac.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of llguidance are reached in the middle of a generation, in the worker or with a token."""
    for name in ("_compute_mask", "accept"):
        original = getattr(constraint.Constraint, name)
        calls: list[str] = []

        def limited(
            self: Any, *arguments: Any, original: Any = original, calls: list[Any] = calls, name: str = name
        ) -> Any:
            calls.append(name)
            if len(calls) == 4:
                raise UnsupportedError("the guide's grammar is too complex")
            return original(self, *arguments)

        with monkeypatch.context() as patch, llamac.Engine(bpe) as engine:
            patch.setattr(constraint.Constraint, name, limited)
            failing = engine.submit("Once", guide=llamac.Regex("[a-z]{30}"), seed=1)
            with pytest.raises(UnsupportedError, match="too complex"):
                failing.result(TIMEOUT)
            calls.clear()
            with pytest.raises(UnsupportedError, match="too complex"):
                bpe.generate("Once", guide=llamac.Regex("[a-z]{30}"), seed=1)
            assert len(engine.submit("Once", max_tokens=5).result(TIMEOUT).tokens) == 5


def test_a_guide_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write_model(tmp_path / "bare.bin", replace(checkpoint(llama_config()), tokenizer=None))
    with (
        llamac.load(path) as model,
        pytest.raises(ArgumentError, match="guide needs a tokenizer, and this model has none"),
    ):
        model.generate([1], guide=GUIDES[0])


def test_prepared_guides_are_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoint(llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn=20, context=64))
    with llamac.load(write_model(tmp_path / "model.bin", made)) as model:
        before = model.memory().tokenizer
        model.prepare_guides()
        assert model.memory().tokenizer >= before

        def build(*arguments: object) -> None:
            raise AssertionError("the vocabulary is read a second time")

        monkeypatch.setattr(vocabulary.Vocabulary, "__init__", build)
        model.prepare_guides()
        assert model.generate("a", guide=llamac.Choice(["yes", "no"])).text in ("yes", "no")


def test_guides_cannot_be_prepared_without_a_tokenizer(tmp_path: Path) -> None:
    made = checkpoint(llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn=20, context=64))
    with (
        llamac.load(write_model(tmp_path / "model.bin", replace(made, tokenizer=None))) as model,
        pytest.raises(ArgumentError, match="this model has no tokenizer"),
    ):
        model.prepare_guides()
