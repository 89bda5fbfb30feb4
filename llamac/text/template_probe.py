"""Finds out what a chat template reads: it renders short conversations and looks for their words in the prompts.

A template can drop what it does not know without an error: a system message, the tools, calls beside a text. Its code
does not tell this reliably, but its prompts do. A template is probed once, and only for what conversations have.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from llamac.text import chat_process

Form = Literal["text", "parts", "both"]  # of contents
ArgumentsForm = Literal["dict", "text", "both"]  # of calls
Json = dict[str, Any]

RESULT_ROLES = ("tool", "tool_response", "observation")  # of results, by template
KEPT = 32  # probes that are cached
# A key of parts: a template without it reads only texts.
_READS_PARTS = re.compile(r"""\.text\b|['"]text['"]""")

# No template has these words: they are in its prompt only if it reads them.
_WORD, _OTHER, _THIRD, _FOURTH, _FIFTH, _SIXTH = (f"qzw{name}" for name in ("a", "b", "c", "d", "e", "f"))
_WORDS = re.compile("qzw[a-f]")
_NOBODY = "qzwx"  # a role
_ID = "qzw123456"  # templates of Mistral accept only nine letters and digits
_ASKED, _ANSWERED = {"role": "user", "content": _OTHER}, {"role": "assistant", "content": _THIRD}
_ASKED_AGAIN = {"role": "user", "content": _FOURTH}
_TOOL = {
    "type": "function",
    "function": {
        "name": _WORD,
        "description": _THIRD,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}},
    },
}
# The contents that calls without a text can have. Each fails or drops the calls in some templates. Of the first two,
# that with the shorter prompt is right: the other prompt has the word None, or an empty message.
_EMPTY: tuple[tuple[Json, ...], ...] = (
    ({"content": ""}, {"content": None}),
    ({},),
    ({"content": [{"type": "text", "text": ""}]},),
)


