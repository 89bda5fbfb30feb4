"""Cuts sequences of models with recurrent layers, whose state is kept after some positions only.

The core restores the last kept state before the cut, and the session computes the tokens after it again.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, SupportsIndex

from llamac.engine.cache.kv_identity import layer_groups

if TYPE_CHECKING:
    from llamac import _core
    from llamac.engine.model import Model
    from llamac.engine.session import Session


def state_bytes(core: _core.Session) -> int:
    """Return the bytes of a state; 0 without recurrent layers, which are a group of layers without KV heads."""
    return sum(group.page_bytes for group in layer_groups(core) if group.is_recurrent)


def is_recurrent(core: _core.Session) -> bool:
    """Return whether the model has recurrent layers."""
    return state_bytes(core) > 0


def has_recurrent_layers(model: Model) -> bool:
    """Return whether a model has recurrent layers."""
    return any(layer["mixer"] not in ("attention", "none") for layer in model.file.layers)


def can_cut(core: _core.Session, sequence: int, length: int) -> bool:
    """Return whether a sequence can be cut to a length, up to its own, without computing anything."""
    return core.cut_length(sequence, length) == length


def truncate(session: Session, length: int, sequence: int) -> None:
    """Keep the first `length` positions of a sequence.

    The core cuts the sequence to its last kept state first. If computing the tokens after it fails, the sequence stays
    shorter than wanted.

    Raises:
        ArgumentError: If the sequence cannot be cut to this length. It has not changed.
        CancelledError: After `cancel`. The first `done` of the tokens after the state have been recomputed.
        OutOfMemoryError: If there is no memory to recompute them.
        DeviceError: If the device fails.
    """
    start, rest = _cut(session._core, length, sequence)
    session._core.truncate(start, sequence)
    _compute(session, rest, sequence)


def fork(source: Session, length: int, sequence: int, target: Session, to: int) -> None:
    """Make a sequence of a session equal to a prefix of another one's. Raises as `truncate`, for the target."""
    start, rest = _cut(source._core, length, sequence)
    target._core.fork_from(source._core, start, sequence, to)
    _compute(target, rest, to)


def _cut(core: _core.Session, length: int, sequence: int) -> tuple[int, list[int]]:
    """Return the length to cut to, and the ids to recompute. The core refuses a length that does not exist."""
    if not is_recurrent(core) or not isinstance(length, SupportsIndex) or not 0 <= length <= core.length(sequence):
        return length, []
    start = core.cut_length(sequence, length)
    return start, core.tokens(sequence)[start:length]


def _compute(session: Session, ids: list[int], sequence: int) -> None:
    if ids:
        session._run(session._rows(array("i", ids), sequence, None))
