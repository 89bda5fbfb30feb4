"""The forward pass in NumPy and float64: the graph of every model, with the equations of `equations` and `delta_net`.

It is the tests' oracle for the engine and for transformers, and it computes the reference logits of a file's probes. It
does not use the C core, and every step is exact to about 1e-15.

    x = scale E[token] (+ P[position])
    per layer:  x += Wo attention(rope(Wq h), rope(Wk h), Wv h)  with h = norm(x)
                x += ffn(norm(x))
    logits = Wout norm(x)

plus what families add: norms after the branches or of q and k, parallel branches, experts, scales, and soft caps.

Weights are streamed: a matrix is read in chunks of rows, and every chunk is applied to all rows of all sequences. One
pass over the weights serves any number of sequences, and the peak memory is a few chunks plus the activations.

Shapes: the n rows are the tokens of all sequences, concatenated; d is head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamac.arguments import KVDtype, Numerics
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export import recurrent
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.equations import (
    ACTIVATIONS,
    XIELU,
    attention_mix,
    attention_scores,
    expert_weights,
    layer_norm,
    query_scale,
    rms_norm,
    rope_angles,
    rotate,
    sigmoid,
    soft_cap,
    xielu,
)
from llamac.export.products import linear
from llamac.export.rounding import Array as Array
from llamac.export.rounding import round_rows, round_to_cache
from llamac.format.strips import CODEBOOKS

PLACEMENTS = ("pre", "post", "sandwich", "parallel", "normed", "normed_attn")
QK_NORMS = ("none", "head", "whole", "layer_head", "rotated_head")
# The kinds of layers that are computed.
SUPPORTED = {
    "placement": PLACEMENTS,
    "ffn": ("plain", "gated", "experts", "none"),
    "mixer": ("attention", "delta_net", "mamba2", "short_conv", "none", "attention_mamba2"),
    "v_norm": ("none", "head"),
}

# Receives (stage, layer, values). Stages have the names of enum llamac_stage; layer is 0 outside the layers; values are
# (n, ...) for all rows, but only for the rows with logits in "output_norm" and "logits".
Observer: TypeAlias = Callable[[str, int, Array], None]


@dataclass(frozen=True)
class _Pass:
    """What the layers of a forward pass share.

    Attributes:
        spans: The rows of each sequence.
        tokens: Of all rows.
        types: The types of the tokens; () if all are 0.
        angles: (n, rope_dim / 2) per RoPE table.
        keys_values: (n, n_kv_heads, head_dim) each, of the layers so far.
        mixed: What takes the place of a mixer's output, (n, dim); None: the layers compute it.
    """

    checkpoint: Checkpoint
    spans: list[slice]
    tokens: list[int]
    positions: NDArray[np.int64]
    angles: list[Array]
    observe: Observer
    numerics: Numerics | None
    kv_dtype: KVDtype | None
    types: Sequence[int] = ()
    keys_values: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    mixed: Array | None = None

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def linear(self, x: Array, name: str) -> Array:
        """Apply the matrix `name`.weight and the bias `name`.bias, if the model has one."""
        weight, numerics = _tensor(self.checkpoint, f"{name}.weight"), self.numerics
        if self.config.rounds_inputs and name.startswith("layers."):
            x = round_rows(x)
            numerics = None if weight.dtype in CODEBOOKS else numerics  # int8 inputs are these very integers
        return linear(x, weight, self.checkpoint.tensors.get(f"{name}.bias"), numerics=numerics)

    def vector(self, name: str) -> Array:
        """A vector that the config needs."""
        return _vector(self.checkpoint, name)

    def norm(self, x: Array, name: str, *, has_bias: bool = True) -> Array:
        """Apply the model's norm with `name`.weight and, for LayerNorm, `name`.bias."""
        weight = _vector(self.checkpoint, f"{name}.weight")
        if self.config.norm == "rms":
            return rms_norm(x, weight, self.config.norm_eps)
        bias = _vector(self.checkpoint, f"{name}.bias") if has_bias else np.zeros(len(weight))
        return layer_norm(x, weight, bias, self.config.norm_eps)


