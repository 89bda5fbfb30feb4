"""Writes config.json of every family: the original one if it describes the checkpoint, else a new one.

This is the inverse of `config`: it computes each key of the family's row from the canonical config. It does not detect
what config.json cannot express; `write` does, by reading back what it wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import LlamacError
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.hf.classic_config import KINDS
from llamac.export.hf.config import parse_config, text_config
from llamac.export.hf.config_gemma4 import LAYER_VOCABULARY
from llamac.export.hf.decoder_config import AFTER_NORMS, EPS
from llamac.export.hf.experts_config import SCALES, SHARED, USED
from llamac.export.hf.families import ACTIVATIONS, row_of
from llamac.export.hf.family import Family
from llamac.export.hf.layers_config import DELTA_NET, LINEAR
from llamac.export.hf.mamba_config import EXPAND
from llamac.export.hf.mamba_config import KEYS as MAMBA2_KEYS
from llamac.export.hf.parsed_config import HfConfig
from llamac.export.hf.rope import BASES, FULL, PARTS, PROPORTIONAL, SLIDING
from llamac.export.hf.short_conv_config import SHORT_CONV, WIDTHS
from llamac.export.rope import make_rope
from llamac.format.strict_json import INFINITY

Json = dict[str, Any]


def config_json(checkpoint: Checkpoint, family: Family) -> Json:
    """The original config.json if it describes the checkpoint, else one that does, with the original's other keys."""
    original = _original(checkpoint, family)
    named = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    facts = _Facts(checkpoint, family, original)
    stated = {"tie_word_embeddings": checkpoint.config.tied_output, "vocab_size": checkpoint.config.vocab_size}
    if any(layer.layer_embedding_dim for layer in checkpoint.config.layers):
        stated[LAYER_VOCABULARY] = checkpoint.config.vocab_size  # the importer omits the rows after the vocabulary
    if family.mtp_key and (checkpoint.config.mtp or family.mtp_key in original):
        stated[family.mtp_key] = int(checkpoint.config.mtp is not None)
    plain = {**original, **named, **stated}
    if original:
        return plain if _says(plain, facts) else {**plain, **facts.keys()}
    # the family's default pad_token_id can be out of range
    return {**plain, **facts.keys(), **facts.rope(), **family.written_keys, "pad_token_id": None}


