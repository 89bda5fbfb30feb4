"""Reads config.json of every family. Every key is supported, known to be harmless, or an error.

Missing values have the defaults of transformers. One error lists all problems of a file. The family's table row says
which keys it has (`families`); a key means the same in every family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import LayerConfig, ModelConfig
from llamac.export.hf import assistant, quantized, ternary
from llamac.export.hf.decoder_config import parse_decoder
from llamac.export.hf.encoder_config import decoder_row, encoder_row, left_out, parse_encoder, pooling_of
from llamac.export.hf.families import ENCODERS, FAMILIES
from llamac.export.hf.family import TERNARY, Family
from llamac.export.hf.keys import HARMLESS, LIMITS, Keys, shortened
from llamac.export.hf.parsed_config import HfConfig
from llamac.export.hf.quantized_keys import ADVICE

# Keys that must have this value, and the meaning of any other value.
NOT_SUPPORTED: dict[str, tuple[Any, str]] = {
    "quantization_config": (
        None,
        f"quantized weights; every family is read with those of {quantized.NAMES}; otherwise {ADVICE}",
    ),
    "is_encoder_decoder": (False, "an encoder and a decoder"),
    "add_cross_attention": (False, "cross-attention"),
    "cross_attention_hidden_size": (None, "cross-attention"),
    "pruned_heads": ({}, "pruned heads"),
    "rope_interleaved": (False, "RoPE on interleaved pairs"),
    "use_mrope": (False, "multimodal RoPE"),
    "is_causal": (True, "attention to later positions"),
    "scale_attn_by_inverse_layer_idx": (False, "attention scales that differ by layer"),
}
# Keys outside text_config that apply to the language model in it, and keys that only images need.
TIED = "tie_word_embeddings"
OUTSIDE_TEXT = ("model_type", "architectures", TIED, "quantization_config")
OF_IMAGES = (
    *("vision_config", "mm_tokens_per_image"),
    *(
        f"{token}_token_{number}"
        for token in ("boi", "eoi", "image", "boa", "eoa", "audio")
        for number in ("index", "id")
    ),
    *("audio_config", "vision_soft_tokens_per_image"),
    *("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("video_token_id", "vision_token_id", "vision_start_token_id", "vision_end_token_id", "language_model_only"),
    *(f"{token}_{end}_token_id" for token in ("image", "video") for end in ("start", "end")),
    *("scale_factor", "use_reentrant_checkpoints", "_pad_token_id", "projector_hidden_size", "projector_bias"),
    *("do_image_splitting", "downsample_factor", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
    *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "projector_use_layernorm", "tile_size"),
    *("use_image_special_tokens", "use_thumbnail", "alignment_intermediate_size"),
    *("downsample_ratio", "image_seq_length", "vision_feature_select_strategy"),
    *("adapter_layer_norm_eps", "ignore_index", "image_grid_pinpoints", "use_image_newline_parameter"),
    *("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "video_token_index"),
    *("projection_hidden_size", "projection_layer_norm_eps", "vision_aspect_ratio", "visual_indicator_token_ids"),
)


def parse_config(values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """Parse a config.json.

    Raises:
        UnsupportedError: If the engine cannot compute the model.
        ExportError: If keys are wrong; the message lists all of them.
    """
    kind = values.get("model_type")
    known = {**FAMILIES, **ENCODERS, **assistant.DRAFTERS}
    if not isinstance(kind, str) or kind not in known:
        what = "config.json has no model_type" if kind is None else f"model_type {kind!r} is not supported"
        raise UnsupportedError(f"{what}; this version imports {', '.join(known)}")
    if kind in assistant.DRAFTERS:
        row = assistant.DRAFTERS[kind]
        found = parse_row(row, text_config(assistant.text_of(values), row, []), warnings)
        return replace(found, model=assistant.with_trunk(found.model, values), tied=False)
    is_two_sided = values.get("use_bidirectional_attention") is True or values.get("is_causal") is False
    is_encoder = kind in ENCODERS and (kind not in FAMILIES or is_two_sided)
    family = encoder_row(values) if is_encoder else decoder_row(values)
    warnings += left_out(values) if is_encoder else ()
    if family.written_as:
        values = text_config(values, family, warnings)
    return parse_row(family, values, warnings)


def parse_row(family: Family, values: dict[str, Any], warnings: list[str]) -> HfConfig:
    """Parse the config of one model of a family."""
    kind = family.model_type
    values = _with_new_names(family, values)
    allowed = NOT_SUPPORTED | {key: (value, f"fixed for {kind}") for key, value in family.fixed.items()}
    unsupported = [
        f"{key} is {shortened(_named(values[key]))} ({what})"
        for key, (value, what) in allowed.items()
        if values.get(key) is not None and values[key] != value and not _is_read(family, key, values[key])
    ]
    if unsupported:
        raise UnsupportedError(f"config.json requires features that llamac does not support: {', '.join(unsupported)}")
    is_bare = _is_bare(family, values.get("architectures"))
    parser = _gpt2 if kind == "gpt2" else _encoder if family.two_sided and family.position == "learned" else _decoder
    config = replace(parser(Keys(values), family, warnings), bare=is_bare)
    quantization = values.get("quantization_config")
    if quantization is not None and quantized.is_read(quantization):
        return replace(config, quantization=quantized.parse(quantization, family, warnings))
    if quantization is None or TERNARY not in family.quantized:
        return config
    return replace(config, ternary=ternary.parse(quantization), model=replace(config.model, rounds_inputs=1))


def _with_new_names(family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The values under the names of the family's row. ExportError if a value has two names and differs."""
    for key in family.objects:
        if isinstance(inner := values.get(key), dict):
            others = {name: value for name, value in values.items() if name != key}
            known = HARMLESS | NOT_SUPPORTED.keys()  # which transformers writes into every object
            values = others | {f"{key}.{name}": value for name, value in inner.items() if name not in known}
    found = {key: value for key, value in values.items() if key not in family.old_keys}
    for old, new in family.old_keys.items():
        if old in values and values[old] != found.setdefault(new, values[old]):
            raise ExportError(f"config.json: {old} is {shortened(values[old])}, but {new} is {shortened(found[new])}")
    return found


