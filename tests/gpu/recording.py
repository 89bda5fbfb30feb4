"""Records what an emulated device copies to the host, and what drafts."""

from __future__ import annotations

from typing import Any

import pytest

from llamac.engine.speculation.drafter import Drafter
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
