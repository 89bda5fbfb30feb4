"""The examples of OpenAI's client in the documentation, run against a server with the built-in model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("uvicorn")

from documents import DOCUMENTS
from documents import blocks as blocks_of
from http_server import Running, running

ADDRESS = "http://127.0.0.1:8000"
EXAMPLES = [
    pytest.param(block.code, id=f"{path.name}-{block.line}")
    for path in DOCUMENTS
    for block in blocks_of(path)
    if ADDRESS in block.code
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("helper") as served:
        yield served


def test_the_readme_and_the_servers_page_have_examples() -> None:
    assert {str(example.id).partition("-")[0] for example in EXAMPLES} >= {"README.md", "server.md"}


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_prints_an_answer(code: str, server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    exec(code.replace(ADDRESS, f"http://127.0.0.1:{server.port}"), {})
    assert len(capsys.readouterr().out.split()) > 2
