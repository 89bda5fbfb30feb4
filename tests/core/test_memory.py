"""Memory: opening reads no weights, processes share one copy, a run needs little more than weights and cache."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac import models
from llamac.errors import ArgumentError, UnsupportedError
from processes import output_of

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="reads /proc/PID/smaps")

# The start of the programs below. mapped(): the numbers of a file's mapping in smaps, in bytes; "hg": whether it was
# advised to use huge pages.
START = """
    import sys
    import llamac
    def mapped(path):
        found, inside = {}, False
        for line in open("/proc/self/smaps"):
            name, *values = line.split()
            if not name.endswith(":"):
                inside = path in line
            elif inside and values[-1] == "kB":
                found[name] = found.get(name, 0) + int(values[0]) * 1024
            elif inside and name == "VmFlags:":
                found["hg"] = found.get("hg", 0) + ("hg" in values)
        return found
"""


def test_opening_reads_no_weights(big_llama: Path) -> None:
    """Neither into this process nor into the kernel's page cache, from which the program drops them first."""
    program = f"""{START}
    import ctypes, mmap, os
    path, size = sys.argv[1], os.path.getsize(sys.argv[1])
    def cached():
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE / size
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dropped = cached() < 0.05  # not on a file system in memory
    with llamac.load(path, threads=1) as model:
        print(mapped(path)["Rss:"] / size < 0.1, not dropped or cached() < 0.2)
        with model.session(context=64) as session:
            session.eval([1], logits=None)
        print(mapped(path)["Rss:"] / size > 0.8, cached() > 0.8)
    """
    assert output_of(program, big_llama) == "True True\nTrue True\n"


@pytest.mark.parametrize("memory", ["map", "populate", "huge"])
def test_the_memory_option_decides_when_weights_are_read(big_llama: Path, memory: str) -> None:
    program = f"""{START}
    import os
    try:
        model = llamac.load(sys.argv[1], memory=sys.argv[2])
    except llamac.UnsupportedError as error:
        print("unsupported", error)
    else:
        found = mapped(sys.argv[1])
        print(found["Rss:"] / os.path.getsize(sys.argv[1]), found["hg"], found["Private_Dirty:"])
    """
    found = output_of(program, big_llama, memory)
    if memory == "huge" and found.startswith("unsupported"):
        assert not Path("/sys/kernel/mm/transparent_hugepage").is_dir()
        return
    share, huge, dirty = map(float, found.split())
    assert share < 0.1 if memory == "map" else share > 0.99
    assert (huge > 0) == (memory == "huge")
    assert dirty == 0  # so that processes share the pages


def test_the_memory_option_does_not_change_logits(tiny_llama: Path) -> None:
    found = set()
    for memory in ("map", "populate", "huge"):
        try:
            with llamac.load(tiny_llama, memory=memory) as model:
                found.add(model.logits([1, 2, 3]).tobytes())
        except UnsupportedError:
            assert memory == "huge"
    assert len(found) == 1


def test_an_unknown_memory_option_is_an_error(tiny_llama: Path) -> None:
    with pytest.raises(ArgumentError, match="memory is 'disk', expected 'map', 'populate', 'huge'"):
        llamac.load(tiny_llama, memory="disk")  # type: ignore[arg-type]


