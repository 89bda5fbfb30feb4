"""Threads: one pool for the process, forks, other pools beside ours, the host's floating-point settings, idleness."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from llamac.engine import machine
from openmp import needs_threads
from processes import output_of, run_python

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc"),
    needs_threads,
]

IDS = range(280)
# What the programs below begin with: an eval of IDS, given as a hash of its logits; the number of threads.
START = """
    import hashlib, os, sys, threading, time
    import numpy  # which starts threads of its own
    import llamac
    model = llamac.load(sys.argv[1])
    def digest(threads):
        with model.session(threads=threads) as session:
            session._long_work = 1 << 60  # in this thread: no helper appears among those that are counted
            return hashlib.sha256(session.eval(range(280), logits="all").tobytes()).hexdigest()
    def count():
        return len(os.listdir("/proc/self/task"))
    def settled():  # a thread that was joined may take a moment to vanish
        return min((count(), time.sleep(0.005))[0] for _ in range(20))
"""
# An eval of seconds in a thread of its own, until it is cancelled.
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
        while session.length() == 0:  # from the second chunk on the pool is surely at work
            time.sleep(0.001)
        return worker
"""
# Work in a forked child: what it returned, then the child's exit code.
CHILD = """
    def in_child(work):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            import signal
            signal.alarm(20)  # a child that hangs ends with a signal
            print(work(), flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# From 3.12 on Python warns of forks while there are threads: that is what is tested here.
QUIET = {"PYTHONWARNINGS": "ignore:This process:DeprecationWarning"}
OURS = 2  # the thread that owns the region, and OpenMP's for teams of up to 3 with their caller


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> str:
    """What `digest` gives, computed alone with one thread."""
    with llamac.load(tiny_llama, threads=1) as model:
        return hashlib.sha256(model.logits(IDS).tobytes()).hexdigest()


# ---- one pool


def test_eight_python_threads_share_one_pool(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    before, most, found, end = count(), 0, [], threading.Event()
    def work():
        for _ in range(3):
            found.append(digest(2))
    def watch():
        global most
        while not end.wait(0.001):
            most = max(most, count())
    watcher = threading.Thread(target=watch)
    watcher.start()
    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    end.set()
    watcher.join()
    print(len(found), *set(found))
    print(most - before - 9, settled() - before)
    """
    bits, threads = output_of(program, tiny_llama).splitlines()
    assert bits == f"24 {expected}"
    most, left = map(int, threads.split())
    assert 0 < left <= OURS
    assert most <= OURS


LIMITED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
int threads_left = 1000;   /* that may run beside those there are */
int asked, waiting, hold;  /* calls; those that wait until `hold` is 0 */
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
    __atomic_add_fetch(&asked, 1, __ATOMIC_SEQ_CST);
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


# What begins programs with that library: its numbers by their names.
NUMBERS = """
    import ctypes
    def number(name):
        return ctypes.c_int.in_dll(ctypes.CDLL(None), name)
"""
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs whose threads can be limited, counted and held."""
    folder = tmp_path_factory.mktemp("limited")
    (folder / "limited.c").write_text(LIMITED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "limited.so", folder / "limited.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(folder / "limited.so")}


@needs_cc
def test_where_threads_cannot_be_had_fewer_compute(tiny_llama: Path, expected: str, limited: dict[str, str]) -> None:
    """GCC's OpenMP would end the process. Each time in a fresh process: a refusal is remembered for a while."""
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
        before, began = number("asked").value, time.monotonic()
        for token in range(200):
            session.eval([token])
        print(number("asked").value - before, int(time.monotonic() - began))
        before = count()
        number("threads_left").value = 1000
        while count() == before:  # they are asked for again, and had
            session.truncate(0)
            session.eval([1])
    """
    asked, seconds = map(int, output_of(program, tiny_llama, **limited).split())
    assert 1 <= asked <= 2 + seconds


@needs_cc
def test_a_child_evals_though_the_first_turn_had_just_begun(
    tiny_llama: Path, expected: str, limited: dict[str, str]
) -> None:
    """The fork falls into the time in which the parent's first team is being made."""
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