def _is_read(family: Family, key: str, value: Any) -> bool:
    """Whether a quantization is one that the family's tensors are read from."""
    if key != "quantization_config" or not isinstance(value, dict):
        return False
    return quantized.is_read(value) or value.get("quant_method") in family.quantized


def _named(value: Any) -> Any:
    """A value for a message; of a quantization_config, what names it."""
    return {"quant_method": value["quant_method"]} if isinstance(value, dict) and "quant_method" in value else value


def _is_bare(family: Family, classes: Any) -> bool:
    """Whether config.json names the family's class without an output matrix. UnsupportedError for any other class."""
    if classes in (None, []):
        return False
    known = (*family.architectures, *([family.bare] if family.bare else []))
    names = classes if isinstance(classes, list) else [classes]
    for name in names:
        if name not in known:
            raise UnsupportedError(
                f"config.json: architectures has {shortened(name)}, which is not a {_kind(family)} of the family "
                f"{family.model_type!r}; supported are {', '.join(known)}"
            )
    return family.bare in names


def _kind(family: Family) -> str:
    if family.scores_pairs:
        return "model of scores"
    return "model of embeddings" if family.two_sided else "language model"


def text_config(values: dict[str, Any], family: Family, warnings: list[str]) -> dict[str, Any]:
    """The keys of the language model in a multimodal model."""
    outside, kind = Keys(values), family.text_type or family.written_as
    text = outside.value("text_config")
    if text is None and family.flat_text:
        text = {key: value for key, value in values.items() if key not in OUTSIDE_TEXT}
    if isinstance(text, dict) and text.get("model_type", kind) not in (kind, family.old_text_type or kind):
        kinds = " or ".join(repr(name) for name in (kind, *(row.model_type for row in family.other_texts)))
        raise UnsupportedError(
            f"config.json: the language model's model_type is {shortened(text['model_type'])}; with model_type "
            f"{shortened(values.get('model_type'))}, only {kinds} is supported"
        )
    if not isinstance(text, dict):
        raise ExportError(
            f"config.json: text_config is {shortened(text)}, expected an object: the config of the language model"
        )
    # versions of transformers that write text_config keep the keys that an older one wrote, and ignore them
    known = {*text, *family.keys} - {*OUTSIDE_TEXT, *OF_IMAGES} if family.flat_text and text else set()
    known |= {key for key in text if key in values and values[key] == text[key]}
    outside.finish({*OUTSIDE_TEXT, *OF_IMAGES, *family.outside, *known})
    warnings.append("config.json describes a multimodal model: only its language model is read")
    differ = sorted(key for key in known & values.keys() if values[key] != text.get(key))
    if differ:
        warnings.append(f"config.json has other values than its text_config, which counts, of {', '.join(differ)}")
    inner = {key: value for key, value in text.items() if key not in ("model_type", "architectures", TIED, *OF_IMAGES)}
    found = inner | {key: values[key] for key in OUTSIDE_TEXT if key in values}
    # versions of transformers keep this key inside, outside, or, unless it is false, in both; they ignore false inside
    return found | ({TIED: True} if text.get(TIED) is True else {})


