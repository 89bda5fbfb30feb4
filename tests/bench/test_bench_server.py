"""The tools in bench/ that measure the server: what they count."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from bench_modules import bench

# ---- the start


def test_a_start_is_measured_to_its_first_answer() -> None:
    found = bench("serve_start").start(sys.executable, [])
    assert 0 < found["accepts"] <= found["ready"] < found["answered"]
    assert found["cpu"] > 0


def test_a_server_that_does_not_start_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match=r"it does not start: .*missing\.bin"):
        bench("serve_start").start(sys.executable, ["missing.bin"])


# ---- what clients see of a load


class Scripted:
    """A server that answers each request with the same events, after a pause before each."""

    def __init__(self, events: list[tuple[float, bytes]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._events = events

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read a request and answer it."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].split()[0])
        self.bodies.append(json.loads(await reader.readexactly(length)))
        for pause, data in self._events:
            await asyncio.sleep(pause)
            writer.write(b"data: " + data + b"\r\n\r\n")
        writer.close()


def asked(scripted: Scripted, load: Callable[[int, Any], Any]) -> Any:
    """What clients have seen of a load of a scripted server."""
    seen = bench("server_load").Seen()

    async def run() -> None:
        async with await asyncio.start_server(scripted.answer, "127.0.0.1", 0) as server:
            await load(server.sockets[0].getsockname()[1], seen)

    asyncio.run(run())
    return seen


TEXT = b'{"choices":[{"index":0,"text":" a","finish_reason":null}],"usage":null}'
END = b'{"choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":null}'
USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":6}}'


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    """Three events with six tokens: two waits, and three tokens that came with another one."""
    load = bench("server_load")
    scripted = Scripted([(0, TEXT), (0.01, TEXT), (0.01, TEXT), (0.01, END), (0, USAGE), (0, b"[DONE]")])
    seen = asked(scripted, lambda port, seen: load.ask(port, load.Asked([1, 2, 3], 6), seen))
    assert (seen.tokens, seen.failures, len(seen.firsts)) == (6, 0, 1)
    assert sorted(gap > 0 for gap in seen.gaps) == [False, False, False, True, True]


def test_an_answer_of_another_length_is_a_failure() -> None:
    load = bench("server_load")
    scripted = Scripted([(0, TEXT), (0, END), (0, USAGE)])
    assert asked(scripted, lambda port, seen: load.ask(port, load.Asked([1], 7), seen)).failures == 1


def test_gaps_are_counted_once_for_each_token_after_the_first() -> None:
    gaps = bench("server_load").token_gaps
    assert gaps([1.0, 3.0, 4.5], 3) == [2.0, 1.5]
    assert gaps([1.0, 3.0], 4) == [2.0, 0.0, 0.0]
    assert gaps([1.0], 1) == gaps([], 0) == []


@pytest.mark.parametrize(("clients", "n_shared"), [(1, 5), (8, 8)])
def test_first_tokens_of_cold_and_shared_prefixes_are_apart(clients: int, n_shared: int) -> None:
    load = bench("server_load")
    scripted = Scripted([(0, TEXT), (0, END), (0, USAGE)])
    options = argparse.Namespace(shared=20, ids=1000)
    seen = asked(scripted, lambda port, seen: load.prefixed(clients, options, port, seen))
    assert (len(seen.colds), len(seen.firsts)) == (3, 3 * n_shared)
    beginnings = [tuple(body["prompt"][:20]) for body in scripted.bodies]
    assert len(set(beginnings)) == 3
    for i in range(0, len(beginnings), 1 + n_shared):
        assert len(set(beginnings[i : i + 1 + n_shared])) == 1


def test_figures_of_a_load() -> None:
    load = bench("server_load")
    seen = load.Seen([0.1, 0.2, 0.3], [], [0.0, 0.0, 0.5], tokens=30)
    found = load.figures_of(seen, seconds=10.0, cpu_seconds=15.0)
    assert found["tokens_per_second"] == 3.0
    assert (found["first_p50"], found["between_p50"], found["between_p99"]) == (0.2, 0.0, 0.5)
    assert found["server_cpus"] == 1.5
    assert "shared_to_cold" not in found
    seen.colds = [0.8]
    found = load.figures_of(seen, seconds=10.0, cpu_seconds=15.0)
    assert (found["cold_first_p50"], found["shared_to_cold"]) == (0.8, 0.25)


def test_clients_that_do_not_think_always_have_a_request() -> None:
    load = bench("server_load")
    scripted = Scripted([(0, TEXT), (0, END), (0, USAGE)])
    options = argparse.Namespace(seconds=0.2, think=0.0, prompt=32, answer=16, ids=1000)
    seen = asked(scripted, lambda port, seen: load.poisson(2, options, port, seen))
    assert len(seen.firsts) >= 2


# ---- the soak


@pytest.mark.parametrize(
    ("arguments", "module", "allocator"),
    [([], "bench.live_server", "malloc"), (["--default-allocator"], "llamac", None)],
)
def test_a_soak_measures_what_the_allocator_has_handed_out_unless_operators_would_not(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], module: str, allocator: str | None
) -> None:
    soak = bench("server_soak")

    def started(command: list[str], **options: Any) -> None:
        assert command[1:4] == ["-m", module, "serve"]
        assert options["env"].get("PYTHONMALLOC") == allocator
        raise SystemExit("started")

    monkeypatch.delenv("PYTHONMALLOC", raising=False)
    monkeypatch.setattr(sys, "argv", ["server_soak", *arguments])
    monkeypatch.setattr(soak.subprocess, "Popen", started)
    with pytest.raises(SystemExit, match="started"):
        soak.main()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library is not glibc 2.33 or later")
def test_live_memory_counts_what_is_in_use_and_not_what_is_free() -> None:
    live_bytes = bench("live_server").live_bytes
    before = live_bytes()
    block = bytearray(50 << 20)
    during = live_bytes()
    del block
    assert abs(during - before - (50 << 20)) < 1 << 20
    assert abs(live_bytes() - before) < 1 << 20


def test_memory_that_is_resident_has_a_peak_and_includes_the_process_own() -> None:
    found = bench("soak_report").held()
    assert 0 < found["memory"] < found["resident"] <= found["peak"]
