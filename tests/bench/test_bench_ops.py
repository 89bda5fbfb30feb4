"""bench.ops: NumPy computes the same as each operation, and the table has every operation."""

from __future__ import annotations

import numpy as np
import pytest

from bench_modules import bench
from llamac import ops


def test_numpy_computes_what_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("ops")
    monkeypatch.setattr(module, "SIDE", 64)
    monkeypatch.setattr(module, "normal", lambda *shape: np.random.default_rng(2).standard_normal(shape, np.float32))
    names = set()
    for case in (*module.matrix_cases(1), *module.row_cases(), *module.attention_cases(1)):
        names.add(case.name.split(",")[0].split()[0])
        if case.naive is None or case.name.startswith("sample"):
            continue
        found, expected = case.call(None), case.naive()
        # inputs of products with q4 have 8 bits; keys and values are f16
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-2 * np.abs(expected).max())
        assert found.shape == expected.shape
    assert names == set(ops.__all__) - {"Matrix"}


def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bench("ops")
    monkeypatch.setattr(module, "MIN_SECONDS", 0)
    calls: list[str | None] = []
    found = module.measure(module.Case("a case", calls.append, lambda: calls.append("numpy")))
    assert [calls.count(name) for name in ("scalar", None, "numpy")] == [1 + module.ROUNDS] * 3
    assert set(found) == {"case", "numpy_us", "scalar_us", "best_us", "over_scalar", "over_numpy"}
    assert module.row(found).startswith("a case ")
    assert "over_numpy" not in module.measure(module.Case("quantize", calls.append, None))
