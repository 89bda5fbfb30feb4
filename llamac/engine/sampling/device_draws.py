"""Draws that a session's device can compute, so that the logits need not be copied to the host.

A device draws the token that the core would draw, or none; then it delivers the row of logits as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llamac.gpu.draws import MOST_TOP_K, Draw, Drawing, drawing_from

if TYPE_CHECKING:
    from llamac import _core
    from llamac.engine.sampling.params import ResolvedParams
    from llamac.engine.session import Session


def device_draw(params: ResolvedParams, position: int) -> Draw | None:
    """The draw of a request whose logits nothing changes; None if a device does not know its filters."""
    others = params.mirostat_tau > 0 or params.xtc_probability > 0 or params.typical_p < 1
    if others or params.top_k > MOST_TOP_K or params.logprobs is not None:
        return None
    filters = params.temperature, params.core_top_p, params.min_p
    return Draw(params.seed, position, params.candidate, params.top_k, *filters)


@contextlib.contextmanager
def drawing_on_device(
    session: Session, draws: Sequence[Draw | None], head: _core.Session | None = None
) -> Iterator[list[int | None]]:
    """Draw tokens in the eval of a `with` block, if the session is on a device.

    Args:
        session: The session.
        draws: For each row of logits of the eval.
        head: The session of the MTP layer or the drafter, if the eval is one of its own.

    Yields:
        The tokens of the rows, after the block. None where the logits have been delivered.
    """
    tokens: list[int | None] = [None] * len(draws)
    if session.device == "cpu" or not any(draws):
        yield tokens
        return
    drawing = Drawing(session.model.n_token_ids, draws, tokens)
    with drawing_from(session._core if head is None else head, drawing):
        yield tokens
