"""What a model's results depend on, as hashes: weights, tokenizer, chat template and adapters."""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamac.engine.model import Model


@dataclass(frozen=True)
class Identity:
    """The parts of an opened model. Each hash is a SHA-256 in hexadecimal digits.

    Attributes:
        name: The model's name, for people.
        source: What the model was opened from: a path, hf:ORG/NAME or the name of a built-in model; empty if unknown.
        file: The id of the model file.
        weights: The configuration, and the name, format, shape and hash of every tensor.
        tokenizer: The tokenizer's tables; None if there is no tokenizer.
        template: The chat templates; None if there are none.
        adapters: What LoRA adapters add and replace; None if there are none.
        stop_ids: The tokens that end a text.
        numerics: The version of the order of operations.
    """

    name: str
    source: str
    file: str
    weights: str
    tokenizer: str | None
    template: str | None
    adapters: str | None
    stop_ids: tuple[int, ...]
    numerics: int


_known: weakref.WeakKeyDictionary[Model, Identity] = weakref.WeakKeyDictionary()


def identity_of(model: Model) -> Identity:
    """The identity of a model, computed once. A file whose tensors are not hashed yet is read for it."""
    found = _known.get(model)
    if found is None:
        found = _known[model] = _identity(model)
    return found


def short_hash(identity: Identity, *settings: object) -> str:
    """16 hexadecimal digits of everything that results depend on: the model, and the settings of a caller."""
    parts = (identity.file, identity.tokenizer, identity.adapters, *identity.stop_ids, *settings)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _identity(model: Model) -> Identity:
    file = model.file
    return Identity(
        name=model.name,
        source=model._origin.path if model._origin is not None else "",
        file=file.id,  # the first: it computes the hashes of the tensors
        weights=_weights(model),
        tokenizer=hashlib.sha256(model.tokenizer._data).hexdigest() if model.has_tokenizer else None,
        template=_template(model),
        adapters=adapters_hash(model),
        stop_ids=tuple(model.special.stop_ids),
        numerics=file.header["numerics"],
    )


def _weights(model: Model) -> str:
    """The hash of the configuration and of every tensor, wherever it lies in the file."""
    file = model.file
    digest = hashlib.sha256()
    for name in ("config", "layers"):
        digest.update(file._table(name))
    for tensor in file.tensors:
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape, bytes(tensor.sha256).hex()]).encode())
    return digest.hexdigest()


def _template(model: Model) -> str | None:
    templates: Any = model.file.metadata.get("chat_templates")
    has_template = model.file.sections["template"].bytes > 0
    if not has_template and not templates:
        return None
    text = model.file.text("template") if has_template else ""
    return hashlib.sha256(json.dumps([text, templates], sort_keys=True).encode()).hexdigest()


def adapters_hash(model: Model) -> str | None:
    """The hash of the buffers that the core was given, which is what it computes with; None without adapters."""
    if not model._core.borrowed:
        return None
    digest = hashlib.sha256()
    for name, *buffers in model._core.borrowed:
        digest.update(name.encode() + b"\0")
        for buffer in buffers:
            digest.update(b"" if buffer is None else hashlib.sha256(memoryview(buffer).cast("B")).digest())
    return digest.hexdigest()
