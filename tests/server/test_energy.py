"""Energy, with made-up files of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamac.server.energy import Energy


def zone(folder: Path, place: str, name: str, energy: int, most: int = 10_000_000) -> Path:
    """A counter as the kernel shows it."""
    found = folder / place
    found.mkdir()
    for file, value in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", most)):
        (found / file).write_text(f"{value}\n")
    return found / "energy_uj"


def test_energy_counts_from_the_start_and_over_the_end_of_the_counter(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 9_999_999)
    zone(tmp_path, "intel-rapl:1", "package-1", 0)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 7)  # the same counter through another interface
    energy = Energy(tmp_path)
    assert energy.joules() == {"package-0": 0, "package-0/core": 0, "package-1": 0}
    package.write_text("7500000")
    core.write_text("1000000")
    assert energy.joules() == {"package-0": 2.5, "package-0/core": 1.000002, "package-1": 0}
    package.write_text("9500000")
    assert energy.joules()["package-0"] == 4.5


def test_counters_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert Energy(tmp_path / "none").joules() == {}
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    zone(tmp_path, "intel-rapl:1", "package-1", 1).write_text("not a number")
    later = zone(tmp_path, "intel-rapl:2", "package-2", 1_000_000)
    energy = Energy(tmp_path)
    assert energy.joules() == {"package-2": 0}
    later.write_text("2000000")
    assert energy.joules() == {"package-2": 1.0}
    later.unlink()
    assert energy.joules() == {"package-2": 1.0}


def test_a_file_that_only_root_reads_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert Energy(tmp_path).joules() == {}
