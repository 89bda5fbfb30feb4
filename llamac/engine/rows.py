"""Converts the arguments of a session's evals to the core's format: token ids, rows, drafts, stages of the graph."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from llamac import _core
from llamac.arguments import to_int, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError

STAGES: tuple[str, ...] = _core.stages()

# Rows are flat: token, sequence, position (of drafts: parent), want_logits, token, ...
Rows: TypeAlias = "array[int]"
ROW = 4  # numbers of a row


def as_ids(ids: Iterable[int]) -> array[int]:
    """Convert any iterable of integers, or a one-dimensional NumPy array, to 32-bit token ids."""
    if isinstance(ids, str):
        raise ArgumentTypeError("expected token ids, got text: use model.tokenize(text) first")
    if isinstance(ids, bytes | bytearray | AbstractSet | Mapping):  # sets and mappings have no order
        raise wrong_type("token ids", ids, "a sequence of integers")
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    try:
        ids = list(ids)
        # an array would accept bools as 0 and 1; NumPy's type is called bool or bool_
        if not {"bool", "bool_"}.isdisjoint(kind.__name__ for kind in set(map(type, ids))):
            raise TypeError("'bool' object cannot be interpreted as an integer")
        return array("i", ids)
    except TypeError as error:
        raise ArgumentTypeError(f"token ids must be 32-bit integers: {error}") from None
    except OverflowError as error:
        raise ArgumentError(f"token ids must be 32-bit integers: {error}") from None


def known_ids(ids: Iterable[int], size: int, name: str) -> array[int]:
    """Like `as_ids`, and check that the ids are in a vocabulary of `size` entries. `name` appears in the error.

    Raises:
        ArgumentError: If an id is not in the vocabulary.
    """
    found = as_ids(ids)
    wrong = next((token for token in found if not 0 <= token < size), None)
    if wrong is not None:
        raise ArgumentError(f"{name} has the token id {wrong}, expected 0 to {size - 1}")
    return found


def as_id(token: int) -> array[int]:
    """Like `as_ids`, for one token id."""
    number = to_int(token, "token")
    try:
        return array("i", [number])
    except OverflowError:
        raise ArgumentError(f"token is {number}, which is out of range") from None


def common_prefix(left: array[int], right: array[int]) -> int:
    """Return the length of the common prefix of two arrays."""
    n = min(len(left), len(right))
    if left[:n] == right[:n]:
        return n
    return next(i for i in range(n) if left[i] != right[i])


def appended_rows(tokens: array[int], sequence: int, start: int, logits: str | None) -> Rows:
    """Return rows that append tokens to a sequence of length `start`. `logits` is "last", "all" or None."""
    rows = array("i", bytes(16 * len(tokens)))
    rows[0::ROW] = tokens
    rows[1::ROW] = array("i", [sequence]) * len(tokens)
    rows[2::ROW] = array("i", range(start, start + len(tokens)))
    if logits == "all":
        rows[3::ROW] = array("i", [1]) * len(tokens)
    elif logits == "last":
        rows[-1] = 1
    return rows


def first_positions(rows: Sequence[int]) -> dict[int, int]:
    """The position of each sequence's first row: the lengths of the sequences before the rows are appended."""
    found: dict[int, int] = {}
    for sequence, position in zip(rows[1::ROW], rows[2::ROW], strict=True):
        found.setdefault(sequence, position)
    return found


def packed_rows(rows: Sequence[tuple[int, int, int, bool]]) -> tuple[Rows, int]:
    """Pack (token, sequence, position, whether to return its logits); return the rows and the number of logits."""
    if not isinstance(rows, Sequence):
        raise wrong_type("rows", rows, "a list of rows")
    if not rows:
        raise ArgumentError("no rows to eval: expected at least one")
    packed = array("i")
    requested = 0
    for row in rows:
        if not isinstance(row, Sequence) or len(row) != ROW:
            raise wrong_type("a row", row, "(token, sequence, position, whether to return its logits)")
        token, sequence, position, with_logits = row
        packed.extend(as_ids((token, sequence, position, int(bool(with_logits)))))
        requested += bool(with_logits)
    return packed, requested


def draft_rows(ids: Iterable[int], parents: Iterable[int], sequence: int) -> Rows:
    """Return the rows of a tree of drafts, each with the index of its parent."""
    tokens, indices = as_ids(ids), as_ids(parents)
    if len(tokens) != len(indices):
        raise ArgumentError(f"there are {len(tokens)} drafts and {len(indices)} parents: expected one for each")
    rows = array("i")
    for token, parent in zip(tokens, indices, strict=True):
        rows.extend((token, to_int(sequence, "sequence"), parent, 1))
    return rows


def stages_and_layers(
    stages: Iterable[str | tuple[str, int]], layers_of: Callable[[str], int]
) -> list[tuple[str, int]]:
    """Return (name, layer) for each requested stage.

    Args:
        stages: Names, for all layers, or (name, layer) pairs.
        layers_of: Returns the number of layers of a stage.
    """
    found = []
    expected = "a list of stage names or (name, layer) pairs"
    if isinstance(stages, str) or not isinstance(stages, Iterable):
        raise wrong_type("stages", stages, expected)
    for stage in stages:
        match stage:
            case str() as name:
                layer = None
            case (str() as name, layer):
                layer = to_int(layer, "a stage's layer")
            case _:
                raise ArgumentTypeError(f"stages holds {stage!r}, expected {expected}")
        if name not in STAGES:
            raise ArgumentError(f"there is no stage {name!r}; the stages are {', '.join(STAGES)}")
        n_layers = layers_of(name)
        if layer is not None and not 0 <= layer < n_layers:
            raise ArgumentError(f"stage {name!r} has no layer {layer}, expected 0 to {n_layers - 1}")
        found += [(name, layer)] if layer is not None else [(name, i) for i in range(n_layers)]
    return found


def page_floor(length: int, page: int) -> int:
    """Round a length down to whole pages of `page` positions."""
    return length // page * page
