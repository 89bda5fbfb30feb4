"""Random requests to `llamac serve` for minutes: nothing may leak, and no result may change.

    python -m bench.server_soak [--minutes 3] [--model stories] [--seed 1] [--default-allocator] [--result NAME]

Clients send requests of all kinds to a server in its own process: whole answers and streams, conversions, invalid
bodies, invalid HTTP. They disconnect at any byte, reset connections, stop reading, and send half a header. The run
compares the results of some requests with known ones. From time to time the clients pause. The run fails if the server
then still has a request, a connection, a page of the KV cache that no cached prefix holds, or more threads or files
than before. At the end, it fails if memory grew from the first quarter of the time to the last, if the server logged an
error, or if it does not stop when asked.

The memory is what the server's allocator has handed out (bench/live_server.py), because free memory that an allocator
keeps looks like a leak. With --default-allocator, the server runs as operators start it; the run then reports resident
memory, and growth is not a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from bench.soak_report import growth_of_memory, held, quarters, read_options, report

CLIENTS = 12
ROUND_S = 10.0  # between two pauses
PATIENCE_S = 60.0  # only a hang takes so long
SLACK = 2 << 20  # bytes
MORE_THREADS = 2  # that a pool may start late
LIMITS = (
    *("--max-sequences", "8", "--max-queue", "16", "--max-connections", "40", "--client-timeout", "5"),
    *("--kv-tokens", "6000"),
)
KNOWN = [{"prompt": text, "max_tokens": 20 + 5 * i, "seed": i} for i, text in enumerate(("Once", "One day", "The cat"))]
ENDLESS = {"max_tokens": 10**6, "ignore_eos": True, "context_overflow": "shift"}
REFUSED = (400, 404, 405, 408, 413, 429, 431, 503)
BROKEN = (
    *(b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
    b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 100_000,
)


class Server:
    """A server in a process of its own."""

    def __init__(self, model: str, as_operators_start_it: bool) -> None:
        self._says_its_memory = not as_operators_start_it
        module, variables = (
            ("llamac", {}) if as_operators_start_it else ("bench.live_server", {"PYTHONMALLOC": "malloc"})
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", model, "--port", "0", *LIMITS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
            text=True,
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r":(\d+)$", line)
        if found is None:
            raise SystemExit(line + self.process.stderr.read())
        self.port = int(found[1])
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr or ()), daemon=True).start()

    def connect(self, buffer: int | None = None) -> socket.socket:
        """Open a connection. `buffer`: bytes that the client's side can hold."""
        opened = socket.socket()
        opened.settimeout(PATIENCE_S)
        if buffer is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        opened.connect(("127.0.0.1", self.port))
        return opened

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        with self.connect() as opened:
            parts = []
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it was refused before it was sent
                opened.sendall(request_bytes(path, body))
                while part := opened.recv(1 << 16):
                    parts.append(part)
        head, _, rest = b"".join(parts).partition(b"\r\n\r\n")
        return int(head[9:12] or 0), rest

    def numbers(self) -> dict[str, float]:
        """The numbers of `/metrics`."""
        lines = [line for line in self.ask("/metrics")[1].decode().splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def rest(self) -> dict[str, int]:
        """Wait until nothing is left to do, and return what the process holds.

        Raises:
            SystemExit: If that does not happen.
        """
        limit = time.monotonic() + PATIENCE_S
        while True:
            now = self.numbers()
            left = {
                "requests": now["llamac_requests_running"] + now["llamac_requests_waiting"],
                "connections": now["llamac_connections"] - 1,  # this one
                "bytes of KV pages": now["llamac_kv_bytes"] - now["llamac_prefix_bytes"],
            }
            if not any(left.values()):
                break
            if time.monotonic() > limit:
                raise SystemExit(f"soak: left behind: {left}")
            time.sleep(0.05)
        return held(self.process.pid) | self._live_memory()

    def _live_memory(self) -> dict[str, int]:
        """The bytes that its allocator has in use, if the server reports them."""
        if not self._says_its_memory:
            return {}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return {"memory": int(self.process.stdout.readline())}


def request_bytes(path: str, body: Any = None) -> bytes:
    """A request, after which the server closes the connection."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data


class Client:
    """Sends random requests.

    Attributes:
        counts: What happened how often.
        failures: What must not happen.
    """

    def __init__(self, server: Server, expected: list[str], seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._server = server
        self._expected = expected
        self._random = random.Random(seed)
        self._kinds: list[Callable[[], None]] = [
            *(self._known, self._known, self._known_stream, self._known_stream, self._leave, self._leave, self._leave),
            *(self._several, self._converted, self._wrong, self._wrong, self._broken, self._looked, self._executed),
            *(self._slow, self._embedded),
        ]

    def run(self, until: float) -> None:
        """Send requests for some time."""
        while time.monotonic() < until:
            kind = self._random.choice(self._kinds)
            try:
                kind()
                self.counts[kind.__name__.strip("_")] += 1
            except (AssertionError, OSError, ValueError, KeyError) as error:
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    def _posted(self, path: str, body: Any) -> bytes:
        """The body of an answer; empty if the server had no room."""
        status, answer = self._server.ask(path, body)
        if status in (429, 503):
            self.counts[str(status)] += 1
            return b""
        assert status == 200, (path, body, status, answer[:300])
        return answer

    def _known(self) -> None:
        index = self._random.randrange(len(KNOWN))
        answer = self._posted("/v1/completions", KNOWN[index])
        assert not answer or json.loads(answer)["choices"][0]["text"] == self._expected[index]

    def _known_stream(self) -> None:
        index = self._random.randrange(len(KNOWN))
        answer = self._posted("/v1/completions", {**KNOWN[index], "stream": True})
        assert not answer or streamed_text(answer) == self._expected[index]

    def _several(self) -> None:
        rng = self._random
        body = {"prompt": [f"a {rng.random()}", "b"], "n": rng.randrange(1, 4), "max_tokens": 10, "logprobs": 3}
        self._posted("/v1/completions", {**body, "stream": rng.random() < 0.5, "stop": [" the", "."]})

    def _executed(self) -> None:
        stream = self._random.random() < 0.5
        self._posted("/execute", {"prompt": "x", "sampling": {"max_tokens": 8}, "stream": stream})

    def _embedded(self) -> None:
        self._posted("/v1/embeddings", {"input": [f"a {self._random.random()}", "b"]})

    def _converted(self) -> None:
        tokens = json.loads(self._posted("/tokenize", {"prompt": "Once upon", "add_special_tokens": False}) or b"{}")
        if tokens:
            found = self._posted("/detokenize", {"tokens": tokens["tokens"]})
            assert not found or json.loads(found) == {"prompt": "Once upon"}

    def _looked(self) -> None:
        assert self._server.ask("/health")[0] == 200
        self._server.ask(self._random.choice(("/metrics", "/v1/models", "/ready", "/nothing")))

    def _wrong(self) -> None:
        rng = self._random
        body = rng.choice(
            ({"prompt": 3}, {"x": 1}, b"{", b"\xff", b"[" * 100_000, {"prompt": "a", "n": -1}, b" " * (17 << 20))
        )
        path = rng.choice(("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"))
        status, answer = self._server.ask(path, body)
        was_long = isinstance(body, bytes) and len(body) > 1 << 20
        assert status in REFUSED or (was_long and not status), (path, status, answer[:300])

    def _broken(self) -> None:
        with self._server.connect() as opened, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            opened.sendall(self._random.choice(BROKEN))
            if self._random.random() < 0.5:
                while opened.recv(1 << 16):
                    pass

    def _leave(self) -> None:
        rng = self._random
        data = request_bytes("/v1/completions", {"prompt": "x", "stream": rng.random() < 0.8, **ENDLESS})
        with self._server.connect() as opened, contextlib.suppress(ConnectionResetError):
            opened.sendall(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
            if rng.random() < 0.8:
                opened.settimeout(rng.uniform(0.01, 0.3))
                with contextlib.suppress(TimeoutError):
                    for _ in range(rng.randrange(20)):
                        opened.recv(rng.randrange(1, 1000))
            if rng.random() < 0.5:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _slow(self) -> None:
        if self._random.random() > 0.05:
            return
        body = {"prompt": "x", "stream": True, "n": 4, "logprobs": 20, **ENDLESS}
        with self._server.connect(buffer=4096) as opened, contextlib.suppress(ConnectionResetError):
            opened.sendall(request_bytes("/v1/completions", body))
            time.sleep(self._random.uniform(0, 5))


def streamed_text(answer: bytes) -> str:
    """The text of a whole stream of chunks."""
    events = re.findall(rb"^data: (\{.*\})\r?$", answer, re.MULTILINE)
    assert b"data: [DONE]" in answer
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def soak(server: Server, minutes: float, seed: int) -> tuple[Counter[str], list[dict[str, int]], list[str]]:
    """Send requests; return the counts of events, what the server held in each pause, and the failures."""
    expected = [json.loads(server.ask("/v1/completions", body)[1])["choices"][0]["text"] for body in KNOWN]
    clients = [Client(server, expected, seed * 1000 + i) for i in range(CLIENTS)]
    pauses = []
    limit = time.monotonic() + 60 * minutes
    while time.monotonic() < limit and server.process.poll() is None:
        until = min(limit, time.monotonic() + ROUND_S)
        threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pauses.append(server.rest())
    counts = sum((client.counts for client in clients), Counter())
    return counts, pauses, [failure for client in clients for failure in client.failures]


def main() -> int:
    """Run, and report what was left."""
    options = read_options(__doc__, default_allocator="run the server as operators do, and report its memory")
    server = Server(options.model, options.default_allocator)
    try:
        soak(server, min(0.5, options.minutes / 3), options.seed + 1)  # what is made once: threads, caches, imports
        counts, pauses, failures = soak(server, options.minutes, options.seed)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(PATIENCE_S)
    finally:
        server.process.kill()
    memory = [pause["memory"] for pause in pauses]
    if options.default_allocator:
        resident = sorted(pause["resident"] for pause in pauses)
        peak = max(pause["peak"] for pause in pauses)
        print(
            f"resident in MB: {resident[0] / 1e6:.1f} to {resident[-1] / 1e6:.1f} in pauses, {peak / 1e6:.1f} at most"
        )
    else:
        failures += growth_of_memory(memory, max, SLACK)
    for name, more in (("threads", MORE_THREADS), ("files", 0)):
        numbers = [pause[name] for pause in pauses]
        first, last = quarters(numbers, max)
        if last > first + more:
            failures.append(f"{name} grew: {numbers}")
    if code != -signal.SIGTERM:
        failures.append(f"the server ended with {code}")
    failures += [f"logged: {line.rstrip()}" for line in server.log]
    return report(options, counts, memory, failures, {"pauses": pauses})


if __name__ == "__main__":
    sys.exit(main())
