"""The sampling settings that a model recommends: reads and writes them in the formats of Hugging Face and GGUF.

A flat file has them as metadata["generation"], an object of `temperature` (0: greedy), `top_k` (0: off), `top_p`,
`min_p`, `typical_p`, `repetition_penalty`, `xtc_probability` and `xtc_threshold`. Only the settings that the source
gives are present.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llamac import _core
from llamac.engine.sampling.params import RECOMMENDABLE, SamplingParams
from llamac.errors import ArgumentError, ExportError
from llamac.format.strict_json import read_object

METADATA_KEY = "generation"
HF_FILE = "generation_config.json"
GGUF_PREFIX = "general.sampling."

Settings = dict[str, float]

# Our name of each setting, and GGUF's after the prefix. Hugging Face's names are ours.
GGUF_NAMES = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
}
HF_NAMES = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
WITHOUT_EFFECT = {"typical_p": 1, "repetition_penalty": 1, "xtc_probability": 0}  # stored by many, without effect
CORE_NAMES = ("temperature", "top_k", "top_p", "min_p")  # settings that the core checks
WITHOUT_DRAWS = ("repetition_penalty",)  # settings that change what a greedy generation takes

# Settings that change the generated text and that llamac lacks, with the value that turns each of them off.
# For all of them, null, false, 0 and [] do nothing either.
HF_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "suppress_tokens", "begin_suppress_tokens"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "constraints"), None),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "stop_strings", "top_h"), None),
    **dict.fromkeys(("token_healing", "dola_layers"), None),
}
GGUF_NEUTRAL: Mapping[str, Any] = {"mirostat": 0}

# Settings that do not change the generated text, or only together with one of the above; and those read elsewhere.
_HF_HARMLESS = """
    bos_token_id eos_token_id pad_token_id decoder_start_token_id transformers_version _from_model_config
    max_length max_new_tokens max_time early_stopping length_penalty num_return_sequences low_memory
    use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config disable_compile
    continuous_batching_config renormalize_logits remove_invalid_values return_dict_in_generate
    output_attentions output_hidden_states output_scores output_logits use_mtp speculation_type is_assistant
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit
    assistant_lookbehind target_lookbehind assistant_ensemble_weight prompt_lookup_num_tokens
    max_matching_ngram_size chat_format max_window_size
"""
HF_HARMLESS = frozenset(_HF_HARMLESS.split())
GGUF_HARMLESS = frozenset(("penalty_last_n", "mirostat_tau", "mirostat_eta"))


def from_hf(folder: Path, warnings: list[str]) -> Settings:
    """The settings in a directory's generation_config.json, if it has one.

    An explicit `"do_sample": false` means temperature 0. Values that are wrong, and settings that llamac does not have,
    are left out and named in `warnings`.
    """
    path = folder / HF_FILE
    if not path.is_file():
        return {}
    try:
        values = {name: value for name, value in read_object(path).items() if value is not None}
    except ExportError as error:
        warnings.append(f"{error}; its sampling settings are ignored")
        return {}
    do_sample = values.pop("do_sample", True)
    if not isinstance(do_sample, bool):
        warnings.append(f"{HF_FILE}: do_sample is {do_sample!r:.80}, expected true or false; it is ignored")
    settings = {name: values.pop(name) for name in HF_NAMES if name in values}
    _warn_of_unsupported(values, HF_NEUTRAL, HF_HARMLESS, f"{HF_FILE}: ", warnings)
    if do_sample is False:
        settings = {"temperature": 0.0, **{name: settings[name] for name in WITHOUT_DRAWS if name in settings}}
    return _valid(settings, f"{HF_FILE}: ", warnings)


def from_gguf(values: Mapping[str, Any], warnings: list[str]) -> Settings:
    """The settings among a GGUF file's metadata (general.sampling.*). `warnings` as in `from_hf`."""
    found = {key.removeprefix(GGUF_PREFIX): value for key, value in values.items() if key.startswith(GGUF_PREFIX)}
    settings = {name: found.pop(key) for name, key in GGUF_NAMES.items() if key in found}
    _warn_of_unsupported(found, GGUF_NEUTRAL, GGUF_HARMLESS, GGUF_PREFIX, warnings)
    settings = {name: _shortest(value) if type(value) is float else value for name, value in settings.items()}
    return _valid(settings, GGUF_PREFIX, warnings)


def from_flat(metadata: Mapping[str, Any]) -> Settings:
    """The settings in a flat file's metadata. Other programs write metadata too: wrong entries are dropped."""
    found = metadata.get(METADATA_KEY)
    found = found if isinstance(found, dict) else {}
    return _valid({name: found[name] for name in RECOMMENDABLE if name in found}, "", [])


def to_metadata(settings: Settings) -> dict[str, Settings]:
    """The settings as an entry of a flat file's metadata, if there are any."""
    return {METADATA_KEY: settings} if settings else {}


def to_hf(settings: Settings) -> dict[str, Any]:
    """The settings as entries of generation_config.json."""
    if settings.get("temperature") == 0:  # the others have no effect, and transformers warns about them
        return {"do_sample": False, **{name: settings[name] for name in WITHOUT_DRAWS if name in settings}}
    known = {name: settings[name] for name in HF_NAMES if name in settings}
    return {"do_sample": True, **known} if known else {}


def to_gguf(settings: Settings) -> Settings:
    """The settings as GGUF metadata: top_k is an int, the others are floats."""
    return {GGUF_PREFIX + GGUF_NAMES[name]: value for name, value in settings.items() if name in GGUF_NAMES}


def _valid(settings: Mapping[str, Any], where: str, warnings: list[str]) -> Settings:
    """The settings that the engine accepts."""
    valid: Settings = {}
    for name, value in settings.items():
        try:
            _core.Sampling(**{name: value}) if name in CORE_NAMES else SamplingParams(**{name: value})
        except (ArgumentError, OverflowError) as error:
            warnings.append(f"{where}{error}; it is ignored")
        else:
            if name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name]:
                continue
            valid[name] = int(value) if name == "top_k" else float(value)
    return valid


def _warn_of_unsupported(
    values: Mapping[str, Any], neutral: Mapping[str, Any], harmless: frozenset[str], where: str, warnings: list[str]
) -> None:
    unsupported = [
        f"{name} = {value!r:.80}"
        for name, value in values.items()
        if name not in harmless and value not in (None, False, [], neutral.get(name))
    ]
    if unsupported:
        warnings.append(f"{where}ignored settings, which this version does not have: {', '.join(unsupported)}")


def _shortest(number: float) -> float:
    """The shortest decimal number with the same float32: 0.6, not 0.6000000238418579."""
    return float(str(np.float32(number)))
