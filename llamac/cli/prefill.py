"""Shows the progress of a long prompt. The core computes all of it in one call, so a thread polls the session."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from llamac.engine.session import Session
from llamac.errors import LlamacError
from llamac.progress import Progress

PHASE = "reading the prompt"
BAR_DELAY = 1.0  # seconds before there is a bar; most prompts take less
POLL_INTERVAL = 0.25  # seconds


@contextlib.contextmanager
def prefill_progress(session: Session, prompt_tokens: int, report: Progress) -> Iterator[None]:
    """Report how many of the prompt's tokens a session has computed, until the block ends.

    Args:
        session: The session.
        prompt_tokens: The number of tokens in the prompt.
        report: Called with the phase `PHASE` and the number of computed tokens.
    """
    ended = threading.Event()

    def poll() -> None:
        while True:
            try:
                done = session.length()
            except LlamacError:  # closed
                return
            report(PHASE, min(done, prompt_tokens - 1), prompt_tokens)
            if ended.wait(POLL_INTERVAL):
                return

    thread = threading.Thread(target=poll, name="llamac-prefill-progress", daemon=True)
    try:
        with contextlib.suppress(RuntimeError):  # no more threads: no progress
            thread.start()
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()
