"""Compares fast numerics with exact ones: python -m bench.numerics MODEL TEXT [--result NAME].

On the text's first tokens: the Kullback-Leibler divergence of the next token's probabilities with fast numerics from
those with exact ones, how often the best candidate is the same, and both perplexities. Then the CPU time of a prompt on
one thread, alternating between both; the least of the rounds counts, since other programs only add to it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

import llamac
from bench.kv_quality import log_probabilities
from bench.stamp import save
from llamac.arguments import NUMERICS


def quality(model: llamac.Model, ids: list[int]) -> dict[str, Any]:
    """The divergence of fast from exact numerics, and the perplexity of each."""
    found = []
    for numerics in NUMERICS:
        with model.session(context=len(ids), numerics=numerics) as session:
            found.append(log_probabilities(session.eval(ids, logits="all")))
    exact, fast = found
    return {
        "nats": float((np.exp(exact) * (exact - fast)).sum(axis=-1).mean()),
        "same_best": float((exact.argmax(axis=-1) == fast.argmax(axis=-1)).mean()),
        "perplexity": [float(np.exp(-one[np.arange(len(ids) - 1), ids[1:]].mean())) for one in found],
    }


def speed(model: llamac.Model, ids: list[int], rounds: int) -> list[float]:
    """The least CPU seconds of a prompt, with exact and with fast numerics."""
    least = [float("inf")] * len(NUMERICS)
    for _ in range(rounds):
        for index, numerics in enumerate(NUMERICS):
            with model.session(context=len(ids), numerics=numerics, threads=1) as session:
                session.eval(ids[:1], logits=None)  # not the first use of the memory
                session.truncate(0)
                started = time.process_time()
                session.eval(ids)
                least[index] = min(least[index], time.process_time() - started)
    return least


def main() -> None:
    """Print and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=768, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the speed measurement (default: %(default)s)")
    parser.add_argument("--isa", help="kernel set (default: the best)")
    parser.add_argument("--result", metavar="NAME", help="save the figures as bench/results/DATE-NAME.json")
    options = parser.parse_args()
    with llamac.load(options.model, isa=options.isa) as model:
        ids = model.tokenize(options.text.read_text("utf-8"))[: options.tokens]
        figures = quality(model, ids)
        exact, fast = speed(model, ids[: options.prompt], options.rounds)
        print(
            f"{figures['nats']:.6f} nats per token  same best candidate {100 * figures['same_best']:.1f}%  perplexity "
            f"{figures['perplexity'][0]:.3f} exact, {figures['perplexity'][1]:.3f} fast\n"
            f"prompt of {options.prompt}: {exact:.3f} s exact, {fast:.3f} s fast, {exact / fast:.2f} times as fast"
        )
        if options.result:
            names = {"model": Path(options.model).name, "text": options.text.name, "tokens": len(ids)}
            timing = {"prompt": options.prompt, "rounds": options.rounds, "cpu_seconds": [exact, fast]}
            save(options.result, {**names, **figures, **timing})


if __name__ == "__main__":
    main()
