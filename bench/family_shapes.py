"""Published models whose families a `Shape` cannot describe, as the keys and tensors of their GGUF files.

Layers can be left out, so that the rest of a large model fits into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# (name, dimensions with the columns last, the type of its numbers: None for the file's own)
Tensor = tuple[str, tuple[int, ...], str | None]
Keys = Mapping[str, Any]


@dataclass(frozen=True)
class FamilyShape:
    """A published model. `keys` and `layer` take a number of layers, and the index of one."""

    family: str
    layers: int
    vocabulary: int
    keys: Callable[[int], Keys]
    layer: Callable[[int], Iterator[Tensor]]
    outside: tuple[Tensor, ...]

    def tensors(self, n_layers: int) -> Iterator[Tensor]:
        """The tensors of a model with n_layers layers."""
        yield from self.outside
        for index in range(n_layers):
            for name, dims, kind in self.layer(index):
                yield f"blk.{index}.{name}", dims, kind


def _weights(*, kind: str | None = None, **shapes: tuple[int, ...]) -> Iterator[Tensor]:
    """Weights by name. Vectors are always F32; `kind` is the type of the matrices."""
    for name, dims in shapes.items():
        yield f"{name}.weight", dims, kind if len(dims) > 1 else "F32"


def _vector(name: str, n: int) -> Tensor:
    return name, (n,), "F32"


def _outside(vocabulary: int, dim: int, norm: str = "output_norm", *, tied: bool, kind: str | None = None) -> Any:
    names = ("token_embd",) if tied else ("token_embd", "output")
    return (*((f"{name}.weight", (vocabulary, dim), kind) for name in names), _vector(f"{norm}.weight", dim))


def _attention(dim: int, q: int, kv: int, out: int, head: int) -> Iterator[Tensor]:
    """Attention with norms of q and k: rows of q, rows of k and of v, columns of the output projection."""
    yield from _weights(attn_q=(q, dim), attn_k=(kv, dim), attn_v=(kv, dim), attn_output=(dim, out))
    yield from _weights(attn_q_norm=(head,), attn_k_norm=(head,))


def _gated(dim: int, width: int) -> Iterator[Tensor]:
    return _weights(ffn_gate=(width, dim), ffn_up=(width, dim), ffn_down=(dim, width))


# ---- LFM2


def _lfm2(index: int) -> Iterator[Tensor]:
    dim = 2048
    yield from _weights(attn_norm=(dim,), ffn_norm=(dim,))
    yield from _gated(dim, 8192)
    if index in _LFM2_ATTENTION:
        yield from _attention(dim, dim, 512, dim, 64)
    else:
        yield "shortconv.in_proj.weight", (3 * dim, dim), None
        yield "shortconv.out_proj.weight", (dim, dim), None
        yield "shortconv.conv.weight", (dim, 3), "F32"


_LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)


def _lfm2_keys(n_layers: int) -> Keys:
    return {
        "embedding_length": 2048,
        "feed_forward_length": 8192,
        "attention.head_count": 32,
        "attention.head_count_kv": [8 * (index in _LFM2_ATTENTION) for index in range(n_layers)],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "rope.dimension_count": 64,
        "shortconv.l_cache": 3,
    }


# ---- Qwen3.5 and 3.6: gated delta nets, of 16 heads of keys and 32 of values, each of 128 dimensions


def _qwen35_mixer(dim: int, kv_heads: int, index: int) -> Iterator[Tensor]:
    yield from _weights(attn_norm=(dim,), post_attention_norm=(dim,))
    if index % 4 == 3:
        yield from _attention(dim, 2 * 4096, 256 * kv_heads, 4096, 256)
        return
    yield from _weights(attn_qkv=(8192, dim), attn_gate=(4096, dim), ssm_out=(dim, 4096), ssm_norm=(128,))
    yield from _weights(kind="F32", ssm_beta=(32, dim), ssm_alpha=(32, dim), ssm_conv1d=(8192, 4))
    yield _vector("ssm_a", 32)
    yield _vector("ssm_dt.bias", 32)


def _qwen35(index: int) -> Iterator[Tensor]:
    yield from _qwen35_mixer(2560, 4, index)
    yield from _gated(2560, 9216)


def _qwen36(index: int) -> Iterator[Tensor]:
    dim, experts, width = 2048, 256, 512
    yield from _qwen35_mixer(dim, 2, index)
    yield from _weights(ffn_gate_exps=(experts, width, dim), ffn_up_exps=(experts, width, dim))
    yield from _weights(ffn_down_exps=(experts, dim, width))
    yield from _weights(kind="F32", ffn_gate_inp=(experts, dim))
    yield from _weights(ffn_gate_shexp=(width, dim), ffn_up_shexp=(width, dim), ffn_down_shexp=(dim, width))
    yield from _weights(ffn_gate_inp_shexp=(dim,))


def _delta_net_keys(dim: int, kv_heads: int, **more: int) -> Keys:
    return {
        "embedding_length": dim,
        "attention.head_count": 16,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 32,
        "ssm.inner_size": 4096,
        **more,
    }


# ---- Gemma 4 E4B: every sixth layer sees everything; the last 18 layers use the keys and values of earlier ones


def _gemma4(index: int) -> Iterator[Tensor]:
    dim, head = 2560, 512 if index % 6 == 5 else 256
    yield from _weights(attn_norm=(dim,), post_attention_norm=(dim,), ffn_norm=(dim,), post_ffw_norm=(dim,))
    yield from _attention(dim, 8 * head, 2 * head, 8 * head, head)
    yield from _gated(dim, 10240)
    yield from _weights(inp_gate=(256, dim), proj=(dim, 256), post_norm=(dim,), layer_output_scale=(1,))


def _gemma4_keys(n_layers: int) -> Keys:
    return {
        "embedding_length": 2560,
        "feed_forward_length": 10240,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.shared_kv_layers": max(0, n_layers - 24),
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": [index % 6 != 5 for index in range(n_layers)],
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
    }


_GEMMA4_LAYERS = 42
_GEMMA4_OUTSIDE: tuple[Tensor, ...] = (
    _vector("rope_freqs.weight", 256),
    *_outside(262144, 2560, tied=True),
    ("per_layer_token_embd.weight", (262144, 256 * _GEMMA4_LAYERS), None),
    ("per_layer_model_proj.weight", (256 * _GEMMA4_LAYERS, 2560), None),
    _vector("per_layer_proj_norm.weight", 256),
)


# ---- gpt-oss, whose experts are in MXFP4, and whose other matrices are in Q8_0


def _gpt_oss(index: int) -> Iterator[Tensor]:
    dim, experts = 2880, 32
    yield from _weights(attn_norm=(dim,), post_attention_norm=(dim,), attn_sinks=(64,))
    outputs = {"attn_q": (4096, dim), "attn_k": (512, dim), "attn_v": (512, dim), "attn_output": (dim, 4096)}
    yield from _weights(kind="Q8_0", **outputs)
    for name, (rows, _) in outputs.items():
        yield _vector(f"{name}.bias", rows)
    yield from _weights(kind="F32", ffn_gate_inp=(experts, dim))
    yield _vector("ffn_gate_inp.bias", experts)
    for part in ("gate", "up", "down"):
        yield f"ffn_{part}_exps.weight", (experts, dim, dim), "MXFP4"
        yield f"ffn_{part}_exps.bias", (experts, dim), "F32"


_GPT_OSS_KEYS: Keys = {
    "embedding_length": 2880,
    "feed_forward_length": 2880,
    "attention.head_count": 64,
    "attention.head_count_kv": 8,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.sliding_window": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 150000.0,
    "rope.dimension_count": 64,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
    "expert_count": 32,
    "expert_used_count": 4,
    "expert_feed_forward_length": 2880,
}

FAMILY_SHAPES = {
    "lfm2-1.2b": FamilyShape("lfm2", 16, 65536, _lfm2_keys, _lfm2, _outside(65536, 2048, "token_embd_norm", tied=True)),
    "qwen3.5-4b": FamilyShape(
        *("qwen35", 32, 248320, lambda n: _delta_net_keys(2560, 4, feed_forward_length=9216)),
        *(_qwen35, _outside(248320, 2560, tied=True)),
    ),
    "qwen3.6-35b-a3b": FamilyShape(
        *("qwen35moe", 40, 248320),
        lambda n: {
            **_delta_net_keys(2048, 2, expert_count=256, expert_used_count=8),
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
        *(_qwen36, _outside(248320, 2048, tied=False)),
    ),
    "gemma-4-e4b": FamilyShape("gemma4", _GEMMA4_LAYERS, 262144, _gemma4_keys, _gemma4, _GEMMA4_OUTSIDE),
    "gpt-oss-20b": FamilyShape(
        *("gpt-oss", 24, 201088, lambda n: _GPT_OSS_KEYS),
        *(_gpt_oss, _outside(201088, 2880, tied=False, kind="Q8_0")),
    ),
}
