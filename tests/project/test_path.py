"""The path of a token, as docs/architecture.md lists it: every call is where the list says, and calls the next one."""

from __future__ import annotations

import itertools
import re
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

import llamac

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"

MAX_CALLS, MAX_FILES = 14, 9

# Calls through a pointer, a decorator or an iteration, and the text that makes the next function the called one.
INDIRECT = {
    ("Model.stream", "in_scope"): ("llamac/engine/generation/stream.py", "    @_core.scoped\n    def __next__(self)"),
    ("in_scope", "Stream.__next__"): ("llamac/_core_session.pxi", "def scoped(method):"),
    ("pool_run", "forward"): (
        "csrc/eval.c",
        "return (struct pool_job){ e->session->threads, e->n_rows <= SHORT_ROWS, forward",
    ),
    ("multiply", "gemm"): ("csrc/kernels_template.h", "    .gemm = gemm,"),
    ("gemm", "multiply_panel"): (
        "csrc/kernels_quant.h",
        "PANEL_KERNEL(panel_kernel_q4, multiply_panel, micro_kernel_int8,",
    ),
    ("multiply_panel", "micro_kernel_int8"): ("csrc/kernels_gemm.h", "[LLAMAC_Q4] = { panel_kernel_q4, "),
}


class Call(NamedTuple):
    name: str
    file: str
    following: str  # the text of the next call

    @property
    def bare(self) -> str:
        return self.name.rpartition(".")[2]


def listed_calls() -> list[Call]:
    section = PAGE.read_text().split("## The path of a token", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \| [^|]+ \| `([^`]+)` \|$", section, re.MULTILINE)
    return [Call(*row) for row in rows]


def indented_block(lines: list[str], definition: str) -> list[str] | None:
    """The line that starts with a definition and the lines that are indented more than it."""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith(definition):
            continue
        depth = len(line) - len(line.lstrip())
        end = number + 1
        # the signature may span lines; its last one is indented like the first
        while end < len(lines) and (
            not lines[end].strip()
            or len(lines[end]) - len(lines[end].lstrip()) > depth
            or lines[end].lstrip()[0] == ")"
        ):
            end += 1
        return lines[number:end]
    return None


def text_of(call: Call) -> str:
    """The text of a function, without the line of its name."""
    text = (ROOT / call.file).read_text()
    if call.file.startswith("csrc/"):
        found = re.search(
            rf"^(?!//)\w[^;{{}}\n]*\b{call.bare}\([^;{{}}]*\) \{{\n.*?^\}}$", text, re.MULTILINE | re.DOTALL
        )
        assert found, f"{call.file} has no function {call.bare}"
        return found.group().partition("{")[2]
    block: list[str] | None = text.splitlines()
    for part in call.name.split(".")[:-1]:
        block = indented_block(block or [], f"class {part}") or indented_block(block or [], f"cdef class {part}")
    found_block = indented_block(block or [], f"def {call.bare}(")
    assert found_block, f"{call.file} has no function {call.name}"
    return "\n".join(found_block[1:])


def test_the_listed_path_is_short() -> None:
    calls = listed_calls()
    assert (calls[0].name, calls[-1].name) == ("Model.stream", "micro_kernel_int8")
    assert len(calls) <= MAX_CALLS
    assert len({call.file for call in calls}) <= MAX_FILES
    assert f"is {len(calls)} calls in {len({call.file for call in calls})} files" in PAGE.read_text()


def test_the_functions_below_the_list_exist() -> None:
    paragraph = re.search(r"^The output projection .*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert paragraph
    text = "".join((ROOT / "csrc" / name).read_text() for name in ("forward.c", "ffn.c", "products.c"))
    for name in re.findall(r"`(\w+)`", paragraph.group()):
        assert re.search(rf"^\w[^;{{}}\n]*\b{name}\(", text, re.MULTILINE), f"there is no function {name}"


@pytest.mark.parametrize("call", listed_calls(), ids=lambda call: call.name)
def test_each_function_is_where_the_list_says_and_makes_the_call(call: Call) -> None:
    assert call.following in text_of(call)


def test_each_call_reaches_the_next_function_of_the_list() -> None:
    calls = listed_calls()
    for call, following in itertools.pairwise(calls):
        if (link := INDIRECT.get((call.name, following.name))) is None:
            assert re.search(rf"\b{following.bare}\(", call.following), f"{call.name} does not call {following.name}"
        else:
            file, text = link
            assert text in (ROOT / file).read_text(), f"{file} no longer has {text!r}"
    assert set(INDIRECT) <= {(call.name, following.name) for call, following in itertools.pairwise(calls)}


def test_a_step_has_the_listed_frames_of_python(llama2c: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper, a generator or a comprehension on the way would be a frame of its own."""
    prepare, frames = llamac.Session._prepare, []

    def record(session: llamac.Session, rows: int, positions: int) -> bool:
        frames.append([(frame.name, Path(frame.filename).name) for frame in traceback.extract_stack()])
        return prepare(session, rows, positions)

    with llamac.load(llama2c) as model, model.stream("Once", max_tokens=40, temperature=0) as stream:
        next(stream)
        monkeypatch.setattr(llamac.Session, "_prepare", record)
        next(stream)
    path = frames[0]
    below = path[1 + max(i for i, (name, _) in enumerate(path) if name.startswith("test_")) :]
    in_python = [(call.bare, Path(call.file).name) for call in listed_calls() if call.file.endswith(".py")]
    compiled = ("_core.pyx", "llamac/_core.pyx")  # tracebacks show frames of Cython only for exceptions
    assert [frame for frame in below[:-1] if frame[1] not in compiled] == in_python[1:]
