"""Cores, their speeds and NUMA nodes, from made-up trees of /sys/devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamac.engine.hardware.topology import fast_cores, numa_nodes, parse_cpus, physical_cores
from openmp import needs_threads
from processes import output_of


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write files, given by path; return the root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cpu_files(name: str, texts: dict[int, str]) -> dict[str, str]:
    """One file of each CPU."""
    return {f"system/cpu/cpu{cpu}/{name}": f"{text}\n" for cpu, text in texts.items()}


def cores(*groups: str) -> dict[str, str]:
    """The files that list the CPUs of each core."""
    texts = {cpu: group for group in groups for cpu in parse_cpus(group)}
    return cpu_files("topology/core_cpus_list", texts)


# ---- physical cores


def test_hyper_threads_of_a_core_count_once(tmp_path: Path) -> None:
    root = write_tree(tmp_path, cores("0,4", "1,5", "2,6", "3,7"))
    assert physical_cores(set(range(8)), root) == 4
    assert physical_cores({0, 4}, root) == 1
    assert physical_cores({0, 1, 5}, root) == 2
    assert physical_cores({3}, root) == 1


def test_the_file_name_of_older_kernels_is_read(tmp_path: Path) -> None:
    root = write_tree(tmp_path, cpu_files("topology/thread_siblings_list", {0: "0-1", 1: "0-1"}))
    assert physical_cores({0, 1}, root) == 1


def test_a_cpu_without_topology_makes_the_cores_unknown(tmp_path: Path) -> None:
    root = write_tree(tmp_path, cores("0"))
    assert physical_cores({0}, root) == 1
    assert physical_cores({0, 1}, root) is None
    assert fast_cores({0, 1}, root) is None


# ---- fast cores


def test_equal_cores_are_all_fast(tmp_path: Path) -> None:
    files = {**cores("0,2", "1,3"), **cpu_files("cpufreq/cpuinfo_max_freq", dict.fromkeys(range(4), "3500000"))}
    assert fast_cores({0, 1, 2, 3}, write_tree(tmp_path, files)) == 2


def test_little_cores_of_arm_are_not_fast(tmp_path: Path) -> None:
    """One large, three middle and four little cores: the capacities of a telephone's processor."""
    capacities = {**dict.fromkeys(range(4), "250"), **dict.fromkeys((4, 5, 6), "811"), 7: "1024"}
    files = {**cores(*map(str, range(8))), **cpu_files("cpu_capacity", capacities)}
    root = write_tree(tmp_path, files)
    assert physical_cores(set(range(8)), root) == 8
    assert fast_cores(set(range(8)), root) == 4
    assert fast_cores({0, 1, 2, 3}, root) == 4  # nothing faster may be used
    assert fast_cores({0, 7}, root) == 1


def test_capacity_counts_before_frequency(tmp_path: Path) -> None:
    frequencies = cpu_files("cpufreq/cpuinfo_max_freq", {0: "1000000", 1: "5000000"})
    root = write_tree(tmp_path, {**cores("0", "1"), **cpu_files("cpu_capacity", {0: "1024", 1: "1024"}), **frequencies})
    assert fast_cores({0, 1}, root) == 2


@pytest.mark.parametrize(("small", "expected"), [("3800000", 3), ("2500000", 1)])
def test_small_cores_of_intel_do_less_per_clock(tmp_path: Path, small: str, expected: int) -> None:
    """A large core with two hyper-threads and two small cores, without capacities."""
    frequencies = {0: "4800000", 1: "4800000", 2: small, 3: small}
    files = {**cores("0-1", "2", "3"), **cpu_files("cpufreq/cpuinfo_max_freq", frequencies)}
    root = write_tree(tmp_path, {**files, "cpu_core/cpus": "0-1\n", "cpu_atom/cpus": "2-3\n"})
    assert fast_cores({0, 1, 2, 3}, root) == expected


def test_cores_in_the_low_power_island_are_small(tmp_path: Path) -> None:
    frequencies = {0: "5400000", 1: "4600000", 2: "2500000"}
    files = {**cores("0", "1", "2"), **cpu_files("cpufreq/cpuinfo_max_freq", frequencies)}
    root = write_tree(tmp_path, {**files, "cpu_atom/cpus": "1\n", "cpu_lowpower/cpus": "2\n"})
    assert fast_cores({0, 1, 2}, root) == 2


@pytest.mark.parametrize("text", ["", "0", "-5", "fast", "1.5"])
def test_an_unreadable_speed_makes_the_fast_cores_unknown(tmp_path: Path, text: str) -> None:
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        files = {**cores("0", "1"), **cpu_files(name, {0: "1000", 1: text})}
        root = write_tree(tmp_path / name.replace("/", "-"), files)
        assert fast_cores({0, 1}, root) is None


def test_a_system_without_sysfs_reports_nothing(tmp_path: Path) -> None:
    assert physical_cores({0}, tmp_path) is None
    assert fast_cores({0}, tmp_path) is None
    assert numa_nodes(tmp_path) == []


# ---- NUMA nodes


def test_each_cpu_has_a_node(tmp_path: Path) -> None:
    files = {"has_cpu": "0-1", "node0/cpulist": "0-1,4-5\n", "node1/cpulist": "2,6\n", "node2/cpulist": "\n"}
    root = write_tree(tmp_path, {f"system/node/{name}": text for name, text in files.items()})
    assert numa_nodes(root) == [0, 0, 1, 0, 0, 0, 1]


def test_one_node_is_none(tmp_path: Path) -> None:
    assert numa_nodes(write_tree(tmp_path, {"system/node/has_cpu": "0", "system/node/node0/cpulist": "0-7"})) == []


@needs_threads
def test_the_core_takes_nodes_once() -> None:
    program = """
        from array import array
        import llamac
        from llamac import _core
        from llamac.engine.hardware import topology
        topology.numa_nodes = lambda _: [0, 1]
        with llamac.load("stories") as model:
            before = [model.session(threads=threads).eval([1, 2, 3]).tobytes() for threads in (1, 2, 3)]
            again = model.session(threads=2).eval([1, 2, 3]).tobytes()
            print({*before, again} == {again})
        for nodes in ([0, 1], [-1]):
            try:
                _core.set_nodes(array("i", nodes))
            except llamac.ArgumentError as error:
                print(error)
    """
    expected = ["True", "the nodes have already been set: they never change"]
    assert output_of(program).splitlines() == [*expected, "the node of CPU 0 is -1, expected 0 to 1023"]


@pytest.mark.parametrize("text", ["", "0-", "-1", "a", "0,,1", "0-99999999999", "1-2-3"])
def test_a_malformed_list_of_cpus_is_empty(text: str) -> None:
    assert parse_cpus(text) == set()


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
