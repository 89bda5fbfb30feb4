"""Prefixes on disk of models with recurrent layers: a later engine continues from their states."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recurrent_models import both_mixers, delta_nets, mamba2_layers, parts, short_convs

import llamac
from builders import some_ids, write_model
from llamac import _core
from llamac.engine.cache import prefix_store
from llamac.engine.cache.prefix_store import HEADER, SUFFIX, PrefixStore
from llamac.export.checkpoint import Checkpoint

ANSWER: dict[str, Any] = {"max_tokens": 120, "seed": 3, "ignore_eos": True}
SHORT: dict[str, Any] = {**ANSWER, "max_tokens": 6}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with Mamba 2 beside attention in each layer."""
    return write_model(tmp_path_factory.mktemp("beside") / "model.bin", both_mixers())


def states(folder: Path) -> list[Path]:
    """The files of the last group of layers."""
    last = max((file.stem.rsplit("-")[1] for file in folder.glob(f"*{SUFFIX}")), default="")
    return sorted(folder.glob(f"*-{last}{SUFFIX}"))


@pytest.mark.parametrize("made", [delta_nets, short_convs, mamba2_layers, parts, both_mixers])
def test_a_second_turn_after_a_restart_computes_its_own_tokens(made: Callable[[], Checkpoint], tmp_path: Path) -> None:
    """Also if it drops the first answer, with other kernels and chunks, from a folder that two processes could use."""
    path, folder = write_model(tmp_path / "model.bin", made()), tmp_path / "prefixes"
    prompt = some_ids(150)
    with llamac.load(path) as model, llamac.Engine(model, prefix_dir=folder) as engine:
        answer = engine.generate([prompt], **ANSWER)[0].tokens
    for turn, kept in (([*prompt, *answer, *some_ids(20, seed=4)], 256), ([*prompt[:140], *some_ids(20, seed=5)], 128)):
        with llamac.load(path, isa="scalar", threads=1) as model:
            expected = model.generate(turn, **SHORT).tokens
            with llamac.Engine(model, prefix_dir=folder) as engine, llamac.Engine(model, prefix_dir=folder) as other:
                for found in (engine.generate([turn], **SHORT)[0], other.generate([turn], **SHORT)[0]):
                    assert found.tokens == expected
                    assert found.usage.cached_tokens == kept
                stats = engine.stats().prefix
                assert (stats.disk_hits, stats.disk_hit_tokens, stats.disk_errors) == (1, kept, 0)


def test_a_search_without_a_stored_state_is_linear_in_the_length(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages of keys and values are stored, and no state: the engine's thread searches, so requests wait."""
    pages = 200
    with llamac.load(path) as model, model.session() as session:
        store = PrefixStore(session, tmp_path)
        last, asked = len(store._groups) - 1, 0
        place = store._path

        def counting(key: bytes, group: int) -> Path:
            nonlocal asked
            asked += 1
            return place(key, group)

        monkeypatch.setattr(store, "_path", counting)
        monkeypatch.setattr(prefix_store, "_is_own_file", lambda file: not file.stem.endswith(f"-{last}"))
        assert store.longest(array("i", some_ids(pages * store._positions + 1))) == 0
        assert asked == len(store._groups) * pages
        store.close()


def test_a_prefix_ends_where_a_state_is_stored(path: Path, tmp_path: Path) -> None:
    ids = some_ids(400)
    with llamac.load(path) as model, model.session(sequences=2) as session:
        store = PrefixStore(session, tmp_path)
        session.eval(ids, logits=None)
        assert _core.state_lengths(session._core, 0) == [400, 384, 256]
        store.keep(array("i", ids), session._core, 0)
        store.drain()
        assert len(states(tmp_path)) == 2
        assert [store.longest(array("i", ids[:n])) for n in (400, 385, 384, 257, 256)] == [384, 384, 256, 256, 0]
        for length in (384, 256):
            loaded = store.load(array("i", ids), length)
            assert loaded is not None
            store.restore(array("i", ids), loaded, session._core, 1)
            found = session.eval(ids[length:], sequence=1, logits="all")
            assert found.tobytes() == model.logits(ids)[length:].tobytes()
        store.close()


def test_damaged_and_foreign_states_are_computed_again(path: Path, tmp_path: Path) -> None:
    ids, other = some_ids(150), some_ids(150, seed=8)
    with llamac.load(path) as model:
        expected = model.generate(ids, **SHORT).tokens
        for damage in ("bit", "cut", "foreign", "missing"):
            folder = tmp_path / damage
            with llamac.Engine(model, prefix_dir=folder) as engine:
                engine.generate([ids], **SHORT)
            (state,) = states(folder)
            with llamac.Engine(model, prefix_dir=folder) as engine:
                engine.generate([other], **SHORT)
            data = state.read_bytes()
            if damage == "bit":
                state.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
            elif damage == "cut":
                state.write_bytes(data[: HEADER.size + 100])
            elif damage == "foreign":
                (foreign,) = set(states(folder)) - {state}
                state.write_bytes(foreign.read_bytes())
            else:
                state.unlink()
            with llamac.Engine(model, prefix_dir=folder) as engine:
                assert engine.generate([ids], **SHORT)[0].tokens == expected
                stats = engine.stats().prefix
                assert (stats.disk_hits, stats.disk_errors) == (0, damage != "missing")
            assert state.exists()  # written again


def test_large_states_are_stored_at_the_end_only(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_store, "STATES_BYTES", 1)
    ids = some_ids(700)
    with llamac.load(path) as model, model.session() as session:
        store = PrefixStore(session, tmp_path)
        session.eval(ids, logits=None)
        store.keep(array("i", ids), session._core, 0)
        store.drain()
        assert len(states(tmp_path)) == prefix_store.MIN_STATES == 2
        assert [store.longest(array("i", ids[:n])) for n in (700, 640, 512)] == [640, 512, 0]
        monkeypatch.setattr(prefix_store, "MAX_WAITING", 0)
        store.keep(array("i", some_ids(700, seed=2)[:1] + ids[1:]), session._core, 0)
        assert store.stats.errors > 10  # pages that do not wait
        store.close()
