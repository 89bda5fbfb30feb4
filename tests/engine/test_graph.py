"""The graph against the float64 forward pass: every placement, norm, window, cap, scale and kind of FFN.

The models are small and random with a standard deviation of 0.5, so that every option matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_cases import CAPS, CASES, EXPERTS, PLACEMENTS, SCALES

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from golden.cases import MIN_EFFECT, TOLERANCE
from golden.make import relative_errors
from golden.tiny_checkpoints import random_tensor
from llamac import _core
from llamac.arguments import KVDtype
from llamac.errors import ModelError
from llamac.export import reference
from llamac.export.checkpoint import Checkpoint, LayerConfig, ModelConfig
from llamac.format.strips import pack_strips
from openmp import up_to

RUNS_HERE = [name for name, supported in _core.isas() if supported]
IDS = some_ids(90)


def chunked(model: llamac.Model, ids: Sequence[int], sizes: Sequence[int]) -> Floats:
    """The logits of all positions, evaluated in chunks whose sizes cycle through `sizes`."""
    found: list[Any] = []
    at = 0
    with model.session(context=len(ids)) as session:
        while at < len(ids):
            size = sizes[len(found) % len(sizes)]
            rows = session.eval(ids[at : at + size], logits="all")
            assert rows is not None
            found.append(rows)
            at += size
    return np.concatenate(found)


def logits_of(path: Path, made: Checkpoint, ids: Sequence[int] = IDS, dtype: str = "f32") -> Floats:
    with llamac.load(write_model(path, made, dtype), kv_dtype="f32") as model:
        return model.logits(list(ids))


@pytest.mark.parametrize("name", CASES)
def test_the_engine_matches_the_float64_forward(tmp_path: Path, name: str) -> None:
    """Compares every stage of every layer, then the bits for other chunks, thread counts and kernel sets."""
    made = checkpoint(CASES[name])
    exact: dict[tuple[str, int], reference.Array] = {}
    (expected,) = reference.forward(made, [IDS], observe=lambda stage, layer, x: exact.update({(stage, layer): x}))
    path = write_model(tmp_path / "m.bin", made)
    with llamac.load(path, kv_dtype="f32") as model, model.session(context=len(IDS)) as session:
        found = session.observe(IDS, llamac.STAGES)
    for (stage, layer), values in exact.items():
        unseen = np.isneginf(values)
        rows = found[stage, layer].reshape(len(IDS), -1)
        rows, padding = np.split(rows, [values[0].size], axis=1)
        np.testing.assert_array_equal(np.isneginf(rows).reshape(unseen.shape), unseen)
        rows, exact_rows = (np.where(np.isneginf(x), 0, x).reshape(len(IDS), -1) for x in (rows, values))
        # relative to the largest value of the stage: one row can be much smaller than its terms
        assert np.abs(rows - exact_rows).max() <= TOLERANCE * np.abs(exact_rows).max(), (stage, layer)
        assert not padding.any()
    assert relative_errors(found["logits", 0], expected).max() <= TOLERANCE
    number = list(CASES).index(name)
    for i, sizes in ((number, (1, 2, 37)), (number + 1, (1,))):
        isa, threads = RUNS_HERE[i % len(RUNS_HERE)], up_to(1 + i // 2 % 2)
        with llamac.load(path, kv_dtype="f32", isa=isa, threads=threads) as model:
            assert chunked(model, IDS, sizes).tobytes() == found["logits", 0].tobytes(), (isa, threads, sizes)


# ---- options


FULL = replace(
    llama_config(dim=40, n_heads=4, n_kv_heads=2),
    layers=(LayerConfig("experts", 50, rope=0, window=7, **EXPERTS),) * 2,
    qk_norm="head",
    **SCALES,
    **CAPS,
)


def with_layers(config: ModelConfig, **changes: Any) -> ModelConfig:
    return replace(config, layers=tuple(replace(layer, **changes) for layer in config.layers))


@pytest.mark.parametrize(
    "changed",
    [
        *(replace(FULL, **dict[str, Any]({name: 1.0})) for name in SCALES),
        *(replace(FULL, **dict[str, Any]({name: 0.0})) for name in CAPS),
        *(replace(FULL, qk_norm=kind) for kind in ("none", "whole", "layer_head")),
        *(with_layers(FULL, placement=placement) for placement in PLACEMENTS[1:]),
        *(with_layers(FULL, window=window) for window in (0, 6, 8)),
        with_layers(FULL, expert_weights=1),
        *(with_layers(FULL, n_experts_used=used) for used in (1, 3, 5)),
        with_layers(FULL, ffn="gated", n_experts=0, n_experts_used=0),
        with_layers(FULL, shared_ffn_dim=30),
        with_layers(FULL, shared_ffn_dim=30, shared_gate=1),
        with_layers(FULL, rope=-1),
        with_layers(FULL, sinks=1),
        with_layers(FULL, query_beta=0.4, query_context=11),
        with_layers(FULL, v_is_k=1),
        with_layers(FULL, v_norm="head"),
        with_layers(FULL, layer_scale=0.5),
        with_layers(FULL, layer_embedding_dim=6),
        with_layers(FULL, activation_limit=1.0),
        with_layers(FULL, up_offset=1.0),
        replace(FULL, qk_norm_after_rope=1),
        replace(FULL, activation="relu2"),
    ],
)
def test_every_option_changes_the_logits(tmp_path: Path, changed: ModelConfig) -> None:
    one, other = (logits_of(tmp_path / "m.bin", checkpoint(config)) for config in (FULL, changed))
    assert relative_errors(one, other).max() >= MIN_EFFECT


# ---- layers with their own heads, and with the keys and values of another layer

HEADS: list[dict[str, Any]] = [
    {"n_heads": 6, "n_kv_heads": 2, "head_dim": 10},
    {"n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "window": 7},
    {"n_heads": 2, "n_kv_heads": 2, "head_dim": 10, "kv_source": 0, "window": 40},
    {"n_heads": 3, "n_kv_heads": 1, "head_dim": 6, "window": 7, "rope": -1},
    {"n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "kv_source": 1},
    {"n_heads": 6, "n_kv_heads": 3, "head_dim": 10, "window": 7},
]


@pytest.mark.parametrize("qk_norm", ["none", "head", "whole", "layer_head"])
def test_layers_with_other_heads_match_the_float64_forward(tmp_path: Path, qk_norm: str) -> None:
    """Layers differ in n_heads, n_kv_heads and head_dim; some read an earlier layer's cache, with other windows."""
    config = llama_config(dim=36, n_heads=6, n_kv_heads=4, n_layers=1)
    config = replace(config, n_heads=8, head_dim=10, attention_scale=0.1, rope_dim=(6,), qk_norm=qk_norm)
    layers = tuple(replace(config.layers[0], **heads) for heads in HEADS)
    made = checkpoint(replace(config, layers=layers))
    ids = some_ids(300)
    (expected,) = reference.forward(made, [ids])
    with llamac.load(write_model(tmp_path / "m.bin", made), kv_dtype="f32", threads=1) as model:
        found = chunked(model, ids, (300,))
        assert relative_errors(found, expected).max() <= TOLERANCE
        for threads in (1, up_to(2), up_to(3)):
            with model.session(threads=threads) as session:
                for size in (1, 70, 229):
                    start = session.length()
                    logits = session.eval(ids[start : start + size], logits="all")
                    assert logits.tobytes() == found[start : start + size].tobytes()
        with model.session() as session:
            seen = session.observe(ids[:9], ["q", "k", "cache_k", "scores", ("logits", 0)])
            assert seen["logits", 0].tobytes() == found[:9].tobytes()
            assert not seen["k", 2].any()  # it has none of its own
            assert (seen["cache_k", 2] == seen["cache_k", 0]).all()
            assert not seen["cache_k", 3][:, 6:].any()
            assert np.isneginf(seen["scores", 3][:, 3:]).all()


