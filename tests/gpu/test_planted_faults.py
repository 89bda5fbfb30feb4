"""Faults that are planted into kernels and page tables: the comparison with the CPU, or the emulator, finds each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from llamac.errors import DeviceError
from llamac.gpu import passes
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.sources import kernel_files

IDS = some_ids(70)


@pytest.fixture
def difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Emulator], bool]:
    """Whether the logits of steps after a prompt on a device differ from those of the CPU."""

    def logits(session: llamac.Session) -> Floats:
        session.eval(IDS[:66], logits=None)
        steps = [session.eval([token], logits="all") for token in IDS[66:]]
        return np.concatenate(steps)

    def differ(emulator: Emulator) -> bool:
        monkeypatch.setattr("llamac.gpu.device_model.open_driver", lambda name, progress: emulator)
        path = write_model(tmp_path / "m.bin", checkpoint(llama_config()))
        with (
            llamac.load(path) as model,
            model.session() as cpu,
            model.session(device="emulator") as device,
        ):
            return bool((logits(cpu).view(np.uint32) != logits(device).view(np.uint32)).any())

    return differ


def planted(tmp_path: Path, name: str, text: str, fault: str) -> list[Path]:
    """The kernels' files that a model in f32 runs, one of them with `fault` in place of `text`."""
    folder = Path(shutil.copytree(kernel_files()[0].parent, tmp_path / "kernels"))
    path = folder / name
    assert path.read_text().count(text) == 1
    path.write_text(path.read_text().replace(text, fault))
    quantized = ("products_gguf", "products_llamac")
    return [file for file in sorted(folder.glob("*.cu")) if not file.stem.startswith(quantized)]


def test_right_kernels_do_not_differ(kernel_cache: Path, difference: Callable[[Emulator], bool]) -> None:
    assert not difference(Emulator(kernel_cache))


def test_a_wrong_stride_is_found(tmp_path: Path, kernel_cache: Path, difference: Callable[[Emulator], bool]) -> None:
    files = planted(tmp_path, "rows.cu", "(size_t)from * stride + part", "(size_t)from * (stride - 1) + part")
    assert difference(Emulator(kernel_cache, files))


def test_a_missing_barrier_is_found(tmp_path: Path, kernel_cache: Path, difference: Callable[[Emulator], bool]) -> None:
    files = planted(
        tmp_path,
        "rows.cu",
        "Moments *shared) {\n    __syncthreads();\n    if (threadIdx.x < WARP_LANES) {",
        "Moments *shared) {\n    if (threadIdx.x < WARP_LANES) {",
    )
    with pytest.raises(DeviceError, match=r"rows\.cu|norms\.cuh"):
        difference(Emulator(kernel_cache, files, checked=True))


def test_a_stale_page_is_found(
    kernel_cache: Path, difference: Callable[[Emulator], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that sees the first page in place of the next one."""
    upload = passes.RowMemory.upload

    def stale(self: passes.RowMemory, job: passes.Pass, shape: passes.Shape) -> None:
        for table in job.tables:
            table[:, 1:] = table[:, :1]
        upload(self, job, shape)

    monkeypatch.setattr(passes.RowMemory, "upload", stale)
    assert difference(Emulator(kernel_cache))
