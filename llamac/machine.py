"""What this machine offers: the kernel sets it runs and the threads it is sensible to use, each with its reason.

Threads = min(CPUs this process may run on, CPU quota of its control groups rounded down, physical cores among them), at
least 1. Nothing here is cached: affinity and quota may change while a program runs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from llamac import _core
from llamac.errors import ArgumentError, UnsupportedError

# Below this many bytes of weights a second thread saves little and costs much where others want its core: bench/LOG.md.
TINY_MODEL_BYTES = 16 << 20


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
        text = f"{self.threads} = min(usable CPUs {self.affinity}, cgroup quota {quota}, physical cores {cores})"
        return text if self.openmp else "1: this build has no OpenMP"


def plan_threads() -> ThreadPlan:
    """The default number of threads now, and why."""
    cpus = usable_cpus()
    quota = cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")) if sys.platform == "linux" else None
    cores = physical_cores(cpus, Path("/sys/devices/system/cpu")) if sys.platform == "linux" else None
    limits = [len(cpus), *([int(quota)] if quota is not None else []), *([cores] if cores is not None else [])]
    openmp = _core.has_threads()
    return ThreadPlan(max(1, min(limits)) if openmp else 1, len(cpus), quota, cores, openmp)


def default_threads(weight_bytes: int) -> int:
    """Threads for a model with so many bytes of weights."""
    return 1 if weight_bytes < TINY_MODEL_BYTES else plan_threads().threads


def usable_cpus() -> set[int]:
    """Numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], root: Path) -> int | None:
    """Cores among `cpus` when siblings (hyper-threads) count once; None if the system does not tell."""
    cores = set()
    for cpu in cpus:
        for name in ("core_cpus_list", "thread_siblings_list"):
            try:
                cores.add((root / f"cpu{cpu}" / "topology" / name).read_text().strip())
                break
            except OSError:
                continue
        else:
            return None
    return len(cores)


def cgroup_quota(membership: Path, root: Path) -> float | None:
    """The smallest CPU quota of this process's control group and its ancestors, in CPUs; None if there is none.

    Reads version 2 (cpu.max: "quota period") and version 1 (cpu.cfs_quota_us, cpu.cfs_period_us).
    """
    quotas = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, read = root, _quota_v2
        elif "cpu" in controllers.split(","):
            base, read = root / "cpu", _quota_v1
        else:
            continue
        folder = base / group.lstrip("/")
        # inside a container the path may be the host's, which does not exist here: its mount is then the group itself
        for place in [folder, *folder.parents]:
            if place == base or base in place.parents:
                quota = read(place)
                if quota is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return quota / int((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


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
