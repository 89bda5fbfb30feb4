"""Devices written in Python: the arguments of their methods, and where their exceptions go.

tests/c/test_device.c checks pages and bits.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from builders import checkpoint, llama_config, write_model
from llamac import _core
from llamac.errors import ArgumentError, CancelledError, ClosedError, LlamacError, OutOfMemoryError
from llamac.format.flatfile import FlatFile

EMBEDDING = _core.stages().index("embedding")
OUTPUT_NORM = _core.stages().index("output_norm")


class FakeDevice:
    """Memory at addresses of its own. Logits are the rows' positions; keys and values are not written."""

    most_rows = 256
    mtp_kv_room = 0

    def __init__(self) -> None:
        self.blocks: dict[int, NDArray[np.uint8]] = {}
        self.next_address = 1 << 60
        self.fails: dict[str, BaseException] = {}
        self.last: _core.Chunk | None = None
        self.seen: dict[str, Any] = {}

    def _call(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]

    def _at(self, address: int, size: int) -> NDArray[np.uint8]:
        [(start, block)] = [(a, b) for a, b in self.blocks.items() if a <= address < a + len(b)]
        assert address + size <= start + len(block)
        return block[address - start : address - start + size]

    def alloc(self, size: int, /) -> int:
        self._call("alloc")
        self.next_address += 1 << 30
        self.blocks[self.next_address] = np.full(size, 255, np.uint8)
        return self.next_address

    def free(self, address: int, /) -> None:
        del self.blocks[address]

    def copy(self, to: int, source: int, size: int, /) -> None:
        self._call("copy")
        self._at(to, size)[:] = self._at(source, size)

    def upload(self, address: int, source: memoryview, /) -> None:
        self._call("upload")
        self._at(address, source.nbytes)[:] = np.frombuffer(source, np.uint8)

    def download(self, address: int, to: memoryview, /) -> None:
        self._call("download")
        np.frombuffer(to, np.uint8)[:] = self._at(address, to.nbytes)

    def forward(self, chunk: _core.Chunk, /) -> None:
        self._call("forward")
        self.last = chunk
        n = chunk.n_rows
        rows = np.frombuffer(chunk.rows(), np.int32).reshape(n, 4)
        table_of, last_table_of, sequences = (np.zeros(n, np.int32) for _ in range(3))
        n_tables = chunk.tables(table_of.data, last_table_of.data, sequences.data)
        tables = np.zeros((n_tables, 3), np.uint64)
        for table in range(n_tables):
            chunk.page_addresses(int(sequences[table]), 0, tables[table].data)
        wanted = rows[rows[:, 3] != 0]
        assert len(wanted) == chunk.n_wanted
        if logits := chunk.logits():
            np.frombuffer(logits, np.float32).reshape(chunk.n_wanted, -1)[:] = wanted[:, 2:3]
        for stage, layer in ((EMBEDDING, 0), (OUTPUT_NORM, 0)):
            if (out := chunk.observer(stage, layer)) is not None:
                np.frombuffer(out, np.float32)[:] = stage
        self.seen = {
            "rows": rows.tolist(),
            "table_of": table_of.tolist(),
            "last_table_of": last_table_of.tolist(),
            "sequences": sequences[:n_tables].tolist(),
            "tables": tables.tolist(),
            "session": chunk.session(),
            "places": chunk.places(),
            "observed": chunk.is_observed,
        }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny.bin", checkpoint(llama_config()))


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def model(path: Path, device: FakeDevice) -> Iterator[_core.Model]:
    file = FlatFile(path)
    file.core.use_device(device)
    yield file.core
    file.close()
    assert device.blocks == {}


def rows(*numbers: tuple[int, int, int, int]) -> array[int]:
    return array("i", [number for row in numbers for number in row])


def prompt(sequence: int, first: int, count: int) -> array[int]:
    return rows(*((5, sequence, first + i, 0) for i in range(count)))


def test_a_device_gets_the_rows_and_their_pages(model: _core.Model, device: FakeDevice) -> None:
    session = _core.Session(model, sequences=3, context=128, on_device=True)
    logits = np.zeros(2 * session.vocab_size, np.float32)
    embedding, norm = np.zeros(3 * 48, np.float32), np.zeros(2 * 48, np.float32)
    session.eval_rows(
        rows((7, 2, 0, 1), (8, 0, 0, 0), (9, 2, 1, 1)),
        logits.data,
        [(EMBEDDING, 0, embedding.data), (OUTPUT_NORM, 0, norm.data)],
    )
    assert logits.reshape(2, -1)[:, 0].tolist() == [0, 1]
    assert set(embedding) == {EMBEDDING}
    assert set(norm) == {OUTPUT_NORM}
    seen = device.seen
    assert seen["rows"] == [[7, 2, 0, 1], [8, 0, 0, 0], [9, 2, 1, 1]]
    assert (seen["table_of"], seen["last_table_of"], seen["sequences"]) == ([0, 1, 0], [0, 1, 0], [2, 0])
    assert seen["session"] == (128, _core_dtype("f32"), 0, False)
    assert seen["observed"]
    [group] = _core.kv_groups(session)
    page_bytes, layers = group[3], len(seen["places"])
    assert layers == 2
    assert seen["places"][1][1] == page_bytes // 2
    pages = [row[0] for row in seen["tables"]]
    assert all(page in {a + i * page_bytes for a in device.blocks for i in range(4)} for page in pages)
    assert pages[0] != pages[1]
    assert all(row[1:] == [0, 0] for row in seen["tables"])
    session.close()


