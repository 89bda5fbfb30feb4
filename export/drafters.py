"""What drafters of all source formats have in common: the fields of assistants, and the ids that heads draft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import ModelConfig
from llamac.format.flatfile import FIELDS

ASSISTANT, EAGLE3 = "assistant", "eagle3"
_LAYERS = next(member for member in FIELDS["config"] if member.name == "eagle_layers")
EAGLE_STATES = _LAYERS.count  # that a head reads
MAX_LAYER = int(_LAYERS.high)


def as_assistant(model: ModelConfig, trunk_dim: int, keys: str) -> ModelConfig:
    """A model of Gemma 4 as an assistant, which reads embeddings, keys and values of the model that it drafts for.

    Args:
        model: The config as that of a model.
        trunk_dim: The width of the model that it drafts for.
        keys: The source's keys of what an assistant cannot have, for the message.

    Raises:
        UnsupportedError: If it has parts that an assistant cannot have.
    """
    if any(layer.layer_embedding_dim or layer.ffn != "gated" for layer in model.layers):
        raise UnsupportedError(f"the assistant has layer embeddings or experts ({keys}), which llamac does not compute")
    layers = tuple(replace(layer, v_is_k=0, v_norm="none") for layer in model.layers)
    plain: dict[str, Any] = {"embedding_scale": 1.0, "logit_soft_cap": 0.0, "tied_output": False}
    return replace(model, layers=layers, drafter=ASSISTANT, trunk_dim=trunk_dim, **plain)


def checked_ids(name: str, ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    """The token ids to which a head's logits belong, which the tensor with this name encodes.

    Raises:
        ExportError: If they are not the ids of different tokens in ascending order.
    """
    if not ((ids >= 0) & (ids < vocab_size)).all() or not (np.diff(ids) > 0).all():
        raise ExportError(
            f"{name}: the {len(ids)} ids that it encodes do not ascend from 0 to at most {vocab_size - 1}"
        )
    return ids
