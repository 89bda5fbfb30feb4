"""Collects what another implementation computes, pass by pass, in the form of a `Capture`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from llamac.export.parity import draws
from llamac.export.parity.capture import Chosen, Floats, Question
from llamac.export.parity.stages import Key


class Notes:
    """The stages of all passes so far."""

    def __init__(self) -> None:
        self._rows: dict[Key, list[Floats]] = defaultdict(list)
        self._weights: dict[int, list[Floats]] = defaultdict(list)
        self._cached: dict[Key, Floats] = {}

    def note(self, stage: str, layer: int, rows: Floats) -> None:
        """Note the rows of a pass, shape (m, width)."""
        self._rows[stage, layer].append(rows)

    def note_cache(self, layer: int, keys: Floats, values: Floats) -> None:
        """Note the rows that the cache holds after a pass, shape (k, width). Those of the last pass count."""
        self._cached["cache_k", layer], self._cached["cache_v", layer] = keys, values

    def note_weights(self, layer: int, weights: Floats) -> None:
        """Note the attention weights of a pass, shape (m, heads, k), for the last k positions."""
        self._weights[layer].append(weights)

    def stages(self, n: int) -> dict[Key, Floats]:
        """All stages of n positions."""
        found = {key: np.concatenate(parts) for key, parts in self._rows.items()}
        for layer, parts in self._weights.items():
            whole, row = np.zeros((n, parts[0].shape[1], n), np.float32), 0
            for part in parts:
                end = row + len(part)
                whole[row:end, :, end - part.shape[2] : end] = part  # a window's cache has lost the first positions
                row = end
            found["weights", layer] = whole
        return found | self._cached


def choose_tokens(question: Question, way: str, forward: Callable[[tuple[int, ...]], Floats]) -> Chosen:
    """Let a model continue the prompt.

    Args:
        question: The prompt and what follows it.
        way: How tokens are chosen.
        forward: Computes further tokens, from the first one on; returns the logits after the last one,
            shape (vocab_size,).
    """
    row = forward(question.ids)
    ids, rows = [], []
    for i in range(question.new_tokens):
        rows.append(row)
        ids.append(draws.choose(way, row[: question.n_token_ids], question.seed, len(question.ids) + i))
        if i + 1 < question.new_tokens:
            row = forward((ids[-1],))
    return Chosen(tuple(ids), np.stack(rows))
