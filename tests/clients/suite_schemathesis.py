"""schemathesis with all of its checks on the server's OpenAPI document: coverage, fuzzing, and links between paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("schemathesis")
EXAMPLES = 15  # of each operation


@pytest.mark.parametrize("phase", ["coverage", "fuzzing", "stateful"])
def test_the_server_does_what_its_document_says(phase: str, tmp_path: Path) -> None:
    url = os.environ["LLAMAC_TINY_URL"] + "/openapi.json"
    options = ["-H", f"Authorization: Bearer {os.environ['LLAMAC_TINY_KEY']}", "--checks", "all", "--phases", phase]
    options += ["--max-examples", str(EXAMPLES), "--seed", "1", "--continue-on-failure"]
    done = subprocess.run(
        [COMMAND, "--config-file", HERE / "schemathesis.toml", "run", url, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks"},
    )
    assert done.returncode == 0, done.stdout[-6000:]
