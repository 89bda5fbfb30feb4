"""Rows of the table of GGUF architectures: those that are only read or compute nearly what another one does."""

from __future__ import annotations

from llamac.export.distances import USUAL_BIAS
from llamac.export.gguf.architecture import MAX_ALIBI_BIAS, REQUIRED, Architecture

# The parts of a head whose pairs count other positions in models with images. Those of a token of text are the same.
SECTIONS = "rope.dimension_sections"
GRANITE_SCALES: dict[str, object] = {
    "attention.scale": 0.0,
    "embedding_scale": 0.0,
    "residual_scale": 0.0,
    "logit_scale": 0.0,
}
# Multiplies RoPE's base by a power of itself.
BASE_ALPHA = "rope.scaling.alpha"

READ_ONLY = {
    # Falcon 40B has a norm for each of the two, of which that of the network has the name of Falcon 7B's only one
    "falcon": Architecture(
        "falcon",
        norm="layer",
        ffn="plain",
        activation="gelu_erf",
        placement="parallel",
        names={"attn_norm": "attn_norm_2", "ffn_norm": "attn_norm"},
        or_names={"attn_norm": "attn_norm"},
        read_only=True,
    ),
    "bloom": Architecture(
        "bloom",
        norm="layer",
        position="none",
        ffn="plain",
        activation="gelu_tanh",
        alibi=USUAL_BIAS,
        names={"embedding_norm": "token_embd_norm"},
        fused=("attn_qkv",),
        biases="all",
        square=True,
    ),
    "mpt": Architecture(
        "mpt",
        norm="layer",
        position="none",
        ffn="plain",
        activation="gelu_erf",
        zero_norm_biases=True,
        keys={MAX_ALIBI_BIAS: REQUIRED},
        fused=("attn_qkv",),
        biases="any",
        square=True,
    ),
    "qwen": Architecture("qwen2", halves_ffn=True, read_only=True),
    "codeshell": Architecture("starcoder2", norm="layer", ffn="plain", activation="gelu_tanh", read_only=True),
    "exaone": Architecture("exaone", rope_tensors=("freqs",)),
    "internlm2": Architecture("llama", paired=True, read_only=True),
    "xverse": Architecture("llama", paired=True, read_only=True),
    # 40 layers are Baichuan 13B's, whose files have keys of RoPE as well
    "baichuan": Architecture("llama", paired=True, alibi_depth=40, read_only=True),
    # early files have no keys for the scales of the embedding and the branches
    "minicpm": Architecture(
        "granite",
        paired=True,
        embedding_scale=12.0,
        branch_scale=1.4,
        logit_dim=256,
        keys={key: value for key, value in GRANITE_SCALES.items() if key != "attention.scale"},
        rope_tensors=("freqs", "long", "short"),
        read_only=True,
    ),
    "command-r": Architecture(
        "cohere",
        norm="layer",
        placement="parallel",
        paired=True,
        zero_norm_biases=True,
        multiplies_logits=True,
        keys={"logit_scale": 0.0},
        output="never",
        square=True,
    ),
    "nemotron": Architecture(
        "nemotron", norm="layer", ffn="plain", activation="relu2", biases="any", output="must", square=True
    ),
    # the norms have no weights
    "olmo": Architecture("olmo", norm="layer", paired=True, plain_norms=True, read_only=True),
    "orion": Architecture("stablelm", norm="layer", read_only=True),
    "hunyuan_vl": Architecture(
        "hunyuan_v1_dense",
        qk_norm="head",
        qk_norm_after_rope=True,
        keys={SECTIONS: None, BASE_ALPHA: None},
        read_only=True,
    ),
}
