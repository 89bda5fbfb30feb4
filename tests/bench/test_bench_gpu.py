"""The parts of bench/gpu.py that need no GPU: leaks in cycles of loading and closing, on the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_modules import bench
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


@pytest.mark.parametrize(("device", "host", "leaks"), [(0, 1 << 20, False), (256_000, 0, True), (0, 1 << 22, True)])
def test_leaks_of_one_allocation_in_each_cycle_are_found(device: int, host: int, leaks: bool) -> None:
    assert bool(bench("gpu_health").Leaks(1000, device, host).problem) == leaks
