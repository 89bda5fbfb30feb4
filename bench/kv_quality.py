"""Compares the number formats of the KV cache on a text: python -m bench.kv_quality MODEL TEXT [--result NAME].

For each format: the bytes per position, the Kullback-Leibler divergence of the next token's probabilities from those
with a cache in f32, how often the best candidate is the same, and the perplexity. Only the text's first tokens count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import llamac
from bench.stamp import save
from llamac.arguments import KV_DTYPES

TOKENS = 768


def log_probabilities(logits: Any) -> Any:
    """The log-softmax, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--result", metavar="NAME", help="save the figures as bench/results/DATE-NAME.json")
    options = parser.parse_args()
    with llamac.load(options.model) as model:
        ids = model.tokenize(options.text.read_text("utf-8"))[:TOKENS]
        exact = None
        rows = []
        for kv_dtype in KV_DTYPES:
            with model.session(context=len(ids), kv_dtype=kv_dtype) as session:
                found = log_probabilities(session.eval(ids, logits="all"))
                pages = -(-len(ids) // 64)
                per_position = session.memory()["kv"] / (64 * pages)
            exact = found if exact is None else exact
            divergence = (np.exp(exact) * (exact - found)).sum(axis=-1).mean()
            same = (found.argmax(axis=-1) == exact.argmax(axis=-1)).mean()
            perplexity = np.exp(-found[np.arange(len(ids) - 1), ids[1:]].mean())
            rows.append(
                {
                    "kv_dtype": kv_dtype,
                    "bytes_per_position": per_position,
                    "nats": float(divergence),
                    "same_best": float(same),
                    "perplexity": float(perplexity),
                }
            )
            print(
                f"{kv_dtype:4} {per_position:9.0f} bytes per position  {divergence:.6f} nats per token  "
                f"same best candidate {100 * same:.1f}%  perplexity {perplexity:.3f}"
            )
        if options.result:
            names = {"model": Path(options.model).name, "text": options.text.name, "tokens": len(ids)}
            save(options.result, {**names, "formats": rows})


if __name__ == "__main__":
    main()
