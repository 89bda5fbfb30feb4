"""Suspects in the parts of a layer before its last one, with corrections fitted to the capture.

A bias of queries, keys or latents that a norm follows, weights of norms in the middle and at the end of a layer, and
the order of the heads that a matrix reads. As in `fitted`, `causes` computes the stage with each correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import ACTIVATIONS, rms_norm
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect, with_record
from llamac.export.parity.fitted_networks import biases_of_network
from llamac.export.parity.fitted_states import is_other
from llamac.export.parity.fitting import least_squares, with_fitted
from llamac.export.parity.observed import OUTPUTS, has_qk_norm, unrotated
from llamac.export.parity.replay import replay
from llamac.export.parity.stages import Key
from llamac.export.parity.tensor_differences import listed
from llamac.export.products import linear

Array = NDArray[np.float64]

STEPS_OF_NORMS = 200
MOST_HEADS = 40  # whose order is fitted: the unknowns are their square
TINY = 1e-30


def of_parts(checkpoint: Checkpoint, reference: Capture, key: Key, not_searched: list[str]) -> Iterator[Suspect]:
    """Yield the suspects of a stage of a layer. Arguments as for `fitted.fitted`."""
    stage = key[0]
    if stage in ("q", "k"):
        yield from _bias_before_norm(checkpoint, reference, key)
    if stage == "attn_out":
        yield from _heads_of_output(checkpoint, reference, key[1])
    if stage == "ffn":
        yield from biases_of_network(checkpoint, reference, key[1], not_searched)
    if stage == "ffn_norm":
        yield from _norms_in_the_middle(checkpoint, reference, key[1])
    if stage == "block":
        yield from _norm_at_the_end(checkpoint, reference, key[1])
        yield from _norms_of_embeddings(checkpoint, reference, key[1])


def _vector(checkpoint: Checkpoint, name: str) -> Array:
    return checkpoint.tensors[name].array().astype(np.float64)


# ---- biases


def _bias_before_norm(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """The bias of queries or keys with which their norm gives the directions of the reference's heads."""
    (stage, layer), config = key, checkpoint.config
    name = f"layers.{layer}.attn_{stage}"
    if config.layers[layer].kv_lora_rank:
        yield from (_bias_of_query_latents if stage == "q" else _bias_of_latents)(checkpoint, reference, layer)
        return
    if config.qk_norm not in ("head", "whole", "rotated_head") or not has_qk_norm(config, layer):
        return
    weight = _vector(checkpoint, f"{name}_norm.weight")
    if config.qk_norm_after_rope and np.ptp(weight):  # a norm with the same weights does not see the rotation
        return
    before = linear(reference.stages["attn_norm", layer].astype(np.float64), checkpoint.tensors[f"{name}.weight"], None)
    expected = unrotated(checkpoint, reference, key, reference.stages[key].astype(np.float64))
    if expected.shape != before.shape:
        return
    heads = (rows.reshape(len(rows), -1, len(weight)).swapaxes(0, 1) for rows in (before, expected))
    bias = np.concatenate([_bias_of_norm(ours, theirs, weight) for ours, theirs in zip(*heads, strict=True)])
    yield with_fitted(checkpoint, {f"{name}.bias": bias})


def _bias_of_norm(ours: Array, theirs: Array, weight: Array) -> Array:
    """What to add to rows so that they have the directions of others, which RMSNorm made, and a weight multiplied."""
    if not weight.all():
        raise np.linalg.LinAlgError("a weight of the norm is 0")
    directions = theirs / weight
    directions = directions / np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), TINY)
    matrix = len(ours) * np.eye(len(weight)) - directions.T @ directions
    target = (directions * (directions * ours).sum(axis=1, keepdims=True) - ours).sum(axis=0)
    return least_squares(matrix, target)


