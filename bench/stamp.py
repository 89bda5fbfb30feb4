"""Save results with the commit, machine and versions that produced them, as bench/results/DATE-NAME.json.

llamac bench MODEL --json - | python -m bench.stamp NAME        saves the output of `llamac bench`
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from llamac.cli.inspect import describe_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PEERS = ("llama-cpp-python", "ctranslate2", "transformers", "torch")


def stamp() -> dict[str, Any]:
    """The commit, machine, versions, date and load average."""
    machine = describe_machine()
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "processor": machine["processor"],
        "isa": machine["isa"],
        "cpus": machine["usable_cpus"],
        "physical_cores": machine["physical_cores"],
        "cgroup_quota": machine["cgroup_quota"],
        "caches": caches(Path("/sys/devices/system/cpu/cpu0/cache")),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "load_average": [round(number, 2) for number in os.getloadavg()],
        "compiler": first_line("cc", "--version"),
        "versions": {"python": platform.python_version(), "llamac": machine["llamac"], **peer_versions()},
    }


def commit() -> str:
    """The commit of the checkout, with "+" if tracked files are modified."""
    found = first_line("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return found + ("+" if found and first_line("git", "-C", str(ROOT), "status", "--porcelain", "-uno") else "")


def first_line(*command: str) -> str:
    """The first line that a program prints; "" if it cannot be run."""
    try:
        return (subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() or [""])[0]
    except OSError:
        return ""


def caches(folder: Path) -> list[str]:
    """Level, type and size of the first CPU's caches."""
    return [
        " ".join((cache / name).read_text().strip() for name in ("level", "type", "size"))
        for cache in sorted(folder.glob("index*"))
    ]


def peer_versions() -> dict[str, str]:
    """Versions of the installed engines."""
    found = {}
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write results with their stamp to bench/results; return the path."""
    RESULTS.mkdir(exist_ok=True)
    facts = stamp()
    path = RESULTS / f"{facts['date']}-{name}.json"
    path.write_text(json.dumps({"stamp": facts, **figures}, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("name", metavar="NAME", help="name of the result file, without date and suffix")
    name = parser.parse_args().name
    text = sys.stdin.read()
    if not text:
        raise SystemExit("standard input is empty; pipe the output of `llamac bench MODEL --json -` into it")
    print(save(name, {"bench": "llamac bench", **json.loads(text)}))


if __name__ == "__main__":
    main()
