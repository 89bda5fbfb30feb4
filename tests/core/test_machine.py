"""The default number of threads: control groups of both versions, hyper-threads, affinity."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamac import _core
from llamac.engine.hardware import machine
from llamac.engine.hardware.machine import DefaultThreads, ThreadPlan, cgroup_quota, plan_threads
from openmp import needs_threads
from processes import TIMEOUT, output_of


def write_tree(root: Path, **files: str) -> Path:
    """Write files, given by path with "__" for "/" and "_dot_" for "."; return the root."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def quota(tmp_path: Path, membership: str, **files: str) -> float | None:
    """The quota found with this /proc/self/cgroup and these files of the control groups' file system."""
    (tmp_path / "membership").write_text(membership)
    return cgroup_quota(tmp_path / "membership", write_tree(tmp_path / "fs", **files))


# ---- control groups


def test_version_2_reads_the_quota_of_the_group(tmp_path: Path) -> None:
    assert quota(tmp_path, "0::/a/b\n", a__b__cpu_dot_max="150000 100000\n") == 1.5


def test_version_2_takes_the_smallest_quota_of_all_ancestors(tmp_path: Path) -> None:
    files = {
        "a__b__c__cpu_dot_max": "400000 100000\n",
        "a__cpu_dot_max": "250000 100000\n",
        "cpu_dot_max": "max 100000",
    }
    assert quota(tmp_path, "0::/a/b/c\n", **files) == 2.5
    assert quota(tmp_path, "0::/a/b/c\n", **{**files, "a__b__cpu_dot_max": "50000 100000"}) == 0.5
    assert quota(tmp_path, "0::/z\n") is None  # another branch; the root has no limit


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    assert quota(tmp_path, "0::/\n", cpu_dot_max="max 100000\n") is None
    assert quota(tmp_path, "0::/\n") is None


def test_a_group_that_is_not_mounted_falls_back_to_the_root(tmp_path: Path) -> None:
    """In a container, the path may be the host's, and the container's group is mounted at the root."""
    assert quota(tmp_path, "0::/docker/0123abc\n", cpu_dot_max="200000 100000\n") == 2.0


def test_version_1_reads_quota_and_period(tmp_path: Path) -> None:
    membership = "12:memory:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/y\n"
    files = {
        "cpu__a__b__cpu_dot_cfs_quota_us": "-1\n",
        "cpu__a__b__cpu_dot_cfs_period_us": "100000\n",
        "cpu__a__cpu_dot_cfs_quota_us": "300000\n",
        "cpu__a__cpu_dot_cfs_period_us": "100000\n",
        "cpu__x__cpu_dot_cfs_quota_us": "1000\n",
        "cpu__x__cpu_dot_cfs_period_us": "100000\n",
    }
    assert quota(tmp_path, membership, **files) == 3.0
    assert quota(tmp_path, membership, cpu__a__cpu_dot_cfs_quota_us="-1\n") is None


def test_the_smaller_quota_of_both_versions_counts(tmp_path: Path) -> None:
    files = {
        "cpu__a__cpu_dot_cfs_quota_us": "300000\n",
        "cpu__a__cpu_dot_cfs_period_us": "100000\n",
        "b__cpu_dot_max": "200000 100000\n",
    }
    assert quota(tmp_path, "4:cpu:/a\n0::/b\n", **files) == 2.0
    assert quota(tmp_path, "4:cpu:/a\n0::/z\n", **files) == 3.0


def test_version_2_beside_version_1_is_mounted_at_unified(tmp_path: Path) -> None:
    files = {"unified__b__cpu_dot_max": "200000 100000\n", "cpu__cpu_dot_cfs_quota_us": "-1\n"}
    assert quota(tmp_path, "4:cpu:/\n0::/b/c\n", **files) == 2.0


def test_version_1_can_be_mounted_by_the_names_of_its_controllers(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct__a__cpu_dot_cfs_quota_us": "250000\n",
        "cpu,cpuacct__a__cpu_dot_cfs_period_us": "100000\n",
    }
    assert quota(tmp_path, "4:cpu,cpuacct:/a\n", **files) == 2.5


@pytest.mark.parametrize("text", ["", "max", "abc 100000", "100000", "100000 0", "1 2 3", "max max", "1.5 100000"])
def test_an_invalid_file_of_version_2_is_no_quota(tmp_path: Path, text: str) -> None:
    assert quota(tmp_path, "0::/\n", cpu_dot_max=text) is None


