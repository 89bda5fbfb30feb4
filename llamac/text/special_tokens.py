"""The rules that a canonical tokenizer.json does not contain: BOS, EOS, and the tokens that end generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamac.errors import TokenizerError


@dataclass(frozen=True)
class SpecialTokens:
    """A model's rules for BOS, EOS and stop tokens.

    Attributes:
        bos_id: The id of BOS, or None if the vocabulary has none.
        add_bos: Whether `Tokenizer.encode(add_special=True)` puts BOS before the text.
        add_eos: Whether it appends EOS.
        eos_id: The id of EOS, or None if the vocabulary has none.
        stop_ids: Ids of the tokens that end a generated text, usually including EOS.

    Raises:
        TokenizerError: If a rule adds a token that the vocabulary does not have.
    """

    bos_id: int | None
    add_bos: bool
    add_eos: bool
    eos_id: int | None
    stop_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, wanted, token in (("add_bos", self.add_bos, self.bos_id), ("add_eos", self.add_eos, self.eos_id)):
            if wanted and token is None:
                raise TokenizerError(f"{name} is set, but the tokenizer has no {name[4:].upper()} token")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SpecialTokens:
        """Read the rules from a model file's config record, in which -1 means no token."""
        return cls(
            bos_id=config["bos_id"] if config["bos_id"] >= 0 else None,
            add_bos=bool(config["add_bos"]),
            add_eos=bool(config["add_eos"]),
            eos_id=config["eos_id"] if config["eos_id"] >= 0 else None,
            stop_ids=tuple(config["stop_ids"][: config["n_stop_ids"]]),
        )
