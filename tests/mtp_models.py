"""Tiny models with an MTP layer, and its equations in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from recurrent_models import GATED, config, delta_nets

from builders import checkpoint
from llamac.export.checkpoint import Checkpoint
from llamac.export.equations import rms_norm
from llamac.export.reference import forward_part
from llamac.export.rounding import Array


def with_mtp(made: Checkpoint) -> Checkpoint:
    """The model with a random MTP layer of gated attention."""
    wanted = replace(made.config, mtp=GATED)
    return replace(made, config=wanted, tensors={**checkpoint(wanted).tensors, **made.tensors})


def mtp_model() -> Checkpoint:
    """A model with recurrent layers and an MTP layer."""
    return with_mtp(delta_nets())


def attention_model() -> Checkpoint:
    """A model with two layers of attention and an MTP layer."""
    return checkpoint(replace(config(), layers=(GATED, GATED), mtp=GATED))


def mtp_reference(made: Checkpoint, tokens: list[int], hidden: Array) -> tuple[Array, Array]:
    """The MTP layer's hidden states and logits in float64, at positions 0, 1, ...

    Args:
        made: The model.
        tokens: The token after each position.
        hidden: (n, dim): the model's normed hidden state at each position.
    """
    config, tensors = made.config, made.tensors

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, tensors[f"mtp.{name}.weight"].array().astype(np.float64), config.norm_eps)

    embedding = tensors["token_embedding.weight"].array().astype(np.float64)
    pair = np.hstack([norm(embedding[tokens], "embedding_norm"), norm(hidden.astype(np.float64), "hidden_norm")])
    own = f"layers.{len(config.layers)}."
    alone = {name.replace(own, "layers.0.", 1): tensor for name, tensor in tensors.items() if name.startswith(own)}
    alone |= {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    stages: dict[str, Array] = {}
    forward_part(
        Checkpoint(replace(config, layers=(GATED,), mtp=None), alone),
        tokens,
        0,
        pair @ tensors["mtp.in.weight"].array().astype(np.float64).T,
        context=config.context,
        observe=lambda stage, layer, values: stages.update({stage: values}),
    )
    found = norm(stages["block"], "output_norm")
    output = embedding if config.tied_output else tensors["output.weight"].array().astype(np.float64)
    return found, found @ output.T
