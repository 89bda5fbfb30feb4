"""Splits an answer into reasoning, content and tool calls while its text arrives in pieces.

However the text is cut, the pieces of the message add up to the same message, and nothing that was reported is taken
back. Text that looks like a call but is not one stays in the content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import NamedTuple

from llamac.tools.formats import Format, Kind, Region
from llamac.tools.message import ID, Delta, Message, ToolCall, ToolCallDelta, parsed_arguments
from llamac.tools.patterns import PARTIAL, Found, Partial, Pattern, after_last, pattern
from llamac.tools.readers import READERS, Reader, Schemas

NOT_AN_OBJECT = "the arguments are not a JSON object"
PROMPT_TAIL = 200  # characters at the end of a prompt in which reasoning can be opened
MAX_END = 500  # characters behind the last call that are waited for, to know whether it has ended
SHOWN = 60  # characters of a text that a note quotes


class _Tag(NamedTuple):
    """A tag in the text: where it ends, the region that it begins or ends, and the groups of its pattern."""

    end: int
    region: Region
    groups: Mapping[str, str]


@dataclass
class _Call:
    """A call while it is read."""

    id: str
    name: str
    arguments: str = ""
    error: str | None = None


class MessageParser:
    """Parses one answer. One thread at a time uses it.

    Attributes:
        deltas: What has been found since the caller took them last, pieces of the same kind joined.
    """

    def __init__(
        self,
        form: Format,
        *,
        schemas: Schemas | None = None,
        calls: bool = True,
        parallel: bool = True,
        prompt: str = "",
        new_id: Callable[[int], str] = "call_{}".format,
        taken: Iterable[str] = (),
    ) -> None:
        """Begin an answer.

        Args:
            form: The model's format.
            schemas: The parameters of the tools, by name.
            calls: Whether to look for tool calls.
            parallel: Whether there can be more than one call. Others are noted and dropped.
            prompt: The end of the prompt. Templates can open the reasoning there.
            new_id: Makes the id of a call from its index.
            taken: Ids that calls have had before, which no call gets again.
        """
        self.deltas: list[Delta] = []
        self._schemas = schemas or {}
        self._parallel = parallel
        self._new_id = new_id
        self._taken = set(taken)
        self._regions = [region for region in form.regions if calls or region.kind != "calls"]
        self._opens = [(pattern(region.open), region) for region in self._regions]
        self._once = [region for region in self._regions if region.kind == "reasoning" and region.at_start]
        self._outside = form.outside
        self._call_id = form.call_id
        self._buffer = ""  # what has not been decided
        self._starts = True  # nothing comes before the buffer
        self._region: Region | None = None
        self._reader: Reader | None = None
        self._raw = ""  # the text of the region, as long as no call in it has been reported
        self._ignored = ""
        self._is_rejected = False
        self._first = 0  # index of the region's first call
        self._opened: str | None = None  # the id that the opening text had
        self._calls: list[_Call] = []
        self._is_dropped = False  # the last call
        self._texts: dict[Kind, str] = {"content": "", "reasoning": ""}
        self._space = ""  # white space that counts only if text follows
        self._breaks = False  # a tag comes before the next text
        self._has_reasoning = False
        self._notes: list[str] = []
        self._read_prompt(form, prompt)

    def _read_prompt(self, form: Format, prompt: str) -> None:
        """Begin in the region that the prompt has opened."""
        if form.anchor is not None:
            self._run_prompt(after_last(form.anchor, prompt))
            return
        tail = prompt[-PROMPT_TAIL:]
        for region in self._regions:
            if region.kind == "reasoning" and re.search(rf"(?:{region.open})\s*$", tail):
                self._enter(region, "")
                return

    def _run_prompt(self, text: str) -> None:
        """Read the beginning of the answer that the prompt has. It is not part of the message."""
        self._buffer = text
        self._run(final=False)
        self._texts = {"content": "", "reasoning": ""}
        self._space = ""
        self._calls.clear()
        self._notes.clear()
        self._has_reasoning = self._region is not None and self._region.kind == "reasoning"
        self._breaks = self._has_reasoning
        self._take()

    # ---- for callers

    def push(self, text: str) -> list[Delta]:
        """Add a piece of the text; return what is known of it."""
        self._buffer += text
        self._run(final=False)
        return self._take()

    def finish(self) -> list[Delta]:
        """End the text; return the rest."""
        self._run(final=True)
        self._leave("")
        if self._space and not self._breaks:
            self._emit("content", self._space)
        self._space = ""
        return self._take()

    @property
    def message(self) -> Message:
        """What has been found so far."""
        content = self._texts["content"]
        calls = [ToolCall(call.id, call.name, call.arguments, call.error) for call in self._calls]
        return Message(
            content=None if calls and not content else content,
            reasoning=self._texts["reasoning"] if self._has_reasoning else None,
            tool_calls=calls,
            notes=list(self._notes),
        )

    def _take(self) -> list[Delta]:
        taken, self.deltas = self.deltas, []
        return taken

    # ---- the text

    def _run(self, *, final: bool) -> None:
        at = 0
        while at < len(self._buffer):
            tags = self._tags()
            end = self._plain_end(at, tags)
            if end == at:
                found = self._tag(at, tags, final)
                if found is PARTIAL:
                    break
                if isinstance(found, _Tag):
                    self._pass(found, self._buffer[at : found.end])
                    at = found.end
                    continue
                end = at + 1
            self._read(self._buffer[at:end])
            at = end
        self._starts &= at == 0
        self._buffer = self._buffer[at:]

    def _plain_end(self, at: int, tags: list[tuple[Pattern, Region]]) -> int:
        """The end of the text at a place in which no tag begins. Readers get their text one character at a time."""
        buffer = self._buffer
        end = len(buffer) if self._reader is None else at + 1
        for place in range(at, end):
            char = buffer[place]
            if any(tag.may_start_with(char) for tag, _ in tags):
                return place
        return end

    def _tag(self, at: int, tags: list[tuple[Pattern, Region]], final: bool) -> _Tag | Partial | None:
        """The longest tag that begins at a place; PARTIAL if this is not known yet."""
        best: _Tag | None = None
        for tag, region in tags:
            found = tag.match(self._buffer, at, final=final, starts=self._starts)
            if isinstance(found, Partial):
                return found
            if found is not None and self._reader is not None and self._reader.closing:
                belongs = self._belongs_to_value(found.end, self._reader.closing, final)
                if isinstance(belongs, Partial):
                    return belongs
                if belongs:
                    continue
            if found is not None and found.end > at and (best is None or found.end > best.end):
                best = _Tag(found.end, region, found.groups)
        return best

    def _belongs_to_value(self, at: int, closing: str, final: bool) -> bool | Partial:
        """Whether a value that has not been closed goes on behind a tag that ends calls; PARTIAL if this is not known.

        Models write such tags in values, and also leave out the text that closes a value. It goes on if this text
        follows before another call begins, or any text that is too long for the end of an answer.
        """
        place = self._buffer.find(closing, at)
        end = len(self._buffer) if place < 0 else place
        opens = [tag for tag, region in self._opens if region.kind == "calls" and not region.bare]
        for begin in range(at, end):
            char = self._buffer[begin]
            if any(tag.may_start_with(char) and isinstance(tag.match(self._buffer, begin), Found) for tag in opens):
                return False
        if place >= 0 or end - at > MAX_END:
            return True
        return bool(self._buffer[at:].strip()) if final else PARTIAL

    def _tags(self) -> list[tuple[Pattern, Region]]:
        """The tags that count now."""
        region = self._region
        if region is None:
            if not self._texts["content"]:
                return [each for each in self._opens if not (self._has_reasoning and each[1] in self._once)]
            return [each for each in self._opens if not each[1].at_start]
        if not region.close or (self._reader is not None and self._reader.in_string):
            return []
        return [(pattern(region.close), region)]

    def _pass(self, tag: _Tag, text: str) -> None:
        """Go through a tag."""
        if tag.region is self._region:
            self._leave(text)
        else:
            self._opened = tag.groups.get("id")
            self._enter(tag.region, text, tag.groups)

    def _read(self, text: str) -> None:
        """Read text that belongs to no tag."""
        if self._reader is None:
            self._write(self._outside if self._region is None else self._region.kind, text)
            return
        self._raw += text
        self._reader.read(text)
        self._check()

    # ---- regions

    def _enter(self, region: Region, text: str, groups: Mapping[str, str] = MappingProxyType({})) -> None:
        if region.kind == "content" and not region.close:  # a mark
            self._breaks = True
            return
        self._region = region
        if region.kind == "reasoning":
            self._has_reasoning = self._breaks = True
            self._space = ""
        elif region.kind == "calls":
            self._raw, self._ignored, self._is_rejected = text, "", False
            self._first, self._is_dropped = len(self._calls), False
            self._reader = READERS[region.reader](self, groups, self._schemas, region.options)
            if region.bare:
                for char in text.lstrip()[len(region.prefix) if text.lstrip().startswith(region.prefix) else 0 :]:
                    self._reader.read(char)
            self._check()

    def _check(self) -> None:
        """Leave the calls when they are complete or turn out to be none."""
        region, reader = self._region, self._reader
        assert region is not None
        assert reader is not None
        if self._is_rejected or (reader.is_done and not region.close):
            self._leave("")

    def _leave(self, text: str) -> None:
        """End the region, with the text of its closing tag."""
        region, reader = self._region, self._reader
        if region is None:
            return
        if reader is not None and not self._is_rejected:
            reader.is_cut = bool(region.close) and not text
            reader.end()
        self._region = self._reader = None
        if region.kind == "reasoning":
            self._space, self._breaks = "", True
        if reader is None:
            return
        if len(self._calls) == self._first and not self._is_dropped:
            if not region.bare:
                self._notes.append(f"a malformed tool call stayed in the content: {_shown(self._raw)}")
            self._write("content", self._raw + text)
            return
        self._breaks = True
        if self._ignored.strip():
            self._notes.append(f"text beside a tool call was ignored: {_shown(self._ignored.strip())}")

    # ---- the sink of readers

    def open(self, name: str) -> bool:
        """A call begins."""
        assert self._region is not None
        if not name or (self._region.bare and name not in self._schemas):
            self._is_rejected = True
            return False
        self._is_dropped = bool(self._calls) and not self._parallel
        if self._is_dropped:
            self._notes.append(f"a further call was dropped, since parallel_tool_calls is False: {_shown(name)}")
            return True
        index = len(self._calls)
        call = _Call(self._id(index, name), name)
        self._calls.append(call)
        self._emit_call(ToolCallDelta(index, call.id, name))
        return True

    def _id(self, index: int, name: str) -> str:
        """The id of a call: what the model wrote if it is one that templates accept, and that no call has had."""
        written, self._opened = self._opened, None
        found = written if written and ID.fullmatch(written) and written not in self._taken else self._new_id(index)
        if self._call_id:  # the number counts all calls of the conversation
            numbered = (self._call_id.replace("NUMBER", str(n)).replace("NAME", name) for n in count(len(self._taken)))
            found = next(one for one in numbered if one not in self._taken)
        self._taken.add(found)
        return found

    def add(self, text: str) -> None:
        """A piece of the call's arguments."""
        if not self._is_dropped:
            self._calls[-1].arguments += text
            self._emit_call(ToolCallDelta(len(self._calls) - 1, arguments=text))

    def close(self, error: str | None = None) -> None:
        """The call ends."""
        if not self._is_dropped:
            call = self._calls[-1]
            repeated: list[str] = []
            valid = parsed_arguments(call.arguments, repeated.append) is not None
            call.error = error or (None if valid else NOT_AN_OBJECT)
            for key in repeated if valid else ():
                self._notes.append(f"the arguments have the key {_shown(key)} more than once; its last value counts")

    def ignore(self, char: str) -> None:
        """A character that belongs to no call."""
        self._ignored += char
        self.doubt()

    def doubt(self) -> None:
        """The text is probably no call."""
        assert self._region is not None
        if self._region.bare and len(self._calls) == self._first:
            self._is_rejected = True

    # ---- the message

    def _write(self, kind: Kind, text: str) -> None:
        """Add text. White space beside tags is dropped."""
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not body:
            return
        if self._breaks:
            self._breaks = False
            body = ("\n" if self._texts[kind] else "") + body.lstrip()
        self._emit(kind, body)

    def _emit(self, kind: Kind, text: str) -> None:
        self._texts[kind] += text
        last = self.deltas[-1] if self.deltas else None
        if kind == "content":
            if last is not None and last.content is not None:
                self.deltas[-1] = Delta(content=last.content + text)
            else:
                self.deltas.append(Delta(content=text))
        elif last is not None and last.reasoning is not None:
            self.deltas[-1] = Delta(reasoning=last.reasoning + text)
        else:
            self.deltas.append(Delta(reasoning=text))

    def _emit_call(self, piece: ToolCallDelta) -> None:
        last = self.deltas[-1].tool_call if self.deltas else None
        if last is not None and piece.name is None and last.index == piece.index:
            self.deltas[-1] = Delta(tool_call=replace(last, arguments=last.arguments + piece.arguments))
        else:
            self.deltas.append(Delta(tool_call=piece))


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
