"""Faults planted in kernels and page tables: the comparison with the CPU, or the emulator, finds each.

`FAULTS` has one for each source of kernels, and the comparison that finds it. Two more faults of kernels, and those of
page tables, need a model.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from gpu.layer_reference import LayerReference
from gpu.reference import Reference

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from llamac import _core
from llamac.errors import DeviceError
from llamac.gpu import passes
from llamac.gpu.emulator.emulator import Emulator
from llamac.gpu.launches import Form
from llamac.gpu.layer_launches import HeadNorm, HeadShape
from llamac.gpu.sources import included, kernel_files

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


def with_fault(tmp_path: Path, name: str, text: str, fault: str) -> Path:
    """A folder of the kernels' sources, one of them with `fault` in place of `text`."""
    folder = Path(shutil.copytree(kernel_files()[0].parent, tmp_path / "kernels"))
    path = folder / name
    assert path.read_text().count(text) == 1
    path.write_text(path.read_text().replace(text, fault))
    return folder


def planted(tmp_path: Path, name: str, text: str, fault: str) -> list[Path]:
    """The kernels' files that a model in f32 runs, one of them with `fault` in place of `text`."""
    quantized = ("products_gguf", "products_llamac")
    folder = with_fault(tmp_path, name, text, fault)
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


# A second import of tests by another name, which type checkers refuse.
draws, drafters, layers, products, recurrent = (
    importlib.import_module(f"gpu.test_{name}")
    for name in ("device_draws", "drafter_kernels", "layer_kernels", "products", "recurrent_kernels")
)
DTYPES = dict(_core.dtypes())
Comparison = Callable[[LayerReference, Reference, Emulator], object]


class Fault(NamedTuple):
    """A fault in a kernel.

    Attributes:
        source: The file that has it.
        text: What the fault replaces.
        fault: What is there instead.
        files: The files of kernels that the comparison needs.
        compare: The comparison with the core, which fails.
        report: What its error must match, if the checks of memory have to find the fault.
    """

    source: str
    text: str
    fault: str
    files: tuple[str, ...]
    compare: Comparison
    report: str = "."


def multiplied(dtype: str, rows: int, columns: int, m: int) -> Comparison:
    """The comparison of a product."""

    def compare(_: LayerReference, reference: Reference, device: Emulator) -> None:
        x = np.random.default_rng(columns).standard_normal((m, columns), np.float32)
        products.check_product(reference, device, DTYPES[dtype], rows, x, fast=False, plain=True)

    return compare


