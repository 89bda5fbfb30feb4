"""How a tokenizer.json joins the two texts that a cross-encoder reads: by one or two of the tokens that end a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import ModelConfig
from llamac.format.strict_json import read_object
from llamac.text.special_tokens import SpecialTokens

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
# The pairs of the post-processors with a fixed form: pieces with their types.
FIXED = {
    "BertProcessing": "cls:0 A:0 sep:0 B:1 sep:1",
    "RobertaProcessing": "cls:0 A:0 sep:0 sep:0 B:0 sep:0",
}


class PairForm(NamedTuple):
    """The form of a pair.

    Attributes:
        separators: The number of tokens between the texts.
        second_type: The type of the second text and of the token after it, 0 or 1. What precedes them has type 0, and
            so has everything in a model without several types.
        tokens: The ids of the first token and of the token that ends a text; None if the tokenizer does not say it.
    """

    separators: int
    second_type: int
    tokens: tuple[int, int] | None


class _Piece(NamedTuple):
    """A piece of a pair: a text, A or B, or a token with its id. The type is that of its rows."""

    name: str
    token: Any
    type: Any


def pair_metadata(folder: Path, values: dict[str, Any], usual: int, model: ModelConfig) -> dict[str, int]:
    """The entries of a flat file's metadata that describe pairs; see `pair_form`.

    Args:
        folder: The directory of the model.
        values: Its config.json.
        usual: As for `pair_form`; 0: the model reads both texts as it reads single ones, like a decoder.
        model: The config of the model.
    """
    if model.two_sided and usual == 0:
        return {"pair_separators": 0}
    if not model.two_sided:
        padding = values.get("pad_token_id")
        return {"padding_id": padding} if type(padding) is int and 0 <= padding < model.vocab_size else {}
    form = pair_form(folder, usual, model.n_types)
    return {"pair_separators": form.separators, "pair_type": form.second_type}


def pair_form(folder: Path, usual: int, n_types: int) -> PairForm:
    """The form of a pair.

    Args:
        folder: The directory of the model.
        usual: The number of separators if tokenizer.json does not say it. BERT has one and two types of texts; RoBERTa
            has two separators and one type.
        n_types: The number of types that the model knows.

    Raises:
        UnsupportedError: If a pair has another form than begin, text, end (once or twice), text, end, or other types
            than 0 before the second text and one of 0 and 1 from there.
        ExportError: If a file is damaged.
    """
    config = folder / CONFIG
    inputs = read_object(config).get("model_input_names") if config.is_file() else None
    has_types = n_types > 1 and (not isinstance(inputs, list) or "token_type_ids" in inputs)
    found = _of_tokenizer(folder / TOKENIZER, has_types)
    return found or PairForm(usual, int(usual == 1 and has_types), None)


def check_pairs(path: Path, special: SpecialTokens, separators: int) -> None:
    """Check that a tokenizer joins pairs as the engine does: with BOS and EOS, and this many EOS between the texts.

    Args:
        path: The tokenizer.json; there is nothing to check if it does not exist or does not describe pairs.
        special: The BOS and EOS of the model.
        separators: The number of separators in the model's metadata.

    Raises:
        UnsupportedError: If it joins them in another way.
    """
    form = _of_tokenizer(path, has_types=False)
    if form is None:
        return
    if form.tokens not in (None, (special.bos_id, special.eos_id)):
        raise UnsupportedError(
            f"{path} puts the tokens {' and '.join(map(str, form.tokens or ()))} around the texts of a "
            f"pair, but the model's BOS and EOS are {special.bos_id} and {special.eos_id}: expected the same tokens"
        )
    if form.separators != separators:
        raise UnsupportedError(
            f"{path} separates the texts of a pair by {form.separators} tokens, and the model's own tokenizer by "
            f"{separators}: expected the same number"
        )


def check_joined(path: Path) -> None:
    """Check that a tokenizer.json reads the texts of a pair as it reads single ones, one after the other.

    Args:
        path: The tokenizer.json; there is nothing to check if it does not exist or adds no tokens.

    Raises:
        UnsupportedError: If it joins them in another way.
    """
    for step in _steps(read_object(path).get("post_processor")) if path.is_file() else ():
        single, pair = (_names(step.get(name)) for name in ("single", "pair"))
        texts = [["$B" if name == "$A" else name for name in single], pair] if single else [[], []]
        if step.get("type") in FIXED or [*single, *texts[0]] != texts[1]:
            raise UnsupportedError(
                f"{path} joins the texts of a pair as {' '.join(pair)[:200]!r}, expected the forms of two single texts"
                f" ({' '.join(single)[:200]!r}), one after the other"
            )


def _names(pieces: Any) -> list[str]:
    return [_piece(piece, None).name for piece in pieces] if isinstance(pieces, list) else []


def _of_tokenizer(path: Path, has_types: bool) -> PairForm | None:
    """The form that a tokenizer.json gives; None if there is none."""
    for step in _steps(read_object(path).get("post_processor")) if path.is_file() else ():
        kind = step.get("type")
        if kind in FIXED:
            return _form(path, [_fixed(step, *piece.split(":")) for piece in FIXED[kind].split()], has_types)
        if kind == "TemplateProcessing":
            pair, tokens = step.get("pair"), step.get("special_tokens")
            return _form(path, [_piece(piece, tokens) for piece in pair] if isinstance(pair, list) else [], has_types)
    return None


def _steps(processor: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a post-processor, which can be a sequence of them."""
    if not isinstance(processor, dict):
        return
    steps = processor.get("processors") if processor.get("type") == "Sequence" else [processor]
    yield from (step for step in steps if isinstance(step, dict)) if isinstance(steps, list) else ()


