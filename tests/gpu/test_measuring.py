"""Measured passes: the costs per step of the graph are the CPU's, and so are the bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from graph_cases import CASES

import llamac
from builders import checkpoint, some_ids, write_model
from commands import GREEDY, Command
from llamac.engine.inspection.profile import STEPS, Costs, Profile
from llamac.errors import UnsupportedError
from llamac.gpu import measuring
from llamac.gpu.emulator.emulator import Emulator

IDS = some_ids(60)
OUTSIDE = [STEPS.index(name) for name in ("embed", "output_norm", "logits")]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device (--device), whose compiled kernels later tests reuse."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    return str(request.config.getoption("device"))


def costs_of(model: llamac.Model, device: str) -> Costs:
    """The costs of a token after 20 others."""
    with model.session(device=device) as session:
        session.prefill(IDS[:20])
        profile = Profile(session)
        session.eval(IDS[20:21])
        return profile.costs()


NORMS = ["pre-whole-gated-rms", "parallel-head-plain-rms", "sub-norms"]
PARTS = ["shared experts", "experts beside a network", "layer embeddings", "layers of one part"]


@pytest.mark.parametrize("name", [*NORMS, *PARTS, "scaled layers", "keys as values", "chunks"])
def test_each_step_reads_what_it_reads_on_the_cpu(tmp_path: Path, device: str, name: str) -> None:
    path = write_model(tmp_path / "m.bin", checkpoint(CASES[name]))
    with llamac.load(path, kv_dtype="f32", threads=1) as model:
        expected, found = costs_of(model, "cpu"), costs_of(model, device)
    assert (found.bytes == expected.bytes).all()
    assert (found.ns[expected.bytes > 0] > 0).all()
    assert (found.ns[1:, OUTSIDE] == 0).all()


def test_measured_passes_have_the_same_bits(tmp_path: Path, device: str) -> None:
    """In chunks of many rows, and of few, which replay captured graphs with the marks in them."""
    path = write_model(tmp_path / "m.bin", checkpoint(CASES["shared experts"]))
    with llamac.load(path, kv_dtype="f32") as model, model.session(device=device) as session:
        expected = model.logits(IDS)
        profile, at = Profile(session), 0
        for size in (33, 1, 1, 1, 20, 4):
            before = profile.costs()
            found = session.eval(IDS[at : at + size], logits="all")
            assert (found == expected[at : at + size]).all()
            passed = (profile.costs() - before).ns
            assert (passed >= 0).all()
            assert passed[:, STEPS.index("qkv")].all()
            at += size
        before = profile.costs()
        session.truncate(9)
        session.eval(IDS[9:12], logits=None)
        passed = (profile.costs() - before).bytes
        assert passed[0, STEPS.index("logits")] == 0
        assert passed[0, STEPS.index("embed")] > 0
        with model.session(device=device) as other:  # is not measured
            assert (other.eval(IDS[:1]) == expected[0]).all()
        before = profile.costs()
        session.truncate(0)
        session.observe(IDS[:5], ["block"])
        assert (profile.costs() - before).ns[:, STEPS.index("ffn_down")].all()
    assert profile.costs().bytes.any()  # even after the session is closed


def test_a_run_prints_the_costs_on_a_device(tiny_llama: Path, device: str, llamac_command: Command) -> None:
    command = ("run", tiny_llama, "-i", "a prompt", *GREEDY, "-n", 5, "-q")
    plain, found = llamac_command(*command), llamac_command(*command, "--device", device, "--profile")
    assert (found.code, found.out) == (0, plain.out)
    rows = {line.split()[0]: line.split()[1:] for line in found.err.splitlines()[1:]}
    assert list(rows) == [*STEPS, "outside", "all", "limit:"]
    assert float(rows["ffn_up"][4]) > 0
    assert rows["ffn_up"][-1] == "%"
    limit = re.search(rf"^limit: {device} reads and writes ([\d.]+) GB/s when it copies", found.err, re.MULTILINE)
    assert limit is not None
    assert float(limit[1]) > 0


def test_a_device_that_cannot_measure_is_named_before_the_run(
    tiny_llama: Path, llamac_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Emulator, marks: int) -> None:
        raise UnsupportedError("the driver cannot measure captured graphs")

    monkeypatch.setattr(Emulator, "timer", refuse)
    command = ("run", tiny_llama, "-i", "x", "-n", 2, "--device", "emulator", "--profile")
    llamac_command(*command).fails_with("the driver cannot measure captured graphs")


def test_the_copy_fits_what_is_free(kernel_cache: Path) -> None:
    small = Emulator(kernel_cache, [], memory=1 << 20)
    small.alloc(1 << 19)
    assert measuring.copy_rate(small) > 0
    assert small.memory()[0] == 1 << 19
    small.close()
