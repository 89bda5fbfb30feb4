"""`llamac selftest`: identical on this machine; a planted difference is reported by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from commands import Command
from llamac import _core
from llamac.engine.inspection import selftest
from llamac.errors import ArgumentError

WRONG = "0" * 64
RUNS_HERE = [name for name, supported in _core.isas() if supported]


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Leave two cases, which takes less time."""
    cases = _core.selftest_cases()[:2]
    monkeypatch.setattr(_core, "selftest_cases", lambda: cases)
    return cases


def test_this_machine_computes_the_recorded_bits(llamac_command: Command) -> None:
    done = llamac_command("selftest")
    assert (done.code, done.err) == (0, "")
    *parts, total = done.out.splitlines()
    assert [line.split("  ")[0] for line in parts] == [
        *(f"kernels {isa}" for isa in RUNS_HERE),
        "sampling",
        "tokenizers",
    ]
    assert all(line.endswith("identical") for line in parts)
    assert "all identical" in total


def test_every_stored_dtype_has_a_case() -> None:
    text = " ".join(name for name, _ in _core.selftest_cases())
    own = [name for name, _ in _core.dtypes() if _core.gguf_row_bytes(dict(_core.dtypes())[name], 256) == 0]
    assert own
    assert [name for name in own if name not in text.replace(",", "").split()] == []
    assert "GGUF's types" in text


def test_a_wrong_record_is_named(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, few_cases: list[tuple[str, str]]
) -> None:
    (name, right), other = few_cases
    monkeypatch.setattr(_core, "selftest_cases", lambda: [(name, WRONG), other])
    done = llamac_command("selftest")
    assert done.code == 1
    assert f"logits of {name} with {RUNS_HERE[0]}: threads 1, positions per eval 290, sequences 1" in done.out
    assert f"{right[:16]}, recorded {WRONG[:16]}" in done.out
    assert f"logits of {other[0]}" not in done.out
    assert "Report the output of `llamac selftest --json`" in done.out


@pytest.mark.parametrize("isa", RUNS_HERE)
def test_a_kernel_set_that_differs_is_named(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, few_cases: list[tuple[str, str]], isa: str
) -> None:
    compute = _core.selftest
    monkeypatch.setattr(_core, "selftest", lambda i, **how: WRONG if how["isa"] == isa else compute(i, **how))
    done = llamac_command("selftest", "--json")
    report = json.loads(done.out)
    assert (done.code, report["identical"]) == (1, False)
    different = {part["name"] for part in report["parts"] if part["differences"]}
    assert different == {f"kernels {isa}"}
    assert report["machine"]["isas"][isa] is True


def test_draws_and_token_ids_that_differ_are_named(
    llamac_command: Command, monkeypatch: pytest.MonkeyPatch, few_cases: list[tuple[str, str]]
) -> None:
    top_p = selftest.SAMPLED["top-p"]
    monkeypatch.setitem(selftest.SAMPLED, "top-p", selftest.Sampled(top_p.settings, top_p.adjustments, WRONG))
    monkeypatch.setitem(selftest.TOKENIZERS, "helper", WRONG)
    done = llamac_command("selftest")
    assert done.code == 1
    named = [line.strip().split(":")[0] for line in done.out.splitlines() if line.startswith("  d") or "ids of" in line]
    assert named == ["draws by top-p, one by one", "draws by top-p, side by side", "token ids of helper"]


def test_invalid_options_are_errors() -> None:
    invalid: tuple[dict[str, Any], ...] = ({"chunk": 0}, {"sequences": 17}, {"threads": 0}, {"isa": "none"})
    for options in ({"index": 99}, *({"index": 0, **options} for options in invalid)):
        with pytest.raises(ArgumentError):
            _core.selftest(**options)


def test_each_setting_of_the_sampler_draws_other_tokens() -> None:
    assert len({sampled.sha256 for sampled in selftest.SAMPLED.values()}) == len(selftest.SAMPLED)
