"""Evals that return the outputs of stages of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamac.arguments import checked_inputs
from llamac.engine.rows import STAGES, as_ids, stages_and_layers
from llamac.errors import ArgumentError, UnsupportedError
from llamac.format.flatfile import without_logits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.session import Session

    Floats = NDArray[np.float32]

LOGITS, OUTPUT_NORM = ("logits", 0), ("output_norm", 0)


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
    asked = stages_and_layers(stages, session._layers_of)
    kind = without_logits(model.config)
    if kind and LOGITS in asked:
        raise UnsupportedError(f"the model is {kind}, which has no stage 'logits'")
    found: dict[tuple[str, int], Floats] = {}
    # without room for logits, the core ends with the output norm, if something receives it
    for name, layer in [*asked, OUTPUT_NORM] if kind else asked:
        width, _ = session._core.stage_width(STAGES.index(name))
        found[name, layer] = np.empty((len(tokens), width), np.float32)
    observations = [(STAGES.index(name), layer, out.reshape(-1)) for (name, layer), out in found.items()]
    n_logits = 0 if kind else len(tokens) * session._core.vocab_size
    session._run(
        rows,
        np.empty(n_logits, np.float32),
        observations,
        checked_inputs(inputs, len(tokens), model.config["dim"]),
        None,
        kinds,
    )
    heads = (len(tokens), model.config["n_heads"], session.context)
    return {key: found[key].reshape(heads) if key[0] == "scores" else found[key] for key in asked}