# ---- windows


@pytest.mark.parametrize("window", [1, 2, 64, 255, 256, 257, 300, 599])
@pytest.mark.parametrize("kv", ["f32", "f16", "q8"])
def test_windows_of_any_size_match_the_float64_forward(tmp_path: Path, window: int, kv: KVDtype) -> None:
    """Windows start in every part of the blocks of 256 positions and of the pages of 64."""
    ids = some_ids(600, seed=window)
    made = checkpoint(with_layers(llama_config(dim=36, n_heads=6, n_kv_heads=2, n_layers=1), window=window))
    (expected,) = reference.forward(made, [ids], kv_dtype=kv)
    with llamac.load(write_model(tmp_path / "m.bin", made), kv_dtype=kv) as model:
        found = chunked(model, ids, (600,))
        # float32 and float64 can round a number differently where it is near the middle between two codes
        errors = relative_errors(found, expected)
        assert np.median(errors) <= TOLERANCE
        assert errors.max() <= {"f32": TOLERANCE, "f16": 2e-3, "q8": 8e-3}[kv]
        for sizes in ((1, 254, 2), (13,), (100, 3)):
            assert chunked(model, ids, sizes).tobytes() == found.tobytes()


@pytest.mark.parametrize(("window", "rows"), [(4, 40), (20, 300), (70, 300), (258, 600)])
def test_positions_outside_the_window_do_not_affect_a_row(tmp_path: Path, window: int, rows: int) -> None:
    """A NaN outside a row's window does not reach the row, whether it is in the same chunk or in another one."""
    config = with_layers(llama_config(dim=36, n_heads=6, n_kv_heads=2, n_layers=1), window=window)
    embedding = random_tensor("token_embedding.weight", (config.vocab_size, config.dim))
    embedding[7] = np.nan
    path = write_unchecked(tmp_path / "m.bin", checkpoint(config), "token_embedding.weight", embedding)
    ids = some_ids(rows, seed=3)
    ids = [token if token != 7 else 8 for token in ids]
    with llamac.load(path, kv_dtype="f32") as model:
        sound = chunked(model, ids, (rows,))
        assert np.isfinite(sound).all()
        for at in (0, 5, rows // 2, rows - window - 1):
            poisoned = [*ids[:at], 7, *ids[at + 1 :]]
            for sizes in ((rows,), (1,), (11,)):
                found = chunked(model, poisoned, sizes)
                assert np.isnan(found[at : at + window]).all()
                assert found[:at].tobytes() == sound[:at].tobytes()
                assert found[at + window :].tobytes() == sound[at + window :].tobytes()


def write_unchecked(path: Path, made: Checkpoint, name: str, matrix: Floats) -> Path:
    """Write an f32 file in which one matrix holds values that the importers refuse."""
    write_model(path, made)
    with llamac.load(path) as model:
        record = next(record for record in model.file.tensors if record.name == name)
    data, strips = bytearray(path.read_bytes()), pack_strips(matrix, "f32")
    assert len(strips) == record.bytes
    data[record.offset : record.offset + record.bytes] = strips
    path.write_bytes(data)
    return path


# ---- experts


def expert_config(n_layers: int = 2, dim: int = 40, **changes: Any) -> ModelConfig:
    layer = LayerConfig("experts", 50, rope=0, **{**EXPERTS, **changes})
    config = llama_config(dim=dim, n_heads=4, n_kv_heads=2)
    return replace(config, layers=(layer,) * n_layers)


@pytest.mark.parametrize(("n", "used"), [(1, 1), (5, 5), (40, 1), (40, 8)])
@pytest.mark.parametrize("weights", [0, 1])
def test_any_number_of_experts_matches_the_float64_forward(tmp_path: Path, n: int, used: int, weights: int) -> None:
    made = checkpoint(expert_config(n_experts=n, n_experts_used=used, expert_weights=weights))
    (expected,) = reference.forward(made, [IDS])
    assert relative_errors(logits_of(tmp_path / "m.bin", made), expected).max() <= TOLERANCE


# A sigmoid with and without what goes with it, and softmaxes with a bias and with groups.
ROUTERS: dict[str, dict[str, Any]] = {
    "sigmoid": {"router": "sigmoid"},
    "sigmoid-normalized": {"router": "sigmoid", "expert_weights": 1, "expert_weights_eps": 0.25},
    "sigmoid-bias": {"router": "sigmoid", "router_choice_bias": 1, "expert_scale": 2.5},
    "sigmoid-groups": {
        "router": "sigmoid",
        "router_choice_bias": 1,
        "n_expert_groups": 4,
        "n_expert_groups_used": 2,
        "expert_weights": 1,
        "expert_scale": 0.5,
    },
    "sigmoid-groups-of-one": {"router": "sigmoid", "n_expert_groups": 12, "n_expert_groups_used": 5},
    "softmax-bias": {"router_choice_bias": 1, "expert_weights": 1},
    "softmax-groups": {"n_expert_groups": 3, "n_expert_groups_used": 1, "expert_scale": 3.0},
}
# The fields' values without effect.
NEUTRAL: dict[str, dict[str, Any]] = {
    "router": {"router": "softmax"},
    "router_choice_bias": {"router_choice_bias": 0},
    "n_expert_groups": {"n_expert_groups": 0, "n_expert_groups_used": 0},
    "expert_weights_eps": {"expert_weights_eps": 0.0},
    "expert_scale": {"expert_scale": 1.0},
}


def router_checkpoint(**changes: Any) -> Checkpoint:
    """12 experts with clearly different scores and biases that change the choice."""
    config = expert_config(**{"n_experts": 12, "n_experts_used": 3, "expert_weights": 0, **changes})
    given = {}
    for layer in range(2):
        given[f"layers.{layer}.ffn_router.weight"] = random_tensor(f"router {layer}", (12, config.dim))
        if changes.get("router_choice_bias"):
            given[f"layers.{layer}.ffn_router_choice.bias"] = random_tensor(f"bias {layer}", (12,))
    return checkpoint(config, given)


@pytest.mark.parametrize("name", ROUTERS)
def test_every_kind_of_router_matches_the_float64_forward(tmp_path: Path, name: str) -> None:
    made = router_checkpoint(**ROUTERS[name])
    (expected,) = reference.forward(made, [IDS])
    assert relative_errors(logits_of(tmp_path / "m.bin", made), expected).max() <= TOLERANCE
    for field in ROUTERS[name].keys() & NEUTRAL.keys():
        if (name, field) == ("sigmoid-groups-of-one", "n_expert_groups"):
            continue  # the best experts are in the best groups
        layers = tuple(replace(layer, **NEUTRAL[field]) for layer in made.config.layers)
        (other,) = reference.forward(replace(made, config=replace(made.config, layers=layers)), [IDS])
        assert relative_errors(other, expected).max() > MIN_EFFECT, field


def test_ties_between_experts_go_to_the_lowest_index(tmp_path: Path) -> None:
    config = expert_config(n_experts=6, n_experts_used=2)
    router = random_tensor("router", (6, config.dim))
    router[[1, 3, 4]] = router[5]  # four experts have the same score
    made = checkpoint(config, {f"layers.{layer}.ffn_router.weight": router for layer in (0, 1)})
    (expected,) = reference.forward(made, [IDS])
    assert relative_errors(logits_of(tmp_path / "m.bin", made), expected).max() <= TOLERANCE
    with llamac.load(tmp_path / "m.bin") as model, model.session() as session:
        scores = session.observe(IDS, [("ffn_router", 0)])["ffn_router", 0]
    assert (scores[:, [1, 3, 4]] == scores[:, 5:]).all()
    assert (scores.argmax(axis=1) == 1).any()  # the tie is for the first place


@pytest.mark.parametrize("weights", [0, 1])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_nan_in_the_router_reaches_the_logits(tmp_path: Path, weights: int, expert: int) -> None:
    config = expert_config(expert_weights=weights)
    router = random_tensor("router", (5, config.dim))
    router[expert] = np.nan
    path = write_unchecked(tmp_path / "m.bin", checkpoint(config), "layers.1.ffn_router.weight", router)
    with llamac.load(path) as model:
        assert np.isnan(chunked(model, IDS, (90,))).all()


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid-groups", "softmax-bias"])
def test_a_nan_in_any_kind_of_router_reaches_the_logits(tmp_path: Path, name: str) -> None:
    made = router_checkpoint(**ROUTERS[name])
    router = made.tensors["layers.1.ffn_router.weight"].array().copy()
    router[7] = np.nan
    path = write_unchecked(tmp_path / "m.bin", made, "layers.1.ffn_router.weight", router)
    with llamac.load(path) as model:
        assert np.isnan(chunked(model, IDS[:20], (20,))).all()


@pytest.mark.parametrize(("dtype", "shared"), [("bf16", 90), ("q8", 0), ("q4", 0), ("q4", 90)])
def test_experts_give_the_same_bits_in_any_grouping(tmp_path: Path, dtype: str, shared: int) -> None:
    """Chunks, small batches and single rows; several sequences at once; any number of threads; every kernel set."""
    ids = some_ids(300)
    config = expert_config(dim=64, n_experts=12, n_experts_used=3, shared_ffn_dim=shared, shared_gate=min(shared, 1))
    path = write_model(tmp_path / "m.bin", checkpoint(config), dtype)
    digests = set()
    for i, (isa, threads) in enumerate(product(RUNS_HERE, (1, up_to(2), up_to(3)))):
        with llamac.load(path, kv_dtype="f32", isa=isa, threads=threads) as model:
            digests.add(chunked(model, ids, ((300,), (4,), (1, 3, 7, 100))[i % 3]).tobytes())
    assert len(digests) == 1
    with llamac.load(path, kv_dtype="f32") as model, model.session(sequences=3) as session:
        alone = np.frombuffer(digests.pop(), np.float32).reshape(300, -1)
        for at in range(5):
            for row in session.eval_rows([(ids[at], sequence, at, True) for sequence in range(3)]):
                assert row.tobytes() == alone[at].tobytes()


def test_using_more_experts_than_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"layer 0: n_experts is 5 and n_experts_used is 6"):
        llamac.load(write_model(tmp_path / "m.bin", checkpoint(expert_config(n_experts_used=6))))