class TemplateProbe:
    """What a chat template reads. Threads can share it.

    If a template does not even write what a user says, because it needs other variables, its code decides.

    Attributes:
        form: How the template reads the contents of a role: as texts, as lists of parts, or both.
        knows_role: Whether the template writes messages of this role, and not as those of any role.
        reads_system: Whether the template writes a system message. Arguments: whether it is the first message, whether
            there are tools, and whether the last message is a result.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            template: The template's code.
            special_tokens: The strings of special tokens by the name of their variable.
        """
        self._template, self._tokens = template, dict(special_tokens)
        self.form = functools.cache(self._form)
        self.knows_role = functools.cache(self._knows_role)
        self.reads_system = functools.cache(self._reads_system)

    def adapted(self, message: Json) -> Json:
        """A message with a content that the template reads: parts in place of a text, or what it needs beside calls."""
        content = message.get("content")
        if message.get("tool_calls") and not content:
            if self._call is None:
                return message
            rest = {key: value for key, value in message.items() if key != "content"}
            return {**rest, **copy.deepcopy(self._call[0])}  # callers may change parts of a content
        role = message.get("role")
        if isinstance(content, str) and isinstance(role, str) and self.form(role) == "parts":
            return in_parts(message)
        return message

    @functools.cached_property
    def is_known(self) -> bool:
        """Whether the template writes what a user says, so that prompts show what it reads."""
        return self._keeps([_ASKED])

    @functools.cached_property
    def reads_users_in_a_row(self) -> bool:
        """Whether the template writes two messages of a user in a row."""
        return not self.is_known or self._keeps([_ASKED, _ASKED_AGAIN])

    @functools.cached_property
    def tools_place(self) -> Literal["variable", "list", "text"] | None:
        """Where the template reads tools: in the variable, or in a system message as a list or a text; or nowhere."""
        if "tools" not in self._template:
            return None
        if not self.is_known or self._keeps([_ASKED], [_TOOL], [_ASKED, _TOOL]):
            return "variable"
        if self._keeps([{"role": "system", "content": "", "tools": [_TOOL]}, _ASKED]):
            return "list"
        described = {"role": "system", "content": "", "tools": json.dumps([_TOOL["function"]])}
        return "text" if self._keeps([described, _ASKED]) else None

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes the calls of earlier messages."""
        return "tool_calls" in self._template and (not self.is_known or self._call is not None)

    @functools.cached_property
    def splits_calls(self) -> bool:
        """Whether the template refuses or drops several calls of a message, but writes those of several messages."""
        if self._call is None:
            return False
        one = _with_call(self._call)
        other = json.loads(json.dumps(one).replace(_SIXTH, _FIFTH))
        together = {**one, "tool_calls": [*one["tool_calls"], *other["tool_calls"]]}
        return not self._keeps([_ASKED, together]) and self._keeps([_ASKED, one, other])

    @functools.cached_property
    def arguments_form(self) -> ArgumentsForm:
        """How the template reads the arguments of calls."""
        if self._call is None:
            return "dict"
        content, arguments = self._call
        if isinstance(arguments, str):
            return "text"
        asked = self.adapted(_ASKED)
        prompts = {self._prompt([asked, _with_call((content, each))]) for each in (arguments, json.dumps(arguments))}
        return "both" if len(prompts) == 1 else "dict"

    @functools.cached_property
    def result_role(self) -> str | None:
        """The role with which the template reads results; None if there is none."""
        tool, knows_tools = RESULT_ROLES[0], self.tools_place is not None or self.writes_calls
        if not self.is_known:
            return tool if knows_tools else None
        if known := next(filter(self.knows_role, RESULT_ROLES), None):
            return known
        return tool if knows_tools and self._keeps([*self._around(tool)[0], _result(tool)]) else None

    @functools.cached_property
    def place_of_text(self) -> Literal["same message", "message before", "text of calls"]:
        """Where a text beside calls is written: in their message, or before it; else the calls have to be text, too."""
        if self._call is None:
            return "same message"
        said = {"role": "assistant", "content": _FIFTH}
        called, result = _with_call(self._call), _result(self.result_role or "user")
        rest = [result, _ANSWERED, _ASKED_AGAIN]
        # gpt-oss's template takes the text for reasoning, and drops it like all reasoning of an answered turn.
        if self._keeps([_ASKED, {**called, **said}, result]) or self._keeps([_ASKED, {**called, **said}, *rest]):
            return "same message"
        if self._keeps([_ASKED, said, called, *rest]):
            return "message before"
        return "text of calls" if self._keeps([_ASKED, said, *rest]) else "same message"

    def _form(self, role: str) -> Form:
        if not _READS_PARTS.search(self._template):
            return "text"
        before, after = self._around(role)
        message = _result(role)
        text, parts = (self._prompt([*before, each, *after]) for each in (message, in_parts(message)))
        if _WORD in text:
            return "both" if text.split() == parts.split() else "text"
        return "parts" if _WORD in parts else "both"

    def _knows_role(self, role: str) -> bool:
        before, after = self._around(role)
        own, other = (self._prompt([*before, _result(name), *after]).lower() for name in (role, _NOBODY))
        return _WORD in own and own != other.replace(_NOBODY, role)

    def _reads_system(self, is_first: bool, has_tools: bool, has_result: bool) -> bool:
        said = {"role": "system", "content": _FIFTH}
        chat = [said, _ASKED] if is_first else [_ASKED, _ANSWERED, said, _ASKED_AGAIN]
        if has_result and self.result_role:
            chat += [*self._around(self.result_role)[0][1:], _result(self.result_role)]
        return not self.is_known or self._keeps(chat, [_TOOL] if has_tools else None)

    @functools.cached_property
    def _call(self) -> tuple[Json, object] | None:
        """A content that can be beside calls without text, and arguments, such that the template writes the calls."""
        for arguments in ({"a": _SIXTH}, json.dumps({"a": _SIXTH})):
            for contents in _EMPTY:
                tried = [(content, arguments) for content in contents]
                prompts = [self._prompt([self.adapted(_ASKED), _with_call(each)]) for each in tried]
                if found := [(len(prompt), i) for i, prompt in enumerate(prompts) if _SIXTH in prompt]:
                    return tried[min(found)[1]]
        return None

    def _around(self, role: str) -> tuple[list[Json], list[Json]]:
        """The messages before and after one of a role in a conversation."""
        if role == "user":
            return [], []
        asked = self.adapted(_ASKED)
        if role == "system":
            return [], [asked]
        if role == "assistant":
            return [asked], [self.adapted(_ASKED_AGAIN)]
        return [asked, self.adapted(_ANSWERED) if self._call is None else _with_call(self._call)], []

    def _keeps(self, messages: list[Json], tools: list[Json] | None = None, read: list[Json] | None = None) -> bool:
        """Whether all words of the messages, or of the values in `read`, are in the prompt."""
        prompt = self._prompt([self.adapted(message) for message in messages], tools)
        return all(word in prompt for word in _WORDS.findall(json.dumps(read or messages)))

    def _prompt(self, messages: list[Json], tools: list[Json] | None = None) -> str:
        """The prompt of a conversation; "" if the template fails or refuses it."""
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return chat_process.try_render(self._template, {**self._tokens, **given})


def probe_of(template: str, special_tokens: Mapping[str, str]) -> TemplateProbe:
    """The probe of a template. Probes are cached."""
    return _cached(template, tuple(sorted(special_tokens.items())))


@functools.lru_cache(KEPT)
def _cached(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateProbe:
    return TemplateProbe(template, dict(special_tokens))


def in_parts(message: Json) -> Json:
    """A message with its text as a list of one part."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_call(call: tuple[Json, object]) -> Json:
    content, arguments = call
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", **content, "tool_calls": [{"id": _ID, "type": "function", "function": function}]}


def _result(role: str) -> Json:
    """A message with a result, or the same text of another role."""
    labels = {} if role in ("system", "user", "assistant") else {"tool_call_id": _ID, "name": "f"}
    return {"role": role, "content": _WORD, **labels}
