"""`llamac.replay`: opens the model of a receipt and repeats its result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from llamac.arguments import CacheDir, StrPath, wrong_type
from llamac.engine.model import Model
from llamac.engine.receipts.receipt import Receipt, read_receipt
from llamac.engine.receipts.replay import Replay, replay_on
from llamac.errors import ArgumentError
from llamac.progress import Progress
from llamac.sources.loading import load


def replay(
    receipt: Receipt | Mapping[str, Any] | StrPath,
    model: Model | StrPath | None = None,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> Replay:
    """Repeat a result from its receipt, and compare the two.

    Args:
        receipt: A receipt, the object that `Receipt.as_dict` returns, or a file with its JSON.
        model: An opened model; or anything that `load` opens. Default: what the receipt's model was opened from.
        cache_dir: As for `load`.
        progress: As for `load`.

    Returns:
        The repeated result, and what differs from the receipt. A different model is not an error.

    Raises:
        ArgumentError: If the receipt is damaged or of a newer version; or if it does not say how its model was opened.
        LlamacError: As for `load`.
        OSError: If the receipt or the model cannot be read.
    """
    found = read_receipt(receipt)
    if isinstance(model, Model):
        return replay_on(model, found)
    if not isinstance(model, str | os.PathLike | None):
        raise wrong_type("model", model, "a Model, a path or None")
    with load(source_of(found) if model is None else model, cache_dir=cache_dir, progress=progress) as opened:
        return replay_on(opened, found)


def source_of(receipt: Receipt) -> str:
    """What the model of a receipt was opened from.

    Raises:
        ArgumentError: If the receipt does not say it, or if it had adapters, which the receipt cannot name.
    """
    if receipt.model.adapters is not None:
        raise ArgumentError("the receipt's model had LoRA adapters: name the model, with the same adapters")
    if not receipt.model.source:
        raise ArgumentError("the receipt does not say where its model is: name the model")
    return receipt.model.source
