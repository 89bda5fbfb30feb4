"""A vocabulary's sidecar files: the tokens added to it, and the roles of its special tokens.

Ids and strings match those of transformers 5:

* `added_tokens_decoder` in tokenizer_config.json lists added tokens. Without that entry, added_tokens.json lists them,
  and special_tokens_map.json completes and overrides tokenizer_config.json.
* If a token is listed twice, the later flags apply.
* A token with a role (`eos_token`, ...) or in `additional_special_tokens` is added even if no list has it.
* A token whose string is in the vocabulary has that id; any other token gets the next free id. If a list gives another
  id, the libraries silently ignore it. Here it is an error.
* `add_bos_token` and `add_eos_token` do not count beside a tokenizer.json, nor if the token does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llamac.errors import TokenizerError
from llamac.format.small_files import read_small
from llamac.format.strict_json import MAX_BYTES, parse_object
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer_json import check_added, check_counts

Document = dict[str, Any]

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


class AddedToken(NamedTuple):
    """An added token: the tokenizer finds these in the text before it cuts the rest into pieces.

    Attributes:
        id: The token's id, or -1 if no file gives one.
        text: The token's string.
        special: Whether decoding skips the token.
        rstrip: Whether the token also takes the white space after it.
        normalized: Whether the token is matched in the normalized text instead of the original.
        lstrip: Whether the token also takes the white space before it.
        single_word: Whether the token matches only whole words.
    """

    id: int
    text: str
    special: bool
    rstrip: bool = False
    normalized: bool = False
    lstrip: bool = False
    single_word: bool = False

    def document(self) -> Document:
        """The token's entry in tokenizer.json."""
        return {"id": self.id, "content": self.text, **{flag: getattr(self, flag) for flag in FLAGS}}


class IdLimit(NamedTuple):
    """The number of ids that the model has.

    Attributes:
        n_ids: The number of ids.
        warnings: Gets a message for each token that is left out because no id is free.
    """

    n_ids: int
    warnings: list[str]


class Sidecars(NamedTuple):
    """The JSON files next to a tokenizer; a missing file is an empty object."""

    tokenizer_config: Document
    special_tokens_map: Document
    added_tokens: Document
    generation_config: Document
    config: Document

    def settings(self, **defaults: Any) -> Document:
        """Merge tokenizer_config.json and special_tokens_map.json over `defaults`."""
        listed = "added_tokens_decoder" in self.tokenizer_config
        return {**defaults, **self.tokenizer_config, **({} if listed else self.special_tokens_map)}


def read_sidecars(folder: Path) -> Sidecars:
    """Read the JSON files next to a tokenizer."""
    return Sidecars(*(_read_json(folder / f"{name}.json") for name in Sidecars._fields))


def _read_json(path: Path) -> Document:
    if not path.is_file():
        return {}
    return parse_object(read_small(path, MAX_BYTES, TokenizerError), path.name, error=TokenizerError)


# ---- added tokens


def read_added(entry: Document) -> AddedToken:
    """Parse an entry of `added_tokens` in a tokenizer.json.

    Raises:
        TokenizerError: If a field is missing or has the wrong type.
    """
    wrong = next((flag for flag in FLAGS if not isinstance(entry.get(flag), bool)), None)
    if wrong is not None or not isinstance(entry.get("content"), str) or type(entry.get("id")) is not int:
        raise TokenizerError(f"tokenizer.json: the added token {entry!r} has no valid {wrong or 'content or id'}")
    return AddedToken(entry["id"], entry["content"], **{flag: entry[flag] for flag in FLAGS})