# ---- decoders and encoders


def _checked(family: Family) -> set[str]:
    """Keys that `parse_row` has checked, or that do not matter."""
    return {*NOT_SUPPORTED, *family.fixed, *family.harmless}


def _decoder(keys: Keys, family: Family, warnings: list[str]) -> HfConfig:
    return parse_decoder(keys, family, _checked(family), warnings)


def _encoder(keys: Keys, family: Family, warnings: list[str]) -> HfConfig:
    model, positions = parse_encoder(keys, family, _checked(family))
    pooling = pooling_of(keys, family)
    return HfConfig(model, (), True, frozenset({"always"}), family, positions=positions, pooling=pooling)


# ---- GPT-2


def _gpt2(keys: Keys, family: Family, warnings: list[str]) -> HfConfig:
    row = family.keys
    dim, n_heads = keys.size("n_embd", "dim"), keys.size("n_head", "n_heads")
    vocab_size, n_layers = keys.size("vocab_size", "vocab_size"), keys.size("n_layer", "n_layers")
    ffn_dim = keys.size("n_inner", "ffn_dim", 4 * dim, nullable=True)
    # older versions stored the context under both names
    n_ctx = keys.size("n_ctx", "context") if "n_ctx" in keys.values else None
    context = keys.size("n_positions", "context", n_ctx or 1024)
    if not keys.problems and dim % n_heads:
        keys.wrong("n_head", f"a divisor of n_embd ({dim})")
    norm_eps = keys.number("layer_norm_epsilon", row["layer_norm_epsilon"], LIMITS["norm_eps"])
    activation = keys.activation(family.activation, row[family.activation])
    tied = keys.flag("tie_word_embeddings", row["tie_word_embeddings"])
    is_scaled = keys.flag("scale_attn_weights", row["scale_attn_weights"])
    keys.finish(NOT_SUPPORTED)
    if n_ctx not in (None, context):
        warnings.append(f"config.json: n_ctx is {n_ctx}, but n_positions is {context}: using n_positions")
    head_dim = dim // n_heads
    model = ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        n_token_ids=vocab_size,
        context=context,
        norm=family.norm,
        position="learned",
        activation=activation,
        tied_output=tied,
        norm_eps=norm_eps or 0.0,
        attention_scale=head_dim**-0.5 if is_scaled else 1.0,
        layers=(LayerConfig(family.ffn, ffn_dim),) * n_layers,
    )
    return HfConfig(model, (), tied, frozenset({"always"}), family)
