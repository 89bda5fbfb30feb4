"""Warns of what a written directory or GGUF file does not hold: chat templates, their tokens, and settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from llamac.export import generation_config
from llamac.export.checkpoint import Checkpoint
from llamac.text.template_files import OTHERS, RESPONSE, TOKENS, texts_of


def lost_parts(ours: Checkpoint, theirs: Checkpoint) -> Iterator[str]:
    """Name what a model no longer has after it was written and read back, beyond its config and its tensors.

    Args:
        ours: The model.
        theirs: What its file holds.
    """
    others, stored = texts_of(ours.metadata, OTHERS), texts_of(theirs.metadata, OTHERS)
    missing = sorted(others.keys() - stored.keys())
    if lost := [name for name in missing if others[name] not in stored.values()]:
        yield f"chat templates with the names {', '.join(map(repr, lost))}"
    if renamed := [name for name in missing if others[name] in stored.values()]:
        yield f"the names {', '.join(map(repr, renamed))}, and stores these chat templates under other names"
    code = "\n".join([ours.chat_template, *others.values()])
    tokens = texts_of(ours.metadata, TOKENS) if ours.tokenizer else {}
    kept = texts_of(theirs.metadata, TOKENS)
    different = [name for name, text in tokens.items() if kept.get(name) != text]
    if lost := [name for name in different if re.search(rf"\b{re.escape(name)}\b", code)]:
        yield f"special tokens that the chat template names ({', '.join(lost)}): it renders other prompts"
    if ours.metadata.get(RESPONSE) is not None and RESPONSE not in theirs.metadata:
        yield "the format of answers (response_template)"
    settings = generation_config.from_flat(ours.metadata)
    lost = sorted(settings.keys() - generation_config.from_flat(theirs.metadata).keys())
    if lost and settings.get("temperature") != 0:  # with which the others have no effect
        yield f"the recommended {', '.join(lost)}"