def forward(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    *,
    context: int | None = None,
    last_only: bool = False,
    observe: Observer | None = None,
    numerics: Numerics | None = None,
    kv_dtype: KVDtype | None = None,
    types: Sequence[int] = (),
) -> list[Array]:
    """Compute the logits of every sequence.

    Args:
        checkpoint: The model.
        sequences: Token ids, each sequence at positions 0, 1, ...
        context: The context of the session to reproduce; default: the model's. It selects the short or the long RoPE
            table of a model that has both, and limits the sequences' length.
        last_only: Compute the logits of each sequence's last token only.
        observe: Called with every stage.
        numerics: Round the inputs of quantized matrices as the engine does with these numerics. Default: not at all.
        kv_dtype: Round keys and values as the engine's KV cache of this number format does. Default: not at all.
        types: The types of the tokens of all sequences, concatenated; () if all are 0.

    Returns:
        For each sequence, (n, vocab_size), or (1, vocab_size) with last_only.

    Raises:
        ArgumentError: If a token id or a length is out of range.
        UnsupportedError: If this version's graph lacks something the config needs.
        ExportError: If a tensor is missing.
    """
    run = replace(_start(checkpoint, sequences, context, observe, numerics, kv_dtype), types=types)
    x = _embed(run)
    for layer, record in enumerate(checkpoint.config.layers):
        x = _block(run, x, layer, record)
    spans = run.spans
    if last_only:
        x, spans = x[[span.stop - 1 for span in spans]], [slice(i, i + 1) for i in range(len(sequences))]
    logits = _output(run, x)
    return [logits[span] for span in spans]


def forward_part(
    checkpoint: Checkpoint,
    ids: Sequence[int],
    part: int,
    x: Array,
    *,
    keys_values: tuple[Array, Array] | None = None,
    types: Sequence[int] = (),
    mixed: Array | None = None,
    context: int,
    observe: Observer,
) -> None:
    """Compute one part of the pass over a sequence from inputs that something else has computed.

    Args:
        checkpoint: The model.
        ids: The sequence.
        part: A layer; -1 for the embedding, n_layers for the final norm and logits.
        x: The part's input, (n, dim); the embedding has none.
        keys_values: What a layer without its own keys and values reads, (n, n_kv_heads, head_dim) each.
        types: The types of the tokens; () if all are 0.
        mixed: What takes the place of attention's output, or a state's, (n, dim); None: the part computes it.
        context: As for `forward`, like `observe`.
        observe: Called with the part's stages.

    Raises:
        ArgumentError, UnsupportedError, ExportError: As for `forward`.
    """
    run = replace(_start(checkpoint, [ids], context, observe), types=types, mixed=mixed)
    if part < 0:
        _embed(run)
    elif part < len(checkpoint.config.layers):
        if keys_values is not None:
            run.keys_values[checkpoint.config.layers[part].kv_source] = keys_values
        _block(run, x, part, checkpoint.config.layers[part])
    else:
        _output(run, x)


def _start(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int]],
    context: int | None,
    observe: Observer | None,
    numerics: Numerics | None = None,
    kv_dtype: KVDtype | None = None,
) -> _Pass:
    """Check the arguments of a pass; return what its layers share."""
    config = checkpoint.config
    context = config.context if context is None else context
    _check(config, sequences, context)
    ends = np.cumsum([len(ids) for ids in sequences])
    spans = [slice(int(end) - len(ids), int(end)) for ids, end in zip(sequences, ends, strict=True)]
    positions = np.concatenate([np.arange(len(ids)) for ids in sequences])
    tables = [_inverse_frequencies(checkpoint, table, context) for table in range(len(config.rope_dim))]
    angles = [rope_angles(positions, inv_freq) for inv_freq in tables]
    observe = observe or (lambda stage, layer, values: None)
    tokens = [token for ids in sequences for token in ids]
    return _Pass(checkpoint, spans, tokens, positions, angles, observe, numerics, kv_dtype)


