"""An emulated device that fails when a test wants it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llamac.errors import DeviceError, OutOfMemoryError
from llamac.gpu.emulator.emulator import Emulator


def nothing() -> None:
    """Do nothing."""


class FailingDevice(Emulator):
    """An emulated device.

    Attributes:
        failing: The number of the next allocation that fails, from 1; 0: none does.
        lost: Whether everything but `close` fails.
        lost_at_upload: Whether the next upload loses it.
        launches: Launches so far, with those of replayed graphs.
        lost_after: The number of launches after which the device is lost; None: none.
        before_launch: Called before each launch.
        closed: Whether it has been closed.
    """

    failing = 0
    lost = False
    lost_at_upload = False
    launches = 0
    lost_after: int | None = None
    before_launch: Callable[[], None] = staticmethod(nothing)
    closed = False

    def alloc(self, size: int) -> int:
        self._check_lost()
        self.failing -= 1
        if self.failing == 0:
            raise OutOfMemoryError("no memory is left")
        return super().alloc(size)

    def free(self, address: int) -> None:
        if not self.closed:
            self._check_lost()
        super().free(address)

    def upload(self, *arguments: Any) -> None:
        self.lost |= self.lost_at_upload
        self._check_lost()
        super().upload(*arguments)

    def download(self, *arguments: Any) -> None:
        self._check_lost()
        super().download(*arguments)

    def copy(self, *arguments: Any) -> None:
        self._check_lost()
        super().copy(*arguments)

    def launch(self, *arguments: Any, **options: Any) -> None:
        self._check_lost()
        self.before_launch()
        super().launch(*arguments, **options)

    def _run(self, *arguments: Any) -> None:
        self.lost = self.lost or self.launches == self.lost_after
        self.launches += 1
        self._check_lost()
        super()._run(*arguments)

    def synchronize(self) -> None:
        self._check_lost()
        super().synchronize()

    def memory(self) -> tuple[int, int]:
        if not self.closed:
            self._check_lost()
        return super().memory()

    def close(self) -> None:
        self.closed = True
        super().close()

    def _check_lost(self) -> None:
        if self.lost:
            raise DeviceError("the device is lost", lost=True)
