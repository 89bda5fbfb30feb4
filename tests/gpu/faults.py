"""Fault injection: CuPy's modules with a call that fails, as do all later ones if the fault is a lost device.

It works on the fake CuPy and on the real one, and tracks what has been created but not destroyed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

from llamac.gpu import cupy_modules
from llamac.gpu.cupy_modules import Modules

INVALID_VALUE, LOST = 1, 719  # an error of one call, and one of that call and all later ones
# The function that destroys what another one creates, in the order in which everything can be destroyed.
DESTROYED_BY = {
    "graphInstantiate": "graphExecDestroy",
    "streamEndCapture": "graphDestroy",
    "eventCreateWithFlags": "eventDestroy",
    "hostAlloc": "freeHost",
    "malloc": "free",
    "moduleLoadData": "moduleUnload",
    "streamCreateWithFlags": "streamDestroy",
}
DESTROYING = tuple(DESTROYED_BY.values())


class Faults:
    """Modules whose calls can fail.

    Attributes:
        modules: The modules.
        calls: The names of the functions that have been called.
        held: What has been created and not destroyed: the function that destroys it, and its handle.
    """

    def __init__(self, modules: Modules) -> None:
        self._real = modules
        self._at = 0
        self._status = 0
        self.calls: list[str] = []
        self.held: list[tuple[str, int]] = []
        self.modules = Modules(
            cast("cupy_modules.Runtime", _Module(self, modules.runtime, "CUDARuntimeError")),
            cast("cupy_modules.Driver", _Module(self, modules.driver, "CUDADriverError")),
            modules.nvrtc,
        )

    def fail(self, at: int, status: int) -> None:
        """Make the call with this number fail, from 1; with `LOST`, also all later ones. 0: none."""
        self.calls, self._at, self._status = [], at, status

    def call(self, module: Any, error: str, name: str, arguments: tuple[Any, ...]) -> Any:
        """Call a function of a module."""
        self.calls.append(name)
        number = len(self.calls)
        is_failing = self._at and (number == self._at or (number > self._at and self._status == LOST))
        if is_failing and name != "streamEndCapture":
            raise getattr(module, error)(self._status)
        found = getattr(module, name)(*arguments)
        if is_failing:  # the capture ends anyway
            module.graphDestroy(found)
            raise getattr(module, error)(self._status)
        if name in DESTROYED_BY:
            self.held.append((DESTROYED_BY[name], found))
        elif name in DESTROYING:
            self.held.remove((name, arguments[0]))
        return found

    def destroy_all(self) -> None:
        """Destroy what is held: only the program has lost the device."""
        self.fail(0, 0)
        with contextlib.suppress(Exception):  # the program was capturing
            stream = next(handle for name, handle in self.held if name == "streamDestroy")
            self._real.runtime.graphDestroy(self._real.runtime.streamEndCapture(stream))
        for name, handle in sorted(self.held, key=lambda each: DESTROYING.index(each[0])):
            module = self._real.driver if name == "moduleUnload" else self._real.runtime
            getattr(module, name)(handle)
        self.held.clear()


class _Module:
    """A module of CuPy. Its constants and exceptions are the real ones."""

    def __init__(self, faults: Faults, module: Any, error: str) -> None:
        self._faults = faults
        self._module = module
        self._error = error

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not callable(value) or isinstance(value, type):
            return value
        call: Callable[..., Any] = lambda *arguments: self._faults.call(self._module, self._error, name, arguments)  # noqa: E731
        return call
