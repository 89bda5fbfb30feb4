"""Evals that return the outputs of stages of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamac.arguments import checked_inputs
from llamac.engine.rows import STAGES, as_ids, stages_and_layers
from llamac.errors import ArgumentError
from llamac.format.flatfile import without_logits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.session import Session

    Floats = NDArray[np.float32]


def observe(
    session: Session,
    ids: Iterable[int],
    stages: Iterable[str | tuple[str, int]],
    sequence: int,
    inputs: Floats | None,
    types: Sequence[int] | None,
) -> dict[tuple[str, int], Floats]:
    """Append tokens, and return the output of stages; see `Session.observe`."""
    import numpy as np

    model, tokens = session.model, as_ids(ids)
    kinds = None if types is None else as_ids(types)
    if kinds is not None and len(kinds) != len(tokens):
        raise ArgumentError(f"types has {len(kinds)} numbers, expected {len(tokens)}: one for each id")
    rows = session._rows(tokens, sequence, "all")
    found: dict[tuple[str, int], Floats] = {}
    for name, layer in stages_and_layers(stages, session._layers_of):
        width, _ = session._core.stage_width(STAGES.index(name))
        found[name, layer] = np.empty((len(tokens), width), np.float32)
    observations = [(STAGES.index(name), layer, out.reshape(-1)) for (name, layer), out in found.items()]
    # encoders and rerankers have no logits: without room for them, the core ends with the output norm
    n_logits = 0 if without_logits(model.config) else len(tokens) * session._core.vocab_size
    session._run(
        rows,
        np.empty(n_logits, np.float32),
        observations,
        checked_inputs(inputs, len(tokens), model.config["dim"]),
        None,
        kinds,
    )
    heads = (len(tokens), model.config["n_heads"], session.context)
    return {key: out.reshape(heads) if key[0] == "scores" else out for key, out in found.items()}
