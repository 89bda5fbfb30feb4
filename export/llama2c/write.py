"""Writes llama2.c's checkpoint version 0 (float32, no magic number), with tokenizer.bin in the same folder.

The format can express only a LLaMA with RMSNorm (epsilon 1e-5), SiLU gates, RoPE with theta 10000 over whole heads, and
no biases. Anything else raises an error that lists the differences. As in llama2.c's own export, RoPE's rows are
interleaved pairs, and its cosines and sines are stored for all positions.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from llamac.errors import ArgumentError, ExportError, TokenizerError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.flat.packing import checked_chunks
from llamac.export.flat.plan import matching_tensors
from llamac.export.llama2c.model import NORM_EPS, ROPE_THETA, halves, inverse_frequencies, reordered
from llamac.export.probes import PROMPTS
from llamac.export.targets import atomic_file, check_replaceable, check_space
from llamac.progress import Progress, silent
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.llama2c import from_llama2c
from llamac.text.vocabulary.load import Vocabulary, to_llama2c

TOKENIZER = "tokenizer.bin"


def write_llama2c(
    checkpoint: Checkpoint, out: Path, warnings: list[str], progress: Progress = silent, *, overwrite: bool = False
) -> int:
    """Write `out` and, if the checkpoint has a tokenizer, tokenizer.bin in the same folder. Returns their total size.

    Args:
        checkpoint: The model.
        out: The model file.
        warnings: Gets a message if a tokenizer.bin is replaced.
        progress: Called with the phase "writing" and byte counts.
        overwrite: Replace an existing tokenizer.bin with other content, with a warning.

    Raises:
        UnsupportedError: Lists everything that llama2.c cannot express.
    """
    vocabulary = _vocabulary(checkpoint)
    tokenizer_path = out.parent / TOKENIZER
    if vocabulary and out.name == TOKENIZER:
        raise ArgumentError(f"{out} is the name of llama2.c's tokenizer: choose another name for the model")
    check_replaceable(tokenizer_path)
    if vocabulary and tokenizer_path.exists() and tokenizer_path.read_bytes() == vocabulary:
        vocabulary = b""
    if vocabulary and tokenizer_path.exists() and not overwrite:
        raise ExportError(
            f"{tokenizer_path} is the tokenizer of another model: choose another folder, or allow overwriting (--force)"
        )
    tensors = list(_in_order(checkpoint.config, matching_tensors(checkpoint)))
    size = 28 + sum(4 * int(np.prod(tensor.shape)) for _, tensor in tensors)
    check_space(out, size + len(vocabulary))
    if vocabulary and tokenizer_path.exists():
        warnings.append(f"{tokenizer_path} was the tokenizer of another model and has been replaced")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(atomic_file(out))
        if vocabulary:  # contexts exit in reverse order: the tokenizer gets its name before the model does
            stack.enter_context(atomic_file(tokenizer_path)).write(vocabulary)
        progress("writing", 0, size)
        done = file.write(_header(checkpoint.config))
        for name, tensor in tensors:
            for rows in checked_chunks(name, tensor, "f32"):
                done += file.write(np.ascontiguousarray(rows, "<f4").tobytes())
                progress("writing", done, size)
    return size + len(vocabulary)


def _vocabulary(checkpoint: Checkpoint) -> bytes:
    """tokenizer.bin for a checkpoint; empty without a tokenizer. UnsupportedError if llama2.c has no form for it."""
    _check_family(checkpoint.config)
    problems = list(_problems(checkpoint))
    data = b""
    if checkpoint.tokenizer is not None:
        try:
            data = to_llama2c(Vocabulary(*checkpoint.tokenizer))
            problems += _other_tokens(checkpoint, data)
        except (ExportError, TokenizerError) as error:
            problems.append(str(error))
    if problems:
        raise UnsupportedError("llama2.c's format cannot express this model:\n  " + "\n  ".join(problems))
    return data


def _check_family(config: ModelConfig) -> None:
    """Reject models that are not LLaMA with one line instead of one per tensor."""
    wanted = {"norm": "rms", "position": "rope", "activation": "silu"}
    others = [f"{name} {getattr(config, name)}" for name, value in wanted.items() if getattr(config, name) != value]
    others += [f"ffn {kind}" for kind in sorted({layer.ffn for layer in config.layers} - {"gated"})]
    if others:
        raise UnsupportedError(f"llama2.c's format supports only LLaMA models; this one has {', '.join(others)}")


def _problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Differences between this config and llama2.c's computation."""
    config = checkpoint.config
    if np.float32(config.norm_eps) != np.float32(NORM_EPS):
        yield f"norm_eps is {config.norm_eps:.6g}, llama2.c has {NORM_EPS:g}"
    if config.n_heads * config.head_dim != config.dim:
        yield f"n_heads * head_dim is {config.n_heads * config.head_dim}, but llama2.c requires dim ({config.dim})"
    if not np.isclose(config.attention_scale, config.head_dim**-0.5, rtol=1e-6, atol=0):
        yield f"attention_scale is {config.attention_scale:.6g}, llama2.c has 1/sqrt({config.head_dim})"
    for field in fields(ModelConfig):  # llama2.c supports only the neutral defaults of scales and caps
        if isinstance(field.default, float) and getattr(config, field.name) != field.default:
            yield f"{field.name} is {getattr(config, field.name):.6g}, llama2.c has {field.default:g}"
    if config.n_token_ids != config.vocab_size:
        yield f"the tokenizer has {config.n_token_ids} ids, but llama2.c requires {config.vocab_size}, one per logit"
    usual = LayerConfig("gated", config.layers[0].ffn_dim, rope=0)
    layers = [
        f"layer {index} has {_differences(layer, usual)}" for index, layer in enumerate(config.layers) if layer != usual
    ]
    if layers:
        yield f"{_first_of(layers)}: llama2.c's layers are gated, of one width, with RoPE and nothing else"
    yield from _rope_problems(checkpoint)
    biases = [name for name in checkpoint.tensors if name.endswith(".bias")]
    if biases:
        yield f"{_first_of(biases)}: llama2.c has no biases"
    special = checkpoint.tokenizer[1] if checkpoint.tokenizer else None
    if special and not special.add_bos:
        yield "add_bos is off, but llama2.c starts every prompt with BOS"


