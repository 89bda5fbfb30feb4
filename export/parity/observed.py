"""Finds what is wrong in the numbers of a stage themselves: a constant, a factor, another order, a part of them.

`suspects` lists what a file may have wrong, and `causes` tries it. What is here needs no list: it compares a replayed
stage with the reference's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.equations import expert_weights, rope_angles, rotate
from llamac.export.parity.capture import Capture
from llamac.export.parity.compare import EXACT, Tolerance, difference, n_heads
from llamac.export.parity.replay import replay
from llamac.export.parity.stages import OF_TEXT, OUTSIDE, Key
from llamac.export.parity.tensor_differences import listed

Array = NDArray[np.float64]
# Stages that a bias is added to.
BIASES = {
    "attn_norm": "attn_norm.bias",
    "q": "attn_q.bias",
    "k": "attn_k.bias",
    "v": "attn_v.bias",
    "attn_out": "attn_out.bias",
    "ffn_norm": "ffn_norm.bias",
    "ffn": "ffn_down.bias",
    "output_norm": "output_norm.bias",
    "logits": "output.bias",
}
# What an encoder adds to all embeddings if a text is alone: the row of type 0.
TYPES = "type_embedding.weight"
OF_STATES = ("delta_net", "mamba2", "attention_mamba2")
# Stages with heads that a matrix computes alone.
OF_MATRICES = ("q", "k", "v")
# Stages whose numbers are the rows of a matrix, which is named.
OF_ROWS = {
    "v": "layers.{}.attn_v.weight",
    "attn_out": "",
    "ffn": "layers.{}.ffn_down.weight",
    "logits": "output.weight",
}
# The matrices whose products are the output of each mixer.
OUTPUTS = {
    "attention": ("attn_out",),
    "delta_net": ("delta_out",),
    "mamba2": ("mamba_out",),
    "short_conv": ("conv_out",),
    "attention_mamba2": ("attn_out", "mamba_out"),
}
MOST_ROWS = 4096  # that are matched with one another
TINY = 1e-30
SAME_FACTOR = 1e-3  # how far factors may differ


@dataclass(frozen=True)
class Cause:
    """An explanation of a difference.

    Attributes:
        sentence: What is wrong.
        left: The relative error that is left once it is corrected.
    """

    sentence: str
    left: float


def in_the_numbers(checkpoint: Checkpoint, reference: Capture, key: Key, limit: Tolerance) -> list[Cause]:
    """What the replayed stage has in another order, or multiplied by factors that are the same at all positions.

    Args:
        checkpoint: The file.
        reference: The capture, in the engine's form.
        key: The stage.
        limit: The error that may be left.
    """
    expected, found = reference.stages[key].astype(np.float64), replay(checkpoint, reference, key)
    if key[0] in ("weights", *OF_TEXT) or found.shape != expected.shape:
        return []
    heads, causes = n_heads(checkpoint.config, key), []
    ours, theirs = (unrotated(checkpoint, reference, key, rows) for rows in (found, expected))
    bias = _bias_of(checkpoint, key)
    norm = _norm_of(checkpoint.config, key, ours, theirs)
    is_gated = key[0] == "ffn" and checkpoint.config.layers[key[1]].ffn == "gated"
    matrix = _matrix_of(checkpoint.config, key) if is_gated or _is_product(checkpoint.config, key) else ""
    text, scaled = _scaled(key, ours - bias, theirs - bias, norm, matrix)
    candidates = [(text, unrotated(checkpoint, reference, key, scaled + bias, inverse=True))]
    if key[0] in OF_MATRICES:
        candidates.append(_in_order(checkpoint.config, key, "heads", heads, found, expected))
    if key[0] in ("q", "k") and checkpoint.config.qk_norm == "whole":  # whose weight stays in its order
        weight = checkpoint.tensors[f"layers.{key[1]}.attn_{key[0]}_norm.weight"].array().astype(np.float64)
        before = (np.divide(rows, weight, out=np.zeros_like(rows), where=weight != 0) for rows in (ours, theirs))
        text, moved = _in_order(checkpoint.config, key, "heads", heads, *before)
        candidates.append((text, unrotated(checkpoint, reference, key, moved * weight, inverse=True)))
    if (
        _has_rows(checkpoint.config, key) and found.shape[1] <= MOST_ROWS
    ):  # RoPE mixes the numbers of a head of queries or keys
        candidates.append(_in_order(checkpoint.config, key, "rows", found.shape[1], found - bias, expected - bias))
        candidates[-1] = candidates[-1][0], candidates[-1][1] + bias
    for text, corrected in candidates:
        left = difference(key, corrected, expected, heads, limit)
        if left.is_within:
            causes.append(Cause(text, left.relative))
    return causes[:1]


def _in_order(
    config: ModelConfig, key: Key, what: str, n_parts: int, found: Array, expected: Array
) -> tuple[str, Array]:
    """The parts of each row in the order in which they are nearest to the reference's."""
    ours, theirs = (
        rows.reshape(len(rows), n_parts, -1).swapaxes(0, 1).reshape(n_parts, -1) for rows in (found, expected)
    )
    order = ((ours * ours).sum(axis=1) - 2 * theirs @ ours.T).argmin(axis=1)
    corrected = ours[order].reshape(n_parts, len(found), -1).swapaxes(0, 1).reshape(found.shape)
    text = f"the {what} of {_matrix_of(config, key)} are in another order: the original's are the file's "
    return text + listed(order.tolist()), corrected


