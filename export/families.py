"""The model families as Hugging Face stores them: which tensors there are, what they are called here, how they lie.

Plain data, read in both directions: `hf` imports with it, `to_hf` writes with it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """A weight, and perhaps a bias, under one name.

    name: Hugging Face's, without the family's prefix; "{l}" is the layer. parts: the canonical names, several where one
    tensor holds several matrices one after another along the output dimension. transposed: the weight is stored as
    (in, out). bias: the config key that says whether there is a bias, or "always", or "never".
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    bias: str = "never"

    @property
    def per_layer(self) -> bool:
        return "{l}" in self.name

    def full_name(self, kind: str, layer: int = 0) -> str:
        """Hugging Face's name, without prefix, of the "weight" or "bias"."""
        return f"{self.name.format(l=layer)}.{kind}"

    def part_names(self, kind: str, layer: int = 0) -> tuple[str, ...]:
        """The canonical names of the "weight" or "bias"."""
        return tuple(f"{part.format(l=layer)}.{kind}" for part in self.parts)


@dataclass(frozen=True)
class Family:
    """One model_type. prefix: before all names but HEAD's in a complete checkpoint, and before none in a bare model's.

    architectures: transformers' classes with an output matrix, the first is the one to write. bare: its class without.
    ignored: patterns of tensors, without prefix, that are no weights (masks and tables that old versions stored).
    """

    model_type: str
    architectures: tuple[str, ...]
    bare: str
    prefix: str
    modules: tuple[Module, ...]
    ignored: tuple[str, ...]


# The output matrix, the same in every family and never with the prefix; absent where the embedding serves for it.
HEAD = Module("lm_head", ("output",))

LLAMA = Family(
    model_type="llama",
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),  # the second is of the first conversions
    bare="LlamaModel",
    prefix="model.",
    modules=(
        Module("embed_tokens", ("token_embedding",)),
        Module("layers.{l}.input_layernorm", ("layers.{l}.attn_norm",)),
        Module("layers.{l}.self_attn.q_proj", ("layers.{l}.attn_q",), bias="attention_bias"),
        Module("layers.{l}.self_attn.k_proj", ("layers.{l}.attn_k",), bias="attention_bias"),
        Module("layers.{l}.self_attn.v_proj", ("layers.{l}.attn_v",), bias="attention_bias"),
        Module("layers.{l}.self_attn.o_proj", ("layers.{l}.attn_out",), bias="attention_bias"),
        Module("layers.{l}.post_attention_layernorm", ("layers.{l}.ffn_norm",)),
        Module("layers.{l}.mlp.gate_proj", ("layers.{l}.ffn_gate",), bias="mlp_bias"),
        Module("layers.{l}.mlp.up_proj", ("layers.{l}.ffn_up",), bias="mlp_bias"),
        Module("layers.{l}.mlp.down_proj", ("layers.{l}.ffn_down",), bias="mlp_bias"),
        Module("norm", ("output_norm",)),
    ),
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",),
)

GPT2 = Family(
    model_type="gpt2",
    architectures=("GPT2LMHeadModel",),
    bare="GPT2Model",
    prefix="transformer.",
    modules=(
        Module("wte", ("token_embedding",)),
        Module("wpe", ("position_embedding",)),
        Module("h.{l}.ln_1", ("layers.{l}.attn_norm",), bias="always"),
        Module(
            "h.{l}.attn.c_attn",
            ("layers.{l}.attn_q", "layers.{l}.attn_k", "layers.{l}.attn_v"),
            transposed=True,
            bias="always",
        ),
        Module("h.{l}.attn.c_proj", ("layers.{l}.attn_out",), transposed=True, bias="always"),
        Module("h.{l}.ln_2", ("layers.{l}.ffn_norm",), bias="always"),
        Module("h.{l}.mlp.c_fc", ("layers.{l}.ffn_up",), transposed=True, bias="always"),
        Module("h.{l}.mlp.c_proj", ("layers.{l}.ffn_down",), transposed=True, bias="always"),
        Module("ln_f", ("output_norm",), bias="always"),
    ),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)

FAMILIES = {family.model_type: family for family in (LLAMA, GPT2)}

# transformers' names of the activations that the engine computes; the first of several is the one to write.
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
    "quick_gelu": "quick_gelu",
}
