"""The emulator of a device: its language, its memory, and what it reports that a device would not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gpu.sanitized import library

from device_arrays import get, put
from llamac.errors import ArgumentError, DeviceError, OutOfMemoryError
from llamac.format.private_files import remove_abandoned_in
from llamac.gpu.emulator import build as emulator_build
from llamac.gpu.emulator.build import build
from llamac.gpu.emulator.emulator import Emulator

SAMPLES = [Path(__file__).parent / "samples.cu"]
MakeEmulator = Callable[..., Emulator]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_and_threads_compute_in_any_order(emulator: MakeEmulator, seed: int) -> None:
    device = emulator(SAMPLES, seed=seed)
    x = np.arange(64 * 5, dtype=np.float32)
    at, to = put(device, x), put(device, np.zeros(64 * 5, np.float32))
    device.launch("scale", (3, 1, 1), 128, [to, at, np.int32(300), np.float32(0.5)])
    assert get(device, to, np.float32, 320).tolist() == [*(x[:300] / 2), *[0] * 20]
    device.launch("total", (5, 1, 1), 64, [to, at])
    assert get(device, to, np.float32, 5).tolist() == x.reshape(5, 64).sum(1).tolist()
    numbers = np.arange(96, dtype=np.int32)
    at, to = put(device, numbers), put(device, numbers)
    device.launch("reverse", (1, 1, 1), 96, [to, at], shared=96 * 4)
    assert get(device, to, np.int32, 96).tolist() == numbers[::-1].tolist()
    parts, count = put(device, numbers), put(device, np.zeros(1, np.uint32))
    device.launch("ticket", (96, 1, 1), 32, [to, parts, count, at])
    assert get(device, to, np.int32, 1).tolist() == [numbers.sum()]


@pytest.mark.parametrize("seed", [0, 3])
def test_warp_operations(emulator: MakeEmulator, seed: int) -> None:
    device = emulator(SAMPLES, seed=seed)
    lane = np.arange(32)
    x = (lane * 7 % 32 * 5 - 60).astype(np.int32)
    to = put(device, np.zeros(288, np.int32))
    device.launch("warp_operations", (1, 1, 1), 32, [to, put(device, x)])
    found = get(device, to, np.int32, (9, 32))
    expected = [
        *(x[31 - lane], x[lane ^ 5], np.append(x[3:], x[-3:]), np.append(x[:3], x[:-3]), x[lane & ~7 | 1]),
        np.full(32, (1 << lane[x > 0]).sum(dtype=np.uint32).astype(np.int32)),
        *(np.full(32, bool((x > 90).any()) + 2), np.full(32, x.sum()), np.where(lane < 16, x[lane ^ 1], -1)),
    ]
    assert (found == np.array(expected)).all()


def test_the_product_of_a_warp(emulator: MakeEmulator) -> None:
    device = emulator(SAMPLES)
    generator = np.random.default_rng(1)
    a = generator.integers(-128, 128, (16, 32), np.int8)
    b = generator.integers(-128, 128, (32, 8), np.int8)
    g, q = np.arange(32) // 4, 4 * (np.arange(32) % 4)
    columns = q[:, None, None] + np.array([0, 0, 16, 16])[:, None] + np.arange(4)
    rows = g[:, None, None] + np.array([0, 8, 0, 8])[:, None]
    fragment_a = np.ascontiguousarray(a[rows, columns])
    fragment_b = np.ascontiguousarray(b[columns[:, ::2], g[:, None, None]])
    to = put(device, np.zeros(128, np.int32))
    device.launch("mma", (1, 1, 1), 32, [to, put(device, fragment_a), put(device, fragment_b)])
    product = a.astype(np.int32) @ b
    pair = 2 * (np.arange(32) % 4)
    expected = [product[g, pair], product[g, pair + 1], product[g + 8, pair], product[g + 8, pair + 1]]
    assert get(device, to, np.int32, 128).tolist() == np.stack(expected, 1).reshape(-1).tolist()


def test_loads_copies_and_conversions(emulator: MakeEmulator) -> None:
    device = emulator(SAMPLES)
    x, y = np.arange(32, dtype=np.float32), put(device, np.zeros(32, np.float32))
    device.launch("others", (1, 1, 1), 32, [y, put(device, x)])
    assert (get(device, y, np.float32, 32) == x + 1 + x[3] + x[1] + x[7]).all()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "some_at_the_barrier",
            "thread (0, 0, 0) waits at the barrier at samples.cu:95, but thread (40, 0, 0) has ret",
        ),
        ("two_barriers", "at the barrier at samples.cu:102, but thread (31, 0, 0) at that at samples.cu:100"),
        ("some_in_the_shuffle", "waits at the warp operation at samples.cu:106, but thread (7, 0, 0) has returned"),
        ("shuffle_from_outside", "samples.cu:109: a lane shuffles from a lane outside the mask"),
    ],
)
def test_threads_that_do_not_arrive_are_reported(emulator: MakeEmulator, kernel: str, message: str) -> None:
    device = emulator(SAMPLES)
    to = put(device, np.zeros(64, np.int32))
    with pytest.raises(DeviceError, match=f"^kernel {kernel}, block \\(0, 0, 0\\): ") as caught:
        device.launch(kernel, (1, 1, 1), 64, [to])
    assert message in str(caught.value)
    device.launch("reverse", (1, 1, 1), 64, [to, to], shared=256)  # the device still works


def test_arguments_of_another_type_are_reported(emulator: MakeEmulator) -> None:
    device = emulator(SAMPLES)
    to = put(device, np.zeros(64, np.int32))
    with pytest.raises(ArgumentError, match="parameters uint64, uint64, int32, float32; the arguments are uint64"):
        device.launch("scale", (1, 1, 1), 64, [to, to, np.uint64(5), np.float32(1)])
    with pytest.raises(ArgumentError, match="no file of kernels has scales; they have "):
        device.launch("scales", (1, 1, 1), 64, [])


def test_memory_is_bounded_and_poisoned(emulator: MakeEmulator) -> None:
    device = emulator(SAMPLES, memory=1 << 20)
    at = device.alloc(1000)
    assert np.isnan(get(device, at, np.float32, 250)).all()
    assert device.memory() == ((1 << 20) - 1000, 1 << 20)
    with pytest.raises(OutOfMemoryError, match="has 1047576 bytes of memory left, but 1048576 are needed"):
        device.alloc(1 << 20)
    for start, size in ((at, 1001), (at - 1, 4), (at + 1000, 1)):
        with pytest.raises(ArgumentError, match="no allocation has all of"):
            device.upload(start, np.zeros(size, np.uint8))
    device.fill(at, 7, 500)
    device.copy(at + 600, at, 300)
    assert get(device, at + 600, np.uint8, 301).tolist() == [*[7] * 300, 255]
    device.free(at)
    assert device.memory()[0] == 1 << 20
    with pytest.raises(ArgumentError, match="no memory was allocated at"):
        device.free(at)


def test_a_captured_graph_runs_when_it_is_replayed(emulator: MakeEmulator) -> None:
    device = emulator(SAMPLES)
    x = put(device, np.arange(64, dtype=np.float32))
    with device.capture() as graph:
        device.launch("scale", (1, 1, 1), 64, [x, x, np.int32(64), np.float32(2)])
        with pytest.raises(ArgumentError, match="a captured graph cannot upload"):
            device.upload(int(x), np.zeros(4, np.uint8))
    assert get(device, x, np.float32, 2).tolist() == [0, 1]
    graph.replay()
    graph.replay()
    assert get(device, x, np.float32, 3).tolist() == [0, 4, 8]


def test_kernels_are_compiled_once_although_several_want_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compiled(link: Sequence[str], source: Path, library: Path, flags: Sequence[str]) -> None:
        time.sleep(0.05)  # the others look for the library
        made.append(library.write_text("made"))

    monkeypatch.setattr("llamac.gpu.emulator.build._compile_kernels", compiled)
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: build(SAMPLES[0], tmp_path), range(3)))
    assert len(set(paths)) == len(made) == 1
    assert [path.suffix for path in sorted(tmp_path.iterdir())].count(".lock") == 0


def test_kernels_are_compiled_while_another_process_clears_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = emulator_build._run

    def run_and_clear(command: Sequence[str]) -> str:
        output = run(command)
        remove_abandoned_in(tmp_path)
        return output

    monkeypatch.setattr(emulator_build, "_run", run_and_clear)
    assert build(SAMPLES[0], tmp_path).exists()


# ---- checked accesses


@pytest.mark.parametrize("seed", [0, 5])
def test_right_kernels_pass_the_checks(emulator: MakeEmulator, seed: int) -> None:
    device = emulator(SAMPLES, seed=seed, checked=True)
    x, y = put(device, np.arange(512, dtype=np.int32)), put(device, np.zeros(512, np.int32))
    count = put(device, np.zeros(1, np.uint32))
    device.launch("total", (4, 1, 1), 64, [y, x])
    device.launch("reverse", (1, 1, 1), 96, [y, x], shared=96 * 4)
    device.launch("warp_operations", (1, 1, 1), 32, [y, x])
    device.launch("syncwarp_is_one", (1, 1, 1), 32, [y, x])
    device.launch("ticket", (96, 1, 1), 32, [y, put(device, np.zeros(96, np.int32)), count, x])
    device.launch("reverse_waits", (1, 1, 1), 96, [y, x], shared=96 * 16)
    assert (get(device, y, np.int32, 96) == np.arange(383, 287, -1)).all()


# For each kernel the launch's blocks, threads and shared memory, and part of the message.
ORDER = "of block (0, 0, 0), samples.cu:{}, wrote, and nothing orders the two"
WRONG = {
    "no_barrier": (1, 96, 384, "thread (48, 0, 0), samples.cu:129, writes 4 bytes of shared memory (byte 192 of 384)"),
    "no_second_barrier": (1, 64, 0, "thread (0, 0, 0), samples.cu:136, wrote, and nothing orders the two"),
    "shuffle_is_no_barrier": (1, 32, 0, "thread (31, 0, 0), samples.cu:143, wrote, and nothing orders the two"),
    "blocks_write_the_same": (2, 32, 0, ORDER.format(153)),
    "blocks_read_each_other": (2, 32, 0, ORDER.format(156)),
    "no_fence": (2, 32, 0, ORDER.format(160)),
    "past_the_end": (
        1,
        96,
        0,
        "thread (64, 0, 0), samples.cu:166, writes 4 bytes of device memory (byte 256 of 256), past",
    ),
    "past_shared": (1, 64, 64, "thread (63, 0, 0), samples.cu:169, writes 1 bytes of device memory"),
    "copied_over_too_early": (1, 64, 0, "samples.cu:188, read, and nothing orders the two"),
    "read_before_it_arrives": (1, 64, 0, "samples.cu:196, copies in the background, and has not waited for"),
    "added_before_it_arrives": (1, 64, 0, "an atomic operation on what a thread copies in the background"),
}


@pytest.mark.parametrize("kernel", WRONG)
def test_wrong_accesses_are_reported(emulator: MakeEmulator, kernel: str) -> None:
    device = emulator(SAMPLES, checked=True)
    blocks, threads, shared, message = WRONG[kernel]
    given = [put(device, np.zeros(64, np.int32)), put(device, np.arange(256, dtype=np.int32))]
    given += [put(device, np.zeros(1, np.uint32))]
    count = len(device.parameters(kernel))
    with pytest.raises(DeviceError, match=rf"^kernel {kernel}, block \(") as caught:
        device.launch(kernel, (blocks, 1, 1), threads, given[:count], shared)
    assert message in str(caught.value)


@pytest.mark.parametrize("seed", [0, 4, 12])  # in different orders
def test_a_write_conflicts_with_a_read_of_another_warp(emulator: MakeEmulator, seed: int) -> None:
    device = emulator(SAMPLES, checked=True, seed=seed)
    y, x = put(device, np.zeros(64, np.int32)), put(device, np.arange(64, dtype=np.int32))
    with pytest.raises(DeviceError, match="nothing orders the two"):
        device.launch("other_warp_reads", (1, 1, 1), 64, [y, x])


def test_a_copy_that_is_not_waited_for_does_not_happen(emulator: MakeEmulator) -> None:
    device = emulator(SAMPLES)
    y = put(device, np.zeros(64, np.int32))
    device.launch("no_wait", (1, 1, 1), 64, [y, put(device, np.arange(256, dtype=np.int32))], shared=1024)
    assert (get(device, y, np.int32, 64) == -1).all()  # poison


# ---- sanitizers, which end the process

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from llamac.gpu.emulator.emulator import Emulator
cache, source, sanitizer, kernel = sys.argv[1:]
device = Emulator(Path(cache), [Path(source)], sanitize=sanitizer)
y = np.uint64(device.alloc(256))
device.launch("total", (1, 1, 1), 64, [y, y])
print("begun", flush=True)
device.launch(kernel, (1, 1, 1), 96, [y])
"""


