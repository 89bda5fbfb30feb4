"""A tiny nomic-embed-text-v2-moe by its published names, and its outputs in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.tiny_checkpoints import random_tensor

Array = NDArray[np.float64]

DIM, WIDTH, HEADS, LAYERS, VOCAB, EXPERTS, USED, BASE, EPS = 40, 52, 4, 3, 61, 4, 2, 500.0, 0.05
IDS = list(range(3, 40))
MOE: dict[str, Any] = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "causal": False,
    "dense_seq_output": True,
    "expert_choice_router": False,
    "ffn_div": 1,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "layer_norm_epsilon": EPS,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": USED,
    "n_embd": DIM,
    "n_head": HEADS,
    "n_inner": WIDTH,
    "n_layer": LAYERS,
    "n_positions": 64,
    "num_experts": EXPERTS,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": BASE,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "router_aux_loss_coef": 0.1,
    "type_vocab_size": 1,
    "use_flash_attn": True,
    "use_rms_norm": None,
    "use_xentropy": True,
    "vocab_size": VOCAB,
}


def moe_tensors() -> dict[str, NDArray[np.float32]]:
    """The tensors of a tiny nomic-embed-text-v2-moe, by their published names."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, DIM),
        "embeddings.token_type_embeddings.weight": (1, DIM),
    }
    norms = ["emb_ln"]
    for layer in range(LAYERS):
        p = f"encoder.layers.{layer}"
        shapes |= {f"{p}.attn.Wqkv.weight": (3 * DIM, DIM), f"{p}.attn.Wqkv.bias": (3 * DIM,)}
        shapes |= {f"{p}.attn.out_proj.weight": (DIM, DIM), f"{p}.attn.out_proj.bias": (DIM,)}
        norms += [f"{p}.norm1", f"{p}.norm2"]
        if layer % 2:
            shapes |= {f"{p}.mlp.router.layer.weight": (EXPERTS, DIM), f"{p}.mlp.experts.bias": (DIM,)}
            shapes |= dict.fromkeys((f"{p}.mlp.experts.mlp.w1", f"{p}.mlp.experts.mlp.w2"), (EXPERTS * WIDTH, DIM))
        else:
            shapes |= {f"{p}.mlp.fc1.weight": (WIDTH, DIM), f"{p}.mlp.fc1.bias": (WIDTH,)}
            shapes |= {f"{p}.mlp.fc2.weight": (DIM, WIDTH), f"{p}.mlp.fc2.bias": (DIM,)}
    shapes |= {f"{norm}.{kind}": (DIM,) for norm in norms for kind in ("weight", "bias")}
    return {name: random_tensor(name, shape) for name, shape in shapes.items()}


def gelu(x: Array) -> Array:
    return np.asarray(x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def moe_rows(stored: dict[str, NDArray[np.float32]]) -> Array:
    """The outputs of all tokens in float64: the experts' weights are not divided by their sum, and share one bias."""
    t = {name: values.astype(np.float64) for name, values in stored.items()}
    n, width = len(IDS), DIM // HEADS

    def norm(x: Array, name: str) -> Array:
        centered = x - x.mean(axis=-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + EPS)
        return np.asarray(scaled * t[f"{name}.weight"] + t[f"{name}.bias"])

    angles = np.tile(np.arange(n)[:, None] / BASE ** (np.arange(0, width, 2) / width), 2)

    def rotated(x: Array) -> Array:
        first, second = np.split(x, 2, axis=-1)
        return np.asarray(x * np.cos(angles) + np.concatenate([-second, first], axis=-1) * np.sin(angles))

    embedded = t["embeddings.word_embeddings.weight"][IDS] + t["embeddings.token_type_embeddings.weight"]
    x = norm(embedded, "emb_ln")
    for layer in range(LAYERS):
        p = f"encoder.layers.{layer}"
        qkv = (x @ t[f"{p}.attn.Wqkv.weight"].T + t[f"{p}.attn.Wqkv.bias"]).reshape(n, 3, HEADS, width)
        q, k, v = qkv.transpose(1, 2, 0, 3)
        weights = softmax(rotated(q) @ rotated(k).transpose(0, 2, 1) / math.sqrt(width))
        mixed = (weights @ v).transpose(1, 0, 2).reshape(n, DIM)
        x = norm(x + mixed @ t[f"{p}.attn.out_proj.weight"].T + t[f"{p}.attn.out_proj.bias"], f"{p}.norm1")
        if layer % 2:
            up, down = (t[f"{p}.mlp.experts.mlp.{w}"].reshape(EXPERTS, WIDTH, DIM) for w in ("w1", "w2"))
            scores = softmax(x @ t[f"{p}.mlp.router.layer.weight"].T)
            y = np.tile(t[f"{p}.mlp.experts.bias"], (n, 1))
            for row, own in enumerate(scores):
                for expert in np.argsort(-own)[:USED]:
                    y[row] += own[expert] * (gelu(up[expert] @ x[row]) @ down[expert])
        else:
            hidden = gelu(x @ t[f"{p}.mlp.fc1.weight"].T + t[f"{p}.mlp.fc1.bias"])
            y = hidden @ t[f"{p}.mlp.fc2.weight"].T + t[f"{p}.mlp.fc2.bias"]
        x = norm(x + y, f"{p}.norm2")
    return x
