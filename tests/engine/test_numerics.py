"""Fast numerics: logits that differ from exact ones, are the same in every grouping, and never mix with exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from llamac import _core
from llamac.arguments import NUMERICS
from llamac.engine.receipts.receipt import read_receipt
from llamac.engine.receipts.replay import replay_on
from llamac.errors import ArgumentError, ArgumentTypeError
from llamac.export import reference
from llamac.export.flat.model import read as read_flat
from llamac.format.probes import divergence
from openmp import up_to

IDS = some_ids(75)
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module", params=["q8", "bf16"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A model whose rows are not whole blocks of inputs; those of the network's products have an odd number."""
    path = tmp_path_factory.mktemp("model") / f"{request.param}.bin"
    return write_model(path, checkpoint(llama_config(dim=168, ffn=203)), request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[llamac.Model]:
    with llamac.load(path, numerics="fast") as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(model: llamac.Model) -> Floats:
    return model.logits(IDS)


def test_the_default_is_exact(path: Path, expected: Floats) -> None:
    with llamac.load(path) as model, model.session() as session, model.session(numerics="fast") as fast:
        assert (session.numerics, fast.numerics) == ("exact", "fast")
        exact = session.eval(IDS, logits="all")
        found = fast.eval(IDS, logits="all")
    assert found.tobytes() == expected.tobytes()
    assert (exact != expected).any(axis=1).all()


def test_inputs_are_rounded_as_specified(path: Path) -> None:
    """The reference rounds as docs/determinism.md says. Without that it is far away: random weights amplify errors.

    Where an input is close to a tie, the engine's f32 can round the other way than float64, but not in most rows.
    """
    [rounded] = reference.forward(read_flat(path), [IDS], numerics="fast")
    [exact] = reference.forward(read_flat(path), [IDS])
    with llamac.load(path, numerics="fast", kv_dtype="f32") as model:
        found = model.logits(IDS)
    size = np.sqrt(np.mean(rounded**2))
    from_rounded, from_exact = (np.sqrt(np.mean((found - other) ** 2, axis=1)) for other in (rounded, exact))
    assert np.median(from_rounded) < 1e-5 * size
    assert from_exact.min() > 1e-3 * size
    assert from_rounded.max() < 0.5 * from_exact.max()


def test_a_trained_model_changes_little() -> None:
    logits = []
    for numerics in NUMERICS:
        with llamac.load("stories", dtype="q8", numerics=numerics, cache_dir=False) as model:
            logits.append(model.logits(model.tokenize("Once upon a time there was a little dog who liked to run.")))
    assert 1e-5 < np.mean([divergence(exact, fast) for exact, fast in zip(*logits, strict=True)]) < 2e-3


@pytest.mark.parametrize("isa", [name for name, supported in _core.isas() if supported])
def test_bits_depend_on_nothing_else(path: Path, expected: Floats, isa: str) -> None:
    with llamac.load(path, numerics="fast", isa=isa, threads=up_to(2)) as model, model.session(sequences=2) as session:
        at = 0
        for size in (1, 9, 4, 8, 7, 16, 30):  # chunks below and above the number of rows that changes the kernels
            rows = [(IDS[i], sequence, i, True) for i in range(at, at + size) for sequence in (0, 1)]
            found = session.eval_rows(rows)
            assert found[::2].tobytes() == found[1::2].tobytes() == expected[at : at + size].tobytes()
            at += size
        assert at == len(IDS)


def test_models_without_such_products_give_the_same_bits(tmp_path: Path) -> None:
    for dtype in ("f32", "f16"):
        made = write_model(tmp_path / f"{dtype}.bin", checkpoint(llama_config()), dtype)
        with llamac.load(made) as model, llamac.load(made, numerics="fast") as fast:
            assert model.logits(IDS).tobytes() == fast.logits(IDS).tobytes()


def test_forks_engines_and_candidates_are_fast(model: llamac.Model, expected: Floats) -> None:
    alone = model.generate(IDS, **GREEDY)
    with model.session() as session:
        session.eval(IDS[:40], logits=None)
        with session.fork() as fork:
            assert fork.numerics == "fast"
            assert fork.eval(IDS[40:], logits="all").tobytes() == expected[40:].tobytes()
        assert [one.tokens for one in session.generate(IDS, **GREEDY, n=2).choices] == [alone.tokens] * 2
    with llamac.Engine(model, max_sequences=3) as engine:
        assert engine.numerics == "fast"
        texts = engine.generate([IDS, IDS[:20], IDS], **GREEDY)
        assert [text.tokens for text in texts[::2]] == [alone.tokens] * 2
        assert texts[1].tokens == model.generate(IDS[:20], **GREEDY).tokens
    with llamac.Engine(model, numerics="exact") as engine:
        assert engine.numerics == "exact"


def test_a_receipt_is_repeated_with_its_numerics(path: Path, model: llamac.Model) -> None:
    receipt = model.generate(IDS, **GREEDY, receipt=True).receipt
    assert receipt is not None
    assert receipt.numerics == "fast"
    assert read_receipt(receipt.as_dict()) == receipt
    with llamac.load(path) as exact:
        replay = replay_on(exact, receipt)
        assert (replay.identical, replay.changes) == (True, ())


def test_other_names_are_refused(path: Path) -> None:
    with pytest.raises(ArgumentError, match="numerics is 'slow', expected 'exact' or 'fast'"):
        llamac.load(path, numerics="slow")  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="numerics must be a str"):
        llamac.load(path, numerics=1)  # type: ignore[arg-type]
