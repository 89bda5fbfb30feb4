"""Forks share a prefix, windows drop pages, and a budget limits the KV caches of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac import ArgumentError, ClosedError, OutOfMemoryError, _core
from llamac.export.checkpoint import LayerConfig


def test_a_fork_has_the_bits_of_computing_again(model: llamac.Model) -> None:
    ids = some_ids(100)
    with model.session() as session:
        session.eval(ids, logits=None)
        for length in (0, 1, 64, 99, 100):
            with session.fork(length=length) as forked:
                assert forked.tokens() == list(ids[:length])
                rest = some_ids(30, seed=length)
                found = forked.eval(rest, logits="all")
                assert found.tobytes() == model.logits([*ids[:length], *rest])[length:].tobytes()
        assert session.eval([7]).tobytes() == model.logits([*ids, 7])[-1].tobytes()


def test_models_whose_layers_keep_nothing_are_used_like_others(tmp_path: Path) -> None:
    """Layers without mixers have no groups of pages."""
    config = replace(llama_config(), layers=(LayerConfig("gated", 40, mixer="none"),))
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(config))) as model, model.session() as session:
        session.eval(some_ids(70), logits=None)
        session.save(tmp_path / "a.session")
        with model.session() as loaded, session.fork() as forked, session.to("cpu") as moved:
            loaded.load(tmp_path / "a.session")
            expected = session.eval([5]).tobytes()
            for copy in (loaded, forked, moved):
                assert copy.tokens() == some_ids(70)
                assert copy.eval([5]).tobytes() == expected
        with llamac.Engine(model, kv_tokens=600) as engine:
            assert len(engine.generate([[5]], max_tokens=2, ignore_eos=True)[0].tokens) == 2


def test_sequences_that_branch_off_are_computed_together(model: llamac.Model) -> None:
    ids = some_ids(70)
    with model.session(sequences=3) as session:
        session.eval(ids, logits=None)
        session.copy_sequence(0, 1)
        session.copy_sequence(0, 2, length=66)
        assert session.tokens(1) == ids
        assert session.tokens(2) == ids[:66]
        rows = [(5, 0, 70, True), (6, 1, 70, True), (7, 2, 66, True)]
        for found, prompt in zip(session.eval_rows(rows), ([*ids, 5], [*ids, 6], [*ids[:66], 7]), strict=True):
            assert found.tobytes() == model.logits(prompt)[-1].tobytes()
        session.copy_sequence(1, 1, length=3)
        assert session.tokens(1) == ids[:3]
        assert session.tokens(0) == [*ids, 5]


def test_pages_are_shared_and_released(model: llamac.Model) -> None:
    objects = _core.live_objects()
    session = model.session()
    session.eval(some_ids(130), logits=None)
    held = session.memory()["kv"]
    assert model.kv_bytes == held > 0
    forks = [session.fork() for _ in range(10)]
    assert model.kv_bytes == held
    assert forks[0].memory()["kv"] == held
    forks[0].step(1)  # copies the last page
    assert model.kv_bytes == held + held // 3
    session.close()
    assert model.kv_bytes == held + held // 3
    for fork in forks:
        fork.close()
    assert model.kv_bytes == 0
    assert _core.live_objects() == objects


def test_impossible_forks_are_refused(model: llamac.Model) -> None:
    with model.session(sequences=2) as session:
        session.eval([1, 2, 3], logits=None)
        for call in (lambda: session.fork(length=4), lambda: session.copy_sequence(0, 1, length=-1)):
            with pytest.raises(ArgumentError, match="expected 0 to 3"):
                call()
        for call in (lambda: session.fork(sequence=2), lambda: session.copy_sequence(2, 0)):
            with pytest.raises(ArgumentError, match="no sequence 2"):
                call()
        with pytest.raises(ArgumentError, match="sequence is 2"):
            session.copy_sequence(0, 2)
        assert session.tokens() == [1, 2, 3]
    with pytest.raises(ClosedError):
        session.fork()


def test_a_fork_has_no_logits_to_sample_from(model: llamac.Model) -> None:
    with model.session() as session:
        session.prefill([1, 2, 3])
        with session.fork() as forked, pytest.raises(ArgumentError, match="no logits"):
            forked.sample()


def test_windowed_layers_drop_positions(windowed: llamac.Model) -> None:
    ids = some_ids(1500)
    expected = windowed.logits(ids)
    with windowed.session() as session:
        assert session.eval(ids[:1400]).tobytes() == expected[1399].tobytes()
        least = session.shortest_length()
        assert 1400 - 256 - 128 <= least <= 1400 - 256
        with pytest.raises(ArgumentError, match=f"layers with a window .* expected 0 or {least} to 1400"):
            session.truncate(least - 1)
        assert session.length() == 1400
        session.truncate(least)
        assert session.eval(ids[least:1400], logits="all").tobytes() == expected[least:1400].tobytes()
        held = session.memory()["kv"]
        for token in ids[1400:]:
            session.step(token)
        full_page = (session.memory()["kv"] - held) // 2  # two more pages of the layer with full attention
        assert session.memory()["kv"] <= full_page * 24 + full_page * 7
        session.truncate(0)
        assert session.shortest_length() == 0
        assert session.eval(ids[:5], logits="all").tobytes() == expected[:5].tobytes()


def test_generation_recomputes_what_a_window_forgot(windowed: llamac.Model) -> None:
    ids = some_ids(900)
    with windowed.session() as session:
        session.generate(ids, max_tokens=1, temperature=0)
        other = [*ids[:300], 9]
        found = session.generate(other, max_tokens=3, temperature=0)
        assert found.usage.cached_tokens == 0
        assert found.tokens == windowed.generate(other, max_tokens=3, temperature=0).tokens


def test_a_budget_limits_all_sessions(model: llamac.Model) -> None:
    ids = some_ids(100)
    with model.session() as one, model.session() as two:
        one.eval(ids, logits=None)
        model.kv_budget = model.kv_bytes + 1
        with pytest.raises(OutOfMemoryError, match=r"the KV caches of this model may take \d+ bytes: \d+ are in use"):
            two.eval(ids)
        assert two.length() == 0
        one.truncate(0)
        two.eval(ids[:50], logits=None)
        model.kv_budget = None
        two.truncate(0)
        assert two.eval(ids).tobytes() == model.logits(ids)[-1].tobytes()
    for wrong in (0, -1):
        with pytest.raises(ArgumentError, match="expected at least 1 byte"):
            model.kv_budget = wrong


def test_copies_know_what_counts_as_generated(model: llamac.Model) -> None:
    """The penalty favors the tokens that do."""
    with model.session(sequences=2) as session:
        session.prefill(some_ids(20))
        session.step(200)
        session.copy_sequence(0, 1, length=10)
        for length in (None, 20, 10):
            with session.fork(length=length) as forked:
                forked.step(200)
                assert forked.sample(presence_penalty=-100, temperature=0) == 200
        session.copy_sequence(1, 0)
        session.step(201)
        assert session.sample(presence_penalty=-100, temperature=0) == 201


def test_a_fork_continues_mirostat(model: llamac.Model) -> None:
    with model.session() as session:
        session.prefill(some_ids(20))
        for seed in range(5):
            session.step(session.sample(mirostat_tau=2, mirostat_eta=1, seed=seed))
        with session.fork() as forked:
            session.step(5)
            forked.step(5)
            seeds = range(20)
            found, expected = (
                [each.sample(mirostat_tau=2, mirostat_eta=1, seed=seed) for seed in seeds] for each in (forked, session)
            )
        assert found == expected
