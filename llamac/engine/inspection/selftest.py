"""The self-test: this build on this machine against recorded hashes, in seconds.

The core builds tiny models of every stored dtype and has the hashes of their logits (csrc/selftest.c). This module
computes them with every kernel set that the machine supports, over threads, positions per eval and sequences side by
side. It has the hashes of sampled tokens and of token ids itself.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llamac import _core, models
from llamac.engine.hardware import machine
from llamac.errors import LlamacError

VOCABULARY, DRAWS = 1000, 64  # logits of a row, and draws of each setting


@dataclass(frozen=True)
class Sampled:
    """Settings of draws, and the SHA-256 of the tokens that they draw.

    Attributes:
        settings: Of `_core.Sampling`.
        adjustments: Of `_core.Sampling.adjust`; empty: none.
        sha256: The hash of the tokens of all draws.
    """

    settings: dict[str, Any]
    adjustments: dict[str, Any]
    sha256: str


SAMPLED = {
    "greedy": Sampled({}, {}, "34fefbe062181a61114540a9cfd942ce376e3d89cd28b5a5cea97243d252928e"),
    "temperature": Sampled(
        {"temperature": 0.8}, {}, "38cde3adea7899588d87a1f88ba1be0e93eca03c9320a8174030df632ada122e"
    ),
    "top-k": Sampled(
        {"temperature": 1, "top_k": 40}, {}, "e7c8ca1ec4680f957f1cd7685cc10cebe55865e8770124c31b9d920ee9974677"
    ),
    "top-p": Sampled(
        {"temperature": 1, "top_p": 0.9}, {}, "a248aa1f7087fa480c2477570ea30deac0bc835c82b8050b686baee9efa7cfa3"
    ),
    "min-p": Sampled(
        {"temperature": 1, "min_p": 0.05}, {}, "54ba3ceba87a24cf286e893f1e497fbba3d27c21a38278d8f5a1428189cb772f"
    ),
    "typical-p": Sampled(
        {"temperature": 1, "typical_p": 0.7}, {}, "f6f3a05f0bad44ccdd55882a738b94baaf8a876618c7be561e092ca7a0a37037"
    ),
    "XTC": Sampled(
        {"temperature": 1, "xtc_probability": 0.5, "xtc_threshold": 0.01},
        {},
        "ce56b64902bb44b87669606da6c3ce9ebed4b926d025d5a6ddc2749ab78fbdb3",
    ),
    "mirostat": Sampled(
        {"temperature": 1, "mirostat_tau": 5, "mirostat_eta": 0.1},
        {},
        "032aaacbc6f11abfe7082a91085cc1aba6e2ebb23ff9e8f3aa61359a3c0eba8d",
    ),
    "penalties": Sampled(
        {"temperature": 1},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        "1919f2397b43e335e57e349b877d82620e66ca72e0a70d92704b10b82bab22a5",
    ),
    "DRY": Sampled(
        {},
        {"dry_multiplier": 8, "dry_base": 1.75, "dry_allowed_length": 1},
        "8c2518e89dff88e65c2156c214875d8b0a0abc80c3bd32d2f64616646dd0f915",
    ),
}

TEXT = "Once upon a time, 12 cats' naïve café — 東京 🙂\n\n\tdef f(x):  return x**2  # <s> </s> ÅÉ\u0301 don't"
# SHA-256 of the ids of TEXT, as little-endian int32, with the tokenizer of each built-in model.
TOKENIZERS: dict[str, str] = {
    "stories": "4f4c1a09b6590bc3532b5b24e914f8f4894bfd4b6a4f202287f40c3cbccbeff1",
    "stories-gpt2": "88b1fa9e31f4ed6634d24faa7fdf3ad31f6961ba83fd2fe8f25c347af476fd61",
    "helper": "da9ffac51ae180904cbb89f21ae10830954fe1e02eedefdfdcbf9c956407ef11",
}


@dataclass(frozen=True)
class Comparison:
    """The hash of a result beside the recorded one.

    Attributes:
        what: What was computed, and how.
        found: The SHA-256 of the result, in hexadecimal.
        recorded: The recorded one.
    """

    what: str
    found: str
    recorded: str


@dataclass(frozen=True)
class Part:
    """The results of one part of the self-test.

    Attributes:
        name: "kernels avx2", "sampling", "tokenizers".
        runs: The number of compared results.
        seconds: The time that they took.
        differences: The results whose hashes are not the recorded ones.
    """

    name: str
    runs: int
    seconds: float
    differences: tuple[Comparison, ...]


@dataclass(frozen=True)
class _Way:
    """How to compute a case. It changes no bit."""

    threads: int
    chunk: int
    sequences: int

    def __str__(self) -> str:
        return f"threads {self.threads}, positions per eval {self.chunk}, sequences {self.sequences}"


def run_parts() -> Iterator[Part]:
    """Run the self-test. Yields each part when it is complete.

    The best kernel set computes each case in every way, another one in one way each.
    """
    ways = _ways()
    best = machine.best_isa()
    for isa in (name for name, supported in _core.isas() if supported):
        yield _timed(f"kernels {isa}", _logits(isa, ways, every_way=isa == best))
    yield _timed("sampling", _draws())
    yield _timed("tokenizers", _token_ids())


def _ways() -> list[_Way]:
    threads = machine.plan_threads().threads if _core.has_threads() else 1
    several = 2 if _core.has_threads() else 1
    return [_Way(1, 290, 1), _Way(max(threads, several), 50, 1), _Way(several, 7, 2)]


def _timed(name: str, results: Iterator[Comparison]) -> Part:
    """Collect the results of a part."""
    start = time.perf_counter()
    compared = list(results)
    different = tuple(result for result in compared if result.found != result.recorded)
    return Part(name, len(compared), time.perf_counter() - start, different)


def _logits(isa: str, ways: list[_Way], every_way: bool) -> Iterator[Comparison]:
    for index, (name, recorded) in enumerate(_core.selftest_cases()):
        for way in ways if every_way else [ways[index % len(ways)]]:
            found = _core.selftest(index, isa=isa, threads=way.threads, chunk=way.chunk, sequences=way.sequences)
            yield Comparison(f"logits of {name} with {isa}: {way}", found, recorded)


def _draws() -> Iterator[Comparison]:
    """Draw a token from each row of logits that every float represents: one by one, then all rows side by side.

    Draws that follow others, with adjustments or mirostat, cannot be side by side.
    """
    numbers = memoryview(array("f", ((i * 7919 + i * i % 613) % 4001 / 256 - 8 for i in range(DRAWS * VOCABULARY))))
    for name, sampled in SAMPLED.items():
        sampling = _core.Sampling(**sampled.settings, seed=7)
        if sampled.adjustments:
            sampling.adjust(**sampled.adjustments)
        history = _core.History(array("i", range(VOCABULARY // 4)))
        history.mu = 2 * sampled.settings.get("mirostat_tau", 0)
        tokens: list[int] = []
        for position in range(DRAWS):
            at = 0 if sampled.adjustments else position * VOCABULARY  # repetitions need rows that are alike
            tokens.append(_core.sample(numbers[at : at + VOCABULARY], sampling, position, history))
            history.append(tokens[-1])
        yield Comparison(f"draws by {name}, one by one", _hash(tokens), sampled.sha256)
        if not sampled.adjustments and not history.mu:
            logits = numbers.cast("B").cast("f", (DRAWS, VOCABULARY))
            drawn = _core.sample_rows(logits, VOCABULARY, [sampling] * DRAWS, list(range(DRAWS)), threads=2)
            tokens = [-1 if isinstance(token, LlamacError) else token for token in drawn]
            yield Comparison(f"draws by {name}, side by side", _hash(tokens), sampled.sha256)


def _token_ids() -> Iterator[Comparison]:
    from llamac.engine.model import Model
    from llamac.format.flatfile import FlatFile

    for name, recorded in TOKENIZERS.items():
        with Model(FlatFile(models.path(name))) as model:
            yield Comparison(f"token ids of {name}", _hash(model.tokenize(TEXT)), recorded)


def _hash(ids: list[int]) -> str:
    return hashlib.sha256(b"".join(token.to_bytes(4, "little", signed=True) for token in ids)).hexdigest()
