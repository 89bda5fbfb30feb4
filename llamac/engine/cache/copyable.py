"""The methods of a session that copy its sequences: within it, into a new session, to another device."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llamac.arguments import AUTO
from llamac.engine.cache import recurrent
from llamac.engine.cache.moving import copy_content, leave_device, open_like

if TYPE_CHECKING:
    from llamac.engine.session import Session


class Copyable:
    """A mixin with the methods of `Session` that copy sequences."""

    def fork(self, *, sequence: int = 0, length: int | None = None, sequences: int = 1) -> Session:
        """Open a session whose sequence 0 is a prefix of a sequence of this one. Both share the memory of the prefix.

        The new session has the same settings. Its results have the same bits as if it had computed the prefix itself.

        Args:
            sequence: The sequence's index.
            length: Positions of the prefix. Default: all.
            sequences: Number of sequences of the new session.

        Raises:
            ArgumentError: If the sequence cannot be cut to this length, as for `truncate`.
            BusyError: If another thread uses this session.
        """
        session = cast("Session", self)
        if session._falls_back and (failure := session._model._lost) is not None:
            leave_device(session, failure)  # both sessions must be on one device
        forked = open_like(session, sequences, AUTO if session._falls_back else session._device)
        try:
            recurrent.fork(session, session.length(sequence) if length is None else length, sequence, forked, 0)
        except BaseException:
            forked.close()
            raise
        if sequence == 0:
            forked._n_prompt, forked._mu = min(session._n_prompt, forked.length()), session._mu
        return forked

    def to(self, device: str) -> Session:
        """Open a session on another device, with the same settings and a copy of this session's state.

        This session does not change. Both continue with the same bits. If the device of this session has failed, the
        new one recomputes the tokens.

        Args:
            device: As for `llamac.load`.

        Raises:
            DeviceError: If the device does not exist or fails; or if this session's device has failed after a shift
                moved positions.
            OutOfMemoryError: If the device has too little memory.
            BusyError: If another thread uses this session.
        """
        session = cast("Session", self)
        moved = open_like(session, session._n_sequences, device)
        try:
            copy_content(session, moved)
        except BaseException:
            moved.close()
            raise
        return moved

    def copy_sequence(self, source: int, target: int, *, length: int | None = None) -> None:
        """Make a sequence equal to a prefix of another one. They share memory as after `fork`.

        Args:
            source: The index of the sequence to copy.
            target: The index of the sequence to replace.
            length: Positions to copy. Default: all.

        Raises:
            ArgumentError: If a sequence does not exist, or `source` cannot be cut to this length, as for `truncate`.
            CancelledError, OutOfMemoryError, DeviceError: As for `truncate`, about `target`.
        """
        session = cast("Session", self)
        recurrent.fork(session, session.length(source) if length is None else length, source, session, target)
        if target == 0:
            session._n_prompt = min(session._n_prompt, session.length())
