"""Paths that convert between texts, conversations and tokens.

Bodies and answers can have millions of tokens, so threads check and write them: the event loop never waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamac.openai.errors import wrong_type
from llamac.openai.forms import Form, Ignored
from llamac.openai.inputs import read_messages, read_tools
from llamac.openai.schemas import BOOLEAN, IDS, MESSAGES, STRING, TOOLS
from llamac.server.exchange import Answer, until_gone
from llamac.server.generation import naming, no_effect

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.service import Service

TOKENIZE_FLAGS = {"add_special_tokens": True, "parse_special": False, "return_token_strs": False}
TOKENIZE = Form(
    {"model": STRING, "prompt": STRING, "messages": MESSAGES, **dict.fromkeys(TOKENIZE_FLAGS, BOOLEAN)},
    only_one=("prompt", "messages"),
    elsewhere=dict.fromkeys(("text", "content", "input"), "prompt"),
)
DETOKENIZE = Form({"model": STRING, "tokens": IDS}, ("tokens",))
APPLY_TEMPLATE = Form({"model": STRING, "messages": MESSAGES, "tools": TOOLS}, ("messages",))


async def tokenize(service: Service, call: Call) -> Answer:
    """Return the token ids of a text or of a conversation."""
    worker, given = await service.begin(call)

    def answer() -> Answer:
        ignored = Ignored()
        body = TOKENIZE.read(given, "", ignored)
        options = {name: body.get(name, default) for name, default in TOKENIZE_FLAGS.items()}
        special, parse = options["add_special_tokens"], options["parse_special"]
        model = worker.engine.model
        if "messages" in body:
            chat = read_messages(body["messages"], ignored)
            with naming("messages"):
                ids = model.chat_ids(chat, parse_special=parse)
        else:
            ids = model.tokenize(body["prompt"], add_special=special, parse_special=parse)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": worker.engine.context}
        if options["return_token_strs"]:
            found["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        return Answer(found, headers=no_effect(ignored.names))

    return await until_gone(call.receive, worker.run(answer))


async def detokenize(service: Service, call: Call) -> Answer:
    """Return the text of token ids."""
    worker, given = await service.begin(call)

    def answer() -> Answer:
        ids = DETOKENIZE.read(given, "", Ignored())["tokens"]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise wrong_type("tokens", ids, "an array of token ids")
        with naming("tokens"):
            return Answer({"prompt": worker.engine.model.detokenize(ids)})

    return await until_gone(call.receive, worker.run(answer))


async def apply_template(service: Service, call: Call) -> Answer:
    """Return the prompt that the chat template renders from a conversation."""
    worker, given = await service.begin(call)

    def answer() -> Answer:
        ignored = Ignored()
        body = APPLY_TEMPLATE.read(given, "", ignored)
        chat = read_messages(body["messages"], ignored)
        with naming("tools"):
            options = {"tools": read_tools(body["tools"], ignored)} if "tools" in body else {}
        with naming("messages"):
            prompt = worker.engine.model.chat_prompt(chat, **options)
        return Answer({"prompt": prompt}, headers=no_effect(ignored.names))

    return await until_gone(call.receive, worker.run(answer))
