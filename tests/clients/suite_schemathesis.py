"""schemathesis with all of its checks on the server's OpenAPI document: coverage, fuzzing, and links between paths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("schemathesis")
PHASES = ("coverage", "fuzzing", "stateful")
# Of each operation. LLAMAC_EXAMPLES and LLAMAC_SEED choose others, for a longer search.
EXAMPLES = os.environ.get("LLAMAC_EXAMPLES", "8")
SEED = os.environ.get("LLAMAC_SEED", "1")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """A process per phase, and its output. They run together: a phase mostly makes up requests, on one core."""
    url = os.environ["LLAMAC_TINY_URL"] + "/openapi.json"
    options = ["-H", f"Authorization: Bearer {os.environ['LLAMAC_TINY_KEY']}", "--checks", "all"]
    options += ["--max-examples", EXAMPLES, "--seed", SEED, "--continue-on-failure"]
    options += ["--suppress-health-check", "too_slow"]  # depends on what else this machine does
    started = {}
    for phase in PHASES:
        folder = tmp_path_factory.mktemp(phase)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [COMMAND, "--config-file", HERE / "schemathesis.toml", "run", url, *options, "--phases", phase],
                stdout=output,
                stderr=output,
                cwd=folder,  # for its cache
                env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks"},
            )
        started[phase] = process, folder / "output"
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("phase", PHASES)
def test_the_server_does_what_its_document_says(
    phase: str, running: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> None:
    process, output = running[phase]
    code = process.wait()
    print(output.read_text("utf-8", "replace")[-6000:])
    assert code == 0
