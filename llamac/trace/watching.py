"""Computes a text part by part, and hands over the stages of each part: their memory does not grow with the text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llamac.engine.rows import STAGES, as_ids
from llamac.errors import ArgumentError, ContextFullError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.engine.session import Session

    Floats = NDArray[np.float32]

PART_BYTES = 128 << 20  # of observed stages
PART_ROWS = 256
OF_ATTENTION = ("q", "k", "v", "cache_k", "cache_v", "scores")


class Part(NamedTuple):
    """The stages of successive tokens.

    Attributes:
        start: The position of the first token.
        stages: Maps (stage, layer) to its rows, as `Session.observe` returns them; of scores, the positions up to the
            end of the text: (n, n_heads, tokens).
    """

    start: int
    stages: dict[tuple[str, int], Floats]


def checked_ids(model: Model, ids: Iterable[int], context: int | None) -> array[int]:
    """Check the token ids of a text.

    Args:
        model: The model.
        ids: The ids.
        context: The positions of the session; None: the model's.

    Raises:
        ArgumentError: If there are no ids, or one is out of range.
        ContextFullError: If they do not fit the context.
    """
    found, limit = as_ids(ids), model._context_limit(context)
    if not found:
        raise ArgumentError("the text has no tokens: there is nothing to trace")
    if len(found) > limit:
        raise ContextFullError(
            f"the text has {len(found)} tokens, but the context holds {limit}: shorten it, or enlarge the context if "
            "the model allows it"
        )
    size = model.config["vocab_size"]
    wrong = next((token for token in found if not 0 <= token < size), None)
    if wrong is not None:
        raise ArgumentError(f"the text has the token id {wrong}, expected 0 to {size - 1}")
    return found


def heads_of_layers(model: Model) -> list[int]:
    """The number of attention heads of each layer; 0 for layers without attention."""
    default = model.config["n_heads"]
    return [(layer["n_heads"] or default) if _attends(layer) else 0 for layer in model.file.layers]


def _attends(layer: Mapping[str, Any]) -> bool:
    return str(layer["mixer"]).startswith("attention")


def _has(layer: Mapping[str, Any], stage: str) -> bool:
    """Whether a layer computes a stage. The core fills the rows of some stages that it does not compute with zeros."""
    if stage in OF_ATTENTION:
        return _attends(layer)
    return stage != "ffn_router" or layer["ffn"] == "experts"


def stage_shapes(session: Session, stages: Sequence[str], n: int) -> dict[tuple[str, int], tuple[int, ...]]:
    """The shape of each stage of n tokens, in the order of the graph. Stages that a layer lacks are left out."""
    heads = session._model.config["n_heads"]
    widths = {name: session._core.stage_width(STAGES.index(name)) for name in stages}
    shapes: dict[tuple[str, int], tuple[int, ...]] = {}
    for layer, record in enumerate(session._model.file.layers):
        for name in STAGES:
            if name not in widths or not widths[name][0] or (layer and not widths[name][1]) or not _has(record, name):
                continue
            shapes[name, layer] = (n, heads, n) if name == "scores" else (n, widths[name][0])
    return shapes


def watch(session: Session, ids: Sequence[int], stages: Sequence[str], inputs: Floats | None = None) -> Iterator[Part]:
    """Append a text to an empty session, and yield the stages of its parts. inputs: as for `Session.observe`."""
    keys = list(stage_shapes(session, stages, len(ids)))
    row_bytes = 4 * sum(session._core.stage_width(STAGES.index(name))[0] for name, _ in keys)
    rows = min(PART_ROWS, max(1, PART_BYTES // max(1, row_bytes)))
    for start in range(0, len(ids), rows):
        part = None if inputs is None else inputs[start : start + rows]
        found = session.observe(ids[start : start + rows], keys, inputs=part)
        for key in keys:
            if key[0] == "scores":
                found[key] = found[key][:, :, : len(ids)]
        yield Part(start, found)
