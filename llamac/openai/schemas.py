"""JSON schemas of what bodies have: values that parameters share, and the parts of conversations.

A schema says which form a value has. Whether a model can compute it is known later: its vocabulary, its chat template
and other parameters of the request decide that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamac.engine.sampling.schemas import TOKEN_ID
from llamac.openai.inputs import MAX_PROMPTS
from llamac.tools.functions import NAME

Schema = Mapping[str, Any]

ANY: Schema = {}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
COUNT: Schema = {"type": "integer", "minimum": 1}


def or_null(schema: Schema) -> Schema:
    """A schema that allows null, too."""
    return schema if not schema else {"anyOf": [schema, NULL]}


def array(items: Schema, **limits: int) -> Schema:
    """The schema of an array."""
    return {"type": "array", "items": items, **limits}


def fields(schemas: Mapping[str, Schema], required: Sequence[str] = (), *, others: bool | Schema = True) -> Schema:
    """The schema of an object.

    Args:
        schemas: The schema of each field.
        required: Fields that must be there.
        others: Whether there can be others, or their schema.
    """
    names = {"required": list(required)} if required else {}
    return {"type": "object", "properties": dict(schemas), **names, "additionalProperties": others}


def body(schemas: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    """The schema of a body, in which null means "not set", even for a parameter that does not exist."""
    properties = {name: schema if name in required else or_null(schema) for name, schema in schemas.items()}
    return fields(properties, required, others=NULL)


def ref(name: str) -> Schema:
    """A reference to one of the components of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


# ---- conversations

TEXT_PART = fields({"type": {"const": "text"}, "text": STRING}, ("type", "text"))
CONTENT: Schema = {"anyOf": [STRING, array(TEXT_PART)]}
_CALL = fields({"function": fields({"name": STRING, "arguments": STRING}, ("name",))}, ("function",))
_MESSAGE = {
    "role": STRING,
    "content": or_null(CONTENT),
    "name": or_null(STRING),
    "reasoning_content": or_null(STRING),
    "tool_calls": or_null(array(_CALL)),
    "tool_call_id": or_null(STRING),
}
_WITH_TEXT = fields({**_MESSAGE, "content": CONTENT}, ("role", "content"), others=NULL)
_WITH_CALLS = fields(
    {**_MESSAGE, "role": {"const": "assistant"}, "tool_calls": array(_CALL, minItems=1)},
    ("role", "tool_calls"),
    others=NULL,
)
FUNCTION = fields(
    {
        "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
        "description": or_null(STRING),
        "parameters": fields({"properties": OBJECT}),
    },
    ("name",),
)
_BARE = {**FUNCTION, "properties": {**FUNCTION["properties"], "function": False}}  # without what is around it
IDS = array(TOKEN_ID)

# The schemas that a document has once, by name.
COMPONENTS: dict[str, Schema] = {
    "ChatMessage": {"anyOf": [_WITH_TEXT, _WITH_CALLS]},
    "ChatTool": {"anyOf": [fields({"type": {"const": "function"}, "function": FUNCTION}, ("function",)), _BARE]},
    "Prompt": {"anyOf": [STRING, IDS, array({"anyOf": [STRING, IDS]}, maxItems=MAX_PROMPTS)]},
    "ResponseFormat": {
        "anyOf": [
            fields({"type": {"enum": ["text", "json_object"]}}, ("type",)),
            fields(
                {"type": {"const": "json_schema"}, "json_schema": fields({"schema": OBJECT}, ("schema",))},
                ("type", "json_schema"),
            ),
        ]
    },
    "ToolChoice": {
        "anyOf": [STRING, fields({"function": fields({"name": STRING}, ("name",))}, ("function",))],
        "description": "`auto`, `none`, `required`, or the name of a function",
    },
}
MESSAGES = array(ref("ChatMessage"), minItems=1)
PROMPT = ref("Prompt")
TOOLS = array(ref("ChatTool"))
TOOL_CHOICE = ref("ToolChoice")
RESPONSE_FORMAT = ref("ResponseFormat")
STREAM_OPTIONS = fields({"include_usage": or_null(BOOLEAN), "include_obfuscation": or_null(BOOLEAN)}, others=False)
