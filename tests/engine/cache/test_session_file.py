"""Saved sessions continue with the same bits; errors of damaged and foreign files name the field."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing_allocations import Failing
from recurrent_models import short_convs

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from golden.tiny_checkpoints import random_tensor
from llamac import SessionFileError, _core
from llamac.arguments import KV_DTYPES, KVDtype
from llamac.engine.cache.kv_identity import kv_identity
from llamac.engine.cache.session_file import BEGINNING, MAGIC
from llamac.format.flatfile import FlatFile
from llamac.format.private_files import TEMPORARY, replacing
from processes import TIMEOUT

Edit = Callable[[dict[str, Any]], object]


def rewritten(data: bytes, edit: Edit) -> bytes:
    """A file whose JSON object was edited, with matching checksums."""
    _, version, head_bytes, _, _ = BEGINNING.unpack(data[: BEGINNING.size])
    head = json.loads(data[BEGINNING.size : BEGINNING.size + head_bytes])
    edit(head)
    text = json.dumps(head).encode()
    rest = data[BEGINNING.size + head_bytes :]
    size = BEGINNING.size + len(text) + len(rest)
    return BEGINNING.pack(MAGIC, version, len(text), hashlib.sha256(text).digest(), size) + text + rest


def continues_alike(session: llamac.Session, loaded: llamac.Session, *, sequence: int = 0) -> None:
    """Check that two sessions go on with the same bits."""
    rest = some_ids(70, seed=9)
    assert loaded.tokens(sequence) == session.tokens(sequence)
    found = loaded.eval(rest, sequence=sequence, logits="all")
    assert found.tobytes() == session.eval(rest, sequence=sequence, logits="all").tobytes()


@pytest.fixture(scope="module")
def shared_kv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A model with a window whose last two layers read the keys and values of earlier ones."""
    config = replace(llama_config(dim=36, n_heads=6, n_kv_heads=2, n_layers=4), context=800)
    first, second, third, fourth = config.layers
    layers = (first, replace(second, window=20), replace(third, kv_source=0), replace(fourth, window=20, kv_source=1))
    path = tmp_path_factory.mktemp("shared") / "model.bin"
    with llamac.load(write_model(path, checkpoint(replace(config, layers=layers)))) as model:
        yield model


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_a_loaded_session_continues_with_the_same_bits(
    name: str, kv_dtype: KVDtype, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with llamac.load(request.getfixturevalue(name), kv_dtype=kv_dtype) as model:
        for length in (1, 64, 150):
            with model.session() as session, model.session(threads=1, isa="scalar") as other:
                session.eval(some_ids(length), logits=None)
                session.save(tmp_path / "a.session")
                other.eval(some_ids(30, seed=5), logits=None)
                other.load(tmp_path / "a.session")
                continues_alike(session, other)


@pytest.mark.parametrize("name", ["windowed", "shared_kv"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_windows_and_shared_layers(
    name: str, kv_dtype: KVDtype, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model: llamac.Model = request.getfixturevalue(name)
    with model.session(kv_dtype=kv_dtype) as session, model.session(kv_dtype=kv_dtype) as other:
        session.eval(some_ids(600), logits=None)
        session.save(tmp_path / "a.session")
        other.load(tmp_path / "a.session")
        assert other.shortest_length() == session.shortest_length() > 0
        assert other.memory()["kv"] == session.memory()["kv"]
        continues_alike(session, other)


def test_a_shifted_session(model: llamac.Model, windowed: llamac.Model, tmp_path: Path) -> None:
    for chosen in (model, windowed):
        with chosen.session() as session, chosen.session() as other:
            session.eval(some_ids(500), logits=None)
            session.shift(4, 100)
            session.save(tmp_path / "a.session")
            other.load(tmp_path / "a.session")
            assert other._core.common_prefix(array("i", other.tokens())) == 4  # the rest is not a prefix any more
            continues_alike(session, other)


def test_pages_that_sequences_share_are_stored_once(model: llamac.Model, tmp_path: Path) -> None:
    with model.session(sequences=4) as session, model.session(sequences=5) as other:
        session.eval(some_ids(300), logits=None)
        session.save(tmp_path / "one.session")
        for sequence, length in ((1, 300), (2, 260), (3, 70)):
            session.copy_sequence(0, sequence, length=length)
        session.save(tmp_path / "four.session")
        sizes = [(tmp_path / f"{name}.session").stat().st_size for name in ("one", "four")]
        assert sizes[1] - sizes[0] < 8000  # tokens and indexes
        other.eval(some_ids(10), sequence=4, logits=None)
        other.load(tmp_path / "four.session")
        assert [other.length(i) for i in range(5)] == [300, 300, 260, 70, 0]
        assert other._core.describe()[5] == session._core.describe()[5]
        for sequence in (2, 0, 3, 1):
            continues_alike(session, other, sequence=sequence)


def test_sampling_goes_on(model: llamac.Model, tmp_path: Path) -> None:
    params = llamac.SamplingParams(temperature=1.0, seed=3, mirostat_tau=3.0, repetition_penalty=1.3)

    def sampled(session: llamac.Session, n: int) -> list[int]:
        tokens = []
        for _ in range(n):
            tokens.append(session.sample(params))
            session.step(tokens[-1])
        return tokens

    with model.session() as session, model.session() as other:
        session.prefill(some_ids(20))
        sampled(session, 5)
        session.save(tmp_path / "a.session")
        other.load(tmp_path / "a.session")
        assert sampled(other, 10) == sampled(session, 10)
        session.truncate(3)
        session.save(tmp_path / "b.session")
        other.load(tmp_path / "b.session")
        with pytest.raises(llamac.ArgumentError, match="no logits"):
            other.sample(params)


def test_a_prompt_continues_a_loaded_session(model: llamac.Model, tmp_path: Path) -> None:
    with model.session() as session:
        whole = session.generate(some_ids(100), max_tokens=8, temperature=0)
        session.save(tmp_path / "a.session")
    with model.session() as session:
        session.load(tmp_path / "a.session")
        again = session.generate([*some_ids(100), *whole.tokens], max_tokens=8, temperature=0)
        assert again.usage.cached_tokens == 107
        assert again.tokens == model.generate([*some_ids(100), *whole.tokens], max_tokens=8, temperature=0).tokens


def test_an_empty_session_and_equal_files(model: llamac.Model, tmp_path: Path) -> None:
    with model.session() as session, model.session() as other:
        session.save(tmp_path / "a.session")
        other.eval([1, 2, 3])
        other.load(tmp_path / "a.session")
        assert other.length() == 0
        for target in (session, other):  # one in a page of used memory
            target.eval(some_ids(40), logits=None)
            target.save(tmp_path / f"{id(target)}")
        assert (tmp_path / f"{id(session)}").read_bytes() == (tmp_path / f"{id(other)}").read_bytes()


# ---- refusals


@pytest.fixture(scope="module")
def saved(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of two sequences, one of which was shifted, with logits."""
    path = tmp_path_factory.mktemp("saved") / "a.session"
    with llamac.load(tiny_llama, kv_dtype="q8") as model, model.session(sequences=2) as session:
        session.eval(some_ids(90), logits=None)
        session.copy_sequence(0, 1, length=80)
        session.shift(8, 12, sequence=1)
        session.prefill([5])
        session.save(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def target(tiny_llama: Path) -> Iterator[llamac.Session]:
    """A session that can load it."""
    with llamac.load(tiny_llama, kv_dtype="q8") as model, model.session(sequences=2) as session:
        session.eval([1, 2, 3], logits=None)
        yield session


def refused(target: llamac.Session, path: Path, data: bytes) -> str:
    """The error of loading a file; checks that the session does not change."""
    path.write_bytes(data)
    with pytest.raises(SessionFileError) as caught:
        target.load(path)
    assert target.tokens() == [1, 2, 3]
    assert target.length(1) == 0
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("identity", 3, "identity is 3, expected an object"),
        ("context", 0, "context is 0, expected 1 to"),
        ("context", 1.5, "context is 1.5"),
        ("n_prompt", -1, "n_prompt is -1"),
        ("mirostat_mu", "x", "mirostat_mu is 'x', expected a number or null"),
        ("mirostat_mu", 10**400, "mirostat_mu is 1000"),
        ("sequences", {}, "sequences is {}, expected a list"),
        ("sequences", [3], r"sequences[0] is 3, expected an object"),
        ("tokens_sha256", "00", "tokens_sha256 is '00', expected 64 hexadecimal digits"),
        ("tokens_sha256", "0" * 64, "the checksum of the tokens"),
        ("logits_sha256", 7, "logits_sha256 is 7"),
        ("logits_sha256", "0" * 64, "the checksum of the logits"),
        ("page_groups", [0, 0, 0, 9], "page_groups[3] is 9, expected 0 to 0"),
        ("page_sha256", [], "page_sha256 has 0 entries, but page_groups has 4"),
        ("identity.model", "x", "identity.model is 'x', expected 64"),
        ("identity.adapters", 1, "identity.adapters is 1, expected a string"),
        ("identity.numerics", None, "identity.numerics is None"),
        ("identity.layout", True, "identity.layout is True"),
        ("identity.kv_dtype", 4, "identity.kv_dtype is 4, expected a string"),
        ("identity.long_rope", [1], "identity.long_rope is [1], expected true or false"),
        ("identity.page_positions", 0, "identity.page_positions is 0"),
        ("identity.groups", [[0, 1]], "identity.groups[0] is [0, 1], expected four integers"),
        ("identity.groups", [[0, 1, 1, 0]], "identity.groups[0] has pages of 0 bytes"),
        ("identity.vocab_size", 1 << 40, "identity.vocab_size is"),
        ("sequences.0.length", 601, "sequences[0].length is 601, expected 0 to 600"),
        ("sequences.0.length", 10, "sequences[0].pages[0] is [0, 1], expected a list of 1 pages"),
        ("sequences.0.shifted", 91, "sequences[0].shifted is 91, expected 0 to 90"),
        ("sequences.0.starts", [], "sequences[0].starts has 0 entries, expected one per group, 1"),
        ("sequences.0.starts", [1], "sequences[0].starts[0] is 1, expected 0 to 0"),
        ("sequences.0.pages", [[0]], "sequences[0].pages[0] is [0], expected a list of 2 pages"),
        ("sequences.0.pages", [[0, 7]], "sequences[0].pages[0][1] is 7, expected 0 to 3"),
        ("sequences.0.pages", [[2, 3]], "page_groups[0] is of a page that no sequence holds"),
    ],
)
def test_each_field_is_checked(
    field: str, value: object, expected: str, saved: bytes, target: llamac.Session, tmp_path: Path
) -> None:
    def edit(head: dict[str, Any]) -> None:
        place: Any = head
        *path, last = field.split(".")
        for name in path:
            place = place[int(name)] if name.isdigit() else place[name]
        assert last in place
        place[last] = value

    assert expected in refused(target, tmp_path / "a.session", rewritten(saved, edit))


def test_missing_fields_are_named(saved: bytes, target: llamac.Session, tmp_path: Path) -> None:
    head = json.loads(saved[BEGINNING.size : BEGINNING.size + BEGINNING.unpack(saved[: BEGINNING.size])[2]])
    for path, fields in ((), head), (("identity",), head["identity"]), (("sequences", 0), head["sequences"][0]):
        for field in fields:

            def edit(head: dict[str, Any], path: tuple[Any, ...] = path, field: str = field) -> None:
                place: Any = head
                for name in path:
                    place = place[name]
                del place[field]

            assert f"{field} is missing" in refused(target, tmp_path / "a.session", rewritten(saved, edit))


def test_the_beginning_is_checked(saved: bytes, target: llamac.Session, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    assert "is not a session file" in refused(target, path, b"GGUF" + saved[4:])
    assert "is not a session file" in refused(target, path, b"")
    assert "version is 2, this llamac reads version 1" in refused(target, path, saved[:8] + b"\2" + saved[9:])
    assert "head_bytes is" in refused(target, path, saved[:12] + b"\xff\xff\xff\x7f" + saved[16:])
    assert "head_sha256" in refused(target, path, saved[:20] + bytes([saved[20] ^ 1]) + saved[21:])
    assert "but the file has" in refused(target, path, saved + b"\0")
    longer = saved[: BEGINNING.size - 8] + (len(saved) + 1).to_bytes(8, "little") + saved[BEGINNING.size :] + b"\0"
    assert f"file_bytes is {len(saved) + 1}, but its fields describe {len(saved)}" in refused(target, path, longer)


def test_tokens_are_those_of_the_model(saved: bytes, target: llamac.Session, tmp_path: Path) -> None:
    start = BEGINNING.size + BEGINNING.unpack(saved[: BEGINNING.size])[2]
    head = json.loads(saved[BEGINNING.size : start])
    end = start + 4 * sum(sequence["length"] for sequence in head["sequences"])
    tokens = (1000).to_bytes(4, "little") + saved[start + 4 : end]
    changed = rewritten(
        saved[:start] + tokens + saved[end:],
        lambda head: head.update(tokens_sha256=hashlib.sha256(tokens).hexdigest()),
    )
    assert "a token is not within 0 to 300" in refused(target, tmp_path / "a.session", changed)


def test_pages_have_the_group_of_their_layers(shared_kv: llamac.Model, tmp_path: Path) -> None:
    path = tmp_path / "a.session"

    def exchange(head: dict[str, Any]) -> None:
        head["sequences"][0]["pages"].reverse()

    with shared_kv.session() as session, shared_kv.session() as other:
        session.eval(some_ids(10), logits=None)
        session.save(path)
        path.write_bytes(rewritten(path.read_bytes(), exchange))
        with pytest.raises(SessionFileError, match=r"sequences\[0\].pages\[0\]\[0\] is 1, a page of group 1"):
            other.load(path)
        assert other.length() == 0


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llamac.Model]:
    """A model with short convolutions, whose parts of a state are followed by unused bytes."""
    config = short_convs().config
    layers = (replace(config.layers[0], conv_width=2), *config.layers[1:])
    made = checkpoint(replace(config, dim=36, layers=layers), {"layers.0.conv_taps.bias": random_tensor("bias", (36,))})
    with llamac.load(write_model(tmp_path_factory.mktemp("recurrent") / "model.bin", made)) as model:
        yield model


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (None, "sequences[0].states is None, expected a list of at most 16"),
        ([70] * 17, "expected a list of at most 16"),
        ([64, 70], "sequences[0].states is [64, 70], expected 70, the sequence's length, in the first place"),
        ([], "sequences[0].states is [], expected 70"),
        ([70, 70], "sequences[0].states[1] is 70, expected 1 to 69"),
        ([70, 0], "sequences[0].states[1] is 0, expected 1 to 70"),
        ([70, 64, 7], "sequences[0].pages[1] is [2, 3], expected a list of 3 pages"),
    ],
)
def test_states_are_checked(states: object, expected: str, recurrent: llamac.Model, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    with recurrent.session() as session:
        session.eval(some_ids(70), logits=None)
        session.save(path)
        path.write_bytes(rewritten(path.read_bytes(), lambda head: head["sequences"][0].update(states=states)))
        with pytest.raises(SessionFileError, match=re.escape(expected)):
            session.load(path)
        assert session.length() == 70


def test_unused_bytes_of_states_are_not_saved(recurrent: llamac.Model, tmp_path: Path) -> None:
    with recurrent.session() as session:
        for name in ("first", "second"):
            pages = [_core.take_page(session._core, 1) for _ in range(20)]
            for page in pages:
                page.view()[:] = bytes([255 if name == "second" else 0]) * page.nbytes
            del page, pages
            session.truncate(0)
            session.eval(some_ids(70), logits=None)
            session.save(tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_earlier_states_need_no_memory(recurrent: llamac.Model, tmp_path: Path) -> None:
    """Without room for them, a file is loaded without them. They are checked all the same."""
    with recurrent.session(sequences=2) as session:
        for sequence in (0, 1):
            session.eval(some_ids(70), sequence=sequence, logits=None)
        session.save(tmp_path / "a.session")
        expected = session.eval(some_ids(5, seed=3), sequence=1)
        sizes = [group[3] for group in _core.kv_groups(session._core)]
    recurrent.kv_budget = 4 * sizes[0] + 2 * sizes[1]
    try:
        with recurrent.session(sequences=2) as session:
            session.load(tmp_path / "a.session")
            assert [_core.state_lengths(session._core, sequence) for sequence in (0, 1)] == [[70], [70]]
            session.truncate(0)
            assert session.eval(some_ids(5, seed=3), sequence=1).tobytes() == expected.tobytes()
            session.truncate(0, sequence=1)
            data = bytearray((tmp_path / "a.session").read_bytes())
            data[-2 * sizes[1] + 1] ^= 1  # of a state in the last sequence, the latest of which comes first
            data[-1 * sizes[1] + 1] ^= 1
            (tmp_path / "a.session").write_bytes(data)
            with pytest.raises(SessionFileError, match="the checksum of page"):
                session.load(tmp_path / "a.session")
    finally:
        recurrent.kv_budget = None


def test_truncation_at_every_length(saved: bytes, target: llamac.Session, tmp_path: Path) -> None:
    """The lengths around each part, and a hundred others."""
    rng = random.Random(1)
    lengths = {*range(80), *(rng.randrange(len(saved)) for _ in range(100)), len(saved) - 1}
    for length in sorted(lengths):
        message = refused(target, tmp_path / "a.session", saved[:length])
        assert "not a session file" in message or "ends after" in message or "file_bytes" in message


def test_any_changed_bit_is_found(saved: bytes, target: llamac.Session, tmp_path: Path) -> None:
    """All bits of the beginning, and some hundred others."""
    rng = random.Random(2)
    bits = [*range(8 * BEGINNING.size), *(rng.randrange(8 * len(saved)) for _ in range(300))]
    for bit in bits:
        changed = bytearray(saved)
        changed[bit // 8] ^= 1 << bit % 8
        assert refused(target, tmp_path / "a.session", bytes(changed))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_dtype": "f16", "sequences": 2}, "kv_dtype is 'q8' in the file and 'f16' in the session"),
        (
            {"kv_dtype": "q8", "sequences": 2, "numerics": "fast"},
            "session_numerics is 'exact' in the file and 'fast' in the session",
        ),
        ({"kv_dtype": "q8"}, "has 2 sequences, the session has 1"),
        (
            {"kv_dtype": "q8", "sequences": 2, "context": 80},
            "sequence 0 has 91 positions, the session's context has 80",
        ),
    ],
)
def test_other_settings_are_refused_with_what_differs(
    options: dict[str, Any], expected: str, saved: bytes, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.session"
    path.write_bytes(saved)
    with (
        llamac.load(tiny_llama) as model,
        model.session(**options) as session,
        pytest.raises(SessionFileError, match=expected),
    ):
        session.load(path)


def test_other_models_are_refused_with_what_differs(saved: bytes, tiny_gpt2: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    path.write_bytes(saved)
    with (
        llamac.load(tiny_gpt2, kv_dtype="q8") as model,
        model.session(sequences=2) as session,
        pytest.raises(SessionFileError, match="belongs to another session: model is '") as caught,
    ):
        session.load(path)
    assert "groups" not in str(caught.value)  # they follow from the model


def test_other_adapters_and_numerics_are_refused(saved: bytes, target: llamac.Session, tmp_path: Path) -> None:
    data = rewritten(saved, lambda head: head["identity"].update(numerics=0, adapters="0" * 64))
    message = refused(target, tmp_path / "a.session", data)
    assert "adapters is '0000" in message
    assert "in the file and none in the session; numerics is 0 in the file and 1" in message


def test_adapters_are_part_of_the_identity(tiny_llama: Path) -> None:
    seen = set()
    for change in (None, 1.0, 2.0):
        file = FlatFile(tiny_llama)
        if change is not None:
            file.core.replace("output_norm.weight", 1, np.full(file.config["dim"], change, np.float32).tobytes())
        with llamac.Model(file) as model, model.session() as session:
            seen.add(kv_identity(session).digest())
    assert len(seen) == 3


def test_the_long_rope_table_is_part_of_the_identity(tmp_path: Path) -> None:
    config = replace(llama_config(), rope_original_context=(100,))
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(config))) as model:
        for context, is_long in ((100, False), (101, True)):
            with model.session(context=context) as session:
                assert kv_identity(session).long_rope == (is_long,)
                session.eval(some_ids(20), logits=None)
                session.save(tmp_path / f"{context}")
        with (
            model.session(context=101) as session,
            pytest.raises(SessionFileError, match=r"long_rope is \(False,\) in the file and \(True,\) in the session"),
        ):
            session.load(tmp_path / "100")


def test_no_memory_changes_nothing(saved: bytes, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "a.session").write_bytes(saved)
    with llamac.load(tiny_llama, kv_dtype="q8") as model, model.session(sequences=2) as session:
        session.eval([1, 2, 3], logits=None)
        before = model.kv_bytes
        model.kv_budget = 3 * before
        with pytest.raises(llamac.OutOfMemoryError, match="does not fit"):
            session.load(tmp_path / "a.session")
        assert (session.tokens(), model.kv_bytes) == ([1, 2, 3], before)


@pytest.mark.parametrize("sign", [1, -1], ids=["once", "from then on"])
def test_any_allocation_of_a_load_can_fail(saved: bytes, tiny_llama: Path, tmp_path: Path, sign: int) -> None:
    """Then no sequence has changed, also not one before the sequence that lacks memory."""
    (tmp_path / "a.session").write_bytes(saved)
    with llamac.load(tiny_llama, kv_dtype="q8") as model, model.session(sequences=2) as wanted:
        wanted.load(tmp_path / "a.session")
        with model.session(sequences=2) as session, Failing(0) as whole:
            session.load(tmp_path / "a.session")
        assert whole.count >= 2  # lists of tokens
        for number in range(1, whole.count + 1):
            with model.session(sequences=2) as session:
                session.eval([1, 2], sequence=1, logits=None)
                session.prefill([1, 2, 3])
                before = model.kv_bytes, session.sample(temperature=0)
                with pytest.raises(llamac.OutOfMemoryError), Failing(sign * number):
                    session.load(tmp_path / "a.session")
                assert (session.tokens(), session.tokens(1)) == ([1, 2, 3], [1, 2]), number
                assert (model.kv_bytes, session.sample(temperature=0)) == before, number
                session.load(tmp_path / "a.session")
                assert session.sample(temperature=0) == wanted.sample(temperature=0)
                assert (session.tokens(), session.tokens(1)) == (wanted.tokens(), wanted.tokens(1))


def test_files_are_replaced_whole(model: llamac.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.session"
    with model.session() as session:
        session.eval(some_ids(10), logits=None)
        session.save(str(path))
        before = path.read_bytes()
        session.eval(some_ids(90), logits=None)

        def fail(*arguments: object) -> None:
            raise OSError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="the disk is full"):
                session.save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["a.session"]
        with pytest.raises(OSError, match="not a regular file"):
            session.save(tmp_path)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            session.save(tmp_path / "nowhere" / "a.session")
        with pytest.raises(FileNotFoundError):
            session.load(tmp_path / "none")
    with pytest.raises(llamac.ClosedError):
        session.save(path)
    with pytest.raises(llamac.ClosedError):
        session.load(path)


def test_held_pages_keep_the_memory_until_they_are_dropped(tiny_llama: Path) -> None:
    model = llamac.load(tiny_llama)
    session = model.session()
    session.eval(some_ids(10), logits=None)
    page = _core.hold_page(session._core, 0, 0, 0)
    session.close()
    model.close()
    assert page.view().readonly
    assert not model.file.core.released
    del page
    assert model.file.core.released


# ---- processes that were killed

KILLED = """
import os, signal, sys
import llamac
from llamac import _core
from llamac.engine.cache import session_file
copy = _core.copy_page
def kill_at_the_second_page(*arguments):
    if arguments[3] == 0 and os.path.exists(sys.argv[2] + ".begun"):
        os.kill(os.getpid(), signal.SIGKILL)
    open(sys.argv[2] + ".begun", "w").close()
    copy(*arguments)
_core.copy_page = kill_at_the_second_page
with llamac.load(sys.argv[1]) as model, model.session() as session:
    session.prefill([1] * 130)
    session.save(sys.argv[2])
"""


def test_a_killed_save_keeps_the_file_and_the_next_save_removes_what_it_left(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    path.write_bytes(b"an earlier file")
    command = [sys.executable, "-c", KILLED, str(tiny_llama), str(path)]
    assert subprocess.run(command, timeout=TIMEOUT).returncode == -signal.SIGKILL
    assert path.read_bytes() == b"an earlier file"
    [left] = [found for found in tmp_path.iterdir() if found.name.startswith(TEMPORARY)]
    assert left.stat().st_size > 0
    (tmp_path / "other.tmp").write_text("kept")
    with llamac.load(tiny_llama) as model, model.session() as session, replacing(tmp_path / "running") as running:
        session.prefill([1, 2, 3])
        session.save(path)
        assert Path(running.name).exists()  # another thread or process still writes it
        assert not left.exists()
        with model.session() as loaded:
            loaded.load(path)
            assert loaded.tokens() == [1, 2, 3]
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "a.session",
        "a.session.begun",
        "other.tmp",
        "running",
    ]
