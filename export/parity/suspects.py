"""What can be wrong with a model file: changes of its checkpoint, any of which may explain a difference.

Each suspect is a sentence about the file, and the checkpoint without that fault. `causes` tries them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import LlamacError
from llamac.export import pooling
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.equations import ACTIVATIONS
from llamac.export.hf.config import parse_config
from llamac.export.parity.stages import OF_TEXT, OUTSIDE, Key
from llamac.export.parity.tensor_differences import TensorDifferences

Floats = NDArray[np.float32]
Change = Callable[[Floats], Floats]

SIZES = ("dim", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "n_token_ids", "context", "rope_dim")
OF_TENSORS = ("layer_scale",)  # fields of a layer that config.json does not give
EPS = (1e-5, 1e-6, 1e-12, 1e-8)
MOST_NAMED = 4  # tensors in a sentence
THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)
QKV = ("attn_q", "attn_k", "attn_v")
OF_LATENTS = {"attn_q_a_norm", "attn_kv_a_norm"}
SHIFTS = (-4, -3, -2, -1, 1, 2, 3, 4)  # of positions; RoBERTa's are off by its padding token's id + 1
# How a layer with one norm before each branch can be computed.
PLACEMENTS = {
    "pre": "one after the other, with norms of their inputs (pre-norm)",
    "parallel": "in parallel",
    "normed": "one after the other, each added to the normed residual stream (post-norm)",
    "normed_attn": "one after the other, attention alone added to the normed residual stream",
}
# What decides each stage, besides the stages before it.
MATRICES = {
    "q": ("attn_q", "attn_q_a", "attn_k_b"),
    "k": ("attn_k", "attn_kv_a"),
    "cache_k": ("attn_k", "attn_kv_a"),
    "v": ("attn_v", "attn_kv_a"),
    "cache_v": ("attn_v", "attn_kv_a"),
    "attn_mix": ("attn_v_b", "attn_gate", "delta_qkv", "delta_z", "mamba_xbc", "mamba_z", "conv_in"),
    "attn_out": ("attn_out", "delta_out", "mamba_out", "conv_out"),
    "ffn": ("ffn_gate", "ffn_up", "ffn_down", "ffn_router", "shared_ffn_gate", "shared_ffn_up", "shared_ffn_down"),
}
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

# The vectors of recurrent layers with a number per head.
OF_HEADS = ("mamba_skip.weight", "mamba_step.bias", "mamba_decay.weight", "delta_dt.bias", "delta_decay.weight")


@dataclass(frozen=True)
class Suspect:
    """A possible fault.

    Attributes:
        sentence: What is wrong with the file.
        checkpoint: The file's checkpoint without the fault.
    """

    sentence: str
    checkpoint: Checkpoint


def suspects(checkpoint: Checkpoint, key: Key, config: dict[str, Any]) -> Iterator[Suspect]:
    """Yield what may be wrong with the part of a file that computes a stage, the most specific faults first.

    Args:
        checkpoint: The file.
        key: The first stage that differs.
        config: The model's config.json; {} if it is unknown.
    """
    stage, layer = key
    yield from _of_config(checkpoint, layer, config)
    if stage in NORMS:
        yield from _of_norms(checkpoint, stage, layer)
        yield from _of_other_norms(checkpoint, stage, layer)
    if stage in MATRICES:
        yield from _of_matrices(checkpoint, stage, layer)
    if stage in ("q", "k", "cache_k"):
        yield from _of_rope(checkpoint, layer)
    if stage in ("weights", "attn_mix"):
        mixer = checkpoint.config.layers[layer].mixer
        if mixer.startswith("attention"):
            yield from _of_attention(checkpoint, layer)
        if mixer != "attention":
            yield from _of_state(checkpoint, layer)
    if stage == "ffn":
        yield from _of_ffn(checkpoint, layer)
    if stage in ("ffn_norm", "block"):
        yield from _of_branches(checkpoint, layer)
    if stage in ("attn_norm", "ffn_norm", "block"):
        yield from _of_placements(checkpoint, layer)
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
    """The checkpoint with the original's tensors of these names."""
    return replace(checkpoint, tensors=checkpoint.tensors | {name: original.tensors[name] for name in names})


