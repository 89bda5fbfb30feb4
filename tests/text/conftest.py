"""Fixtures of the tests of templates and tokenizers."""

from __future__ import annotations

import marshal
from typing import Any

import pytest

from llamac.text import chat_process, chat_worker


@pytest.fixture(params=["in the worker", "in this process"])
def rendering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render chat templates where users do, and in this process, where a debugger and coverage see the code."""
    if request.param == "in this process":
        answer = chat_worker.prepare(None)

        def ask(content: Any, seconds: float, limit: int) -> bytes:
            data = answer(marshal.loads(marshal.dumps(content)))  # the worker gets copies
            assert len(data) <= limit
            return data

        monkeypatch.setattr(chat_process.WORKER, "ask", ask)
