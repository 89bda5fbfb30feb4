"""Adapters whose logits tests compare with PEFT's: at least one for each field of LoraConfig that affects logits.

tests/export/test_adapter_files.py covers fields without effect and fields that llamac rejects.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from golden.cases import CASES, Case
from golden.family_cases import FAMILY_CASES

LINEAR = [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"]
LLAMA, TIED = "llama", "llama-tie_word_embeddings"
ALL_CASES: dict[str, Case] = {**CASES, **FAMILY_CASES}


@dataclass(frozen=True)
class AdapterCase:
    """An adapter.

    Attributes:
        base: The name of the base model's case.
        options: Arguments of LoraConfig.
        save_embeddings: Whether PEFT stores the base's embeddings.
    """

    base: str
    options: dict[str, Any]
    save_embeddings: bool | str = field(default="auto")

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the arguments of LoraConfig, which may modify them."""
        return copy.deepcopy({"r": 4, "lora_alpha": 10, **self.options})

    @property
    def ids(self) -> list[int]:
        """The token ids to evaluate."""
        return ALL_CASES[self.base].ids

    @property
    def rows(self) -> list[int]:
        """The positions whose logits are stored."""
        return [0, len(self.ids) // 2, len(self.ids) - 1]


def _llama(*targets: str, base: str = LLAMA, save_embeddings: bool | str = "auto", **options: Any) -> AdapterCase:
    return AdapterCase(base, {"target_modules": list(targets), **options}, save_embeddings)


def _tied(*targets: str, save_embeddings: bool | str = "auto", **options: Any) -> AdapterCase:
    return _llama(*targets, base=TIED, save_embeddings=save_embeddings, **options)


ADAPTER_CASES: dict[str, AdapterCase] = {
    "llama": _llama(*LINEAR),
    "rslora": _llama("q_proj", "down_proj", use_rslora=True),
    "patterns": _llama(
        "q_proj",
        "v_proj",
        rank_pattern={"v_proj": 2, "layers.1.self_attn.q_proj": 5},
        alpha_pattern={"layers.0.self_attn.q_proj": 40},
    ),
    "expressions": AdapterCase(
        LLAMA,
        {
            "target_modules": r".*\.(q|v)_proj$",
            "rank_pattern": {r"^model\.layers\.1\..*v_proj": 7},
            "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 40, r"layers\.[1-9]+\..*v_proj": 3, "proj": 20},
        },
    ),
    "negative-alpha": _llama("q_proj", lora_alpha=-2.5),
    "dora": _llama("k_proj", "up_proj", use_dora=True),
    "dora-rslora": _llama("k_proj", use_dora=True, use_rslora=True),
    "dora-embedding": _llama("embed_tokens", use_dora=True),
    "layers": _llama("q_proj", layers_to_transform=[1]),
    "one-layer": _llama("q_proj", "up_proj", layers_to_transform=0, layers_pattern="layers"),
    "exclude": AdapterCase(
        LLAMA, {"target_modules": "all-linear", "exclude_modules": ["up_proj", "layers.0.mlp.down_proj"]}
    ),
    "exclude-expression": AdapterCase(LLAMA, {"target_modules": "all-linear", "exclude_modules": r".*\.0\..*"}),
    "bias-all": _llama("q_proj", bias="all"),
    "bias-lora_only": _llama("q_proj", "up_proj", bias="lora_only"),
    "lora_bias": _llama("q_proj", "down_proj", base="llama-no-biases", lora_bias=True),
    "lora_bias-added": _llama("q_proj", "down_proj", lora_bias=True),
    "head": _llama("lm_head", "embed_tokens"),
    "saved": _llama("q_proj", modules_to_save=["lm_head", "embed_tokens"]),
    "saved-norm": _llama("q_proj", modules_to_save=["norm", "input_layernorm"]),
    "stored-embeddings": _llama("q_proj", save_embeddings=True),
    "tokens": _llama("q_proj", trainable_token_indices=[7, 1, 300]),
    "tokens-head": _llama("q_proj", trainable_token_indices={"lm_head": [7, 1, 300]}),
    "tokens-apart": _llama("q_proj", trainable_token_indices={"lm_head": [7, 1], "embed_tokens": [5, 300]}),
    "tokens-dora": _llama("up_proj", use_dora=True, trainable_token_indices=[5]),
    "parameters": _llama("k_proj", target_parameters=["q_proj.weight"]),
    "start-false": _llama("q_proj", init_lora_weights=False),
    "start-gaussian": _llama("q_proj", init_lora_weights="gaussian"),
    "start-orthogonal": _llama("q_proj", init_lora_weights="orthogonal"),
    "start-mica": _llama("q_proj", init_lora_weights="mica"),
    "start-eva": _llama("q_proj", init_lora_weights="eva"),
    "tied-embedding": _tied("embed_tokens"),
    "tied-head": _tied("lm_head"),
    "tied-both": _tied("lm_head", "embed_tokens"),
    "tied-ensured": _tied("embed_tokens", ensure_weight_tying=True),
    "tied-ensured-head": _tied("lm_head", ensure_weight_tying=True),
    "tied-tokens": _tied("q_proj", trainable_token_indices=[1, 5, 7]),
    "tied-tokens-by-name": _tied("q_proj", trainable_token_indices={"embed_tokens": [1, 5, 7]}),
    "tied-tokens-head": _tied("q_proj", trainable_token_indices={"lm_head": [1, 5, 7]}),
    "tied-tokens-both": _tied("q_proj", trainable_token_indices={"embed_tokens": [1, 5], "lm_head": [1, 5]}),
    "tied-tokens-apart": _tied("q_proj", trainable_token_indices={"lm_head": [7, 1], "embed_tokens": [5, 300, 1]}),
    "tied-tokens-ensured": _tied("q_proj", trainable_token_indices=[1, 5, 7], ensure_weight_tying=True),
    "tied-tokens-adapted-head": _tied("lm_head", trainable_token_indices=[1, 5, 7]),
    "tied-tokens-saved": _tied("q_proj", trainable_token_indices={"lm_head": [1, 5]}, modules_to_save=["embed_tokens"]),
    "tied-saved-embedding": _tied("q_proj", modules_to_save=["embed_tokens"]),
    "tied-saved-head": _tied("q_proj", modules_to_save=["lm_head"]),
    "tied-saved-both": _tied("q_proj", modules_to_save=["lm_head", "embed_tokens"]),
    "tied-saved-ensured": _tied("q_proj", modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "gpt2": AdapterCase("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "gpt2-dora": AdapterCase("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "gpt2-parameters": AdapterCase(
        "gpt2", {"target_modules": [], "target_parameters": ["attn.c_proj.weight", "c_fc.weight"]}
    ),
    "phi3": AdapterCase("phi3", {"target_modules": "all-linear"}),
    "gpt_neox": AdapterCase("gpt_neox", {"target_modules": "all-linear"}),
    "gemma2-saved": AdapterCase("gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "embed_tokens"]}),
    "stablelm-saved": AdapterCase(
        "stablelm", {"target_modules": ["q_proj"], "modules_to_save": ["q_layernorm", "k_layernorm"]}
    ),
    "mixtral": AdapterCase("mixtral", {"target_modules": "all-linear"}),
    "qwen3_moe": AdapterCase(
        "qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}
    ),
    "olmoe": AdapterCase(
        "olmoe",
        {
            "target_modules": [],
            "target_parameters": ["gate_up_proj", "layers.1.mlp.experts.down_proj", "gate.weight"],
            "alpha_pattern": {"experts.gate_up_proj": 7, "gate": 90, "gate.weight": 20},
            "rank_pattern": {"down_proj": 2},
        },
    ),
}
