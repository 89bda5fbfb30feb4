"""What the tests reach: branches of the Python code, and lines of the core.

python tests/measure_coverage.py python tests/engine -n 2      branches of llamac/ and export/ under these tests
python tests/measure_coverage.py python --data DIR tests/cli   together with those that earlier runs took
python tests/measure_coverage.py python --data DIR --begin     for other commands: writes DIR/settings. Every Python
    process whose COVERAGE_PROCESS_START is the path of that file counts what it reaches
python tests/measure_coverage.py python --data DIR --end --at-least 95     what they all reached; below 95% it fails
python tests/measure_coverage.py c                             lines of csrc/ under the C tests, by gcov
python tests/measure_coverage.py c --sparse --only test_sampler   fewer cases, one program
python tests/measure_coverage.py c --sparse --scalar --no-openmp   as .ci/core does: what counting slows down least

`python` needs `pip install coverage` (7.10 or newer), and follows the processes that tests start. `c` needs gcc and
gcov. Both take minutes: counting slows down what is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from c import build

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "csrc"
PARALLEL = 2  # programs of the C tests at a time
# Programs that compute for long, with kernels whose lines other programs reach: these kernels do not count.
LONG = ("test_states", "test_drafts", "test_mtp", "test_eagle", "test_saving")
# A module in a checkout is a file of llamac/, or of export/, to which a link leads.
SETTINGS = f"""\
[run]
branch = True
parallel = True
patch =
    subprocess
    fork
    _exit
source =
    {ROOT}/llamac
    {ROOT}/export
[report]
exclude_also =
    if TYPE_CHECKING:
    if __name__ == .__main__.:
    @overload
    @abstractmethod
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("language", choices=("python", "c"))
    options, rest = parser.parse_known_args(arguments)
    return measure_python(rest) if options.language == "python" else measure_c(rest)


# ---- Python


def measure_python(arguments: list[str]) -> int:
    """Run pytest with these arguments, and print what it reached; return pytest's exit code."""
    parser = argparse.ArgumentParser(prog="measure_coverage.py python", allow_abbrev=False)
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="keep the counters here, and add to those of other runs"
    )
    parser.add_argument("--begin", action="store_true", help="run no tests: write the settings for other commands")
    parser.add_argument("--end", action="store_true", help="run no tests: report what other commands have reached")
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="PERCENT", help="of the branches; less is a failure"
    )
    options, arguments = parser.parse_known_args(arguments)
    if options.data is None and (options.begin or options.end):
        parser.error("--begin and --end need --data DIR")
    with tempfile.TemporaryDirectory() as temporary:
        settings = write_settings((options.data or Path(temporary)).resolve())
        if options.begin:
            return 0
        code = 0 if options.end else coverage(settings, "run", "-m", "pytest", *arguments)
        report = add_up(settings)
    print("\n".join(python_lines(report)))
    taken, branches = report["totals"]["covered_branches"], report["totals"]["num_branches"]
    if 100 * taken < options.at_least * branches:
        print(f"expected at least {options.at_least:g}%: add tests of the branches above, or remove what nothing needs")
        return 1
    return code


def write_settings(folder: Path) -> Path:
    """Coverage's settings, with which counters are kept in a folder, next to these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.replace("[run]", f"[run]\ndata_file = {folder / 'data'}"))
    return settings


def coverage(settings: Path, *command: str) -> int:
    program = [sys.executable, "-m", "coverage", command[0], f"--rcfile={settings}", *command[1:]]
    return subprocess.run(program, cwd=ROOT).returncode


def add_up(settings: Path) -> dict[str, Any]:
    """Coverage's report on all that was counted with these settings."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "coverage.json")
        if coverage(settings, "combine", "-q", "--append") or coverage(settings, "json", "-q", "-o", str(out)):
            sys.exit("coverage has printed why the counters cannot be read")
        report: dict[str, Any] = json.loads(out.read_text())
    return report


def python_lines(report: dict[str, Any]) -> list[str]:
    """The branches of each file that the tests did not take, fewest first, and the totals of packages and of all."""
    files = []
    packages: dict[str, list[int]] = {}
    for name, entry in report["files"].items():
        taken, branches = entry["summary"]["covered_branches"], entry["summary"]["num_branches"]
        if taken < branches:
            files.append((branches - taken, f"{name}: {branches - taken} of {branches} branches not taken"))
        sums = packages.setdefault(package(name), [0, 0])
        sums[0] += taken
        sums[1] += branches
    totals = report["totals"]
    found = [line for _, line in sorted(files)]
    found += [f"{name}/: branches {share(*sums)}" for name, sums in sorted(packages.items())]
    lines = share(totals["covered_lines"], totals["num_statements"])
    return [*found, f"branches {share(totals['covered_branches'], totals['num_branches'])}, lines {lines}"]


