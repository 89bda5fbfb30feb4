"""`llamac run --profile`: its table, its counters, and that the text stays the same."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from commands import GREEDY, Command
from llamac.engine.hardware import counters
from llamac.engine.inspection.profile import STEPS


def test_the_table_has_every_step_and_the_text_stays(tiny_llama: Path, llamac_command: Command) -> None:
    command = ("run", tiny_llama, "-i", "a prompt", *GREEDY, "-n", 12)
    plain, found = llamac_command(*command, "-q"), llamac_command(*command, "-q", "--profile")
    assert (found.code, found.out) == (0, plain.out)
    head, *lines = found.err.splitlines()
    assert " ".join(head.split()) == "step prompt ms % MB GB/s decode ms % MB GB/s of limit"
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert list(rows)[: len(STEPS) + 2] == [*STEPS, "outside", "all"]
    for name in STEPS:
        assert float(rows[name][0]) >= 0
        assert float(rows[name][4]) >= 0
    for column in (0, 4):  # the parts of the time make up the whole
        parts = sum(float(rows[name][column]) for name in (*STEPS, "outside"))
        assert parts == pytest.approx(float(rows["all"][column]), rel=0.02, abs=0.1)
    assert rows["ffn_up"][-1] == "%"
    assert rows["attn_norm"][2:4] == ["-", "-"]
    limit = re.search(r"^limit: this machine reads ([\d.]+) GB/s with \d+ threads? \(\w+\)$", found.err, re.MULTILINE)
    assert limit is not None
    assert float(limit[1]) > 0


def test_counters_are_printed_by_phase_or_their_absence(
    tiny_llama: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("run", tiny_llama, "-i", "x", *GREEDY, "-n", 3, "-q", "--profile")

    counts = iter([{"cycles": 1000, "instructions": 2500}, {"cycles": 3000, "instructions": 5500}])
    monkeypatch.setattr(counters.Counters, "__init__", lambda self: setattr(self, "problem", None))
    monkeypatch.setattr(counters.Counters, "start", lambda self: None)
    monkeypatch.setattr(counters.Counters, "close", lambda self: None)
    monkeypatch.setattr(counters.Counters, "read", lambda self: next(counts))
    lines = llamac_command(*command).err.splitlines()
    assert lines[-2:] == [
        "counters, prompt: 1,000 cycles, 2,500 instructions, 2.50 instructions per cycle",
        "counters, decode: 2,000 cycles, 3,000 instructions, 1.50 instructions per cycle",
    ]
    monkeypatch.undo()

    def refuse(attributes: bytes) -> int:
        raise OSError(13, os.strerror(13))

    monkeypatch.setattr(counters.Counters.__init__, "__defaults__", (refuse,))
    line = llamac_command(*command).err.splitlines()[-1]
    assert line.startswith("counters: Permission denied: the system forbids it")


def test_a_trace_does_not_count(
    tiny_llama: Path, tmp_path: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "trace.html"
    found: list[bool] = []

    def read(self: counters.Counters) -> dict[str, int]:
        found.append(page.exists())
        return {}

    monkeypatch.setattr(counters.Counters, "read", read)
    assert llamac_command("run", tiny_llama, "-i", "x", "-n", 3, "--profile", "--trace", page).code == 0
    assert found == [False, False]
    assert page.exists()


def test_one_text_is_profiled(tiny_llama: Path, llamac_command: Command) -> None:
    result = llamac_command("run", tiny_llama, "-i", "x", "-n", 2, "--candidates", 2, "--profile")
    result.refuses_with("--profile is about one text")
