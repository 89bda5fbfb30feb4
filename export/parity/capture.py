"""What one implementation computes for a question, and the file that stores it: a safetensors file.

The file's tensors are "{stage}.{layer}" (F32), and for each way to choose tokens "{way}.ids" (I32) and "{way}.logits"
(F32). `__metadata__` has one string, `capture`: a JSON object with the format's version and everything else.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import ExportError
from llamac.export.hf.safetensors_file import MAX_HEADER_BYTES, header_bytes, read_safetensors
from llamac.export.parity.stages import Key
from llamac.export.stored import StoredTensor
from llamac.export.targets import atomic_file
from llamac.format.strict_json import parse_object

Floats = NDArray[np.float32]
FORMAT = 1
WAYS = ("greedy", "sampled")


@dataclass(frozen=True)
class Question:
    """What both implementations compute.

    Attributes:
        ids: The prompt.
        steps: How many of the last ids are computed one by one, after all others at once.
        new_tokens: How many tokens follow the prompt, once greedily and once sampled.
        seed: The seed of the sampled ones; temperature 1, no filters.
        n_token_ids: Tokens from here on are never chosen.
        types: The types of the ids, for a cross-encoder with token types; otherwise () for type 0.

    For an encoder, `steps` and `new_tokens` are 0: it computes a text as a whole, and no token follows.
    """

    ids: tuple[int, ...]
    steps: int
    new_tokens: int
    seed: int
    n_token_ids: int
    types: tuple[int, ...] = ()

    @property
    def is_for_encoder(self) -> bool:
        """Whether an encoder computes it."""
        return self.new_tokens == 0

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The ids of each pass."""
        first = len(self.ids) - self.steps
        return [self.ids[:first], *((token,) for token in self.ids[first:])]

    @property
    def context(self) -> int:
        """The positions of the prompt and the new tokens."""
        return len(self.ids) + self.new_tokens


@dataclass(frozen=True)
class Chosen:
    """Tokens that follow the prompt.

    Attributes:
        ids: The tokens.
        logits: The logits from which each was chosen, shape (len(ids), vocab_size); None where nobody needs them.
    """

    ids: tuple[int, ...]
    logits: Floats | None = None


@dataclass(frozen=True)
class Capture:
    """What one implementation computed.

    Attributes:
        source: The implementation and its version.
        question: What it computed.
        stages: Shape (n, width) for each stage of all n positions; "weights" (n, heads, n), zeros at masked positions;
            "cache_k" and "cache_v" the rows of the last positions that the cache holds in the end, (m, width), m <= n;
            "pooled" and "score" (1, width).
        chosen: The tokens that follow, by way; {} for an encoder.
        config: The config.json of the model; {} if there is none.
        problems: What went wrong when the model was loaded.
    """

    source: str
    question: Question
    stages: dict[Key, Floats]
    chosen: dict[str, Chosen]
    config: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def n_layers(self) -> int:
        """The number of layers that were captured."""
        return 1 + max((layer for stage, layer in self.stages if stage == "block"), default=-1)


def write_capture(path: Path, capture: Capture) -> None:
    """Write a capture to a new file, or replace the file."""
    about = {
        "format": FORMAT,
        "source": capture.source,
        "question": asdict(capture.question),
        "config": capture.config,
        "problems": capture.problems,
    }
    arrays: dict[str, NDArray[Any]] = {f"{stage}.{layer}": rows for (stage, layer), rows in capture.stages.items()}
    for way, chosen in capture.chosen.items():
        assert chosen.logits is not None
        arrays |= {f"{way}.ids": np.array(chosen.ids, np.int32), f"{way}.logits": chosen.logits}
    kinds = {name: "I32" if name.endswith(".ids") else "F32" for name in arrays}
    tensors = ((name, kinds[name], array.shape) for name, array in arrays.items())
    with atomic_file(path) as file:
        file.write(header_bytes(tensors, {"capture": json.dumps(about)}))
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


def read_capture(path: Path) -> Capture:
    """Read a capture.

    Raises:
        ExportError: If the file is damaged, or no capture that this version reads.
    """
    arrays = {name: _array(path, tensor) for name, tensor in read_safetensors(path).items()}
    metadata = _metadata(path)
    if "capture" not in metadata:
        raise ExportError(f"{path} is not a capture: `llamac check MODEL --against DIR --capture FILE` makes one")
    try:
        about = _about(path, metadata["capture"])
        asked = about["question"]
        question = Question(**asked | {"ids": tuple(asked["ids"]), "types": tuple(asked.get("types", ()))})
        ways = () if question.is_for_encoder else WAYS
        if not (_is_whole(question) and isinstance(about["config"], dict) and _are(str, about["problems"])):
            raise ValueError("a value has the wrong type or size")
        chosen = {way: Chosen(tuple(arrays.pop(f"{way}.ids").tolist()), arrays.pop(f"{way}.logits")) for way in ways}
        stages = {(name.partition(".")[0], int(name.partition(".")[2])): array for name, array in arrays.items()}
        return Capture(about["source"], question, stages, chosen, about["config"], tuple(about["problems"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(f"{path} is not a capture that this version reads: {error!r:.120}") from None


def _are(kind: type, values: Iterable[Any]) -> bool:
    return all(isinstance(value, kind) for value in values)


def _is_whole(question: Question) -> bool:
    """Whether the values of a question have the right types, and its steps are a part of the prompt."""
    numbers = (question.steps, question.new_tokens, question.seed, question.n_token_ids)
    return _are(int, (*question.ids, *question.types, *numbers)) and 0 <= question.steps < len(question.ids)


def _array(path: Path, tensor: StoredTensor) -> NDArray[Any]:
    """The numbers of a tensor. What is neither F32 nor I32 is empty."""
    kind = {"f32": "<f4", "i32": "<i4"}.get(tensor.dtype)
    if kind is None:
        return np.zeros(0, np.float32)
    return np.fromfile(path, kind, math.prod(tensor.shape), offset=tensor.offset).reshape(tensor.shape)


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, whose header has been checked."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = parse_object(file.read(length), f"the header of {path}", max_bytes=MAX_HEADER_BYTES)
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata


def _about(path: Path, capture: str) -> dict[str, Any]:
    """The JSON object that a capture's metadata holds."""
    about = parse_object(capture, f"the metadata of {path}", max_bytes=MAX_HEADER_BYTES)
    if about["format"] != FORMAT:
        raise ValueError(f"format {about['format']!r}, expected {FORMAT}")
    return about