# ---- changes of a checkpoint


def _with(checkpoint: Checkpoint, names: str | tuple[str, ...], change: Change) -> Checkpoint:
    """The checkpoint with changed tensors; those that it does not have are left out."""
    tensors = dict(checkpoint.tensors)
    for name in (names,) if isinstance(names, str) else names:
        if name in tensors:
            tensors[name] = LazyTensor.of(np.ascontiguousarray(change(tensors[name].array()), np.float32))
    return replace(checkpoint, tensors=tensors)


def _configured(checkpoint: Checkpoint, **values: Any) -> Checkpoint:
    return replace(checkpoint, config=replace(checkpoint.config, **values))


def with_record(checkpoint: Checkpoint, layer: int, **values: Any) -> Checkpoint:
    """The checkpoint with other values in a layer's record."""
    layers = list(checkpoint.config.layers)
    layers[layer] = replace(layers[layer], **values)
    return _configured(checkpoint, layers=tuple(layers))


def _swapped(checkpoint: Checkpoint, one: str, other: str) -> Checkpoint:
    """The checkpoint with two modules' tensors exchanged."""
    tensors = dict(checkpoint.tensors)
    for kind in ("weight", "bias"):
        names = f"{one}.{kind}", f"{other}.{kind}"
        if all(name in tensors for name in names):
            tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]
    return replace(checkpoint, tensors=tensors)


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
        if field.name not in (*SIZES, "layers", "tied_output") and not _same(own, other):
            text = f"{field.name} is {_text(own)} in the file; config.json gives {_text(other)}"
            yield Suspect(text, _configured(checkpoint, **{field.name: other}))
    if layer < min(len(ours.layers), len(theirs.layers)):
        for field in fields(LayerConfig):
            own, other = getattr(ours.layers[layer], field.name), getattr(theirs.layers[layer], field.name)
            if field.name not in OF_TENSORS and not _same(own, other):
                text = f"{field.name} of layer {layer} is {_text(own)} in the file; config.json gives {_text(other)}"
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


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a config are equal as the file stores them, in float32."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return bool(np.float32(one) == np.float32(other))
    return bool(one == other)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# ---- the stages


