"""The saving and loading methods of a session, which use session_file.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from llamac.engine.session import Session


class Savable:
    """A mixin with the methods of `Session` that save and load session files."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all sequences with their KV cache to a file (docs/session-file.md).

        The file also has the logits for `sample` and the state of mirostat. It appears complete or not at all.

        Raises:
            OSError: If the file cannot be written.
        """
        from llamac.engine.cache.session_file import save

        session = cast("Session", self)
        session._recovering(lambda: save(session, path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all sequences with those of a file that `save` wrote.

        The session must have the same model, adapters, kv_dtype and numerics, and room for the sequences. On failure
        the session does not change.

        Raises:
            SessionFileError: If the file is damaged or does not match the session. The message names the field.
            OSError: If the file cannot be read.
            OutOfMemoryError: If there is no memory for the sequences.
            DeviceError: If the device fails.
        """
        from llamac.engine.cache.session_file import load

        session = cast("Session", self)
        session._recovering(lambda: load(session, path))
