"""Progress of an export, phase by phase; an interruption in any phase leaves no files."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from itertools import groupby
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from golden.cases import LLAMA
from golden.tiny_checkpoints import write_checkpoint
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from processes import TIMEOUT, heed_signals

VERIFYING, REFERENCE, WRITING, ENGINE = "verifying", "reference logits", "writing", "engine logits"
PHASES = {
    "llamac": (VERIFYING, REFERENCE, WRITING, ENGINE),
    "hf": (VERIFYING, WRITING),
    "llama2c": (VERIFYING, WRITING),
}
EACH = [(to, phase) for to, phases in PHASES.items() for phase in phases]


Calls = list[tuple[str, int, int]]


def calls_of(source: Path, out: Path, **options: str | None) -> Calls:
    calls: Calls = []
    export(source, out, progress=lambda *call: calls.append(call), **options)  # type: ignore[arg-type]
    return calls


def check_phases(calls: Calls, expected: tuple[str, ...]) -> None:
    """Assert that each phase occurs once, starts at 0, never decreases, and ends at its total."""
    phases = [(name, list(group)) for name, group in groupby(calls, key=lambda call: call[0])]
    assert [name for name, _ in phases] == list(expected)
    for _, group in phases:
        done = [now for _, now, _ in group]
        (total,) = {total for _, _, total in group}
        assert done == sorted(done)
        assert (done[0], done[-1]) == (0, total)
        assert len(done) > 2


@pytest.mark.parametrize("to", PHASES)
def test_every_phase_is_reported_from_start_to_end(to: str, source: Path, tmp_path: Path) -> None:
    check_phases(calls_of(source, tmp_path / "out", to=to), PHASES[to])


def test_bytes_and_steps_are_counted(source: Path, tmp_path: Path) -> None:
    totals = {phase: total for phase, _, total in calls_of(source, tmp_path / "out.bin")}
    with llamac.load(source) as model:
        assert totals[VERIFYING] == model.weight_bytes
        assert totals[REFERENCE] == model.config["n_layers"] + 1  # the output matrix is a step
    with llamac.load(tmp_path / "out.bin") as model:
        assert totals[WRITING] == model.weight_bytes
        assert totals[ENGINE] == 2 * len(replay_probes(model))  # both KV dtypes


def test_without_probes_their_phases_are_absent(source: Path, tmp_path: Path) -> None:
    check_phases(calls_of(source, tmp_path / "out.bin", probe_source=None), (VERIFYING, WRITING))


def test_a_transformers_reference_reports_progress(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: parity)")
    folder = write_checkpoint(tmp_path / "hf", LLAMA)
    calls = calls_of(folder, tmp_path / "out.bin", probe_source="transformers")
    check_phases(calls, (REFERENCE, WRITING, ENGINE))


def test_a_replay_reports_each_probe(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out.bin")
    calls: Calls = []
    with llamac.load(tmp_path / "out.bin") as model:
        results = replay_probes(model, lambda *call: calls.append(call))
    assert calls == [("probes", done, len(results)) for done in range(len(results) + 1)]


# ---- interruptions


@pytest.mark.parametrize(("to", "phase"), EACH)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_export_leaves_nothing(
    to: str, phase: str, error: type[BaseException], at: int, source: Path, tmp_path: Path
) -> None:
    calls = []

    def stop(now: str, done: int, total: int) -> None:
        calls.append(now)
        if now == phase and calls.count(now) == at:
            temporary = phase in (WRITING, ENGINE)
            assert bool(list(tmp_path.iterdir())) == temporary, "a temporary file exists exactly while it is written"
            raise error

    with pytest.raises(error):
        export(source, tmp_path / "out", to=to, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", PHASES["llamac"])
def test_an_interrupted_export_keeps_the_old_file(phase: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "out.bin").write_bytes(b"old")

    def stop(now: str, done: int, total: int) -> None:
        if now == phase and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "out.bin", overwrite=True, progress=stop)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


# Long probes, so that the signal arrives during their passes.
LONG_PROBES = """
    import sys
    from llamac.export import probes
    from llamac.export.convert import export
    probes.RANDOM_LENGTHS = (200,) * 4
    if sys.argv[3] == "engine logits":  # the reference takes seconds, and its values do not matter
        import numpy as np
        probes._numpy_logits = lambda checkpoint, ids, progress: np.zeros((len(ids), checkpoint.config.vocab_size))
    def report(phase, done, total):
        print(f"{phase}: {done} of {total}", flush=True)
    try:
        export(sys.argv[1], sys.argv[2], overwrite=True, progress=report)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer: its probes are random ids, of any length."""
    made = checkpoint(llama_config(dim=512, n_heads=8, ffn=1408, n_layers=4))
    bare = Checkpoint(made.config, made.tensors)
    return write_model(tmp_path_factory.mktemp("slow") / "slow.bin", bare)


@pytest.mark.parametrize("phase", [REFERENCE, ENGINE])
def test_ctrl_c_interrupts_the_probe_passes(phase: str, slow: Path, tmp_path: Path) -> None:
    (tmp_path / "out.bin").write_bytes(b"old")
    command = [sys.executable, "-c", textwrap.dedent(LONG_PROBES), str(slow), str(tmp_path / "out.bin"), phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_signals) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(f"{phase}: 0 of "):
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=TIMEOUT)
    lines = rest.splitlines()
    assert lines[-1] == "interrupted"
    assert len(lines) <= 3, "the pass continued for more than two steps"
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