def _bias_of_latents(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The bias of latent attention's keys: of the rotated numbers, and of the latents that a norm follows."""
    name, rank = f"layers.{layer}.attn_kv_a", checkpoint.config.layers[layer].kv_lora_rank
    h = reference.stages["attn_norm", layer].astype(np.float64)
    before = linear(h, checkpoint.tensors[f"{name}.weight"], None)
    expected = unrotated(checkpoint, reference, ("k", layer), reference.stages["k", layer].astype(np.float64))
    rotated = before.shape[1] - rank
    of_latents = _bias_of_norm(before[:, rotated:], expected[:, rotated:], _vector(checkpoint, f"{name}_norm.weight"))
    bias = np.concatenate([(expected - before)[:, :rotated].mean(axis=0), of_latents])
    yield with_fitted(checkpoint, {f"{name}.bias": bias})


def _bias_of_query_latents(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The bias before the norm of the latents from which queries are expanded, which the queries show."""
    record, name = checkpoint.config.layers[layer], f"layers.{layer}.attn_q"
    if not record.q_lora_rank:
        return
    expected = unrotated(checkpoint, reference, ("q", layer), reference.stages["q", layer].astype(np.float64))
    heads = record.n_heads or checkpoint.config.n_heads
    rotated = expected.shape[1] // heads - record.kv_lora_rank
    expanding = _vector(checkpoint, f"{name}.weight").reshape(heads, -1, record.q_lora_rank)
    absorbed = _vector(checkpoint, f"layers.{layer}.attn_k_b.weight").reshape(heads, record.kv_lora_rank, -1)
    whole = np.concatenate([expanding[:, :rotated], absorbed @ expanding[:, rotated:]], axis=1)
    latents = least_squares(whole.reshape(-1, record.q_lora_rank), expected.T).T
    h = reference.stages["attn_norm", layer].astype(np.float64)
    before = linear(h, checkpoint.tensors[f"{name}_a.weight"], None)
    bias = _bias_of_norm(before, latents, _vector(checkpoint, f"{name}_a_norm.weight"))
    yield with_fitted(checkpoint, {f"{name}_a.bias": bias})


# ---- norms


def _norms_in_the_middle(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The weights of the norm after attention, of the one before the network, and of both, which fit.

    The stage is norm(x + norm(attention) w1) w2, or, without a norm before the network, x + norm(attention) w1. The
    size of a row before the second norm is unknown, and converges.
    """
    config, record, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}"
    if record.placement not in ("sandwich", "post") or config.norm != "rms":
        return
    before = ("block", layer - 1) if layer else ("embedding", 0)
    x, mixed, expected = (
        reference.stages[key].astype(np.float64) for key in (before, ("attn_out", layer), ("ffn_norm", layer))
    )
    normed = config.residual_scale * rms_norm(mixed, np.ones(config.dim), config.norm_eps)
    squares = np.maximum((normed * normed).sum(axis=0), TINY)
    if record.placement == "post":
        weight = ((expected - x) * normed).sum(axis=0) / squares
        yield with_fitted(checkpoint, {f"{name}.attn_post_norm.weight": weight})
        return
    names = f"{name}.attn_post_norm.weight", f"{name}.ffn_norm.weight"
    own = [_vector(checkpoint, part) for part in names]
    rows = x + normed * own[0]
    rows = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + config.norm_eps)
    of_second = (rows * expected).sum(axis=0) / np.maximum((rows * rows).sum(axis=0), TINY)
    yield with_fitted(checkpoint, {names[1]: of_second})
    for both in (False, True):
        weight, second = own
        for _ in range(STEPS_OF_NORMS):
            sizes = np.sqrt(np.mean((x + normed * weight) ** 2, axis=1, keepdims=True) + config.norm_eps)
            rows = expected * sizes
            if both:  # rows / w2 - normed w1 = x in each column: two unknowns
                a, b, c = (rows * rows).sum(axis=0), -(rows * normed).sum(axis=0), squares
                p, q = (rows * x).sum(axis=0), -(normed * x).sum(axis=0)
                determinant = np.where(a * c - b * b == 0, TINY, a * c - b * b)
                inverse, new = (c * p - b * q) / determinant, (a * q - b * p) / determinant
                second = 1 / np.where(inverse == 0, TINY, inverse)
            else:
                new = ((rows / np.where(second == 0, TINY, second) - x) * normed).sum(axis=0) / squares
            change, weight = np.abs(new - weight).max(), new
            if change <= 1e-9 * np.abs(weight).max():
                break
        fitted = (weight, second) if both else (weight,)
        # a pair of which one is right is the other's fault alone
        if all(
            np.isfinite(w).all() and (not both or is_other(before, w)) for before, w in zip(own, fitted, strict=False)
        ):
            yield with_fitted(checkpoint, dict(zip(names, fitted, strict=False)))


def _norm_at_the_end(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The weight of the norm after the network with which the layer's output agrees."""
    config, record, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}.ffn_post_norm.weight"
    if record.placement not in ("sandwich", "post") or config.norm != "rms" or record.layer_embedding_dim:
        return
    network, expected = (reference.stages[stage, layer].astype(np.float64) for stage in ("ffn", "block"))
    error = expected - replay(checkpoint, reference, ("block", layer))
    factor = config.residual_scale * record.layer_scale
    normed = factor * rms_norm(network, np.ones(config.dim), config.norm_eps)
    change = (error * normed).sum(axis=0) / np.maximum((normed * normed).sum(axis=0), TINY)
    yield with_fitted(checkpoint, {name: _vector(checkpoint, name) + change})


