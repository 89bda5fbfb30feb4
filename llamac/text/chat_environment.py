"""The Jinja environments in which the worker (chat_worker.py) renders chat templates.

One renders as transformers does. The other produces the same text and also records the origin of each character.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, filters, nodes, pass_environment, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from llamac.text.tracked_str import (
    TrackedStr,
    assemble,
    literal,
    origin_of,
    role,
    to_json,
    tracked,
    with_other_case,
    with_other_spaces,
)

CACHED = 16  # compiled templates that each environment caches
# Roles that templates write into the names of special tokens, as in '<|' + role + '|>'.
ROLES = {"system", "developer", "user", "human", "assistant", "model", "tool", "tool_response", "function"}
ROLES |= {"ipython", "observation", "environment", "critic", "query", "document"}


class UntraceableError(Exception):
    """A template renders differently when origins are recorded."""


class Renderer:
    """Renders templates, with or without origins."""

    def __init__(self) -> None:
        self._plain = ChatEnvironment()
        self._tracking = TrackingEnvironment()

    def text(self, template: str, variables: dict[str, Any], limit: int) -> str:
        """Render a template. Raises OverflowError if the text has more than `limit` characters."""
        self._plain.now = datetime.now()
        return "".join(self._plain.pieces(template, variables, limit))

    def tracked(self, template: str, variables: dict[str, Any], trusted: list[str], limit: int) -> TrackedStr:
        """Render like `text`, with the origin of each character.

        Args:
            template: The template.
            variables: Its variables, plain data.
            trusted: The variables that count as text of the template.
            limit: The largest number of characters.

        Raises:
            UntraceableError: If the text differs from that of `text`.
            OverflowError: If it is longer than the limit.
        """
        given: dict[str, Any] = {  # copies, made before the template can append to lists
            name: literal(value) if name in trusted and isinstance(value, str) else tracked(value)
            for name, value in variables.items()
        }
        for message in given.get("messages") or []:
            name = message.get("role")
            if isinstance(name, str) and name in ROLES:
                message["role"] = role(name)
        choices = random.getstate()
        text = self.text(template, variables, limit)
        random.setstate(choices)
        self._tracking.now = self._plain.now
        found = TrackedStr().join(self._tracking.pieces(template, given, limit))
        if found != text:
            raise UntraceableError
        return found


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with the additional filters and functions that chat templates use.

    Templates can append to lists, which transformers refuses: templates of GGUF files do so, since llama.cpp allows it.

    Attributes:
        now: The time of the current request, so that rendering a template twice gives the same text.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.now = datetime.now()
        self.filters["tojson"] = _tojson(json.dumps)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: self.now.strftime(format)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Values
        self._compiled: dict[str, Template] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template can use an attribute."""
        return super().is_safe_attribute(obj, attr, value) or (isinstance(obj, list) and attr == "append")

    def pieces(self, template: str, variables: dict[str, Any], limit: int) -> Iterator[str]:
        """Render a template in pieces. Raises OverflowError after more than `limit` characters."""
        if template not in self._compiled:
            while len(self._compiled) >= CACHED:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[template] = self.from_string(template)
        size = 0
        for piece in self._compiled[template].generate(variables):
            size += len(piece)
            if size > limit:
                raise OverflowError(f"the text has more than {limit} characters")
            yield piece


class TrackingEnvironment(ChatEnvironment):
    """Renders templates to TrackedStr. Literals of the template are TEMPLATE; every plain str is DATA."""

    concat = staticmethod(lambda parts: TrackedStr().join(parts))

    def __init__(self) -> None:
        super().__init__()
        self.code_generator_class = _TrackingCodeGenerator
        self.filters.update(tojson=_tojson(to_json), join=_join, title=_title, indent=_indent, wordwrap=_wordwrap)

    # The code that _TrackingCodeGenerator generates calls these two.

    literal = staticmethod(literal)

    @staticmethod
    def join_values(values: Iterable[Any]) -> TrackedStr:
        return TrackedStr().join(map(str, values))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        sandboxed = super().wrap_str_format(value)
        if sandboxed is None or not isinstance(value.__self__, TrackedStr):
            return sandboxed

        def format(*args: Any, **values: Any) -> str:
            text = sandboxed(*args, **values)  # raises an error for what the sandbox forbids
            parts = _FormattedParts(self)
            if value.__name__ == "format_map":
                parts.vformat(value.__self__, (), args[0])
            else:
                parts.vformat(value.__self__, args, values)
            return assemble(text, parts.found)

        return format


class _FormattedParts(SandboxedFormatter):
    """Collects the parts of a formatted string: its literal text, and values inserted without a format."""

    def __init__(self, environment: ChatEnvironment) -> None:
        super().__init__(environment)
        self.found: list[str] = []

    def parse(self, format_string: str) -> Any:
        for part in super().parse(format_string):
            origins = set(origin_of(format_string))
            self.found.append(TrackedStr(part[0], bytes(origins) * len(part[0])) if len(origins) == 1 else part[0])
            yield part

    def format_field(self, value: Any, format_spec: str) -> Any:
        text = super().format_field(value, format_spec)
        self.found.append(value if isinstance(value, TrackedStr) and not format_spec else text)
        return text


class _TrackingCodeGenerator(CodeGenerator):
    """Compiles literals of a template to TrackedStr, and `~` to an operation that preserves origins."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(_constant(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_TemplateData(node, frame)
        else:
            self.write(_constant(node.data))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _constant("".join(group))


def _constant(value: Any) -> str:
    """The Python code of a constant."""
    if isinstance(value, str):
        return f"environment.literal({str.__repr__(value)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_constant, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(_constant(item) + ', ' for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_constant(key)}: {_constant(item)}' for key, item in value.items())}}}"
    return repr(value)


# ---- filters and functions of chat templates


class _Generation(Extension):
    """The tag {% generation %}, which marks the model's messages for training. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Values(Namespace):
    """A `namespace` that rejects names with a leading underscore, which could reach Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:  # no parameter self: a template may use that name
        namespace, *rest = args
        given = dict(*rest, **values)
        for name in given:
            _check_name(name)
        Namespace.__init__(namespace, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: names begin with a letter")


class _Dict:
    """The global `dict` of templates: a callable, so that templates do not get Python's type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _tojson(dumps: Callable[..., str]) -> Callable[..., str]:
    """The filter `tojson` with the arguments that it has in transformers."""

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    return tojson


# ---- filters of Jinja that would lose origins


@pass_eval_context
def _join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    return filters.sync_do_join(context, value, tracked(d), attribute)


def _title(s: str) -> str:
    return with_other_case(filters.do_title(s), str(s))


def _indent(s: str, *args: Any, **options: Any) -> str:
    return with_other_spaces(filters.do_indent(s, *args, **options), s)


@pass_environment
def _wordwrap(environment: Any, s: str, *args: Any, **options: Any) -> str:
    return with_other_spaces(filters.do_wordwrap(environment, s, *args, **options), s)