@pytest.mark.parametrize(("count", "period"), [("", "100000"), ("x", "100000"), ("100000", "0"), ("0", "100000")])
def test_an_invalid_file_of_version_1_is_no_quota(tmp_path: Path, count: str, period: str) -> None:
    files = {"cpu__cpu_dot_cfs_quota_us": count, "cpu__cpu_dot_cfs_period_us": period}
    assert quota(tmp_path, "1:cpu:/\n", **files) is None


@pytest.mark.parametrize("membership", ["", "nonsense\n", "\n\n", "0::", "1:cpuset:/a\n", "7\n"])
def test_an_invalid_membership_is_no_quota(tmp_path: Path, membership: str) -> None:
    assert quota(tmp_path, membership, a__cpu_dot_max="100000 100000") is None


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "absent", tmp_path) is None


# ---- the plan


@pytest.mark.parametrize(
    ("cpus", "limit", "cores", "fast", "threads"),
    [
        *((8, None, 4, 4, 4), (8, 2.9, 4, 4, 2), (8, 0.5, 4, None, 1), (2, 16.0, 2, None, 2)),
        *((3, None, None, None, 3), (1, 1.0, 1, 1, 1), (8, None, 8, 2, 2), (8, 1.0, 8, 2, 1)),
    ],
)
def test_the_default_is_the_smallest_limit(
    monkeypatch: pytest.MonkeyPatch,
    cpus: int,
    limit: float | None,
    cores: int | None,
    fast: int | None,
    threads: int,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(machine, "usable_cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(machine, "cgroup_quota", lambda *_: limit)
    monkeypatch.setattr(machine, "physical_cores", lambda *_: cores)
    monkeypatch.setattr(machine, "fast_cores", lambda *_: fast)
    monkeypatch.setattr(_core, "has_threads", lambda: True)
    plan = plan_threads()
    assert plan == ThreadPlan(threads, cpus, limit, cores, fast, True)
    assert DefaultThreads(machine.TINY_MODEL_BYTES).now() == threads
    assert DefaultThreads(machine.TINY_MODEL_BYTES - 1).now() == 1
    monkeypatch.setattr(_core, "has_threads", lambda: False)
    assert plan_threads().threads == 1


def test_the_reason_lists_every_limit() -> None:
    all_known = "2 = min(usable CPUs 8, cgroup quota 2.5 CPUs, physical cores 4)"
    assert ThreadPlan(2, 8, 2.5, 4, 4, True).reason() == all_known
    unknown = "8 = min(usable CPUs 8, cgroup quota none, physical cores unknown)"
    assert ThreadPlan(8, 8, None, None, None, True).reason() == unknown
    hybrid = "6 = min(usable CPUs 16, cgroup quota none, physical cores 12, fast ones 6)"
    assert ThreadPlan(6, 16, None, 12, 6, True).reason() == hybrid
    too_small = "1 = min(usable CPUs 8, cgroup quota 0.5 CPUs, physical cores 4), but at least 1"
    assert ThreadPlan(1, 8, 0.5, 4, None, True).reason() == too_small
    assert ThreadPlan(1, 8, None, 4, 4, False).reason() == "1: this build has no OpenMP"


def test_the_quota_is_read_at_most_once_per_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reads, limits, cpus = [10.0], [0], [4.0], [8]

    def read_quota(*_: Path) -> float:
        reads[0] += 1
        return limits[0]

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine, "usable_cpus", lambda: set(range(cpus[0])))
    monkeypatch.setattr(machine, "cgroup_quota", read_quota)
    monkeypatch.setattr(machine, "physical_cores", lambda *_: None)
    monkeypatch.setattr(machine, "fast_cores", lambda *_: None)
    monkeypatch.setattr(_core, "has_threads", lambda: True)
    threads = DefaultThreads(1 << 30)
    assert [threads.now() for _ in range(100)] == [4] * 100
    assert reads == [1]
    limits[0] = 3.0
    clock[0] += machine.QUOTA_INTERVAL_S
    assert threads.now() == 3
    assert reads == [2]
    cpus[0] = 2  # the affinity is read every time
    assert threads.now() == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
@needs_threads
def test_a_change_of_affinity_changes_the_plan() -> None:
    program = """
        import os
        from llamac import _core
        from llamac.engine.hardware import machine
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        plan = machine.plan_threads()
        print(plan.threads, plan.affinity, machine.DefaultThreads(1 << 30).now(), plan.reason())
    """
    assert output_of(program).startswith("1 1 1 1 = min(usable CPUs 1,")


@pytest.fixture
def limited_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new control group of version 1 or 2 below this process's own; skips the test if it cannot be created."""
    version: int = request.param
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if (controllers == "") if version == 2 else ("cpu" in controllers.split(",")):
            break
    else:
        pytest.skip(f"this system has no control groups of version {version}")
    base = machine.CGROUPS / ("cpu" if version == 1 else "") / own.lstrip("/")
    if not (base / "cgroup.procs").exists():
        pytest.skip(f"no control group of version {version} is mounted at {base}")
    group = base / f"llamac-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip(f"no control group can be made at {group}")
    try:
        if not (group / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).exists():
            pytest.skip(f"the CPU controller is off at {group}")
        yield group
    finally:
        group.rmdir()


@pytest.mark.parametrize("limited_group", [1, 2], indirect=True)
def test_open_sessions_follow_a_real_quota(limited_group: Path, tiny_llama: Path) -> None:
    """A process enters a group whose quota then changes. Sessions with a fixed number of threads keep it."""
    program = """
        import os, sys, time
        from pathlib import Path
        import llamac
        from llamac.engine.hardware import machine
        group, machine.TINY_MODEL_BYTES = Path(sys.argv[2]), 0
        def limit(cpus):
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{int(cpus * 100000)} 100000")
            else:
                (group / "cpu.cfs_quota_us").write_text(str(int(cpus * 100000)))
            time.sleep(2 * machine.QUOTA_INTERVAL_S)
        model = llamac.load(sys.argv[1])
        session, fixed = model.session(), model.session(threads=2)
        free = session.threads
        (group / "cgroup.procs").write_text(str(os.getpid()))
        for cpus in (1.9, 0.6, 1000):
            limit(cpus)
            session.eval([1, 2])
            print(session._core.describe()[2], session.threads, fixed.threads, machine.plan_threads().quota)
        print(free == session.threads)
    """
    # threads of the session that follows the quota, by the core and by the session; of the fixed one; the quota
    found = output_of(program, tiny_llama, limited_group).splitlines()
    assert found[:2] == ["1 1 2 1.9", "1 1 2 0.6"]
    assert found[2].endswith(" 2 1000.0")
    assert found[3] == "True"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
@pytest.mark.skipif(len(machine.usable_cpus()) < 2, reason="needs two CPUs")
def test_open_sessions_follow_taskset(tiny_llama: Path) -> None:
    """taskset changes the affinity from outside: one CPU, then two, then the other one."""
    first, second, *_ = sorted(machine.usable_cpus())
    program = """
        import os, subprocess, sys
        import llamac
        from llamac.engine.hardware import machine
        machine.TINY_MODEL_BYTES = 0
        machine.physical_cores = lambda *_: None  # the CPUs may be hyper-threads of one core
        machine.fast_cores = lambda *_: None
        machine.cgroup_quota = lambda *_: None
        model = llamac.load(sys.argv[1])
        session, fixed = model.session(), model.session(threads=3)
        for cpus in sys.argv[2:]:
            subprocess.run(["taskset", "-pc", cpus, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)
            logits = [s.eval([5, 6, 7]).tobytes() for s in (session, fixed)]
            print(session._core.describe()[2], session.threads, fixed.threads, logits[0] == logits[1])
    """
    limited = ["taskset", "-c", str(first), sys.executable, "-c", textwrap.dedent(program), str(tiny_llama)]
    changes = [str(first), f"{first},{second}", str(second)]
    done = subprocess.run([*limited, *changes], capture_output=True, text=True, timeout=TIMEOUT)
    assert (done.stdout.splitlines(), done.stderr) == (["1 1 3 True", "2 2 3 True", "1 1 3 True"], "")


def test_the_plan_of_this_machine_fits_its_affinity() -> None:
    plan = plan_threads()
    assert 1 <= plan.threads <= plan.affinity == len(machine.usable_cpus())
    assert str(plan.threads) == plan.reason()[: len(str(plan.threads))]
