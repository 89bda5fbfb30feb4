"""The profile of a session: its bytes, its times, and that measuring changes no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import llamac
from builders import some_ids
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.parity_table import make_folder
from llamac import _core
from llamac.engine.inspection.profile import OUTSIDE, STEPS, Costs, Profile
from llamac.engine.session import Session
from llamac.errors import ArgumentError
from llamac.export.convert import export
from openmp import needs_threads
from waiting import wait_until

IDS = some_ids(40)


def stored(model: llamac.Model, name: str) -> int:
    """The bytes of a matrix."""
    _, data = model.file.stored(name)
    return memoryview(data).nbytes


def computed(session: Session, ids: list[int]) -> Costs:
    """The costs of tokens."""
    profile = Profile(session)
    session.prefill(ids)
    return profile.costs()


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=needs_threads)])
def test_each_step_counts_its_matrices_and_the_cache(tiny: Path, threads: int) -> None:
    with llamac.load(tiny, threads=threads, kv_dtype="f32") as model, model.session() as session:
        session.prefill(IDS)
        found = computed(session, [7])
        c = model.config
        at = dict(zip(STEPS, range(len(STEPS)), strict=True))
        for layer in range(c["n_layers"]):
            name, bytes = f"layers.{layer}", found.bytes[layer]
            assert bytes[at["qkv"]] == sum(stored(model, f"{name}.attn_{part}.weight") for part in "qkv")
            assert bytes[at["attn_out"]] == stored(model, f"{name}.attn_out.weight")
            gated = model.file.layers[layer]["ffn"] == "gated"
            up = ("ffn_gate", "ffn_up") if gated else ("ffn_up",)
            assert bytes[at["ffn_up"]] == sum(stored(model, f"{name}.{part}.weight") for part in up)
            assert bytes[at["ffn_down"]] == stored(model, f"{name}.ffn_down.weight")
            # keys and values of 41 positions; heads are padded to whole vectors
            least = 41 * 2 * 4 * c["n_kv_heads"] * c["head_dim"]
            assert least <= bytes[at["attention"]] <= 2 * least
            assert bytes[at["attn_norm"]] == bytes[at["ffn_norm"]] == 0
        output = "token_embedding" if c["tied_output"] else "output"
        assert found.bytes[0, at["logits"]] == stored(model, f"{output}.weight")
        assert found.bytes[0, at["embed"]] > 0
        outside = [at[name] for name in OUTSIDE]
        assert (found.bytes[1:, outside] == 0).all()
        assert (found.ns[1:, outside] == 0).all()
        costs = [found]

        def every_step_took_time() -> bool:  # a clock can be too coarse for a step of one token
            costs.append(computed(session, [7]))
            session.truncate(41)
            ns = np.sum([each.ns for each in costs], axis=0)
            return bool((np.delete(ns, outside, axis=1) > 0).all() and (ns[0, outside] > 0).all())

        wait_until(every_step_took_time)


def test_only_the_experts_in_use_are_read(tmp_path: Path) -> None:
    target = tmp_path / "experts.bin"
    export(make_folder(tmp_path, "mixtral"), target, probe_source=None)
    with llamac.load(target, threads=1) as model, model.session() as session:
        found = computed(session, [7])
        used = model.file.layers[0]["n_experts_used"]
        down = stored(model, "layers.0.experts.0.ffn_down.weight")
    assert found.bytes[0, STEPS.index("ffn_down")] == used * down


def test_models_with_experts_compute_512_rows_at_once(tmp_path: Path) -> None:
    target, ids, step = tmp_path / "experts.bin", [i % 61 for i in some_ids(513)], STEPS.index("ffn_down")
    config = {**FAMILY_CASES["mixtral"].config, "max_position_embeddings": len(ids)}
    folder = family_checkpoint(tmp_path / "mixtral", replace(FAMILY_CASES["mixtral"], config=config))
    export(folder, target, probe_source=None)
    with llamac.load(target, threads=1) as model:
        with model.session() as session:
            n_experts, down = model.file.layers[0]["n_experts"], stored(model, "layers.0.experts.0.ffn_down.weight")
            assert computed(session, ids[:512]).bytes[0, step] == n_experts * down
        with model.session() as at_once, model.session() as in_pieces:
            pieces = [in_pieces.eval(ids[i : i + 100], logits="all") for i in range(0, len(ids), 100)]
            assert (at_once.eval(ids, logits="all") == np.concatenate(pieces)).all()


def test_parallel_branches_are_measured(tmp_path: Path) -> None:
    target = tmp_path / "parallel.bin"
    export(make_folder(tmp_path, "gpt_neox"), target, probe_source=None)
    with llamac.load(target, threads=1) as model, model.session() as session:
        found = computed(session, [7, 8])
        assert model.file.layers[0]["placement"] == "parallel"
        assert found.bytes[0, STEPS.index("ffn_up")] == stored(model, "layers.0.ffn_up.weight")
        assert found.bytes[0, STEPS.index("qkv")] == sum(stored(model, f"layers.0.attn_{i}.weight") for i in "qkv")
        assert found.bytes[0, STEPS.index("attn_out")] == stored(model, "layers.0.attn_out.weight")


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=needs_threads)])
def test_measuring_changes_no_bit(tiny: Path, threads: int) -> None:
    with llamac.load(tiny, threads=threads) as model, model.session() as plain, model.session() as measured:
        profile = Profile(measured)
        for ids in (IDS, [5], [6, 7]):
            assert plain.eval(ids, logits="all").tobytes() == measured.eval(ids, logits="all").tobytes()
        assert profile.costs().ns.sum() > 0


def test_costs_add_up_and_begin_again(tiny_llama: Path) -> None:
    with llamac.load(tiny_llama, threads=1) as model, model.session() as session:
        session.prefill(IDS)
        profile = Profile(session)
        assert not profile.costs().ns.any()
        assert not profile.costs().bytes.any()
        session.prefill([5])
        first = profile.costs()
        session.prefill([5])
        second = profile.costs() - first
        weights = [i for i, name in enumerate(STEPS) if name != "attention"]
        assert (second.bytes[:, weights] == first.bytes[:, weights]).all()
        assert (second.bytes[:, STEPS.index("attention")] > first.bytes[:, STEPS.index("attention")]).all()
        assert not Profile(session).costs().bytes.any()
        for shape in ((1, len(STEPS), 2), (2, len(STEPS), 1), (0, 0, 2)):
            with pytest.raises(ArgumentError):
                _core.profile(session._core, np.zeros(shape, np.uint64).data)
    assert profile.costs().bytes.any()
    with pytest.raises(llamac.errors.ClosedError):
        Profile(session)
