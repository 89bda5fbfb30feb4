"""Kernel sets: all give the same bits on any number of threads; how to select one."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import llamac
from builders import checkpoint, gpt2_config, llama_config, some_ids, write_model
from llamac import _core
from llamac.engine.hardware import machine
from llamac.errors import ArgumentError, UnsupportedError
from openmp import up_to
from processes import output_of, run_python

RUNS_HERE = [name for name, supported in _core.isas() if supported]
IDS = some_ids(300)

HASH = """
    import hashlib, sys
    import llamac
    with llamac.load(sys.argv[1], isa=None if sys.argv[3] == "-" else sys.argv[3]) as model, model.session() as session:
        print(session.isa, hashlib.sha256(session.eval(range(int(sys.argv[2])), logits="all").tobytes()).hexdigest())
"""


def digests(path: Path, isa: str, threads: int, kv: Literal["f32", "f16"]) -> tuple[str, str]:
    """Hashes of the logits of a prompt, and of the tokens evaluated one by one after it."""
    with llamac.load(path, isa=isa, threads=threads, kv_dtype=kv) as model, model.session() as session:
        assert (session.isa, session.threads) == (isa, threads)
        prompt = session.eval(IDS, logits="all")
        rows = [session.eval([token]) for token in (5, 6, 7)]
    assert prompt is not None
    assert np.isfinite(prompt).all()
    steps = b"".join(row.tobytes() for row in rows if row is not None)
    return hashlib.sha256(prompt.tobytes()).hexdigest(), hashlib.sha256(steps).hexdigest()


@pytest.mark.parametrize(("dtype", "kv"), [("f32", "f32"), ("f16", "f16"), ("bf16", "f32")])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_kernel_sets_and_thread_counts_give_the_same_bits(
    tmp_path: Path, family: str, dtype: str, kv: Literal["f32", "f16"]
) -> None:
    config = llama_config(dim=54, n_heads=9, n_kv_heads=3, ffn=83) if family == "llama" else gpt2_config(dim=56)
    path = write_model(tmp_path / "model.bin", checkpoint(config), dtype)
    found = {digests(path, isa, threads, kv) for isa, threads in product(RUNS_HERE, (1, up_to(2), up_to(3)))}
    assert len(found) == 1


def test_all_kernel_sets_and_thread_counts_generate_the_same_tokens(tiny: Path) -> None:
    found = set()
    for isa, threads in product(RUNS_HERE, (1, up_to(2))):
        with llamac.load(tiny, isa=isa, threads=threads) as model:
            found.add(tuple(model.generate("hello", max_tokens=20, temperature=1.0, top_p=0.9, seed=3).tokens))
    assert len(found) == 1


def test_digests_differ_for_another_kv_dtype(tiny_llama: Path) -> None:
    """The comparisons above can fail."""
    assert digests(tiny_llama, "scalar", 1, "f32") != digests(tiny_llama, "scalar", 1, "f16")


def test_every_machine_supports_the_scalar_set() -> None:
    assert _core.isas()[-1] == ("scalar", True)
    assert machine.best_isa() == RUNS_HERE[0]


@pytest.mark.parametrize("isa", RUNS_HERE)
def test_the_environment_variable_selects_a_set(tiny_llama: Path, isa: str) -> None:
    forced = output_of(HASH, tiny_llama, 20, "-", LLAMAC_ISA=isa).split()
    default = output_of(HASH, tiny_llama, 20, "-", LLAMAC_ISA="").split()
    assert forced[0] == isa
    assert default[0] == RUNS_HERE[0]
    assert forced[1] == default[1]


def test_the_argument_overrides_the_environment_variable(tiny_llama: Path) -> None:
    assert output_of(HASH, tiny_llama, 20, "scalar", LLAMAC_ISA="nonsense").split()[0] == "scalar"


def test_an_unknown_set_is_an_error_that_lists_the_known_ones(tiny_llama: Path) -> None:
    done = run_python(HASH, tiny_llama, 20, "-", LLAMAC_ISA="avx9")
    assert done.returncode == 1
    names = ", ".join(name for name, _ in _core.isas())
    message = f"ArgumentError: the environment variable LLAMAC_ISA is 'avx9'; this build has {names}"
    assert done.stderr.strip().endswith(message)


def test_a_set_that_the_machine_does_not_support_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "isas", lambda: [("avx2", False), ("scalar", True)])
    with pytest.raises(UnsupportedError, match="isa is 'avx2', which this processor does not support; it runs scalar"):
        machine.choose_isa("avx2")
    monkeypatch.setenv("LLAMAC_ISA", "avx2")
    with pytest.raises(UnsupportedError, match="variable LLAMAC_ISA is 'avx2', which this processor does not"):
        machine.choose_isa(None)
    assert machine.choose_isa("scalar") == "scalar"
    with pytest.raises(ArgumentError, match="isa is 'neon'; this build has avx2, scalar"):
        machine.choose_isa("neon")
