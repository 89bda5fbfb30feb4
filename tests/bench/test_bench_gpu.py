"""The parts of bench/gpu.py that need no GPU: leaks in cycles of loading and closing, on the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

import llamac
from bench_modules import bench
from builders import checkpoint, llama_config, write_model
from llamac.gpu.device_model import DeviceModel


def test_cycles_of_loading_and_closing_leak_nothing_and_a_leak_is_found(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    health = bench("gpu_health")
    health.check_leaks("emulator", 3)
    assert "3 cycles of loading and closing: 0 bytes of the device lost, " in capsys.readouterr().out
    left = []

    def keep(model: DeviceModel) -> None:
        left.append(model)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceModel, "close", keep)
        with pytest.raises(SystemExit, match=r"3 cycles of loading and closing lost \d+ bytes of the host's memory"):
            health.check_leaks("emulator", 3)
    for model in left:
        model.close()


def test_captured_graphs_are_measured_where_there_are_any(
    kernel_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of many rows are not captured. They must not replay the graph of other rows, which has other addresses."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    monkeypatch.setattr("llamac.gpu.graph.CAPTURED_ROWS", 2)
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config(n_layers=1)))
    with llamac.load(path, device="emulator") as model, model.session(sequences=4) as session:
        few, many = (bench("gpu").decode(model, session, batch, 1, 1e9) for batch in (2, 4))
    assert few["graph_tokens_per_second"] > 0
    assert few["share"] > 0
    assert many.keys() == {"sequences", "tokens_per_second"}


@pytest.mark.parametrize(("device", "host", "leaks"), [(0, 1 << 20, False), (256_000, 0, True), (0, 1 << 22, True)])
def test_leaks_of_one_allocation_in_each_cycle_are_found(device: int, host: int, leaks: bool) -> None:
    assert bool(bench("gpu_health").Leaks(1000, device, host).problem) == leaks
