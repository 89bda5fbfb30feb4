"""What can be wrong with a model file: changes of its checkpoint, any of which may explain a difference.

Each suspect is a sentence about the file, and the checkpoint without that fault. `causes` tries them. Those of the
config, of tensors in the wrong place, of norms, and of what is outside the layers are here; those of attention, of
recurrent layers and of feed-forward networks have a file each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np

from llamac.errors import LlamacError
from llamac.export import pooling
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.hf.config import parse_config
from llamac.export.parity.changes import (
    MATRICES,
    Suspect,
    configured,
    elsewhere,
    same,
    text_of,
    transposed,
    with_changed,
    with_record,
)
from llamac.export.parity.stages import OF_TEXT, OUTSIDE, Key
from llamac.export.parity.suspects_attention import of_attention, of_matrices, of_rope
from llamac.export.parity.suspects_ffn import of_branches, of_ffn, of_placements
from llamac.export.parity.suspects_recurrent import of_states
from llamac.export.parity.tensor_differences import TensorDifferences

SIZES = ("dim", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "n_token_ids", "context", "rope_dim")
OF_TENSORS = ("layer_scale",)  # fields of a layer that config.json does not give
EPS = (1e-5, 1e-6, 1e-12, 1e-8)
MOST_NAMED = 4  # tensors in a sentence
OF_LATENTS = {"attn_q_a_norm", "attn_kv_a_norm"}
SHIFTS = (-4, -3, -2, -1, 1, 2, 3, 4)  # of positions; RoBERTa's are off by its padding token's id + 1
NORMS = {
    "attn_norm": ("attn_norm",),
    "q": ("attn_q_norm", "attn_q_a_norm"),
    "k": ("attn_k_norm", "attn_kv_a_norm"),
    "v": ("attn_kv_a_norm",),
    "attn_mix": ("delta_norm", "mamba_norm"),
    "ffn_norm": ("ffn_norm", "attn_post_norm"),
    "block": ("ffn_post_norm", "attn_post_norm"),
    "output_norm": ("output_norm",),
}


def suspects(checkpoint: Checkpoint, key: Key, config: dict[str, Any]) -> Iterator[Suspect]:
    """Yield what may be wrong with the part of a file that computes a stage, the most specific faults first.

    Args:
        checkpoint: The file.
        key: The first stage that differs.
        config: The model's config.json; {} if it is unknown.
    """
    stage, layer = key
    yield from _of_config(checkpoint, layer, config)
    if stage not in (*OUTSIDE, *OF_TEXT):
        yield from _of_layers(checkpoint, stage, layer)
    if stage in NORMS:
        yield from _of_norms(checkpoint, stage, layer)
        yield from _of_other_norms(checkpoint, stage, layer)
    if stage in MATRICES:
        yield from of_matrices(checkpoint, stage, layer)
    if stage in ("q", "k", "cache_k"):
        yield from of_rope(checkpoint, stage, layer)
    if stage in ("weights", "attn_mix"):
        mixer = checkpoint.config.layers[layer].mixer
        if mixer.startswith("attention"):
            yield from of_attention(checkpoint, layer)
        if mixer != "attention":
            yield from of_states(checkpoint, layer)
    if stage == "ffn":
        yield from of_ffn(checkpoint, layer)
    if stage in ("ffn_norm", "block"):
        yield from of_branches(checkpoint, layer)
    if stage in ("attn_norm", "ffn_norm", "block"):
        yield from of_placements(checkpoint, layer)
    if stage == "embedding":
        yield from _of_embedding(checkpoint)
    if stage == "logits":
        yield from _of_output(checkpoint)
    if stage in OF_TEXT:
        yield from _of_pooling(checkpoint)


def of_original(checkpoint: Checkpoint, key: Key, original: Checkpoint) -> Iterator[Suspect]:
    """Yield the tensors of a stage's part that differ from those that the exporter reads from the original now."""
    different = _different(checkpoint, key, original)
    for name, how in different.how.items():
        text = f"the tensor {name} differs from the directory's: {how}"
        yield Suspect(text, _restored(checkpoint, original, [name]))


def all_of_original(checkpoint: Checkpoint, key: Key, original: Checkpoint) -> Iterator[Suspect]:
    """Yield these tensors as one suspect, if they are several or the file lacks one."""
    different = _different(checkpoint, key, original)
    names = sorted(different.how, key=different.is_rounded)  # rounding explains least
    if len(names) > 1 or not checkpoint.tensors.keys() >= set(names):
        text = "; ".join(f"{name}: {different.how[name]}" for name in names[:MOST_NAMED])
        count = f"{len(names)} tensors differ" if len(names) > 1 else "a tensor differs"
        text = f"{count} from the directory's: {text}" + "; ..." * (len(names) > MOST_NAMED)
        yield Suspect(text, _restored(checkpoint, original, names))


