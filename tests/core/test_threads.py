"""The thread team: one per process, forks, other thread pools, the caller's floating-point settings, idle threads."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac.engine.hardware import machine
from openmp import needs_threads
from processes import output_of, run_python

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc"),
    needs_threads,
]

IDS = range(280)
# The start of the programs below. digest(): the hash of the logits of IDS; count(): this process's threads.
START = """
    import hashlib, os, sys, threading, time
    import numpy  # starts its own threads
    import llamac
    model = llamac.load(sys.argv[1])
    def digest(threads):
        with model.session(threads=threads) as session:
            session._long_work = 1 << 60  # no helper thread, which count() would include
            return hashlib.sha256(session.eval(range(280), logits="all").tobytes()).hexdigest()
    def count():
        return len(os.listdir("/proc/self/task"))
    def stable_count():  # a joined thread may still be listed for a while
        return min((count(), time.sleep(0.005))[0] for _ in range(20))
"""
# An eval of several seconds in another thread, to be cancelled.
LONG_EVAL = """
    import sys, threading, time
    import llamac
    states = []
    def compute(session):
        try:
            session.eval([token % 280 for token in range(8000)], logits=None)
        except llamac.CancelledError:
            states.append("cancelled")
    def begin(session):
        worker = threading.Thread(target=compute, args=(session,))
        worker.start()
        while session.length() == 0:  # after the first chunk the team is certainly at work
            time.sleep(0.001)
        return worker
