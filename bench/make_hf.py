"""Write a Hugging Face folder with random weights, which transformers loads and other engines convert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.shapes import SHAPES, Shape, random_checkpoint
from llamac.export.hf.write import write_hf


def make_hf(name: str, dtype: str, out: Path, *, shape: Shape | None = None) -> None:
    """Write the folder, which must be missing or empty. `shape` overrides the dimensions that `name` stands for."""
    shape = shape or SHAPES[name]
    write_hf(random_checkpoint(name, shape), out, dtype)
    # CTranslate2's converter needs a vocabulary: one word per id
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
