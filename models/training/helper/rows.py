"""Training rows: several conversations in a row, each seen by itself, with a weight for each token to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import generator
from .dice import Dice
from .rendering import render
from .vocabulary import END, MARKS, SPECIAL, START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 1
DRILL_SEED = 5
PROMPT_WEIGHT = 0.1  # of tokens that the model does not write; its own have weight 1
SERIES = 1_000_000  # conversations per step, of which a step uses the first few
DRILL_WEIGHT = 0.5  # of tokens that a drill repeats
TRIES = 12  # conversations in a row that fit nowhere before a block is complete


@dataclass(frozen=True)
class Block:
    """The rows of one step, each (rows, length): tokens, the document that each belongs to (0: none), weights.

    `weights[r, i]` is the weight of predicting `ids[r, i]` from the tokens before it.
    """

    ids: Any
    documents: Any
    weights: Any


def weighted(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[float]]:
    """The tokens of a rendered conversation and the weight of predicting each."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)
    header = tokenizer.encode("assistant\n", add_special_tokens=False).ids
    weights = [PROMPT_WEIGHT] * len(ids)
    weights[0] = 0.0
    at = 0
    while at < len(ids):
        if ids[at] == start and ids[at + 1 : at + 1 + len(header)] == header:
            at += 1 + len(header)
            while at < len(ids):
                weights[at] = 1.0
                if ids[at] == end:
                    break
                at += 1
        at += 1
    return ids, weights


def drill(dice: Dice, size: int) -> tuple[list[int], list[float]]:
    """A document that practises copying: random tokens, then spans of them again, each after its first token.

    A network learns to copy from such documents in fewer steps than from conversations: nothing else predicts the
    tokens. `size` is the size of the vocabulary. Only tokens whose place is determined have a weight.
    """
    first = len(SPECIAL) + len(MARKS)
    count, span = dice.number(1, 8), dice.number(2, 6)
    spans = [[dice.number(first, size - 1) for _ in range(span)] for _ in range(count)]
    ids, weights = [0], [0.0]
    for each in spans:
        ids += each
        weights += [0.0] * span
    for each in dice.shuffled(spans):
        ids += each
        weights += [0.0] + [DRILL_WEIGHT] * (span - 1)
    return ids, weights


def block(tokenizer: Tokenizer, step: int, rows: int, length: int, level: int, drills: float = 0.0) -> Block:
    """Return the rows of a step: a function of its arguments alone.

    level: the highest level of a conversation; lower ones are as frequent. drills: the share of documents that are
    drills.
    """
    ids = np.zeros((rows, length), np.int32)
    documents = np.zeros((rows, length), np.int32)
    weights = np.zeros((rows, length), np.float32)
    used = [0] * rows
    failures, index, count = 0, 0, 0
    while failures < TRIES and index < SERIES:
        number = step * SERIES + index
        dice = Dice(DRILL_SEED, number)
        if dice.chance(round(1000 * drills), 1000):
            tokens, weight = drill(dice, tokenizer.get_vocab_size())
        else:
            made = generator.conversation(SEED, number, level=index % (level + 1))
            tokens, weight = weighted(tokenizer, render(made))
        index += 1
        row = next((row for row in range(rows) if used[row] + len(tokens) <= length), None)
        if row is None:
            failures += 1
            continue
        failures = 0
        count += 1
        span = slice(used[row], used[row] + len(tokens))
        ids[row, span], documents[row, span], weights[row, span] = tokens, count, weight
        used[row] += len(tokens)
    return Block(ids, documents, weights)
