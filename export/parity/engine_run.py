"""Runs the engine on the question of a capture."""

from __future__ import annotations

import numpy as np

from llamac import __version__
from llamac.engine.model import Model
from llamac.engine.sampling.params import SamplingParams
from llamac.export.equations import attention_weights
from llamac.export.parity.capture import WAYS, Capture, Chosen, Floats, Question
from llamac.export.parity.stages import OF_A_LAYER, OUTSIDE, Key

OBSERVED = (*OUTSIDE, *(stage for stage in OF_A_LAYER if stage != "weights"), "scores")


def run_engine(model: Model, question: Question) -> Capture:
    """Compute a question with the engine, pass by pass. The stages are in the engine's form.

    Args:
        model: The model. Its defaults for sessions apply.
        question: The question.
    """
    with model.session(context=question.context) as session:
        passes = [session.observe(part, OBSERVED) for part in question.parts]
    rows = {key: np.concatenate([found[key] for found in passes]) for key in passes[0]}
    stages: dict[Key, Floats] = {}
    for (stage, layer), numbers in rows.items():
        if stage == "scores":
            stages["weights", layer] = _weights(model, layer, numbers[:, :, : len(question.ids)])
        else:
            stages[stage, layer] = numbers
    chosen = {way: Chosen(_continue(model, question, way)) for way in WAYS}
    return Capture(f"llamac {__version__}", question, stages, chosen)


def _continue(model: Model, question: Question, way: str) -> tuple[int, ...]:
    """The tokens with which the engine continues the prompt."""
    params = SamplingParams(
        temperature=float(way == "sampled"),
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=question.seed,
        max_tokens=question.new_tokens,
        ignore_eos=True,
    )
    return tuple(model.generate(list(question.ids), params, context=question.context).tokens)


def _weights(model: Model, layer: int, scores: Floats) -> Floats:
    """The softmax of a layer's scores (n, heads, n)."""
    sinks = None
    if model.file.layers[layer]["sinks"]:
        sinks = model.file.tensor(f"layers.{layer}.attn_sinks.weight").astype(np.float64)
    return attention_weights(scores.astype(np.float64), sinks).astype(np.float32)