def test_populate_reads_ahead_on_old_kernels(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel rejects MADV_POPULATE_READ with EINVAL."""
    monkeypatch.setattr(llamac.format.flatfile, "MADV_POPULATE_READ", 9999)
    with llamac.load(tiny_llama, memory="populate") as model:
        assert model.logits([1]).shape == (1, model.config["vocab_size"])


# ---- many processes


def proportional(pid: int, name: str = "") -> tuple[int, int]:
    """(Pss, Rss) in bytes, of a process or of its mappings of a file."""
    sums, inside = {"Pss:": 0, "Rss:": 0}, True
    for line in Path(f"/proc/{pid}/{'smaps' if name else 'smaps_rollup'}").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            inside = name in line
        elif inside and key in sums:
            sums[key] += int(values[0]) * 1024
    return sums["Pss:"], sums["Rss:"]


def test_four_processes_share_one_copy(big_llama: Path) -> None:
    program = """
        import sys, llamac
        with llamac.load(sys.argv[1], threads=1) as model, model.session(context=64) as session:
            session.eval([1, 2, 3], logits=None)
            print("ready", flush=True)
            sys.stdin.readline()
    """
    size = os.path.getsize(big_llama)
    command = [sys.executable, "-c", textwrap.dedent(program), str(big_llama)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for process in running:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        weights = [proportional(process.pid, str(big_llama)) for process in running]
        whole = [proportional(process.pid) for process in running]
    finally:
        for process in running:
            process.communicate("\n")
    assert [process.returncode for process in running] == [0] * 4
    assert all(resident > 0.8 * size for _, resident in weights)
    assert 0.8 * size < sum(share for share, _ in weights) < 1.1 * size
    assert sum(share for share, _ in whole) < size + 4 * 50e6


# ---- one run


@pytest.mark.parametrize("model", ["big_llama", "built-in"])
def test_a_run_needs_little_more_than_weights_and_cache(model: str, request: pytest.FixtureRequest) -> None:
    path = models.path(models.DEFAULT) if model == "built-in" else request.getfixturevalue(model)
    program = """
        import sys
        import llamac
        def peak():
            return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
        with llamac.load(sys.argv[1]) as model:
            sizes = []
            stream = model.stream("Once upon a time " * 60, max_tokens=40, temperature=0.8, seed=1)
            for _ in stream:
                if not stream._session.closed:  # it is closed before the stream yields its last piece
                    sizes.append(stream._session.memory()["kv"])
            print(peak(), model.weight_bytes, max(sizes), model.tokenizer.memory)
    """
    total, weights, cache, tokenizer = map(int, output_of(program, path).split())
    assert cache > 0
    assert total < weights + cache + tokenizer + 50e6


def test_chunks_have_256_rows_whatever_the_model_and_the_threads(tmp_path: Path) -> None:
    """A row of this model takes 160 KB, nearly all of it for gate and up. Attention's buffers share their memory."""
    path = write_model(tmp_path / "wide.bin", checkpoint(llama_config(ffn=20000, n_layers=1)))
    ids = some_ids(300)
    gate_and_up, attention = 256 * 2 * 20000 * 4, 256 * 4 * 64 * 4
    for threads in (1, 16):
        with llamac.load(path, threads=threads) as model, model.session() as whole, model.session() as parts:
            logits = whole.eval(ids)
            found = whole.memory()["activations"]
            assert gate_and_up < found < 1.5 * gate_and_up + attention + threads * 1_000_000
            for start in range(0, 300, 75):
                last = parts.eval(ids[start : start + 75])
            assert logits is not None
            assert last is not None
            assert logits.tobytes() == last.tobytes()


def test_the_tokenizer_reports_its_memory() -> None:
    """With the built-in model: the core's tables of a tiny vocabulary fit in memory that the process already has."""
    program = """
        import sys
        import llamac
        with llamac.load(sys.argv[1]) as model:
            print(model.tokenizer.memory)
            model.tokenize("hello")
            print(model.tokenizer.memory)
    """
    before, after = map(int, output_of(program, models.path(models.DEFAULT)).split())
    assert before == 0
    assert 1e5 < after < 30e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads glibc's mallinfo2")
def test_reopening_models_does_not_fragment_the_heap() -> None:
    """Free bytes inside the heap are holes that later allocations could not use. They must not grow.

    Each of the 200 models between the two readings had left 58 KB behind. Where a large block happens to be freed makes
    a difference of about 1 MB.
    """
    program = """
        import ctypes, sys, llamac
        class Heap(ctypes.Structure):
            names = "arena ordblks smblks hblks hblkhd usmblks fsmblks used free top"
            _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):  # before glibc 2.33
            sys.exit(print(0))
        libc.mallinfo2.restype = Heap
        free = []
        for round in range(300):
            with llamac.load(sys.argv[1 + round % 2]) as model:
                model.generate("Once upon a time", max_tokens=1 + round * 7 % 19)
            free.append(libc.mallinfo2().free)
        print(max(free[200:]) - max(free[:100]))
    """
    assert int(output_of(program, models.path("stories"), models.path("stories-gpt2"))) < 4 << 20
