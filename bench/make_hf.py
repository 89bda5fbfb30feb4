"""Writes a Hugging Face folder with random weights: what transformers loads and CTranslate2 converts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, Shape, random_checkpoint
from llamac.export.hf.write import write_hf


def make_hf(name: str, dtype: str, out: Path, *, shape: Shape | None = None) -> None:
    """Writes the folder, which must not exist or be empty. shape: other dimensions than the name's."""
    shape = shape or SHAPES[name]
    write_hf(random_checkpoint(name, shape), out, dtype)
    # CTranslate2's converter asks for a vocabulary: a word for each id
    words = {f"t{i}": i for i in range(shape.vocabulary)}
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "t0")
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    rules = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (out / "tokenizer_config.json").write_text(json.dumps(rules))