def add_tokens(
    vocab: Mapping[str, int],
    present: Iterable[AddedToken],
    sidecars: Sidecars,
    settings: Document,
    id_limit: IdLimit | None = None,
    later: Iterable[AddedToken] = (),
    size: int | None = None,
) -> list[AddedToken]:
    """List all added tokens of a tokenizer, ordered by id.

    Args:
        vocab: The ids of the model's pieces.
        present: The added tokens that the tokenizer's own file lists.
        sidecars: The JSON files next to that file.
        settings: The merged settings of `sidecars`.
        id_limit: The number of ids that the model has. A token that the files name without an id is left out, with a
            warning, if its id would exceed this.
        later: The added tokens that this kind of tokenizer implies, unless a file lists them.
        size: The number of pieces, if it differs from `len(vocab)` because several pieces have the same string.

    Raises:
        TokenizerError: If the files contradict each other or the vocabulary.
    """
    check_counts(len(vocab))
    tokens = _Tokens(vocab, len(vocab) if size is None else size)
    present = list(present)
    check_added([token.text for token in present])
    check_added(sidecars.added_tokens)
    check_added(list(map(str, _contents(settings))))
    for token in present:
        tokens.add(token)
    roles = {token.text: token for token in _roles(settings)}
    known = {token._replace(id=-1) for token in tokens.by_text.values()}
    for token in sorted(_listed(sidecars, settings, tokens.by_text)):
        if token._replace(id=-1) in known:  # the same flags; `add` checks the id
            tokens.add(token)
        else:
            tokens.add(token._replace(special=token.special or token.text in roles))
    listed = set(tokens.by_text)
    for token in (*roles.values(), *_additional(settings)):
        if token.text in listed:
            continue
        if id_limit is not None and tokens.id_of(token.text) >= id_limit.n_ids:
            id_limit.warnings.append(
                f"the tokenizer's files name the token {token.text!r} without an id, and the model has no id left for"
                f" it (all {id_limit.n_ids} are taken): it is left out"
            )
        else:
            tokens.add(token)
    for token in later:
        if token.text not in tokens.by_text:
            tokens.add(token)
    return sorted(tokens.by_text.values())


def _contents(settings: Document) -> Iterator[object]:
    """The `content` of each entry of `added_tokens_decoder`, unchecked."""
    entries = settings.get("added_tokens_decoder")
    for entry in entries.values() if isinstance(entries, dict) else ():
        yield entry.get("content") if isinstance(entry, dict) else None


class _Tokens:
    """The added tokens so far. Assigns ids as the library `tokenizers` does."""

    def __init__(self, vocab: Mapping[str, int], size: int) -> None:
        self.vocab = vocab
        self.taken = {token: text for text, token in vocab.items()}
        self.by_text: dict[str, AddedToken] = {}
        self.next_id = size

    def id_of(self, text: str) -> int:
        """The id that a token has or would get."""
        known = self.by_text.get(text)
        return self.vocab.get(text, self.next_id if known is None else known.id)

    def add(self, token: AddedToken) -> None:
        """Add `token`, or change its flags if its string is known. Its id is -1 if no file gives one."""
        given = self.id_of(token.text)
        if not token.text:
            raise TokenizerError(f"the added token {token.id} has no text")
        if token.id not in (-1, given):
            there = f", which is {self.taken[token.id]!r}" if token.id in self.taken else ""
            raise TokenizerError(
                f"the added token {token.text!r} is listed with the id {token.id}{there}, but the library tokenizers"
                f" gives it the id {given}: correct the tokenizer's files"
            )
        if self.taken.setdefault(given, token.text) != token.text:
            raise TokenizerError(f"the added token {token.text!r} gets the id {given}, which is {self.taken[given]!r}")
        old = self.by_text.get(token.text, token)  # the library never makes a special token ordinary again
        self.by_text[token.text] = token._replace(id=given, special=token.special or old.special)
        self.next_id = max(self.next_id, given + 1)


def _listed(sidecars: Sidecars, settings: Document, present: Mapping[str, AddedToken]) -> Iterator[AddedToken]:
    """The tokens that a sidecar file lists with their ids."""
    if "added_tokens_decoder" in settings:
        entries = _object(settings["added_tokens_decoder"], "tokenizer_config.json: added_tokens_decoder")
        for key, entry in entries.items():
            where = f"tokenizer_config.json: added_tokens_decoder: {key}"
            if not key.isascii() or not key.isdecimal():
                raise TokenizerError(f"{where}: expected an id")
            yield _flags(_object(entry, where), where, id=int(key))
        return
    roles = [(name, value) for name in NAMES if (value := sidecars.settings().get(name))]
    special = {_named(value, name).text for name, value in roles if isinstance(value, str) or "__type" not in value}
    special |= {token.text for token in _additional(sidecars.tokenizer_config)}
    for text, index in sidecars.added_tokens.items():
        if type(index) is not int or index < 0:
            raise TokenizerError(f"added_tokens.json: the token {text!r} has the id {index!r}")
        if text not in present or present[text].id != index:
            yield AddedToken(index, text, special=text in special, normalized=text not in special)


