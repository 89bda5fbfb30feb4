"""Hashes of everything that a model's results depend on: weights, tokenizer, chat template and adapters."""

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
    """Hashes of the parts of an opened model. Each is a SHA-256 in hexadecimal digits.

    Attributes:
        name: The model's display name.
        source: What the model was opened from: a path, hf:ORG/NAME or the name of a built-in model; empty if unknown.
        file: The id of the model file.
        weights: The configuration and every tensor's name, format, shape and hash.
        tokenizer: The tokenizer's tables; None if there is no tokenizer.
        template: The chat templates; None if there are none.
        adapters: The tensors that LoRA adapters add and replace; None if there are none.
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
    """Return the identity of a model, which is computed once. This reads the file if its tensors have no hashes yet."""
    found = _known.get(model)
    if found is None:
        found = _known[model] = _identity(model)
    return found


def short_hash(identity: Identity, *settings: object) -> str:
    """Return a hash, in 16 hexadecimal digits, of everything that results depend on: the model and the settings."""
    parts = (identity.file, identity.tokenizer, identity.adapters, *identity.stop_ids, *settings)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _identity(model: Model) -> Identity:
    file = model.file
    return Identity(
        name=model.name,
        source=model._origin.path if model._origin is not None else "",
        file=file.id,  # must come first: this computes the hashes of the tensors
        weights=_weights(model),
        tokenizer=hashlib.sha256(model.tokenizer._data).hexdigest() if model.has_tokenizer else None,
        template=_template(model),
        adapters=adapters_hash(model),
        stop_ids=tuple(model.special.stop_ids),
        numerics=file.header["numerics"],
    )


def _weights(model: Model) -> str:
    """Return the hash of the configuration and of every tensor, independent of offsets in the file."""
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
    """Return the hash of the adapter buffers that the core computes with; None without adapters."""
    if not model._core.borrowed:
        return None
    digest = hashlib.sha256()
    for name, *buffers in model._core.borrowed:
        digest.update(name.encode() + b"\0")
        for buffer in buffers:
            digest.update(b"" if buffer is None else hashlib.sha256(memoryview(buffer).cast("B")).digest())
    return digest.hexdigest()