@pytest.mark.parametrize(
    ("sanitizer", "kernel", "message"),
    [
        ("undefined", "shifts_too_far", "runtime error: shift exponent"),
        ("address", "past_a_local_array", "AddressSanitizer: stack-buffer-overflow"),
        ("address", "past_the_end", "AddressSanitizer: heap-buffer-overflow"),
    ],
)
def test_sanitizers_find_planted_faults(kernel_cache: Path, sanitizer: str, kernel: str, message: str) -> None:
    preloaded = library(sanitizer)
    if preloaded is None:
        pytest.skip("the compiler has no sanitizer in a shared library")
    build(SAMPLES[0], kernel_cache, sanitizer)  # the process only loads it: a preloaded sanitizer slows the compiler
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": preloaded}
    arguments = [sys.executable, "-c", PROGRAM, str(kernel_cache), str(SAMPLES[0]), sanitizer, kernel]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    assert done.stdout == "begun\n"
    assert done.returncode != 0
    assert message in done.stderr


# ---- the list of kernels that ran under sanitizers

STUB = """
from llamac.gpu.emulator.emulator import Emulator

Emulator.__init__ = lambda self, *arguments, **options: None
Emulator.kernels = lambda self: ["norm", "scale"]
Emulator.launch = lambda self, kernel: None
"""
LAUNCHES = """
import pytest
from llamac.gpu.emulator.emulator import Emulator

@pytest.mark.parametrize("kernel", ["norm", "scale"])
def test_launch(kernel):
    Emulator(None).launch(kernel)
"""


def test_kernels_that_parallel_tests_run_under_sanitizers_count(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(STUB)
    (tmp_path / "test_launches.py").write_text(LAUNCHES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "EMULATOR_SANITIZE": "address"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "gpu.sanitized", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "ran 2 kernels; these did not: none" in done.stdout, done.stderr
    assert done.returncode == 0
