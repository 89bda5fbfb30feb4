"""The model families as Hugging Face stores them: one row each in one table, FAMILIES.

A row says which config keys a family has, what its graph is (docs/format.md), and its tensors: their names here and
there, and their layout. It is plain data, which `config` and `model` use to read and `write` uses to write.
"""

from __future__ import annotations

from llamac.export.hf.families_delta_net import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from llamac.export.hf.families_experts import GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from llamac.export.hf.families_gated import (
    ERNIE,
    EXAONE4,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3_TEXT,
    GLM,
    GLM4,
    GRANITE,
    GRANITE_HYBRID,
    HUNYUAN,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MISTRAL3,
    NANOCHAT,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from llamac.export.hf.families_layer_norm import COHERE2, GPT2, GPT_NEOX, OLMO, PHI, STABLELM, STARCODER2
from llamac.export.hf.family_parts import HEAD as HEAD

_ROWS = (
    *(LLAMA, GPT2, MISTRAL, MINISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, GEMMA3, PHI3, SMOLLM3, GRANITE, OLMO),
    *(OLMO2, STABLELM, GPT_NEOX, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GPT_OSS, SEED_OSS, STARCODER2),
    *(MINISTRAL3, MISTRAL3, OLMO3, EXAONE4, GRANITE_HYBRID, HUNYUAN, ERNIE, GLM, GLM4, COHERE2, PHI, NANOCHAT),
    *(QWEN3_NEXT, QWEN3_5_TEXT, QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_MOE),
)
FAMILIES = {family.model_type: family for family in _ROWS}

# transformers' names of the engine's activations. The first of several names is the one to write.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
