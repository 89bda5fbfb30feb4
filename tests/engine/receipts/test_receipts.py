"""Receipts: what they record, their schema, and that a replay repeats a result or says what has changed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import PREFIX, small_adapter

import llamac
from builders import checkpoint, llama_config, write_model
from llamac.engine.receipts.receipt import read_receipt
from llamac.engine.receipts.replay import replay_on
from llamac.engine.sampling.params import ResolvedParams

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_k": 40, "seed": 2**64 - 1, "min_p": 0.01}


def receipt_of(model: llamac.Model, prompt: Any = "ab", **settings: Any) -> llamac.Receipt:
    receipt = model.generate(prompt, **{**SETTINGS, **settings}, receipt=True).receipt
    assert receipt is not None
    return receipt


def adapter_tensors(path: Path) -> dict[str, Any]:
    """A and B of rank 2 for the query matrix of the first layer."""
    with llamac.load(path) as model:
        dim = model.config["dim"]
    numbers, name = np.random.default_rng(3), f"{PREFIX}model.layers.0.self_attn.q_proj"
    return {
        f"{name}.lora_A.weight": numbers.standard_normal((2, dim)).astype(np.float32),
        f"{name}.lora_B.weight": numbers.standard_normal((dim, 2)).astype(np.float32),
    }


def through_json(receipt: llamac.Receipt, **changes: Any) -> llamac.Receipt:
    return read_receipt({**json.loads(receipt.to_json()), **changes})


def test_only_a_request_for_a_receipt_gets_one(model: llamac.Model) -> None:
    assert model.generate("ab", max_tokens=2).receipt is None
    assert receipt_of(model).tokens


def test_a_receipt_survives_json_unchanged(model: llamac.Model, tmp_path: Path) -> None:
    receipt = receipt_of(model, logit_bias={3: 0.1, 7: float("-inf")}, stop=["\n", "é"], dry_multiplier=0.8)
    assert through_json(receipt) == receipt
    receipt.save(tmp_path / "receipt.json")
    assert read_receipt(tmp_path / "receipt.json") == receipt
    (tmp_path / "receipt.json").read_text("ascii")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"logit_bias": {3: 2.5, 7: float("-inf")}, "repetition_penalty": 1.3, "banned_strings": ["q"]},
        {"mirostat_tau": 3.0},
        {"stop": ["a", "b", "c", "e"], "min_tokens": 3},
        {"max_tokens": None},
    ],
    ids=["sampled", "greedy", "bias and penalties", "mirostat", "stop strings", "to the end"],
)
def test_a_replay_repeats_a_result(model: llamac.Model, settings: dict[str, Any]) -> None:
    receipt = receipt_of(model, **settings)
    replay = replay_on(model, through_json(receipt))
    assert (replay.identical, replay.changes, replay.position) == (True, (), None)
    assert replay.completion is not None
    assert tuple(replay.completion.tokens) == receipt.tokens


@pytest.mark.parametrize("overflow", ["shift", "truncate_middle"])
def test_a_full_context_is_repeated(model: llamac.Model, overflow: Any) -> None:
    settings = {**SETTINGS, "max_tokens": 30, "context_overflow": overflow, "context_keep": 3}
    completion = model.generate([1, *range(5, 35)], **settings, context=32, receipt=True)
    assert completion.receipt is not None
    assert completion.usage.truncated_tokens + completion.usage.shifted_tokens > 0
    assert replay_on(model, through_json(completion.receipt)).identical


def test_each_candidate_is_repeated(model: llamac.Model) -> None:
    completion = model.generate("ab", **SETTINGS, n=3, best_of=4, receipt=True)
    for candidate in completion.choices:
        assert candidate.receipt is not None
        assert replay_on(model, through_json(candidate.receipt)).identical


def test_each_sequence_of_a_beam_search_is_repeated(model: llamac.Model) -> None:
    model._adapt(llamac.SamplingParams(temperature=0.7), None)  # which a search ignores
    beams = model.generate("ab", max_tokens=4, beam_width=3, n=3, banned_strings=["q"], receipt=True)
    receipts = [choice.receipt for choice in beams.choices if choice.receipt is not None]
    assert [receipt.rank for receipt in receipts] == [0, 1, 2]
    for receipt in receipts:
        replay = replay_on(model, through_json(receipt))
        assert (replay.identical, replay.changes) == (True, ())
    wrong = replay_on(model, dataclasses.replace(receipts[0], rank=3))
    assert "its rank is 3, expected 0 to 2" in wrong.changes[0]
    cut = replay_on(model, dataclasses.replace(receipts[0], finish_reason="cancelled"))
    assert "a beam search that was cut short" in cut.changes[0]


def test_a_guide_is_part_of_a_receipt(model: llamac.Model) -> None:
    pytest.importorskip("llguidance")
    receipt = receipt_of(model, guide=llamac.Regex("[a-f]{3,9}"))
    assert replay_on(model, through_json(receipt)).identical
    other = {**receipt.settings, "guide": {"grammar": llamac.Regex("[x-z]{3,9}").grammar}}
    assert replay_on(model, through_json(receipt, settings=other)).position == 0


def test_results_of_sessions_engines_and_streams_have_the_same_receipt(model: llamac.Model) -> None:
    expected = receipt_of(model)
    with model.session(context=expected.context) as session:
        session.generate("abab", max_tokens=3)  # a prefix that is not computed again
        assert session.generate("ab", **SETTINGS, receipt=True).receipt == expected
    with llamac.Engine(model, context=expected.context, max_sequences=2) as engine:
        completions = engine.generate(["ab", "ab"], **SETTINGS, receipt=True)
        assert [completion.receipt for completion in completions] == [expected, expected]
    with model.stream("ab", **SETTINGS) as stream:
        list(stream)
    assert stream.receipt() == expected


def test_the_parts_of_the_engine_that_change_no_bit_are_not_recorded(model: llamac.Model, tiny_llama: Path) -> None:
    with llamac.load(tiny_llama, threads=2, isa="scalar") as other:
        assert dataclasses.replace(receipt_of(other)) == receipt_of(model)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_cancelled_result_is_repeated_to_its_length(model: llamac.Model, tokens: int) -> None:
    with model.stream("ab", **SETTINGS, receipt=True) as stream:
        while len(stream._output.tokens) < tokens:
            next(stream)
    receipt = stream.receipt()
    assert receipt.finish_reason == "cancelled"
    assert replay_on(model, through_json(receipt)).identical


# ---- what has changed


def test_another_model_is_named_and_its_first_token_found(model: llamac.Model, tmp_path: Path) -> None:
    receipt = receipt_of(model)
    path = write_model(tmp_path / "other.bin", checkpoint(llama_config(n_layers=3)))
    with llamac.load(path) as other:
        replay = replay_on(other, receipt)
    assert not replay.identical
    assert "the model's weights or configuration differs" in replay.changes[0]
    assert replay.completion is not None
    pairs = zip(receipt.tokens, replay.completion.tokens, strict=False)
    assert replay.position == next(i for i, (old, new) in enumerate(pairs) if old != new)
    assert f"the tokens differ from number {replay.position} on" in replay.changes[-1]


def test_a_changed_template_is_named_but_changes_no_token(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    paths = []
    for name in ("one", "two"):
        made.chat_template = name
        paths.append(write_model(tmp_path / f"{name}.bin", made))
    with llamac.load(paths[0]) as one, llamac.load(paths[1]) as two:
        replay = replay_on(two, receipt_of(one))
    assert replay.identical
    assert [change.partition(",")[0] for change in replay.changes] == ["the chat template"]


def test_adapters_are_part_of_the_identity(tiny_llama: Path, tmp_path: Path) -> None:
    folder = small_adapter(tmp_path / "adapter", tensors=adapter_tensors(tiny_llama))
    with llamac.load(tiny_llama) as plain, llamac.load(tiny_llama, lora=folder) as adapted:
        receipt = receipt_of(adapted)
        assert receipt.model.adapters is not None
        assert "the LoRA adapters differ" in replay_on(plain, receipt).changes[0]
    with llamac.load(tiny_llama, lora=folder) as again, llamac.load(tiny_llama, lora=(folder, 0.5)) as weaker:
        assert replay_on(again, receipt).changes == ()
        assert "the LoRA adapters differ" in replay_on(weaker, receipt).changes[0]


def test_a_setting_that_cannot_be_repeated_is_named(model: llamac.Model) -> None:
    def favour(ids: Any, logits: Any) -> None:
        logits[5] += np.float32(1)

    replay = replay_on(model, through_json(receipt_of(model, logits_processors=favour)))
    assert (replay.identical, replay.completion) == (False, None)
    assert "logits_processors was a function of the program" in replay.changes[0]
    receipt = receipt_of(model)
    replay = replay_on(model, through_json(receipt, settings={**receipt.settings, "telepathy": 1}))
    assert "this version has no setting 'telepathy'" in replay.changes[0]


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("logit_bias", True, "logit_bias contains True, expected pairs of a token id and a number"),
        ("logit_bias", [[3]], r"logit_bias contains \[3\], expected pairs"),
        ("logit_bias", [[3, "much"]], "logit_bias contains a value that is not a number: .*'much'"),
        ("stop", [{}], "stop was a function of the program"),
        ("candidate", -1, "candidate is -1, expected 0"),
        ("guide", {"grammar": "x", "closings": 3}, "the guide's closings are 3, expected a list of lists of token ids"),
        ("guide", {"grammar": "x", "closings": [[-1]]}, "the guide's closings must contain only token ids"),
    ],
)
def test_a_damaged_setting_is_named(model: llamac.Model, setting: str, value: object, message: str) -> None:
    receipt = receipt_of(model)
    replay = replay_on(model, through_json(receipt, settings={**receipt.settings, setting: value}))
    assert (replay.identical, replay.completion) == (False, None)
    assert re.search(message, replay.changes[0])


def test_a_prompt_that_the_model_does_not_have_is_named(model: llamac.Model) -> None:
    replay = replay_on(model, through_json(receipt_of(model), prompt=[10**6]))
    assert "cannot be computed here: the prompt has the token id 1000000" in replay.changes[0]


def test_other_ends_and_versions_are_named(scripted: Callable[..., llamac.Model]) -> None:
    model = scripted("abcdef")
    receipt = receipt_of(model, "x", temperature=0, max_tokens=4)
    result: dict[str, Any] = {
        "tokens": list(receipt.tokens),
        "text": "????",
        "finish_reason": "stop",
        "stopped_by": None,
    }
    replay = replay_on(model, through_json(receipt, result=result, llamac="0.0.1"))
    assert not replay.identical
    assert [change.split(" ")[0] for change in replay.changes] == ["the", "text", "finish_reason"]
    assert "written by llamac 0.0.1" in replay.changes[0]
    shorter = {**result, "tokens": result["tokens"][:2]}
    replay = replay_on(model, through_json(receipt, result=shorter))
    assert replay.position == 2
    assert "the receipt has ended" in replay.changes[-1]


# ---- damaged receipts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llamac_receipt": 2}, "is a receipt of version 2, this llamac reads version 1"),
        ({"prompt": [1, "a"]}, "prompt must contain only token ids"),
        ({"prompt": [-1]}, "prompt must contain only token ids"),
        ({"context": True}, "context is of the type bool, expected int"),
        ({"kv_dtype": "q2"}, "kv_dtype is 'q2', expected one of f32, f16, q8"),
        ({"numerics": "slow"}, "numerics is 'slow', expected one of exact, fast"),
        ({"model": []}, "model is of the type list, expected object"),
        ({"result": {}}, "result has no field tokens"),
    ],
)
def test_a_damaged_receipt_names_the_field(model: llamac.Model, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(llamac.ArgumentError, match=re.escape(message)):
        through_json(receipt_of(model), **changes)


def test_a_replay_ends_one_token_after_the_receipt(model: llamac.Model) -> None:
    """Without max_tokens and with shifts, a text can have no end."""
    receipt = receipt_of(model, max_tokens=4, context_overflow="shift", ignore_eos=True)
    settings = {name: value for name, value in receipt.settings.items() if name != "max_tokens"}
    replay = replay_on(model, through_json(receipt, settings=settings))
    assert (replay.identical, replay.position) == (False, 4)
    assert replay.completion is not None
    assert len(replay.completion.tokens) == 5
    assert "the receipt has ended" in replay.changes[-1]


def test_a_file_that_is_no_receipt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    for text, message in (("{}", "is not a receipt of llamac"), ("[1]", "receipt.json"), ("{", "receipt.json")):
        path.write_text(text)
        with pytest.raises(llamac.ArgumentError, match=message):
            llamac.replay(path)
    with pytest.raises(FileNotFoundError):
        llamac.replay(tmp_path / "none.json")
    with pytest.raises(llamac.ArgumentTypeError):
        llamac.replay(3)  # type: ignore[arg-type]


# ---- llamac.replay


def test_replay_opens_the_model_of_the_receipt(model: llamac.Model, tiny_llama: Path, tmp_path: Path) -> None:
    receipt = receipt_of(model)
    receipt.save(tmp_path / "receipt.json")
    assert llamac.replay(tmp_path / "receipt.json").identical
    assert llamac.replay(receipt.as_dict(), tiny_llama).identical
    assert llamac.replay(receipt, model).identical
    unnamed = dataclasses.replace(receipt, model=dataclasses.replace(receipt.model, source=""))
    with pytest.raises(llamac.ArgumentError, match="name the model"):
        llamac.replay(unnamed)
    with pytest.raises(llamac.ArgumentTypeError, match="model must be"):
        llamac.replay(receipt, 3)  # type: ignore[arg-type]


def test_every_parameter_is_recorded_or_known_to_change_nothing(model: llamac.Model) -> None:
    names = {field.name for field in dataclasses.fields(ResolvedParams)}
    assert names - set(receipt_of(model).settings) == {"receipt", "speculation"}


def test_the_documented_schema_has_every_field(model: llamac.Model) -> None:
    page = (ROOT / "docs" / "receipts.md").read_text("utf-8")
    found = receipt_of(model).as_dict()
    fields = {*found, *found["model"], *found["result"]}
    assert fields <= set(re.findall(r"^\| `(?:\w+\.)?(\w+)` \|", page, re.MULTILINE))


# ---- conversations

CHAT = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}{{ tone }}"


def chat_model(path: Path, template: str) -> llamac.Model:
    made = checkpoint(llama_config())
    made.chat_template = template
    return llamac.load(write_model(path, made))


def test_a_receipt_of_a_chat_has_the_messages_and_replay_renders_them_again(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "\u00e9"}]
    options: dict[str, Any] = {"template_options": {"tone": "dry"}, "max_tokens": 4, "seed": 1, "receipt": True}
    with chat_model(tmp_path / "a.bin", CHAT) as model:
        receipt = model.chat(messages, **options).receipt
        assert receipt is not None
        messages.append({"role": "user", "content": "later"})
        expected = {"messages": messages[:1], "tools": None, "template_options": {"tone": "dry"}}
        assert receipt.chat == expected
        assert through_json(receipt) == receipt
        assert replay_on(model, receipt).changes == ()
    with chat_model(tmp_path / "b.bin", CHAT.replace("}}:{{", "}};{{")) as other:
        replay = replay_on(other, receipt)
        assert replay.identical  # the ids are those of the receipt
        assert any("the conversation is rendered differently: the ids" in change for change in replay.changes)
    with chat_model(tmp_path / "c.bin", "{{ raise_exception('no') }}") as refusing:
        assert any("cannot be rendered here: " in change for change in replay_on(refusing, receipt).changes)


def test_a_receipt_of_a_chat_has_the_format_that_its_prompt_asks_for(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tools": [{"name": "f"}], "max_tokens": 4, "seed": 1, "receipt": True}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with chat_model(tmp_path / "a.bin", template) as model:
        named = model.chat([{"role": "user", "content": "Hi"}], tool_format="deepseek", **options).receipt
        plain = model.chat([{"role": "user", "content": "Hi"}], **options).receipt
        assert named is not None
        assert plain is not None
        assert named.prompt != plain.prompt
        assert (named.chat or {})["tool_format"] == "deepseek"
        assert "tool_format" not in (plain.chat or {})
        assert through_json(named) == named
        assert replay_on(model, named).changes == replay_on(model, plain).changes == ()


@pytest.mark.parametrize("overflow", ["shift", "truncate_middle"])
def test_a_chat_that_was_cut_is_rendered_and_cut_again(tmp_path: Path, overflow: Any) -> None:
    messages = [{"role": "system", "content": "dry"}, {"role": "user", "content": "ab " * 100}]
    with chat_model(tmp_path / "a.bin", CHAT) as model:
        found = model.chat(messages, context=96, context_overflow=overflow, max_tokens=4, seed=1, receipt=True)
        assert found.usage.truncated_tokens
        receipt = through_json(found.receipt)
        replay = replay_on(model, receipt)
        assert replay.identical
        assert replay.changes == ()
    with chat_model(tmp_path / "b.bin", CHAT.replace("}}:{{", "}};{{")) as other:
        assert any("the conversation is rendered differently" in text for text in replay_on(other, receipt).changes)


def test_tools_are_in_receipts_and_what_json_cannot_hold_is_left_out(tmp_path: Path) -> None:
    def f(a: int) -> None:
        """Do it."""

    with chat_model(tmp_path / "a.bin", CHAT + "{{ tools }}") as model:
        message = [{"role": "user", "content": "x"}]
        receipt = model.chat(message, tools=[f], max_tokens=1, receipt=True).receipt
        assert receipt is not None
        assert receipt.chat is not None
        assert receipt.chat["tools"] == [llamac.tool_schema(f)]
        assert replay_on(model, receipt).changes == ()
        assert model.generate("x", max_tokens=1, receipt=True).receipt.chat is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (1, "chat is of the type int, expected object"),
        ({}, "chat has no field messages"),
        ({"messages": [1], "tools": None, "template_options": {}}, r"messages\[0\] is of the type int"),
        ({"messages": [], "tools": {}, "template_options": {}}, "tools is of the type dict"),
        ({"messages": [], "tools": None, "template_options": []}, "template_options is of the type list"),
    ],
)
def test_a_damaged_conversation_is_refused(model: llamac.Model, chat: Any, message: str) -> None:
    with pytest.raises(llamac.ArgumentError, match=message):
        through_json(receipt_of(model), chat=chat)