def _differences(layer: LayerConfig, usual: LayerConfig) -> str:
    """The fields of a layer that differ from the usual layer's, with their values."""
    names = [field.name for field in fields(LayerConfig) if getattr(layer, field.name) != getattr(usual, field.name)]
    return ", ".join(f"{name} {getattr(layer, name)}" for name in names)


def _first_of(problems: list[str]) -> str:
    return problems[0] if len(problems) == 1 else f"{problems[0]} (and {len(problems) - 1} more)"


def _rope_problems(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    if config.rope_dim != (config.head_dim,):
        yield f"rope_dim is {config.rope_dim}, llama2.c rotates all {config.head_dim} dimensions of a head"
    elif config.rope_original_context != (0,) or config.rope_attention_factor != (1.0,):
        yield "RoPE has a second table or an attention factor, llama2.c has neither"
    elif not np.allclose(
        checkpoint.tensors["rope.0.inv_freq"].array(), inverse_frequencies(config.head_dim), rtol=1e-6, atol=0
    ):
        yield f"the RoPE frequencies are not llama2.c's, theta {ROPE_THETA:g} without scaling"


def _other_tokens(checkpoint: Checkpoint, data: bytes) -> Iterator[str]:
    """Strings that llama2.c encodes differently. (It always prepends a space, for example.)"""
    assert checkpoint.tokenizer is not None
    vocabulary = from_llama2c(data)
    theirs = Tokenizer.from_json(vocabulary.json, vocabulary.special)
    ours = Tokenizer.from_json(*checkpoint.tokenizer[:2])
    for text in PROMPTS:
        if ours.encode(text) != theirs.encode(text):
            yield f"llama2.c's tokenizer encodes {text!r} differently"
            return


def _header(config: ModelConfig) -> bytes:
    vocab_size = config.vocab_size if config.tied_output else -config.vocab_size
    widths = (config.dim, config.layers[0].ffn_dim, len(config.layers))
    return struct.pack("<7i", *widths, config.n_heads, config.n_kv_heads, vocab_size, config.context)


def _in_order(config: ModelConfig, tensors: dict[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """The file's tensors with their canonical names; the layers of one kind are consecutive."""

    def layers(kinds: Iterable[str]) -> Iterator[tuple[str, LazyTensor]]:
        for kind in kinds:
            for index in range(len(config.layers)):
                name = f"layers.{index}.{kind}.weight"
                tensor = tensors[name]
                if kind in ("attn_q", "attn_k"):
                    tensor = replace(tensor, read=reordered(tensor.read, np.argsort(halves(config.head_dim))))
                yield name, tensor

    yield "token_embedding.weight", tensors["token_embedding.weight"]
    yield from layers(("attn_norm", "attn_q", "attn_k", "attn_v", "attn_out"))
    yield from layers(("ffn_norm", "ffn_gate", "ffn_down", "ffn_up"))
    yield "output_norm.weight", tensors["output_norm.weight"]
    # in float64: the last bit of NumPy's float32 functions depends on the processor
    angles = np.outer(np.arange(config.context, dtype=np.float64), inverse_frequencies(config.head_dim))
    for name, table in (("freq_cis_real", np.cos(angles)), ("freq_cis_imag", np.sin(angles))):
        yield name, LazyTensor.of(table.astype(np.float32))
    if not config.tied_output:
        yield "output.weight", tensors["output.weight"]