def _has_rows(config: ModelConfig, key: Key) -> bool:
    """Whether the numbers of a stage are the rows of one matrix of `OF_ROWS`."""
    stage, layer = key
    if stage == "logits":
        return not config.tied_output
    return (_is_product(config, key) and stage in OF_ROWS) or (stage == "ffn" and config.layers[layer].ffn != "experts")


def _is_product(config: ModelConfig, key: Key) -> bool:
    """Whether a stage is the product of the one before it with a matrix of attention, but for RoPE and a bias."""
    stage, layer = key
    record = config.layers[layer]
    if stage == "attn_out":
        return len(OUTPUTS[record.mixer]) == 1 and not record.sub_norms
    if record.mixer != "attention" or record.kv_lora_rank:
        return False
    return (stage == "v" and record.v_norm == "none") or (stage in ("q", "k") and not has_qk_norm(config, layer))


def has_qk_norm(config: ModelConfig, layer: int) -> bool:
    """Whether a layer norms queries and keys; Llama 4 norms only what RoPE rotates."""
    return config.qk_norm != "none" and not (config.qk_norm == "rotated_head" and config.layers[layer].rope < 0)


def _matrix_of(config: ModelConfig, key: Key) -> str:
    """The matrix that decides a stage."""
    stage, layer = key
    if stage == "ffn":
        return f"layers.{layer}.ffn_up.weight or ffn_down.weight"
    if stage == "attn_out":
        return f"layers.{layer}.{OUTPUTS[config.layers[layer].mixer][0]}.weight"
    return OF_ROWS.get(stage, "layers.{}.attn_" + stage + ".weight").format(layer)


def _bias_of(checkpoint: Checkpoint, key: Key) -> Array | float:
    """The last term that is added to a stage, in a row; 0 if there is none."""
    stage, layer = key
    name = BIASES.get(stage, "") if stage in OUTSIDE else f"layers.{layer}.{BIASES.get(stage)}"
    is_last = stage not in ("q", "k") or not has_qk_norm(checkpoint.config, layer)
    found = checkpoint.tensors.get(name) if is_last else None
    return 0.0 if found is None else found.array().astype(np.float64)


def _norm_of(config: ModelConfig, key: Key, found: Array, expected: Array) -> str:
    """The norm whose weight alone multiplies the numbers of a stage that differ; "" if a matrix does, too."""
    stage, layer = key
    if stage in ("attn_norm", "ffn_norm", "output_norm"):
        return "output_norm.weight" if stage == "output_norm" else f"layers.{layer}.{stage}.weight"
    record = config.layers[layer]
    rotated = (record.head_dim or config.head_dim) - record.kv_lora_rank
    errors = np.abs(found - expected) / np.abs(expected).max()
    if stage == "k" and record.kv_lora_rank and errors[:, :rotated].max() <= SAME_FACTOR:
        return f"layers.{layer}.attn_kv_a_norm.weight"
    if stage in ("q", "k") and config.qk_norm in ("head", "whole") and not record.kv_lora_rank:
        return f"layers.{layer}.attn_{stage}_norm.weight"
    if stage == "attn_mix" and record.mixer in OF_STATES and not record.sub_norms:
        states = record.state_heads * record.state_value_dim
        first = found.shape[1] - states if record.mixer == "attention_mamba2" else 0
        name = "delta_norm" if record.mixer == "delta_net" else "mamba_norm" if config.state_norm != "none" else ""
        if name and (not first or errors[:, :first].max() <= SAME_FACTOR):
            return f"layers.{layer}.{name}.weight"
    return ""