def _output(run: _Pass, x: Array) -> Array:
    """The logits of rows: (n, vocab_size). x (n, dim)."""
    config = run.config
    x = run.norm(x, "output_norm")
    run.observe("output_norm", 0, x)
    head = _tensor(run.checkpoint, "token_embedding.weight" if config.tied_output else "output.weight")
    logits = linear(x, head, run.checkpoint.tensors.get("output.bias"), numerics=run.numerics)
    logits = soft_cap(config.logit_scale * logits, config.logit_soft_cap)
    run.observe("logits", 0, logits)
    return logits


def _rows_of_tokens(run: _Pass, name: str) -> Array:
    """The rows of a table for the tokens. Reads no others."""
    table = _tensor(run.checkpoint, name)
    return np.concatenate([table.read(token, token + 1) for token in run.tokens]).astype(np.float64)


def _embed(run: _Pass) -> Array:
    """scale E[token] (+ P[position]), possibly normed: (n, dim)."""
    x = _rows_of_tokens(run, "token_embedding.weight")
    x *= run.config.embedding_scale
    if run.config.n_types:
        rows = _tensor(run.checkpoint, "type_embedding.weight").read(0, run.config.n_types).astype(np.float64)
        x += rows[list(run.types)] if run.types else rows[0]
    if run.config.position == "learned":
        longest = int(run.positions.max()) + 1
        x += _tensor(run.checkpoint, "position_embedding.weight").read(0, longest).astype(np.float64)[run.positions]
    if run.config.embedding_norm:
        x = run.norm(x, "embedding_norm")
    run.observe("embedding", 0, x)
    return x


def _block(run: _Pass, x: Array, layer: int, record: LayerConfig) -> Array:
    """One layer: attention, then the feed-forward network, or both on the same x (parallel), or only one of them.

    x (n, dim) -> (n, dim).
    """
    y = x
    if record.mixer != "none":
        y = _stream(run, x, layer, record, "attn") + _branch(run, x, layer, record, "attn")
    if record.ffn != "none":
        y = _stream(run, y, layer, record, "ffn") + _branch(
            run, x if record.placement == "parallel" else y, layer, record, "ffn"
        )
    if record.layer_embedding_dim:
        y = y + run.config.residual_scale * _layer_embedding(run, y, layer, record)
    y = record.layer_scale * y
    run.observe("block", layer, y)
    return y


def _stream(run: _Pass, x: Array, layer: int, record: LayerConfig, part: str) -> Array:
    """What the branch is added to: the residual stream, or its norm as in "Attention Is All You Need", section 3.1."""
    replaced = record.placement == "normed" or (record.placement == "normed_attn" and part == "attn")
    return run.norm(x, f"layers.{layer}.{part}_norm") if replaced else x


def _branch(run: _Pass, x: Array, layer: int, record: LayerConfig, part: str) -> Array:
    """What "attn" or "ffn" adds to the residual stream: (n, dim). Its norm comes before it, after it, or both.

    Post-norm: Liu et al., "Swin Transformer V2" (arXiv:2111.09883), section 3.2; both: Gemma 2 (arXiv:2408.00118).
    """
    name, h = f"layers.{layer}", x
    if record.placement != "post":
        h = run.norm(h, f"{name}.{part}_norm")
    run.observe(f"{part}_norm", layer, h)
    if part == "ffn":
        h = _feed_forward(run, x, h, layer, record)
    else:
        h = MIXERS[record.mixer](run, h, layer, record) if run.mixed is None else run.mixed
    run.observe("attn_out" if part == "attn" else "ffn", layer, h)
    if record.placement in ("post", "sandwich"):
        h = run.norm(h, f"{name}.{part}_post_norm")
    return run.config.residual_scale * h


