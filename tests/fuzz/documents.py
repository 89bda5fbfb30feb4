"""The fuzzing targets of what programs and users exchange: receipts, batches, conversations, tools, and pages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from array import array
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from chat_samples import TEMPLATES

import llamac
from builders import checkpoint, llama_config, write_model
from fuzz.mutate import Parts
from fuzz.target import Target
from llamac.cli.chat_conversation import FORMAT, ConversationError, _read
from llamac.cli.text import safe_line
from llamac.engine.cache.prefix_store import PrefixStore
from llamac.engine.receipts.receipt import read_receipt
from llamac.engine.receipts.replay import replay_on
from llamac.errors import LlamacError, SessionFileError
from llamac.openai.batch_files import BEGINNING, Input, Output
from llamac.openai.batch_lines import translate_line
from llamac.openai.responses import answer_body, error_response
from llamac.sources.replaying import source_of
from llamac.tools.formats import FORMATS
from llamac.tools.functions import parameters_of, tool_list
from llamac.tools.parser import MessageParser
from llamac.tools.response_template import read_response_template

FINGERPRINT = "fuzz"
PROMPT = array("i", [(7 * i) % 200 for i in range(130)])


@cache
def model() -> llamac.Model:
    """A tiny model with a tokenizer and a chat template."""
    made = checkpoint(llama_config(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, ffn=20, context=1000))
    folder = Path(tempfile.mkdtemp(prefix="llamac-fuzz-model-"))
    return llamac.load(
        write_model(folder / "model.bin", made, "f16", chat_templates={"default": TEMPLATES["chatml"]}), threads=1
    )


# ---- receipts


def receipt_samples(_: Path) -> Iterable[Parts]:
    """Receipts of requests with few and with many parameters."""
    for settings in (
        {"temperature": 0.0},
        {"seed": 3, "logit_bias": {4: 1.5}, "stop": ["a", "bc"], "banned_tokens": [3], "stop_token_ids": [9]},
        {"dry_multiplier": 1.0, "mirostat_tau": 2.0, "context_overflow": "shift", "banned_strings": ["b"]},
    ):
        completion = model().generate("Once", max_tokens=3, receipt=True, **settings)  # type: ignore[arg-type]
        assert completion.receipt is not None
        yield (completion.receipt.to_json().encode(),)


def use_receipt(folder: Path) -> None:
    """Read the receipt and repeat it."""
    receipt = read_receipt(folder / "receipt.json")
    with contextlib.suppress(LlamacError):
        source_of(receipt)
    found = replay_on(model(), receipt)
    assert found.identical or found.changes
    for change in found.changes:
        safe_line(change).encode()


# ---- batches


def batch_samples(_: Path) -> Iterable[Parts]:
    """A request, and the result of another one."""
    result = {"id": "", "custom_id": "b", "response": {"status_code": 200, "body": {"system_fingerprint": FINGERPRINT}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
    bodies: list[dict[str, Any]] = [
        {"prompt": "Once", "max_tokens": 2, "logprobs": 1, "stop": ["x"], "n": 2},
        {"prompt": [4, 5], "max_tokens": 1, "logit_bias": {"3": 1}, "temperature": 0},
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
        },
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "b"},
            ],
            "max_tokens": 2,
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "text"},
        },
    ]
    for body in bodies:
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        yield _text({"custom_id": "a", "method": "POST", "url": url, "body": body}), _text(result)


def use_batch(folder: Path) -> None:
    """Read an input of two lines and an output with the second one's result, and answer the first."""
    line, result = ((folder / name).read_bytes().replace(b"\n", b" ") for name in ("line.json", "result.json"))
    second = b'{"custom_id": "b"}'
    (folder / "in.jsonl").write_bytes(line + b"\n" + second + b"\n")
    identity = f"batch_req_2_{hashlib.sha256(second).hexdigest()[:16]}".encode()
    (folder / "out.jsonl").write_bytes(result.replace(b'"id": ""', b'"id": "%s"' % identity, 1) + b"\n")
    assert identity.startswith(BEGINNING[-10:-1])
    with Input(str(folder / "in.jsonl")) as source, Output(str(folder / "out.jsonl"), source, FINGERPRINT):
        request = None
        try:
            request = translate_line(source.read(source.lines[0]), llamac.SamplingParams(max_tokens=2))
            with llamac.Engine(model(), max_sequences=4) as engine:
                completion = request.submit(engine)[0].result()
            body = answer_body(request, [completion], "m", FINGERPRINT, model())
        except LlamacError as error:
            _, body = error_response(error, request.input_name if request else None)
            assert body["error"]["message"]
            json.dumps(body).encode()
            raise
        json.dumps(body).encode()