def _scaled(key: Key, found: Array, expected: Array, norm: str, matrix: str) -> tuple[str, Array]:
    """The numbers times the factors that fit best: one for all, or one for each number of a row.

    norm: The norm whose weight is wrong if a factor is; "" if that is not known.
    matrix: The matrix that alone decides the stage, or "".
    """
    where = f"{key[0]} of layer {key[1]}"
    squares, products = (found * found).sum(axis=0), (found * expected).sum(axis=0)
    same = products.sum() / max(squares.sum(), np.finfo(np.float64).tiny)
    if same and np.abs(same * found - expected).max() <= SAME_FACTOR * np.abs(expected).max():
        tensor = f" ({matrix})" if matrix else ""
        return f"{where} is {1 / same:.6g} times as large as it should be, at all positions{tensor}", same * found
    factors = np.where(squares > 0, products / np.where(squares > 0, squares, 1), 1)
    wrong = np.abs(factors - 1) > SAME_FACTOR
    count = np.count_nonzero(wrong)
    tensor = norm or "a norm's weight or rows of a matrix"
    text = f"each number of {where} is off by a factor of its own, the same at all positions: "
    text += f"{tensor} {'is' if norm else 'are'} wrong ({count} of {len(factors)}: {_indices(wrong)})"
    if count == 1 and factors.all():
        index = int(wrong.argmax())
        text = f"number {index} of {where} is {1 / factors[index]:.6g} times as large as it should be, at all "
        text += "positions: " + (norm or "a row of a matrix, or a number of a norm's weight,") + " is wrong"
    return text, factors * found


def of_one_expert(checkpoint: Checkpoint, reference: Capture, layer: int) -> list[int]:
    """The experts that all rows that differ use, and no others; [] if there is none, or if all rows differ."""
    record = checkpoint.config.layers[layer]
    if record.ffn != "experts":
        return []
    expected = reference.stages["ffn", layer].astype(np.float64)
    errors = np.abs(replay(checkpoint, reference, ("ffn", layer)) - expected).max(axis=1)
    wrong = ~(errors <= EXACT * np.maximum(np.abs(expected).max(axis=1), TINY))
    if wrong.all() or not wrong.any():
        return []
    used = router_weights(checkpoint, reference, layer) != 0
    return [int(expert) for expert in np.flatnonzero((used == wrong[:, None]).all(axis=0))]


def router_weights(checkpoint: Checkpoint, reference: Capture, layer: int) -> Array:
    """What multiplies each expert's output, or its input, 0 for unused ones: (n, experts)."""
    record = checkpoint.config.layers[layer]
    bias = checkpoint.tensors.get(f"layers.{layer}.ffn_router_choice.bias") if record.router_choice_bias else None
    factors = checkpoint.tensors.get(f"layers.{layer}.expert_factors.weight") if record.expert_factors else None
    weights = expert_weights(
        replay(checkpoint, reference, ("ffn_router", layer)),
        record.n_experts_used,
        bool(record.expert_weights),
        router=record.router,
        choice_bias=None if bias is None else bias.array().astype(np.float64),
        groups=(record.n_expert_groups, record.n_expert_groups_used),
        eps=record.expert_weights_eps,
        scale=record.expert_scale,
    )
    return weights if factors is None else weights * factors.array()


