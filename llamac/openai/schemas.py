"""JSON schemas of the values in bodies: those that parameters share, and the parts of conversations.

A schema says which form a value has. Whether a model can compute it is known later: its vocabulary, its chat template
and other parameters of the request decide that.
"""

from __future__ import annotations

from llamac.engine.sampling.schemas import TOKEN_ID
from llamac.openai.forms import NULL, Form, Kinds, Schema, fields
from llamac.tools.functions import NAME

MAX_PROMPTS = 256  # of a request
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
# What parameters mean that many bodies have.
TEXTS = {"model": "one of the server's models", "stream": "whether to stream the answer"}
COUNT: Schema = {"type": "integer", "minimum": 1}


def array(items: Schema, **limits: int) -> Schema:
    """The schema of an array."""
    return {"type": "array", "items": items, **limits}


def ref(name: str) -> Schema:
    """A reference to one of the components of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


# ---- conversations

PARTS = Kinds({"text": Form({"text": STRING}, ("text",), no_effect=("cache_control", "prompt_cache_breakpoint"))})
CONTENT: Schema = {"anyOf": [STRING, array(PARTS.schema)]}
CALLED = Form({"name": STRING, "arguments": STRING}, ("name",))
CALL = Form(
    {"id": STRING, "type": {"enum": ["function"]}, "function": CALLED.schema}, ("function",), no_effect=("index",)
)
MESSAGE = Form(
    {
        "role": STRING,
        "content": CONTENT,
        "name": STRING,
        "reasoning_content": STRING,
        "tool_calls": array(CALL.schema),
        "tool_call_id": STRING,
    },
    ("role",),
    refused={"annotations": ([],), "audio": (), "function_call": (), "refusal": ()},
    texts={
        "role": "one of OpenAI's API, or one that the chat template names",
        "function_call": "the former name of `tool_calls`",
    },
)
_WITH_CALLS = {"role": {"const": "assistant"}, "tool_calls": array(CALL.schema, minItems=1)}
FUNCTION = Form(
    {
        "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
        "description": STRING,
        "parameters": fields({"properties": OBJECT}),
        "strict": BOOLEAN,
    },
    ("name",),
)
TOOL = Form({"type": {"enum": ["function"]}, "function": FUNCTION.schema}, ("function",), no_effect=("cache_control",))
BARE_TOOL = Form({"type": {"enum": ["function"]}, **FUNCTION.honored}, FUNCTION.required)  # without what is around it
NAMED = Form({"name": STRING}, ("name",))
CHOICE = Form({"type": {"enum": ["function"]}, "function": NAMED.schema}, ("function",))
BARE_CHOICE = Form({"type": {"enum": ["function"]}, **NAMED.honored}, NAMED.required)
JSON_SCHEMA = Form({"schema": OBJECT, "strict": BOOLEAN}, ("schema",), no_effect=("name", "description"))
FORMATS = Kinds(
    {
        "text": Form({}),
        "json_object": Form({}),
        "json_schema": Form({"json_schema": JSON_SCHEMA.schema}, ("json_schema",)),
    }
)
STREAMING = Form({"include_usage": BOOLEAN}, no_effect=("include_obfuscation",))
IDS = array(TOKEN_ID)

# The schemas that a document has once, by name.
COMPONENTS: dict[str, Schema] = {
    "ChatMessage": {
        "anyOf": [
            fields({**MESSAGE.schema["properties"], "content": CONTENT}, ("role", "content"), others=NULL),
            fields({**MESSAGE.schema["properties"], **_WITH_CALLS}, ("role", "tool_calls"), others=NULL),
        ]
    },
    "ChatTool": {"anyOf": [TOOL.schema, BARE_TOOL.schema]},
    "Prompt": {"anyOf": [STRING, IDS, array({"anyOf": [STRING, IDS]}, maxItems=MAX_PROMPTS)]},
    "ResponseFormat": FORMATS.schema,
    "ToolChoice": {
        "anyOf": [STRING, CHOICE.schema, BARE_CHOICE.schema],
        "description": "`auto`, `none`, `required`, or the name of a function",
    },
}
MESSAGES = array(ref("ChatMessage"), minItems=1)
PROMPT = ref("Prompt")
TOOLS = array(ref("ChatTool"))
TOOL_CHOICE = ref("ToolChoice")
RESPONSE_FORMAT = ref("ResponseFormat")
STREAM_OPTIONS = STREAMING.schema
