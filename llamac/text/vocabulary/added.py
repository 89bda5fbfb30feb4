"""The files beside a vocabulary: which tokens were added to it later, and what its special tokens are for.

transformers' rules (release 5) hold, so that ids and texts are the same there:

* `added_tokens_decoder` of tokenizer_config.json lists added tokens. Where that file has no such entry,
  added_tokens.json lists them, and special_tokens_map.json completes and overrules tokenizer_config.json.
* A token that is listed anew with other flags has the new ones.
* Tokens that are named (`eos_token`, ..., `additional_special_tokens`) but in no list are added, too.
* A token whose text is in the vocabulary has that id, any other the next free one. Where a list says otherwise, the
  libraries would silently give another id: that is an error here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamac.errors import TokenizerError
from llamac.format.small_files import read_small
from llamac.format.strict_json import MAX_BYTES, parse_object
from llamac.text.tokenizer import SpecialTokens
from llamac.text.tokenizer_json import check_added, check_counts

Document = dict[str, Any]

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ADDITIONAL = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")


class Added(NamedTuple):
    """A token that is found in the text before anything else."""

    id: int
    text: str
    special: bool
    rstrip: bool = False
    normalized: bool = False
    lstrip: bool = False
    single_word: bool = False

    def document(self) -> Document:
        """The token as tokenizer.json writes it."""
        return {"id": self.id, "content": self.text, **{flag: getattr(self, flag) for flag in FLAGS}}


class Room(NamedTuple):
    """How many ids the model has, and where it is told which tokens got none."""

    n_ids: int
    warnings: list[str]


class Sidecars(NamedTuple):
    """The JSON files beside a tokenizer; absent ones are empty."""

    tokenizer_config: Document
    special_tokens_map: Document
    added_tokens: Document
    generation_config: Document
    config: Document

    def settings(self, **defaults: Any) -> Document:
        """What tokenizer_config.json and special_tokens_map.json say together; `defaults` where they say nothing."""
        listed = "added_tokens_decoder" in self.tokenizer_config
        return {**defaults, **self.tokenizer_config, **({} if listed else self.special_tokens_map)}


def read_sidecars(folder: Path) -> Sidecars:
    """The JSON files beside a tokenizer that say what its special tokens are for."""
    return Sidecars(*(_read_json(folder / f"{name}.json") for name in Sidecars._fields))


def _read_json(path: Path) -> Document:
    if not path.is_file():
        return {}
    return parse_object(read_small(path, MAX_BYTES, TokenizerError), path.name, error=TokenizerError)


# ---- added tokens


def read_added(entry: Document) -> Added:
    """An entry of the `added_tokens` of a tokenizer.json, where every flag must be there."""
    wrong = next((flag for flag in FLAGS if not isinstance(entry.get(flag), bool)), None)
    if wrong is not None or not isinstance(entry.get("content"), str) or type(entry.get("id")) is not int:
        raise TokenizerError(f"tokenizer.json: the added token {entry!r} is damaged: {wrong or 'content or id'}")
    return Added(entry["id"], entry["content"], **{flag: entry[flag] for flag in FLAGS})


def add_tokens(
    vocab: Mapping[str, int],
    present: Iterable[Added],
    sidecars: Sidecars,
    settings: Document,
    room: Room | None = None,
    later: Iterable[Added] = (),
    size: int | None = None,
) -> list[Added]:
    """All added tokens of a tokenizer, by id.

    vocab: the model's own pieces. present: those that the tokenizer's own file lists. later: those that its kind
    implies, unless the files say anything else of them. room: tokens that the files name without an id are left out,
    with a warning, where they would get an id that the model does not have. size: how many pieces there are, where
    several have the same text.
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
        if token._replace(id=-1) in known:  # nothing new but, perhaps, a wrong id
            tokens.add(token)
        else:
            tokens.add(token._replace(special=token.special or token.text in roles))
    listed = set(tokens.by_text)
    for token in (*roles.values(), *_additional(settings)):
        if token.text in listed:
            continue
        if room is not None and tokens.id_of(token.text) >= room.n_ids:
            room.warnings.append(
                f"the tokenizer's files name the token {token.text!r} without an id, and the model has no id left for"
                f" it (all {room.n_ids} are taken): it is left out"
            )
        else:
            tokens.add(token)
    for token in later:
        if token.text not in tokens.by_text:
            tokens.add(token)
    return sorted(tokens.by_text.values())


def _contents(settings: Document) -> Iterator[object]:
    """What the entries of `added_tokens_decoder` contain; errors are found later."""
    entries = settings.get("added_tokens_decoder")
    for entry in entries.values() if isinstance(entries, dict) else ():
        yield entry.get("content") if isinstance(entry, dict) else None


