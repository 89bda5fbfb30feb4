"""Decode speed with prompt lookup, as a multiple of the speed without, on texts that repeat spans and on free text.

    python -m bench.speculation MODEL [MODEL ...] [--dtype q4] [--rounds 3] [--result NAME]

Random models do not copy, and small ones copy badly. So the text to generate is given: the sampler draws each token,
but generation continues with the given one. All else is as usual. Both ways alternate in one process; the ratio is that
of the best times. Texts:

    code      a file of this repository with a renamed function and a new comment, after the file
    document  a passage with every tenth word replaced, after the passage
    quotes    sentences of a passage in another order, each after a few words of its own, after the passage
    free      a passage after another one
    sampled   what the model itself samples after a passage at temperature 0.8
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path
from typing import Any

import llamac
from bench.stamp import save

ROOT = Path(__file__).resolve().parent.parent
CODE = ROOT / "llamac" / "engine" / "scoring" / "passes.py"
PROSE = ROOT / "export" / "classics.txt"
MAX_TOKENS = 240


def texts() -> dict[str, tuple[str, str]]:
    """The prompt and the text to generate of each task."""
    code = CODE.read_text()
    prose = " ".join(PROSE.read_text().split())
    passage, other = prose[:3000], prose[9000:11000]
    edited = code.replace("contexts_for", "group_by_context").replace(
        "    groups: dict", "    # texts of one group share a pass\n    groups: dict"
    )
    words = passage.split()
    for i in range(5, len(words), 10):
        words[i] = "whatever"
    sentences = re.findall(r"[^.!?]+[.!?]", passage)
    random.Random(1).shuffle(sentences)
    quotes = " ".join(f"{i + 1}. The text says of it:{sentence}" for i, sentence in enumerate(sentences[:12]))
    return {
        "code": (f"{code}\nThe same file with another name for the function:\n", edited),
        "document": (f"{passage}\nThe same with changes:\n", " ".join(words)),
        "quotes": (f"{passage}\nThe main points:\n", quotes),
        "free": (passage, other),
    }


def decode(model: llamac.Model, prompt: list[int], given: list[int], seed: int, *, is_on: bool) -> tuple[float, Any]:
    """Generate `given`, or sample if it is empty. Returns seconds per token and the usage."""
    count = len(given) or MAX_TOKENS
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": seed, "ignore_eos": True}
    with model.stream(prompt, max_tokens=count, speculation=is_on, **options) as stream:
        if given:
            sampler = stream._output.sampler
            draw = sampler.draw

            def forced(core: Any, position: int, ids: Any = None) -> int:
                draw(core, position, ids)
                return given[position - len(prompt)]

            sampler.draw = forced  # type: ignore[method-assign]
        for _ in stream:
            pass
    return stream.completion.timings.decode / count, stream.completion.usage


def measure(model: llamac.Model, name: str, prompt: list[int], given: list[int], rounds: int) -> dict[str, Any]:
    """Measure both ways, alternating."""
    times: dict[bool, list[float]] = {False: [], True: []}
    counts = []
    for i in range(rounds):
        for is_on in (False, True) if i % 2 else (True, False):
            seconds, usage = decode(model, prompt, given, seed=1, is_on=is_on)
            times[is_on].append(seconds)
            if is_on:
                counts.append((usage.drafted_tokens, usage.accepted_tokens))
    off, on = min(times[False]), min(times[True])
    drafted, accepted = counts[-1]
    row = {"text": name, "tokens": len(given) or MAX_TOKENS, "ratio": round(off / on, 3)}
    row |= {"per_second": round(1 / on, 1), "drafted": drafted, "accepted": accepted}
    row["ratios"] = [round(a / b, 3) for a, b in zip(times[False], times[True], strict=True)]
    print(f"{name:9} {row['ratio']:6.2f}  {1 / off:7.1f} -> {1 / on:7.1f} tok/s  {accepted} of {drafted} drafts right")
    return row


def main() -> None:
    """Print a table for each model, and save all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtype")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", help="tokenizer for models that have none")
    parser.add_argument("--result")
    options = parser.parse_args()
    found = {}
    for path in options.models:
        with llamac.load(path, dtype=options.dtype, tokenizer=options.tokenizer) as model:
            print(model)
            rows = []
            for name, (before, after) in texts().items():
                given = model.tokenize(after, add_special=False)[:MAX_TOKENS]
                rows.append(measure(model, name, model.tokenize(before), given, options.rounds))
            rows.append(measure(model, "sampled", model.tokenize(texts()["free"][0]), [], options.rounds))
            found[f"{Path(path).name} {options.dtype or ''}".strip()] = rows
    if options.result:
        save(options.result, {"speculation": found})


if __name__ == "__main__":
    main()
