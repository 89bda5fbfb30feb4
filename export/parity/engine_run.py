"""Runs the engine on the question of a capture."""

from __future__ import annotations

from array import array

import numpy as np

from llamac import __version__
from llamac.engine.model import Model
from llamac.engine.sampling.params import SamplingParams
from llamac.engine.scoring.cancellation import Cancellation
from llamac.engine.scoring.pooled import Tokens, pooled_outputs, pooling_of
from llamac.errors import ModelError
from llamac.export.equations import attention_weights
from llamac.export.parity.capture import WAYS, Capture, Chosen, Floats, Question
from llamac.export.parity.stages import OF_A_LAYER, OF_CACHE, OUTSIDE, Key
from llamac.progress import silent

OBSERVED = (*OUTSIDE, *(stage for stage in OF_A_LAYER if stage != "weights"), "scores")
OF_ENCODER = tuple(stage for stage in OBSERVED if stage not in ("logits", *OF_CACHE))


def run_engine(model: Model, question: Question) -> Capture:
    """Compute a question with the engine, pass by pass. The stages are in the engine's form.

    Args:
        model: The model. Its defaults for sessions apply.
        question: The question.
    """
    observed, types = (OF_ENCODER, question.types or None) if question.is_for_encoder else (OBSERVED, None)
    with model.session(context=question.context) as session:
        passes = [session.observe(part, observed, types=types) for part in question.parts]
    rows = {key: np.concatenate([found[key] for found in passes]) for key in passes[0]}
    stages: dict[Key, Floats] = {}
    for (stage, layer), numbers in rows.items():
        if stage == "scores":
            stages["weights", layer] = _weights(model, layer, numbers[:, :, : len(question.ids)])
        else:
            stages[stage, layer] = numbers
    if question.is_for_encoder:
        stages["score" if model.config["scores_pairs"] else "pooled", 0] = _pooled(model, question)
    ways = () if question.is_for_encoder else WAYS
    chosen = {way: Chosen(_continue(model, question, way)) for way in ways}
    return Capture(f"llamac {__version__}", question, stages, chosen)


def _pooled(model: Model, question: Question) -> Floats:
    """What `embed`, before it scales the vector to length 1, or `rerank` computes: (1, width)."""
    text = Tokens(array("i", question.ids), array("i", question.types) if question.types else None)
    pooled = pooled_outputs(model, [text], pooling_of(model, None), "comparing", silent, Cancellation())
    return pooled.astype(np.float32)


def _continue(model: Model, question: Question, way: str) -> tuple[int, ...]:
    """The tokens with which the engine continues the prompt, until none of the logits is a number."""
    params = SamplingParams(
        temperature=float(way == "sampled"),
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=question.seed,
        ignore_eos=True,
    )
    for count in range(question.new_tokens, 0, -1):
        try:
            return tuple(model.generate(list(question.ids), params, context=question.context, max_tokens=count).tokens)
        except ModelError:  # no token can be chosen: the stages before the logits show why
            continue
    return ()


def _weights(model: Model, layer: int, scores: Floats) -> Floats:
    """The softmax of a layer's scores (n, heads, n)."""
    sinks = None
    if model.file.layers[layer]["sinks"]:
        sinks = model.file.tensor(f"layers.{layer}.attn_sinks.weight").astype(np.float64)
    return attention_weights(scores.astype(np.float64), sinks).astype(np.float32)