def _norms_of_embeddings(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The weights of the norm of what a layer embeds of a token, and of the norm of what that adds, which fit.

    The layer adds norm(W (a * (norm(e) w1 + b))) w2 to y, where a follows from y, and e and b from the token. The
    directions of the reference's rows are linear in w1.
    """
    config, record, name = checkpoint.config, checkpoint.config.layers[layer], f"layers.{layer}.layer_embedding"
    dim, tensors, ids = record.layer_embedding_dim, checkpoint.tensors, reference.question.ids
    if not dim or config.norm != "rms" or config.rounds_inputs:
        return
    without = with_record(checkpoint, layer, layer_embedding_dim=0, layer_scale=1.0)
    y = replay(without, reference, ("block", layer))
    added = (reference.stages["block", layer] / record.layer_scale - y) / config.residual_scale
    part = slice(layer * dim, (layer + 1) * dim)
    rows, own = (
        np.concatenate([tensors[table].read(token, token + 1) for token in ids]).astype(np.float64)
        for table in ("token_embedding.weight", "layer_embedding.weight")
    )
    of_tokens = linear(rows, tensors["layer_embedding_in.weight"].rows(part.start, part.stop), None)
    of_tokens = rms_norm(of_tokens, np.ones(dim), config.norm_eps)
    gates = math.sqrt(0.5) * ACTIVATIONS[config.activation](linear(y, tensors[f"{name}_gate.weight"], None))
    out, constant = _vector(checkpoint, f"{name}_out.weight"), math.sqrt(dim) * gates * own[:, part]
    weight, post = _vector(checkpoint, "layer_embedding_norm.weight"), _vector(checkpoint, f"{name}_post_norm.weight")
    normed = rms_norm((gates * of_tokens * weight + constant) @ out.T, np.ones(len(out)), config.norm_eps)
    of_post = (added * normed).sum(axis=0) / np.maximum((normed * normed).sum(axis=0), TINY)
    yield with_fitted(checkpoint, {f"{name}_post_norm.weight": of_post})
    if not post.all():
        return
    directions = added / post
    directions /= np.maximum(np.linalg.norm(directions, axis=1, keepdims=True), TINY)
    products = out * (gates * of_tokens)[:, None]  # (n, dim of the stream, dim): times w1, a part of each row
    constants = constant @ out.T
    products -= directions[:, :, None] * np.einsum("nd,ndw->nw", directions, products)[:, None]
    constants -= directions * (directions * constants).sum(axis=1, keepdims=True)
    of_norm = least_squares(products.reshape(-1, dim), -constants.reshape(-1))
    yield with_fitted(checkpoint, {"layer_embedding_norm.weight": of_norm})


# ---- heads


def _heads_of_output(checkpoint: Checkpoint, reference: Capture, layer: int) -> Iterator[Suspect]:
    """The order of heads in the columns of the matrix after attention or a state.

    Least squares find how much of the product of each head with each head's columns the output has.
    """
    record = checkpoint.config.layers[layer]
    if len(OUTPUTS[record.mixer]) > 1 or record.mixer == "short_conv":
        return
    name = f"layers.{layer}.{OUTPUTS[record.mixer][0]}"
    heads = record.state_heads if record.mixer != "attention" else record.n_heads or checkpoint.config.n_heads
    if not 1 < heads <= MOST_HEADS or record.sub_norms:
        return
    weight = checkpoint.tensors[f"{name}.weight"].array().astype(np.float64)
    mixed = reference.stages["attn_mix", layer].astype(np.float64)[:, : weight.shape[1]]
    expected = reference.stages["attn_out", layer].astype(np.float64)
    if (bias := checkpoint.tensors.get(f"{name}.bias")) is not None:
        expected = expected - bias.array()
    outputs = np.linspace(0, len(weight) - 1, min(len(weight), -(-4 * heads * heads // len(mixed)))).astype(int)
    ours, columns = mixed.reshape(len(mixed), heads, -1), weight[outputs].reshape(len(outputs), heads, -1)
    products = np.einsum("thd,okd->tohk", ours, columns, optimize=True).reshape(-1, heads * heads)
    if len(products) < 2 * products.shape[1]:
        return
    shares = least_squares(products, expected[:, outputs].reshape(-1)).reshape(heads, heads)
    order = shares.argmax(axis=1)
    if len(set(order.tolist())) < heads or (order == np.arange(heads)).all():
        return
    moved = weight.reshape(len(weight), heads, -1)[:, order].reshape(weight.shape)
    text = f"the heads in the columns of {name}.weight are in another order: the original's are the file's "
    tensors = checkpoint.tensors | {f"{name}.weight": LazyTensor.of(moved.astype(np.float32))}
    yield Suspect(text + listed(order.tolist()), replace(checkpoint, tensors=tensors))
