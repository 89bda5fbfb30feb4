"""`llamac cache`: where converted models are kept, which there are, and deleting them."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from typing import Any

from llamac.cache import Cache, Entry, Removal, cache_in
from llamac.cli.text import json_text, safe_line
from llamac.errors import ArgumentError

WIDE = 72  # columns from which on a model takes one line


def cache(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    place = cache_in(options.cache_dir or True)
    assert place is not None
    given = {"--all": options.all, "--older-than": options.older_than is not None}
    given |= {"--max-size": options.max_size is not None, "--dry-run": options.dry_run}
    if options.action != "prune" and any(given.values()):
        wrong = ", ".join(name for name, is_given in given.items() if is_given)
        raise ArgumentError(f"{wrong}: for `llamac cache prune` only, not for `llamac cache {options.action}`")
    if options.action == "path":
        facts, lines = {"path": str(place.place)}, [str(place.place)]
    elif options.action == "list":
        facts, lines = _list(place)
    else:
        facts, lines = _prune(place, options)
    if options.json:
        sys.stdout.write(json_text(facts, sys.stdout.encoding))
    else:
        print("\n".join(map(safe_line, lines)))
    return 0


def _list(place: Cache) -> tuple[dict[str, Any], list[str]]:
    entries = place.entries()
    total = sum(entry.bytes for entry in entries)
    facts = {
        "path": str(place.place),
        "bytes": total,
        "models": [{**vars(entry), "file": str(place.path(entry.key))} for entry in entries],
    }
    width = _width()
    lines = [line for entry in entries for line in _rows(entry, width)]
    return facts, [*lines, f"{_count(len(entries))}, {size_text(total)}"]


def _rows(entry: Entry, width: int) -> list[str]:
    """A model in one line, or on a narrow terminal in two. What has no room is cut in its middle."""
    figures = f"{size_text(entry.bytes):>9}  {entry.dtype:<5} {_ago(entry.used):>9}"
    problem = f"  ({entry.problem})" if entry.problem else ""
    if width >= WIDE:
        return [f"{figures}  {_cut(entry.source, width - len(figures) - len(problem) - 2)}{problem}"]
    return [_cut(entry.source, width), _cut(figures + problem, width)]


def _prune(place: Cache, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    gone = place.prune(
        everything=options.all,
        older_than=options.older_than,
        max_bytes=options.max_size,
        dry_run=options.dry_run,
    )
    freed = sum(removal.bytes for removal in gone)
    facts = {
        "path": str(place.place),
        "dry_run": options.dry_run,
        "bytes": freed,
        "removed": [vars(removal) for removal in gone],
    }
    width = _width()
    verb = "would free" if options.dry_run else "freed"
    return facts, [*(_removal(removal, width) for removal in gone), f"{verb} {size_text(freed)}"]


def _removal(removal: Removal, width: int) -> str:
    tail = f" ({removal.reason}, {size_text(removal.bytes)})"
    return _cut(removal.what, max(8, width - len(tail))) + tail


# ---- texts


def _width() -> int:
    """Columns there are; in a file or a pipe nothing is cut."""
    asked = os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if asked or sys.stdout.isatty() else 10_000


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = max(0, (width - 1) // 3)
    return f"{text[:head]}…{text[len(text) - max(0, width - 1 - head) :]}"


def _count(models: int) -> str:
    return f"{models} model{'' if models == 1 else 's'}"


def size_text(count: int) -> str:
    """Bytes for a person."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _ago(when: float) -> str:
    """How long ago something was, in one unit."""
    seconds = max(0.0, time.time() - when)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
