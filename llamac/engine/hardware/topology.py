"""The CPUs of this machine as Linux describes them: physical cores, their speeds, and NUMA nodes."""

from __future__ import annotations

import functools
import os
import sys
import threading
from array import array
from collections.abc import Set
from pathlib import Path

from llamac import _core

DEVICES = Path("/sys/devices")
MAX_CPUS = 1024  # of an affinity mask
_announcing = threading.Lock()

# A slower core takes part if it is at least this fast compared with the fastest one. The threads' shares follow their
# speeds, but all threads wait for the slowest one at every barrier.
MIN_SPEED = 0.5
# Intel's small cores do less per clock than the large ones beside them. With wide vectors it is about this share.
SMALL_CORE_SPEED = 0.7
# Lists of small cores. Intel's drivers for performance counters list each kind of core.
SMALL_CORES = ("cpu_atom/cpus", "cpu_lowpower/cpus")


def physical_cores(cpus: Set[int], devices: Path) -> int | None:
    """Count the physical cores among CPUs, on which hyper-threads count once.

    Args:
        cpus: Numbers of CPUs.
        devices: The folder of device descriptions, usually `DEVICES`.

    Returns:
        The number, or None if the system does not report it.
    """
    cores = _cores(frozenset(cpus), str(devices))
    return None if cores is None else len(cores)


def fast_cores(cpus: Set[int], devices: Path) -> int | None:
    """Count the physical cores among CPUs that are at least MIN_SPEED times as fast as the fastest one.

    Args:
        cpus: Numbers of CPUs.
        devices: The folder of device descriptions, usually `DEVICES`.

    Returns:
        The number, or None if the system does not report cores or speeds.
    """
    return _fast_cores(frozenset(cpus), str(devices))


@functools.lru_cache(maxsize=4)  # speeds never change, and large machines have many files
def _fast_cores(cpus: frozenset[int], devices: str) -> int | None:
    cores, speeds = _cores(cpus, devices), _speeds(cpus, devices)
    if cores is None or speeds is None:
        return None
    fastest = max(speeds.values())
    return sum(max(speeds[cpu] for cpu in core) >= MIN_SPEED * fastest for core in cores)


@functools.lru_cache(maxsize=4)
def _cores(cpus: frozenset[int], devices: str) -> tuple[tuple[int, ...], ...] | None:
    """The CPUs of each physical core, or None."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        for name in ("core_cpus_list", "thread_siblings_list"):
            siblings = read_small(f"{devices}/system/cpu/cpu{cpu}/topology/{name}")
            if siblings is not None:
                cores.setdefault(siblings.strip(), []).append(cpu)
                break
        else:
            return None
    return tuple(tuple(core) for core in cores.values())


def _speeds(cpus: frozenset[int], devices: str) -> dict[int, float] | None:
    """The speed of each CPU in any unit, or None.

    ARM and newer kernels on Intel's hybrid processors report a capacity. Otherwise it is the highest frequency, times
    SMALL_CORE_SPEED for small cores.
    """
    capacities = _numbers(cpus, f"{devices}/system/cpu/cpu{{}}/cpu_capacity")
    if capacities is not None:
        return capacities
    frequencies = _numbers(cpus, f"{devices}/system/cpu/cpu{{}}/cpufreq/cpuinfo_max_freq")
    if frequencies is None:
        return None
    small = set().union(*(parse_cpus(read_small(f"{devices}/{name}") or "") for name in SMALL_CORES))
    return {cpu: speed * (SMALL_CORE_SPEED if cpu in small else 1) for cpu, speed in frequencies.items()}


def _numbers(cpus: frozenset[int], pattern: str) -> dict[int, float] | None:
    """A positive number for each CPU, from a file whose name has {} for its number; None if one is missing."""
    numbers: dict[int, float] = {}
    for cpu in cpus:
        text = (read_small(pattern.format(cpu)) or "").strip()
        if not (text.isdecimal() and int(text)):
            return None
        numbers[cpu] = float(text)
    return numbers or None


def numa_nodes(devices: Path) -> list[int]:
    """The NUMA node of each CPU.

    Args:
        devices: The folder of device descriptions, usually `DEVICES`.

    Returns:
        Nodes, indexed by the CPU's number, 0 for CPUs that do not exist; empty if the machine has one node or does not
        report nodes.
    """
    root = devices / "system" / "node"
    nodes = sorted(parse_cpus(read_small(str(root / "has_cpu")) or ""))
    if len(nodes) < 2:
        return []
    members = {node: parse_cpus(read_small(str(root / f"node{node}" / "cpulist")) or "") for node in nodes}
    nodes_of = [0] * (1 + max((cpu for cpus in members.values() for cpu in cpus), default=-1))
    for node, cpus in members.items():
        for cpu in cpus:
            nodes_of[cpu] = node
    return nodes_of


@functools.lru_cache(maxsize=1)
def _announce_nodes() -> None:
    nodes = numa_nodes(DEVICES) if sys.platform == "linux" else []
    if 0 < len(nodes) <= MAX_CPUS:
        _core.set_nodes(array("i", nodes))


def announce_nodes() -> None:
    """Tell the core about NUMA nodes, once per process: the threads of its team then stay on their nodes."""
    with _announcing:
        _announce_nodes()


def parse_cpus(text: str) -> set[int]:
    """The numbers in a list like "0-3,8"; empty if it is malformed."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or int(last or first) >= 1 << 16:
            return set()
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def read_small(path: str) -> str | None:
    """The content of a small kernel file, or None if it cannot be read."""
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
