"""Paths that convert between texts, conversations and tokens.

Bodies and answers can have millions of tokens, so threads check and write them: the event loop never waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamac.engine.prompts.prompt_ids import render_runs, tokenize_runs
from llamac.openai.errors import wrong_type
from llamac.openai.forms import Form, Ignored
from llamac.openai.inputs import read_messages, read_tools
from llamac.openai.parameters import body_form
from llamac.openai.requests import effort_options, template_options, unread_options
from llamac.openai.schemas import BOOLEAN, IDS, MESSAGES, STRING, TOOLS
from llamac.server.exchange import Answer, until_gone
from llamac.server.generation import naming, no_effect
from llamac.text.chat_runs import PromptRun

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.server.call import Call
    from llamac.server.service import Service

TOKENIZE_FLAGS = {"add_special_tokens": True, "parse_special": False, "return_token_strs": False}
# What belongs to messages: parameters of chat completions that change the prompt, and the beginning of the answer.
OF_MESSAGES = {
    **{name: body_form("chat").honored[name] for name in ("tools", "reasoning_effort", "chat_template_kwargs")},
    "answer": STRING,
}
TOKENIZE = Form(
    {"model": STRING, "prompt": STRING, "messages": MESSAGES, **OF_MESSAGES, **dict.fromkeys(TOKENIZE_FLAGS, BOOLEAN)},
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
        special, parse, shows_strs = (body.get(name, default) for name, default in TOKENIZE_FLAGS.items())
        model = worker.engine.model
        variables = template_options(body.get("chat_template_kwargs", {}))
        with naming("tools"):
            tools = {"tools": read_tools(body["tools"], ignored)} if "tools" in body else {}
        if "messages" in body:
            ids = _conversation_ids(worker.engine, body, variables, tools, ignored, parse_special=parse)
        else:
            for name in OF_MESSAGES.keys() & body.keys():
                ignored.add(name)
            ids = model.tokenize(body["prompt"], add_special=special, parse_special=parse)
        found: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": worker.engine.context}
        if shows_strs:
            found["token_strs"] = [model.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        return Answer(found, headers=no_effect(ignored.names))

    return await until_gone(call.receive, worker.run(answer))


def _conversation_ids(
    engine: Engine,
    body: dict[str, Any],
    variables: dict[str, Any],
    tools: dict[str, Any],
    ignored: Ignored,
    *,
    parse_special: bool,
) -> list[int]:
    """The token ids of a conversation and of the beginning of the answer, in which names of special tokens count."""
    chat, effort = read_messages(body["messages"], ignored), body.get("reasoning_effort")
    for name in unread_options(engine, effort, variables):
        ignored.add(name)
    options = {**effort_options(engine, effort), **variables, **tools}
    with naming("messages"):
        runs = render_runs(engine.model, chat, options)
    if parse_special:
        runs = [PromptRun("".join(run.text for run in runs), parse_special=True)]
    answer = body.get("answer", "")
    if runs and runs[-1].parse_special:  # one text, as the model writes it
        answer = runs.pop().text + answer
    return tokenize_runs(engine.model, [*runs, PromptRun(answer, parse_special=True)])


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
