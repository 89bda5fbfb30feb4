"""Reads config.json of LLaMA and GPT-2: every key is understood, known to be harmless, or an error.

Missing values are what transformers takes for them. All problems of a file are told at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llamac import _core
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.families import ACTIVATIONS, FAMILIES, Family
from llamac.export.rope import Rope, make_rope

# The largest value of every number of the flat file's records.
LIMITS = {name: high for record, name, *_, high, _ in _core.fields() if record in ("config", "layer")}

# Keys that do not change the logits of a forward pass: provenance, training, generation, classification heads.
_HARMLESS = """
    architectures model_type transformers_version _name_or_path name_or_path _commit_hash torch_dtype dtype
    transformers.js_config unsloth_version unsloth_fixed is_llama_config use_cache return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 tf_legacy_loss _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled pretraining_tp initializer_range gradient_checkpointing
    chunk_size_feed_forward is_decoder tokenizer_class prefix attention_dropout attn_pdrop embd_pdrop resid_pdrop
    hidden_dropout reorder_and_upcast_attn bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    finetuning_task task_specific_params problem_type id2label label2id num_labels _num_labels summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout predict_special_tokens n_special
    output_past max_sequence_length max_length max_new_tokens min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
HARMLESS = frozenset(_HARMLESS.split())

# Keys that must have this value, and what another one would mean.
NOT_SUPPORTED: dict[str, tuple[Any, str]] = {
    "quantization_config": (None, "quantized weights"),
    "is_encoder_decoder": (False, "an encoder and a decoder"),
    "add_cross_attention": (False, "cross-attention"),
    "cross_attention_hidden_size": (None, "cross-attention"),
    "pruned_heads": ({}, "pruned heads"),
    "rope_interleaved": (False, "RoPE on interleaved pairs"),
    "scale_attn_by_inverse_layer_idx": (False, "attention scales that differ by layer"),
}

# Keys of rope_parameters, beside rope_type and rope_theta: needed and optional ones per kind.
ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
}
WITH_ORIGINAL_CONTEXT = ("yarn", "longrope", "llama3")
ANY_ROPE_KEY = {key for keys in ROPE_KEYS.values() for group in keys for key in group}
ANY_ROPE_KEY.add("original_max_position_embeddings")
MAX_FLOAT = 3.4e38


@dataclass(frozen=True)
class HfConfig:
    """A config.json, understood.

    tied: what it says of the output matrix. bare: whether its class is the family's without an output matrix. biases:
    which of families' there are.
    """

    model: ModelConfig
    rope: Rope | None
    tied: bool
    biases: frozenset[str]
    bare: bool = False