def test_evals_with_one_thread_need_no_pool(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    before, found = count(), []
    workers = [threading.Thread(target=lambda: found.append(digest(1))) for _ in range(8)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    print(len(found), *set(found), settled() - before)
    """
    assert output_of(program, tiny_llama) == f"8 {expected} 0\n"


def test_evals_with_one_thread_run_beside_others(big_llama: Path) -> None:
    """A long eval does not hold up a short one, also while it has the pool."""
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


def test_evals_take_turns(big_llama: Path) -> None:
    """Between two chunks of a long prompt whoever waits gets the pool."""
    program = f"""{LONG_EVAL}
    with llamac.load(sys.argv[1]) as model, model.session(threads=2) as long, model.session(threads=2) as other:
        other._long_work = 1 << 60  # in this thread
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


def test_threads_do_not_pile_up(tiny_llama: Path) -> None:
    program = f"""{START}
    before, counts, found = count(), [], set()
    for round in range(30):
        found.add(digest(2 + round % 2))
        counts.append(count() - before)
    print(max(counts), settled() - before - counts[3], len(found))
    """
    most, growth, kinds = map(int, output_of(program, tiny_llama).split())
    assert most <= OURS + 1  # one may be ending while another begins
    assert growth <= 0
    assert kinds == 1


def test_more_threads_than_processors_give_the_same_bits(tiny_llama: Path, expected: str) -> None:
    program = f"{START}\n    print(digest(9))"
    assert output_of(program, tiny_llama) == f"{expected}\n"


def test_the_number_may_change_within_a_session(tiny_llama: Path) -> None:
    """As it does when the machine's limits change; more threads need more memory, which comes with the next eval."""
    with llamac.load(tiny_llama) as model, model.session(threads=1) as one, model.session(threads=1) as changing:
        held = []
        for threads in (1, 4, 2, 7, 1):
            changing._core.set_threads(threads)
            assert changing.threads == threads
            logits = [session.eval(range(30), logits="all") for session in (one, changing)]
            assert logits[0] is not None
            assert logits[1] is not None
            assert logits[0].tobytes() == logits[1].tobytes()
            held.append(changing.memory()["activations"])
        assert held[0] < held[1] == held[2] < held[3] == held[4]
        for threads in (0, -1, 1025, 1 << 40):
            with pytest.raises(llamac.ArgumentError, match="threads is"):
                changing._core.set_threads(threads)
        assert changing.threads == 1


@pytest.mark.parametrize("policy", ["passive", "active"])
def test_idle_threads_burn_nothing(tiny_llama: Path, policy: str) -> None:
    """From the end of the eval on; also if OpenMP is told that its threads shall never sleep."""
    program = f"""{START}
    import gc
    time.sleep(0.2)  # numpy's own threads spin for some 25 ms when they are new
    used = []
    for threads in (2, 4):
        digest(threads)
        gc.collect()
        before = time.process_time()
        time.sleep(0.4)
        used.append(time.process_time() - before)
    print(max(used))
    """
    assert float(output_of(program, tiny_llama, OMP_WAIT_POLICY=policy)) < 0.01


@pytest.mark.parametrize("settings", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_THREAD_LIMIT": "2"}, {"OMP_PROC_BIND": "true"}])
def test_settings_of_openmp_change_no_bit(tiny_llama: Path, expected: str, settings: dict[str, str]) -> None:
    program = f"{START}\n    print(digest(2), digest(5), digest(3))"
    assert output_of(program, tiny_llama, **settings) == " ".join([expected] * 3) + "\n"


def test_beside_busy_programs_the_bits_stay(tiny_llama: Path, expected: str) -> None:
    """Threads wait in another way where others want the CPUs, in the middle of a session too."""
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


@pytest.mark.skipif(len(machine.usable_cpus()) < 2, reason="there is one CPU only")
def test_the_team_follows_its_caller_to_other_cpus(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    before = set(os.listdir("/proc/self/task"))
    cpus = sorted(os.sched_getaffinity(0))[:2]
    found = set()
    for allowed in (cpus[:1], cpus, cpus[1:], cpus):
        os.sched_setaffinity(0, allowed)  # of this thread alone
        found.add(digest(2))
        ours = set(os.listdir("/proc/self/task")) - before
        print(*(sorted(os.sched_getaffinity(int(task))) == cpus for task in ours))
    print(*found)
    """
    # one CPU is no place for a team of two: it stays where it was, at first where it began
    assert output_of(program, tiny_llama).splitlines() == ["False", "True", "True", "True", expected]


def test_our_threads_take_no_signals(tiny_llama: Path) -> None:
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


def test_a_child_evals_after_the_parent_did(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}{CHILD}
    print(digest(2))
    in_child(lambda: digest(2))
    in_child(lambda: digest(1))
    in_child(lambda: digest(4))
    print(digest(2))
    """
    found = output_of(program, tiny_llama, **QUIET).split()
    assert found == [expected, expected, "0", expected, "0", expected, "0", expected]


def test_a_child_evals_in_a_session_that_it_inherited(tiny_llama: Path) -> None:
    program = f"""{START}{CHILD}
    session = model.session(threads=2)
    session.eval(range(100))
    def go_on():
        return session.eval(range(100, 130)).tobytes().hex()
    in_child(go_on)
    in_child(go_on)
    print(go_on())
    """
    one, code, other, other_code, parent = output_of(program, tiny_llama, **QUIET).split()
    assert (code, other_code) == ("0", "0")
    assert one == other == parent


def test_a_child_evals_while_the_parent_computes(big_llama: Path, tiny_llama: Path, expected: str) -> None:
    """The fork may come at any moment: here another thread of the parent has the pool."""
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


def test_forked_workers_of_multiprocessing_eval(tiny_llama: Path, expected: str) -> None:
    program = f"""{START}
    import multiprocessing
    digest(2)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(*pool.map_async(digest, [2, 1, 2, 3]).get(timeout=300))
    """
    assert output_of(program, tiny_llama, **QUIET).split() == [expected] * 4


# ---- hosts with pools and settings of their own


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed (extra: parity)")
@pytest.mark.parametrize("first", ["torch", "llamac"])
def test_beside_torch(tiny_llama: Path, expected: str, first: str) -> None:
    """torch brings an OpenMP of its own; both compute with two threads, in turns, and torch flushes denormals."""
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
def test_a_host_that_flushes_denormals_gets_the_same_bits_and_keeps_its_setting(tmp_path: Path) -> None:
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
    strange = control()
    strange[7] |= 0x8040 | 0x6000  # flush to zero, denormals are zero, round toward zero
    libm.fesetenv(strange)
    one = ctypes.c_double(5e-324)
    print(one.value * 1.0, [digest(1), digest(2)], control()[7] & 0xe040 == 0xe040)
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
