"""The texts that a model is run on to measure it: windows of a text, or text that the model generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from llamac import _core
from llamac.engine.model import Model
from llamac.export.residency import bounded_residency
from llamac.progress import Progress, silent

BUILT_IN = Path(__file__).with_name("classics.txt")
BATCH = 16  # sequences that are generated at once


def built_in_text() -> str:
    """Openings of English books in the public domain, about 4,000 tokens. A line is a paragraph."""
    paragraphs = BUILT_IN.read_text("utf-8").strip().split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


def windows(
    encode: Callable[[str], list[int]], start: list[int], text: str, tokens: int, length: int
) -> list[list[int]]:
    """Cut the beginning of a text into windows.

    Args:
        encode: Converts text to token ids, without special tokens.
        start: The tokens that a prompt begins with, such as BOS; every window gets them.
        text: The text.
        tokens: The most tokens in all windows together.
        length: The most tokens of a window.

    Returns:
        Token ids of each window, at least two of them. There is no window if the text is too short for one.
    """
    length = min(length, tokens)
    body = max(1, length - len(start))
    ids = encode(text)[: tokens // length * body]
    found = [start + ids[first : first + body] for first in range(0, len(ids), body)]
    return [window for window in found if len(window) > 1]


def generated(model: Model, bos: int | None, count: int, length: int, progress: Progress = silent) -> list[list[int]]:
    """Sample sequences from a model at temperature 1: the same ones on every machine.

    Args:
        model: The model.
        bos: The token that each sequence begins with. None: each begins with a different arbitrary token.
        count: The number of sequences.
        length: Tokens of each.
        progress: Called with the phase "generating text" and numbers of tokens.
    """
    n_ids = model.n_token_ids
    sequences: list[list[int]] = []
    for first in range(0, count, BATCH):
        group = range(first, min(first + BATCH, count))
        batch = [[bos if bos is not None else number * 7919 % n_ids] for number in group]
        with model.session(sequences=len(group), context=length) as session, bounded_residency(model.file):
            for position in range(length - 1):
                progress("generating text", first * (length - 1) + len(group) * position, count * (length - 1))
                rows = [(ids[-1], i, position, True) for i, ids in enumerate(batch)]
                logits = session.eval_rows(rows)[:, :n_ids]
                for number, row, ids in zip(group, logits, batch, strict=True):
                    sampling = _core.Sampling(temperature=1.0, seed=number)
                    ids.append(_core.sample(np.ascontiguousarray(row).data, sampling, position))
        sequences += batch
    progress("generating text", count * (length - 1), count * (length - 1))
    return sequences
