"""Session files: the content of a session on disk. docs/session-file.md is the specification.

A file consists of a fixed beginning, a JSON object, then tokens, logits and pages of the KV cache. Reading checks every
field and every checksum before the session changes. Pages are read directly into their final memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import traceback
from array import array
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from llamac import _core
from llamac.engine.cache.kv_identity import KVIdentity, LayerGroup, kv_identity
from llamac.errors import OutOfMemoryError, SessionFileError
from llamac.format.private_files import remove_abandoned_in, replacing
from llamac.format.strict_json import parse_object

if TYPE_CHECKING:
    from llamac.engine.session import Session

MAGIC = b"LLAMACKV"
VERSION = 1
BEGINNING = struct.Struct("<8sII32sQ")  # magic, version, bytes of the head, its SHA-256, bytes of the file
MAX_HEAD = 1 << 24
MAX_PAGES = 1 << 20
MAX_STATES = 16  # of a sequence: MAX_KEPT of csrc/session.h


@dataclass(frozen=True)
class SavedSequence:
    """A sequence in a file.

    Attributes:
        length: Positions.
        shifted: The first position that a shift has moved; None if there is none.
        starts: The first stored position of each group of layers.
        pages: For each group, the indexes of its pages in the file.
        states: After how many positions there are states of recurrent layers, the latest first.
    """

    length: int
    shifted: int | None
    starts: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    states: tuple[int, ...]


@dataclass(frozen=True)
class Head:
    """The checked JSON object of a file.

    Attributes:
        identity: The identity of the pages.
        context: The context of the session that was saved.
        n_prompt: Positions up to the end of its last prefill.
        mirostat_mu: The state of mirostat; None if there is none.
        sequences: The sequences.
        page_groups: The group of each page.
        tokens_sha256: The hash of the tokens of all sequences.
        logits_sha256: The hash of the logits; None if there are none.
        page_sha256: The hash of each page.
    """

    identity: KVIdentity
    context: int
    n_prompt: int
    mirostat_mu: float | None
    sequences: tuple[SavedSequence, ...]
    page_groups: tuple[int, ...]
    tokens_sha256: str
    logits_sha256: str | None
    page_sha256: tuple[str, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes after the JSON object."""
        logits = 4 * self.identity.vocab_size if self.logits_sha256 is not None else 0
        pages = sum(self.identity.groups[group].page_bytes for group in self.page_groups)
        return 4 * sum(sequence.length for sequence in self.sequences) + logits + pages


# ---- writing


