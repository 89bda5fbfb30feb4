"""Paths that convert between texts, conversations and tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamac.openai.errors import InvalidRequestError, wrong_type
from llamac.openai.inputs import read_messages, read_tools
from llamac.openai.schemas import BOOLEAN, IDS, MESSAGES, STRING, TOOLS
from llamac.server.embedding import checked_fields
from llamac.server.exchange import Answer

if TYPE_CHECKING:
    from starlette.requests import Request

    from llamac.server.service import Service

TOKENIZE_FLAGS = {"add_special_tokens": True, "parse_special": False, "return_token_strs": False}
# The parameters of each path, with the schemas of their values.
TOKENIZE = {"prompt": STRING, "messages": MESSAGES, **dict.fromkeys(TOKENIZE_FLAGS, BOOLEAN)}
DETOKENIZE = {"tokens": IDS}
APPLY_TEMPLATE = {"messages": MESSAGES, "tools": TOOLS}


async def tokenize(service: Service, request: Request) -> Answer:
    """The token ids of a text or of a conversation."""
    worker, given = await service.begin(request)
    body = checked_fields(given, TOKENIZE)
    options = {name: _flag(body, name, default) for name, default in TOKENIZE_FLAGS.items()}
    model = worker.engine.model
    if ("prompt" in body) == ("messages" in body):
        raise InvalidRequestError("expected either 'prompt' or 'messages'", "prompt", "missing_required_parameter")
    if "messages" in body:
        chat = read_messages(body["messages"])
        ids = await worker.run(lambda: model.chat_ids(chat, parse_special=options["parse_special"]))
    else:
        text = body["prompt"]
        if not isinstance(text, str):
            raise wrong_type("prompt", text, "a string")
        special, parse = options["add_special_tokens"], options["parse_special"]
        ids = await worker.run(lambda: model.tokenize(text, add_special=special, parse_special=parse))
    found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": worker.engine.context}
    if options["return_token_strs"]:
        found["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
    return Answer(found)


async def detokenize(service: Service, request: Request) -> Answer:
    """The text of token ids."""
    worker, given = await service.begin(request)
    body = checked_fields(given, DETOKENIZE)
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise wrong_type("tokens", ids, "an array of token ids")
    return Answer({"prompt": await worker.run(lambda: worker.engine.model.detokenize(ids))})


async def apply_template(service: Service, request: Request) -> Answer:
    """The prompt that the chat template makes of a conversation."""
    worker, given = await service.begin(request)
    body = checked_fields(given, APPLY_TEMPLATE)
    chat = read_messages(body.get("messages"))
    options = {"tools": read_tools(body["tools"])} if "tools" in body else {}
    return Answer({"prompt": await worker.run(lambda: worker.engine.model.chat_prompt(chat, **options))})


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise wrong_type(name, value, "a boolean")
    return value
