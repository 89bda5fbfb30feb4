"""The program that renders chat templates, in a process of its own. It imports nothing of llamac.

A template is a program of strangers: it may loop for days, fill the memory, or know a way out of jinja2's sandbox. Here
it can only lose its own process: that one has a limit on its memory, can open no files or sockets once it has begun,
and is ended when a rendering takes too long, by its parent (chat_process.py) or, where that is gone, by a timer.

On standard input come frames of 8 bytes length and a `marshal` of that length: first the module path, then requests
(template, variables, characters the result may have, seconds it may take). On standard output go frames of 8 bytes
length and JSON in UTF-8: {"text": ...}, or {"kind": ..., "error": ...}.

The environment is the one in which transformers renders chat templates, so that a template gives the same text.
"""

from __future__ import annotations

import json
import marshal
import signal
import struct
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable

    import jinja2

MEMORY = 1 << 29  # bytes of address space for the whole process; Python and jinja2 need some 60 MB
CACHED = 16  # templates that are kept compiled
GRACE = 2.0  # seconds that the parent has to end this process before a timer does
MAX_MESSAGE = 2000  # characters of an error


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.path[:] = _receive(source)
    environment = make_environment()
    compiled: dict[str, jinja2.Template] = {}
    environment.from_string("{{ x | tojson }}{{ strftime_now('%d %b %Y') }}").render(x=[""])  # imports what is lazy
    _lock_down()
    _send(sink, {"text": ""})
    while True:
        try:
            template, variables, limit, seconds = _receive(source)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds + GRACE)  # whose signal ends the process
        try:
            if template not in compiled:
                while len(compiled) >= CACHED:
                    compiled.pop(next(iter(compiled)))
                compiled[template] = environment.from_string(template)
            answer = {"text": render(compiled[template], variables, limit)}
            frame = _frame(answer)
        except Exception as error:  # whatever it is, it is the template's
            frame = _frame(_failure(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(frame)
        sink.flush()


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
    """The text of a template; OverflowError as soon as it has more than `limit` characters."""
    parts: list[str] = []
    size = 0
    for part in template.generate(variables):
        size += len(part)
        if size > limit:
            raise OverflowError(f"the text has more than {limit} characters")
        parts.append(part)
    return "".join(parts)


def make_environment() -> jinja2.Environment:
    """jinja2's immutable sandbox with what chat templates may use beyond Jinja itself."""
    # Some filters and reports of errors import these when they need them, when no file can be opened any more.
    import html  # noqa: F401
    import pprint  # noqa: F401
    import textwrap  # noqa: F401
    from datetime import datetime

    from jinja2 import TemplateError, constants, nodes  # noqa: F401
    from jinja2.debug import rewrite_traceback_stack  # noqa: F401
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """{% generation %} marks what the model wrote; for the text it means nothing."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Callable[[], str]) -> str:
            return caller()

    class Values(Namespace):
        """A `namespace` whose names are plain ones: others could reach into Python."""

        def __init__(*args: Any, **values: Any) -> None:  # without self, which may be one of the names
            own, *rest = args
            given = dict(*rest, **values)
            for name in given:
                _plain_name(name)
            Namespace.__init__(own, given)

        def __setitem__(self, name: str, value: Any) -> None:
            _plain_name(name)
            super().__setitem__(name, value)

    def _plain_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}: names begin with a letter")

    class Dict:
        """What `dict` is for a template: a function, not Python's type."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: Any) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Values
    return environment


def _failure(error: Exception) -> dict[str, Any]:
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception:
        message = ""
    line = getattr(error, "lineno", None)
    if isinstance(line, int):
        message += f" (line {line})"
    return {"kind": kind, "error": message[:MAX_MESSAGE]}


def _lock_down() -> None:
    """Limits of the process, as far as the system has them. What is open stays open."""
    try:
        import resource
    except ImportError:
        return
    limits = {"RLIMIT_AS": MEMORY, "RLIMIT_NOFILE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, value in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, OSError, ValueError):
            continue


def _receive(source: BinaryIO) -> Any:
    head = source.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    return marshal.loads(source.read(size))


def _send(sink: BinaryIO, answer: dict[str, Any]) -> None:
    sink.write(_frame(answer))
    sink.flush()


def _frame(answer: dict[str, Any]) -> bytes:
    data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


if __name__ == "__main__":
    main()
