"""The writer's threads: jobs in order, errors of jobs, hashes, and bounds on what is in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import pytest

from llamac.export.flat import pipeline
from llamac.export.flat.pipeline import Hashers, Job, in_order
from processes import TIMEOUT


def test_results_come_in_order_from_several_threads() -> None:
    names: set[str] = set()
    three, later = threading.Barrier(3), threading.Event()

    def run(number: int) -> int:
        names.add(threading.current_thread().name)
        if number < 3:
            three.wait(TIMEOUT)
        if number == 5:
            later.set()
        return number if number or later.wait(TIMEOUT) else -1  # the first job ends after later ones

    jobs = (Job(lambda n=number: run(n), 1) for number in range(20))  # type: ignore[misc]
    assert list(in_order(jobs, 3)) == list(range(20))
    assert len(names) == 3


def test_results_that_the_caller_has_not_taken_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_BYTES", 100)
    started: list[int] = []

    def jobs() -> Iterator[Job[int]]:
        for number in range(30):
            started.append(number)
            yield Job(lambda n=number: n, 30)  # type: ignore[misc]

    for number in in_order(jobs(), 2):
        assert len(started) <= number + 1 + 100 // 30 + 1


def test_a_job_larger_than_the_bound_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_BYTES", 10)
    assert list(in_order(iter([Job(lambda: 1, 500), Job(lambda: 2, 500)]), 2)) == [1, 2]


def test_the_error_of_a_job_is_raised_in_its_turn() -> None:
    def fail() -> int:
        raise ValueError("broken")

    results = in_order(iter([Job(lambda: 1, 1), Job(fail, 1), Job(lambda: 2, 1)]), 2)
    assert next(results) == 1
    with pytest.raises(ValueError, match="broken"):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_hashes_are_those_of_the_parts(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "AHEAD_BYTES", 5000)
    tensors = [[bytes([tensor]) * (tensor + 1) * 1000, b"x" * part] for tensor in range(7) for part in (0, 10)]
    with Hashers(threads) as hashers:
        futures = []
        for parts in tensors:
            digest = hashers.start()
            for part in parts:
                digest.add(part)
            futures.append(digest.finish())
        found = [future.result() for future in futures]
    assert found == [hashlib.sha256(b"".join(parts)).digest() for parts in tensors]
