"""Renders chat templates in a worker process (worker_main.py).

A template is an untrusted program: it can loop for days, exhaust memory, or exploit a hole in jinja2's sandbox.

A request is (template, variables, trusted, characters). `trusted` lists the variables that count as text of the
template; None requests no origins. `characters` limits the text. An answer is JSON with `text` and, if requested,
`origins`: alternating counts and origins of runs of characters. A failure has `kind` and `error` instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MEMORY = 1 << 29  # bytes of address space for the process; Python and jinja2 need about 60 MB
MAX_MESSAGE = 2000  # characters of an error message


def prepare(_: Any) -> Callable[[Any], bytes]:
    """Import everything that a rendering can need, and return the function that answers requests."""
    # Some filters and error reports import these on first use.
    import html  # noqa: F401
    import pprint  # noqa: F401
    import textwrap  # noqa: F401

    from jinja2 import constants  # noqa: F401
    from jinja2.debug import rewrite_traceback_stack  # noqa: F401

    from llamac.text.chat_environment import Renderer

    renderer = Renderer()
    renderer.tracked("{{ x | tojson }}{{ strftime_now('%d %b %Y') }}", {"x": [""]}, [], 100)

    def answer(request: Any) -> bytes:
        template, variables, trusted, limit = request
        try:
            if trusted is None:
                return _encoded({"text": renderer.text(template, variables, limit)})
            found = renderer.tracked(template, variables, trusted, limit)
            return _encoded({"text": found, "origins": _run_lengths(found._origin)})
        except Exception as error:
            return _encoded(_failure(error))

    return answer


def _encoded(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _run_lengths(origins: bytes) -> list[int]:
    """Runs of equal origins as [count, origin, count, origin, ...]."""
    return [
        number
        for run in re.finditer(rb"\x00+|\x01+|\x02+", origins)
        for number in (run.end() - run.start(), origins[run.start()])
    ]


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