def _core_dtype(name: str) -> int:
    return dict(_core.dtypes())[name]


def test_drafts_are_stored_in_all_of_their_branches(model: _core.Model, device: FakeDevice) -> None:
    session = _core.Session(model, on_device=True)
    session.eval_rows(prompt(0, 0, 3))
    session.eval_drafts(rows((1, 0, -1, 0), (2, 0, 0, 0), (3, 0, 0, 1)))
    assert [row[2] for row in device.seen["rows"]] == [3, 4, 4]
    assert (device.seen["table_of"], device.seen["last_table_of"]) == ([0, 0, 1], [1, 0, 1])
    session.close()


def test_a_chunk_ends_with_the_call(model: _core.Model, device: FakeDevice) -> None:
    session = _core.Session(model, on_device=True)
    session.eval_rows(prompt(0, 0, 1))
    assert device.last is not None
    with pytest.raises(LlamacError, match="has been computed"):
        device.last.rows()
    with pytest.raises(TypeError):
        _core.Chunk()
    session.close()


@pytest.mark.parametrize("raised", [KeyboardInterrupt("now"), ZeroDivisionError("one"), OutOfMemoryError("a device's")])
def test_exceptions_of_a_device_reach_the_caller(model: _core.Model, device: FakeDevice, raised: BaseException) -> None:
    session = _core.Session(model, sequences=2, on_device=True)
    device.fails = {"alloc": raised}
    with pytest.raises(type(raised)) as found:
        session.eval_rows(prompt(0, 0, 3))
    assert found.value is raised
    assert session.length() == 0
    device.fails = {}
    session.eval_rows(prompt(0, 0, 3))
    session.fork_from(session, 3, target=1)
    for name in ("copy", "forward"):
        device.fails = {name: raised}
        with pytest.raises(type(raised)) as found:
            session.eval_rows(prompt(1, 3, 1))
        assert found.value is raised
        assert session.tokens(1) == [5, 5, 5]
    for name in ("download", "upload"):
        device.fails = {name: raised}
        with pytest.raises(type(raised)):
            session.shift(0, 1)
    device.fails = {"download": raised}
    page = _core.hold_page(session, 1, 0, 0)
    with pytest.raises(type(raised)):
        page.view()
    session.close()
    del page


@pytest.mark.parametrize("fails", ["download", "upload"])
def test_a_shift_that_fails_leaves_the_sequence_or_empties_it(
    model: _core.Model, device: FakeDevice, fails: str
) -> None:
    """It is empty if the device fails while positions move. What follows is then as in a sequence never shifted."""
    session = _core.Session(model, on_device=True)
    session.eval_rows(prompt(0, 0, 9))
    session.shift(0, 1)
    session.eval_rows(rows((6, 0, 8, 1)))
    logits = session.copy_logits(session.vocab_size)
    with pytest.raises(ArgumentError, match="remove positions 3 to 99"):
        session.shift(3, 99)
    with pytest.raises(ArgumentError, match="truncate to length 99"):
        session.truncate(99)
    assert session.copy_logits(session.vocab_size) == logits
    device.fails = {fails: RuntimeError("lost")}
    with pytest.raises(RuntimeError, match="lost"):
        session.shift(0, 2)
    device.fails = {}
    if fails == "download":
        assert session.tokens() == [5] * 8 + [6]
        assert session.copy_logits(session.vocab_size) == logits
        assert session.common_prefix(array("i", session.tokens())) == 0
    else:
        with pytest.raises(ArgumentError, match="no logits"):
            session.copy_logits(1)
        session.eval_rows(prompt(0, 0, 4))
        assert session.common_prefix(array("i", session.tokens())) == 4
    session.close()


def test_a_device_can_give_up_a_cancelled_chunk(model: _core.Model, device: FakeDevice) -> None:
    session = _core.Session(model, on_device=True)
    session.eval_rows(prompt(0, 0, 3))
    device.fails = {"forward": CancelledError("", 0)}
    with pytest.raises(CancelledError, match="0 of 1 rows"):
        session.eval_rows(prompt(0, 3, 1))
    assert session.length() == 3
    session.close()


