"""The kernel sets that this machine supports, and the default number of threads.

That number is the minimum of the CPUs that this process may use, the CPU quota of its control groups (rounded down),
and the physical cores among these CPUs that are at least half as fast as the fastest one; at least 1. Affinity and
quota can change while a program runs. Sessions without an explicit number of threads follow them.
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
from llamac.arguments import wrong_type
from llamac.engine.hardware.topology import DEVICES, fast_cores, physical_cores, read_small
from llamac.errors import ArgumentError, UnsupportedError

# Models with fewer bytes of weights use one thread. A second one saves little, and costs much if another program needs
# its core (bench/LOG.md).
TINY_MODEL_BYTES = 16 << 20
# The shortest interval between reads of the quota. A read takes about 20 microseconds; quotas apply to periods of about
# 100 ms.
QUOTA_INTERVAL_S = 0.005

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class ThreadPlan:
    """The default number of threads and the limits that determine it.

    Attributes:
        threads: The number of threads.
        affinity: The number of CPUs that this process may use.
        quota: The CPU quota of its control groups, in CPUs; None if there is none or it is unknown.
        physical_cores: The physical cores among these CPUs, or None if unknown.
        fast_cores: Those of them that are at least half as fast as the fastest one, or None if unknown.
        openmp: Whether this build has OpenMP. Without it, threads is 1.
    """

    threads: int
    affinity: int
    quota: float | None
    physical_cores: int | None
    fast_cores: int | None
    openmp: bool

    def reason(self) -> str:
        """Explain the number in one line."""
        quota = "none" if self.quota is None else f"{self.quota:g} CPUs"
        cores = "unknown" if self.physical_cores is None else str(self.physical_cores)
        if self.fast_cores is not None and self.fast_cores != self.physical_cores:
            cores += f", fast ones {self.fast_cores}"
        note = ", but at least 1" if self.quota is not None and self.quota < 1 else ""
        text = f"{self.threads} = min(usable CPUs {self.affinity}, cgroup quota {quota}, physical cores {cores}){note}"
        return text if self.openmp else "1: this build has no OpenMP"


def plan_threads() -> ThreadPlan:
    """Determine the default number of threads now."""
    cpus = usable_cpus()
    linux = sys.platform == "linux"
    quota = cgroup_quota(MEMBERSHIP, CGROUPS) if linux else None
    cores = physical_cores(cpus, DEVICES) if linux else None
    fast = fast_cores(cpus, DEVICES) if linux else None
    limits = [len(cpus), *(int(limit) for limit in (quota, cores, fast) if limit is not None)]
    openmp = _core.has_threads()
    return ThreadPlan(max(1, min(limits)) if openmp else 1, len(cpus), quota, cores, fast, openmp)


class DefaultThreads:
    """The default number of threads for a model, cheap enough to ask for before every pass.

    Args:
        weight_bytes: Bytes of the model's weights.
    """

    def __init__(self, weight_bytes: int) -> None:
        self._tiny = weight_bytes < TINY_MODEL_BYTES
        self._cpus: Set[int] = frozenset()
        self._planned = 0.0
        self._threads = 1

    def now(self) -> int:
        """The current number. Follows the calling thread's affinity at once, and the quota within QUOTA_INTERVAL_S."""
        if self._tiny:
            return 1
        cpus, now = usable_cpus(), time.monotonic()
        if cpus != self._cpus or now - self._planned >= QUOTA_INTERVAL_S:
            self._threads = plan_threads().threads
            self._cpus, self._planned = cpus, now
        return self._threads


def usable_cpus() -> Set[int]:
    """The numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def cgroup_quota(membership: Path, root: Path) -> float | None:
    """Find the smallest CPU quota of this process's control groups and their ancestors.

    Supports version 2 (cpu.max: "quota period"), version 1 (cpu.cfs_quota_us, cpu.cfs_period_us), and both together.

    Args:
        membership: The file that lists the process's groups, usually `MEMBERSHIP`.
        root: The folder of control groups, usually `CGROUPS`.

    Returns:
        The quota in CPUs, or None if there is none.
    """
    groups = read_small(str(membership))
    found = [_quota(folder, version) for folder, version in _quota_folders(groups or "", str(root))]
    return min((quota for quota in found if quota is not None), default=None)


@functools.lru_cache(maxsize=4)
def _quota_folders(membership: str, root: str) -> tuple[tuple[str, int], ...]:
    """The folders of a process's groups and all their ancestors, each with its cgroup version."""
    folders: list[tuple[str, int]] = []
    for line in membership.splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            # when mounted together with version 1, version 2 has its own folder
            bases, version = [root, f"{root}/unified"], 2
        elif "cpu" in controllers.split(","):
            bases, version = [f"{root}/cpu" if os.path.isdir(f"{root}/cpu") else f"{root}/{controllers}"], 1
        else:
            continue
        # in a container the path can be the host's and not exist here; the mount point is then the group itself
        parts = [part for part in group.split("/") if part]
        for base in bases:
            folders += [("/".join([base, *parts[:count]]), version) for count in range(len(parts), -1, -1)]
    return tuple(dict.fromkeys(folders))


def _quota(folder: str, version: int) -> float | None:
    """The quota of one group in CPUs, or None."""
    try:
        if version == 2:
            quota, period = (read_small(f"{folder}/cpu.max") or "").split()
            return None if quota == "max" else int(quota) / int(period)
        count = int(read_small(f"{folder}/cpu.cfs_quota_us") or "-1")
        return count / int(read_small(f"{folder}/cpu.cfs_period_us") or "") if count > 0 else None
    except (ValueError, ZeroDivisionError):
        return None


def choose_isa(requested: str | None) -> str | None:
    """Choose the kernel set to force.

    Args:
        requested: A kernel set's name, or None for the environment variable LLAMAC_ISA.

    Returns:
        The name, or None for the best kernel set of this machine.

    Raises:
        ArgumentError: If this build has no such kernel set.
        UnsupportedError: If this machine does not support it.
    """
    name = requested if requested is not None else os.environ.get("LLAMAC_ISA") or None
    if name is None:
        return None
    known = dict(_core.isas())
    where = "isa" if requested is not None else "the environment variable LLAMAC_ISA"
    if not isinstance(name, str):
        raise wrong_type(where, name, "a str")
    if name not in known:
        raise ArgumentError(f"{where} is {name!r}; this build has {', '.join(known)}")
    if not known[name]:
        raise UnsupportedError(f"{where} is {name!r}, which this processor does not support; it runs {best_isa()}")
    return str.__str__(name)  # of a subclass, too, such as an enum: the core expects a str


def best_isa() -> str:
    """The default kernel set: the best that this machine supports."""
    return next(name for name, supported in _core.isas() if supported)