def config_differences(ours: ModelConfig, theirs: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ as float32, except the tokenizer's number of ids."""
    found = {}
    for field in fields(ModelConfig):
        one, other = getattr(ours, field.name), getattr(theirs, field.name)
        is_float = isinstance(one, float) or field.name == "rope_attention_factor"
        same = np.array_equal(np.float32(one), np.float32(other)) if is_float else one == other
        if field.name != "n_token_ids" and not same:
            found[field.name] = (one, other)
    return found


def same_rope(ours: LazyTensor, theirs: LazyTensor) -> bool:
    """Whether two RoPE tables are equal up to rounding."""
    return ours.shape == theirs.shape and np.allclose(ours.array(), theirs.array(), rtol=1e-6, atol=0)


def _original(checkpoint: Checkpoint, family: Family) -> Json:
    """The checkpoint's original config.json, for the language model only and with plain weights, or {}."""
    values = checkpoint.metadata.get("config")
    if not isinstance(values, dict):
        return {}
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    source = row_of(values) or family
    if source.written_as != family.model_type:
        return values
    try:
        text = text_config(values, source, [])
    except LlamacError:
        return {}
    if isinstance(text.get("layer_types"), list):  # transformers refuses types of MTP layers
        text["layer_types"] = text["layer_types"][: len(checkpoint.config.layers)]
    return {key: value for key, value in text.items() if key != "quantization_config"} | {
        name: _plain_rope(text[name], source, family)
        for name in ("rope_scaling", "rope_parameters")
        if isinstance(text.get(name), dict)
    }


def _plain_rope(rope: Json, source: Family, family: Family) -> Json:
    """The RoPE object of a model with images, for its language model's family: without the sections of positions."""
    dropped = set(source.rope_harmless) - set(family.rope_harmless)
    kept = {key: value for key, value in rope.items() if key not in dropped}
    return {key: source.rope_names.get(value, value) if "type" in key else value for key, value in kept.items()}


def _says(config: Json, facts: _Facts) -> bool:
    """Whether a config.json describes the checkpoint."""
    try:
        found: HfConfig = parse_config(config, [])
    except LlamacError:
        return False
    tables = [LazyTensor.of(table.inv_freq) for table in found.ropes]
    plain = LayerConfig("plain", 1)
    of_tensors = {field: getattr(plain, field) for field in facts.family.layer_numbers.values()}
    ours = replace(facts.model, mtp=None, layers=tuple(replace(layer, **of_tensors) for layer in facts.layers))
    return (
        not config_differences(ours, found.model)
        and all(same_rope(table, facts.tensors[f"rope.{i}.inv_freq"]) for i, table in enumerate(tables))
        and found.biases - {"always"} == {key for key in facts.biases() if facts.biases()[key]}
    )


def shortest(number: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


@dataclass(frozen=True)
class _Facts:
    """Computes the values of config.json from a checkpoint."""

    checkpoint: Checkpoint
    family: Family
    original: Json

    @property
    def model(self) -> ModelConfig:
        return self.checkpoint.config

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        return self.model.layers

    @property
    def tensors(self) -> dict[str, LazyTensor]:
        return self.checkpoint.tensors

    def keys(self) -> Json:
        """All keys that the canonical config determines, except RoPE's."""
        sizes = OWN_SIZES.get(self.family.model_type, SIZES)
        if any(name in self.family.keys for name in WIDTHS[1:]):
            sizes = {name: size for name, size in sizes.items() if name != WIDTHS[0]}
        usual = [name for name, value in self.family.keys.items() if value is not None or name not in PARTS]
        computed = {name: (KEYS | sizes)[name](self) for name in (*sizes, *usual) if name in KEYS | sizes}
        return computed | self.biases()

    def activation(self) -> str:
        """transformers' name of the activation; the family's default name if it means the same."""
        usual = str(self.family.keys[self.family.activation])
        if ACTIVATIONS[usual] == self.model.activation:
            return usual
        return next(name for name, meaning in ACTIVATIONS.items() if meaning == self.model.activation)

    def biases(self) -> dict[str, bool]:
        """The family's keys for biases, from the first layer that has the module."""
        found: dict[str, bool] = {}
        for module in self.family.modules:
            if module.bias not in ("always", "never", "only"):
                index = next(module.indices(self.model), None)
                names = module.part_names("bias", **index) if index else ()
                found[module.bias] = found.get(module.bias, False) or any(name in self.tensors for name in names)
        return found

    def width(self, kind: str) -> int | None:
        """ffn_dim of the first layer with or without experts."""
        layers = [layer for layer in self.layers if layer.ffn != "none"]
        found = [layer.ffn_dim for layer in layers if (layer.ffn == "experts") == (kind == "experts")]
        return found[0] if found else None

    def intermediate_size(self) -> int:
        """The FFN width of layers without experts. Without such layers, the original value or the experts' width.

        A shared expert with norms of its own is Gemma 4's network.
        """
        beside = next((layer.shared_ffn_dim for layer in self.layers if layer.expert_norms), 0)
        return beside or self.width("dense") or self.original.get("intermediate_size") or self.width("experts") or 1

    def has_experts(self) -> bool:
        return any(layer.ffn == "experts" for layer in self.layers)

    def expert(self, field: str) -> int:
        """A field of the first layer with experts."""
        return next((int(getattr(layer, field)) for layer in self.layers if layer.ffn == "experts"), 1)

    def delta_net(self, field: str) -> int | None:
        """A field of the first layer with a delta net."""
        return next((int(getattr(layer, field)) for layer in self.layers if layer.mixer == "delta_net"), None)

    def mamba2(self, field: str) -> int:
        """A field of the first layer with Mamba 2; without such layers 1, which config.json cannot contradict."""
        return next((int(getattr(layer, field)) for layer in self.layers if "mamba2" in layer.mixer), 1)

    def n_shared(self) -> int:
        """The number of experts of all rows. In families with a key for their width, it has no other meaning."""
        has_width = "moe_shared_expert_intermediate_size" in self.family.keys
        return 1 if has_width else self.expert("shared_ffn_dim") // self.expert("ffn_dim")

    def part_of_layer(self, layer: LayerConfig) -> str:
        """transformers' name of a layer that has one part."""
        if layer.mixer == "none":
            return "moe" if layer.ffn == "experts" else "mlp"
        return MIXERS.get(layer.mixer, FULL)

    def step_limits(self) -> list[Any]:
        high = shortest(self.model.state_step_max)
        return [shortest(self.model.state_step_min), high or INFINITY]

    def latent(self, field: str) -> int | None:
        """A field of latent attention, the same in all layers; None for 0."""
        return int(getattr(self.layers[0], field)) or None

    def first_dense(self) -> int:
        """The number of layers before the first one with experts."""
        return next((i for i, layer in enumerate(self.layers) if layer.ffn == "experts"), len(self.layers))

    def heads(self, field: str, *, windowed: bool) -> int:
        """A field of the heads in layers with or without a window; if there are none, in all layers."""
        layers = [layer for layer in self.layers if (layer.window > 0) == windowed] or self.layers
        return int(getattr(layers[0], field) or getattr(self.model, field))

    def is_wide(self) -> bool:
        """Whether layers that read the keys of others have wider networks."""
        widths = [(layer.ffn_dim, layer.shared_ffn_dim) for layer in self.layers if layer.kv_source >= 0]
        return any(found != (self.layers[0].ffn_dim, self.layers[0].shared_ffn_dim) for found in widths)

    def bases(self) -> list[float] | None:
        """The base of each layer's RoPE, 0 for none; None if all layers have the original one."""
        listed: list[float] | None = self.original.get("layer_rope_theta")
        if listed or all(layer.rope >= 0 for layer in self.layers):
            return listed
        base = self._base_and_factor(FULL)[0] or self.family.keys["rope_theta"]
        return [base if layer.rope >= 0 else 0 for layer in self.layers]

    def local_layers(self) -> list[str]:
        """GPT-Neo's names of the layers without and with a window."""
        return [KINDS[layer.window > 0] for layer in self.layers]

    def window(self) -> int | None:
        """The window of the layers that have one."""
        return next((layer.window for layer in self.layers if layer.window), None)

    def unused_window(self) -> int | None:
        """The value for no window: with layer_types, transformers requires a number."""
        usual: int | None = self.family.keys["sliding_window"]
        return usual if "layer_types" in self.family.keys else None

    def part(self) -> float:
        """The share of a head that RoPE rotates."""
        turned, whole = (self.model.rope_dim or (self.model.head_dim,))[0], self.model.head_dim
        return turned / whole if int(whole * (turned / whole)) == turned else (turned + 0.5) / whole

    # ---- RoPE, if there is no config.json with its parameters

    def rope(self) -> Json:
        """The bases of the frequencies, if these are the default ones or the default ones divided by a factor."""
        found: Json = {}
        if self.model.position == "none" and self.family.optional_rope:  # transformers has a base if the key is missing
            return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        if self.model.position != "rope":
            return found
        if self.family.two_ropes and "rope_local_base_freq" not in self.family.keys:
            for kind in (FULL, SLIDING):
                base, factor = self._base_and_factor(kind)
                scaling: Json = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
                if (part := self._turned_part(kind)) < 1:
                    scaling |= {"rope_type": PROPORTIONAL, "partial_rotary_factor": part}
                found[kind] = scaling if base is None else {**scaling, "rope_theta": base}
            return {"rope_parameters": found}
        usual = next((name for name in BASES if self.family.keys.get(name) is not None), "")
        for kind, name in ((FULL, usual), (SLIDING, "rope_local_base_freq")):
            if name not in self.family.keys:
                continue
            base, factor = self._base_and_factor(kind)
            if base is not None:
                found[name] = base
            if kind == FULL and factor != 1:
                found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        return found

    def _base_and_factor(self, kind: str) -> tuple[float | None, float]:
        """The base of the table of a kind of layers, if its frequencies tell it, and the factor that divides them."""
        frequencies = self._frequencies(kind)
        if frequencies is None:
            return None, 1.0
        turned = frequencies[frequencies > 0]
        if not len(turned):
            return 10000.0, 1.0  # with any base
        factor = shortest(1 / turned[0])
        if len(turned) == 1:
            return None, factor
        base = (turned[0] / turned[-1]) ** (len(frequencies) / (len(turned) - 1))

        def distance(rounded: float) -> float:
            plain = make_rope("default", {"rope_theta": rounded}, 2 * len(frequencies), 1).inv_freq
            return float(np.abs(plain[: len(turned)] / factor / turned - 1).max())

        # of equally close ones the shortest, because people write short numbers
        return min((float(f"{base:.{digits}g}") for digits in range(1, 10)), key=distance), factor

    def _turned_part(self, kind: str) -> float:
        """The share of the frequencies of a kind of layers that are not zero."""
        frequencies = self._frequencies(kind)
        return 1.0 if frequencies is None else np.count_nonzero(frequencies) / len(frequencies)

    def _frequencies(self, kind: str) -> NDArray[np.float64] | None:
        """The table of a kind of layers."""
        tables = {SLIDING if layer.window else FULL: layer.rope for layer in self.layers if layer.rope >= 0}
        table = f"rope.{tables.get(kind, 0)}.inv_freq"
        return self.tensors[table].array().astype(np.float64) if table in self.tensors else None


MIXERS = {"delta_net": LINEAR, "mamba2": LINEAR, "short_conv": SHORT_CONV}  # the kinds of layers in layer_types
GPT2_SIZES: dict[str, Callable[[_Facts], Any]] = {
    "n_embd": lambda facts: facts.model.dim,
    "n_layer": lambda facts: len(facts.layers),
    "n_head": lambda facts: facts.model.n_heads,
    "n_positions": lambda facts: facts.model.context,
}
MAMBA2_SIZES: dict[str, Callable[[_Facts], Any]] = {
    "hidden_size": lambda facts: facts.model.dim,
    "num_hidden_layers": lambda facts: len(facts.layers),
    "head_dim": lambda facts: facts.mamba2("state_value_dim"),
}
OWN_SIZES = {"gpt2": GPT2_SIZES, "mamba2": MAMBA2_SIZES}  # the keys of two families with other ones
SIZES: dict[str, Callable[[_Facts], Any]] = {
    "hidden_size": lambda facts: facts.model.dim,
    "intermediate_size": lambda facts: facts.intermediate_size(),
    "num_hidden_layers": lambda facts: len(facts.layers),
    "num_attention_heads": lambda facts: facts.model.n_heads,
}
# What the canonical config says of each other key; bases of RoPE and biases are `_Facts`' own.
KEYS: dict[str, Callable[[_Facts], Any]] = {
    **{key: functools.partial(_Facts.mamba2, field=field) for key, field in MAMBA2_KEYS.items() if key != "head_dim"},
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"), lambda facts: facts.activation()
    ),
    "multi_query": lambda facts: facts.model.n_kv_heads == 1,
    "rotary_dim": lambda facts: facts.model.rope_dim[0],
    "window_size": lambda facts: facts.window() or facts.family.keys["window_size"],
    "attention_types": lambda facts: [[facts.local_layers(), 1]],
    "attention_layers": lambda facts: facts.local_layers(),
    "n_inner": lambda facts: facts.width("dense"),
    "scale_attn_weights": lambda facts: facts.model.attention_scale != 1,
    "num_key_value_heads": lambda facts: (
        facts.model.n_heads if facts.latent("kv_lora_rank") else facts.heads("n_kv_heads", windowed=True)
    ),
    "head_dim": lambda facts: facts.heads("head_dim", windowed=True),
    "num_global_key_value_heads": lambda facts: facts.heads("n_kv_heads", windowed=False),
    "global_head_dim": lambda facts: facts.heads("head_dim", windowed=False),
    "attention_k_eq_v": lambda facts: any(layer.v_is_k for layer in facts.layers),
    "num_kv_shared_layers": lambda facts: sum(layer.kv_source >= 0 for layer in facts.layers),
    "use_double_wide_mlp": lambda facts: facts.is_wide(),
    "hidden_size_per_layer_input": lambda facts: facts.layers[0].layer_embedding_dim,
    LAYER_VOCABULARY: lambda facts: facts.model.vocab_size,
    "max_position_embeddings": lambda facts: facts.model.context,
    **dict.fromkeys(
        EPS,
        lambda facts: shortest(facts.model.norm_eps),
    ),
    "mup_enabled": lambda facts: facts.model.embedding_scale != 1,
    "embedding_multiplier": lambda facts: shortest(facts.model.embedding_scale),
    "residual_multiplier": lambda facts: shortest(facts.model.residual_scale),
    "logit_scale": lambda facts: shortest(facts.model.logit_scale),
    "logits_scaling": lambda facts: shortest(facts.model.logit_scale ** (1 if facts.family.multiplied_logits else -1)),
    "attention_multiplier": lambda facts: shortest(facts.model.attention_scale),
    "query_pre_attn_scalar": lambda facts: round(facts.model.attention_scale**-2),
    "final_logit_softcapping": lambda facts: shortest(facts.model.logit_soft_cap) or None,
    "attn_logit_softcapping": lambda facts: shortest(facts.model.attention_soft_cap) or None,
    "sliding_window": lambda facts: facts.window() or facts.unused_window(),
    "sliding_window_size": lambda facts: None,
    "use_sliding_window": lambda facts: facts.window() is not None,
    "max_window_layers": lambda facts: sum(not layer.window for layer in facts.layers),
    "layer_types": lambda facts: [MIXERS.get(layer.mixer, SLIDING if layer.window else FULL) for layer in facts.layers],
    "full_attn_idxs": lambda facts: None,
    "conv_L_cache": lambda facts: next((layer.conv_width for layer in facts.layers if layer.conv_width), 1),
    # other names, which transformers prefers even if they are null
    "tie_embedding": lambda facts: facts.model.tied_output,
    "block_ff_dim": lambda facts: facts.intermediate_size(),
    "block_auto_adjust_ff_dim": lambda facts: False,
    "num_dense_layers": lambda facts: facts.first_dense(),
    "use_expert_bias": lambda facts: bool(facts.expert("router_choice_bias")),
    **{key: functools.partial(_Facts.delta_net, field=field) for field, key in DELTA_NET.items()},
    **dict.fromkeys(
        EXPAND, lambda facts: facts.mamba2("state_heads") * facts.mamba2("state_value_dim") // facts.model.dim or 1
    ),
    "moe_latent_size": lambda facts: facts.model.expert_dim or None,
    "linear_allow_neg_eigval": lambda facts: bool(facts.model.state_beta_doubled),
    "time_step_limit": lambda facts: facts.step_limits(),
    "time_step_min": lambda facts: shortest(facts.model.state_step_min),
    "attn_layer_indices": lambda facts: [i for i, layer in enumerate(facts.layers) if layer.mixer == "attention"],
    "attn_rotary_emb": lambda facts: None,
    "layers_block_type": lambda facts: [facts.part_of_layer(layer) for layer in facts.layers],
    "layer_rope_theta": lambda facts: facts.bases(),
    "no_rope_layers": lambda facts: [int(layer.rope >= 0) for layer in facts.layers],
    "use_parallel_residual": lambda facts: facts.layers[0].placement == "parallel",
    **dict.fromkeys(AFTER_NORMS, lambda facts: facts.layers[0].placement == "sandwich"),
    "use_attention_gate": lambda facts: any(layer.output_gate != "none" for layer in facts.layers),
    **dict.fromkeys(("qk_layernorm", "use_qk_norm"), lambda facts: facts.model.qk_norm != "none"),
    **dict.fromkeys(PARTS, lambda facts: facts.part()),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "moe_num_experts"),
        lambda facts: facts.expert("n_experts") if facts.has_experts() or facts.family.ffn == "experts" else 0,
    ),
    "shared_intermediate_size": lambda facts: facts.width("dense") or facts.expert("shared_ffn_dim"),
    "position_embedding_type": lambda facts: "rope" if any(layer.rope >= 0 for layer in facts.layers) else None,
    "enable_moe_block": lambda facts: facts.has_experts(),
    "top_k_experts": lambda facts: facts.expert("n_experts_used"),
    **dict.fromkeys(USED, lambda facts: facts.expert("n_experts_used")),
    "moe_intermediate_size": lambda facts: facts.width("experts") or facts.intermediate_size(),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        lambda facts: facts.expert("shared_ffn_dim"),
    ),
    **{
        key: functools.partial(_Facts.latent, field=key)
        for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    },
    "qk_rope_head_dim": lambda facts: facts.model.head_dim - facts.layers[0].kv_lora_rank,
    "scale_emb": lambda facts: shortest(facts.model.embedding_scale),
    "scale_depth": lambda facts: facts.model.residual_scale * len(facts.layers) ** 0.5,
    "dim_model_base": lambda facts: round(facts.model.logit_scale * facts.model.dim),
    # null, which not every family takes, only where mlp_layer_types alone says which layers have experts
    "first_k_dense_replace": lambda facts: (
        facts.first_dense() if all(layer.n_experts for layer in facts.layers[facts.first_dense() :]) else None
    ),
    "mlp_layer_types": lambda facts: ["sparse" if layer.ffn == "experts" else "dense" for layer in facts.layers],
    "n_group": lambda facts: facts.expert("n_expert_groups") or 1,
    "topk_group": lambda facts: facts.expert("n_expert_groups_used") or 1,
    "n_routed_experts": lambda facts: facts.expert("n_experts"),
    **dict.fromkeys(SHARED, lambda facts: facts.n_shared()),
    "moe_layer_start_index": lambda facts: facts.first_dense(),
    "moe_layer_end_index": lambda facts: max(
        (i for i, layer in enumerate(facts.layers) if layer.n_experts), default=-1
    ),
    "moe_layer_interval": lambda facts: 1,
    **dict.fromkeys(
        SCALES,
        lambda facts: next((shortest(layer.expert_scale) for layer in facts.layers if layer.ffn == "experts"), 1.0),
    ),
    "swiglu_limit": lambda facts: shortest(facts.layers[0].activation_limit),
    "norm_topk_prob": lambda facts: bool(facts.expert("expert_weights")),
    "decoder_sparse_step": lambda facts: 1,
    "mlp_only_layers": lambda facts: [i for i, layer in enumerate(facts.layers) if layer.ffn != "experts"],
}