def _form(path: Path, pieces: list[_Piece], has_types: bool) -> PairForm:
    """The form of a pair of these pieces."""
    names, types = [piece.name for piece in pieces], [piece.type for piece in pieces]
    begin, end = (pieces[0], pieces[-1]) if pieces else (_NOTHING, _NOTHING)
    for separators in (1, 2):
        if names == [begin.name, "$A", *[end.name] * separators, "$B", end.name]:
            break
    else:
        separators = 0
    if not separators or type(begin.token) is not int or type(end.token) is not int:
        raise UnsupportedError(
            f"{path} joins the texts of a pair as {' '.join(names)[:200]!r}, expected a first token, the "
            "query, one or two of the token that ends a text, the document, and this token again; each has one id"
        )
    if not has_types:
        return PairForm(separators, 0, (begin.token, end.token))
    if end.type not in (0, 1) or types != [0] * (separators + 2) + [end.type] * 2:
        raise UnsupportedError(
            f"{path} gives the pieces of a pair the types {' '.join(map(str, types))[:200]}, expected 0 for those "
            "before the document, and 0 or 1 for the document and the token after it"
        )
    return PairForm(separators, end.type, (begin.token, end.token))


_NOTHING = _Piece("", None, None)


def _fixed(step: dict[str, Any], name: str, kind: str) -> _Piece:
    """A piece of a fixed form."""
    if name in ("A", "B"):
        return _Piece(f"${name}", None, int(kind))
    token = step.get(name)
    text, index = token if isinstance(token, list) and len(token) == 2 else (name, None)
    return _Piece(str(text), index, int(kind))


def _piece(piece: Any, tokens: Any) -> _Piece:
    """A piece of a template, whose texts are called $A and $B here."""
    (kind, value), *_ = piece.items() if isinstance(piece, dict) and piece else [("", None)]
    value = value if isinstance(value, dict) else {}
    name = value.get("id")
    if kind == "Sequence":
        return _Piece(f"${name}", None, value.get("type_id"))
    entry = tokens.get(name) if isinstance(tokens, dict) and isinstance(name, str) else None
    ids = entry.get("ids") if isinstance(entry, dict) else None
    return _Piece(str(name), ids[0] if isinstance(ids, list) and len(ids) == 1 else None, value.get("type_id"))
