"""Trees of draft tokens: bits of appending their paths, close to the float64 forward pass, accepted or discarded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import checkpoint, llama_config, some_ids, write_model
from llamac import ArgumentError, ContextFullError
from llamac.arguments import KVDtype
from llamac.export import reference

# three roots; the path 0, 1, 2 has a sibling of its leaf, 3, and one of its middle, 4
IDS = [5, 6, 7, 8, 9, 10, 11, 12]
PARENTS = [-1, 0, 1, 1, 0, -1, 5, -1]


def path_of(draft: int) -> list[int]:
    """The tokens from a root to a draft."""
    return [] if draft < 0 else [*path_of(PARENTS[draft]), IDS[draft]]


@pytest.fixture
def model(tiny_llama: Path) -> Iterator[llamac.Model]:
    with llamac.load(tiny_llama) as model:
        yield model


@pytest.mark.parametrize("length", [0, 1, 62, 64])
def test_drafts_have_the_bits_of_appending_their_paths(model: llamac.Model, length: int) -> None:
    prefix = some_ids(length)
    with model.session(sequences=2) as session:
        if prefix:
            session.eval(prefix, sequence=1, logits=None)
        found = session.eval_drafts(IDS, PARENTS, sequence=1)
        assert session.length(1) == length
        for draft in range(len(IDS)):
            assert found[draft].tobytes() == model.logits([*prefix, *path_of(draft)])[-1].tobytes()
        for draft in (7, 3):  # several drafts can be accepted, one after the other
            session.accept(draft)
            assert session.tokens(1) == [*prefix, *path_of(draft)]
        assert session.eval([4], sequence=1).tobytes() == model.logits([*prefix, *path_of(3), 4])[-1].tobytes()


@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
@pytest.mark.parametrize("window", [0, 3])
def test_drafts_match_the_float64_forward(tmp_path: Path, kv: KVDtype, window: int) -> None:
    config = llama_config(dim=36, n_heads=6, n_kv_heads=2, n_layers=1)
    made = checkpoint(replace(config, layers=(replace(config.layers[0], window=window),)))
    prefix = some_ids(60)
    paths = [[*prefix, *path_of(draft)] for draft in range(len(IDS))]
    expected = np.array([logits[-1] for logits in reference.forward(made, paths, kv_dtype=kv)])
    with llamac.load(write_model(tmp_path / "model.bin", made)) as model, model.session(kv_dtype=kv) as session:
        session.eval(prefix, logits=None)
        errors = np.abs(session.eval_drafts(IDS, PARENTS) - expected) / np.abs(expected).max()
    assert errors.max() <= {"f32": 1e-5, "f16": 2e-3, "q8": 1e-3}[kv]


@pytest.mark.parametrize(
    "use",
    [
        lambda session: session.eval([1]),
        lambda session: session.step(1),
        lambda session: session.truncate(2),
        lambda session: session.copy_sequence(0, 1),
        lambda session: session.eval_drafts([], []),
    ],
)
def test_using_the_session_discards_drafts(model: llamac.Model, use: Callable[[llamac.Session], object]) -> None:
    with model.session(sequences=2) as session:
        session.eval([1, 2, 3], logits=None)
        session.eval_drafts(IDS, PARENTS)
        use(session)
        with pytest.raises(ArgumentError, match="draft is 0, but the session has 0"):
            session.accept(0)
        assert session.eval_drafts(IDS, PARENTS).shape == (8, session.model.config["vocab_size"])


def test_bad_drafts_are_refused(model: llamac.Model) -> None:
    with model.session(context=8) as session:
        session.eval([1, 2, 3, 4, 5], logits=None)
        with pytest.raises(ArgumentError, match=r"draft 2: parent is 0, expected 1, one of its ancestors, or -1"):
            session.eval_drafts([1, 2, 3], [-1, -1, 0])
        with pytest.raises(ArgumentError, match="there are 2 drafts and 1 parents"):
            session.eval_drafts([1, 2], [-1])
        with pytest.raises(ContextFullError, match="draft 3: position 8 does not fit the context of 8 positions"):
            session.eval_drafts([1, 2, 3, 4], [-1, 0, 1, 2])
        for sequence in (1, 2**31):
            with pytest.raises(ArgumentError, match="sequence"):
                session.eval_drafts([1], [-1], sequence=sequence)
        with pytest.raises(ArgumentError, match="draft is -1, but the session has 0"):
            session.accept(-1)
        assert session.tokens() == [1, 2, 3, 4, 5]
