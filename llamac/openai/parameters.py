"""The parameters of OpenAI's bodies: what llamac does with each of them.

Nothing is ignored silently. A parameter is honored; or it has no effect on the answer and is accepted; or it would
change the answer in a way that llamac does not support, and is refused with an error that names it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from llamac.engine.sampling.schemas import json_schema
from llamac.openai.forms import Form, Schema
from llamac.openai.schemas import (
    BOOLEAN,
    MESSAGES,
    OBJECT,
    PROMPT,
    RESPONSE_FORMAT,
    STREAM_OPTIONS,
    STRING,
    TEXTS,
    TOOL_CHOICE,
    TOOLS,
)

Endpoint = Literal["chat", "completions"]
Effect = Literal["honored", "no effect", "refused"]
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
TEXT: tuple[Endpoint, ...] = ("completions",)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a body.

    Attributes:
        name: Its name.
        effect: What llamac does with it.
        text: What it means, for the documentation.
        endpoints: Whose bodies can have it.
        neutral: Values of a refused parameter, besides null, that ask for nothing and are accepted.
        is_sampling: Whether it is a parameter of `SamplingParams` under the same name.
        form: The JSON schema of the values of a parameter that is honored and not a sampling parameter.
    """

    name: str
    effect: Effect
    text: str = ""
    endpoints: tuple[Endpoint, ...] = BOTH
    neutral: tuple[Any, ...] = ()
    is_sampling: bool = False
    form: Schema = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the values of a parameter that is honored, besides null."""
        return json_schema(self.name) if self.is_sampling else dict(self.form)


def _sampling(text: str, *names: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, "honored", text, is_sampling=True) for name in names)


_PLAIN = "as in SamplingParams"
_OWN = "as in SamplingParams; not part of OpenAI's API"

_LENGTH: Schema = json_schema("max_tokens")
_LENGTH_0: Schema = {**_LENGTH, "minimum": 0}
MAX_LOGPROBS = 20  # as in OpenAI's API
_UP_TO_20: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # of reasoning_effort
# Arguments of `ChatTemplate.render` that are not variables of a template.
NOT_VARIABLES = ("messages", "tools", "template", "parse_special", "add_generation_prompt", "continue_final_message")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # a name; an answer's header can have it
_VARIABLES: Schema = {
    **OBJECT,
    "propertyNames": {"pattern": f"^{VARIABLE.pattern}$", "not": {"enum": list(NOT_VARIABLES)}},
}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter("model", "honored", TEXTS["model"], form=STRING),
    Parameter("messages", "honored", "strings, and parts of the type `text`", CHAT, form=MESSAGES),
    Parameter("prompt", "honored", "a string or token ids, or an array of these", TEXT, form=PROMPT),
    Parameter("max_tokens", "honored", "by default the rest of the context", CHAT, form=_LENGTH),
    Parameter("max_tokens", "honored", "by default 16; with `echo`, 0 returns only the prompt", TEXT, form=_LENGTH_0),
    Parameter("max_completion_tokens", "honored", "another name of `max_tokens`", form=_LENGTH),
    *_sampling(_PLAIN, "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty"),
    *_sampling("as in SamplingParams; -100 bans the token", "logit_bias"),
    *_sampling("as in SamplingParams; a stream has no more than `n` candidates", "n", "best_of"),
    Parameter("logprobs", "honored", "a boolean", CHAT, form=BOOLEAN),
    Parameter("logprobs", "honored", "a number up to 20", TEXT, form=_UP_TO_20),
    Parameter("top_logprobs", "honored", "up to 20", CHAT, form=_UP_TO_20),
    Parameter("response_format", "honored", "`text`, `json_object` or `json_schema`", form=RESPONSE_FORMAT),
    Parameter("tools", "honored", "functions", CHAT, form=TOOLS),
    Parameter("tool_choice", "honored", "`auto`, `none`, `required`, or a function", CHAT, form=TOOL_CHOICE),
    Parameter("parallel_tool_calls", "honored", "whether an answer can have several calls", CHAT, form=BOOLEAN),
    Parameter(
        "reasoning_effort",
        "honored",
        "passed to templates that read it, otherwise without effect; `none` turns reasoning off",
        CHAT,
        form={"enum": list(EFFORTS)},
    ),
    Parameter(
        "chat_template_kwargs",
        "honored",
        "variables of the chat template, otherwise without effect; not part of OpenAI's API",
        CHAT,
        form=_VARIABLES,
    ),
    Parameter("echo", "honored", "puts the prompt before the text, with its log probabilities", TEXT, form=BOOLEAN),
    Parameter("suffix", "honored", "fills in the middle, if the model has tokens for that", TEXT, form=STRING),
    Parameter("stream", "honored", TEXTS["stream"], form=BOOLEAN),
    Parameter("stream_options", "honored", "`include_usage`; `include_obfuscation` has no effect", form=STREAM_OPTIONS),
    *_sampling(_OWN, "top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *_sampling(_OWN, "stop_token_ids", "banned_tokens", "banned_strings", "reasoning_budget"),
    *_sampling(_OWN, "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers"),
    *_sampling(_OWN, "xtc_probability", "xtc_threshold", "mirostat_tau", "mirostat_eta"),
    *_sampling(_OWN, "context_overflow", "context_keep", "candidate"),
    *_sampling(_OWN, "beam_width", "length_penalty", "early_stopping"),
    Parameter("metadata", "no effect"),
    Parameter("prediction", "no effect", "a hint for speed; llamac drafts tokens by itself", CHAT),
    Parameter("prompt_cache_key", "no effect", "prefixes are always cached"),
    Parameter("prompt_cache_retention", "no effect"),
    Parameter("safety_identifier", "no effect"),
    Parameter("service_tier", "no effect"),
    Parameter("store", "no effect", "nothing is stored"),
    Parameter("user", "no effect"),
    Parameter("audio", "refused"),
    Parameter("function_call", "refused", "the former name of `tool_choice`", neutral=("none", "auto")),
    Parameter("functions", "refused", "the former name of `tools`", neutral=([],)),
    Parameter("modalities", "refused", neutral=(["text"],)),
    Parameter("moderation", "refused"),
    Parameter("verbosity", "refused", neutral=("medium",)),
    Parameter("web_search_options", "refused"),
)


def parameters_of(endpoint: Endpoint) -> dict[str, Parameter]:
    """The parameters that bodies sent to an endpoint can have, by name."""
    return {parameter.name: parameter for parameter in PARAMETERS if endpoint in parameter.endpoints}


@cache
def body_form(endpoint: Endpoint) -> Form:
    """The form of the bodies that are sent to an endpoint."""
    parameters = parameters_of(endpoint).values()
    return Form(
        {each.name: each.schema() for each in parameters if each.effect == "honored"},
        ("messages" if endpoint == "chat" else "prompt",),
        no_effect=[each.name for each in parameters if each.effect == "no effect"],
        refused={each.name: each.neutral for each in parameters if each.effect == "refused"},
        texts={each.name: each.text for each in parameters},
    )
