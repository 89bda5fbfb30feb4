"""Typed, range-checked access to the keys of config.json, with one error for all problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llamac import _core
from llamac.errors import ExportError, UnsupportedError
from llamac.export.equations import XIELU
from llamac.export.hf.families import ACTIVATIONS

# The largest value of every integer in the flat file's records.
LIMITS = {name: high for record, name, *_, high, _ in _core.fields() if record in ("config", "layer")}
MAX_FLOAT = 3.4e38

# Keys that do not change the logits of a forward pass: provenance, training, generation, classification heads.
_HARMLESS = """
    architectures model_type transformers_version _name_or_path name_or_path _commit_hash torch_dtype dtype
    transformers.js_config unsloth_version unsloth_fixed is_llama_config use_cache return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 tf_legacy_loss _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled pretraining_tp initializer_range gradient_checkpointing
    chunk_size_feed_forward is_decoder tokenizer_class prefix attention_dropout attn_pdrop embd_pdrop resid_pdrop
    hidden_dropout reorder_and_upcast_attn bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id
    mask_token_id unk_token_id decoder_start_token_id finetuning_task task_specific_params problem_type id2label
    label2id num_labels _num_labels summary_type summary_use_proj summary_activation summary_proj_to_labels
    summary_first_dropout predict_special_tokens n_special output_past max_sequence_length max_length max_new_tokens
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens auto_map
    cache_implementation output_router_logits router_aux_loss_coef router_jitter_noise classifier_dropout
    hidden_dropout_prob attention_probs_dropout_prob custom_pipelines num_heads residual_dropout embedding_dropout
    experts_per_token initial_context_length tie_encoder_decoder is_composition is_matryoshka matryoshka_dimensions
"""
HARMLESS = frozenset(_HARMLESS.split())


class Keys:
    """Typed, range-checked access to the keys of a JSON object. Collects problems.

    null counts as missing if the caller says so (`nullable`) or if a missing key has no default. In other cases the
    meaning of null differs between versions of transformers.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = values.keys() - self.values.keys()
        self.problems: list[str] = []
        self.prefix = prefix
        self._used: set[str] = set()

    def wrong(self, key: str, expected: str) -> None:
        """Record that a key has a wrong value."""
        self.problems.append(f"{self.prefix}{key} is {self._shown(key)}, expected {expected}")

    def unknown(self, key: str) -> None:
        """Record that llamac does not know a key."""
        what = "llamac does not know this key, which could change what the model computes"
        self.problems.append(f"{self.prefix}{key} is {self._shown(key)}: {what}")

    def _shown(self, key: str) -> str:
        """The value of a key for a message."""
        if key in self.nulls:
            return "null"
        return shortened(self.values[key]) if key in self.values else "missing"

    def value(self, key: str) -> Any:
        """The value, or None."""
        self._used.add(key)
        return self.values.get(key)

    def need(self, key: str) -> None:
        """Record a problem if the key is missing."""
        if key not in self.values:
            self.problems.append(f"{self.prefix}{key} is missing")

    def size(self, key: str, meaning: str, default: int | None = None, *, nullable: bool = False) -> int:
        """A positive integer up to the limit of the flat file's number `meaning`. Required if it has no default.

        Returns 1 for a wrong value, so that reading can continue and find more problems.
        """
        value, most = self.value(key), int(LIMITS[meaning])
        if value is None:
            if key in self.nulls and not nullable:
                self.wrong(key, f"an integer from 1 to {most}")
            elif default is None:
                self.need(key)
            elif default > most and not self.problems:  # else the default may follow from a wrong value
                self.problems.append(f"{self.prefix}{key} is missing; its default {default} exceeds {most}")
            return default or 1
        if type(value) is not int or not 1 <= value <= most:
            self.wrong(key, f"an integer from 1 to {most}")
            return 1
        return value

    def number(
        self, key: str, default: float | None = None, most: float = MAX_FLOAT, *, nullable: bool = False
    ) -> float | None:
        """A number from 0 to `most`, or the default if the key is missing."""
        value = self.value(key)
        if value is None:
            if key in self.nulls and default is not None and not nullable:
                self.wrong(key, f"a number from 0 to {most:g}")
            return default
        if not is_number(value) or not value <= most:
            self.wrong(key, f"a number from 0 to {most:g}")
            return default
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """A list of nonnegative numbers."""
        value = self.value(key)
        if isinstance(value, list) and all(map(is_number, value)):
            return value
        if value is not None:
            self.wrong(key, "a list of nonnegative numbers")
        return []

    def flag(self, key: str, default: bool, *, nullable: bool = False) -> bool:
        """A boolean."""
        value = self.value(key)
        if not isinstance(value, bool) and (value is not None or (key in self.nulls and not nullable)):
            self.wrong(key, "true or false")
        return value if isinstance(value, bool) else default

    def integer(self, key: str, low: int, high: int) -> int | None:
        """An integer from `low` to `high`, or None."""
        value = self.value(key)
        if value is not None and (type(value) is not int or not low <= value <= high):
            self.wrong(key, f"an integer from {low} to {high}")
            return None
        return value

    def integers(self, key: str, low: int, high: int) -> list[int] | None:
        """A list of integers from `low` to `high`, or None."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, list) and all(type(number) is int and low <= number <= high for number in value):
            return value
        self.wrong(key, f"a list of integers from {low} to {high}")
        return None

    def choice(self, key: str, known: tuple[str, ...], default: str) -> str:
        """One of several names."""
        value = self.value(key)
        if value not in (None, *known) or key in self.nulls:
            self.wrong(key, " or ".join(known))
        return value if isinstance(value, str) else default

    def activation(self, key: str, default: str, *, nullable: bool = False) -> str:
        """The canonical name of an activation."""
        name = self.value(key)
        if name is None and (nullable or key not in self.nulls):
            name = default
        is_other = name == XIELU and default != XIELU  # it has learned numbers, which only its family has
        if not isinstance(name, str) or name not in ACTIVATIONS or is_other:
            raise UnsupportedError(
                f"config.json: {key} {shortened(name)} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def unused(self) -> list[str]:
        """Keys that no reader has accessed."""
        return sorted(set(self.values) - self._used)

    def finish(self, checked: Iterable[str] = (), readable: Iterable[str] = ()) -> None:
        """Check that all keys are known and all values valid.

        Args:
            checked: Keys that the caller has checked itself.
            readable: Keys that are known, even if a problem with another key has kept their readers from running.

        Raises:
            ExportError: If there are problems. The message lists all of them.
        """
        known = HARMLESS.union(checked, readable if self.problems else ())
        for key in self.unused():
            if key not in known:
                self.unknown(key)
        if self.problems:
            problems = "\n  ".join(self.problems)
            raise ExportError(f"config.json cannot be converted:\n  {problems}")


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_FLOAT


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