def extent(checkpoint: Checkpoint, reference: Capture, key: Key, tolerance: Tolerance) -> str:
    """Which heads, or which numbers of a row, differ at any position; "" if they are many."""
    expected, found = reference.stages[key].astype(np.float64), replay(checkpoint, reference, key)
    if found.shape != expected.shape:
        return ""
    if key[0] == "ffn" and len(experts := of_one_expert(checkpoint, reference, key[1])) == 1:
        return f"only positions that use expert {experts[0]} differ"
    limits = tolerance.limit * np.abs(expected).max(axis=1, keepdims=True)
    wrong = (np.abs(found - expected) > limits).reshape(len(found), -1).any(axis=0)
    heads = n_heads(checkpoint.config, key)
    of_heads = wrong.reshape(heads, -1).any(axis=1) if heads else wrong[:0]
    for what, parts in (("heads", of_heads), ("numbers of a row", wrong if key[0] != "weights" else wrong[:0])):
        count, numbers = np.count_nonzero(parts), _indices(parts)
        if 0 < count <= len(parts) // 2 and not numbers.endswith("..."):
            return f"only {count} of {len(parts)} {what} {'differ' if count > 1 else 'differs'}: {numbers}"
    return ""


def missing_bias(
    checkpoint: Checkpoint, reference: Capture, key: Key, limit: Tolerance
) -> list[tuple[Cause, Checkpoint]]:
    """A bias is missing, or wrong, if the same numbers are missing at all positions: the cause, and the file with them.

    Arguments as for `in_the_numbers`.
    """
    names, stage = _biases_of(checkpoint, key), key[0]
    if not names or (stage in ("q", "k") and has_qk_norm(checkpoint.config, key[1])):
        return []
    expected, found = reference.stages[key].astype(np.float64), replay(checkpoint, reference, key)
    missing = unrotated(checkpoint, reference, key, expected - found)
    has_types = stage == "embedding" and bool(reference.question.types)
    types = np.array(reference.question.types if has_types else [0] * len(missing))
    constant = np.empty_like(missing)
    for kind in np.unique(types):
        constant[types == kind] = missing[types == kind].mean(axis=0)
    corrected = found + unrotated(checkpoint, reference, key, constant, inverse=True)
    left = difference(key, corrected, expected, n_heads(checkpoint.config, key), limit)
    if not left.is_within:
        return []
    found_biases = [checkpoint.tensors.get(name) for name in names]
    has_own = any(tensor is not None and tensor.array().any() for tensor in found_biases)
    text = f"{' or '.join(names)} is {'wrong' if has_own else 'missing'}: the same numbers are missing at all positions"
    text += " of a type" * has_types
    own = 0.0 if found_biases[0] is None else found_biases[0].array()
    if np.ndim(own) > 1:  # a table of types; a text can have several
        return [(Cause(text, left.relative), checkpoint)]
    bias = LazyTensor.of((own + constant[0]).astype(np.float32))
    return [(Cause(text, left.relative), replace(checkpoint, tensors=checkpoint.tensors | {names[0]: bias}))]


def _biases_of(checkpoint: Checkpoint, key: Key) -> list[str]:
    """The biases that are added to a stage; several are added to each other."""
    stage, layer = key
    config = checkpoint.config
    if stage == "embedding":
        return [TYPES] if config.two_sided else []
    if stage not in BIASES:
        return []
    if stage in OUTSIDE:
        return [BIASES[stage]]
    if stage == "attn_out":
        return [f"layers.{layer}.{module}.bias" for module in OUTPUTS[config.layers[layer].mixer]]
    return [f"layers.{layer}.{BIASES[stage]}"]


def unrotated(checkpoint: Checkpoint, reference: Capture, key: Key, rows: Array, *, inverse: bool = False) -> Array:
    """Rows before RoPE; inversely, after it. Rows of stages without RoPE are unchanged."""
    stage, layer = key
    config, record = checkpoint.config, checkpoint.config.layers[layer]
    if stage not in ("q", "k") or record.rope < 0:
        return rows
    question, table = reference.question, record.rope
    is_long = 0 < config.rope_original_context[table] < question.context
    inv_freq = checkpoint.tensors[f"rope.{table}.inv_freq{'_long' if is_long else ''}"].array().astype(np.float64)
    angles = rope_angles(np.arange(len(question.ids)), inv_freq)
    factor = config.rope_attention_factor[table]
    heads = rows.reshape(len(rows), -1, record.head_dim or config.head_dim)
    turned = rotate(heads, angles, factor) if inverse else rotate(heads, -angles, 1 / factor)
    return turned.reshape(rows.shape)


def _indices(parts: NDArray[np.bool_]) -> str:
    return listed(np.flatnonzero(parts).tolist())
