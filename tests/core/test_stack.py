"""A small stack (`ulimit -s`): wherever Python itself starts, commands and the library work."""

from __future__ import annotations

import functools
import resource
import subprocess
import sys

import pytest

from processes import TIMEOUT

KILOBYTE = 1024
STEP, MARGIN = (
    8 * KILOBYTE,
    24 * KILOBYTE,
)  # the system chooses where a stack begins, which moves its end by a page or two

LIBRARY = """
import threading
import llamac
ids = list(range(3, 300))
with llamac.load("stories") as model:
    model.tokenize("Once upon a time, 12 cats!\\n" * 3000)  # in a helper thread
    alone = model.logits(ids)
    found = []
    thread = threading.Thread(target=lambda: found.append(model.logits(ids)))  # the system gives it as small a stack
    thread.start()
    thread.join()
assert (found[0] == alone).all()
assert llamac.ChatTemplate("{{ messages | tojson }}").render([{"role": "user", "content": [[["a"]]]}])
"""


def run_limited(stack: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a stack of so many bytes at most, in the main thread and by default in others."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))

    command = [sys.executable, *arguments]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=TIMEOUT)


@functools.cache
def smallest_stack() -> int:
    """The smallest stack with which Python runs a module that does next to nothing."""
    for stack in range(64 * KILOBYTE, 1024 * KILOBYTE, STEP):
        if all(run_limited(stack, "-m", "platform").returncode == 0 for _ in range(3)):
            return stack
    pytest.skip("Python needs a large stack here")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other minimums for threads")
def test_commands_work_with_the_smallest_stack() -> None:
    arguments = ["-m", "llamac", "run", "stories", "-i", "Once", "-n", "20", "-t", "0", "-q"]
    done = run_limited(smallest_stack() + MARGIN, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Once upon a time")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other minimums for threads")
def test_the_library_works_with_the_smallest_stack() -> None:
    done = run_limited(smallest_stack() + MARGIN, "-c", LIBRARY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
