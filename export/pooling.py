"""How an embedding model pools its tokens: reads it from the formats of sentence-transformers and GGUF.

A flat file has it as metadata["pooling"]: one of `POOLINGS`, or several of them, joined by "+", whose vectors are
concatenated. A cross-encoder can have "late". `pool` computes it in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.equations import gelu_erf, layer_norm, relu, sigmoid
from llamac.export.products import linear
from llamac.format.model_folders import POOLING
from llamac.format.strict_json import read_object

METADATA_KEY = "pooling"
JOINED = "+"  # between the names of several poolings

Array = NDArray[np.float64]

# How the rows of all tokens become one. "late" is the mean, too, of what the first dense layer makes of each row.
POOLINGS: Mapping[str, Callable[[Array], Array]] = {
    "last": lambda rows: rows[-1:],
    "mean": lambda rows: rows.mean(axis=0, keepdims=True),
    "cls": lambda rows: rows[:1],
    "max": lambda rows: rows.max(axis=0, keepdims=True),
    "mean_sqrt_len": lambda rows: rows.sum(axis=0, keepdims=True) / len(rows) ** 0.5,
    "weightedmean": lambda rows: np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1))[None],
    "late": lambda rows: rows.mean(axis=0, keepdims=True),
}
# By the flat file's names.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "relu": relu,
    "gelu_erf": gelu_erf,
}

# Our names of sentence-transformers' flags, in the order in which it concatenates their vectors.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
# Our names where the files of newer versions have one name instead of flags; the others are the same.
MODES = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
# Our names of llama.cpp's enum llama_pooling_type. 0 is none; 4 marks rerankers, which have no embedding.
GGUF_TYPES = {1: "mean", 2: "cls", 3: "last"}


def from_hf(folder: Path, warnings: list[str]) -> dict[str, Any]:
    """The metadata entries of a Hugging Face directory with sentence-transformers' 1_Pooling/config.json, if it has it.

    Several modes at once concatenate their vectors. A damaged file is a warning.
    """
    path = folder / POOLING
    if not path.is_file():
        return {}
    try:
        values = read_object(path)
    except ExportError as error:
        warnings.append(f"{error}: the file does not say how to pool embeddings")
        return {}
    names = [name for flag, name in FLAGS.items() if values.get(flag) is True] or ["mean"]
    if isinstance(found := values.get("pooling_mode"), str | list):
        names = [MODES.get(mode, mode) for mode in map(str, found if isinstance(found, list) else [found])]
    is_whole = {} if values.get("include_prompt") is not False else {"pools_prompt": False}
    return {METADATA_KEY: JOINED.join(names), **is_whole}


def from_gguf(architecture: str, values: Mapping[str, object]) -> dict[str, str]:
    """The metadata entry of a GGUF file with this metadata, if its key pooling_type names a pooling."""
    kind = values.get(f"{architecture}.pooling_type")
    name = GGUF_TYPES.get(kind) if isinstance(kind, int) else None
    return {} if name is None else {METADATA_KEY: name}


def gguf_type(metadata: Mapping[str, object]) -> int | None:
    """The number of a flat file's pooling in GGUF, or None."""
    return next((number for number, name in GGUF_TYPES.items() if metadata.get(METADATA_KEY) == name), None)


def pool(checkpoint: Checkpoint, rows: Array) -> Array:
    """The embedding of a text, not scaled, or its score, from the output norms of its tokens: (n, dim) -> (1, width).

    Raises:
        UnsupportedError: If the checkpoint's pooling is not one of `POOLINGS`.
    """
    name = str(checkpoint.metadata.get(METADATA_KEY, "last"))
    names = name.split(JOINED)
    if not {*names} <= {*POOLINGS}:
        raise UnsupportedError(f"the pooling {name!r} is not supported")
    config = checkpoint.config
    is_late = name == "late" and config.pooled_activation  # without a dense layer, there is nothing to wait for
    x = rows if is_late else np.concatenate([POOLINGS[one](rows) for one in names], axis=1)
    for index, activation in enumerate(config.pooled_activation):
        part = f"pooled.{index}"
        x = linear(x, checkpoint.tensors[f"{part}.weight"], checkpoint.tensors.get(f"{part}.bias"))
        x = ACTIVATIONS[activation](x)
        norm = checkpoint.tensors.get(f"{part}.norm.weight")
        if norm is not None:
            weight = norm.array().astype(np.float64)
            x = layer_norm(x, weight, np.zeros(len(weight)), config.norm_eps)
        if is_late and index == 0:
            x = POOLINGS[name](x)
    return x
