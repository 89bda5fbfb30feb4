"""Runs the test suites of other projects' clients against real servers.

    python tests/clients/run.py                       all of them
    python tests/clients/run.py langchain litellm     some
    python tests/clients/run.py --record              and write results.json, from which docs/clients.md is made
    python tests/clients/run.py --recorded            those in results.json, each of which must run

Each suite has its own virtual environment, with the packages of requirements/NAME.txt above those of this interpreter.
A suite whose packages cannot be installed is skipped with a message; with --recorded this is a failure, unless the
package index cannot be reached at all, or OpenAI's document or npm. Several suites run at a time (--jobs).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai_document

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.json"
KEY = "key-of-the-suites"
LIMIT_S = 600  # of a suite; only a hang takes so long
# Suites at a time. Suites mostly import packages and wait for a server; a server computes several answers at once.
JOBS = 3
# Environments, sources and servers, which suites share, are made one after another.
PREPARING = threading.Lock()
# Names that the libraries' own tests ask for.
NAMES: tuple[str, ...] = (
    "gpt-6-astra",
    "gpt-3.5-turbo-instruct",
    "text-embedding-3-small",
    "claude-opus-5-5",
    "claude-sonnet-5-5",
)
NAMES += ("ft:gpt-4o-mini:acemeco:suffix:abc123", "gpt-4o-mini", "model", "model_id")
SEED = 1  # of SmolLM2's draws
ANSWER = '?<think>two</think>three\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ONE_LOOP = (
    "asyncio_mode=auto",
    "asyncio_default_test_loop_scope=session",
    "asyncio_default_fixture_loop_scope=session",
)


@dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
        model: "smollm2", or "tiny": a model with few weights that answers always the same.
        files: The tests: files of this folder, or of a library's sources.
        library: The package whose sources have the tests.
        options: Settings of pytest.
        without: Plugins of pytest that are turned off.
        chosen: Which tests, as pytest's option -k has it.
        document: Whether OpenAI's document is needed.
        proxied: Whether prism checks the traffic with it.
        requirements: The file of the packages, if it has another name than the suite.
    """

    model: str
    files: tuple[str, ...]
    library: str = ""
    options: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    chosen: str = ""
    document: bool = False
    proxied: bool = False
    requirements: str = ""


_OPENAI = ("chat/test_completions.py", "test_completions.py", "test_embeddings.py", "test_models.py")
_ANTHROPIC = ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py")

SUITES = {
    "schemathesis": Suite("tiny", ("suite_schemathesis.py",)),
    "openai-python": Suite("tiny", (*_OPENAI, "test_responses.py"), "openai"),
    "openai-document": Suite(
        "tiny",
        (*_OPENAI, "test_responses.py"),
        "openai",
        chosen="create or (models and not delete)",
        document=True,
        proxied=True,
        requirements="openai-python",
    ),
    "openai-events": Suite("tiny", ("suite_openai_events.py",), document=True),
    "anthropic-sdk-python": Suite("tiny", _ANTHROPIC, "anthropic"),
    "test_clients": Suite("tiny", ("../server/test_clients.py",)),
    "openai-agents": Suite("smollm2", ("suite_agents.py",)),
    "pydantic-ai": Suite("smollm2", ("suite_pydantic_ai.py",)),
    "instructor": Suite("smollm2", ("suite_instructor.py",)),
    "litellm": Suite("smollm2", ("suite_litellm.py",)),
    "langchain": Suite("smollm2", ("suite_langchain.py",), options=ONE_LOOP, without=("codspeed",)),
    "llm-comply": Suite("smollm2", ("suite_comply.py",)),
    "lm-eval": Suite("smollm2", ("suite_lm_eval.py",)),
    "loadgen": Suite("tiny", ("suite_loadgen.py",)),
}


@dataclass(frozen=True)
class Place:
    """What the suites share.

    Attributes:
        work: A folder for files.
        envs: The folder of the virtual environments.
        logs: The folder of what the suites print.
        servers: The servers.
    """

    work: Path
    envs: Path
    logs: Path
    servers: Servers


class MissingError(Exception):
    """A suite's packages or its model cannot be installed here."""


class UnreachableError(MissingError):
    """OpenAI's document or prism is missing: not every machine reaches the document's host, and prism needs npm."""