# ---- conversations and tools


def conversation_samples(_: Path) -> Iterable[Parts]:
    """A conversation as `llamac chat` saves it."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "reasoning_content": "b"}]
    yield (_text({"format": FORMAT, "model": "m", "messages": messages}),)


def use_conversation(folder: Path) -> None:
    """Read the conversation and make a prompt of it."""
    messages, tools = _read(str(folder / "chat.json"))
    model().chat_prompt(messages, tools=tools or None)


def tool_samples(_: Path) -> Iterable[Parts]:
    """Tools, response templates, and answers with calls."""
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
    template = {
        "version": 1,
        "start_anchor": "<assistant>",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {},
        },
    }
    answers = (
        '<think>a</think>b<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
        "<function=f><parameter=x>1</parameter></function>",
        '[TOOL_CALLS]f{"x": 1}',
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "```tool_code\nf(x=1)\n```",
    )
    for answer in answers:
        yield _text([tool]), _text(template), answer.encode()


def use_tools(folder: Path) -> None:
    """Read the answer in each format, as a whole and in pieces: the messages are the same."""
    tools = tool_list(_document(folder / "tools.json"))
    schemas = parameters_of(tools)
    forms = [*FORMATS.values(), read_response_template(_document(folder / "response_template.json"))]
    text = (folder / "answer.txt").read_bytes().decode(errors="replace")
    for form in forms:
        messages = []
        for size in (1, max(1, len(text))):
            parser = MessageParser(form, schemas=schemas)
            for at in range(0, len(text), size):
                parser.push(text[at : at + size])
            parser.finish()
            messages.append(parser.message)
        assert messages[0] == messages[1], form.name


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ConversationError("not JSON") from None


# ---- pages of prefixes on disk


def page_samples(folder: Path) -> Iterable[Parts]:
    """A page of a prefix."""
    with model().session() as session:
        store = PrefixStore(session, folder / "pages")
        session.prefill(PROMPT.tolist())
        store.keep(PROMPT, session._core, 0)
        store.close()
        yield (min((folder / "pages").iterdir()).read_bytes(),)


def use_page(folder: Path) -> None:
    """Find a prefix in a folder in which a page is damaged: it is found without the page, or as it was."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    with model().session() as session, model().session() as other:
        store = PrefixStore(session, pages)
        session.prefill(PROMPT.tolist())
        store.keep(PROMPT, session._core, 0)
        store.close()
        path = min(pages.iterdir())
        path.write_bytes((folder / "a.page").read_bytes())
        store = PrefixStore(session, pages)
        n = store.longest(PROMPT)
        loaded = store.load(PROMPT, n)
        if loaded is None:
            store.close()
            raise SessionFileError("the page is damaged")
        store.restore(PROMPT, loaded, other._core, 0)
        store.close()
        other.prefill(PROMPT[n:].tolist())
        assert other._core.copy_logits(9) == session._core.copy_logits(9)


def _text(document: Any) -> bytes:
    return json.dumps(document).encode()


DOCUMENTS: dict[str, Target] = {
    "receipt": Target(("receipt.json",), receipt_samples, use_receipt),
    "batch": Target(("line.json", "result.json"), batch_samples, use_batch, stable=False, mutations=80),
    "conversation": Target(("chat.json",), conversation_samples, use_conversation, mutations=40),
    "tools": Target(("tools.json", "response_template.json", "answer.txt"), tool_samples, use_tools),
    "page": Target(("a.page",), page_samples, use_page, mutations=40),
}
