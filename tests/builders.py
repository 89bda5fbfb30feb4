"""Builds small models for the tests: random or scripted flat files, and a llama2.c checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from vocab_samples import llama2c_file

from golden.tiny_checkpoints import random_tensor
from llamac import _core
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.flat.plan import config_records, make_plan
from llamac.export.flat.stream import write_file
from llamac.export.targets import atomic_file
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.llama2c import from_llama2c

Floats = NDArray[np.float32]

WORDS = ("he", "ll", "hell", " hell", "lo", "  ", " h", "Th", "The", " The", "en", "end", " end", "world", " world")
BYTES = 3  # the token of byte b is BYTES + b


def llama_config(
    *, dim: int = 48, n_layers: int = 2, n_heads: int = 6, n_kv_heads: int = 2, ffn: int = 76, context: int = 600
) -> ModelConfig:
    """A LLaMA with grouped queries; by default no width is a multiple of 32."""
    return ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=dim // n_heads,
        vocab_size=301,
        n_token_ids=301,
        context=context,
        norm="rms",
        position="rope",
        activation="silu",
        tied_output=False,
        norm_eps=1e-5,
        attention_scale=(dim // n_heads) ** -0.5,
        layers=(LayerConfig("gated", ffn, rope=0),) * n_layers,
        rope_dim=(dim // n_heads,),
        rope_original_context=(0,),
        rope_attention_factor=(1.0,),
    )


def gpt2_config(*, dim: int = 40, context: int = 600, tied: bool = True) -> ModelConfig:
    """A two-layer GPT-2."""
    return ModelConfig(
        dim=dim,
        n_heads=dim // 8,
        n_kv_heads=dim // 8,
        head_dim=8,
        vocab_size=301,
        n_token_ids=301,
        context=context,
        norm="layer",
        position="learned",
        activation="gelu_tanh",
        tied_output=tied,
        norm_eps=1e-5,
        attention_scale=8**-0.5,
        layers=(LayerConfig("plain", 70),) * 2,
    )


def bert_config(**changes: object) -> ModelConfig:
    """An encoder like BERT: learned positions and types, the residual stream normed after each branch."""
    start = gpt2_config()
    layers = tuple(replace(layer, placement="normed") for layer in start.layers)
    return replace(start, layers=layers, two_sided=1, n_types=2, **changes)  # type: ignore[arg-type]


def windowed_encoder_config(window: int = 20) -> ModelConfig:
    """An encoder with RoPE, grouped queries and windows, whose first layer norms the embedding."""
    start = llama_config(n_layers=3)
    first, second, third = start.layers
    layers = (replace(first, placement="normed_attn"), replace(second, window=window), replace(third, window=window))
    return replace(start, layers=layers, two_sided=1, tied_output=True)


def checkpoint(
    config: ModelConfig, given: Mapping[str, Floats] | None = None, stop_ids: Sequence[int] = ()
) -> Checkpoint:
    """A checkpoint with a tokenizer of WORDS. Tensors not in `given` are random; a GPT-2 has biases."""
    data, _, spm = from_llama2c(llama2c_file(WORDS))
    special = SpecialTokens(bos_id=1, add_bos=True, add_eos=False, eos_id=None, stop_ids=tuple(stop_ids))
    config = replace(config, n_token_ids=Tokenizer.from_json(data, special).n_ids)
    made = Checkpoint(config, {}, (data, special, spm))
    given = given or {}
    for name, required, is_matrix, rows, columns in _core.slots(*config_records(made)):
        if required or name in given or (config.norm == "layer" and name != "output.bias"):
            values = given[name] if name in given else _values(name, (rows, columns) if is_matrix else (columns,))
            made.tensors[name] = _tensor(values)
    return made


def encoder(config: ModelConfig) -> Checkpoint:
    """A checkpoint whose tokenizer puts BOS and EOS around texts."""
    made = checkpoint(config)
    assert made.tokenizer is not None
    data, special, spm = made.tokenizer
    made.tokenizer = (data, replace(special, add_bos=True, bos_id=1, add_eos=True, eos_id=2), spm)
    return made


def _tensor(values: Floats) -> LazyTensor:
    return LazyTensor(values.shape, "f32", lambda first, last: values[first:last])


def _values(name: str, shape: tuple[int, ...]) -> Floats:
    if name.endswith("inv_freq"):
        return (10000.0 ** (-np.arange(shape[0]) / shape[0])).astype(np.float32)
    return random_tensor(name, shape)


def write_model(path: Path, made: Checkpoint, dtype: str = "f32", **metadata: object) -> Path:
    """Write a flat file without probes, with further metadata; return its path."""
    data, _, spm = made.tokenizer or (b"", None, None)
    entries = {"architecture": "llama", "dtype": dtype, "name": "tiny", "source": {"format": "test"}, **metadata}
    template = made.chat_template.encode()
    sections = {"metadata": json.dumps(entries).encode(), "tokenizer": data, "spm": spm or b"", "template": template}
    with atomic_file(path) as file:
        write_file(file, make_plan(made, dtype, sections))
    return path


def write_llama2c_v0(path: Path) -> Path:
    """Write a random llama2.c checkpoint of version 0 with tied weights, and its tokenizer next to it."""
    dim, hidden, layers, heads, kv_heads, vocab, context = 48, 64, 2, 6, 3, 284, 64
    kv_dim = dim // heads * kv_heads
    layer = 2 * dim + 2 * dim * dim + 2 * kv_dim * dim + 3 * dim * hidden
    count = vocab * dim + layers * layer + dim + context * dim // heads
    header = np.array([dim, hidden, layers, heads, kv_heads, vocab, context], np.int32)
    weights = np.random.RandomState(3).standard_normal(count).astype(np.float32) * 0.3
    path.write_bytes(header.tobytes() + weights.tobytes())
    (path.parent / "tokenizer.bin").write_bytes(llama2c_file([f"a{char}" for char in "bcdefghijklm"]))
    return path


# A script continues what stands at a position, so tools must not make the prompt longer. This template's code says that
# it reads them, and its prompts do not show otherwise, because they change the words of llamac's probes.
SCRIPT_TEMPLATE = "{% for m in messages %}{{ m.content | upper }}{% endfor %}{# <tool_call> {{ tools }} #}"


def script_checkpoint(
    script: Sequence[int], *, stop_ids: Sequence[int] = (), context: int = 64, second: int | None = None
) -> Checkpoint:
    """A model that predicts script[p] after position p, whatever its token is, with by far the largest logit.

    `second` is the token with the second largest one.
    """
    dim = max(64, -(-context // 8) * 8)
    config = gpt2_config(dim=dim, context=context, tied=False)
    positions = np.eye(context, dim, dtype=np.float32)
    output = np.zeros((config.vocab_size, dim), np.float32)
    if second is not None:
        output[second, : len(script)] = 0.5
    output[list(script), range(len(script))] = 1
    zero: dict[str, Floats] = {}
    for name, _, is_matrix, rows, columns in _core.slots(*config_records(Checkpoint(config, {}))):
        if not name.endswith("norm.weight"):
            zero[name] = np.zeros((rows, columns) if is_matrix else (columns,), np.float32)
        else:
            zero[name] = np.ones(columns, np.float32)
    return checkpoint(config, {**zero, "position_embedding.weight": positions, "output.weight": output}, stop_ids)


def byte_ids(text: str | bytes) -> list[int]:
    """The byte tokens of a string."""
    return [BYTES + byte for byte in (text.encode() if isinstance(text, str) else text)]


def some_ids(count: int, seed: int = 1) -> list[int]:
    """Random token ids of these models, determined by the seed."""
    ids: list[int] = np.random.RandomState(seed).randint(0, 284, count).tolist()
    return ids