def _of_norms(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    eps = checkpoint.config.norm_eps
    for module in NORMS[stage]:
        name = f"{module}.weight" if module == "output_norm" else f"layers.{layer}.{module}.weight"
        if name in checkpoint.tensors:
            text = f"{name} lacks + 1: the original stores the norm's weight minus one"
            yield Suspect(text, _with(checkpoint, name, lambda weight: weight + 1))
            text = f"{name} has + 1, which the original does not add"
            yield Suspect(text, _with(checkpoint, name, lambda weight: weight - 1))
    for other in dict.fromkeys((*EPS, *(float(f"{factor * eps:.6g}") for factor in (10, 0.1)))):
        if not _same(eps, other):
            yield Suspect(f"norm_eps is {eps:.6g}; it should be {other:g}", _configured(checkpoint, norm_eps=other))
    if checkpoint.config.norm == "layer":
        yield Suspect("the norm is LayerNorm; it should be RMSNorm", _configured(checkpoint, norm="rms"))
    if OF_LATENTS & set(NORMS[stage]) and checkpoint.config.layers[layer].kv_lora_rank:
        eps = checkpoint.config.layers[layer].latent_norm_eps
        for other in EPS:
            if not _same(eps, other):
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
        for other in (*others, *(name for name in neighbors if f"{name}.weight" in tensors)):
            shapes = {tensors[f"{name}.weight"].shape for name in (module, other)}
            if other == module or len(shapes) > 1 or (other in own and other < module):
                continue
            if other in own:
                text = f"{module} and {other} are exchanged"
                yield Suspect(text, _swapped(checkpoint, module, other))
                continue
            parts = [part for part in ("weight", "bias") if f"{module}.{part}" in tensors]
            if all(f"{other}.{part}" in tensors for part in parts):
                moved = {f"{module}.{part}": tensors[f"{other}.{part}"] for part in parts}
                text = f"{module} has the wrong numbers: the right ones are in {other}"
                yield Suspect(text, replace(checkpoint, tensors=tensors | moved))


def _of_matrices(checkpoint: Checkpoint, stage: str, layer: int) -> Iterator[Suspect]:
    prefix = f"layers.{layer}"
    for module in MATRICES[stage]:
        names = [name for name in checkpoint.tensors if _is_matrix(name, layer, module)]
        if names:
            what = f"{prefix}.{module}.weight" if len(names) == 1 else f"{module} of layer {layer}'s experts"
            text = f"{what} is transposed (a Conv1D's matrix is stored as (in, out))"
            yield Suspect(text, _with(checkpoint, tuple(names), _transposed))
    if set(MATRICES[stage]) & set(QKV):
        yield from _of_fused(checkpoint, layer)


def _is_matrix(name: str, layer: int, module: str) -> bool:
    """Whether a tensor is the matrix `module` of a layer, or of one of its experts."""
    start, end = f"layers.{layer}.", f".{module}.weight"
    return name == start + end[1:] or (name.startswith(f"{start}experts.") and name.endswith(end))


def _transposed(weight: Floats) -> Floats:
    """A matrix (out, in) whose numbers were stored in the order of (in, out)."""
    transposed: Floats = weight.reshape(weight.shape[1], weight.shape[0]).T
    return transposed


def _of_fused(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Faults in the division of a matrix that has queries, keys and values."""
    modules = [f"layers.{layer}.{module}" for module in QKV]
    if not all(f"{module}.weight" in checkpoint.tensors for module in modules):
        return
    matrices = [checkpoint.tensors[f"{module}.weight"].array() for module in modules]
    if len({matrix.shape[1] for matrix in matrices}) != 1:
        return
    whole = np.concatenate(matrices)
    bounds = np.cumsum([len(matrix) for matrix in matrices])[:-1]

    def divided(rows: Floats) -> Checkpoint:
        parts = zip(modules, np.split(rows, bounds), strict=True)
        return replace(
            checkpoint,
            tensors=checkpoint.tensors
            | {f"{module}.weight": LazyTensor.of(np.ascontiguousarray(part)) for module, part in parts},
        )

    text = f"the fused matrix of layer {layer}'s queries, keys and values is transposed (a Conv1D's is (in, out))"
    yield Suspect(text, divided(_transposed(whole)))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        if matrices[one].shape == matrices[other].shape:
            text = f"{modules[one]} and {modules[other]} are exchanged"
            yield Suspect(text, _swapped(checkpoint, modules[one], modules[other]))
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    heads, head_dim = record.n_heads or config.n_heads, record.head_dim or config.head_dim
    if len(whole) == 3 * heads * head_dim:
        fused = f"the fused matrix of layer {layer} was divided"
        text = f"{fused} in thirds; it holds queries, keys and values head by head"
        by_head = whole.reshape(heads, 3, head_dim, -1).transpose(1, 0, 2, 3).reshape(whole.shape)
        yield Suspect(text, divided(by_head))
        text = f"{fused} head by head; it holds all queries, then all keys, then all values"
        in_thirds = whole.reshape(3, heads, head_dim, -1).transpose(1, 0, 2, 3).reshape(whole.shape)
        yield Suspect(text, divided(in_thirds))


def _of_rope(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    yield from _of_pairs(checkpoint, layer)
    for table in range(-1, len(config.rope_dim)):
        if table != record.rope:
            text = f"layer {layer} " + ("has no RoPE" if record.rope < 0 else f"uses RoPE table {record.rope}")
            text += "; it should have none" if table < 0 else f"; it should use table {table}"
            yield Suspect(text, with_record(checkpoint, layer, rope=table))
    if record.rope >= 0:
        rope_dim, name = config.rope_dim[record.rope], f"rope.{record.rope}.inv_freq"
        for theta in THETAS:
            inv_freq = (theta ** -(np.arange(0, rope_dim, 2) / rope_dim)).astype(np.float32)
            text = f"RoPE's frequencies ({name}) should be the plain ones of rope_theta {theta:g}"
            yield Suspect(text, replace(checkpoint, tensors=checkpoint.tensors | {name: LazyTensor.of(inv_freq)}))
    if config.qk_norm != "none":
        after = not config.qk_norm_after_rope
        text = f"the norm of queries and keys comes {'before' if after else 'after'} RoPE; it should be the other way"
        yield Suspect(text, _configured(checkpoint, qk_norm_after_rope=int(after)))


def _of_pairs(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """The conventions of RoPE's pairs. The engine rotates (j, j + n / 2)."""
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    if record.rope < 0:
        return
    rope_dim = config.rope_dim[record.rope]
    neighbors = np.arange(rope_dim).reshape(-1, 2).T.reshape(-1) if rope_dim % 2 == 0 else np.arange(rope_dim)
    head_dim = record.head_dim or config.head_dim
    widths = {"attn_q": head_dim, "attn_k": head_dim}  # the rows of a head
    if record.kv_lora_rank:
        widths = {"attn_q": rope_dim + record.qk_nope_head_dim, "attn_kv_a": head_dim}
    for text, order in (
        ("are in neighboring pairs (2j, 2j + 1); the engine rotates halves (j, j + n / 2)", neighbors),
        ("were reordered from neighboring pairs, but the original's pairs are halves", np.argsort(neighbors)),
        ("have the halves of each pair exchanged", np.roll(np.arange(rope_dim), rope_dim // 2)),
    ):
        changed = checkpoint
        for module, width in widths.items():
            whole = np.concatenate([order, np.arange(rope_dim, width)])

            def reorder(rows: Floats, width: int = width, whole: NDArray[np.intp] = whole) -> Floats:
                return rows.reshape(-1, width, *rows.shape[1:])[:, whole].reshape(rows.shape)

            names = tuple(f"layers.{layer}.{module}.{kind}" for kind in ("weight", "bias"))
            changed = _with(changed, names, reorder)
        modules = " and ".join(widths)
        yield Suspect(f"wrong RoPE convention: the rows of {modules} of layer {layer} {text}", changed)


def _of_attention(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    window = record.window
    for other in (window - 1, window + 1):
        if window and other > 0:
            text = f"the window of layer {layer} is off by one: {window} positions; it should be {other}"
            yield Suspect(text, with_record(checkpoint, layer, window=other))
    for other in sorted({0, *(layer.window for layer in config.layers)} - {window}):
        text = f"layer {layer} has {_window(window)}; it should have {_window(other)}"
        yield Suspect(text, with_record(checkpoint, layer, window=other))
    head_dim = record.head_dim or config.head_dim
    for scale in (head_dim**-0.5, 1.0, 1 / head_dim):
        if not _same(scale, config.attention_scale):
            text = f"attention_scale is {config.attention_scale:.6g}; it should be {scale:.6g}"
            yield Suspect(text, _configured(checkpoint, attention_scale=scale))
    if config.attention_soft_cap:
        text = f"scores are capped at {config.attention_soft_cap:g}; they should not be"
        yield Suspect(text, _configured(checkpoint, attention_soft_cap=0.0))
    if config.bias_distance:
        text = "the biases of distance_bias are in reverse order: those of earlier positions belong to later ones"
        change = lambda rows: rows.reshape(config.n_heads, -1)[:, ::-1].reshape(rows.shape)  # noqa: E731
        yield Suspect(text, _with(checkpoint, "distance_bias.weight", change))
    if record.sinks:
        yield Suspect(f"layer {layer} has sinks; it should have none", with_record(checkpoint, layer, sinks=0))


def _of_state(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Faults of a layer that mixes positions with a convolution or a state."""
    record, prefix = checkpoint.config.layers[layer], f"layers.{layer}"
    for name in (f"{prefix}.{part}.weight" for part in ("delta_conv", "mamba_conv", "conv_taps")):
        if name in checkpoint.tensors:
            turned = lambda taps: taps.reshape(record.conv_width, -1)[::-1].reshape(taps.shape)  # noqa: E731
            yield Suspect(f"the taps of {name} are in reverse order", _with(checkpoint, name, turned))
    for name in (f"{prefix}.{part}_decay.weight" for part in ("delta", "mamba")):
        if name not in checkpoint.tensors:
            continue
        text = f"{name} is a logarithm, as in the original; it should be minus its exponential"
        yield Suspect(text, _with(checkpoint, name, lambda logarithm: -np.exp(logarithm)))
    yield from _of_exchanged_vectors(checkpoint, layer)
    if f"{prefix}.delta_beta.weight" in checkpoint.tensors:
        text = f"delta_beta and delta_a of layer {layer} are exchanged"
        yield Suspect(text, _swapped(checkpoint, f"{prefix}.delta_beta", f"{prefix}.delta_a"))
    name = f"{prefix}.conv_in.weight"
    if name in checkpoint.tensors:
        exchange = lambda rows: rows.reshape(3, -1, rows.shape[1])[[1, 0, 2]].reshape(rows.shape)  # noqa: E731
        yield Suspect(f"the parts b and c of {name} are exchanged", _with(checkpoint, name, exchange))


def _of_exchanged_vectors(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Two vectors of a recurrent layer in each other's place. A decay is minus the exponential of the original's."""
    tensors, prefix = checkpoint.tensors, f"layers.{layer}"
    vectors = [name for part in OF_HEADS if (name := f"{prefix}.{part}") in tensors]
    stored = {name: tensors[name].array() for name in vectors}
    with np.errstate(all="ignore"):
        original = {name: np.log(-x) if name.endswith("decay.weight") else x for name, x in stored.items()}
        for i, one in enumerate(vectors):
            for other in vectors[i + 1 :]:
                exchanged = {one: original[other], other: original[one]}
                if not all(np.isfinite(numbers).all() for numbers in exchanged.values()):
                    continue
                changed = {
                    name: LazyTensor.of((-np.exp(x) if name.endswith("decay.weight") else x).astype(np.float32))
                    for name, x in exchanged.items()
                }
                yield Suspect(f"{one} and {other} are exchanged", replace(checkpoint, tensors=tensors | changed))


def _window(window: int) -> str:
    return f"a window of {window} positions" if window else "no window"


def _of_ffn(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    for name in ACTIVATIONS:
        if name != config.activation:
            text = f"the activation is {config.activation}; it should be {name}"
            yield Suspect(text, _configured(checkpoint, activation=name))
    if record.ffn == "plain":
        return
    changed = checkpoint
    for name in [name for name in checkpoint.tensors if _is_matrix(name, layer, "ffn_gate")]:
        module = name.removesuffix(".weight")
        changed = _swapped(changed, module, module.removesuffix("gate") + "up")
    yield Suspect(f"ffn_gate and ffn_up of layer {layer} are exchanged", changed)
    if record.ffn == "experts":
        normalized = not record.expert_weights
        text = f"the experts' weights {'are not' if normalized else 'are'} divided by their sum; "
        text += "they should be" if normalized else "they should not be"
        yield Suspect(text, with_record(checkpoint, layer, expert_weights=int(normalized)))
        for used in (record.n_experts_used - 1, record.n_experts_used + 1):
            if 0 < used <= record.n_experts:
                text = f"a token uses {record.n_experts_used} experts of layer {layer}; it should use {used}"
                yield Suspect(text, with_record(checkpoint, layer, n_experts_used=used))


def _of_branches(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """How the branches of a layer are added."""
    record = checkpoint.config.layers[layer]
    own = PLACEMENTS.get(record.placement)
    for other, way in PLACEMENTS.items() if own else ():
        if other != record.placement:
            text = f"attention and FFN of layer {layer} are computed {own}; they should be {way}"
            yield Suspect(text, with_record(checkpoint, layer, placement=other))
    if not _same(checkpoint.config.residual_scale, 1.0):
        text = f"residual_scale is {checkpoint.config.residual_scale:.6g}; it should be 1"
        yield Suspect(text, _configured(checkpoint, residual_scale=1.0))


def _of_placements(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Where the norms of a layer's branches are, with the weights that the file has."""
    placement, moved = checkpoint.config.layers[layer].placement, dict(checkpoint.tensors)
    if placement == "sandwich":
        text = f"layer {layer} has norms after its branches; it should not have them"
        yield Suspect(text, with_record(checkpoint, layer, placement="pre"))
    if placement not in ("pre", "post"):
        return
    before, after = ("norm", "post_norm") if placement == "pre" else ("post_norm", "norm")
    for part in ("attn", "ffn"):
        for kind in ("weight", "bias"):
            name = f"layers.{layer}.{part}_{before}.{kind}"
            if name in moved:
                moved[f"layers.{layer}.{part}_{after}.{kind}"] = moved[name]
    ways = {"pre": "before", "post": "after"}
    other = "post" if placement == "pre" else "pre"
    text = f"the norms of layer {layer} come {ways[placement]} its branches; they should come {ways[other]} them"
    yield Suspect(text, replace(with_record(checkpoint, layer, placement=other), tensors=moved))


def _of_embedding(checkpoint: Checkpoint) -> Iterator[Suspect]:
    config = checkpoint.config
    for scale in (1.0, config.dim**0.5):
        if not _same(scale, config.embedding_scale):
            text = f"embedding_scale is {config.embedding_scale:.6g}; it should be {scale:.6g}"
            yield Suspect(text, _configured(checkpoint, embedding_scale=scale))
    if config.position == "learned":
        for shift in SHIFTS:
            text = f"position_embedding is off by {abs(shift)}: position p has the row of position p {_signed(shift)}"
            change = lambda rows, shift=shift: np.roll(rows, shift, axis=0)  # noqa: E731
            yield Suspect(text, _with(checkpoint, "position_embedding.weight", change))
    for shift in range(1, config.n_types):
        text = f"the rows of type_embedding are in another order: type t has the row of type t {_signed(shift)}"
        change = lambda rows, shift=shift: np.roll(rows, shift, axis=0)  # noqa: E731
        yield Suspect(text, _with(checkpoint, "type_embedding.weight", change))
    if config.n_types > 1:
        text = "the types of the tokens are wrong: all tokens should be of type 0"
        of_type_0 = lambda rows: np.repeat(rows[:1], len(rows), axis=0)  # noqa: E731
        yield Suspect(text, _with(checkpoint, "type_embedding.weight", of_type_0))


def _signed(number: int) -> str:
    """A number to add to another one, with a space after its sign."""
    return f"{'-' if number < 0 else '+'} {abs(number)}"


def _of_output(checkpoint: Checkpoint) -> Iterator[Suspect]:
    config = checkpoint.config
    if not _same(config.logit_scale, 1.0):
        text = f"logit_scale is {config.logit_scale:.6g}; it should be 1"
        yield Suspect(text, _configured(checkpoint, logit_scale=1.0))
    if config.logit_soft_cap:
        text = f"logits are capped at {config.logit_soft_cap:g}; they should not be"
        yield Suspect(text, _configured(checkpoint, logit_soft_cap=0.0))
    if not config.tied_output:
        yield Suspect("output.weight should be the embedding's matrix", _configured(checkpoint, tied_output=True))


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
        yield Suspect(f"{weight} is transposed", _with(checkpoint, weight, _transposed))
        for name in pooling.ACTIVATIONS:
            if name != activation:
                text = f"the activation after {weight} is {activation}; it should be {name}"
                changed = (*activations[:index], name, *activations[index + 1 :])
                yield Suspect(text, _configured(checkpoint, pooled_activation=changed))
