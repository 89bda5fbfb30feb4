"""--prompt-cache: a session file that a command continues and brings up to date."""

from __future__ import annotations

import os

from llamac.cli.options import Group
from llamac.engine.session import Session
from llamac.errors import ArgumentError


def add_prompt_cache(group: Group) -> None:
    """Add --prompt-cache."""
    group.add_argument(
        "--prompt-cache",
        metavar="FILE",
        help="keep the computed prompt in this session file; next time, compute only the new tokens",
    )


def check_prompt_cache(path: str | None) -> None:
    """Check that a command can write the file, before it loads a model.

    Raises:
        ArgumentError: If its folder does not exist or cannot be written, or something else has its name.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise ArgumentError(f"--prompt-cache is {path}, but the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f"--prompt-cache is {path}, but the folder {folder} cannot be written")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ArgumentError(f"--prompt-cache is {path}, which is not a regular file")


def load_prompt_cache(session: Session, path: str | None) -> int:
    """Load a file into a session, if there is one. Returns the positions that it has.

    Raises:
        SessionFileError: If the file is damaged, or of another model or another kind of session.
    """
    if path is None or not os.path.exists(path):
        return 0
    session.load(path)
    return session.length()


def save_prompt_cache(session: Session, path: str | None) -> None:
    """Write what a session holds, if it holds anything."""
    if path is not None and session.length():
        session.save(path)
