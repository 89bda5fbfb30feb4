"""The float64 forward pass: its equations, the whole pass against transformers, and the golden text."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden.cases import CASES, Case
from golden.make import relative_errors, stored_references, transformers_logits
from golden.tiny_checkpoints import write_checkpoint
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export import equations, products, reference
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.hf import model as hf
from llamac.export.llama2c import model as llama2c
from llamac.export.reference import Array
from llamac.text.tokenizer import Tokenizer

# float32 transformers against float64: 2e-6 to 2e-5 on these cases.
FLOAT32_NOISE = 5e-5


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.RandomState(seed).standard_normal(shape)


def lazy(values: Array) -> LazyTensor:
    stored = values.astype(np.float32)
    return LazyTensor(stored.shape, "f32", lambda first, last: stored[first:last])


def small_checkpoint(**changes: Any) -> Checkpoint:
    """A LLaMA-like checkpoint with two RoPE tables, one layer of each kind, and biases."""
    dim, heads, kv_heads, head_dim, vocab, ffn = 12, 4, 2, 6, 23, 17
    layers = (
        LayerConfig("gated", ffn, rope=0),
        LayerConfig("plain", ffn, rope=-1, window=3),
        LayerConfig("gated", ffn, rope=1),
    )
    config = ModelConfig(
        dim=dim,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        n_token_ids=vocab,
        context=32,
        norm="rms",
        position="rope",
        activation="silu",
        tied_output=False,
        norm_eps=1e-5,
        attention_scale=0.5,
        layers=layers,
        rope_dim=(6, 4),
        rope_original_context=(8, 0),
        rope_attention_factor=(1.25, 1.0),
    )
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (vocab, dim),
        "output_norm.weight": (dim,),
        "output.weight": (vocab, dim),
        "output.bias": (vocab,),
    }
    for layer, record in enumerate(layers):
        name = f"layers.{layer}"
        shapes[f"{name}.attn_norm.weight"] = shapes[f"{name}.ffn_norm.weight"] = (dim,)
        matrices = {
            "attn_q": (heads * head_dim, dim),
            "attn_k": (kv_heads * head_dim, dim),
            "attn_v": (kv_heads * head_dim, dim),
            "attn_out": (dim, heads * head_dim),
            "ffn_up": (ffn, dim),
            "ffn_down": (dim, ffn),
        }
        if record.ffn == "gated":
            matrices["ffn_gate"] = (ffn, dim)
        for matrix, shape in matrices.items():
            shapes[f"{name}.{matrix}.weight"], shapes[f"{name}.{matrix}.bias"] = shape, shape[:1]
    tensors = {name: lazy(noise(*shape, seed=i)) for i, (name, shape) in enumerate(shapes.items())}
    tensors["rope.0.inv_freq"] = lazy(np.array([1.0, 0.1, 0.01]))
    tensors["rope.0.inv_freq_long"] = lazy(np.array([0.5, 0.02, 0.001]))
    tensors["rope.1.inv_freq"] = lazy(np.array([0.7, 0.07]))
    return Checkpoint(replace(config, **changes), tensors)


# ---- equations


def test_rms_norm_gives_a_root_mean_square_of_one() -> None:
    x = noise(3, 50) * 7
    y = equations.rms_norm(x, np.ones(50), 0.0)
    np.testing.assert_allclose(np.mean(y * y, axis=1), 1)
    np.testing.assert_allclose(equations.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 12.5), [[3 / 5, 8 / 5]])


def test_layer_norm_centres_and_scales() -> None:
    y = equations.layer_norm(noise(3, 50) * 7 + 5, np.ones(50), np.zeros(50), 0.0)
    np.testing.assert_allclose(y.mean(axis=1), 0, atol=1e-15)
    np.testing.assert_allclose(y.var(axis=1), 1)
    one = equations.layer_norm(np.array([[1.0, 3.0]]), np.array([1.0, 2.0]), np.array([10.0, 20.0]), 3.0)
    np.testing.assert_allclose(one, [[9.5, 21.0]])


def test_scores_of_rotated_vectors_depend_only_on_distance() -> None:
    inv_freq = np.array([1.0, 0.25, 0.0625])  # exact in float32, so that the angles are
    q, k = noise(1, 1, 6), noise(1, 1, 6, seed=1)

    def score(m: int, n: int) -> float:
        angles = equations.rope_angles(np.array([m, n]), inv_freq)
        return float(np.sum(equations.rotate(q, angles[:1], 1.0) * equations.rotate(k, angles[1:], 1.0)))

    assert score(19, 12) == pytest.approx(score(7, 0), rel=1e-12)
    assert abs(score(19, 12) - score(7, 1)) > 1e-3


def test_rotation_pairs_halves_and_keeps_other_dimensions() -> None:
    x = np.arange(1.0, 7.0).reshape(1, 1, 6)
    angles = np.array([[math.pi / 2, 0.0]])  # pairs (0, 2) and (1, 3) of a rope_dim of 4
    np.testing.assert_allclose(equations.rotate(x, angles, 2.0), [[[-6.0, 4.0, 2.0, 8.0, 5.0, 6.0]]])


def test_angles_are_float32_products() -> None:
    (angle,) = equations.rope_angles(np.array([12345]), np.array([0.1]))[0]
    assert angle == float(np.float32(12345) * np.float32(0.1)) != 12345 * float(np.float32(0.1))


@pytest.mark.parametrize(("window", "seen"), [(0, [0, 1, 2, 3]), (1, [3]), (3, [1, 2, 3])])
def test_a_row_attends_to_its_window(window: int, seen: list[int]) -> None:
    scores = equations.attention_scores(noise(6, 4, 3), noise(6, 2, 3, seed=1), 1.0, window)
    assert np.flatnonzero(np.isfinite(scores[3, 0])).tolist() == seen


def test_groups_of_query_heads_share_a_key_and_value_head() -> None:
    q, k, v = noise(5, 6, 3), noise(5, 2, 3, seed=1), noise(5, 2, 3, seed=2)
    scores = equations.attention_scores(q, k, 0.5, 0)
    mix = equations.attention_mix(scores, v)
    for head in range(6):
        one = 0.5 * (q[4, head] @ k[:, head // 3].T)
        np.testing.assert_allclose(scores[4, head], one)
        weights = np.exp(one) / np.exp(one).sum()
        np.testing.assert_allclose(mix[4, head], weights @ v[:, head // 3])


def test_softmax_does_not_overflow() -> None:
    np.testing.assert_allclose(equations.softmax(np.array([1e4, 1e4, -np.inf])), [0.5, 0.5, 0.0])


def test_a_soft_cap_is_never_exceeded() -> None:
    capped = equations.soft_cap(np.array([-1e9, 0.001, 30.0, 1e9]), 30.0)
    np.testing.assert_allclose(capped, [-30.0, 0.001, 30 * math.tanh(1), 30.0], rtol=1e-8)
    np.testing.assert_array_equal(equations.soft_cap(np.array([1e9]), 0.0), [1e9])


def test_scores_are_capped_before_the_mask() -> None:
    q, k = noise(6, 4, 3) * 9, noise(6, 2, 3, seed=1) * 9
    plain, capped = (equations.attention_scores(q, k, 0.5, 2, cap) for cap in (0.0, 5.0))
    seen = np.isfinite(plain)
    np.testing.assert_array_equal(np.isneginf(capped), ~seen)
    np.testing.assert_allclose(capped[seen], 5 * np.tanh(plain[seen] / 5))


def test_the_most_probable_experts_are_used_lower_index_first() -> None:
    p = np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    weights = equations.expert_weights(np.log(p), 2, normalized=False)
    np.testing.assert_allclose(weights, [[0, 0.4, 0, 0.3], [0.25, 0.25, 0, 0]])
    weights = equations.expert_weights(np.log(p), 2, normalized=True)
    np.testing.assert_allclose(weights, [[0, 4 / 7, 0, 3 / 7], [0.5, 0.5, 0, 0]])


def test_a_bias_and_groups_change_the_choice_of_experts_and_not_their_scores() -> None:
    p = np.array([[0.9, 0.1, 0.6, 0.5, 0.8, 0.2]])  # groups of two: 1.0, 1.1, 1.0
    logits = np.log(p / (1 - p))

    def weights(n_used: int, normalized: bool = False, **options: Any) -> Array:
        return equations.expert_weights(logits, n_used, normalized, router="sigmoid", **options)

    np.testing.assert_allclose(weights(2), [[0.9, 0, 0, 0, 0.8, 0]])
    np.testing.assert_allclose(weights(2, groups=(3, 1)), [[0, 0, 0.6, 0.5, 0, 0]])
    bias = np.array([-0.5, 0, 0, 0.4, 0, 0])
    np.testing.assert_allclose(weights(2, choice_bias=bias), [[0, 0, 0, 0.5, 0.8, 0]])
    found = weights(2, True, choice_bias=bias, eps=0.1, scale=3.0)
    np.testing.assert_allclose(found, [[0, 0, 0, 1.5 / 1.4, 2.4 / 1.4, 0]])
    of_softmax = equations.expert_weights(logits, 1, False, groups=(3, 1))  # the best expert decides on the group
    assert of_softmax.argmax() == 0


@pytest.mark.parametrize(
    ("name", "at_one"),
    [
        ("silu", 1 / (1 + math.exp(-1))),
        ("quick_gelu", 1 / (1 + math.exp(-1.702))),
        ("gelu_erf", 0.8413447460685429),  # the normal distribution function at 1
        ("gelu_tanh", 0.8411919906082768),  # PyTorch's gelu(1, approximate="tanh") in float64
        ("relu", 1.0),
    ],
)
def test_activations(name: str, at_one: float) -> None:
    values = equations.ACTIVATIONS[name](np.array([-800.0, 0.0, 1.0, 800.0]))
    np.testing.assert_allclose(values, [0.0, 0.0, at_one, 800.0], rtol=1e-15, atol=1e-300)


def test_linear_streams_a_large_matrix_in_chunks() -> None:
    rows, columns = 20_000, 2048  # 164 MB of float32
    asked: list[int] = []

    def read(first: int, last: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        asked.append(last - first)
        return np.full((last - first, columns), first, np.float32)

    tracemalloc.start()
    try:
        y = products.linear(np.ones((2, columns)), LazyTensor((rows, columns), "f32", read))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert y[0, 0] == 0
    assert y[1, -1] == (rows - min(asked)) * columns  # the last chunk is the smallest, in any thread order
    assert sum(asked) == rows
    assert peak < 30e6


# ---- the graph


def test_sequences_in_one_pass_are_independent() -> None:
    checkpoint = small_checkpoint()
    sequences = [[1, 2, 3, 4, 5, 6, 7], [9], [22, 0, 4]]
    together = reference.forward(checkpoint, sequences)
    for ids, logits in zip(sequences, together, strict=True):
        np.testing.assert_allclose(logits, reference.forward(checkpoint, [ids])[0], rtol=1e-12)
    last = reference.forward(checkpoint, sequences, last_only=True)
    np.testing.assert_allclose(np.concatenate(last), [logits[-1] for logits in together], rtol=1e-12)


def test_logits_do_not_depend_on_later_tokens() -> None:
    ids = [5, 4, 3, 2, 1, 0, 6, 7]
    whole = reference.forward(small_checkpoint(), [ids])[0]
    np.testing.assert_allclose(reference.forward(small_checkpoint(), [ids[:5]])[0], whole[:5], rtol=1e-12)


def test_every_stage_is_observed_once_with_its_shape() -> None:
    checkpoint = small_checkpoint()
    seen: dict[tuple[str, int], Array] = {}

    def observe(stage: str, layer: int, values: Array) -> None:
        assert (stage, layer) not in seen
        seen[stage, layer] = values

    reference.forward(checkpoint, [[1, 2, 3, 4], [5, 6]], last_only=True, observe=observe)
    per_layer = {
        "attn_norm": (6, 12),
        "q": (6, 4, 6),
        "k": (6, 2, 6),
        "v": (6, 2, 6),
        "cache_k": (6, 2, 6),
        "cache_v": (6, 2, 6),
        "scores": (6, 4, 4),
        "attn_mix": (6, 4, 6),
        "attn_out": (6, 12),
        "ffn_norm": (6, 12),
        "ffn_hidden": (6, 17),
        "ffn": (6, 12),
        "block": (6, 12),
    }
    shapes: dict[tuple[str, int], tuple[int, ...]] = {
        ("embedding", 0): (6, 12),
        ("output_norm", 0): (2, 12),
        ("logits", 0): (2, 23),
    }
    shapes |= {(stage, layer): shape for stage, shape in per_layer.items() for layer in range(3)}
    assert {key: values.shape for key, values in seen.items()} == shapes
    np.testing.assert_array_equal(np.isfinite(seen["scores", 1][:, 0]).sum(axis=1), [1, 2, 3, 3, 1, 2])
    np.testing.assert_allclose(seen["block", 0], seen["embedding", 0] + seen["attn_out", 0] + seen["ffn", 0])
    h = equations.rms_norm(
        seen["block", 2][[3, 5]], checkpoint.tensors["output_norm.weight"].array().astype(np.float64), 1e-5
    )
    np.testing.assert_allclose(seen["output_norm", 0], h)


def test_the_context_selects_the_short_or_the_long_table() -> None:
    checkpoint = small_checkpoint()
    short, long = (reference.forward(checkpoint, [[1, 2, 3]], context=context)[0] for context in (8, 9))
    np.testing.assert_array_equal(long, reference.forward(checkpoint, [[1, 2, 3]])[0])
    assert np.abs(short - long).max() > 1e-3
    tensors = checkpoint.tensors | {"rope.0.inv_freq_long": checkpoint.tensors["rope.0.inv_freq"]}
    np.testing.assert_array_equal(short, reference.forward(Checkpoint(checkpoint.config, tensors), [[1, 2, 3]])[0])


def test_a_layer_without_rope_ignores_positions() -> None:
    checkpoint = small_checkpoint(layers=(LayerConfig("gated", 17, rope=-1),))
    one, other = (reference.forward(checkpoint, [ids])[0][-1] for ids in ([1, 2, 3, 4], [2, 3, 1, 4]))
    np.testing.assert_allclose(one, other, rtol=1e-9)  # attention without positions sees a set


def one_layer(placement: str = "pre", **changes: Any) -> Checkpoint:
    """A model of one layer, without positions, with every norm that a layer can have."""
    checkpoint = small_checkpoint(layers=(LayerConfig("gated", 17, rope=-1, placement=placement),), **changes)
    for i, name in enumerate(("attn_post_norm", "ffn_post_norm")):
        checkpoint.tensors[f"layers.0.{name}.weight"] = lazy(noise(12, seed=100 + i))
    return checkpoint


def observed(checkpoint: Checkpoint) -> dict[str, Array]:
    """All stages of a one-layer model."""
    found: dict[str, Array] = {}
    reference.forward(checkpoint, [[3, 1, 4, 1, 5]], observe=lambda stage, _, values: found.update({stage: values}))
    return found


@pytest.mark.parametrize("placement", reference.PLACEMENTS)
def test_the_placement_decides_where_norms_are(placement: str) -> None:
    checkpoint = one_layer(placement, residual_scale=0.25)
    stages = observed(checkpoint)

    def norm(x: Array, name: str) -> Array:
        return equations.rms_norm(x, checkpoint.tensors[f"layers.0.{name}.weight"].array().astype(np.float64), 1e-5)

    x, attention, ffn = stages["embedding"], stages["attn_out"], stages["ffn"]
    attn_norm = x if placement == "post" else norm(x, "attn_norm")
    if placement in ("post", "sandwich"):
        attention, ffn = norm(attention, "attn_post_norm"), norm(ffn, "ffn_post_norm")
    middle = (attn_norm if placement in ("normed", "normed_attn") else x) + 0.25 * attention
    before = x if placement == "parallel" else middle
    ffn_norm = before if placement == "post" else norm(before, "ffn_norm")
    np.testing.assert_allclose(stages["attn_norm"], attn_norm)
    np.testing.assert_allclose(stages["ffn_norm"], ffn_norm)
    np.testing.assert_allclose(stages["block"], (ffn_norm if placement == "normed" else middle) + 0.25 * ffn)


@pytest.mark.parametrize("kind", ["head", "whole", "layer_head"])
def test_queries_and_keys_are_normalized(kind: str) -> None:
    plain, checkpoint = observed(one_layer()), one_layer(qk_norm=kind)
    weights = {name: lazy(noise(6 if kind == "head" else 6 * heads)) for name, heads in (("q", 4), ("k", 2))}
    checkpoint.tensors |= {f"layers.0.attn_{name}_norm.weight": weight for name, weight in weights.items()}
    stages = observed(checkpoint)
    for name, weight in weights.items():
        x = plain[name]
        if kind == "layer_head":
            x = x - x.mean(axis=2, keepdims=True)
        mean = (x * x).mean(axis=(1, 2) if kind == "whole" else 2, keepdims=True)
        np.testing.assert_allclose(stages[name], x / np.sqrt(mean + 1e-5) * weight.array().reshape(-1, 6))


def test_embeddings_and_logits_are_scaled_and_capped() -> None:
    plain, scaled = observed(one_layer()), observed(one_layer(embedding_scale=3.0))
    np.testing.assert_allclose(scaled["embedding"], 3 * plain["embedding"])
    capped = observed(one_layer(logit_scale=0.5, logit_soft_cap=2.0))
    np.testing.assert_allclose(capped["logits"], 2 * np.tanh(0.5 * plain["logits"] / 2))


@pytest.mark.parametrize("normalized", [0, 1])
def test_each_expert_computes_the_rows_routed_to_it(normalized: int) -> None:
    record = LayerConfig("experts", 17, n_experts=3, n_experts_used=2, expert_weights=normalized)
    checkpoint = small_checkpoint(layers=(record,))
    checkpoint.tensors["layers.0.ffn_router.weight"] = lazy(noise(3, 12, seed=300))
    shapes = {"ffn_gate": (17, 12), "ffn_up": (17, 12), "ffn_down": (12, 17)}
    weights = {
        (expert, name): noise(*shape, seed=301 + 10 * expert + i).astype(np.float32).astype(np.float64)
        for expert in range(3)
        for i, (name, shape) in enumerate(shapes.items())
    }
    for (expert, name), values in weights.items():
        checkpoint.tensors[f"layers.0.experts.{expert}.{name}.weight"] = lazy(values)
    stages = observed(checkpoint)
    for h, y in zip(stages["ffn_norm"], stages["ffn"], strict=True):
        p = np.exp(checkpoint.tensors["layers.0.ffn_router.weight"].array() @ h)
        p /= p.sum()
        used = np.argsort(p)[1:]
        total = p[used].sum() if normalized else 1.0
        expected = np.zeros(12)
        for e in used:
            inner = equations.silu(weights[e, "ffn_gate"] @ h) * (weights[e, "ffn_up"] @ h)
            expected += p[e] / total * (weights[e, "ffn_down"] @ inner)
        np.testing.assert_allclose(y, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "mish"},
        {"norm": "batch"},
        {"qk_norm": "half"},
        {"layers": (LayerConfig("gated", 17, placement="between"),)},
        {"layers": (LayerConfig("recurrent", 17),)},
    ],
    ids=str,
)
def test_unsupported_configs_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError):
        reference.forward(small_checkpoint(**changes), [[1]])


@pytest.mark.parametrize("sequences", [[], [[]], [[1], []], [[23]], [[-1]], [list(range(20)) * 2]], ids=str)
def test_sequences_out_of_range_are_refused(sequences: list[list[int]]) -> None:
    with pytest.raises(ArgumentError):
        reference.forward(small_checkpoint(), sequences)


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ArgumentError, match="context is 33, expected 1 to 32"):
        reference.forward(small_checkpoint(), [[1]], context=33)


def test_a_missing_tensor_is_named() -> None:
    checkpoint = small_checkpoint()
    del checkpoint.tensors["layers.1.attn_k.weight"]
    with pytest.raises(ExportError, match=r"layers\.1\.attn_k\.weight"):
        reference.forward(checkpoint, [[1]])


# ---- against transformers


@pytest.fixture(params=CASES.values(), ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def folder(case: Case, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / case.name, case.config)


def test_logits_match_recorded_transformers(case: Case, folder: Path) -> None:
    logits = reference.forward(hf.read(folder, []), [case.ids], context=case.context)[0]
    assert relative_errors(logits[case.stored_rows], stored_references()[case.name]).max() <= FLOAT32_NOISE


def test_logits_match_transformers_in_float64(case: Case, folder: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    logits = reference.forward(hf.read(folder, []), [case.ids], context=case.context)[0]
    assert relative_errors(logits, transformers_logits(folder, case.ids, double=True)).max() <= 1e-9


# ---- a real model


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> Path:
    folder = data_dir / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no stories260K in {data_dir}")
    return folder


def test_float64_generates_the_golden_text(stories: Path) -> None:
    text = (stories / "greedy-256.txt").read_text().rstrip("\n")
    ids = Tokenizer.from_file(stories / "tok512.bin").encode(text, add_special=True)
    assert len(ids) == 257
    logits = reference.forward(llama2c.read(stories / "stories260K.bin"), [ids[:-1]])[0]
    assert logits.argmax(axis=1).tolist() == ids[1:]


@pytest.mark.parametrize(
    ("n", "rows", "columns"), [(1, 1, 1), (7, 45, 600), (32, 100, 256), (3, 700, 257), (1500, 9, 300)]
)
def test_a_blocked_product_equals_the_product(n: int, rows: int, columns: int) -> None:
    """With partial blocks of columns and rows, and more inputs than fit into a block."""
    rng = np.random.RandomState(0)
    x, weight = rng.randn(n, columns), rng.randn(rows, columns).astype(np.float32)
    np.testing.assert_allclose(products.product(x, weight), x @ weight.astype(np.float64).T, rtol=0, atol=1e-11)


def test_chunks_are_written_to_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CHUNK_BYTES", 8 * 50 * 3)  # three rows at once, on all threads
    x, weight = np.random.RandomState(1).randn(4, 50), np.random.RandomState(2).randn(20, 50).astype(np.float32)
    found = products.linear(x, LazyTensor.of(weight))
    np.testing.assert_allclose(found, x @ weight.astype(np.float64).T, rtol=0, atol=1e-12)


def test_an_error_in_a_chunk_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CHUNK_BYTES", 8 * 50 * 3)

    def read(first: int, last: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        raise ExportError("it broke")

    with pytest.raises(ExportError, match="it broke"):
        products.linear(np.ones((1, 50)), LazyTensor((20, 50), "f32", read))