"""
# Calls a function in a forked child; prints its result and the child's exit code.
CHILD = """
    def in_child(work):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            import signal
            signal.alarm(20)  # ends a child that hangs
            print(work(), flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# Python 3.12 and later warn of forks in a process with threads, which these tests do on purpose.
QUIET = {"PYTHONWARNINGS": "ignore:This process:DeprecationWarning"}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> str:
    """The result of `digest`, computed with one thread."""
    with llamac.load(tiny_llama, threads=1) as model:
        return hashlib.sha256(model.logits(IDS).tobytes()).hexdigest()


# ---- one team


def test_eight_python_threads_share_one_team(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    before, most, found, stop = count(), 0, [], threading.Event()
    def work():
        for _ in range(3):
            found.append(digest(2))
    def watch():
        global most
        while not stop.wait(0.001):
            most = max(most, count())
    watcher = threading.Thread(target=watch)
    watcher.start()
    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    stop.set()
    watcher.join()
    print(len(found), *set(found))
    print(most - before - 9, stable_count() - before)
    """
    bits, threads = output_of(program, tiny_llama).splitlines()
    assert bits == f"24 {expected}"
    most, left = map(int, threads.split())
    assert left == 1  # a team of two: one thread and the caller
    assert most <= 1


LIMITED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
int threads_left = 1000;   /* how many more may run */
int calls;                 /* of pthread_create */
int hold, waiting;         /* while hold is 1, calls wait and set waiting to 1 */
struct start { void *(*work)(void *); void *argument; };
static void *run(void *p) {
    struct start start = *(struct start *)p;
    free(p);
    void *result = start.work(start.argument);
    __atomic_add_fetch(&threads_left, 1, __ATOMIC_SEQ_CST);
    return result;
}
int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&hold, __ATOMIC_SEQ_CST)) __atomic_store_n(&waiting, 1, __ATOMIC_SEQ_CST);
    if (__atomic_sub_fetch(&threads_left, 1, __ATOMIC_SEQ_CST) < 0) {
        __atomic_add_fetch(&threads_left, 1, __ATOMIC_SEQ_CST);
        return EAGAIN;
    }
    struct start *start = malloc(sizeof *start);
    *start = (struct start){ work, argument };
    return real(thread, attributes, run, start);
}
"""


# Gives programs access to that library's variables.
NUMBERS = """
    import ctypes
    def number(name):
        return ctypes.c_int.in_dll(ctypes.CDLL(None), name)
"""
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs that can limit, count and delay the creation of threads."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "limited.c").write_text(LIMITED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "limited.so", folder / "limited.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(folder / "limited.so")}


@needs_cc
def test_fewer_threads_compute_if_the_system_refuses_more(
    tiny_llama: Path, expected: str, limited: dict[str, str]
) -> None:
    """GCC's OpenMP would end the process. Each case has a new process because a team remembers refusals."""
    program = f"""{START}{CHILD}{NUMBERS}
    def try_with(n, *teams):
        number("threads_left").value = n
        return {{digest(threads) for threads in teams}} == {{sys.argv[2]}}
    for n in range(5):
        in_child(lambda: try_with(n, 2, 4))
        in_child(lambda: try_with(n, 4, 2))
    """
    assert output_of(program, tiny_llama, expected, **limited).split() == ["True", "0"] * 10


@needs_cc
def test_a_refusal_is_remembered_for_a_second(tiny_llama: Path, limited: dict[str, str]) -> None:
    program = f"""{START}{NUMBERS}
    with model.session(threads=4) as session:
        session._long_work = 1 << 60
        number("threads_left").value = 0
        before, start = number("calls").value, time.monotonic()
        for token in range(200):
            session.eval([token])
        print(number("calls").value - before, int(time.monotonic() - start))
        before = count()
        number("threads_left").value = 1000
        while count() == before:  # until the team tries again and gets threads
            session.truncate(0)
            session.eval([1])
    """
    calls, seconds = map(int, output_of(program, tiny_llama, **limited).split())
    assert 1 <= calls <= 2 + seconds


@needs_cc
def test_a_child_forked_while_the_team_starts_can_eval(
    tiny_llama: Path, expected: str, limited: dict[str, str]
) -> None:
    """The fork happens while the parent's first eval creates threads."""
    program = f"""{START}{CHILD}{NUMBERS}
    def first():
        number("hold").value = 1
        digest(2)
    def in_the_child():
        number("hold").value = 0
        return digest(2)
    worker = threading.Thread(target=first)
    worker.start()
    while not number("waiting").value:
        time.sleep(0.001)
    in_child(in_the_child)
    number("hold").value = 0
    worker.join()
    print(digest(2))
    """
    assert output_of(program, tiny_llama, **limited, **QUIET).split() == [expected, "0", expected]


def test_evals_with_one_thread_start_no_threads(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    before, found = count(), []
    workers = [threading.Thread(target=lambda: found.append(digest(1))) for _ in range(8)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    print(len(found), *set(found), stable_count() - before)
    """
    assert output_of(program, tiny_llama) == f"8 {expected} 0\n"


def test_an_eval_with_one_thread_does_not_wait_for_the_team(big_llama: Path) -> None:
    """A short eval finishes while a long one has the team."""
    program = f"""{LONG_EVAL}
    with llamac.load(sys.argv[1]) as model, model.session(threads=2) as long, model.session(threads=1) as short:
        worker = begin(long)
        short.eval([1, 2, 3])
        states.append("short" if worker.is_alive() else "late")
        long.cancel()
        worker.join()
        print(*states)
    """
    assert output_of(program, big_llama) == "short cancelled\n"


def test_evals_share_the_team_chunk_by_chunk(big_llama: Path) -> None:
    """Between two chunks of a long prompt a waiting eval gets the team."""
    program = f"""{LONG_EVAL}
    with llamac.load(sys.argv[1]) as model, model.session(threads=2) as long, model.session(threads=2) as other:
        other._long_work = 1 << 60  # no helper thread
        worker = begin(long)
        last = long.length() + 6 * 256  # after six more chunks
        steps = 0
        while long.length() < last:
            other.step(1)
            steps += 1
        print(steps)
        long.cancel()
        worker.join()
        print(*states)
    """
    steps, state = output_of(program, big_llama).splitlines()
    assert int(steps) >= 5
    assert state == "cancelled"


def test_threads_do_not_accumulate(tiny_llama: Path) -> None:
    program = f"""{START}
    before, counts, found = count(), [], set()
    for round in range(30):
        found.add(digest(2 + round % 2))
        counts.append(count() - before)
    print(max(counts), stable_count() - before - counts[3], len(found))
    """
    most, growth, kinds = map(int, output_of(program, tiny_llama).split())
    assert most == 2  # a team of three
    assert growth == 0
    assert kinds == 1


def test_more_threads_than_processors_give_the_same_bits(tiny_llama: Path, expected: str) -> None:
    program = f"{START}\n    print(digest(9))"
    assert output_of(program, tiny_llama) == f"{expected}\n"


@pytest.mark.parametrize("n_kv_heads", [1, 3])
def test_decoding_splits_the_positions_among_threads_with_the_same_bits(tmp_path: Path, n_kv_heads: int) -> None:
    """With one thread, one call computes all blocks of a head. More threads than heads share the blocks of 256."""
    config = llama_config(dim=72, n_heads=9, n_kv_heads=n_kv_heads, context=1400)
    windowed = dataclasses.replace(config.layers[0], window=300)
    path = write_model(tmp_path / "m.bin", checkpoint(dataclasses.replace(config, layers=(config.layers[0], windowed))))
    ids = some_ids(1250)

    def steps(threads: int) -> list[bytes]:
        with llamac.load(path, threads=threads) as model, model.session() as session:
            session.eval(ids[:1022])
            rows = [session.eval([token]) for token in ids[1022:1026]]  # across the end of a block
            rows += [session.eval(ids[1026:1029], logits="all")]  # queries whose ranges differ
            return [row.tobytes() for row in rows if row is not None]

    expected = steps(1)
    assert len(expected) == 5
    for threads in (2, 5, 16):
        assert steps(threads) == expected


def test_a_decode_step_passes_a_prefill_with_the_same_bits(tmp_path: Path) -> None:
    """The chunk's products and attention are large enough for pauses within them."""
    config = llama_config(dim=256, n_layers=1, n_heads=4, n_kv_heads=1, ffn=16384, context=1200)
    path = write_model(tmp_path / "m.bin", checkpoint(config))
    ids = some_ids(1100)
    with llamac.load(path, threads=2) as model, model.session() as long, model.session(threads=3) as short:
        long.eval(ids[:844], logits=None)
        ended: list[str] = []
        prefilled: list[bytes] = []
        started = threading.Event()

        def prefill() -> None:
            long.truncate(844)
            started.set()
            prefilled.append(long.eval(ids[844:]).tobytes())
            ended.append("prefill")

        def decode() -> list[bytes]:
            short.truncate(0)
            return [short.eval([token]).tobytes() for token in ids[:1]]

        expected = decode()
        prefill()
        for _ in range(20):
            started.clear()
            ended.clear()
            thread = threading.Thread(target=prefill)
            thread.start()
            started.wait()
            time.sleep(0.002)
            steps = decode()
            ended.append("decode")
            thread.join()
            assert steps == expected
            if ended[0] == "decode":
                break
    assert ended[0] == "decode"
    assert len(set(prefilled)) == 1


def test_a_session_can_change_its_number_of_threads(tiny_llama: Path) -> None:
    """More threads need more memory, which the next eval allocates."""
    with llamac.load(tiny_llama) as model, model.session(threads=1) as one, model.session(threads=1) as changing:
        sizes = []
        for threads in (1, 4, 2, 7, 1):
            changing._core.set_threads(threads)
            assert changing.threads == threads
            logits = [session.eval(range(30), logits="all") for session in (one, changing)]
            assert logits[0] is not None
            assert logits[1] is not None
            assert logits[0].tobytes() == logits[1].tobytes()
            sizes.append(changing.memory()["activations"])
        assert sizes[0] < sizes[1] == sizes[2] < sizes[3] == sizes[4]
        for threads in (0, -1, 1025, 1 << 40):
            with pytest.raises(llamac.ArgumentError, match="threads is"):
                changing._core.set_threads(threads)
        assert changing.threads == 1


@pytest.mark.parametrize("policy", ["passive", "active"])
def test_idle_threads_use_no_cpu_time(tiny_llama: Path, policy: str) -> None:
    """As soon as the eval has ended, even if OpenMP's threads are configured never to sleep."""
    program = f"""{START}
    import gc
    time.sleep(0.2)  # new threads of numpy spin for about 25 ms
    used = []
    for threads in (2, 4):
        digest(threads)
        gc.collect()
        least = 1.0
        for _ in range(20):  # threads that begin to sleep late, on a busy machine
            before = time.process_time()
            time.sleep(0.4)
            least = min(least, time.process_time() - before)
            if least < 0.01: break
        used.append(least)
    print(max(used))
    """
    assert float(output_of(program, tiny_llama, OMP_WAIT_POLICY=policy)) < 0.01


@pytest.mark.parametrize("settings", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "2"}, {"OMP_PROC_BIND": "true"}])
def test_settings_of_openmp_do_not_change_logits(tiny_llama: Path, expected: str, settings: dict[str, str]) -> None:
    program = f"{START}\n    print(digest(2), digest(5), digest(3))"
    assert output_of(program, tiny_llama, **settings) == " ".join([expected] * 3) + "\n"


def test_busy_programs_do_not_change_logits(tiny_llama: Path, expected: str) -> None:
    """Members wait differently when other programs want the CPUs. That can change within a session."""
    program = f"""{START}
    import subprocess
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        found = {{digest(4) for _ in range(5)}}
        with model.session(threads=4) as session:
            for token in range(280):
                session.step(token)
            found.add(session.eval([5]).tobytes())
        with model.session(threads=1) as session:
            session.eval(range(280), logits=None)
            found.add(session.eval([5]).tobytes())
    finally:
        for process in busy: process.kill()
        for process in busy: process.wait()
    print(len(found), *(bits for bits in found if isinstance(bits, str)))
    """
    assert output_of(program, tiny_llama) == f"2 {expected}\n"


@pytest.mark.skipif(len(machine.usable_cpus()) < 2, reason="needs two CPUs")
def test_the_team_follows_the_affinity_of_its_caller(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    before = set(os.listdir("/proc/self/task"))
    cpus = sorted(os.sched_getaffinity(0))[:2]
    found = set()
    for allowed in (cpus[:1], cpus, cpus[1:], cpus):
        os.sched_setaffinity(0, allowed)  # of the calling thread only
        found.add(digest(2))
        ours = set(os.listdir("/proc/self/task")) - before
        print(*(sorted(os.sched_getaffinity(int(task))) == cpus for task in ours))
    print(*found)
    """
    # the team does not follow to a single CPU, which two threads would have to share
    assert output_of(program, tiny_llama).splitlines() == ["False", "True", "True", "True", expected]


def test_our_threads_block_signals(tiny_llama: Path) -> None:
    program = f"""{START}
    before = set(os.listdir("/proc/self/task"))
    digest(2)
    for task in set(os.listdir("/proc/self/task")) - before:
        for line in open(f"/proc/self/task/{{task}}/status"):
            if line.startswith("SigBlk:"):
                mask = int(line.split()[1], 16)
                print(all(mask >> number - 1 & 1 for number in (1, 2, 10, 12, 14, 15)))
    """
    found = output_of(program, tiny_llama).split()
    assert found
    assert set(found) == {"True"}


# ---- forks


def test_a_child_can_eval_after_its_parent(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}{CHILD}
    print(digest(2))
    in_child(lambda: digest(2))
    in_child(lambda: digest(1))
    in_child(lambda: digest(4))
    print(digest(2))
    """
    found = output_of(program, tiny_llama, **QUIET).split()
    assert found == [expected, expected, "0", expected, "0", expected, "0", expected]


def test_a_child_can_eval_in_an_inherited_session(tiny_llama: Path) -> None:
    program = f"""{START}{CHILD}
    session = model.session(threads=2)
    session.eval(range(100))
    def resume():
        return session.eval(range(100, 130)).tobytes().hex()
    in_child(resume)
    in_child(resume)
    print(resume())
    """
    one, code, other, other_code, parent = output_of(program, tiny_llama, **QUIET).split()
    assert (code, other_code) == ("0", "0")
    assert one == other == parent


def test_a_child_can_eval_while_its_parent_computes(big_llama: Path, tiny_llama: Path, expected: str) -> None:
    """Another thread of the parent has the team at the time of the fork."""
    program = f"""{START}{CHILD}{LONG_EVAL}
    with llamac.load(sys.argv[2]) as big, big.session(threads=2) as long:
        worker = begin(long)
        in_child(lambda: digest(2))
        long.cancel()
        worker.join()
        print(*states)
    print(digest(2))
    """
    assert output_of(program, tiny_llama, big_llama, **QUIET).split() == [expected, "0", "cancelled", expected]


def test_forked_workers_of_multiprocessing_can_eval(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    import multiprocessing
    digest(2)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*pool.map_async(digest, [2, 1, 2, 3]).get(timeout=300))
    """
    assert output_of(program, tiny_llama, **QUIET).split() == [expected] * 4


# ---- programs with other thread pools and floating-point settings


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed (extra: parity)")
@pytest.mark.parametrize("first", ["torch", "llamac"])
def test_torch_in_the_same_process_does_not_change_logits(tiny_llama: Path, expected: str, first: str) -> None:
    """torch has its own OpenMP. Both libraries compute in turn with two threads, and torch flushes denormals."""
    program = f"""
    if {first == "torch"}:
        import torch
    {START}
    found = [digest(2)]
    import torch
    torch.set_num_threads(2)
    matrix = torch.eye(300) * 2
    for _ in range(3):
        assert (matrix @ matrix).sum() == 1200
        found.append(digest(2))
    assert torch.set_flush_denormal(True)
    found += [digest(1), digest(2)]
    assert float(torch.tensor(1e-39) * 1) == 0
    print(len(found), *set(found))
    """
    done = run_python(program, tiny_llama)
    assert (done.returncode, done.stdout) == (0, f"6 {expected}\n"), done.stderr


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="sets MXCSR through glibc"
)
def test_the_callers_floating_point_settings_do_not_change_logits(tmp_path: Path) -> None:
    config = llama_config()
    weights = checkpoint(config).tensors["output_norm.weight"].array() * 1e-39  # logits become denormal
    path = write_model(tmp_path / "denormal.bin", checkpoint(config, {"output_norm.weight": weights}))
    program = f"""
    import ctypes
    {START}
    libm = ctypes.CDLL("libm.so.6")
    def control():
        state = (ctypes.c_uint32 * 8)()  # fenv_t: the last word is MXCSR
        libm.fegetenv(state)
        return state
    settings = control()
    settings[7] |= 0x8040 | 0x6000  # flush to zero, denormals are zero, round toward zero
    libm.fesetenv(settings)
    denormal = ctypes.c_double(5e-324)
    print(denormal.value * 1.0, [digest(1), digest(2)], control()[7] & 0xe040 == 0xe040)
    with model.session() as session:
        session._long_work = 0  # through the helper thread of long evals
        session.eval([1, 2, 3])
    sampled = [model.generate([1, 2], max_tokens=9, temperature=1e-37, seed=seed).tokens for seed in range(5)]
    print(sampled, control()[7] & 0xe040 == 0xe040)
    """
    with llamac.load(path, threads=1) as model:
        logits = model.logits(IDS)
        assert 0 < abs(logits).max() < 1e-37
        assert len(set(logits[0].tolist())) > 100
        bits = hashlib.sha256(logits.tobytes()).hexdigest()
        drawn = [model.generate([1, 2], max_tokens=9, temperature=1e-37, seed=seed).tokens for seed in range(5)]
    assert len({tuple(tokens) for tokens in drawn}) > 1
    assert output_of(program, path).splitlines() == [f"0.0 {[bits, bits]} True", f"{drawn} True"]


@pytest.mark.parametrize("dtype", ["q4", "q8", "f32"])
def test_shares_of_whole_blocks_of_columns_are_packed_to_the_same_bits(tmp_path: Path, dtype: str) -> None:
    # q_dim and ffn are whole blocks of 128 columns for one and two threads; three threads share them otherwise
    config = llama_config(dim=256, n_heads=4, n_kv_heads=2, ffn=512)
    ids = some_ids(80)
    with llamac.load(write_model(tmp_path / "model.bin", checkpoint(config), dtype)) as model:
        with model.session(threads=1) as session:  # few rows at a time: each thread prepares all of them
            steps = [session.eval(ids[first : first + 4], logits="all") for first in range(0, 80, 4)]
        found = []
        for threads in (1, 2, 3):
            with model.session(threads=threads) as session:
                found.append(session.eval(ids, logits="all").tobytes())
    assert found == [b"".join(step.tobytes() for step in steps)] * 3
