"""llm-comply in its formats of OpenAI's chats, Open Responses, and Anthropic's messages."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FORMATS = ("openai-chat", "open-responses", "anthropic")
COMMAND = Path(sys.executable).with_name("llm-comply")


@functools.cache
def results(name: str) -> dict[str, Any]:
    url = os.environ["LLAMAC_URL"] + "/v1"
    options = ["-u", url, "-k", "none", "-m", "smollm2", "--format", name, "--timeout", "120", "--json"]
    done = subprocess.run([COMMAND, *options], capture_output=True, text=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return {result["id"]: result for result in found["results"]}


def names() -> list[tuple[str, str]]:
    return [(name, case) for name in FORMATS for case in results(name)]


@pytest.mark.parametrize(("name", "case"), names())
def test_a_case_passes(name: str, case: str) -> None:
    found = results(name)[case]
    if found["status"] == "skipped":
        pytest.skip("llm-comply skips it")
    assert found["status"] == "passed", found["errors"]
