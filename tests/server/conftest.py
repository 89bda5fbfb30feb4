"""What tests of the web page in a browser share: the browser, its pages, and a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browsers import ANSWER, Visit, chromium, scripted


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from http_server import running

    with running(scripted(tmp_path_factory.mktemp("page"), ANSWER), names=("first", "second")) as served:
        yield served


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a server; at the end nothing may have gone wrong in it."""
    contexts, visits = [], []

    def opened(server: Any, settings: dict[str, Any] | None = None, **options: Any) -> Visit:
        context = browser.new_context(**options)
        contexts.append(context)
        if settings:
            kept = json.dumps(json.dumps(settings))
            context.add_init_script(
                f"localStorage.getItem('llamac.settings') ?? localStorage.setItem('llamac.settings', {kept})"
            )
        made = Visit(context.new_page())
        visits.append(made)
        made.open(f"http://127.0.0.1:{server.port}/")
        return made

    yield opened
    problems = [problem for each in visits for problem in each.problems]
    for context in contexts:
        context.close()
    assert problems == []
