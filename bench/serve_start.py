"""Time from typing `llamac serve` to its first answer.

    python -m bench.serve_start [MODEL] [--runs 15] [--python NAME=PYTHON ...] [--result NAME]

Each run starts the command in a new process on a free port, polls `/ready` until the server is ready, and requests a
chat completion of one token. The figures are milliseconds from the start of the process: until the port accepts a
connection, until the server is ready, and until the answer is complete; and the CPU time of the process until then,
without that of the process that renders chat templates. Wall time depends on what else the machine does, unless
`chrt -f 10` precedes the command; CPU time depends on it less. The runs of several interpreters, each of which has a
llamac, alternate. Bytecode must be cached (see bench.startup).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.stamp import save

LIMIT_S = 60.0
PAUSE_S = 0.001
FIGURES = ("accepts", "ready", "answered", "cpu")
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def start(python: str, model: list[str]) -> dict[str, float]:
    """Start a server, and stop it after its first answer.

    Returns:
        Milliseconds of each of FIGURES.

    Raises:
        SystemExit: If it does not start or does not answer.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(python).with_name("llamac")), "serve", *model, "--port", str(port)]
    found: dict[str, float] = {}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while "ready" not in found:
            if process.poll() is not None or time.perf_counter() - began > LIMIT_S:
                raise SystemExit(f"it does not start: {' '.join(command)}")
            status = asked(port, "GET", "/ready")
            now = (time.perf_counter() - began) * 1e3
            if status:
                found.setdefault("accepts", now)
            if status == 200:
                found["ready"] = now
            else:
                time.sleep(PAUSE_S)
        if (status := asked(port, "POST", "/v1/chat/completions", json.dumps(BODY))) != 200:
            raise SystemExit(f"it answers with status {status}")
        found["answered"] = (time.perf_counter() - began) * 1e3
    finally:
        if process.returncode is None:
            process.kill()  # the CPU time of an orderly end does not count
            _, process.returncode, used = os.wait4(process.pid, 0)
    found["cpu"] = (used.ru_utime + used.ru_stime) * 1e3
    return found


def asked(port: int, method: str, path: str, body: str | None = None) -> int:
    """The status of an answer that was read to its end; 0 if nobody listens yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except ConnectionError:
        return 0
    finally:
        connection.close()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", nargs="*", help="model to serve, then options after -- (default: the built-in one)")
    parser.add_argument("--runs", type=int, default=15, help="starts per interpreter (default: %(default)s)")
    parser.add_argument(
        "--python",
        action="append",
        metavar="NAME=PYTHON",
        help="the path of an interpreter with a llamac, and what it is called; repeatable (default: this one)",
    )
    parser.add_argument("--result", metavar="NAME")
    options = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in options.python or [f"llamac={sys.executable}"])
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for python in pythons.values():
        start(python, options.model)  # reads the files that the next ones find in memory
    for _ in range(options.runs):
        for name, python in pythons.items():
            runs[name].append(start(python, options.model))
    medians = {
        name: {figure: statistics.median(run[figure] for run in each) for figure in FIGURES}
        for name, each in runs.items()
    }
    for name, each in runs.items():
        least = min(run["answered"] for run in each)
        figures = ", ".join(f"{figure} {value:.0f}" for figure, value in medians[name].items())
        print(f"{name}: {figures} ms; least until the answer {least:.0f} ms")
    if options.result:
        save(options.result, {"model": options.model, "medians": medians, "runs": runs})


if __name__ == "__main__":
    main()
