"""CPU time of HTTP for each token of a stream, with a model whose steps are tiny.

    python -m bench.http_cost [--clients 1,8,32] [--tokens 400] [--rounds 5] [--result NAME]

A process serves `stories` on one thread; clients in this process read streams to their end. The benchmark reports CPU
time in microseconds per token: of the event loop and its helpers; of the engine's thread; and of the engine's thread
when a process of its own runs the same requests without HTTP. The cost of HTTP is the first, plus the second, minus the
third. CPU time depends on what else the machine does, so the rounds alternate, and the benchmark reports medians and
minimums.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.stamp import save

ENGINE = "llamac-engine"
OPTIONS: dict[str, Any] = {"ignore_eos": True, "context_overflow": "shift"}


def thread_times() -> dict[str, float]:
    """Microseconds of CPU time of each thread of this process, by its name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, float] = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/schedstat") as file:
            name = names.get(int(task), "core")
            found[name] = found.get(name, 0.0) + int(file.read().split()[0]) / 1e3
    return found


def child(clients: int, tokens: int) -> None:
    """Serve, and print the times of the threads for each line of input; or compute without HTTP, and print them."""
    import llamac
    from llamac.server.models import Models
    from llamac.server.service import Service
    from llamac.server.serving import listen, serve
    from llamac.server.settings import Settings

    with llamac.load("stories", threads=1) as model, llamac.Engine(model, max_sequences=64) as engine:
        if clients:
            for _ in range(2):  # the first time is to warm up
                before = thread_times()
                requests = [engine.submit("Once", max_tokens=tokens, seed=i, **OPTIONS) for i in range(clients)]
                for request in requests:
                    request.result()
            after = thread_times()
            print(json.dumps({ENGINE: after[ENGINE] - before[ENGINE]}), flush=True)
            return

        def report() -> None:
            for _ in sys.stdin:
                print(json.dumps({**thread_times(), "tokens": engine.stats().generated}), flush=True)

        opened = listen("127.0.0.1", 0)
        print(opened.getsockname()[1], flush=True)
        threading.Thread(target=report, name="report", daemon=True).start()
        service = Service(Models.of_one(engine, ()), Settings())
        serve(service, opened, drain_seconds=1, max_connections=1000)


def stream(port: int, tokens: int, seed: int) -> int:
    """Read a stream to its end; return its bytes."""
    body = {"prompt": "Once", "max_tokens": tokens, "seed": seed, "stream": True, **OPTIONS}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + data)
        total = 0
        while part := connection.recv(1 << 20):
            total += len(part)
    return total


def with_http(clients: int, tokens: int) -> tuple[float, float]:
    """Microseconds per token of the engine's thread, and of the others."""
    command = [sys.executable, "-m", "bench.http_cost", "--child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        numbers = []
        with ThreadPoolExecutor(clients) as pool:
            for _ in range(2):  # the first time is to warm up
                list(pool.map(lambda seed: stream(port, tokens, seed), range(clients)))
                process.stdin.write("\n")
                process.stdin.flush()
                numbers.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
    before, after = numbers
    n = after.pop("tokens") - before.pop("tokens")
    spent = {name: (after[name] - before.get(name, 0.0)) / n for name in after}
    return spent[ENGINE], sum(value for name, value in spent.items() if name not in (ENGINE, "report"))


def without_http(clients: int, tokens: int) -> float:
    """Microseconds per token of the engine's thread."""
    command = [sys.executable, "-m", "bench.http_cost", "--child", "--clients", str(clients), "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    spent: float = json.loads(done.stdout)[ENGINE]
    return spent / clients / tokens


def measured(clients: int, tokens: int, rounds: int) -> dict[str, float]:
    """All figures for a number of clients."""
    loops, engines, alone = [], [], []
    for _ in range(rounds):
        engine, loop = with_http(clients, tokens)
        engines.append(engine)
        loops.append(loop)
        alone.append(without_http(clients, tokens))
    extra = statistics.median(engines) - statistics.median(alone)
    return {
        "loop_us": statistics.median(loops),
        "loop_us_least": min(loops),
        "engine_us": statistics.median(engines),
        "engine_us_without_http": statistics.median(alone),
        "http_us": statistics.median(loops) + extra,
        "http_us_least": min(loops) + min(engines) - min(alone),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default=None)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--result")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(int(options.clients or 0), options.tokens)
        return
    found: dict[str, Any] = {}
    for clients in map(int, (options.clients or "1,8,32").split(",")):
        found[str(clients)] = figures = measured(clients, options.tokens, options.rounds)
        print(f"{clients} clients:", ", ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
    if options.result:
        save(options.result, {"tokens": options.tokens, "rounds": options.rounds, "clients": found})


if __name__ == "__main__":
    main()
