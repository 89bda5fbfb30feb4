"""What an engine gains by decoding many sequences, sharing a prefix and continuing a chat: ratios within one run.

    python -m bench.engine MODEL [--threads 2] [--sequences 1,8,32] [--rounds 3] [--result NAME]

A round measures everything once, so that drift in the machine's speed affects all figures alike:

* decode: tokens per second while every sequence generates, from prompts of 16 tokens, greedy, without speculation;
* prefill: tokens per second of a single prompt of `--prompt` tokens;
* a shared prefix: the time to the first token of a request, and of a second request whose prompt has the same first
  `--shared` tokens;
* a second turn: the number of tokens that an engine computes for a conversation's second prompt, compared with the new
  tokens of that turn.

Prints medians over the rounds, and the median, minimum and maximum of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import llamac
from bench.stamp import save

OWN = 20  # number of prompt tokens after a shared prefix
ANSWER, TURN = 32, 40  # tokens of a first turn's answer, and of the message after it
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "speculation": False}


@dataclass(frozen=True)
class Round:
    """The figures of a round.

    Attributes:
        decode: Tokens per second, by the number of sequences.
        prefill: Tokens per second.
        first: Seconds to the first token of a request.
        second: Seconds to the first token of a request with the same prefix.
        computed: Number of tokens that the engine computed for a second turn.
    """

    decode: dict[int, float]
    prefill: float
    first: float
    second: float
    computed: int


def prompt(n: int, variant: int) -> list[int]:
    """Return a prompt of n token ids. Different variants begin with different tokens."""
    return [1 + (7919 * variant + 31 * i) % 251 for i in range(n)]


class Step(NamedTuple):
    """A step of an engine.

    Attributes:
        end: When it ended, in seconds.
        rows: The rows that it computed.
        tokens: The tokens that it sampled.
    """

    end: float
    rows: int
    tokens: int


def decode_speed(steps: Sequence[Step], sequences: int) -> float:
    """Return the tokens per second of the steps that computed one row for each sequence, and sampled its next token.

    The last step of the prompts is not one of them: it samples as many tokens, but takes several times as long.

    Args:
        steps: All steps, in order.
        sequences: The number of sequences.
    """
    full = [step.end - before.end for before, step in pairwise(steps) if step.rows == step.tokens == sequences]
    if not full:
        raise ValueError(f"no step computed one row for each of {sequences} sequences")
    return sequences * len(full) / sum(full)


def decode(model: llamac.Model, sequences: int, tokens: int) -> float:
    """Tokens per second of an engine while all sequences generate."""
    steps: list[Step] = []
    with llamac.Engine(model, max_sequences=sequences, prefix_cache=False) as engine:
        batch = engine._batch
        step = batch.step

        def timed_step() -> None:
            rows, generated = batch.rows, batch.generated
            step()
            steps.append(Step(time.perf_counter(), batch.rows - rows, batch.generated - generated))

        batch.step = timed_step  # type: ignore[method-assign]
        engine.generate([prompt(16, i) for i in range(sequences)], max_tokens=tokens, **GREEDY)
    return decode_speed(steps, sequences)


def seconds_to_first_token(engine: llamac.Engine, ids: list[int]) -> float:
    """Return the seconds to the first token of a single request."""
    timings = engine.submit(ids, max_tokens=1, **GREEDY).result().timings
    return timings.queued + timings.prefill


def prefill(model: llamac.Model, tokens: int) -> float:
    """Tokens per second of a prompt."""
    with llamac.Engine(model, prefix_cache=False) as engine:
        return tokens / seconds_to_first_token(engine, prompt(tokens, 0))


def shared_prefix(model: llamac.Model, shared: int) -> tuple[float, float]:
    """Return the seconds to the first tokens of two requests with a common prefix."""
    ids = prompt(shared, 0)
    with llamac.Engine(model) as engine:
        first, second = (seconds_to_first_token(engine, ids + prompt(OWN, variant)) for variant in (1, 2))
    return first, second


def second_turn(model: llamac.Model, first: int) -> int:
    """Return the number of tokens that an engine computes for a second turn with `TURN` new tokens."""
    ids = prompt(first, 0)
    with llamac.Engine(model) as engine:
        answer = engine.submit(ids, max_tokens=ANSWER, **GREEDY).result()
        turn = engine.submit(ids + list(answer.tokens) + prompt(TURN, 1), max_tokens=1, **GREEDY)
        usage = turn.result().usage
    return usage.prompt_tokens - usage.cached_tokens


def measure(model: llamac.Model, sequences: Sequence[int], tokens: int, length: int, shared: int) -> Round:
    """Run a round: measure everything once.

    Args:
        model: The model.
        sequences: Numbers of sequences to decode.
        tokens: Number of tokens that each sequence generates.
        length: Length of the prompt whose prefill is measured.
        shared: Length of the shared prefix, and of the first turn.
    """
    speeds = {n: decode(model, n, tokens) for n in sequences}
    first, second = shared_prefix(model, shared)
    return Round(speeds, prefill(model, length), first, second, second_turn(model, shared))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum."""
    return {"median": median(values), "least": min(values), "greatest": max(values)}


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return medians of the rounds, and ratios of decode speeds to that of the fewest sequences and to prefill."""
    fewest = min(rounds[0].decode)
    decoded = {
        n: {
            "tok_s": median(one.decode[n] for one in rounds),
            "ratio": spread([one.decode[n] / one.decode[fewest] for one in rounds]),
            "of_prefill": spread([one.decode[n] / one.prefill for one in rounds]),
        }
        for n in sorted(rounds[0].decode)
    }
    return {
        "decode": decoded,
        "prefill_tok_s": median(one.prefill for one in rounds),
        "shared_prefix": {
            "first_s": median(one.first for one in rounds),
            "second_s": median(one.second for one in rounds),
            "ratio": spread([one.second / one.first for one in rounds]),
        },
        "second_turn": {"own_tokens": TURN, "computed_tokens": max(one.computed for one in rounds)},
    }


def show(found: dict[str, Any]) -> None:
    """Print a summary."""

    def share(values: dict[str, float], form: str) -> str:
        middle, low, high = (format(values[name], form) for name in ("median", "least", "greatest"))
        return f"{middle} ({low} to {high})"

    for n, one in found["decode"].items():
        ratio, of_prefill = share(one["ratio"], ".2f"), share(one["of_prefill"], ".0%")
        print(f"{n:3} sequences  {one['tok_s']:8.1f} tokens/s  {ratio} times the fewest  {of_prefill} of prefill")
    print(f"prefill        {found['prefill_tok_s']:8.1f} tokens/s")
    prefix, turn = found["shared_prefix"], found["second_turn"]
    first, second, ratio = prefix["first_s"], prefix["second_s"], share(prefix["ratio"], ".1%")
    print(f"shared prefix  first token {first:.3f} s, then {second:.3f} s: {ratio}")
    print(f"second turn    {turn['computed_tokens']} tokens computed, {turn['own_tokens']} of its own")


def main() -> None:
    """Print the figures, and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each sequence generates")
    parser.add_argument("--prompt", type=int, default=256, help="tokens whose prefill is measured")
    parser.add_argument("--shared", type=int, default=1000, help="tokens of the shared prefix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result")
    options = parser.parse_args()
    sequences = [int(n) for n in options.sequences.split(",")]
    with llamac.load(options.model, threads=options.threads) as model:
        rounds = [
            measure(model, sequences, options.tokens, options.prompt, options.shared) for _ in range(options.rounds)
        ]
    found = summary(rounds)
    show(found)
    if options.result:
        save(options.result, {"model": options.model, "threads": options.threads, "engine": found})


if __name__ == "__main__":
    main()
