"""Renders chat templates in a separate process (chat_worker.py), which is killed if a template does not finish in time.

One process serves all threads. The first rendering starts it. It takes about 15 MB and ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

from llamac.errors import ChatTemplateError, LlamacError
from llamac.text.worker import Worker

SECONDS = 5.0  # time limit of a rendering; real templates take milliseconds
MAX_CHARACTERS = 1 << 24  # of a rendered text
WORKER = Worker("llamac.text.chat_worker", "the chat template", ChatTemplateError)


def render(template: str, variables: dict[str, Any], seconds: float = SECONDS, characters: int = MAX_CHARACTERS) -> str:
    """Render a template. Any thread may call this.

    Args:
        template: The text of the template.
        variables: The template's variables, as plain data.
        seconds: Time limit.
        characters: Length limit of the rendered text.

    Raises:
        ChatTemplateError: If the template fails, refuses the variables or exceeds a limit.
        UnsupportedError: If no Python interpreter was found for the worker.
    """
    return str(_ask(template, variables, None, seconds, characters)["text"])


def try_render(template: str, variables: dict[str, Any]) -> str:
    """Like `render`, but "" if the template fails or refuses the variables."""
    return str(_answer(template, variables, None, SECONDS, MAX_CHARACTERS).get("text", ""))


def render_tracked(
    template: str,
    variables: dict[str, Any],
    trusted: list[str],
    seconds: float = SECONDS,
    characters: int = MAX_CHARACTERS,
) -> tuple[str, bytes]:
    """Render a template and record the origin of each character (tracked_str.py).

    Args:
        template: The text of the template.
        variables: The template's variables, as plain data.
        trusted: The variables that count as text of the template, such as `bos_token`.
        seconds: Time limit.
        characters: Length limit of the rendered text.

    Returns:
        The text, and one byte per character with its origin.

    Raises:
        ChatTemplateError: As for `render`, or if the origins cannot be determined.
        UnsupportedError: As for `render`.
    """
    answer = _ask(template, variables, trusted, seconds, characters)
    text, runs = str(answer["text"]), answer.get("origins")
    if not isinstance(runs, list) or not all(type(number) is int and 0 <= number <= characters for number in runs):
        raise WORKER.bad_answer()
    counts, kinds = runs[::2], runs[1::2]
    if sum(counts) != len(text) or len(counts) != len(kinds) or any(kind > 2 for kind in kinds):
        raise WORKER.bad_answer()
    return text, b"".join(bytes([kind]) * count for count, kind in zip(counts, kinds, strict=True))


def prepare(template: str) -> None:
    """Start the process and let it compile a template, without waiting for it: a rendering is expected soon."""

    def compiled() -> None:
        with contextlib.suppress(LlamacError):  # a rendering will report it
            render_tracked(template, {"messages": []}, [])

    threading.Thread(target=compiled, name="llamac-template", daemon=True).start()


def _ask(
    template: str, variables: dict[str, Any], trusted: list[str] | None, seconds: float, characters: int
) -> dict[str, Any]:
    """Send a request to the worker. Returns its answer, or raises the error that it reports."""
    answer = _answer(template, variables, trusted, seconds, characters)
    if "text" not in answer:
        raise ChatTemplateError(_message(answer))
    return answer


def _answer(
    template: str, variables: dict[str, Any], trusted: list[str] | None, seconds: float, characters: int
) -> dict[str, Any]:
    """Send a request to the worker. Returns its answer, which can be a failure of the template."""
    data = WORKER.ask((template, variables, trusted, characters), seconds, 6 * characters + MAX_CHARACTERS)
    answer = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(answer, dict):
        raise WORKER.bad_answer()
    if answer.get("kind") == "MemoryError":
        WORKER.stop()
    return answer


def _message(answer: dict[str, Any]) -> str:
    kind, text = answer.get("kind"), answer.get("error")
    if kind == "TemplateError":  # raised by the template's raise_exception
        return f"the chat template refuses these messages: {text}"
    if kind == "MemoryError":
        return "the chat template needs too much memory: it was stopped"
    if kind == "OverflowError":
        return f"the chat template does too much: {text}"
    if kind == "UntraceableError":
        return (
            "the chat template renders differently each time, so that special tokens in messages cannot be recognized: "
            "use parse_special=True if the messages are trusted"
        )
    return f"the chat template failed: {kind}: {text}"