def test_pages_on_a_device_are_viewed_as_copies(model: _core.Model, device: FakeDevice) -> None:
    session = _core.Session(model, sequences=2, on_device=True)
    session.eval_rows(prompt(0, 0, 3))
    page = _core.take_page(session, 0)
    content = np.arange(page.nbytes, dtype=np.uint32).astype(np.uint8)
    page.view()[:] = content.data
    _core.restore(session, [(1, array("i", [5] * 64), array("i", [0]), [page], 0, [])])
    restored = _core.hold_page(session, 1, 0, 0)
    view = restored.view()
    assert bytes(view) == content.tobytes()
    assert view.readonly
    with pytest.raises(BufferError, match="on a device"):
        memoryview(restored)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="not a page of group"):
        _core.restore(_core.Session(model), [(0, array("i", [5] * 64), array("i", [0]), [page], 0, [])])
    session.close()
    del page, restored


def test_all_sequences_are_restored_or_none(model: _core.Model, device: FakeDevice) -> None:
    """Whatever is wrong with the last one. The logits for `sample` stay, too."""
    session = _core.Session(model, sequences=2, on_device=True)
    session.eval_rows(rows((5, 0, 0, 0), (6, 0, 1, 1)))
    logits = session.copy_logits(session.vocab_size)
    other = _core.Session(model)
    foreign = _core.take_page(other, 0)
    other.close()
    ids, start = array("i", [5] * 64), array("i", [0])
    pages = [_core.take_page(session, 0) for _ in range(2)]
    first: _core._Content = (0, ids, start, pages[:1], 0, [])
    for last, expected in (
        ((2, ids, start, pages[1:], 0, []), "sequence is 2"),
        ((1, ids, start, [], 0, []), "there are 0 pages, but 64 positions need 1"),
        ((1, ids, array("i", [0, 0]), pages[1:], 0, []), "there are 2 first positions"),
        ((1, ids, start, [foreign], 0, []), "page 0 is not a page of group 0"),
        ((1, ids, start, pages, 0, [3]), "page 0 is not a state"),
    ):
        with pytest.raises(ArgumentError, match=expected):
            _core.restore(session, [first, last])
        assert (session.tokens(0), session.length(1)) == ([5, 6], 0)
        assert session.copy_logits(session.vocab_size) == logits
    second: _core._Content = (1, ids, start, pages[1:], 0, [])
    with pytest.raises(ArgumentError, match="there are 3 logits"):
        _core.restore(session, [first, second], array("f", [0] * 3))
    pages[1].view()[:] = bytes(pages[1].nbytes)
    device.fails = {"upload": RuntimeError("lost")}
    with pytest.raises(RuntimeError, match="lost"):
        _core.restore(session, [first, second])
    assert (session.tokens(0), session.length(1)) == ([5, 6], 0)
    device.fails = {}
    _core.restore(session, [first, second])
    assert (session.tokens(0), session.tokens(1)) == ([5] * 64, [5] * 64)
    session.close()
    del foreign, pages, first, second, last


def test_chunks_have_the_most_rows_of_the_device_and_at_most_256_logits(path: Path) -> None:
    file, device = FlatFile(path), FakeDevice()
    device.most_rows = 10
    with pytest.raises(ArgumentError, match="most_rows is 10, expected"):
        file.core.use_device(device)
    device.most_rows = 400
    file.core.use_device(device)
    chunks: list[int] = []
    device.forward = lambda chunk: chunks.append(chunk.n_rows)  # type: ignore[method-assign]
    session = _core.Session(file.core, sequences=2, context=600, on_device=True)
    session.eval_rows(prompt(0, 0, 500))
    logits = np.zeros(300 * session.vocab_size, np.float32)
    session.eval_rows(rows(*((5, 1, i, i >= 50) for i in range(350))), logits.data)
    assert chunks == [400, 100, 306, 44]
    session.close()
    file.close()


def test_a_model_has_one_device(model: _core.Model, path: Path, device: FakeDevice) -> None:
    with pytest.raises(ArgumentError, match="already has a device"):
        model.use_device(FakeDevice())
    assert model.device is device
    file = FlatFile(path)
    with pytest.raises(ArgumentError, match="has no device"):
        _core.Session(file.core, on_device=True)
    file.close()
    with pytest.raises(ClosedError):
        file.core.use_device(FakeDevice())


def test_forgotten_sessions_free_their_pages(path: Path) -> None:
    file, device = FlatFile(path), FakeDevice()
    file.core.use_device(device)
    session = _core.Session(file.core, on_device=True)
    session.eval_rows(prompt(0, 0, 3))
    assert device.blocks
    cycle: list[object] = [session, _core.hold_page(session, 0, 0, 0), file.core]
    cycle.append(cycle)
    blocks = device.blocks
    del file, device, session, cycle
    gc.collect()
    assert blocks == {}
