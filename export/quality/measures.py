"""Compares the next-token probabilities of a model with those of its base: divergence, best token, perplexity.

A `Reference` keeps the base's logits in a temporary file, because those of a large vocabulary do not fit into memory:
1,024 tokens of Gemma 3's 262,144 take 1.1 GB.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from llamac.engine.model import Model
from llamac.errors import ModelError
from llamac.export.targets import DISK_FULL, DiskFullError, check_space, errors_naming
from llamac.progress import Progress, silent

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

EVAL_TOKENS = 64  # tokens whose logits are computed at once
COMPARED_NUMBERS = 1 << 21  # logits that are compared at once, in float64
HIGH = 0.99  # the quantile of the divergences that is reported


@dataclass(frozen=True)
class Measures:
    """How a model compares with its base on a text.

    Attributes:
        positions: The number of positions compared.
        perplexity: The model's, on the tokens after the first of each window.
        base_perplexity: The base's.
        kl_mean: The mean over all positions of the Kullback-Leibler divergence of the model's next-token
            probabilities from the base's, in nats.
        kl_high: The smallest divergence that at least 99% of the positions do not exceed.
        kl_max: The largest divergence.
        same_top: The share of positions where both have the same most probable token.
    """

    positions: int
    perplexity: float
    base_perplexity: float
    kl_mean: float
    kl_high: float
    kl_max: float
    same_top: float


class Reference:
    """The windows of a text and the base's logits at all of their positions. A context manager.

    Args:
        base: The base.
        windows: Token ids of each window, at least two of them.
        progress: Called with the phase "evaluating the base" and numbers of tokens.

    Raises:
        DiskFullError: If the disk of temporary files has too little space for the logits.
        ModelError: If a logit of the base is not finite.
    """

    def __init__(self, base: Model, windows: Sequence[Sequence[int]], progress: Progress = silent) -> None:
        self.windows = windows
        self.n_ids = base.n_token_ids
        folder = Path(tempfile.gettempdir())
        try:
            check_space(folder, sum(map(len, windows)) * self.n_ids * np.dtype(np.float32).itemsize)
        except DiskFullError as error:
            raise DiskFullError(f"{error}; use fewer tokens, or set TMPDIR to another folder") from None
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by __exit__
        try:
            with errors_naming(folder, *DISK_FULL):
                for rows in _logits(base, windows, self.n_ids, "evaluating the base", progress):
                    self._file.write(_finite(base, rows).tobytes())
                self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reference:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def compare(self, model: Model, progress: Progress = silent, phase: str = "evaluating") -> Measures:
        """Evaluate a model on the same windows.

        Args:
            model: A model with the base's vocabulary.
            progress: Called with the phase and numbers of tokens.
            phase: The phase.

        Raises:
            ModelError: If a logit of the model is not finite.
        """
        divergences: list[Doubles] = []
        losses = np.zeros(2)  # sums of the base's and the model's negative log-probabilities of the text
        same = 0
        targets = _next_tokens(self.windows)
        step = max(1, COMPARED_NUMBERS // self.n_ids)
        done = 0
        self._file.seek(0)
        for rows in _logits(model, self.windows, self.n_ids, phase, progress):
            _finite(model, rows)
            for first in range(0, len(rows), step):
                part = rows[first : first + step]
                data = self._file.read(part.nbytes)
                expected = np.frombuffer(data, np.float32).reshape(part.shape)
                p, q = log_softmax(expected), log_softmax(part)
                # rounding can make the divergence of equal rows slightly negative
                divergences.append(np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0))
                same += int((expected.argmax(axis=1) == part.argmax(axis=1)).sum())
                chosen = targets[done : done + len(part)]
                scored = np.flatnonzero(chosen >= 0)
                losses -= p[scored, chosen[scored]].sum(), q[scored, chosen[scored]].sum()
                done += len(part)
        kl = np.sort(np.concatenate(divergences))
        scored_tokens = int((targets >= 0).sum())
        return Measures(
            positions=len(kl),
            perplexity=_exp(losses[1] / scored_tokens),
            base_perplexity=_exp(losses[0] / scored_tokens),
            kl_mean=float(kl.mean()),
            kl_high=float(kl[math.ceil(HIGH * len(kl)) - 1]),
            kl_max=float(kl[-1]),
            same_top=same / len(kl),
        )


def log_softmax(logits: Floats) -> Doubles:
    """The logarithms of the probabilities of logits (n, vocabulary)."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _exp(number: float) -> float:
    return math.exp(number) if number < 700 else math.inf


def _next_tokens(windows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """The token after each position, -1 after the last one of a window."""
    return np.array([token for ids in windows for token in (*ids[1:], -1)], np.int64)


def _logits(
    model: Model, windows: Sequence[Sequence[int]], n_ids: int, phase: str, progress: Progress
) -> Iterator[Floats]:
    """Logits (n, n_ids) of the positions of all windows, EVAL_TOKENS at a time."""
    total, done = sum(map(len, windows)), 0
    progress(phase, 0, total)
    with model.session(context=max(map(len, windows))) as session:
        for ids in windows:
            session.truncate(0)
            for first in range(0, len(ids), EVAL_TOKENS):
                part = ids[first : first + EVAL_TOKENS]
                yield np.ascontiguousarray(session.eval(part, logits="all")[:, :n_ids])
                done += len(part)
                progress(phase, done, total)


def _finite(model: Model, rows: Floats) -> Floats:
    if not np.isfinite(rows).all():
        raise ModelError(f"{model.file.path}: a logit is not finite: the weights are damaged")
    return rows
