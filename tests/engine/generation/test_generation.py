"""Generation: where it ends, what it returns, which prompts and settings it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import llamac
from builders import BYTES, byte_ids, checkpoint, llama_config, some_ids, write_model
from llamac import _core
from llamac.engine.generation.output import StopStrings
from llamac.errors import ArgumentError, ArgumentTypeError, ContextFullError

Script = Callable[..., llamac.Model]
BOS = 1


# ---- greedy generation and its result


def test_greedy_generation_takes_the_largest_logit_each_time(tiny: Path) -> None:
    with llamac.load(tiny) as model:
        prompt = model.tokenize("The hello world")
        result = model.generate("The hello world", max_tokens=40, temperature=0)
        ids, expected = list(prompt), []
        with model.session() as session:
            logits = session.eval(ids)
            for _ in range(40):
                expected.append(int(np.argmax(logits[: model.n_token_ids])))
                logits = session.eval(expected[-1:])
        assert result.tokens == expected
        assert len(set(expected)) > 3
        assert result.text == model.tokenizer.decode(expected, start=False)
        assert (result.finish_reason, result.stopped_by) == ("length", None)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(prompt), 40)
        assert result.timings.prefill > 0
        assert result.timings.decode > 0
        assert model.generate(prompt, max_tokens=40, temperature=0).tokens == expected  # ids are used unchanged


def test_ids_without_a_token_are_never_generated(tmp_path: Path) -> None:
    ones = np.zeros((301, 48), np.float32)
    ones[290] = 1  # the row of an id without a token
    config = llama_config()
    weights = {"output.weight": ones, "output_norm.weight": np.ones(48, np.float32)}
    path = write_model(tmp_path / "padded.bin", checkpoint(config, weights))
    with llamac.load(path) as model:
        rows = model.logits(some_ids(20))
        assert (np.argmax(np.abs(rows), axis=1) == 290).all()
        for seed in range(5):
            tokens = model.generate("he", max_tokens=30, temperature=1.0, seed=seed).tokens
            assert max(tokens) < model.n_token_ids == 284


def test_max_tokens_counts_new_tokens_only(scripted: Script) -> None:
    model = scripted("abcdefghijklmnop")
    for prompt in ([BOS], [BOS, 5, 6]):
        result = model.generate(prompt, max_tokens=4)
        assert len(result.tokens) == 4
        assert (result.finish_reason, result.usage.completion_tokens) == ("length", 4)
    assert result.text == "cdef"  # the script from position 2 on
    assert model.generate([BOS], max_tokens=1).text == "a"


def test_the_end_of_the_context_ends_the_generation(scripted: Script) -> None:
    model = scripted("abcdefghijklmnop")
    result = model.generate([BOS, 5, 6], context=8)
    assert (result.text, result.finish_reason, result.stopped_by) == ("cdefgh", "context", None)
    assert result.usage.prompt_tokens + result.usage.completion_tokens == 9  # the last token needs no position
    assert model.generate([BOS] * 8, context=8).text == "h"
    assert model.generate([BOS, 5, 6], context=8, max_tokens=6).finish_reason == "length"
    with pytest.raises(ContextFullError, match="the prompt has 9 tokens, but the context holds 8"):
        model.generate([BOS] * 9, context=8)
    with pytest.raises(ContextFullError, match="the prompt has 65 tokens, but the context holds 64"):
        model.stream([BOS] * 65)


def test_the_context_given_to_load_applies_to_generation(scripted: Script) -> None:
    path = scripted("abcdefghijklmnop").file.path
    with llamac.load(path, context=8) as model:
        assert model.generate([BOS, 5, 6]).text == "cdefgh"
        with pytest.raises(ContextFullError, match="the prompt has 9 tokens, but the context holds 8"):
            model.generate([BOS] * 9)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(scripted: Script) -> None:
    model = scripted([*byte_ids("abc"), 2, *byte_ids("d")], stop_ids=(2, 7))
    result = model.generate([BOS])
    assert (result.text, result.tokens) == ("abc", byte_ids("abc"))
    assert (result.finish_reason, result.stopped_by, result.usage.completion_tokens) == ("stop", 2, 3)
    result = model.generate([BOS, 3, 3, 3])
    assert (result.text, result.tokens, result.finish_reason) == ("", [], "stop")


def test_an_incomplete_character_at_the_end_is_omitted_from_the_text(scripted: Script) -> None:
    text = "aé東🙂z".encode()
    model = scripted(text.decode())
    for count in range(1, len(text) + 1):
        result = model.generate([BOS], max_tokens=count)
        assert result.text == text[:count].decode("utf-8", "ignore")
        assert result.tokens == byte_ids(text[:count])
    broken = scripted([BYTES + 0xC3, BYTES + ord("x"), BYTES + 0x80])
    assert broken.generate([BOS], max_tokens=3).text == "\ufffdx\ufffd"  # invalid bytes become U+FFFD


def test_the_space_of_the_first_word_is_dropped_at_the_start_only(scripted: Script) -> None:
    space = byte_ids(" ")
    model = scripted([*space, *byte_ids("a"), *space, *byte_ids("b")])
    assert model.generate([BOS], max_tokens=4).text == "a b"
    assert model.generate([BOS, BOS, 9], max_tokens=2).text == " b"


# ---- stop strings


@pytest.mark.parametrize(
    ("stop", "text", "by"),
    [
        ("gh", "abcdef", "gh"),
        (["gh"], "abcdef", "gh"),
        (["zz", "gh", "hi"], "abcdef", "gh"),
        (["hi", "defgh"], "abc", "defgh"),
        (["a"], "", "a"),
        (["efz", "bcz", "p"], "abcdefghijklmno", "p"),
        (["ghz", "p!"], "abcdefghijklmnop", None),
        ((), "abcdefghijklmnop", None),
        (None, "abcdefghijklmnop", None),
    ],
)
def test_the_earliest_stop_string_ends_the_text(scripted: Script, stop: Any, text: str, by: str | None) -> None:
    model = scripted("abcdefghijklmnop")
    result = model.generate([BOS], stop=stop, max_tokens=16)
    assert (result.text, result.stopped_by) == (text, by)
    assert result.finish_reason == ("stop" if by else "length")
    assert result.tokens[: len(text)] == byte_ids(text)


def test_stop_strings_are_found_across_tokens_and_inside_one(scripted: Script) -> None:
    words = [281, 282, 283]  # any words of the vocabulary
    model = scripted([*words, *byte_ids("!?")])
    whole = model.generate([BOS], max_tokens=5).text
    assert whole == model.tokenizer.decode(words, start=False) + "!?"
    for first in range(len(whole)):
        for last in range(first + 1, len(whole) + 1):
            stop = whole[first:last]
            result = model.generate([BOS], max_tokens=5, stop=stop)
            assert (result.text, result.stopped_by) == (whole[: whole.index(stop)], stop)


def test_a_stop_token_releases_held_back_text(scripted: Script) -> None:
    model = scripted([*byte_ids("abc"), 2], stop_ids=(2,))
    result = model.generate([BOS], stop="bcd")
    assert (result.text, result.stopped_by) == ("abc", 2)


def test_the_search_for_stop_strings_neither_loses_nor_repeats_text() -> None:
    text = "aabaabaaabab"
    for stops in (["aab!"], ["ab!", "aba!"], ["b!", "aabaabaab"], ["baaab"]):
        cut = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        for size in (1, 2, 3, 5):
            search = StopStrings(stops)
            shown = ""
            for at in range(0, len(text), size):
                shown += search.push(text[at : at + size])
                if search.found:
                    break
            shown += "" if search.found else search.flush()
            assert shown == text[:cut]


# ---- prompts


def test_an_empty_prompt_becomes_bos(scripted: Script, tiny_llama: Path) -> None:
    model = scripted("abcd")
    assert model.generate("", max_tokens=2).text == "ab"
    assert model.generate([], max_tokens=2).usage.prompt_tokens == 1
    with llamac.load(tiny_llama) as other:
        found = other.generate([], max_tokens=9, temperature=0).tokens
        assert found == other.generate([BOS], max_tokens=9, temperature=0).tokens


def test_a_model_without_a_tokenizer_needs_ids(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.tokenizer = None
    with llamac.load(write_model(tmp_path / "bare.bin", made)) as model:
        with pytest.raises(ArgumentError, match="prompt is empty, and the model has no BOS"):
            model.generate([])
        for use in (
            lambda: model.generate("text"),
            lambda: model.tokenize("text"),
            lambda: model.detokenize([5]),
            lambda: model.tokenizer,
            lambda: model.generate([5], stop="a"),
        ):
            with pytest.raises(ArgumentError, match="tokenizer"):
                use()
        result = model.generate([5, 6], max_tokens=7)
        assert (len(result.tokens), result.text) == (7, "")
        assert list(model.stream([5, 6], max_tokens=7)) == []


def test_prompts_get_bos_once(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        ids = model.tokenize("hello")
        assert ids[0] == BOS != ids[1]
        assert model.tokenize("hello", add_special=False) == ids[1:]
        assert model.detokenize(ids) == "hello"
        assert model.generate("hello", max_tokens=1).usage.prompt_tokens == len(ids)
        found = model.generate(np.array(ids), max_tokens=3, temperature=0)  # type: ignore[arg-type]
        assert found.tokens == model.generate("hello", max_tokens=3, temperature=0).tokens


@pytest.mark.parametrize("prompt", [[1, 301], [-1], [1.5], b"bytes", None, 7, [[1]]])
def test_malformed_prompts_are_refused(tiny_llama: Path, prompt: Any) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        for owner in (model, session):
            with pytest.raises(ArgumentError):
                owner.generate(prompt, max_tokens=1)


def test_bools_are_not_token_ids(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        for use in (model.generate, model.stream, model.logits, model.detokenize):
            with pytest.raises(ArgumentError, match="32-bit integers: 'bool' object"):
                use([1, True])
        with pytest.raises(ArgumentError, match="prompt must be a str or token ids, not a list of str"):
            model.generate(["a", "b"], max_tokens=1)  # type: ignore[list-item]


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0"),
        ({"temperature": math.nan}, "temperature is nan, expected 0"),
        ({"temperature": math.inf}, "temperature is inf, expected 0"),
        ({"temperature": 3e38}, r"temperature is 3e\+38, expected 0 \(greedy\) or 1e-37 to 1e\+06"),
        ({"temperature": 1e-300}, r"temperature is 1e-300, expected 0 \(greedy\) or 1e-37 to 1e\+06"),
        ({"temperature": 10**400}, "temperature is too large"),
        ({"top_p": 0.0}, "top_p is 0, expected more than 0"),
        ({"top_p": 1.01}, "top_p is 1.01, expected more than 0 and at most 1"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2**31}, r"top_k is 2147483648, expected 0 \(off\) to 2147483647"),
        ({"top_k": 2**40}, r"top_k is 1099511627776, expected 0 \(off\) to 2147483647"),
        ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["a", ""]}, "expected strings that are not empty"),
        ({"context": 0}, "context is 0, expected 1 to 600"),
        ({"context": 601}, "context is 601, expected 1 to 600"),
        ({"context": 2**70}, "context is 1180591620717411303424, expected 1 to 600"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused(tiny_llama: Path, settings: dict[str, Any], message: str) -> None:
    with llamac.load(tiny_llama) as model:
        for make in (model.generate, model.stream):
            with pytest.raises(ArgumentError, match=message) as error:
                make("a", **settings)
            assert not isinstance(error.value, TypeError)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "1"},
        {"top_p": "0.5"},
        {"min_p": [0.5]},
        {"min_p": True},
        {"max_tokens": 2.5},
        {"max_tokens": "3"},
        {"max_tokens": True},
        {"top_k": 2.5},
        {"seed": 1.5},
        {"seed": "x"},
        {"stop": 5},
        {"stop": b"ab"},
        {"stop": ["a", 3]},
        {"stop": {"a": 1}},
        {"context": 2.5},
        {"context": "3"},
        {"context_overflow": 3},
        {"logit_bias": 3},
        {"logit_bias": [(1, 2.0, 3)]},
        {"guide": "[a-z]+"},
    ],
    ids=str,
)
def test_settings_of_wrong_types_are_refused_by_name(tiny_llama: Path, settings: dict[str, Any]) -> None:
    (name,) = settings
    with llamac.load(tiny_llama) as model:
        for make in (model.generate, model.stream):
            with pytest.raises(ArgumentTypeError, match=f"{name} must be ") as error:
                make("a", **settings)
            assert isinstance(error.value, TypeError)
            assert isinstance(error.value, ArgumentError)


def test_unknown_settings_are_refused_by_name(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, model.session() as session:
        for owner in (model, session):
            for name, hint in {
                "echo": ": expected one of max_tokens, ",
                "max_token": "; did you mean 'max_tokens'",
                "max_new_tokens": "; did you mean 'max_tokens'",
                "num_predict": "; did you mean 'max_tokens'",
                "repeat_penalty": "; did you mean 'repetition_penalty'",
            }.items():
                settings = {name: 5}
                for make in (owner.generate, owner.stream):
                    with pytest.raises(TypeError, match=f"unexpected argument '{name}'{hint}"):
                        cast("Any", make)("a", **settings)


def test_a_positional_number_is_refused_as_parameters(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model, pytest.raises(ArgumentTypeError, match="params must be SamplingParams"):
        model.generate("a", 64)  # type: ignore[arg-type]


def test_numpy_numbers_are_accepted_as_settings(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        plain = model.generate("a", max_tokens=9, temperature=0.5, top_k=5, seed=3)
        settings: Any = {"max_tokens": np.int64(9), "temperature": np.float32(0.5), "top_k": np.uint8(5)}
        assert model.generate("a", **settings, seed=cast("int", np.int32(3))).tokens == plain.tokens


def test_a_stream_checks_its_request_before_the_first_piece(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama) as model:
        before = _core.live_objects()
        for ids in ([-1], [1, 301], [1, 2**31 - 1]):
            with pytest.raises(ArgumentError, match=f"the prompt has the token id {ids[-1]}, expected 0 to 300"):
                model.stream(ids)
        for prompt in (None, 5, b"a", [1.5], ["a"]):
            with pytest.raises(ArgumentTypeError):
                model.stream(cast("Any", prompt))
        with pytest.raises(ContextFullError, match="the prompt has 601 tokens, but the context holds 600"):
            model.stream([1] * 601, max_tokens=1)
        assert _core.live_objects() == before