def _layer_embedding(run: _Pass, y: Array, layer: int, record: LayerConfig) -> Array:
    """What a layer adds from its embeddings of the tokens: (n, dim). y (n, dim).

    Gemma 3n's per-layer embeddings, as Gemma 4 has them: the activation of a projection of y gates them.
    """
    name, dim = f"layers.{layer}.layer_embedding", record.layer_embedding_dim
    part = slice(layer * dim, (layer + 1) * dim)
    rows = _tensor(run.checkpoint, "layer_embedding_in.weight").rows(part.start, part.stop)
    of_token = linear(_rows_of_tokens(run, "token_embedding.weight"), rows, numerics=run.numerics)
    own = math.sqrt(dim) * _rows_of_tokens(run, "layer_embedding.weight")[:, part]
    inputs = math.sqrt(0.5) * (run.norm(of_token, "layer_embedding_norm", has_bias=False) + own)
    hidden = ACTIVATIONS[run.config.activation](run.linear(y, f"{name}_gate")) * inputs
    return run.norm(run.linear(hidden, f"{name}_out"), f"{name}_post_norm", has_bias=False)


def _attention(run: _Pass, h: Array, layer: int, record: LayerConfig) -> Array:
    """Wo attention(rope(Wq h), rope(Wk h), Wv h), separately for each sequence. h (n, dim) -> (n, dim)."""
    name, config = f"layers.{layer}", run.config
    q, k, v = (_latent_qkv if record.kv_lora_rank else _qkv)(run, h, name, record)
    run.keys_values[layer] = k, v
    sinks = _vector(run.checkpoint, f"{name}.attn_sinks.weight") if record.sinks else None
    biases = _vector(run.checkpoint, "distance_bias.weight") if config.bias_distance else None
    scores = np.full((len(h), q.shape[1], max(span.stop - span.start for span in run.spans)), -np.inf)
    mix = np.empty((*q.shape[:2], v.shape[2]))
    tuning = record.query_beta, record.query_context, record.query_offset
    limits = record.window, config.attention_soft_cap, bool(config.two_sided), biases, bool(record.window_chunks)
    for span in run.spans:
        seen = scores[span, :, : span.stop - span.start]
        scaled = q[span] * query_scale(np.arange(span.stop - span.start), *tuning)[:, None, None]
        seen[:] = attention_scores(scaled, k[span], config.attention_scale, *limits)
        mix[span] = attention_mix(seen, v[span], sinks, run.kv_dtype)
    if record.kv_lora_rank:
        mix = _per_head(run, mix, f"{name}.attn_v_b")
    result = mix.reshape(len(h), -1)
    if record.output_gate != "none":  # a gate for each element, or for each head
        gates = sigmoid(run.linear(h, f"{name}.attn_gate"))
        result = result * gates.repeat(result.shape[1] // gates.shape[1], axis=1)
    if record.sub_norms:
        result = run.norm(result, f"{name}.attn_sub_norm")
    out = run.linear(result, f"{name}.attn_out")
    # the engine's cache stages: without rounding, they equal the keys and values
    own = {"k": k, "v": v} if record.kv_source < 0 else {}
    stages = {"q": q, **own, "cache_k": k, "cache_v": v, "scores": scores, "attn_mix": result.reshape(mix.shape)}
    for stage, values in stages.items():
        run.observe(stage, layer, values)
    return out


def _qkv(run: _Pass, h: Array, name: str, record: LayerConfig) -> tuple[Array, Array, Array]:
    """q (n, heads, d), k and v (n, kv_heads, d): the layer's own, or those of the layer whose keys it reads."""
    head_dim, norm_first = record.head_dim or run.config.head_dim, not run.config.qk_norm_after_rope
    q = run.linear(h, f"{name}.attn_q").reshape(len(h), -1, head_dim)
    q = _norm_and_rope(run, q, f"{name}.attn_q_norm", record, norm_first)
    if record.kv_source >= 0:
        return q, *run.keys_values[record.kv_source]
    k = run.linear(h, f"{name}.attn_k").reshape(len(h), -1, head_dim)
    v = k if record.v_is_k else run.linear(h, f"{name}.attn_v").reshape(len(h), -1, head_dim)
    if record.v_norm == "head":
        v = rms_norm(v, np.ones(head_dim), run.config.norm_eps)
    k = _norm_and_rope(run, k, f"{name}.attn_k_norm", record, norm_first)
    return q, *round_to_cache(k, v, run.kv_dtype)


def _latent_qkv(run: _Pass, h: Array, name: str, record: LayerConfig) -> tuple[Array, Array, Array]:
    """q (n, heads, d), k (n, 1, d) and v (n, 1, rank) of latent attention, with W_UK applied to q.

    DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1.2 and appendix C. A head's score is q W_UK c + q_R k_R,
    with the latent c, which is also the value, and the rotated part k_R, which all heads share.
    """
    rank, eps = record.kv_lora_rank, record.latent_norm_eps
    latent = h
    if record.q_lora_rank:
        weight = _vector(run.checkpoint, f"{name}.attn_q_a_norm.weight")
        latent = rms_norm(run.linear(h, f"{name}.attn_q_a"), weight, eps)
    rotated = (record.head_dim or run.config.head_dim) - rank
    q = run.linear(latent, f"{name}.attn_q").reshape(len(h), -1, rotated + record.qk_nope_head_dim)
    q = np.concatenate((q[..., :rotated], _per_head(run, q[..., rotated:], f"{name}.attn_k_b")), axis=2)
    k = run.linear(h, f"{name}.attn_kv_a")[:, None, :]
    v = rms_norm(k[..., rotated:], _vector(run.checkpoint, f"{name}.attn_kv_a_norm.weight"), eps)
    k = np.concatenate((k[..., :rotated], v), axis=2)
    if record.rope >= 0:
        factor = run.config.rope_attention_factor[record.rope]
        q, k = (rotate(x, run.angles[record.rope], factor) for x in (q, k))
    return q, *round_to_cache(k, v, run.kv_dtype)


def _per_head(run: _Pass, x: Array, name: str) -> Array:
    """Apply to each head of x (n, heads, in) its own rows of a matrix: (n, heads, out)."""
    weight, heads = _tensor(run.checkpoint, f"{name}.weight"), x.shape[1]
    out = weight.shape[0] // heads
    parts = [
        linear(x[:, head], weight.rows(head * out, (head + 1) * out), numerics=run.numerics) for head in range(heads)
    ]
    return np.stack(parts, axis=1)


def _attention_and_mamba2(run: _Pass, h: Array, layer: int, record: LayerConfig) -> Array:
    """The sum of both, of the same rows. h (n, dim) -> (n, dim)."""
    mixed: list[Array] = []

    def observe(stage: str, of_layer: int, values: Array) -> None:
        if stage == "attn_mix":
            mixed.append(values.reshape(len(h), -1))
        else:
            run.observe(stage, of_layer, values)

    inner = replace(run, observe=observe)
    out: Array = _attention(inner, h, layer, record) + recurrent.mamba2(inner, h, layer, record)
    run.observe("attn_mix", layer, np.concatenate(mixed, axis=1))
    return out


MIXERS: dict[str, Callable[[_Pass, Array, int, LayerConfig], Array]] = {
    "attention": _attention,
    "attention_mamba2": _attention_and_mamba2,
    "delta_net": recurrent.delta_net,
    "mamba2": recurrent.mamba2,
    "short_conv": recurrent.short_conv,
}


def _norm_and_rope(run: _Pass, x: Array, norm: str, record: LayerConfig, norm_first: bool) -> Array:
    """Norm the heads of queries or keys and rotate them, in either order. x (n, heads, d)."""
    if record.rope < 0:
        return x if run.config.qk_norm == "rotated_head" else _head_norm(run, x, norm)
    if norm_first:
        x = _head_norm(run, x, norm)
    x = rotate(x, run.angles[record.rope], run.config.rope_attention_factor[record.rope])
    return x if norm_first else _head_norm(run, x, norm)


def _head_norm(run: _Pass, x: Array, name: str) -> Array:
    """The norm of queries or keys, if the model has one. x (n, heads, d).

    Henry et al., "Query-Key Normalization for Transformers" (arXiv:2010.04245), in the variants that models use.
    """
    kind, eps = run.config.qk_norm, run.config.norm_eps
    if kind == "none":
        return x
    weight = _vector(run.checkpoint, f"{name}.weight")
    if kind == "whole":
        return rms_norm(x.reshape(len(x), -1), weight, eps).reshape(x.shape)
    if kind in ("head", "rotated_head"):
        return rms_norm(x, weight, eps)
    return layer_norm(x, weight.reshape(x.shape[1:]), np.zeros(x.shape[1:]), eps)


def _feed_forward(run: _Pass, x: Array, h: Array, layer: int, record: LayerConfig) -> Array:
    """One network for all rows, or experts, each for the rows routed to it: (n, dim). h (n, dim): the norm of x.

    In Gemma 4, the experts and their router norm x themselves, and the two results are normed before they are added.
    """
    name = f"layers.{layer}"
    if record.ffn != "experts":
        inner = _hidden(run, h, f"{name}.ffn", record)
        if record.sub_norms:  # Wang et al., "Foundation Transformers" (arXiv:2210.06423), section 2
            inner = run.norm(inner, f"{name}.ffn_sub_norm")
        run.observe("ffn_hidden", layer, inner)
        return run.linear(inner, f"{name}.ffn_down")
    of_router, of_experts = (
        run.norm(x, f"{name}.{part}", has_bias=False) if record.expert_norms else h
        for part in ("ffn_router_norm", "experts_norm")
    )
    router = run.linear(of_router, f"{name}.ffn_router")
    run.observe("ffn_router", layer, router)
    shared, y = _shared_expert(run, h, name, record)
    of_shared = run.norm(y, f"{name}.shared_ffn_post_norm", has_bias=False) if record.expert_norms else y
    of_experts = run.linear(h, f"{name}.experts_in") if run.config.expert_dim else of_experts
    y = np.zeros_like(of_experts) if record.expert_norms or run.config.expert_dim else y
    factors = _vector(run.checkpoint, f"{name}.expert_factors.weight") if record.expert_factors else None
    choice_bias = _vector(run.checkpoint, f"{name}.ffn_router_choice.bias") if record.router_choice_bias else None
    groups = record.n_expert_groups, record.n_expert_groups_used
    options: dict[str, Any] = {"router": record.router, "choice_bias": choice_bias, "groups": groups}
    options |= {"eps": record.expert_weights_eps, "scale": record.expert_scale}
    weights = expert_weights(router, record.n_experts_used, bool(record.expert_weights), **options)
    hidden = np.zeros((len(h), record.n_experts_used, record.ffn_dim))
    n_filled = np.zeros(len(h), np.int64)
    for expert in range(record.n_experts):
        rows = np.flatnonzero(weights[:, expert])
        if len(rows):
            factor = (1.0 if factors is None else factors[expert]) * weights[rows, expert, None]
            before, after = (factor, 1.0) if record.expert_weights_first else (1.0, factor)
            inner = _hidden(run, of_experts[rows], f"{name}.experts.{expert}.ffn", record, before)
            y[rows] += after * run.linear(inner, f"{name}.experts.{expert}.ffn_down")
            hidden[rows, n_filled[rows]] = inner
            n_filled[rows] += 1
    run.observe("ffn_hidden", layer, np.concatenate((hidden.reshape(len(h), -1), shared), axis=1))
    if run.config.expert_dim:
        return of_shared + run.linear(y, f"{name}.experts_out")
    return of_shared + run.norm(y, f"{name}.experts_post_norm", has_bias=False) if record.expert_norms else y


def _shared_expert(run: _Pass, h: Array, name: str, record: LayerConfig) -> tuple[Array, Array]:
    """The hidden numbers, (n, shared_ffn_dim), and the output, (n, dim), of the expert of all rows; zeros without one.

    Dai et al., "DeepSeekMoE" (arXiv:2401.06066), section 3.2; Qwen2-MoE multiplies its output by sigmoid(w h).
    """
    if not record.shared_ffn_dim:
        return h[:, :0], np.zeros_like(h)
    inner = _hidden(run, h, f"{name}.shared_ffn", record)
    y = run.linear(inner, f"{name}.shared_ffn_down")
    return inner, sigmoid(run.linear(h, f"{name}.shared_gate")) * y if record.shared_gate else y


def _hidden(run: _Pass, h: Array, name: str, record: LayerConfig, weights: Array | float = 1.0) -> Array:
    """Plain: act(up h); gated: act(gate h) * up h. h (n, dim) -> (n, ffn_dim). weights (n, 1) multiply gate h and up h.

    "Attention Is All You Need", equation 2; Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202), equation 6.
    The limit and the offset are those of the gpt-oss model card (arXiv:2508.10925), section 2.1.
    """
    up = weights * run.linear(h, f"{name}_up")
    if run.config.activation == XIELU:
        return xielu(up, *(_vector(run.checkpoint, f"{name}_alpha_{sign}.weight") for sign in "pn"))
    activate = ACTIVATIONS[run.config.activation]
    if record.ffn == "plain" or record.plain_experts:
        return activate(up)
    gate = weights * run.linear(h, f"{name}_gate")
    if limit := record.activation_limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return activate(gate) * (up + record.up_offset)


def _inverse_frequencies(checkpoint: Checkpoint, table: int, context: int) -> Array:
    """The table's frequencies in a session of `context` positions: (rope_dim / 2)."""
    long = 0 < checkpoint.config.rope_original_context[table] < context
    return _vector(checkpoint, f"rope.{table}.inv_freq_long" if long else f"rope.{table}.inv_freq")


def _tensor(checkpoint: Checkpoint, name: str) -> LazyTensor:
    """A tensor that the config needs."""
    found = checkpoint.tensors.get(name)
    if found is None:
        raise ExportError(f"the checkpoint has no tensor {name}, which its config requires")
    return found


def _vector(checkpoint: Checkpoint, name: str) -> Array:
    return _tensor(checkpoint, name).array().astype(np.float64)


def _check(config: ModelConfig, sequences: Sequence[Sequence[int]], context: int) -> None:
    if not 0 < context <= config.context:
        raise ArgumentError(f"context is {context}, expected 1 to {config.context}")
    if not sequences:
        raise ArgumentError("sequences is empty, expected at least one sequence")
    for i, ids in enumerate(sequences):
        if not 0 < len(ids) <= context:
            raise ArgumentError(f"sequence {i} has {len(ids)} tokens, expected 1 to {context}")
        wrong = [token for token in ids if not 0 <= token < config.vocab_size]
        if wrong:
            raise ArgumentError(f"sequence {i} has token id {wrong[0]}, expected 0 to {config.vocab_size - 1}")
    kinds = {"norm": ("rms", "layer"), "activation": (*ACTIVATIONS, XIELU), "qk_norm": QK_NORMS}
    for name, values in kinds.items():
        if (value := getattr(config, name)) not in values:
            raise UnsupportedError(f"config: {name} {value!r} is not supported by this version")
    for layer, record in enumerate(config.layers):
        for name, values in SUPPORTED.items():
            if (value := getattr(record, name)) not in values:
                raise UnsupportedError(f"layer {layer}: {name} {value!r} is not supported by this version")
