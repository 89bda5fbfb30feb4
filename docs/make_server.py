"""Writes the tables of parameters into docs/server.md: `python docs/make_server.py`.

They come from the forms that check bodies, and so does the server's OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamac.openai import schemas
from llamac.openai.forms import Form, Kinds
from llamac.server import embedding, execution, messages_request, responses_request
from llamac.server.openapi import OPERATIONS

DOCUMENT = Path(__file__).with_name("server.md")
BEGIN, END = "<!-- {} -->\n", "<!-- end of {} -->"
# The columns of the table of parameters.
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "execute": "/execute",
}
ORDER = YES, NONE, NO, _ = "yes", "none", "no", ""
# Objects inside of parameters: whose, where, and what they can have.
NESTED: dict[str, dict[str, Form | Kinds]] = {
    "chat": {
        "messages[]": schemas.MESSAGE,
        "messages[].content[]": schemas.PARTS,
        "messages[].tool_calls[]": schemas.CALL,
        "messages[].tool_calls[].function": schemas.CALLED,
        "tools[]": schemas.TOOL,
        "tools[].function": schemas.FUNCTION,
        "tools[] without `function`": schemas.BARE_TOOL,
        "tool_choice": schemas.CHOICE,
        "tool_choice.function": schemas.NAMED,
        "tool_choice without `function`": schemas.BARE_CHOICE,
        "response_format": schemas.FORMATS,
        "response_format.json_schema": schemas.JSON_SCHEMA,
        "stream_options": schemas.STREAMING,
    },
    "responses": {
        "input[]": responses_request.ITEMS,
        "input[].content[] of messages": responses_request.PARTS,
        "input[].content[] of reasoning": responses_request.THOUGHT_PARTS,
        "tools[]": Kinds({"function": responses_request.TOOL}),
        "text": responses_request.TEXT,
        "text.format": responses_request.FORMATS,
        "reasoning": responses_request.REASONING,
    },
    "messages": {
        "system[]": messages_request.TEXTS,
        "messages[]": messages_request.MESSAGE,
        **{f"messages[].content[] of {role}s": kinds for role, kinds in messages_request.BLOCKS.items()},
        "tools[]": messages_request.TOOLS,
        "tool_choice": messages_request.TOOL_CHOICES,
        "thinking": messages_request.THINKING,
        "output_config": messages_request.OUTPUT_CONFIG,
        "output_config.format": messages_request.OUTPUT_FORMATS,
        "context_management": messages_request.CONTEXT_MANAGEMENT,
        "context_management.edits[]": messages_request.EDITS,
    },
    "rerank": {"documents[]": embedding.DOCUMENT},
    "execute": {"sampling": execution.SAMPLING},
}


def server_document() -> str:
    """Return the text of docs/server.md with the tables of this version."""
    text = DOCUMENT.read_text("utf-8")
    for name, table in {"parameters": parameters_table(), "keys of objects": objects_table()}.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    return text


def parameters_table() -> str:
    """The parameters of each path, as Markdown."""
    bodies = {name: OPERATIONS[path].body or Form({}) for name, path in PATHS.items()}
    rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name in dict.fromkeys(name for form in bodies.values() for name in form.schemas):
        states = tuple(effect(form, name) for form in bodies.values())
        texts: dict[str, list[str]] = {}
        for column, form in bodies.items():
            if meaning(form, name):
                texts.setdefault(meaning(form, name), []).append(column)
        several = len(texts) > 1
        text = "<br>".join(f"{' and '.join(columns)}: {text}" if several else text for text, columns in texts.items())
        rows.setdefault((states, text), []).append(f"`{name}`")
    order = sorted(rows, key=lambda row: min(ORDER.index(state) for state in row[0]))
    lines = [f"| parameter | {' | '.join(PATHS)} | |", "|---" * (len(PATHS) + 2) + "|"]
    return "\n".join([*lines, *(f"| {', '.join(rows[row])} | {' | '.join(row[0])} | {row[1]} |" for row in order)])


def effect(form: Form, name: str) -> str:
    """What the server does with a key."""
    return YES if name in form.honored else NONE if name in form.no_effect else NO if name in form.refused else ""


def meaning(form: Form, name: str) -> str:
    """What a key means, and which values of a refused one are accepted."""
    text = form.texts.get(name, "")
    values = " or ".join(f"`{json.dumps(value)}`" for value in form.refused.get(name, ()))
    return f"{text}; {values} is accepted".removeprefix("; ") if values else text


def objects_table() -> str:
    """The keys of objects inside of parameters, as Markdown."""
    lines = ["| body | object | read | without effect | refused |", "|---|---|---|---|---|"]
    for body, objects in NESTED.items():
        for place, form in forms_of(objects):
            read = [f"`{name}`{noted(form, name)}" for name in form.honored]
            refused = [f"`{name}`{noted(form, name)}" for name in form.refused]
            cells = [", ".join(names) for names in (read, [f"`{name}`" for name in form.no_effect], refused)]
            lines.append(f"| {body} | {place} | {' | '.join(cells)} |")
    return "\n".join(lines)


def forms_of(objects: Mapping[str, Form | Kinds]) -> Iterator[tuple[str, Form]]:
    """The places of objects with their forms, one for each type."""
    for place, form in objects.items():
        path, _, rest = place.partition(" ")
        name = f"`{path}` {rest}".strip()
        if isinstance(form, Form):
            yield name, form
            continue
        groups: list[tuple[Form, list[str]]] = []
        for kind, each in form.forms.items():
            same = next((kinds for other, kinds in groups if other == each), None)
            if same is None:
                groups.append((each, [f"`{kind}`"]))
            else:
                same.append(f"`{kind}`")
        for each, kinds in groups:
            yield f"{name}: {', '.join(kinds)}", each


def noted(form: Form, name: str) -> str:
    """The meaning of a key, in brackets."""
    text = meaning(form, name)
    return f" ({text})" if text else ""


if __name__ == "__main__":
    DOCUMENT.write_text(server_document(), "utf-8")
