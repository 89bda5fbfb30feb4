"""Records what an emulated device copies from and to the host, and what drafters draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import llamac
from llamac.engine.speculation.drafter import Drafter
from llamac.gpu.buffers import HIDDEN
from llamac.gpu.emulator.emulator import Emulator


def recorded(monkeypatch: pytest.MonkeyPatch, drafter: type[Drafter]) -> tuple[list[int], list[list[int]]]:
    """Lists that receive the bytes of each copy from the emulated device, and each draft of a class of drafters."""
    copied: list[int] = []
    drafted: list[list[int]] = []
    download, draft = Emulator.download, drafter.draft

    def counted(self: Emulator, address: int, to: Any) -> None:
        copied.append(to.nbytes)
        download(self, address, to)

    def recording(self: Any, *arguments: Any) -> list[int]:
        drafted.append(draft(self, *arguments))
        return drafted[-1]

    monkeypatch.setattr(Emulator, "download", counted)
    monkeypatch.setattr(drafter, "draft", recording)
    return copied, drafted


def state_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[llamac.Model], int]:
    """Returns how often hidden states of an emulated device's passes have come from the host or gone there."""
    addresses: list[int] = []

    def noting(copy: Callable[..., None]) -> Callable[..., None]:
        def noted(self: Emulator, address: int, memory: Any) -> None:
            addresses.append(address)
            copy(self, address, memory)

        return noted

    for name in ("upload", "download"):
        monkeypatch.setattr(Emulator, name, noting(getattr(Emulator, name)))

    def count(model: llamac.Model) -> int:
        assert model._device is not None
        graphs = model._device._graphs.values()
        places = {graph._buffers[HIDDEN] for graph in graphs if graph._buffers._capacity[2]}
        places |= {graph._buffers["states"] for graph in graphs if "states" in graph._widths}
        assert places
        return sum(address in places for address in addresses)

    return count
