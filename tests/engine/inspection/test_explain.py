"""What `Model.explain` says about a request agrees with what `generate` and `chat` do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from llamac.text.special_tokens import SpecialTokens


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    made = checkpoint(llama_config())
    made.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with llamac.load(write_model(tmp_path_factory.mktemp("chat") / "model.bin", made)) as model:
        yield model


@pytest.fixture(scope="module")
def stories() -> Iterator[llamac.Model]:
    with llamac.load("stories") as model:
        yield model


def ids_of(found: llamac.Explanation) -> list[int]:
    return [token.id for token in found.tokens]


def test_tokens_and_bytes_are_those_of_the_prompt(model: llamac.Model) -> None:
    found = model.explain("ab ab", generate=False)
    assert ids_of(found) == model.tokenize("ab ab")
    assert [token.bytes for token in found.tokens] == [model.tokenizer.token_bytes(id_) for id_ in ids_of(found)]
    assert [token.is_special for token in found.tokens] == [True] + [False] * (len(found.tokens) - 1)
    assert (found.prompt, found.completion, found.ended_by) == ("ab ab", None, None)


@pytest.mark.parametrize(
    ("prompt", "added", "reason"),
    [
        ("ab", True, "the tokenizer's rules put it before a text"),
        ("<s>ab", False, "the text begins with <s> already"),
        ("", True, "the prompt is empty, and the model needs a first token"),
        ([5, 6], False, "token ids are used unchanged"),
    ],
)
def test_the_reason_for_bos(stories: llamac.Model, prompt: Any, added: bool, reason: str) -> None:
    model = stories
    found = model.explain(prompt, generate=False)
    assert (found.bos_added, found.bos_reason) == (added, reason)
    expected = model.tokenize(prompt) if isinstance(prompt, str) else prompt
    assert ids_of(found) == (expected or [model.special.bos_id])


@pytest.mark.parametrize(
    ("special", "reason"),
    [
        (SpecialTokens(None, False, False, 2, (2,)), "the model has no BOS token"),
        (SpecialTokens(1, False, False, 2, (2,)), "the tokenizer's rules add none"),
    ],
)
def test_the_reason_for_no_bos(tmp_path: Path, special: SpecialTokens, reason: str) -> None:
    made = checkpoint(llama_config())
    assert made.tokenizer is not None
    made.tokenizer = (made.tokenizer[0], special, made.tokenizer[2])
    with llamac.load(write_model(tmp_path / "model.bin", made)) as model:
        found = model.explain("ab", generate=False)
        assert (found.bos_added, found.bos_reason) == (False, reason)
        assert ids_of(found) == model.tokenize("ab")


def test_messages_that_do_not_fit_are_cut_as_in_a_chat(chat_model: llamac.Model) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "ab " * 40}]
    options: dict[str, Any] = {"context_overflow": "truncate_middle", "max_tokens": 4, "temperature": 0}
    found = chat_model.explain(messages, context=64, **options)
    answer = chat_model.chat(messages, context=64, **options)
    assert found.cut is not None
    assert found.cut[0] >= len(chat_model.tokenize("system: Be kind.", add_special=False))  # a chat keeps it
    assert len(found.tokens) - (found.cut[1] - found.cut[0]) == answer.usage.prompt_tokens
    assert found.completion is not None
    assert found.completion.tokens == answer.tokens


@pytest.mark.parametrize("overflow", [None, "error", "truncate_middle"])
def test_strict_tools_guide_as_in_a_chat(overflow: Any) -> None:
    city = {"type": "string", "enum": ["Zz", "Qq"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": schema}}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: dict[str, Any] = {"tools": [tool], "max_tokens": 60, "temperature": 0, "seed": 1}
    with llamac.load("helper") as model:
        said = model.chat(messages, context_overflow=overflow, **options)
        found = model.explain(messages, context_overflow=overflow, **options).completion
    assert found is not None
    assert found.tokens == said.tokens
    assert found.message == said.message


def test_messages_that_do_not_fit_are_explained_and_not_computed(chat_model: llamac.Model) -> None:
    messages = [{"role": "user", "content": "ab " * 2000}]
    found = chat_model.explain(messages, context=64)
    assert found.completion is None
    assert found.error is not None
    assert "but the context holds 64" in found.error


def test_messages_are_explained_as_the_template_renders_them(chat_model: llamac.Model) -> None:
    messages = [{"role": "user", "content": "ab <s>"}]
    found = chat_model.explain(messages, generate=False)
    assert found.prompt == chat_model.chat_prompt(messages)
    assert ids_of(found) == chat_model.chat_ids(messages)
    assert (found.bos_added, found.bos_reason) == (False, "the chat template decides, and it wrote none")


def test_what_a_session_holds_is_cached(model: llamac.Model) -> None:
    with model.session() as session:
        assert model.explain("ab ab", session=session, generate=False).cached == 0
        session.generate("ab ab", max_tokens=1)
        found = model.explain("ab ab abc", session=session, max_tokens=2)
        assert found.completion is not None
        assert found.cached == found.completion.usage.cached_tokens > 0
        assert [token.is_cached for token in found.tokens].count(True) == found.cached
        assert not found.tokens[-1].is_cached
        with pytest.raises(llamac.ArgumentError, match="a session has its own context"):
            model.explain("ab", session=session, context=20)


def test_what_is_cut_is_marked(model: llamac.Model) -> None:
    ids = list(range(5, 45))
    settings: Any = {"context_overflow": "truncate_middle", "context_keep": 3, "max_tokens": 8}
    found = model.explain(ids, context=32, **settings)
    assert found.completion is not None
    assert found.cut is not None
    start, end = found.cut
    assert (start, end - start) == (3, found.completion.usage.truncated_tokens)
    assert [i for i, token in enumerate(found.tokens) if token.is_cut] == list(range(start, end))
    assert len(ids) - (end - start) == found.completion.usage.prompt_tokens
    shifted = model.explain(ids[:20], context=32, context_overflow="shift", context_keep=3, max_tokens=4)
    assert (shifted.cut, shifted.kept) == (None, 3)


def test_a_prompt_that_does_not_fit_is_explained_and_not_computed(model: llamac.Model) -> None:
    found = model.explain(list(range(5, 45)), context=32)
    assert (found.completion, found.context, len(found.tokens)) == (None, 32, 40)
    assert found.error is not None
    assert "the prompt has 40 tokens, but the context holds 32" in found.error


def test_what_ended_the_text_is_named(scripted: Callable[..., llamac.Model]) -> None:
    model = scripted("abcdef")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 2}, "max_tokens: 2 tokens were generated"),
        ({"stop": "d"}, "the stop string 'd'"),
        ({"stop_token_ids": [model.explain("xabc").tokens[-1].id]}, "the token of stop_token_ids"),
    ]
    for settings, expected in cases:
        found = model.explain("x", **settings)
        assert found.ended_by is not None
        assert found.ended_by.startswith(expected)
        assert found.completion is not None
        assert found.completion.tokens == model.generate("x", **settings).tokens


def test_wrong_arguments_are_refused(model: llamac.Model) -> None:
    with pytest.raises(llamac.ArgumentError, match="belong to messages"):
        model.explain("ab", tools=[])
    with pytest.raises(llamac.ArgumentError, match="nothing to explain"):
        model.explain([])
    with pytest.raises(llamac.ArgumentError):
        model.explain([{"role": "user", "content": "x"}])  # no template
    with pytest.raises(llamac.ArgumentTypeError):
        model.explain(3)  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_explains_ids(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.tokenizer = None
    with llamac.load(write_model(tmp_path / "model.bin", made)) as model:
        found = model.explain([5, 6], max_tokens=2)
        assert [token.bytes for token in found.tokens] == [b"", b""]