class _Tokens:
    """Added tokens as the library `tokenizers` keeps them: what it does with an id and with a text that it knows."""

    def __init__(self, vocab: Mapping[str, int], size: int) -> None:
        self.vocab = vocab
        self.taken = {token: text for text, token in vocab.items()}
        self.by_text: dict[str, Added] = {}
        self.next_id = size

    def id_of(self, text: str) -> int:
        """The id that a token has, or would get."""
        known = self.by_text.get(text)
        return self.vocab.get(text, self.next_id if known is None else known.id)

    def add(self, token: Added) -> None:
        """Adds `token`, or changes its flags. Its id is -1 where no file says one."""
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
        old = self.by_text.get(token.text, token)  # once special the library skips it for good
        self.by_text[token.text] = token._replace(id=given, special=token.special or old.special)
        self.next_id = max(self.next_id, given + 1)


def _listed(sidecars: Sidecars, settings: Document, present: Mapping[str, Added]) -> Iterator[Added]:
    """The tokens that a file beside the tokenizer lists with their ids."""
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
            yield Added(index, text, special=text in special, normalized=text not in special)


def _roles(settings: Document) -> Iterator[Added]:
    """The tokens that have a role (`eos_token`, ...): they are special. Their id is -1."""
    others = (key for key, value in settings.items() if key.endswith("_token") and isinstance(value, (str, dict)))
    for key in dict.fromkeys((*NAMES, *others)):
        if settings.get(key) not in (None, ""):
            yield _named(settings[key], key)._replace(special=True)
    for key in ADDITIONAL:
        if isinstance(settings.get(key), dict):
            for name, value in settings[key].items():
                yield _named(value, f"{key}: {name}")._replace(special=True)


def _additional(settings: Document) -> Iterator[Added]:
    """The tokens that are listed without a role and without an id."""
    for key in ADDITIONAL:
        values = settings.get(key)
        if values is not None and not isinstance(values, (list, dict)):
            raise TokenizerError(f"tokenizer_config.json: {key} is {values!r}, expected a list of tokens")
        for value in values if isinstance(values, list) else ():
            yield _named(value, key)


def _named(value: object, key: str) -> Added:
    where = f"tokenizer_config.json or special_tokens_map.json: {key}"
    if isinstance(value, str):
        return Added(-1, value, special=True)
    if not isinstance(value, dict):
        raise TokenizerError(f"{where} is {value!r}, expected the text of a token")
    return _flags({"special": True, **value}, where, id=-1)


def _flags(entry: Document, where: str, *, id: int) -> Added:
    """A token from the object that describes it; absent flags have the defaults of transformers' AddedToken."""
    if not isinstance(entry.get("content"), str):
        raise TokenizerError(f"{where} has no text (content)")
    special = entry.get("special", False)
    flags = {"normalized": not special, **{flag: entry[flag] for flag in FLAGS if flag in entry}, "special": special}
    wrong = next((flag for flag, value in flags.items() if not isinstance(value, bool)), None)
    if wrong is not None:
        raise TokenizerError(f"{where}: {wrong} is {flags[wrong]!r}, expected true or false")
    return Added(id, entry["content"], **flags)


def _object(value: object, where: str) -> Document:
    if not isinstance(value, dict):
        raise TokenizerError(f"{where} is {value!r}, expected an object")
    return value


# ---- what special tokens are for


def special_tokens(
    ids: Mapping[str, int],
    sidecars: Sidecars,
    settings: Document,
    front: int | None = None,
    back: int | None = None,
) -> SpecialTokens:
    """The rules for special tokens of the vocabulary `ids`, from the files beside it.

    `front` and `back` are the tokens that the tokenizer itself puts around a text; add_bos_token and add_eos_token of
    tokenizer_config.json overrule them.
    """
    generation = sidecars.generation_config.get("eos_token_id")
    stops = _id_list(generation if generation is not None else sidecars.config.get("eos_token_id"))
    bos = _token_id(ids, sidecars, settings, "bos_token")
    eos = _token_id(ids, sidecars, settings, "eos_token")
    if eos is None:
        eos = back if back is not None else next(iter(stops), None)
    add_bos, add_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
    if add_bos is None and front is not None:
        add_bos, bos = True, front
    if add_eos is None and back is not None:
        add_eos, eos = True, back
    bos = front if bos is None else bos
    stop_ids = {*stops, *([] if eos is None else [eos])}
    return SpecialTokens(bos, bool(add_bos), bool(add_eos), eos, tuple(sorted(stop_ids)))


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
    """The ids in an entry of a config file: one, several or none (null and -1 mean none)."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0]