def _roles(settings: Document) -> Iterator[AddedToken]:
    """The tokens that have a role (`eos_token`, ...), as special tokens with the id -1."""
    others = (key for key, value in settings.items() if key.endswith("_token") and isinstance(value, (str, dict)))
    for key in dict.fromkeys((*NAMES, *others)):
        if settings.get(key) not in (None, ""):
            yield _named(settings[key], key)._replace(special=True)
    for key in ADDITIONAL:
        if isinstance(settings.get(key), dict):
            for name, value in settings[key].items():
                yield _named(value, f"{key}: {name}")._replace(special=True)


def _additional(settings: Document) -> Iterator[AddedToken]:
    """The tokens that are listed without a role or an id."""
    for key in ADDITIONAL:
        values = settings.get(key)
        if values is not None and not isinstance(values, (list, dict)):
            raise TokenizerError(f"tokenizer_config.json: {key} is {values!r}, expected a list of tokens")
        for value in values if isinstance(values, list) else ():
            yield _named(value, key)


def _named(value: object, key: str) -> AddedToken:
    """A token that a setting names by its string or describes as an object, with the id -1."""
    where = f"tokenizer_config.json or special_tokens_map.json: {key}"
    if isinstance(value, str):
        return AddedToken(-1, value, special=True)
    if not isinstance(value, dict):
        raise TokenizerError(f"{where} is {value!r}, expected a token's string")
    return _flags({"special": True, **value}, where, id=-1)


def _flags(entry: Document, where: str, *, id: int) -> AddedToken:
    """A token from the object that describes it. Missing flags default as in transformers' AddedToken."""
    if not isinstance(entry.get("content"), str):
        raise TokenizerError(f"{where} has no string 'content'")
    special = entry.get("special", False)
    flags = {"normalized": not special, **{flag: entry[flag] for flag in FLAGS if flag in entry}, "special": special}
    wrong = next((flag for flag, value in flags.items() if not isinstance(value, bool)), None)
    if wrong is not None:
        raise TokenizerError(f"{where}: {wrong} is {flags[wrong]!r}, expected true or false")
    return AddedToken(id, entry["content"], **flags)


def _object(value: object, where: str) -> Document:
    if not isinstance(value, dict):
        raise TokenizerError(f"{where} is {value!r}, expected an object")
    return value


# ---- the roles of special tokens


def special_tokens(
    ids: Mapping[str, int],
    sidecars: Sidecars,
    settings: Document,
    front: Sequence[int] = (),
    back: Sequence[int] = (),
) -> SpecialTokens:
    """Derive the rules for special tokens from the sidecar files.

    Args:
        ids: The ids of all tokens.
        sidecars: The sidecar files.
        settings: The merged settings of `sidecars`.
        front: The tokens that the tokenizer itself puts before the text. Without them, `add_bos_token` in `settings`
            says whether BOS is put there.
        back: The token that the tokenizer itself puts after the text, if any. Without it, `add_eos_token` decides.
    """
    generation = sidecars.generation_config.get("eos_token_id")
    stops = _id_list(generation if generation is not None else sidecars.config.get("eos_token_id"))
    bos = front[0] if front else _token_id(ids, sidecars, settings, "bos_token")
    eos = back[0] if back else _token_id(ids, sidecars, settings, "eos_token")
    if eos is None:
        eos = next(iter(stops), None)
    add_bos = bool(front) or (bos is not None and bool(settings.get("add_bos_token")))
    add_eos = bool(back) or (eos is not None and bool(settings.get("add_eos_token")))
    stop_ids = {*stops, *([] if eos is None else [eos])}
    return SpecialTokens(bos, add_bos, add_eos, eos, tuple(sorted(stop_ids)), tuple(front[1:]))


def _token_id(ids: Mapping[str, int], sidecars: Sidecars, settings: Document, name: str) -> int | None:
    for value in (settings.get(name), sidecars.special_tokens_map.get(name)):
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in ids:
            return ids[text]
    for document in (sidecars.generation_config, sidecars.config):
        found = _id_list(document.get(f"{name}_id"))
        if found:
            return found[0]
    return None


def _id_list(value: object) -> list[int]:
    """The ids in a config entry, which is an id, a list of ids, or null or -1 for none."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0]