def save(session: Session, path: str | os.PathLike[str], *, sync: bool = True) -> None:
    """Write the content of a session to a file, which appears complete or not at all.

    Incomplete files that killed processes have left in the folder are deleted.

    Raises:
        OSError: If the file cannot be written.
    """
    identity = kv_identity(session)
    found, logits = _core.snapshot(session._core)
    n_prompt, mu = session._n_prompt, session._mu
    indexes: dict[int, int] = {}  # page address to index: shared pages are stored once
    stored: list[tuple[int, _core.Page, int, int]] = []  # group, page, and its positions in use
    sequences = []
    has_states = any(group.is_recurrent for group in identity.groups)
    for ids, shift, starts, groups, states in found:
        length = len(ids) // 4
        for g, pages in enumerate(groups):
            for i, page in enumerate(pages, starts[g] // identity.page_positions):
                is_state = identity.groups[g].is_recurrent  # a page of its own
                begin = 0 if is_state else i * identity.page_positions
                first, last = max(0, starts[g] - begin), min(identity.page_positions, length - begin)
                index = indexes.setdefault(page.address, len(stored))
                if index < len(stored):
                    first, last = min(first, stored[index][2]), max(last, stored[index][3])
                stored[index : index + 1] = [(g, page, first, last)]
        listed = [[indexes[page.address] for page in pages] for pages in groups]
        sequence = {"length": length, "shifted": shift - 1 if shift else None, "starts": starts, "pages": listed}
        sequences.append({**sequence, "states": states} if has_states else sequence)
    while sequences and not sequences[-1]["length"]:
        sequences.pop()
    tokens = b"".join(ids for ids, *_ in found)
    digests = ["0" * 64] * len(stored)
    head = {
        "identity": identity.as_json(),
        "context": session.context,
        "n_prompt": n_prompt,
        "mirostat_mu": mu,
        "sequences": sequences,
        "tokens_sha256": _sha256(tokens),
        "logits_sha256": None if logits is None else _sha256(logits),
        "page_groups": [group for group, *_ in stored],
        "page_sha256": digests,
    }
    place = BEGINNING.size + len(_json(head))  # of the data: all digests have the same length
    data = len(tokens) + len(logits or b"") + sum(identity.groups[group].page_bytes for group, *_ in stored)
    remove_abandoned_in(Path(os.path.realpath(path)).parent)
    with replacing(Path(path), sync=sync) as file:
        file.seek(place)
        file.write(tokens)
        file.write(logits or b"")
        for index, entry in enumerate(stored):
            copy = _copy(session, *entry)
            digests[index] = _sha256(copy)
            file.write(copy)
        text = _json(head)
        file.seek(0)
        file.write(BEGINNING.pack(MAGIC, VERSION, len(text), hashlib.sha256(text).digest(), place + data))
        file.write(text)


def _json(head: dict[str, Any]) -> bytes:
    return json.dumps(head, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _copy(session: Session, group: int, page: _core.Page, first: int, last: int) -> bytearray:
    """Copy a page, with zeros at positions outside the sequence."""
    copy = bytearray(page.nbytes)
    _core.copy_page(session._core, group, page, first, last, copy)
    return copy


def _sha256(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- reading


def load(session: Session, path: str | os.PathLike[str]) -> None:
    """Replace the content of a session with that of a file. The session does not change if this fails.

    Raises:
        SessionFileError: If the file is damaged or does not match the model or the session.
        OSError: If the file cannot be read.
        OutOfMemoryError: If there is not enough memory for its pages.
    """
    try:
        _load(session, path)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold pages, for as long as the caller keeps the error
        raise


def _load(session: Session, path: str | os.PathLike[str]) -> None:
    name = os.fspath(path)
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise SessionFileError(f"{name} is not a regular file")  # opening a pipe would wait for its other end
    with open(path, "rb") as file:
        head = read_head(file, name)
        _check_fits(head, session, name)
        tokens = _read_tokens(file, head, name)
        logits = None
        if head.logits_sha256 is not None:
            logits = array("f", _read(file, 4 * head.identity.vocab_size, head.logits_sha256, "the logits", name))
        pages = _read_pages(file, head, session, name)
    starts = array("i", bytes(4 * len(head.identity.groups)))
    contents: list[_core._Content] = [(i, array("i"), starts, [], 0, []) for i in range(session._n_sequences)]
    start = 0
    for number, sequence in enumerate(head.sequences):
        ids = tokens[start : start + sequence.length]
        start += sequence.length
        contents[number] = _content(number, sequence, ids, pages)
    _core.restore(session._core, contents, logits)
    session._n_prompt, session._mu = head.n_prompt, head.mirostat_mu


def _content(number: int, saved: SavedSequence, ids: array[int], pages: list[_core.Page | None]) -> _core._Content:
    """Return what a sequence should hold. Earlier states for which there was no memory are left out."""
    held = [page for group in saved.pages for index in group if (page := pages[index]) is not None]
    states = zip(saved.states, saved.pages[-1] if saved.states else (), strict=False)
    earlier = [length for length, index in states if pages[index] is not None][1:]
    shift = 0 if saved.shifted is None else saved.shifted + 1
    return number, ids, array("i", saved.starts), held, shift, earlier


def read_head(file: BinaryIO, name: str) -> Head:
    """Read and check a file up to its data.

    Raises:
        SessionFileError: If it is damaged; the message names the field.
    """
    beginning = file.read(BEGINNING.size)
    if beginning[: len(MAGIC)] != MAGIC[: len(beginning)] or not beginning:
        raise SessionFileError(f"{name} is not a session file: it does not begin with {MAGIC.decode()}")
    if len(beginning) < BEGINNING.size:
        raise SessionFileError(f"{name} ends after {len(beginning)} bytes: the beginning has {BEGINNING.size}")
    _, version, head_bytes, digest, file_bytes = BEGINNING.unpack(beginning)
    if version != VERSION:
        raise SessionFileError(f"{name}: version is {version}, this llamac reads version {VERSION}")
    size = os.fstat(file.fileno()).st_size
    if file_bytes != size:
        raise SessionFileError(f"{name}: file_bytes is {file_bytes}, but the file has {size} bytes")
    if not 2 <= head_bytes <= min(MAX_HEAD, size - BEGINNING.size):
        raise SessionFileError(f"{name}: head_bytes is {head_bytes}, more than the file can have")
    text = file.read(head_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise SessionFileError(f"{name} is damaged: head_sha256 does not match the head")
    head = _Fields(parse_object(text, f"{name}: the head", error=SessionFileError), name, "").head()
    expected = BEGINNING.size + head_bytes + head.data_bytes
    if file_bytes != expected:
        raise SessionFileError(f"{name}: file_bytes is {file_bytes}, but its fields describe {expected} bytes")
    return head


def _check_fits(head: Head, session: Session, name: str) -> None:
    """Check that a file matches a session."""
    if differences := head.identity.differences(kv_identity(session)):
        raise SessionFileError(f"{name} belongs to another session: {'; '.join(differences)}")
    if len(head.sequences) > session._n_sequences:
        raise SessionFileError(f"{name} has {len(head.sequences)} sequences, the session has {session._n_sequences}")
    for index, sequence in enumerate(head.sequences):
        if sequence.length > session.context:
            raise SessionFileError(
                f"{name}: sequence {index} has {sequence.length} positions, the session's context has {session.context}"
            )


def _read_tokens(file: BinaryIO, head: Head, name: str) -> array[int]:
    count = sum(sequence.length for sequence in head.sequences)
    tokens = array("i", _read(file, 4 * count, head.tokens_sha256, "the tokens", name))
    if tokens and not (min(tokens) >= 0 and max(tokens) < head.identity.vocab_size):
        raise SessionFileError(f"{name}: a token is not within 0 to {head.identity.vocab_size - 1}")
    return tokens


def _read_pages(file: BinaryIO, head: Head, session: Session, name: str) -> list[_core.Page | None]:
    """Read all pages. An earlier state for which there is no memory is checked, but left out."""
    pages: list[_core.Page | None] = [None] * len(head.page_groups)
    sizes = [head.identity.groups[group].page_bytes for group in head.page_groups]
    places = list(accumulate(sizes, initial=file.tell()))
    last = {sequence.pages[-1][0] for sequence in head.sequences if sequence.states}
    earlier = set().union(*(sequence.pages[-1] for sequence in head.sequences if sequence.states)) - last
    for index in sorted(range(len(sizes)), key=earlier.__contains__):  # the needed ones first
        digest, what = head.page_sha256[index], f"page {index}"
        file.seek(places[index])
        try:
            page = _core.take_page(session._core, head.page_groups[index])
        except OutOfMemoryError:
            if index not in earlier:
                raise
            _read(file, sizes[index], digest, what, name)
            continue
        fill_page(file, page, digest, what, name)
        pages[index] = page
    return pages


def _read(file: BinaryIO, count: int, digest: str, what: str, name: str) -> bytes:
    data = file.read(count)
    if _sha256(data) != digest:
        raise SessionFileError(f"{name} is damaged: the checksum of {what} does not match")
    return data


def fill_page(file: BinaryIO, page: _core.Page, digest: str, what: str, name: str) -> None:
    """Read a page into its memory.

    Raises:
        SessionFileError: If the checksum does not match.
    """
    view = page.view()
    done = 0
    while done < view.nbytes and (count := file.readinto(view[done:])):  # type: ignore[attr-defined]  # of raw files
        done += count
    if done < view.nbytes or _sha256(view) != digest:
        raise SessionFileError(f"{name} is damaged: the checksum of {what} does not match")


class _Fields:
    """The fields of a JSON object, checked one by one."""

    def __init__(self, found: Any, name: str, path: str) -> None:
        self._name, self._path = name, path
        if not isinstance(found, dict):
            self._fail("", f"is {found!r:.40}, expected an object")
        self._found: dict[str, Any] = found

    def _fail(self, field: str, problem: str) -> NoReturn:
        path = f"{self._path}.{field}" if self._path and field else self._path or field
        raise SessionFileError(f"{self._name}: {path} {problem}")

    def _get(self, field: str) -> Any:
        if field not in self._found:
            self._fail(field, "is missing")
        return self._found[field]

    def whole(self, field: str, low: int, high: int) -> int:
        """An integer within a range."""
        return self._whole(self._get(field), field, low, high)

    def _whole(self, value: Any, field: str, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            self._fail(field, f"is {value!r:.40}, expected {low} to {high}")
        return value

    def wholes(self, field: str, low: int, high: int, most: int) -> tuple[int, ...]:
        """A list of integers within a range."""
        values = self.list(field, most)
        return tuple(self._whole(value, f"{field}[{i}]", low, high) for i, value in enumerate(values))

    def list(self, field: str, most: int) -> list[Any]:
        """A list of at most `most` values."""
        values = self._get(field)
        if not isinstance(values, list) or len(values) > most:
            self._fail(field, f"is {values!r:.40}, expected a list of at most {most}")
        return values

    def text(self, field: str) -> str:
        """A string."""
        value = self._get(field)
        if not isinstance(value, str):
            self._fail(field, f"is {value!r:.40}, expected a string")
        return value

    def digest(self, value: Any, field: str) -> str:
        """64 hexadecimal digits."""
        if not (isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")):
            self._fail(field, f"is {value!r:.80}, expected 64 hexadecimal digits")
        return value

    def identity(self) -> KVIdentity:
        """The fields of `identity`."""
        flags = self.list("long_rope", 64)
        if any(type(flag) is not bool for flag in flags):
            self._fail("long_rope", f"is {flags!r:.40}, expected true or false in each place")
        groups = []
        for index, group in enumerate(self.list("groups", 1 << 16)):
            if not (isinstance(group, list) and len(group) == 4 and all(type(n) is int and n >= 0 for n in group)):
                self._fail(f"groups[{index}]", f"is {group!r:.40}, expected four integers")
            window, heads, head_dim, page_bytes = group
            if not 1 <= page_bytes < 1 << 40:
                self._fail(f"groups[{index}]", f"has pages of {page_bytes} bytes, expected 1 to {(1 << 40) - 1}")
            groups.append(LayerGroup(window, heads, head_dim, page_bytes))
        return KVIdentity(
            model=self.digest(self._get("model"), "model"),
            adapters=self.text("adapters") and self.digest(self._get("adapters"), "adapters"),
            numerics=self.whole("numerics", 0, 1 << 31),
            layout=self.whole("layout", 0, 1 << 31),
            kv_dtype=self.text("kv_dtype"),
            session_numerics=self.text("session_numerics"),
            long_rope=tuple(flags),
            page_positions=self.whole("page_positions", 1, 1 << 20),
            groups=tuple(groups),
            vocab_size=self.whole("vocab_size", 1, (1 << 31) - 1),
        )

    def head(self) -> Head:
        """All fields of a file."""
        identity = _Fields(self._get("identity"), self._name, "identity").identity()
        context = self.whole("context", 1, (1 << 31) - 1)
        groups = self.wholes("page_groups", 0, len(identity.groups) - 1, MAX_PAGES)
        listed = self.list("page_sha256", MAX_PAGES)
        digests = [self.digest(value, f"page_sha256[{i}]") for i, value in enumerate(listed)]
        if len(digests) != len(groups):
            self._fail("page_sha256", f"has {len(digests)} entries, but page_groups has {len(groups)}")
        listed = self.list("sequences", 1 << 16)
        sequences = tuple(
            _Fields(value, self._name, f"sequences[{i}]").sequence(identity, context, groups)
            for i, value in enumerate(listed)
        )
        used = {index for sequence in sequences for pages in sequence.pages for index in pages}
        if len(used) != len(groups):
            unused = next(index for index in range(len(groups)) if index not in used)
            self._fail(f"page_groups[{unused}]", "is of a page that no sequence holds")
        mu = self._get("mirostat_mu")
        if mu is not None and (type(mu) not in (int, float) or not -1e30 < mu < 1e30):
            self._fail("mirostat_mu", f"is {mu!r:.40}, expected a number or null")
        logits = self._get("logits_sha256")
        return Head(
            identity=identity,
            context=context,
            n_prompt=self.whole("n_prompt", 0, context),
            mirostat_mu=None if mu is None else float(mu),
            sequences=sequences,
            page_groups=groups,
            tokens_sha256=self.digest(self._get("tokens_sha256"), "tokens_sha256"),
            logits_sha256=None if logits is None else self.digest(logits, "logits_sha256"),
            page_sha256=tuple(digests),
        )

    def sequence(self, identity: KVIdentity, context: int, page_groups: tuple[int, ...]) -> SavedSequence:
        """The fields of a sequence."""
        length = self.whole("length", 0, context)
        shifted = None if self._get("shifted") is None else self.whole("shifted", 0, max(0, length - 1))
        states = self.states(length) if any(group.is_recurrent for group in identity.groups) else ()
        starts, pages = self.list("starts", len(identity.groups)), self.list("pages", len(identity.groups))
        for field, values in (("starts", starts), ("pages", pages)):
            if len(values) != len(identity.groups):
                self._fail(field, f"has {len(values)} entries, expected one per group, {len(identity.groups)}")
        end = -(-length // identity.page_positions)
        for g, (start, indexes) in enumerate(zip(starts, pages, strict=True)):
            window = identity.groups[g].window
            most = max(0, length + 1 - window) if window and length else 0
            self._whole(start, f"starts[{g}]", 0, most)
            count = len(states) if identity.groups[g].is_recurrent else end - start // identity.page_positions
            if not isinstance(indexes, list) or len(indexes) != count:
                self._fail(f"pages[{g}]", f"is {indexes!r:.40}, expected a list of {count} pages")
            for i, index in enumerate(indexes):
                self._whole(index, f"pages[{g}][{i}]", 0, len(page_groups) - 1)
                if page_groups[index] != g:
                    self._fail(f"pages[{g}][{i}]", f"is {index}, a page of group {page_groups[index]}")
        return SavedSequence(length, shifted, tuple(starts), tuple(map(tuple, pages)), states)

    def states(self, length: int) -> tuple[int, ...]:
        """The lengths of the states of a sequence, descending from its own."""
        states = self.wholes("states", 1, length, MAX_STATES)
        if states[:1] != ((length,) if length else ()):
            expected = f"{length}, the sequence's length, in the first place"
            self._fail("states", f"is {list(states)!r:.40}, expected {expected}")
        for i in range(1, len(states)):
            self._whole(states[i], f"states[{i}]", 1, states[i - 1] - 1)
        return states
