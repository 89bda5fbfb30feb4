"""What the tables of parity cases share: a config with every family's sizes, and cases that differ in one key."""

from __future__ import annotations

from golden.cases import Case
from golden.tiny_checkpoints import Config, changed

CONTEXT, TOKENS = 64, 40
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def cases_of(start: Config, **variants: Config) -> dict[str, Case]:
    """The base case of a family, named by its model_type, and variants of it; None removes a key."""
    name = start["model_type"]
    cases = {name: Case(name, start, CONTEXT, TOKENS, None)}
    for variant, changes in variants.items():
        cases |= variant_of(cases[name], f"{name}-{variant}", **changes)
    return cases


def variant_of(base: Case, name: str, **changes: object) -> dict[str, Case]:
    """A case that differs from another one, by its name."""
    return {name: Case(name, changed(base.config, **changes), CONTEXT, TOKENS, base.name)}


def decoder(model_type: str, architecture: str, **keys: object) -> Config:
    """A config with the sizes that all families share."""
    return changed(
        {
            "architectures": [architecture],
            "model_type": model_type,
            "torch_dtype": "float32",
            "vocab_size": 61,
            "hidden_size": 40,
            "intermediate_size": 52,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 0.05,
            "rope_theta": 500.0,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        **keys,
    )
