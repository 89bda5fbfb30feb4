"""The rules that a canonical tokenizer.json does not contain: BOS, EOS, and the tokens that end generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llamac.errors import ModelError, TokenizerError

if TYPE_CHECKING:
    from llamac.format.flatfile import FlatFile

AFTER_BOS = "after_bos"  # of a flat file's metadata


@dataclass(frozen=True)
class SpecialTokens:
    """A model's rules for BOS, EOS and stop tokens.

    Attributes:
        bos_id: The id of BOS, or None if the vocabulary has none.
        add_bos: Whether `Tokenizer.encode(add_special=True)` puts BOS before the text.
        add_eos: Whether it appends EOS.
        eos_id: The id of EOS, or None if the vocabulary has none.
        stop_ids: Ids of the tokens that end a generated text, usually including EOS.
        after_bos: Ids of the tokens that follow BOS wherever it is put before a text (GLM-4: `<sop>`).

    Raises:
        TokenizerError: If a rule adds a token that the vocabulary does not have.
    """

    bos_id: int | None
    add_bos: bool
    add_eos: bool
    eos_id: int | None
    stop_ids: tuple[int, ...]
    after_bos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, wanted, token in (("add_bos", self.add_bos, self.bos_id), ("add_eos", self.add_eos, self.eos_id)):
            if wanted and token is None:
                raise TokenizerError(f"{name} is set, but the tokenizer has no {name[4:].upper()} token")

    @property
    def front(self) -> tuple[int, ...]:
        """The tokens that begin a text: BOS and those after it. Empty if there is no BOS."""
        return () if self.bos_id is None else (self.bos_id, *self.after_bos)

    @classmethod
    def from_file(cls, file: FlatFile) -> SpecialTokens:
        """Read the rules from a model file.

        Raises:
            ModelError: If the file's metadata about them are wrong.
        """
        after, n_ids = file.metadata.get(AFTER_BOS, []), file.config["vocab_size"]
        if not isinstance(after, list) or not all(type(token) is int and 0 <= token < n_ids for token in after):
            raise ModelError(
                f"{file.path}: metadata: {AFTER_BOS} is {after!r:.80}, expected a list of token ids below {n_ids}"
            )
        return replace(cls.from_config(file.config), after_bos=tuple(after))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SpecialTokens:
        """Read the rules from a model file's config record, which has all but `after_bos`. In it, -1 means no token."""
        return cls(
            bos_id=config["bos_id"] if config["bos_id"] >= 0 else None,
            add_bos=bool(config["add_bos"]),
            add_eos=bool(config["add_eos"]),
            eos_id=config["eos_id"] if config["eos_id"] >= 0 else None,
            stop_ids=tuple(config["stop_ids"][: config["n_stop_ids"]]),
        )
