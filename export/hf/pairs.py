"""How a tokenizer.json joins the two texts that a cross-encoder reads: by one or two of the tokens that end a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamac.errors import UnsupportedError
from llamac.format.strict_json import read_object

TOKENIZER = "tokenizer.json"
# The post-processors with a fixed form.
FIXED = {"BertProcessing": 1, "RobertaProcessing": 2}


def pair_separators(folder: Path, usual: int) -> int:
    """The number of tokens between the texts of a pair.

    Args:
        folder: The directory of the model.
        usual: The number if there is no tokenizer.json, or if it does not say.

    Raises:
        UnsupportedError: If a pair has another form than begin, text, end (once or twice), text, end.
        ExportError: If the file is damaged.
    """
    path = folder / TOKENIZER
    if not path.is_file():
        return usual
    for step in _steps(read_object(path).get("post_processor")):
        kind = step.get("type")
        if kind in FIXED:
            return FIXED[kind]
        if kind == "TemplateProcessing":
            return _of_template(path, step.get("pair"))
    return usual


def _steps(processor: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a post-processor, which can be a sequence of them."""
    if not isinstance(processor, dict):
        return
    steps = processor.get("processors") if processor.get("type") == "Sequence" else [processor]
    yield from (step for step in steps if isinstance(step, dict)) if isinstance(steps, list) else ()


def _of_template(path: Path, pair: Any) -> int:
    """The number of separators in the template of a pair."""
    pieces = [_piece(piece) for piece in pair] if isinstance(pair, list) and pair else [""]
    begin, end = pieces[0], pieces[-1]
    for separators in (1, 2):
        if pieces == [begin, "$A", *[end] * separators, "$B", end]:
            return separators
    raise UnsupportedError(
        f"{path} joins the texts of a pair as {' '.join(pieces)[:200]!r}, expected a start token, "
        "the query, the end token once or twice, the document, and the end token"
    )


def _piece(piece: Any) -> str:
    """A token of a template by its name, or a text as $A or $B."""
    (kind, value), *_ = piece.items() if isinstance(piece, dict) and piece else [("", None)]
    name = value.get("id") if isinstance(value, dict) else None
    return f"${name}" if kind == "Sequence" else str(name)
