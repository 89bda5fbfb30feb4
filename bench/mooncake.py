"""Replays the head of Mooncake's conversation trace through an engine, scaled down, and counts its prefix hits.

    python -m bench.mooncake TRACE [--model stories] [--requests 200] [--shrink 32] [--speedup 20] [--result NAME]
    python -m bench.mooncake TRACE --model MODEL.gguf --llama-cpp PYTHON     # and llama.cpp's server, with xllamacpp

TRACE is conversation_trace.jsonl of Mooncake (FAST'25, Apache-2.0): arrival times, lengths of prompts and answers, and
ids of blocks of 512 tokens; equal ids at the start of two prompts are equal prefixes. Lengths are divided by `shrink`,
so a block has 512 / shrink tokens, and times by `speedup`. Each block has its own random tokens. Prompts that do not
fit the context lose their end. The run prints the share of prompt tokens that came from the cache, next to that of a
cache that never evicts; times to the first token; and tokens per second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import llamac
from bench.stamp import save

BLOCK = 512  # tokens of a block of the trace


def read_trace(path: Path, n: int) -> list[dict[str, Any]]:
    """The first n requests."""
    with path.open() as file:
        return [json.loads(line) for _, line in zip(range(n), file, strict=False)]


def prompts_of(trace: list[dict[str, Any]], shrink: int, n_ids: int, longest: int) -> list[list[int]]:
    """A prompt for each request, whose prefixes are equal where the trace's are."""
    prompts = []
    for request in trace:
        ids: list[int] = []
        for block in request["hash_ids"]:
            rng = random.Random(block)
            ids += [rng.randrange(3, n_ids) for _ in range(BLOCK // shrink)]
        prompts.append(ids[: max(1, min(request["input_length"] // shrink, longest))])
    return prompts


def reachable(prompts: list[list[int]], block: int) -> float:
    """The share of prompt tokens in prefixes that earlier prompts have, in whole blocks."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        ends = range(block, len(prompt), block)
        hits += max((end for end in ends if tuple(prompt[:end]) in seen), default=0)
        seen.update(tuple(prompt[:end]) for end in ends)
    return hits / sum(map(len, prompts))


def figures_of(seconds: float, firsts: list[float], cached: int, prompt_tokens: int) -> dict[str, float]:
    """What both engines report."""
    ordered = sorted(firsts)
    return {
        "seconds": round(seconds, 2),
        "cached_share": round(cached / prompt_tokens, 4),
        "first_token_median_s": round(statistics.median(ordered), 4),
        "first_token_p90_s": round(ordered[int(0.9 * len(ordered))], 4),
    }


def replay(model: llamac.Model, requests: list[Any], context: int, options: argparse.Namespace) -> dict[str, float]:
    """Send the requests to an engine."""
    settings: dict[str, Any] = {"max_sequences": options.sequences, "prefix_cache": not options.no_cache}
    with llamac.Engine(model, context=context, **settings) as engine:
        started = time.monotonic()
        sent = []
        for arrival, prompt, answer in requests:
            time.sleep(max(0.0, started + arrival - time.monotonic()))
            sent.append(engine.submit(prompt, max_tokens=answer, ignore_eos=True, temperature=0))
        found = [request.result() for request in sent]
        elapsed = time.monotonic() - started
        stats = engine.stats()
    firsts = [one.timings.queued + one.timings.prefill for one in found]
    cached = sum(one.usage.cached_tokens for one in found)
    prompt_tokens = sum(one.usage.prompt_tokens for one in found)
    figures = figures_of(elapsed, firsts, cached, prompt_tokens)
    return {**figures, "steps": stats.steps, "evictions": stats.prefix.evictions}


def replay_llama(requests: list[Any], context: int, options: argparse.Namespace) -> dict[str, float]:
    """Send the requests to llama.cpp's server, in a process of its own."""
    listed = [{"arrival": arrival, "prompt": prompt, "answer": answer} for arrival, prompt, answer in requests]
    numbers = [str(number) for number in (options.threads, options.sequences, context)]
    command = [options.llama_cpp, str(Path(__file__).with_name("llama_server.py")), options.model, *numbers]
    done = subprocess.run(command, input=json.dumps(listed), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    prompt_tokens = sum(len(prompt) for _, prompt, _ in requests)
    computed = int(sum(one["computed"] for one in found["requests"]))
    firsts = [one["first"] for one in found["requests"]]
    return figures_of(found["seconds"], firsts, prompt_tokens - computed, prompt_tokens)


def main() -> None:
    """Replay, print the figures, and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="stories")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--shrink", type=int, default=32, help="divide lengths by this power of two, at most 128")
    parser.add_argument("--speedup", type=float, default=20, help="divide the times between arrivals by this")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-cache", action="store_true", help="turn off the prefix cache, for comparison")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="a Python that has xllamacpp")
    parser.add_argument("--result")
    options = parser.parse_args()
    trace = read_trace(options.trace, options.requests)
    arrivals = [request["timestamp"] / 1000 / options.speedup for request in trace]
    answers = [max(1, request["output_length"] // options.shrink) for request in trace]
    with llamac.load(options.model, threads=options.threads) as model:
        limit = min(model.config["context"], 4096)
        prompts = prompts_of(trace, options.shrink, model.n_token_ids, limit - max(answers))
        context = max(len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True))
        requests = list(zip(arrivals, prompts, answers, strict=True))
        found = {"llamac": replay(model, requests, context, options)}
    if options.llama_cpp:
        found["llama.cpp"] = replay_llama(requests, context, options)
    shared = {
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(answers),
        "reachable_share": round(reachable(prompts, BLOCK // options.shrink), 4),
    }
    for name, figures in {"trace": shared, **found}.items():
        print(name, *(f"{key}={value}" for key, value in figures.items()))
    if options.result:
        settings = {name: str(value) for name, value in vars(options).items() if name != "result"}
        save(options.result, {"settings": settings, "trace": shared, **found})


if __name__ == "__main__":
    main()
