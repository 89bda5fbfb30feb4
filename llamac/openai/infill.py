"""Prompts that ask a model to fill in the middle of a text, for models that were trained for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac.errors import UnsupportedError

if TYPE_CHECKING:
    from llamac.engine.model import Model

# The tokens before the text in front of the gap, before the text behind it, and before the answer: Qwen Coder and
# Granite Code, StarCoder, CodeGemma, DeepSeek Coder, Code Llama.
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


MARK = "\u263a"  # as in Meta's code: whatever follows it does not begin the text


def infill_prompt(model: Model, prefix: str, suffix: str) -> list[int]:
    """The token ids that ask for the text between two others. Neither text becomes special tokens.

    Raises:
        UnsupportedError: If the model has no tokens for that.
    """
    for names in TOKENS:
        ids = [model.tokenizer.id_of(name) for name in names]
        if None not in ids:
            before, after, answer = (token for token in ids if token is not None)
            first = model.tokenize("", parse_special=False)  # BOS, if the model adds it
            start = model.tokenize(prefix, add_special=False, parse_special=False)
            return [*first, before, *start, after, *_continued(model, suffix), answer]
    raise UnsupportedError("this model has no tokens to fill in the middle of a text: leave the suffix out")


def _continued(model: Model, text: str) -> list[int]:
    """The token ids of a text without the space that SentencePiece's vocabularies put before the first word."""
    mark = MARK if model.tokenizer.kind == "spm" else ""
    before, ids = (model.tokenize(each, add_special=False, parse_special=False) for each in (mark, mark + text))
    return ids[len(before) :]