def _different(checkpoint: Checkpoint, key: Key, original: Checkpoint) -> TensorDifferences:
    """The tensors of a stage's part that differ from the original's."""
    stage, layer = key
    outside = stage in (*OUTSIDE, *OF_TEXT)
    part = [
        name
        for name in original.tensors
        if name.startswith("layers.") != outside and (outside or name.startswith(f"layers.{layer}."))
    ]
    return TensorDifferences(checkpoint.tensors, original.tensors, part)


def _restored(checkpoint: Checkpoint, original: Checkpoint, names: Iterable[str]) -> Checkpoint:
    """The checkpoint with the original's tensors of these names. Logits with a matrix of their own use it."""
    tensors = checkpoint.tensors | {name: original.tensors[name] for name in names}
    config = checkpoint.config
    if "output.weight" in tensors and "output.weight" not in checkpoint.tensors:
        config = replace(config, tied_output=original.config.tied_output)
    return replace(checkpoint, config=config, tensors=tensors)


# ---- the config


def _of_config(checkpoint: Checkpoint, layer: int, config: dict[str, Any]) -> Iterator[Suspect]:
    """Each number of the file's config that config.json gives differently."""
    try:
        parsed = parse_config(config, [])
    except (LlamacError, KeyError):
        return
    ours, theirs = checkpoint.config, parsed.model
    for field in fields(ModelConfig):
        own, other = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name not in (*SIZES, "layers", "tied_output") and not same(own, other):
            text = f"{field.name} is {text_of(own)} in the file; config.json gives {text_of(other)}"
            yield Suspect(text, configured(checkpoint, **{field.name: other}))
    if layer < min(len(ours.layers), len(theirs.layers)):
        for field in fields(LayerConfig):
            own, other = getattr(ours.layers[layer], field.name), getattr(theirs.layers[layer], field.name)
            if field.name not in OF_TENSORS and not same(own, other):
                text = (
                    f"{field.name} of layer {layer} is {text_of(own)} in the file; config.json gives {text_of(other)}"
                )
                yield Suspect(text, with_record(checkpoint, layer, **{field.name: other}))
    for table, rope in enumerate(parsed.ropes):
        name = f"rope.{table}.inv_freq"
        own = checkpoint.tensors.get(name)
        if own is not None and not (
            own.shape == rope.inv_freq.shape and np.allclose(own.array(), rope.inv_freq, rtol=1e-6)
        ):
            tensors = checkpoint.tensors | {name: LazyTensor.of(rope.inv_freq)}
            if rope.inv_freq_long is not None:
                tensors[f"{name}_long"] = LazyTensor.of(rope.inv_freq_long)
            text = f"RoPE's frequencies ({name}) are not those of config.json (rope_theta, rope_scaling)"
            yield Suspect(text, replace(checkpoint, tensors=tensors))


# ---- the stages


