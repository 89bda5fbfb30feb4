"""Moves the content of a session to another device: copies it, or recomputes it if a device has lost it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llamac import _core
from llamac.engine.rows import first_positions
from llamac.errors import DeviceError, OutOfMemoryError

if TYPE_CHECKING:
    from llamac.engine.session import Session


def open_like(session: Session, sequences: int, device: str) -> Session:
    """Open a session on a device, with the settings of another one."""
    from llamac.engine.session import Session

    context, _, _, isa, *_ = session._core.describe()
    draft_model = session._draft_model if session._head is None else session._head.file
    return Session(
        session._model,
        context=context,
        sequences=sequences,
        kv_dtype=session.kv_dtype,
        threads=None if session._default_threads is not None else session._threads,
        isa=isa,
        draft_model=None if draft_model is None or draft_model.closed else draft_model,
        numerics=session.numerics,
        device=device,
    )


def copy_content(source: Session, target: Session) -> None:
    """Copy all sequences, and the logits for `sample`, to a session with the same settings.

    If the other session's device has failed, this session recomputes the tokens.

    Raises:
        OutOfMemoryError: If there is no memory for the pages.
        DeviceError: If a device fails.
    """
    found, logits = _core.snapshot(source._core)
    if source._device != "cpu" and (failure := source._model._lost) is not None:
        if compute_again(source, target):
            what = "positions that a shift has moved cannot be computed again: eval the tokens in a new session"
            raise DeviceError(f"{what}: {failure}")
    else:
        _copy_pages(found, target)
    target._n_prompt, target._mu = source._n_prompt, source._mu
    if logits is not None:
        _core.restore(target._core, [], array("f", logits))


def _copy_pages(found: list[_core._Held], target: Session) -> None:
    """Give a session the sequences of a snapshot. Earlier states for which there is no memory are left out."""
    copies: dict[int, _core.Page] = {}  # by the page's address: shared pages stay shared

    def copy(group: int, pages: list[_core.Page]) -> None:
        for page in pages:
            if page.address not in copies:
                made = _core.take_page(target._core, group)
                made.view()[:] = page.view()
                copies[page.address] = made

    for *_, groups, states in found:
        for group, pages in enumerate(groups):
            is_recurrent = states and group == len(groups) - 1
            copy(group, pages[:1] if is_recurrent else pages)
    with contextlib.suppress(OutOfMemoryError):
        for *_, groups, states in found:
            if states:
                copy(len(groups) - 1, groups[-1][1:])
    contents: list[_core._Content] = []
    for number, (ids, shift, starts, groups, states) in enumerate(found):
        held = [copies[page.address] for pages in groups for page in pages if page.address in copies]
        kept = zip(states, groups[-1] if states else (), strict=False)
        earlier = [length for length, page in kept if page.address in copies][1:]
        contents.append((number, array("i", ids), array("i", starts), held, shift, earlier))
    _core.restore(target._core, contents)


def compute_again(source: Session, target: Session, lengths: Mapping[int, int] | None = None) -> dict[int, int]:
    """Compute the tokens of all sequences of a session in another one, with the same bits. Uses no device.

    Positions that a shift has moved cannot be recomputed: their keys and values depend on the removed ones.

    Args:
        source: The session, which does not change.
        target: A session with the same settings and no tokens.
        lengths: How many tokens of a sequence are wanted. Default: all.

    Returns:
        The sequences that are shorter than wanted, with their lengths.

    Raises:
        OutOfMemoryError: If there is no memory for the pages.
        CancelledError: After `cancel`.
    """
    shorter = {}
    two_sided = source._model.config["two_sided"]  # sequences share no prefix: positions depend on later ones
    for sequence in range(source._n_sequences):
        ids = array("i", source._core.tokens(sequence))
        known = source._core.common_prefix(ids, sequence)
        if not ids and (lost := source._core.lost) is not None:
            lost_sequence, tokens, unmoved = lost
            if lost_sequence == sequence:
                ids, known = array("i", tokens), unmoved
        wanted = len(ids) if lengths is None else lengths.get(sequence, len(ids))
        ids = ids[: min(wanted, known)]
        if len(ids) < wanted:
            shorter[sequence] = len(ids)
        others = range(0 if two_sided else sequence)
        shared, other = max(((target._core.common_prefix(ids, i), i) for i in others), default=(0, 0))
        if shared > target.shortest_length(other):
            target.copy_sequence(other, sequence, length=shared)
        if rest := ids[target.length(sequence) :]:
            target.eval(rest, sequence=sequence, logits=None)
    return shorter


def leave_device(session: Session, failure: DeviceError, rows: Sequence[int] = ()) -> None:
    """Continue a session on the CPU after its device has failed. It recomputes its tokens.

    Args:
        session: The session. Nothing but what it computes with has changed when this returns.
        failure: What the device raised.
        rows: The rows of the eval that failed (`_core.Session.eval_rows`), which are undone.

    Raises:
        DeviceError: `failure` if the session was opened for its device, not for "auto". Or a sequence has been shifted:
            the session is on the CPU then, and the sequence has the positions before those that moved.
    """
    if not session._falls_back:
        raise failure
    session._model._leave_device(failure)
    with contextlib.closing(open_like(session, session._n_sequences, "cpu")) as replacement:
        session._replacement = replacement  # for `cancel`
        try:
            replacement._core.follow(session._core)
            shorter = compute_again(session, replacement, first_positions(rows))
            session._core.exchange(replacement._core)
        finally:
            session._replacement = None
        session._use_cpu_like(replacement)
    if shorter:
        cut = ", ".join(f"sequence {sequence} to {length}" for sequence, length in shorter.items())
        raise DeviceError(
            f"the device has failed, and positions that a shift has moved cannot be computed again: the session is on "
            f"the CPU, and is cut to those before ({cut} positions); eval the tokens that follow: {failure}"
        ) from failure