def parse_config(values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """Raises UnsupportedError for what the engine cannot compute, ExportError for all keys that are wrong."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "config.json has no model_type" if kind is None else f"model_type {kind!r} is not supported"
        raise UnsupportedError(f"{what}; this version imports {', '.join(FAMILIES)}")
    unsupported = [
        f"{key} is {_shortened(values[key])} ({what})"
        for key, (allowed, what) in NOT_SUPPORTED.items()
        if values.get(key) is not None and values[key] != allowed
    ]
    if unsupported:
        raise UnsupportedError(f"config.json asks for what this version does not support: {', '.join(unsupported)}")
    is_bare = _is_bare(FAMILIES[kind], values.get("architectures"))
    return replace({"llama": _llama, "gpt2": _gpt2}[kind](_Keys(values), warnings), bare=is_bare)


def _is_bare(family: Family, classes: Any) -> bool:
    """Whether config.json names the family's class without an output matrix. UnsupportedError for any other class."""
    if classes in (None, []):
        return False
    known = (*family.architectures, family.bare)
    names = classes if isinstance(classes, list) else [classes]
    for name in names:
        if name not in known:
            raise UnsupportedError(
                f"config.json: architectures has {_shortened(name)}, which is no language model of the family "
                f"{family.model_type!r}; supported are {', '.join(known)}"
            )
    return family.bare in names


class _Keys:
    """Takes keys out of a JSON object, with types and ranges, and collects what is wrong. null counts as absent."""

    def __init__(self, values: dict[str, Any], place: str = "") -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.problems: list[str] = []
        self._place = place
        self._used: set[str] = set()

    def wrong(self, key: str, expected: str) -> None:
        """Notes that the value of a key is not what is expected."""
        self.problems.append(f"{self._place}{key} is {_shortened(self.values.get(key))}, expected {expected}")

    def value(self, key: str) -> Any:
        """The value, or None."""
        self._used.add(key)
        return self.values.get(key)

    def need(self, key: str) -> None:
        """Notes that a key is missing, if it is."""
        if key not in self.values:
            self.problems.append(f"{self._place}{key} is missing")

    def size(self, key: str, meaning: str, default: int | None = None) -> int:
        """A positive integer up to the limit of the flat file's number `meaning`; without a default it must be there.

        1 stands for one that is wrong, so that what follows can be read.
        """
        value, most = self.value(key), int(LIMITS[meaning])
        if value is None:
            if default is None:
                self.need(key)
            elif default > most and not self.problems:  # else it may follow from what is wrong
                self.problems.append(f"{self._place}{key} is missing and taken to be {default}, at most are {most}")
            return default or 1
        if type(value) is not int or not 1 <= value <= most:
            self.wrong(key, f"an integer from 1 to {most}")
            return 1
        return value

    def number(self, key: str, default: float | None = None, most: float = MAX_FLOAT) -> float | None:
        """A number from 0 to `most`, or the default if it is absent."""
        value = self.value(key)
        if value is None:
            return default
        if not _is_number(value) or not value <= most:
            self.wrong(key, f"a number from 0 to {most:g}")
            return default
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """A list of numbers, none negative."""
        value = self.value(key)
        if isinstance(value, list) and all(map(_is_number, value)):
            return value
        if value is not None:
            self.wrong(key, "a list of numbers, none negative")
        return []

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value if isinstance(value, bool) else default

    def activation(self, key: str, default: str) -> str:
        """The canonical name of an activation."""
        name = self.value(key) or default
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UnsupportedError(
                f"config.json: {key} {_shortened(name)} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def unused(self) -> list[str]:
        """Keys that nobody asked for."""
        return sorted(set(self.values) - self._used)

    def finish(self) -> None:
        """Raises ExportError with all problems, if there are any; unknown keys are problems."""
        for key in self.unused():
            if key not in HARMLESS and key not in NOT_SUPPORTED:
                self.wrong(key, "no such key: it is unknown here, and could change what the model computes")
        if self.problems:
            problems = "\n  ".join(self.problems)
            raise ExportError(f"config.json does not describe a model that can be converted:\n  {problems}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_FLOAT


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- LLaMA


def _llama(keys: _Keys, warnings: list[str]) -> HfConfig:
    dim, n_heads = keys.size("hidden_size", "dim"), keys.size("num_attention_heads", "n_heads")
    n_kv_heads = keys.size("num_key_value_heads", "n_kv_heads", n_heads)
    head_dim = keys.size("head_dim", "head_dim", max(1, dim // n_heads))
    vocab_size = keys.size("vocab_size", "vocab_size")
    n_layers, ffn_dim = keys.size("num_hidden_layers", "n_layers"), keys.size("intermediate_size", "ffn_dim")
    context = keys.size("max_position_embeddings", "context", 2048)
    if not keys.problems:
        _check_heads(keys, dim, n_heads, n_kv_heads, head_dim)
    norm_eps = keys.number("rms_norm_eps", 1e-6, LIMITS["norm_eps"])
    activation = keys.activation("hidden_act", "silu")
    tied = keys.flag("tie_word_embeddings", False)
    biases = frozenset(key for key in ("attention_bias", "mlp_bias") if keys.flag(key, False))
    kind, parameters = _rope_parameters(keys, context, warnings)
    keys.finish()
    rope = make_rope(kind, parameters, head_dim, context)
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=context,
        norm="rms",
        position="rope",
        activation=activation,
        tied_output=tied,
        norm_eps=norm_eps or 0.0,
        attention_scale=head_dim**-0.5,
        layers=(LayerConfig("gated", ffn_dim, rope=0),) * n_layers,
        rope_dim=(head_dim,),
        rope_original_context=(rope.original_context,),
        rope_attention_factor=(rope.attention_factor,),
    )
    return HfConfig(model, rope, tied, biases | {"always"})


def _check_heads(keys: _Keys, dim: int, n_heads: int, n_kv_heads: int, head_dim: int) -> None:
    if n_heads % n_kv_heads:
        keys.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({n_heads})")
    if "head_dim" not in keys.values and dim % n_heads:
        keys.wrong("num_attention_heads", f"a divisor of hidden_size ({dim}), as there is no head_dim")
    elif head_dim % 2:
        keys.problems.append(f"the heads have {head_dim} dimensions, expected an even number, as RoPE turns pairs")


# ---- RoPE


def _rope_parameters(keys: _Keys, context: int, warnings: list[str]) -> tuple[str, dict[str, Any]]:
    """(kind, its parameters) from rope_parameters (new) or rope_theta and rope_scaling (old)."""
    place, values = _rope_object(keys)
    inner = _Keys(values, f"{place}.")
    kind = values.get("rope_type") or values.get("type") or "default"
    for key in ("rope_type", "type", "finetuned"):  # the last is a note of YaRN's authors
        inner.value(key)
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise UnsupportedError(
            f"config.json: {place} has the type {_shortened(kind)}; supported are {', '.join(ROPE_KEYS)}"
        )
    needed, optional = ROPE_KEYS[kind]
    for key in needed:
        inner.need(key)
    if kind == "yarn" and "factor" not in values:  # null is a value here: the ratio of the two contexts
        inner.need("factor")
    parameters = {key: _rope_parameter(inner, key, is_there=key in values) for key in (*needed, *optional)}
    parameters["rope_theta"] = _theta(keys, inner, warnings)
    if kind in WITH_ORIGINAL_CONTEXT:
        own = inner.size("original_max_position_embeddings", "context", context)
        parameters["original_max_position_embeddings"] = keys.size("original_max_position_embeddings", "context", own)
    for there in (keys, inner):
        if there.number("partial_rotary_factor", 1.0) != 1.0:
            there.wrong("partial_rotary_factor", "1, as LLaMA turns whole heads")
    for key in inner.unused():
        if key in ANY_ROPE_KEY:
            warnings.append(f"config.json: {key} has no meaning for RoPE of type {kind!r} and is ignored")
        else:
            inner.wrong(key, "no such key: it is unknown here, and could change what the model computes")
    keys.problems += inner.problems
    return kind, parameters


def _rope_object(keys: _Keys) -> tuple[str, dict[str, Any]]:
    """(name, content) of the one object that says how positions are scaled; it may be empty."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("rope_scaling", "rope_parameters"):
        value = keys.value(name)
        if isinstance(value, dict) and value:
            found.append((name, value))
        elif value not in (None, {}):
            keys.wrong(name, "an object")
    if len(found) > 1 and found[0][1] != found[1][1]:
        keys.problems.append("rope_scaling and rope_parameters are both there and differ, expected one of them")
    return found[0] if found else ("rope_parameters", {})


def _rope_parameter(inner: _Keys, key: str, *, is_there: bool) -> Any:
    if key in ("short_factor", "long_factor"):
        return inner.numbers(key)
    if key == "truncate":
        return inner.flag(key, not is_there)  # as in transformers, null is no
    return inner.number(key)


def _theta(keys: _Keys, inner: _Keys, warnings: list[str]) -> float:
    outer = keys.number("rope_theta", 10000.0)
    theta = inner.number("rope_theta", outer)
    if "rope_theta" in keys.values and theta != outer:
        warnings.append(
            f"config.json has two values of rope_theta, {outer} and {theta}: the latter, of RoPE's own object, counts"
        )
    return theta or 0.0


# ---- GPT-2


def _gpt2(keys: _Keys, warnings: list[str]) -> HfConfig:
    dim, n_heads = keys.size("n_embd", "dim"), keys.size("n_head", "n_heads")
    vocab_size, n_layers = keys.size("vocab_size", "vocab_size"), keys.size("n_layer", "n_layers")
    ffn_dim = keys.size("n_inner", "ffn_dim", 4 * dim)
    # older versions stored the context under both names
    n_ctx = keys.size("n_ctx", "context") if "n_ctx" in keys.values else None
    context = keys.size("n_positions", "context", n_ctx)
    if not keys.problems and dim % n_heads:
        keys.wrong("n_head", f"a divisor of n_embd ({dim})")
    norm_eps = keys.number("layer_norm_epsilon", 1e-5, LIMITS["norm_eps"])
    activation = keys.activation("activation_function", "gelu_new")
    tied = keys.flag("tie_word_embeddings", True)
    is_scaled = keys.flag("scale_attn_weights", True)
    keys.finish()
    if n_ctx not in (None, context):
        warnings.append(f"config.json: n_ctx is {n_ctx}, but n_positions is {context}: the latter counts")
    head_dim = dim // n_heads
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=context,
        norm="layer",
        position="learned",
        activation=activation,
        tied_output=tied,
        norm_eps=norm_eps or 0.0,
        attention_scale=head_dim**-0.5 if is_scaled else 1.0,
        layers=(LayerConfig("plain", ffn_dim),) * n_layers,
    )
    return HfConfig(model, None, tied, frozenset({"always"}))