def _of_layers(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    """All tensors of another layer, as in a file whose layers are in the order of their names (1, 10, 2).

    Beyond a layer's first stage, only those of the layers next to it are tried: reading a layer's matrices takes time.
    """
    n_layers, shapes = len(checkpoint.config.layers), _shapes(checkpoint, layer)
    for other in range(n_layers) if stage == "attn_norm" else (layer - 1, layer + 1):
        if other != layer and 0 <= other < n_layers and _shapes(checkpoint, other) == shapes:
            tensors = checkpoint.tensors
            moved = {f"layers.{layer}.{part}": tensors[f"layers.{other}.{part}"] for part in shapes}
            back = {f"layers.{other}.{part}": tensors[f"layers.{layer}.{part}"] for part in shapes}
            text = f"the tensors of layers {layer} and {other} are exchanged"
            yield Suspect(text, replace(checkpoint, tensors=tensors | moved | back))
            text = f"the tensors of layer {layer} are another layer's: the right ones are in layer {other}"
            yield Suspect(text, replace(checkpoint, tensors=tensors | moved))


def _shapes(checkpoint: Checkpoint, layer: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors."""
    start = f"layers.{layer}."
    found = ((name, tensor) for name, tensor in checkpoint.tensors.items() if name.startswith(start))
    return {name.removeprefix(start): tensor.shape for name, tensor in found}


def _of_norms(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    eps = checkpoint.config.norm_eps
    for module in NORMS[stage]:
        name = f"{module}.weight" if module == "output_norm" else f"layers.{layer}.{module}.weight"
        if name in checkpoint.tensors:
            text = f"{name} lacks + 1: the original stores the norm's weight minus one"
            yield Suspect(text, with_changed(checkpoint, name, lambda weight: weight + 1))
            text = f"{name} has + 1, which the original does not add"
            yield Suspect(text, with_changed(checkpoint, name, lambda weight: weight - 1))
    for other in dict.fromkeys((*EPS, *(float(f"{factor * eps:.6g}") for factor in (10, 0.1)))):
        if not same(eps, other):
            yield Suspect(f"norm_eps is {eps:.6g}; it should be {other:g}", configured(checkpoint, norm_eps=other))
    if checkpoint.config.norm == "layer":
        yield Suspect("the norm is LayerNorm; it should be RMSNorm", configured(checkpoint, norm="rms"))
    if OF_LATENTS & set(NORMS[stage]) and checkpoint.config.layers[layer].kv_lora_rank:
        eps = checkpoint.config.layers[layer].latent_norm_eps
        for other in EPS:
            if not same(eps, other):
                text = f"latent_norm_eps of layer {layer} is {eps:.6g}; it should be {other:g}"
                yield Suspect(text, with_record(checkpoint, layer, latent_norm_eps=other))


def _of_other_norms(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    """Weights of norms in the wrong place: another norm's of the layer, or the same norm's of a layer next to it."""
    tensors, prefix = checkpoint.tensors, f"layers.{layer}."
    own = [f"{prefix}{module}" for module in NORMS[stage] if f"{prefix}{module}.weight" in tensors]
    others = [
        name.removesuffix(".weight") for name in tensors if name.startswith(prefix) and name.endswith("norm.weight")
    ]
    for module in own:
        kind = module.removeprefix(prefix)
        neighbors = (f"layers.{other}.{kind}" for other in (layer - 1, layer + 1))
        for other in (*others, *neighbors):
            if other != module and not (other in own and other < module):
                yield from elsewhere(checkpoint, module, other)


def _of_embedding(checkpoint: Checkpoint) -> Iterator[Suspect]:
    config = checkpoint.config
    for scale in (1.0, config.dim**0.5):
        if not same(scale, config.embedding_scale):
            text = f"embedding_scale is {config.embedding_scale:.6g}; it should be {scale:.6g}"
            yield Suspect(text, configured(checkpoint, embedding_scale=scale))
    yield from _of_rows(checkpoint, "token_embedding.weight")
    if config.position == "learned":
        for shift in SHIFTS:
            text = f"position_embedding is off by {abs(shift)}: position p has the row of position p {_signed(shift)}"
            change = lambda rows, shift=shift: np.roll(rows, shift, axis=0)  # noqa: E731
            yield Suspect(text, with_changed(checkpoint, "position_embedding.weight", change))
    for shift in range(1, config.n_types):
        text = f"the rows of type_embedding are in another order: type t has the row of type t {_signed(shift)}"
        change = lambda rows, shift=shift: np.roll(rows, shift, axis=0)  # noqa: E731
        yield Suspect(text, with_changed(checkpoint, "type_embedding.weight", change))
    if config.n_types > 1:
        text = "the types of the tokens are wrong: all tokens should be of type 0"
        of_type_0 = lambda rows: np.repeat(rows[:1], len(rows), axis=0)  # noqa: E731
        yield Suspect(text, with_changed(checkpoint, "type_embedding.weight", of_type_0))


def _of_rows(checkpoint: Checkpoint, name: str) -> Iterator[Suspect]:
    """The rows of a table of tokens off by some. Only rows of the prompt's tokens are read."""
    table = checkpoint.tensors[name]
    for shift in SHIFTS:
        order = np.roll(np.arange(table.shape[0]), shift)
        text = f"the rows of {name} are off by {abs(shift)}: token t has the row of token t {_signed(shift)}"
        yield Suspect(text, replace(checkpoint, tensors=checkpoint.tensors | {name: table.in_order(order)}))


def _signed(number: int) -> str:
    """A number to add to another one, with a space after its sign."""
    return f"{'-' if number < 0 else '+'} {abs(number)}"


def _of_output(checkpoint: Checkpoint) -> Iterator[Suspect]:
    config = checkpoint.config
    if not same(config.logit_scale, 1.0):
        text = f"logit_scale is {config.logit_scale:.6g}; it should be 1"
        yield Suspect(text, configured(checkpoint, logit_scale=1.0))
    if config.logit_soft_cap:
        text = f"logits are capped at {config.logit_soft_cap:g}; they should not be"
        yield Suspect(text, configured(checkpoint, logit_soft_cap=0.0))
    if not config.tied_output:
        yield from _of_rows(checkpoint, "output.weight")
        yield Suspect("output.weight should be the embedding's matrix", configured(checkpoint, tied_output=True))


def _of_pooling(checkpoint: Checkpoint) -> Iterator[Suspect]:
    """How the outputs of all tokens become one, and what follows."""
    config, own = checkpoint.config, checkpoint.metadata.get(pooling.METADATA_KEY, "last")
    has_late = config.scores_pairs and config.pooled_activation
    for name in pooling.POOLINGS:
        if name != own and (name != "late" or has_late):
            metadata = checkpoint.metadata | {pooling.METADATA_KEY: name}
            yield Suspect(f"the pooling is {own}; it should be {name}", replace(checkpoint, metadata=metadata))
    activations = config.pooled_activation
    for index, activation in enumerate(activations):
        weight = f"pooled.{index}.weight"
        yield Suspect(f"{weight} is transposed", with_changed(checkpoint, weight, transposed))
        for name in pooling.ACTIVATIONS:
            if name != activation:
                text = f"the activation after {weight} is {activation}; it should be {name}"
                changed = (*activations[:index], name, *activations[index + 1 :])
                yield Suspect(text, configured(checkpoint, pooled_activation=changed))