BARRIER = "__syncthreads();"
RACE = "nothing orders the two|copies in the background"
Q4 = "q4.cu", "pack.cu"  # the first is made for the test: compiling all dtypes takes long
FAULTS = {
    "attention goes on before a block has been used": Fault(
        *("attend.cuh", f"{BARRIER}   // the next block overwrites scores", "", ("attend_f32.cu", "attend_merge.cu")),
        lambda layer, _, device: layers.test_attention(
            layer, device, "f32", HeadShape(4, 2, 24, 24), 0, 0.0, has_sinks=False, farthest=None
        ),
    ),
    "a block is merged with itself": Fault(
        *("attend_merge.cu", "if (j < i) before", "if (j <= i) before", ("attend_merge.cu",)),
        lambda layer, _, device: layers.test_many_blocks_are_merged(layer, device),
    ),
    "a draft is missing in its last branch": Fault(
        *("heads.cu", "table <= last_table; table++", "table < last_table; table++", ("heads.cu",)),
        lambda layer, _, device: layers.test_heads_are_normed_rotated_and_stored(
            layer, device, "f32", 16, 16, HeadNorm.NONE
        ),
    ),
    "pairs are counted before all counts are 0": Fault(
        *("experts.cu", f"masks[i] = 0;\n    {BARRIER}", "masks[i] = 0;", ("experts.cu",)),
        lambda layer, _, device: layers.test_experts_are_chosen_and_sorted(layer, device, 60, 4, 70, normalized=True),
    ),
    "the last tile of an expert has rows of the next": Fault(
        *("experts_tiles.cu", "min(most, starts[e + 1] - first)", "most"),
        ("experts_tiles.cu", "products_float.cu"),
        lambda _, core, device: products.test_products_of_experts(core, device, DTYPES["f32"], (2, 0, 19, 1)),
    ),
    "packed rows overlap": Fault(
        *("pack.cu", "row * input_layout_of(form, columns).end", "row * input_layout_of(form, columns).scales"),
        ("pack.cu", "rows.cu"),
        lambda _, __, device: layers.test_rows_are_packed_as_they_are_computed(device, Form.INT8),
    ),
    "embeddings overlap": Fault(
        *("embed.cu", "x[(size_t)row * columns + column]", "x[(size_t)row * (columns - 1) + column]", ("embed.cu",)),
        lambda _, core, device: products.test_embeddings_have_the_bits_of_the_core(core, device, DTYPES["f32"]),
    ),
    "sums are read before they are written": Fault(
        *("draw.cu", f"= x;\n    {BARRIER}\n    for (int i = 0", "= x;\n    for (int i = 0", ("draw.cu",)),
        lambda _, __, device: draws.test_tokens_are_those_of_the_core(device, 3001),
    ),
    "the id after the one that is looked for": Fault(
        *("drafter.cu", "if (ids[middle] < (float)id)", "if (ids[middle] <= (float)id)", ("drafter.cu",)),
        lambda _, __, device: drafters.test_logits_of_a_head_move_to_their_ids(device, [0, 1, 2]),
    ),
    "a state with a wrong stride": Fault(
        *("recurrent.cu", "to[(size_t)slot * channels] = x", "to[(size_t)slot * (channels - 1)] = x"),
        ("recurrent.cu",),
        lambda layer, _, device: recurrent.test_convolutions(layer, device, 4, is_gated=False),
    ),
    "weights are overwritten while they are multiplied": Fault(
        *("products_float.cu", f"if (start) {BARRIER}", "", ("products_float.cu",)), multiplied("f32", 140, 300, 70)
    ),
    "a block is read before it has arrived": Fault(
        *("products_few.cuh", "copy_async_wait<stages - 1>();\n", "\n", Q4), multiplied("q4", 16, 2048, 1)
    ),
    "a block arrives while lanes still read the one before": Fault(
        *("products_few.cuh", "__syncwarp();\n        copy(at);", "copy(at);", Q4), multiplied("q4", 16, 10240, 1), RACE
    ),
    "inputs arrive while warps still multiply those before": Fault(
        *("products_many.cuh", f"lane);\n        {BARRIER}\n    }}", "lane);\n    }", Q4),
        multiplied("q4", 140, 600, 70),
        RACE,
    ),
    "inputs are multiplied before all threads have copied them": Fault(
        *("products_many.cuh", f"copy_async_wait<1>();\n        {BARRIER}", "copy_async_wait<1>();", Q4),
        multiplied("q4", 140, 600, 70),
    ),
    "the other half of a word's codes": Fault(
        *("weights.cuh", "__dp2a_lo(x, 0x0100u, 0u)", "__dp2a_lo(x, 0x0001u, 0u)", Q4), multiplied("q4", 16, 256, 1)
    ),
}


def test_each_file_of_kernels_has_a_fault() -> None:
    """Or includes the header that has one."""
    sources = {each.source for each in FAULTS.values()} | {"rows.cu"}
    for path in kernel_files():
        headers = {name.rpartition("/")[2] for name in included(path)}
        assert (headers | {path.name}) & sources, path.name


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(tmp_path: Path, kernel_cache: Path, core_kernels: ctypes.CDLL, name: str) -> None:
    each = FAULTS[name]
    folder = with_fault(tmp_path, each.source, each.text, each.fault)
    (folder / "q4.cu").write_text('#include "products.cuh"\nPRODUCT_INT8(q4, LLAMAC_Q4)\n')
    device = Emulator(kernel_cache, [folder / file for file in each.files], checked=True)
    try:
        with pytest.raises((AssertionError, DeviceError), match=each.report):
            each.compare(LayerReference(core_kernels), Reference(core_kernels), device)
    finally:
        device.close()
