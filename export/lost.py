"""Warns of what a written directory or GGUF file does not hold: chat templates, their tokens, and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llamac.export import generation_config
from llamac.export.checkpoint import Checkpoint
from llamac.text.template_files import OTHERS, RESPONSE, TOKENS


def lost_parts(ours: Checkpoint, theirs: Checkpoint) -> Iterator[str]:
    """Name what a model no longer has after it was written and read back, beyond its config and its tensors.

    Args:
        ours: The model.
        theirs: What its file holds.
    """
    others = _texts(ours.metadata.get(OTHERS))
    if lost := sorted(others.keys() - _texts(theirs.metadata.get(OTHERS)).keys()):
        yield f"chat templates with the names {', '.join(map(repr, lost))}"
    code = "\n".join([ours.chat_template, *others.values()])
    tokens = _texts(ours.metadata.get(TOKENS)) if ours.tokenizer else {}
    kept = _texts(theirs.metadata.get(TOKENS))
    different = [name for name, text in tokens.items() if kept.get(name) != text]
    if lost := [name for name in different if re.search(rf"\b{re.escape(name)}\b", code)]:
        yield f"special tokens that the chat template names ({', '.join(lost)}): it renders other prompts"
    if RESPONSE in ours.metadata and RESPONSE not in theirs.metadata:
        yield "the format of answers (response_template)"
    settings = generation_config.from_flat(ours.metadata)
    lost = sorted(settings.keys() - generation_config.from_flat(theirs.metadata).keys())
    if lost and settings.get("temperature") != 0:  # with which the others have no effect
        yield f"the recommended {', '.join(lost)}"


def _texts(entries: Any) -> dict[str, str]:
    """The strings of an entry of the metadata. Other programs write metadata, too."""
    return {name: text for name, text in (entries or {}).items() if isinstance(text, str)}