def main() -> int:
    """Run the suites; return 1 if a test fails, or a suite that must run does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"one of {', '.join(SUITES)}")
    parser.add_argument("--envs", type=Path, help="folder of virtual environments, which are kept")
    parser.add_argument("--logs", type=Path, help="folder of what the suites print, which is kept")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"suites at a time (default: {JOBS})")
    parser.add_argument("--record", action="store_true", help=f"write what passed into {RESULTS.name}")
    parser.add_argument("--recorded", action="store_true", help=f"run the suites of {RESULTS.name}, all of them")
    options = parser.parse_args()
    recorded = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    chosen = options.suites or list(recorded if options.recorded else SUITES)
    if unknown := set(chosen) - SUITES.keys():
        parser.error(f"no suite is named {', '.join(sorted(unknown))}")
    chosen.sort(key=lambda name: -recorded.get(name, {}).get("seconds", 0))  # the longest ones first
    results = {}
    skipped: dict[str, MissingError] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Path(folder)
        envs = (options.envs or work / "envs").resolve()
        logs = (options.logs or work).resolve()
        logs.mkdir(exist_ok=True)
        place = Place(work, envs, logs, Servers(work, stack))
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        running = {pool.submit(run, name, place): name for name in chosen}
        for done in as_completed(running):
            name = running[done]
            try:
                results[name] = done.result()
            except MissingError as error:
                print(f"+ {name}\n  skipped: {error}", flush=True)
                skipped[name] = error
                continue
            is_good = not results[name]["failed"] and not results[name]["code"]
            if not is_good:
                print((logs / f"{name}.log").read_text("utf-8", "replace")[-8000:], flush=True)
            print(f"+ {name}\n  {results[name]}", flush=True)
            if options.record and is_good:
                record(name, results[name])
        lacks_packages = any(not isinstance(error, UnreachableError) for error in skipped.values())
        must_run = lacks_packages and options.recorded and index_answers(work)
    if skipped:
        print(f"not run: {', '.join(sorted(skipped))}", flush=True)
        if must_run:
            print("their packages must be installed, since the package index can be reached", flush=True)
    return int(must_run or any(result["failed"] or result["code"] for result in results.values()))


def index_answers(work: Path) -> bool:
    """Whether the package index can be reached: whether a small package can be downloaded."""
    command: list[Any] = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--dest", work]
    return subprocess.run([*command, "iniconfig"], capture_output=True).returncode == 0


def record(name: str, result: dict[str, Any]) -> None:
    """Write the result of a suite into the file of results."""
    before = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**before, name: result}, indent=1, sort_keys=True) + "\n", "utf-8")


def run(name: str, place: Place) -> dict[str, Any]:
    """Run a suite; return its counts.

    Raises:
        MissingError: If its packages or its model cannot be had.
    """
    suite = SUITES[name]
    required = suite.requirements or name
    folder, files = HERE, list(suite.files)
    with PREPARING:
        python = environment(place.envs / required, HERE / "requirements" / f"{required}.txt")
        if suite.library:
            folder = sources(python, suite.library, place.work)
            files = [f"tests/api_resources/{file}" for file in suite.files]
        addresses = place.servers.of(suite.model, with_key=not suite.library and not suite.document)
        if suite.document:
            addresses["LLAMAC_DOCUMENT"] = str(document(place.work))
        if suite.proxied:
            proxy = place.servers.proxy(addresses["LLAMAC_URL"], place.envs / "prism")
    result = place.work / f"{name}.json"
    settings: dict[str, str] = {
        "LLAMAC_SUITE": name,
        "LLAMAC_RESULT": str(result),
        "PYTHONPATH": os.pathsep.join([str(HERE), *([str(folder)] if suite.library else []), str(ROOT)]),
        "OPENAI_API_KEY": "none",
        **addresses,
    }
    command: list[Any] = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, "--tb=short"]
    command += [part for plugin in suite.without for part in ("-p", f"no:{plugin}")]
    command += [part for option in suite.options for part in ("-o", option)]
    command += ["-p", "suite_plugin", *(["-k", suite.chosen] if suite.chosen else [])]
    if suite.library:
        api = proxy if suite.proxied else settings["LLAMAC_URL"] + ("/v1" if suite.library == "openai" else "")
        settings |= {"LLAMAC_LIBRARY": suite.library, "TEST_API_BASE_URL": api}
        command += ["-p", "sample_values", "-o", "addopts=", "-o", "filterwarnings="]
    else:
        command += ["-c", os.devnull]
    log = place.logs / f"{name}.log"
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *files], cwd=folder, env={**os.environ, **settings}, stdout=output, stderr=output
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    counts = json.loads(result.read_text("utf-8")) if result.exists() else {"failed": 1}
    seconds = round(time.monotonic() - begun)
    return {**counts, "code": code, "model": suite.model, "packages": pinned(name), "seconds": seconds}


def pinned(name: str) -> list[str]:
    """The packages of a suite that have a version, and what else it needs."""
    lines = (HERE / "requirements" / f"{SUITES[name].requirements or name}.txt").read_text("utf-8").splitlines()
    found = [line.replace("==", " ") for line in lines if "==" in line]
    if SUITES[name].document:
        found.append(openai_document.VERSION)
    if SUITES[name].proxied:
        found.append(f"prism-cli {openai_document.PRISM}")
    return found


def environment(folder: Path, requirements: Path) -> Path:
    """The interpreter of a virtual environment with the packages of a file, above those of this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False, symlinks=True)  # the pip of this interpreter is found like its packages
        own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        Path(own, "zz_outer.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
        options = ("-q", "--prefer-binary", "--no-compile")
        install: list[Any] = [python, "-m", "pip", "install", *options, "-r", requirements]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            raise MissingError(f"its packages cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def sources(python: Path, library: str, work: Path) -> Path:
    """The unpacked sources of the installed version of a library."""
    show = f"import importlib.metadata as m; print(m.version({library!r}))"
    version = subprocess.run([python, "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    options: list[Any] = ["-q", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", work]
    done = subprocess.run([python, "-m", "pip", "download", *options, f"{library}=={version}"], capture_output=True)
    archive = work / f"{library}-{version}.tar.gz"
    if done.returncode or not archive.exists():
        raise MissingError(f"the sources of {library} {version} cannot be downloaded")
    with tarfile.open(archive) as opened:
        # Python's releases before June 2023 have no filters, nor warn of their absence
        opened.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return work / f"{library}-{version}"


def document(work: Path) -> Path:
    """The file of OpenAI's document."""
    try:
        return openai_document.cut_document(work)
    except openai_document.UnavailableError as error:
        raise UnreachableError(str(error)) from error


class Servers:
    """The servers that the suites share. Each is started when the first suite needs it."""

    def __init__(self, work: Path, stack: contextlib.ExitStack) -> None:
        self._work = work
        self._stack = stack
        self._found: dict[tuple[str, bool], str] = {}

    def of(self, model: str, *, with_key: bool) -> dict[str, str]:
        """The variables that tell a suite of its server."""
        if model == "tiny":
            url = self._started("tiny", with_key=with_key)
            return {"LLAMAC_TINY_URL": url, "LLAMAC_TINY_KEY": KEY} if with_key else {"LLAMAC_URL": url}
        return {"LLAMAC_URL": self._started("smollm2", with_key=False), "LLAMAC_MODEL": str(smollm2())}

    def _started(self, model: str, *, with_key: bool) -> str:
        if (model, with_key) not in self._found:
            if model == "smollm2":
                arguments = ["--models-dir", str(seeded(smollm2(), self._work))]
            elif with_key:
                (self._work / "keys").write_text(KEY, "utf-8")
                arguments = [str(tiny(self._work)), "--api-key-file", str(self._work / "keys"), "--timeout", "10"]
            else:
                arguments = [str(tiny(self._work)), *(part for name in (model, *NAMES) for part in ("--alias", name))]
            self._found[model, with_key] = self._stack.enter_context(served(arguments))
        return self._found[model, with_key]

    def proxy(self, url: str, folder: Path) -> str:
        """The address of a proxy that checks the traffic of a server."""
        try:
            return self._stack.enter_context(openai_document.proxied(url, folder, self._work))
        except openai_document.UnavailableError as error:
            raise UnreachableError(str(error)) from error


def seeded(model: Path, work: Path) -> Path:
    """A folder of models with SmolLM2. A fixed seed gives a request the same answer in every run."""
    folder = work / "models"
    folder.mkdir(exist_ok=True)
    settings = {"file": str(model.resolve()), "aliases": list(NAMES), "context": 512, "pinned": True}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    text = "\n".join(["[models.smollm2]", *lines, f"sampling = {{ seed = {SEED} }}", ""])
    (folder / "models.toml").write_text(text, "utf-8")
    return folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, which tests/real/models.py downloads."""
    command = [sys.executable, ROOT / "tests/real/models.py", "smollm2"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MissingError("SmolLM2-135M-Instruct cannot be downloaded")
    return Path(done.stdout.strip())


def tiny(work: Path) -> Path:
    """A model with few weights that always answers with a thought, a text and a call."""
    sys.path.insert(0, str(ROOT / "tests"))
    from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model

    made = script_checkpoint([*byte_ids(ANSWER), 2], context=128, stop_ids=[2])
    made.chat_template = SCRIPT_TEMPLATE
    return Path(write_model(work / "tiny.bin", made, generation={"temperature": 0}))


@contextlib.contextmanager
def served(arguments: Sequence[str]) -> Iterator[str]:
    """The address of `llamac serve`."""
    command = [sys.executable, "-m", "llamac", "serve", "--port", "0", *arguments]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert process.stderr is not None
    try:
        lines = []
        while "serving" not in (line := process.stderr.readline()):
            lines.append(line)
            if not line:
                raise RuntimeError(f"the server has not started: {''.join(lines)}")
        url = line.split()[-1]
        while not is_ready(url):
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=60)


def is_ready(url: str) -> bool:
    """Whether a server has computed its first token."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
