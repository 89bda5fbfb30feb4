"""Makes the blocks of the training ahead of their use, in other processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

AHEAD = 2  # blocks in the making or ready, per process

_tokenizer: Tokenizer | None = None


class Order(NamedTuple):
    """The arguments of `rows.block`."""

    step: int
    rows: int
    length: int
    level: int
    drills: float


def _open(path: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    _tokenizer = Tokenizer.from_file(path)


def _make(order: Order) -> rows.Block:
    assert _tokenizer is not None
    return rows.block(_tokenizer, *order)


def blocks(tokenizer: Path, orders: Iterator[Order], workers: int) -> Generator[rows.Block, None, None]:
    """Yield the blocks that were ordered, in order. An order is read about `AHEAD * workers` blocks before its use.

    tokenizer: the file tokenizer.json. workers: the number of processes; 0 makes the blocks in this one.
    """
    if workers == 0:
        _open(str(tokenizer))
        yield from map(_make, orders)
        return
    # A forked process would share the GPU's state with this one.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_open, initargs=(str(tokenizer),))
    try:
        waiting: deque[Future[rows.Block]] = deque()
        while True:
            while len(waiting) < AHEAD * workers and (order := next(orders, None)) is not None:
                waiting.append(pool.submit(_make, order))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
