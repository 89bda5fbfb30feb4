"""The options of `llamac run` that say what the text must match."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from llamac.cli.options import Group
from llamac.errors import ArgumentError
from llamac.format.small_files import read_small

if TYPE_CHECKING:
    from llamac.guided.guides import Guide

MAX_BYTES = 1 << 20  # of a schema or grammar


def add_guide(group: Group) -> None:
    """Add --json-schema, --regex, --choice and --grammar."""
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--json-schema",
        metavar="SCHEMA",
        help="generate JSON that matches a JSON schema, given as a file or as text that begins with { (docs/guided.md)",
    )
    kinds.add_argument("--regex", metavar="PATTERN", help="generate text that matches a regular expression")
    kinds.add_argument(
        "--choice", action="append", metavar="TEXT", help="generate one of the texts given with --choice; repeatable"
    )
    kinds.add_argument(
        "--grammar", metavar="FILE", help="generate text that matches the grammar in FILE, in Lark's syntax or GBNF"
    )


def chosen_guide(options: argparse.Namespace) -> Guide | None:
    """What the options ask for.

    Raises:
        ArgumentError: If it is wrong.
        UnsupportedError: If llguidance is not installed.
    """
    given = (options.json_schema, options.regex, options.choice, options.grammar)
    if all(value is None for value in given):
        return None
    from llamac.guided.guides import Choice, Grammar, Json, Regex  # the other runs start faster without

    if options.regex is not None:
        return Regex(options.regex)
    if options.choice is not None:
        return Choice(options.choice)
    if (options.json_schema or "").lstrip().startswith("{"):
        return Json(options.json_schema)
    path = options.grammar if options.json_schema is None else options.json_schema
    try:
        text = read_small(Path(path), MAX_BYTES, ArgumentError).decode()
        return Grammar(text) if options.json_schema is None else Json(text)
    except UnicodeDecodeError:
        raise ArgumentError(f"{path} is not UTF-8 text") from None
    except ArgumentError as error:
        raise ArgumentError(str(error) if path in str(error) else f"{path}: {error}") from None
