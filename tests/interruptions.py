"""Interrupts Python code reproducibly at a chosen instruction. Ctrl-C can do so at any instruction."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[1] / "llamac")


class Interruption:
    """Raises KeyboardInterrupt before the n-th bytecode instruction, from 0, that the package executes.

    Attributes:
        happened: Whether the interruption happened: whether there were that many instructions.
    """

    def __init__(self, n: int, folder: str = PACKAGE) -> None:
        self._left = n
        self._folder = folder
        self.happened = False

    def during(self, function: Callable[[], Any]) -> Any:
        """Call a function; return its result, or None if it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function()
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode" and not self.happened:
            if not self._left:
                self.happened = True
                raise KeyboardInterrupt
            self._left -= 1
        return self._trace
