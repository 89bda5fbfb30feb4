"""The parity cases of LLaMA and GPT-2: tiny configs, with two that differ in each key that affects logits.

Base values are unusual on purpose (a large epsilon, a small theta), so that a reader that ignores a key and uses the
common default computes other logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from golden.tiny_checkpoints import Config, changed

TOLERANCE = 1e-4  # largest max|difference| / max|reference| of a row
MIN_EFFECT = 100 * TOLERANCE  # a key that affects logits changes them by at least this much


@dataclass(frozen=True)
class Case:
    """A config to compare with transformers.

    Attributes:
        name: The model type and what differs from the base case.
        config: The contents of config.json.
        context: The context of the session.
        n_tokens: Number of tokens to evaluate.
        base: The case from which it differs in one key, or None.
    """

    name: str
    config: Config
    context: int
    n_tokens: int
    base: str | None

    @property
    def text(self) -> Config:
        """The config of the language model, which a model with images can have in an object of its own."""
        text: Config = self.config.get("text_config", self.config)
        return text

    @property
    def ids(self) -> list[int]:
        """The token ids to evaluate, with the first and the last of the vocabulary."""
        vocab = int(self.text["vocab_size"])
        drawn = np.random.RandomState(0).random_sample(self.n_tokens - 2) * vocab
        return [vocab - 1, 0, *(int(x) for x in drawn)]

    @property
    def stored_rows(self) -> list[int]:
        """The positions whose logits are stored."""
        return sorted({0, 1, 2, self.n_tokens // 3, self.n_tokens // 2, self.n_tokens - 1})


LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 301,
    "hidden_size": 40,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,
    "rope_theta": 500.0,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "torch_dtype": "float32",
    "vocab_size": 301,
    "n_embd": 40,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "n_inner": 171,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 0.05,
    "scale_attn_weights": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

LINEAR = {"type": "linear", "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0],
}

_cases: dict[str, Case] = {}


def _add(name: str, start: Config, base: str | None = None, context: int = 64, **changes: object) -> None:
    """Add a case: `start` with changes; None removes a key."""
    _cases[name] = Case(name, changed(start, **changes), context, min(40, context), base)


def _add_scaling(name: str, scaling: Config, **variants: object) -> None:
    """Add a case with RoPE scaling and, for each variant, a case with another value of that key."""
    _add(name, LLAMA, "llama", rope_scaling=scaling)
    for key, value in variants.items():
        _add(f"{name}-{key}", LLAMA, name, rope_scaling={**scaling, key: value})


# ---- LLaMA: grouped-query attention, biases, untied
_add("llama", LLAMA)
_add("llama-mha", LLAMA, "llama", num_key_value_heads=4)
_add("llama-mha-by-default", LLAMA, num_key_value_heads=None)
_add("llama-mqa", LLAMA, "llama", num_key_value_heads=1)
_add("llama-wide-heads", LLAMA, "llama", head_dim=14)
_add("llama-more-heads", LLAMA, "llama", num_attention_heads=8)
# they differ in the number of heads alone, in no shape of a tensor
_add("llama-heads-by-default", LLAMA, num_key_value_heads=None, head_dim=None)
_add(
    "llama-num_attention_heads",
    LLAMA,
    "llama-heads-by-default",
    num_key_value_heads=None,
    head_dim=None,
    num_attention_heads=2,
)
_add("llama-head_dim-by-default", LLAMA, head_dim=None)
_add(
    "llama-odd",
    LLAMA,
    vocab_size=293,
    hidden_size=45,
    intermediate_size=113,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=6,
)
_add("llama-no-biases", LLAMA, attention_bias=None, mlp_bias=None)
_add("llama-attention_bias", LLAMA, "llama", attention_bias=False)
_add("llama-mlp_bias", LLAMA, "llama", mlp_bias=False)
_add("llama-tie_word_embeddings", LLAMA, "llama", tie_word_embeddings=True)
_add("llama-heads", LLAMA, "llama", num_attention_heads=2, num_key_value_heads=1, head_dim=20)
_add("llama-rms_norm_eps", LLAMA, "llama", rms_norm_eps=1e-5)
_add("llama-rope_theta", LLAMA, "llama", rope_theta=10000.0)
for _activation in ("gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"):
    _add(f"llama-{_activation}", LLAMA, "llama", hidden_act=_activation)

# ---- RoPE scaling by the older key rope_scaling and the newer rope_parameters
_add_scaling("llama-linear", LINEAR, factor=2.0)
_add("llama-dynamic", LLAMA, rope_scaling={"type": "dynamic", "factor": 2.0})
_add_scaling(
    "llama-yarn",
    YARN,
    factor=2.0,
    original_max_position_embeddings=32,
    beta_fast=4.0,
    beta_slow=1.0,
    attention_factor=1.5,
    truncate=True,
)
_mscale = {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}
_add("llama-yarn-mscale-both", LLAMA, "llama-yarn", rope_scaling=_mscale)
_add("llama-yarn-mscale", LLAMA, "llama-yarn-mscale-both", rope_scaling={**_mscale, "mscale": 4.0})
_add("llama-yarn-mscale_all_dim", LLAMA, "llama-yarn-mscale-both", rope_scaling={**_mscale, "mscale_all_dim": 3.0})
_add(
    "llama-yarn-defaults",
    LLAMA,
    "llama-yarn",
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
)
_add_scaling(
    "llama-llama3", LLAMA3, factor=2.0, low_freq_factor=2.0, high_freq_factor=8.0, original_max_position_embeddings=16
)
_long_factor = [1.0, 3.0, 2.0, 4.0, 9.0]
_add_scaling(
    "llama-longrope",
    LONGROPE,
    long_factor=_long_factor,
    factor=10.0,
    attention_factor=1.3,
    original_max_position_embeddings=8,
)
_add(
    "llama-longrope-max_position_embeddings",
    LLAMA,
    "llama-longrope",
    rope_scaling=LONGROPE,
    max_position_embeddings=512,
)
_add(
    "llama-longrope-original-outside",
    LLAMA,
    "llama-longrope",
    rope_scaling=LONGROPE,
    original_max_position_embeddings=8,
)
_add("llama-yarn-factor-null", LLAMA, "llama-yarn", rope_scaling={**YARN, "factor": None}, max_position_embeddings=128)
_add("llama-longrope-below", LLAMA, context=16, rope_scaling=LONGROPE)
_add(
    "llama-longrope-below-short_factor",
    LLAMA,
    "llama-longrope-below",
    context=16,
    rope_scaling={**LONGROPE, "short_factor": [1.0, 1.0, 2.0, 3.0, 4.0]},
)
_add(
    "llama-rope_parameters",
    LLAMA,
    "llama",
    rope_theta=None,
    rope_parameters={"rope_type": "default", "rope_theta": 2000.0},
)
_add("llama-rope_parameters-yarn", LLAMA, "llama-yarn", rope_theta=None, rope_parameters={**YARN, "rope_theta": 2000.0})

# ---- GPT-2: tied by default
_add("gpt2", GPT2)
_add("gpt2-n_inner-by-default", GPT2, n_inner=None)
_add("gpt2-odd", GPT2, vocab_size=293, n_embd=45, n_head=3, n_inner=113)
_add("gpt2-n_head", GPT2, "gpt2", n_head=2)
_add("gpt2-layer_norm_epsilon", GPT2, "gpt2", layer_norm_epsilon=1e-5)
_add("gpt2-scale_attn_weights", GPT2, "gpt2", scale_attn_weights=False)
_add("gpt2-tie_word_embeddings", GPT2, "gpt2", tie_word_embeddings=False)
for _activation, _other in (("relu", "gpt2"), ("silu", "gpt2"), ("gelu", "gpt2-relu"), ("quick_gelu", "gpt2-silu")):
    _add(f"gpt2-{_activation}", GPT2, _other, activation_function=_activation)
# quick_gelu is close to gelu_new; more layers increase the difference
_add("gpt2-deep", GPT2, n_layer=8)
_add("gpt2-deep-quick_gelu", GPT2, "gpt2-deep", n_layer=8, activation_function="quick_gelu")

CASES: dict[str, Case] = _cases

# GELU and its tanh form differ by at most 5e-4, and norms keep the effect below MIN_EFFECT. With 2 to 24 layers of
# these weights the logits differ by 2e-4 to 2e-3. Rounding errors are 1e-6 to 1e-5. The right function must be ten
# times closer than the other one.
CLOSE_PAIRS = (("gpt2", "gpt2-gelu"), ("llama-gelu", "llama-gelu_pytorch_tanh"))