def package(file: str) -> str:
    """The part of the project that a file counts for: export, llamac/engine, or llamac for a file directly in it."""
    folders = Path(file).parts[:-1]
    return "/".join(folders[: 2 if folders[0] == "llamac" else 1])


# ---- C


def measure_c(arguments: list[str]) -> int:
    """Build and run the C tests with counters, and print the lines of the core that they did not reach."""
    parser = argparse.ArgumentParser(prog="measure_coverage.py c", allow_abbrev=False)
    parser.add_argument("--sparse", action="store_true", help="try fewer cases")
    parser.add_argument("--only", action="append", choices=build.NAMES, help="run only this program; repeatable")
    parser.add_argument("--without", action="append", choices=build.NAMES, default=[], help="leave this program out")
    parser.add_argument("--scalar", action="store_true", help="without the kernels for certain processors")
    parser.add_argument("--no-openmp", action="store_true", help="without threads, which would share the counters")
    parser.add_argument(
        "--at-least", type=float, default=0.0, metavar="PERCENT", help="of the lines; less is a failure"
    )
    options = parser.parse_args(arguments)
    chosen = [test for test in build.TESTS if options.only is None or test.stem in options.only]
    chosen = [test for test in chosen if test.stem not in options.without]
    os.environ["CCACHE_DISABLE"] = "1"  # gcov would report the paths of the build that filled the cache
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), Path.cwd()
        os.chdir(folder)  # where gcc leaves counters of what build.py only tries to compile
        setting = (folder, "gcc --coverage", platform.machine(), None, not options.no_openmp, options.scalar)
        programs = build.build(*setting, sources=tuple(chosen), uncounted=LONG)
        cases = ["--sparse"] if options.sparse else []
        with ThreadPoolExecutor(PARALLEL) as pool:
            failed = [
                name for name in pool.map(lambda program: build.run_program("", program, cases), programs) if name
            ]
        files = reached(map(read_counters, sorted(folder.glob("*.gcda"))))
        print("\n".join(c_lines(files)))
        os.chdir(before)
    every = [ran for lines in files.values() for ran in lines.values()]
    if 100 * sum(every) < options.at_least * len(every):
        print(f"expected at least {options.at_least:g}%: add tests of the lines above, or remove what nothing needs")
        return 1
    return bool(failed)


def read_counters(counters: Path) -> dict[str, Any]:
    """gcov's JSON for the counters of an object."""
    command = ["gcov", "--json-format", "--stdout", counters.name]
    document: dict[str, Any] = json.loads(subprocess.run(command, cwd=counters.parent, capture_output=True).stdout)
    return document


def reached(documents: Iterable[dict[str, Any]]) -> dict[str, dict[int, bool]]:
    """For each file of the core, its lines with code, and whether any object that has them has run them.

    Templates of kernels are in several objects, one for each instruction set. Lines of tests do not count.
    """
    found: dict[str, dict[int, bool]] = {}
    for document in documents:
        for entry in document["files"]:
            path = Path(document.get("current_working_directory", ROOT), entry["file"])
            if path.parent != CORE:
                continue
            lines = found.setdefault(path.name, {})
            for line in entry["lines"]:
                number = line["line_number"]
                lines[number] = lines.get(number, False) or line["count"] > 0
    return found


def c_lines(files: dict[str, dict[int, bool]]) -> list[str]:
    """The lines of each file that were not reached, fewest first, and the total."""
    listed = []
    for name, lines in files.items():
        missing = sorted(number for number, ran in lines.items() if not ran)
        if missing:
            listed.append(
                (
                    len(missing),
                    f"csrc/{name}: {share(len(lines) - len(missing), len(lines))}; not reached: {ranges(missing)}",
                )
            )
    every = [ran for lines in files.values() for ran in lines.values()]
    return [line for _, line in sorted(listed)] + [f"lines of csrc/ {share(sum(every), len(every))}"]


def ranges(numbers: list[int]) -> str:
    """Ascending numbers as text, with ranges: 3-5, 9."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}% ({part} of {whole})"


if __name__ == "__main__":
    sys.exit(main())
