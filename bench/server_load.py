"""Sends the same requests to `llamac serve` and llama.cpp's llama-server, and compares what clients see.

    python -m bench.server_load MODEL.gguf --llama-server BINARY [--trace azure-2023-conversation.csv] [--result NAME]

Three loads, each on a fresh server, alternating between the servers, `--rounds` times:

* `poisson-N`: N clients. Each waits for an exponentially distributed time, sends a request, reads the stream to its
  end, and begins again. With `--think 0` no client waits, and the server always has N requests.
* `azure`: the requests of the trace at their times, divided by `--speedup`; lengths are divided by `--shrink`.
* `prefix-1`, `prefix-8`: prompts that share all but their last 8 tokens with an earlier one. Five come one after the
  other, or 8 at once, like those of users with the same system prompt. The first prompt of each kind is `cold`.

Prompts are random token ids. Answers are greedy and have the requested length. The figures: tokens per second, seconds
to the first token and between tokens (medians and 99th percentiles), CPU seconds of the server, and the average number
of CPUs that it used, about --threads when saturated. An event of a stream can have several tokens. The time between
tokens of one event is 0, so an answer of n tokens counts n - 1 times. Ratios compare the medians over the rounds. The
clients run in this process and also need CPU time, equally for both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import functools
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.stamp import save

SEED = 1
FIRST_ID = 300  # below are special tokens and bytes
START_S = 120.0
LIMIT = 1 << 20  # bytes of a line of a stream


@dataclass
class Seen:
    """What clients have seen of a load: seconds to first tokens, separate for cold prompts, and between tokens."""

    firsts: list[float] = field(default_factory=list)
    colds: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: int = 0


Load = Callable[[int, Seen], Awaitable[None]]  # sends a server's port requests, and notes what clients see


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    answer: int
    arrival: float = 0.0


class Server:
    """A server in a process of its own."""

    def __init__(self, kind: str, options: argparse.Namespace, sequences: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        shared = ["--port", str(self.port), "--threads", str(options.threads)]
        if kind == "llamac":
            command = [
                sys.executable,
                "-m",
                "llamac",
                "serve",
                options.model,
                "--max-sequences",
                str(sequences),
                *shared,
            ]
            command += ["--context", str(options.context), "--max-queue", "10000"]
        else:
            command = [options.llama_server, "--model", options.model, "--parallel", str(sequences), *shared]
            command += ["--ctx-size", str(options.context * sequences), "--host", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + START_S
        while not self._is_ready("/ready" if kind == "llamac" else "/health"):
            if self.process.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"{kind} does not start: {' '.join(command)}")
            time.sleep(0.02)

    def _is_ready(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """End the process."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def ask(port: int, asked: Asked, seen: Seen) -> None:
    """Send a request and read its stream."""
    body = {
        "prompt": asked.prompt,
        "max_tokens": asked.answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=LIMIT)
    writer.write(head.encode() + f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    arrivals: list[float] = []
    usage = 0
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if b'"completion_tokens"' in line:
            usage = json.loads(line[6:])["usage"]["completion_tokens"]
        if b'"finish_reason":null' in line.replace(b" ", b""):  # the last events have no token
            arrivals.append(now)
    writer.close()
    seen.firsts += [arrival - began for arrival in arrivals[:1]]
    seen.gaps += token_gaps(arrivals, usage)
    seen.tokens += usage
    seen.failures += usage != asked.answer


def token_gaps(arrivals: Sequence[float], tokens: int) -> list[float]:
    """The seconds between the tokens of an answer. Some tokens come together, so there are fewer events."""
    between = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return between + [0.0] * (tokens - 1 - len(between))


def random_ids(rng: random.Random, n: int, options: argparse.Namespace) -> list[int]:
    """Token ids."""
    return [rng.randrange(FIRST_ID, options.ids) for _ in range(n)]


async def poisson(clients: int, options: argparse.Namespace, port: int, seen: Seen) -> None:
    """Clients that come at random times."""
    until = time.perf_counter() + options.seconds

    async def client(index: int) -> None:
        rng = random.Random(SEED * 1000 + index)
        while True:
            if options.think:
                await asyncio.sleep(rng.expovariate(1 / options.think))
            if time.perf_counter() > until:
                return
            prompt = random_ids(rng, rng.randrange(16, options.prompt * 2 - 16), options)
            await ask(port, Asked(prompt, rng.randrange(8, options.answer * 2 - 8)), seen)

    await asyncio.gather(*(client(index) for index in range(clients)))


def azure(path: Path, options: argparse.Namespace) -> list[Asked]:
    """The requests of the trace, scaled down."""
    rng = random.Random(SEED)
    found: list[Asked] = []
    with path.open() as file:
        rows = [row for _, row in zip(range(options.requests), csv.DictReader(file), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    for row, when in zip(rows, times, strict=True):
        answer = max(1, int(row["GeneratedTokens"]) // options.shrink)
        length = max(1, min(int(row["ContextTokens"]) // options.shrink, options.context - answer - 1))
        arrival = (when - times[0]).total_seconds() / options.speedup
        found.append(Asked(random_ids(rng, length, options), answer, arrival))
    return found


async def replayed(port: int, requests: list[Asked], seen: Seen) -> None:
    """Send requests at their times."""

    async def one(asked: Asked) -> None:
        await asyncio.sleep(asked.arrival)
        await ask(port, asked, seen)

    await asyncio.gather(*map(one, requests))


async def prefixed(clients: int, options: argparse.Namespace, port: int, seen: Seen) -> None:
    """Prompts with a shared beginning, so many at once. The first of their kind are cold."""
    rng = random.Random(SEED)
    for _ in range(3):
        shared = random_ids(rng, options.shared, options)
        cold = Seen()
        await ask(port, Asked(shared + random_ids(rng, 8, options), 4), cold)
        seen.colds += cold.firsts
        seen.failures += cold.failures
        for _ in range(5 if clients == 1 else 1):
            prompts = [shared + random_ids(rng, 8, options) for _ in range(clients)]
            await asyncio.gather(*(ask(port, Asked(prompt, 4), seen) for prompt in prompts))


def percentile(values: list[float], share: float) -> float:
    """A percentile of numbers."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def figures_of(seen: Seen, seconds: float, cpu_seconds: float) -> dict[str, float]:
    """The figures of a load, from its duration and the CPU time of the server."""
    found = {
        "tokens_per_second": seen.tokens / seconds,
        "first_p50": percentile(seen.firsts, 0.5),
        "first_p99": percentile(seen.firsts, 0.99),
        "between_p50": percentile(seen.gaps, 0.5),
        "between_p99": percentile(seen.gaps, 0.99),
        "server_cpu_seconds": cpu_seconds,
        "server_cpus": cpu_seconds / seconds,
        "requests": len(seen.firsts),
        "failures": seen.failures,
    }
    if seen.colds:
        cold = percentile(seen.colds, 0.5)
        found |= {"cold_first_p50": cold, "shared_to_cold": found["first_p50"] / cold}
    return found


def run(kind: str, load: Load, sequences: int, options: argparse.Namespace) -> dict[str, float]:
    """Load a fresh server."""
    server = Server(kind, options, sequences)
    try:
        asyncio.run(ask(server.port, Asked([FIRST_ID] * 8, 8), Seen()))  # what happens once
        seen, cpu, began = Seen(), server.cpu_seconds(), time.perf_counter()

        async def loaded() -> None:
            await load(server.port, seen)

        asyncio.run(loaded())
        return figures_of(seen, time.perf_counter() - began, server.cpu_seconds() - cpu)
    finally:
        server.end()


def loads_of(options: argparse.Namespace) -> dict[str, tuple[int, Load]]:
    """The loads, by name, each with the number of sequences that a server computes at once."""
    loads: dict[str, tuple[int, Load]] = {}
    for clients in map(int, options.clients.split(",")):
        loads[f"poisson-{clients}"] = clients, functools.partial(poisson, clients, options)
    if options.trace:
        requests = azure(options.trace, options)
        loads["azure"] = 32, lambda port, seen: replayed(port, requests, seen)
    for clients in (1, 8):
        loads[f"prefix-{clients}"] = clients, functools.partial(prefixed, clients, options)
    return loads


def compared(load: Load, sequences: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a load on each server, in turn: of each round, their medians, and the ratios of the medians."""
    kinds = ["llamac", *(["llama.cpp"] if options.llama_server else [])]
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in kinds:
            rounds[kind].append(run(kind, load, sequences, options))
    medians = {
        kind: {figure: statistics.median(one[figure] for one in each) for figure in each[0]}
        for kind, each in rounds.items()
    }
    found: dict[str, Any] = {"rounds": rounds, "medians": medians}
    if options.llama_server:
        ours, theirs = medians["llamac"], medians["llama.cpp"]
        found["ratios"] = {figure: ours[figure] / theirs[figure] for figure in ours if theirs[figure]}
    return found


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file for both servers")
    parser.add_argument("--llama-server", metavar="BINARY", help="llama.cpp's server; without it, llamac alone")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each Poisson load")
    parser.add_argument(
        "--think",
        type=float,
        default=0.5,
        help="mean seconds that a client waits before each request (default: %(default)s); 0: it always has a request, "
        "which saturates a server, so that tokens per second are its capacity",
    )
    parser.add_argument("--prompt", type=int, default=128, help="mean length of a prompt in tokens")
    parser.add_argument("--answer", type=int, default=48, help="mean length of an answer in tokens")
    parser.add_argument("--shared", type=int, default=512, help="length of a shared prefix in tokens")
    parser.add_argument("--requests", type=int, default=100, help="number of requests of the trace")
    parser.add_argument("--shrink", type=int, default=8, help="divide the lengths of the trace by this")
    parser.add_argument("--speedup", type=float, default=1.0, help="divide the times of the trace by this")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ids", type=int, default=32000, help="limit of the token ids")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result")
    return parser.parse_args()


def main() -> None:
    """Measure, print and save."""
    options = parse_options()
    found: dict[str, Any] = {}
    for name, (sequences, load) in loads_of(options).items():
        found[name] = compared(load, sequences, options)
        for kind, figures in found[name]["medians"].items():
            print(f"{name} {kind}:", ", ".join(f"{figure} {value:.4g}" for figure, value in figures.items()))
        if ratios := found[name].get("ratios"):
            print(f"{name} llamac / llama.cpp:", ", ".join(f"{figure} {value:.3f}" for figure, value in ratios.items()))
        sys.stdout.flush()
    if options.result:
        settings = {key: str(value) for key, value in vars(options).items()}
        save(options.result, {"settings": settings, "loads": found})


if __name__ == "__main__":
    main()
