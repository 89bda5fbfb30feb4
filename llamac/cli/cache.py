"""`llamac cache`: list or delete cached conversions."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from llamac.cli.options import Group
from llamac.cli.text import json_text, output_width, safe_line
from llamac.errors import ArgumentError
from llamac.sizes import size_text
from llamac.sources.cache import Cache, open_cache
from llamac.sources.cache_entries import Entry, Removal

WIDE = 72  # columns of a terminal on which a model takes one line

ACTIONS = ("list", "rm", "prune", "path")
DESCRIPTION = (
    "llamac converts a source that is not a model file once, and stores the result in a folder: LLAMAC_CACHE, or "
    "llamac in XDG_CACHE_HOME, or ~/.cache/llamac. `path` prints the folder, `list` lists its models, and `rm` "
    "deletes the given models. `prune` deletes unusable files, such as interrupted conversions; its options delete "
    "more. llamac deletes only files that it has written there, and never a source."
)
EXAMPLES = """\
  llamac cache list
  llamac cache rm model.gguf
  llamac cache rm 3f9a41c2 hf:org/name
  llamac cache prune --older-than 30d --max-size 20G --dry-run
  llamac cache prune --all
"""


def add_arguments(parser: Group) -> None:
    """Add the command's options."""
    parser.add_argument("action", metavar="|".join(ACTIONS), choices=ACTIONS, help="what to do")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        default=[],  # argparse lists positional arguments without a default as missing
        help="rm: a model's id or source as `list` shows it, a prefix of either, or the path of its source",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="the folder (default: as above)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help="prune: delete every model")
    parser.add_argument(
        "--older-than",
        type=_age,
        metavar="AGE",
        help="prune: also models not used for this long, such as 30d, 12h or 2w",
    )
    parser.add_argument(
        "--max-size",
        type=_size,
        metavar="SIZE",
        help="prune: also the least recently used models, until the rest takes at most this size, such as 20G or 500M",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="prune: only print what it would delete")


def _age(text: str) -> float:
    """Seconds in a duration such as 30d."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    try:
        count, unit = float(text[:-1]), units[text[-1:].lower()]
    except (ValueError, KeyError):
        count, unit = -1, 1
    if not 0 <= count < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 30d (units: s, m, h, d, w)")
    return count * unit


def _size(text: str) -> int:
    """Bytes in a size such as 20G. Units are powers of 1000, or of 1024 with an i."""
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    digits = text.rstrip("kKmMgGtTiIbB")
    unit = text[len(digits) :].upper().removesuffix("B")
    base, unit = (1024, unit[:-1]) if unit.endswith("I") else (1000, unit)
    try:
        count, power = float(digits), powers[unit]
    except (ValueError, KeyError):
        count, power = -1, 0
    if not 0 <= count < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 20G or 500M")
    return int(count * base**power)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    kept = open_cache(options.cache_dir or None)
    assert kept is not None
    given = {"--all": options.all, "--older-than": options.older_than is not None}
    given |= {"--max-size": options.max_size is not None, "--dry-run": options.dry_run}
    if options.action != "prune" and any(given.values()):
        wrong = ", ".join(name for name, is_given in given.items() if is_given)
        raise ArgumentError(f"{wrong}: for `llamac cache prune` only, not for `llamac cache {options.action}`")
    if bool(options.names) != (options.action == "rm"):
        raise ArgumentError(
            f"`llamac cache {options.action}` takes no NAME"
            if options.names
            else "`llamac cache rm` needs the NAME of a model; `llamac cache list` shows them"
        )
    if options.action == "path":
        facts, lines = {"path": str(kept.folder)}, [str(kept.folder)]
    elif options.action == "list":
        facts, lines = _list(kept)
    elif options.action == "rm":
        entries = dict.fromkeys(kept.select(name) for name in options.names)
        facts, lines = _removed(kept, [kept.remove(entry) for entry in entries])
    else:
        facts, lines = _prune(kept, options)
    if options.json:
        sys.stdout.write(json_text(facts))
    else:
        print("\n".join(map(safe_line, lines)))
    return 0


def _list(cache: Cache) -> tuple[dict[str, Any], list[str]]:
    entries = cache.entries()
    total = sum(entry.bytes for entry in entries)
    facts = {
        "path": str(cache.folder),
        "bytes": total,
        "models": [{"id": entry.id, **vars(entry), "file": str(cache.path(entry.key))} for entry in entries],
    }
    width = output_width()
    lines = [line for entry in entries for line in _rows(entry, width)]
    return facts, [*lines, f"{_count(len(entries))}, {size_text(total)}"]


def _rows(entry: Entry, width: int) -> list[str]:
    """A model in one line, or in two on a narrow terminal. A source that does not fit loses its middle."""
    figures = f"{size_text(entry.bytes):>9}  {entry.dtype:<5}  {entry.id}  {_ago(entry.used):>9}"
    problem = f"  ({entry.problem})" if entry.problem else ""
    if width >= WIDE:
        return [f"{figures}  {_cut(entry.source, width - len(figures) - len(problem) - 2)}{problem}"]
    return [_cut(entry.source, width), _cut(figures + problem, width)]


def _prune(cache: Cache, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    gone = cache.prune(
        everything=options.all,
        older_than=options.older_than,
        max_bytes=options.max_size,
        dry_run=options.dry_run,
    )
    facts, lines = _removed(cache, gone, "would free" if options.dry_run else "freed")
    return {**facts, "dry_run": options.dry_run}, lines


def _removed(cache: Cache, gone: list[Removal], verb: str = "freed") -> tuple[dict[str, Any], list[str]]:
    freed = sum(removal.bytes for removal in gone)
    facts = {"path": str(cache.folder), "bytes": freed, "removed": [vars(removal) for removal in gone]}
    width = output_width()
    return facts, [*(_removal(removal, width) for removal in gone), f"{verb} {size_text(freed)}"]


def _removal(removal: Removal, width: int) -> str:
    tail = f" ({removal.reason + ', ' if removal.reason else ''}{size_text(removal.bytes)})"
    return _cut(removal.what, max(8, width - len(tail))) + tail


# ---- formatting


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = max(0, (width - 1) // 3)
    return f"{text[:head]}…{text[len(text) - max(0, width - 1 - head) :]}"


def _count(models: int) -> str:
    return f"{models} model{'' if models == 1 else 's'}"


def _ago(when: float) -> str:
    """A time in the past, in one unit."""
    seconds = max(0.0, time.time() - when)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
