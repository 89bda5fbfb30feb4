"""Draws of tokens from the logits that a pass leaves on a device (kernels/draw.cu)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llamac import _core
    from llamac.gpu.driver import Driver
    from llamac.gpu.passes import Floats

MOST_DRAWS = 64  # of a pass: each needs memory for all probabilities
MOST_TOP_K = 1024  # draw.cu sorts twice as many tokens
NO_TOKEN = -1

_CHUNK = 1024  # logits of a block of threads, as in draw.cu
_MAGNITUDES = 32  # as in draw.cu
_RECORD = [  # struct draw: a Draw and the row of logits
    *(("seed", "u8"), ("position", "u8"), ("candidate", "u4"), ("top_k", "i4")),
    *(("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("row", "i4")),
]


class Draw(NamedTuple):
    """A draw that a device can compute. `seed`, `candidate` and the filters are those of llamac_sampling (llamac.h)."""

    seed: int
    position: int
    candidate: int
    top_k: int  # at most MOST_TOP_K
    temperature: float
    top_p: float
    min_p: float


class Drawing(NamedTuple):
    """The draws of an eval.

    Attributes:
        n: The number of logits to use; the rest is padding.
        draws: For each row of logits; None if the host needs the row.
        tokens: Receives the token of each row; None if the host must draw from the row, whose logits it then has.
    """

    n: int
    draws: Sequence[Draw | None]
    tokens: list[int | None]


# The session of the eval in progress, and its draws. A helper thread that computes the eval sees them, too
# (llamac/interrupt.py). A signal handler can compute with other sessions meanwhile; their chunks are not drawn from.
_drawing: ContextVar[tuple[_core.Session, Drawing] | None] = ContextVar("drawing", default=None)


@contextlib.contextmanager
def drawing_from(session: _core.Session, drawing: Drawing) -> Iterator[None]:
    """Draw tokens from the logits of a session's eval in a `with` block."""
    before = _drawing.set((session, drawing))
    try:
        yield
    finally:
        _drawing.reset(before)


def drawing_of(chunk: _core.Chunk) -> Drawing | None:
    """The draws from a chunk's logits; None if there are none, or if the eval has more chunks."""
    if (found := _drawing.get()) is None:
        return None
    session, drawing = found
    return drawing if chunk.is_of(session) and chunk.n_wanted == len(drawing.draws) else None


class DrawMemory:
    """The memory of a session's draws on a device, which grows with their number.

    Attributes:
        bytes: Its size.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.bytes = 0
        self._address = 0

    def deliver(self, source: int, logits: Floats, drawing: Drawing | None) -> None:
        """Draw tokens from a pass's logits, and copy those of rows without a token to the host.

        Args:
            source: The address of the logits.
            logits: (rows, width), receives rows.
            drawing: The draws; None copies all rows.
        """
        import numpy as np

        if drawing is not None:
            self._draw(source, logits.shape[1], drawing)
        if drawing is None or not any(token is not None for token in drawing.tokens):
            self._driver.download(source, logits.reshape(-1).view(np.uint8))
            return
        for row, token in enumerate(drawing.tokens):
            if token is None:
                self._driver.download(source + row * logits.strides[0], logits[row].view(np.uint8))

    def _draw(self, logits: int, width: int, drawing: Drawing) -> None:
        """Fill `drawing.tokens` where the device can draw."""
        import numpy as np

        from llamac.gpu.driver import arguments, ceil_div

        chosen = [(row, draw) for row, draw in enumerate(drawing.draws) if draw is not None]
        if not chosen or len(chosen) > MOST_DRAWS:
            return
        count, n, chunks = len(chosen), drawing.n, ceil_div(drawing.n, _CHUNK)
        records = np.array([(*draw, row) for row, draw in chosen], _RECORD)
        tokens = np.empty(count, np.int32)
        at = self._reserve(
            {
                "draws": records.nbytes,
                "maxima": 4 * count * chunks,
                "finite": 4 * count * chunks,
                "p": 4 * count * n,
                "sums": 8 * count * chunks,
                "counts": 4 * count * _MAGNITUDES,
                "tokens": tokens.nbytes,
            }
        )
        driver = self._driver
        driver.upload(at["draws"], records.view(np.uint8))
        places = (at[name] for name in ("draws", "maxima", "finite", "p", "sums", "counts"))
        values = arguments("piipppppp", logits, width, n, *places)
        driver.launch("draw_maxima", (chunks, count, 1), 256, values)
        driver.launch("draw_probabilities", (chunks, count, 1), 256, values)
        driver.launch("draw_tokens", (count, 1, 1), 1024, (*values, *arguments("p", at["tokens"])))
        driver.download(at["tokens"], tokens.view(np.uint8))
        for (row, _), token in zip(chosen, tokens.tolist(), strict=True):
            drawing.tokens[row] = None if token == NO_TOKEN else token

    def _reserve(self, sizes: dict[str, int]) -> dict[str, int]:
        """The addresses of parts of these sizes."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // 256) * 256
        if end > self.bytes:
            self.close()
            self._address = self._driver.alloc(end)
            self.bytes = end
        return {name: self._address + offset for name, offset in offsets.items()}

    def close(self) -> None:
        """Free the memory."""
        if self.bytes:
            self._driver.free(self._address)
        self.bytes = self._address = 0
