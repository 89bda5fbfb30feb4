"""What this machine offers: the kernel sets it runs and the threads it is sensible to use, each with its reason.

Threads = min(CPUs this process may run on, CPU quota of its control groups rounded down, physical cores among them), at
least 1. Affinity and quota may change while a program runs: sessions without a number of their own follow them.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from llamac import _core
from llamac.errors import ArgumentError, UnsupportedError

# Below this many bytes of weights a second thread saves little and costs much where others want its core: bench/LOG.md.
TINY_MODEL_BYTES = 16 << 20
# How often a quota is read again at most: it takes some 20 microseconds, and is itself a limit per 100 ms or so.
QUOTA_INTERVAL_S = 0.005

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
CPU_FOLDERS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class ThreadPlan:
    """How the number of threads came about. A limit that is not known on this system is None."""

    threads: int
    affinity: int
    quota: float | None
    physical_cores: int | None
    openmp: bool

    def reason(self) -> str:
        """One line that explains the number."""
        quota = "none" if self.quota is None else f"{self.quota:g} CPUs"
        cores = "unknown" if self.physical_cores is None else str(self.physical_cores)
        least = ", but at least 1" if self.quota is not None and self.quota < 1 else ""
        text = f"{self.threads} = min(usable CPUs {self.affinity}, cgroup quota {quota}, physical cores {cores}){least}"
        return text if self.openmp else "1: this build has no OpenMP"


def plan_threads() -> ThreadPlan:
    """The default number of threads now, and why."""
    cpus = usable_cpus()
    linux = sys.platform == "linux"
    quota = cgroup_quota(MEMBERSHIP, CGROUPS) if linux else None
    cores = physical_cores(cpus, CPU_FOLDERS) if linux else None
    limits = [len(cpus), *([int(quota)] if quota is not None else []), *([cores] if cores is not None else [])]
    openmp = _core.has_threads()
    return ThreadPlan(max(1, min(limits)) if openmp else 1, len(cpus), quota, cores, openmp)


class DefaultThreads:
    """The default number of threads for a model with so many bytes of weights, cheap to ask for before every pass."""

    def __init__(self, weight_bytes: int) -> None:
        self._tiny = weight_bytes < TINY_MODEL_BYTES
        self._cpus: Set[int] = frozenset()
        self._planned = 0.0
        self._threads = 1

    def now(self) -> int:
        """Follows the calling thread's affinity at once, and the quota within QUOTA_INTERVAL_S."""
        if self._tiny:
            return 1
        cpus, now = usable_cpus(), time.monotonic()
        if cpus != self._cpus or now - self._planned >= QUOTA_INTERVAL_S:
            self._threads = plan_threads().threads
            self._cpus, self._planned = cpus, now
        return self._threads


def usable_cpus() -> Set[int]:
    """Numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: Set[int], root: Path) -> int | None:
    """Cores among `cpus` when siblings (hyper-threads) count once; None if the system does not tell."""
    return _physical_cores(frozenset(cpus), root)


@functools.lru_cache(maxsize=4)  # the cores of a CPU never change, and large machines have many files
def _physical_cores(cpus: frozenset[int], root: Path) -> int | None:
    cores = set()
    for cpu in cpus:
        for name in ("core_cpus_list", "thread_siblings_list"):
            siblings = _read(f"{root}/cpu{cpu}/topology/{name}")
            if siblings is not None:
                cores.add(siblings.strip())
                break
        else:
            return None
    return len(cores)


def cgroup_quota(membership: Path, root: Path) -> float | None:
    """The smallest CPU quota of this process's control group and its ancestors, in CPUs; None if there is none.

    Reads version 2 (cpu.max: "quota period") and version 1 (cpu.cfs_quota_us, cpu.cfs_period_us), also side by side.
    """
    groups = _read(str(membership))
    found = [_quota(folder, version) for folder, version in _quota_folders(groups or "", str(root))]
    return min((quota for quota in found if quota is not None), default=None)


@functools.lru_cache(maxsize=4)
def _quota_folders(membership: str, root: str) -> tuple[tuple[str, int], ...]:
    """Folders of the groups that a process is in, and of all above them, each with its version."""
    folders: list[tuple[str, int]] = []
    for line in membership.splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            # beside version 1 the tree of version 2 has a folder of its own
            bases, version = [root, f"{root}/unified"], 2
        elif "cpu" in controllers.split(","):
            bases, version = [f"{root}/cpu" if os.path.isdir(f"{root}/cpu") else f"{root}/{controllers}"], 1
        else:
            continue
        # inside a container the path may be the host's, which does not exist here: its mount is then the group itself
        parts = [part for part in group.split("/") if part]
        for base in bases:
            folders += [("/".join([base, *parts[:count]]), version) for count in range(len(parts), -1, -1)]
    return tuple(dict.fromkeys(folders))


def _quota(folder: str, version: int) -> float | None:
    try:
        if version == 2:
            quota, period = (_read(f"{folder}/cpu.max") or "").split()
            return None if quota == "max" else int(quota) / int(period)
        count = int(_read(f"{folder}/cpu.cfs_quota_us") or "-1")
        return count / int(_read(f"{folder}/cpu.cfs_period_us") or "") if count > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def _read(path: str) -> str | None:
    """A small file of the kernel's; None if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return os.read(file, 1 << 16).decode("ascii", "replace")
    except OSError:
        return None
    finally:
        os.close(file)


def choose_isa(asked: str | None) -> str | None:
    """The kernel set to force: the argument, else the environment variable LLAMAC_ISA, else None (the machine's best).

    Raises ArgumentError for an unknown name and UnsupportedError for one that this machine does not run.
    """
    name = asked if asked is not None else os.environ.get("LLAMAC_ISA") or None
    if name is None:
        return None
    known = dict(_core.isas())
    where = "isa" if asked is not None else "the environment variable LLAMAC_ISA"
    if name not in known:
        raise ArgumentError(f"{where} is {name!r}; this build has {', '.join(known)}")
    if not known[name]:
        raise UnsupportedError(f"{where} is {name!r}, which this processor does not support; it runs {best_isa()}")
    return name


def best_isa() -> str:
    """The kernel set that is used when none is forced."""
    return next(name for name, supported in _core.isas() if supported)
