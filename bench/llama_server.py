"""Answers requests with llama.cpp's batching server, for bench.mooncake. Runs in a Python that has xllamacpp.

    python bench/llama_server.py MODEL.gguf THREADS SEQUENCES CONTEXT < REQUESTS

REQUESTS is a JSON list of objects: `arrival` in seconds, `prompt` as token ids, `answer` as the number of new tokens.
Prints "ready" and, at the end, a JSON object: the seconds of the whole run, and for each request the seconds to its
first token and the number of prompt tokens that were computed.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any


def server_of(path: str, threads: int, sequences: int, context: int) -> Any:
    """Open the server with one slot for each sequence, and a KV cache that they share."""
    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = sequences
    params.n_ctx = context * sequences
    params.cont_batching = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = True
    return xllamacpp.Server(params)


def main() -> None:
    """Answer the requests of standard input."""
    path, threads, sequences, context = sys.argv[1:]
    server = server_of(path, int(threads), int(sequences), int(context))
    requests = json.load(sys.stdin)
    found: list[dict[str, float]] = [{} for _ in requests]

    def answer(index: int, request: dict[str, Any], started: float) -> None:
        time.sleep(max(0.0, started + request["arrival"] - time.monotonic()))
        arrived = time.monotonic()
        first: list[float] = []
        computed: list[int] = []

        def receive(piece: Any) -> bool:
            for part in piece if isinstance(piece, list) else [piece]:
                if not first:
                    first.append(time.monotonic() - arrived)
                if "timings" in part:
                    computed[:] = [part["timings"]["prompt_n"]]
            return False  # do not stop

        body = {"prompt": request["prompt"], "n_predict": request["answer"], "temperature": 0, "ignore_eos": True}
        server.handle_completions({**body, "cache_prompt": True, "stream": True}, receive)
        found[index] = {"first": first[0], "computed": computed[0]}

    started = time.monotonic() + 0.2
    workers = [threading.Thread(target=answer, args=(i, one, started)) for i, one in enumerate(requests)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(json.dumps({"seconds": time.monotonic() - started, "requests": found}), flush=True)


if __name__ == "__main__":
    main()
