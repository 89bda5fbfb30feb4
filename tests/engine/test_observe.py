"""The graph's named stages: shapes, values, and that observing them does not change results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import Floats, bert_config, checkpoint, encoder, llama_config, some_ids, write_model
from llamac.errors import ArgumentError, ArgumentTypeError, ContextFullError, UnsupportedError
from openmp import needs_threads, up_to

IDS = some_ids(300)
CONTEXT = 320
OUTSIDE = ("embedding", "output_norm", "logits")


@pytest.fixture
def model(tiny: Path) -> Iterator[llamac.Model]:
    with llamac.load(tiny, context=CONTEXT) as opened:
        yield opened


def near(found: Floats, expected: NDArray[Any], tolerance: float = 1e-5) -> None:
    """Assert equality up to the order of float32 sums."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


Doubles = NDArray[np.float64]


def tensor(model: llamac.Model, name: str) -> Doubles:
    return model.file.tensor(name).astype(np.float64)


def product(model: llamac.Model, name: str, rows: NDArray[Any]) -> Doubles:
    """The product of rows and a matrix of the file, plus the bias if the file has one."""
    found: Doubles = rows.astype(np.float64) @ tensor(model, f"{name}.weight").T
    has_bias = any(record.name == f"{name}.bias" for record in model.file.tensors)
    return found + tensor(model, f"{name}.bias") if has_bias else found


# ---- results do not change


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=needs_threads)])
def test_observing_every_stage_changes_no_bit(model: llamac.Model, threads: int) -> None:
    with model.session(threads=threads) as session:
        expected = session.eval(IDS, logits="all")
        after = session.eval([5, 6])
    with model.session(threads=threads) as session:
        found = session.observe(IDS, llamac.STAGES)
        assert session.length() == len(IDS)
        assert found["logits", 0].tobytes() == expected.tobytes()
        assert session.eval([5, 6]).tobytes() == after.tobytes()


def test_stages_have_the_same_bits_in_any_grouping(model: llamac.Model) -> None:
    with model.session() as session:
        whole = session.observe(IDS, llamac.STAGES)
    for sizes, options in (
        ([299, 1], {}),
        ([1, 6, 7, 286], {"threads": up_to(2)}),
        ([300], {"threads": up_to(3), "isa": "scalar"}),
    ):
        with model.session(**options) as session:
            parts, at = [], 0
            for size in sizes:
                parts.append(session.observe(IDS[at : at + size], llamac.STAGES))
                at += size
        for key, expected in whole.items():
            assert np.concatenate([part[key] for part in parts]).tobytes() == expected.tobytes(), (key, sizes)


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=needs_threads)])
def test_inputs_take_the_place_of_the_embeddings(model: llamac.Model, threads: int) -> None:
    with model.session(threads=threads) as session:
        expected = session.observe(IDS, llamac.STAGES)
        session.truncate(0)
        found = session.observe([0] * len(IDS), llamac.STAGES, inputs=expected["embedding", 0])
        assert all(found[key].tobytes() == rows.tobytes() for key, rows in expected.items())
        session.truncate(0)
        changed = expected["embedding", 0].copy()
        changed[290] = changed[7]  # in the second chunk
        found = session.observe(IDS, ["embedding", "logits"], inputs=changed)
    assert found["embedding", 0].tobytes() == changed.tobytes()
    same = (found["logits", 0] == expected["logits", 0]).all(axis=1)
    assert same[:290].all()
    assert not same[290:].any()


def test_inputs_of_another_shape_or_type_are_refused(model: llamac.Model) -> None:
    dim = model.config["dim"]
    with model.session() as session:
        for shape in ((2, dim), (3, dim + 1), (3 * dim,), (0, dim)):
            with pytest.raises(ArgumentError, match=r"inputs has shape .*, expected \(3, "):
                session.observe([1, 2, 3], ["block"], inputs=np.zeros(shape, np.float32))
        with pytest.raises(ArgumentTypeError, match="inputs must be an array of float32"):
            session.observe([1], ["block"], inputs=np.zeros((1, dim)))
        assert session.length() == 0


# ---- names, layers and shapes


def test_every_stage_has_its_documented_shape(model: llamac.Model) -> None:
    c = model.config
    q, kv = c["n_heads"] * c["head_dim"], c["n_kv_heads"] * c["head_dim"]
    widths = dict.fromkeys(llamac.STAGES, c["dim"])
    widths["ffn_hidden"] = max(layer["ffn_dim"] for layer in model.file.layers)
    widths |= {"q": q, "k": kv, "v": kv, "cache_k": kv, "cache_v": kv, "attn_mix": q, "logits": c["vocab_size"]}
    widths["ffn_router"] = 0  # no experts
    with model.session() as session:
        found = session.observe(IDS, llamac.STAGES)
    expected = {(name, 0) for name in OUTSIDE}
    expected |= {(name, layer) for name in set(llamac.STAGES) - set(OUTSIDE) for layer in range(c["n_layers"])}
    assert set(found) == expected
    for (name, _), numbers in found.items():
        assert numbers.dtype == np.float32
        if name == "scores":
            assert numbers.shape == (len(IDS), c["n_heads"], CONTEXT)
        else:
            assert numbers.shape == (len(IDS), widths[name])
            assert np.isfinite(numbers).all()


def test_one_stage_of_one_layer_can_be_observed(model: llamac.Model) -> None:
    with model.session() as session:
        every = session.observe(IDS[:9], ["block"])
        session.truncate(0)
        found = session.observe(IDS[:9], [("block", 1), "embedding"])
    assert set(found) == {("block", 1), ("embedding", 0)}
    assert found["block", 1].tobytes() == every["block", 1].tobytes() != every["block", 0].tobytes()


def test_unknown_stages_and_layers_are_refused(model: llamac.Model) -> None:
    with model.session() as session:
        with pytest.raises(ArgumentError, match="no stage 'attention'; the stages are embedding, attn_norm, q"):
            session.observe([1], ["q", "attention"])
        for layer in (2, -1):
            with pytest.raises(ArgumentError, match=f"stage 'q' has no layer {layer}, expected 0 to 1"):
                session.observe([1], [("q", layer)])
        with pytest.raises(ArgumentError, match="stage 'logits' has no layer 1, expected 0 to 0"):
            session.observe([1], [("logits", 1)])
        with pytest.raises(ContextFullError):
            session.observe([1] * (CONTEXT + 1), ["q"])
        assert session.length() == 0
        assert session.observe([1], []) == {}
        assert session.length() == 1


def test_an_encoder_s_tokens_have_types(tmp_path: Path) -> None:
    with (
        llamac.load(write_model(tmp_path / "bert.bin", encoder(bert_config()))) as model,
        model.session(context=9) as session,
    ):
        seen = {}
        for kinds in (None, [0] * 9, [0, 1] + [0] * 7):
            seen[str(kinds)] = session.observe(IDS[:9], ["embedding", "output_norm"], types=kinds)
            session.truncate(0)
        one, other, typed = ({key: rows.tobytes() for key, rows in found.items()} for found in seen.values())
        assert one == other
        moved = seen[str([0, 1] + [0] * 7)]["embedding", 0] - seen["None"]["embedding", 0]
        rows = tensor(model, "type_embedding.weight")
        np.testing.assert_allclose(moved[1], rows[1] - rows[0], atol=1e-5)
        assert not moved[[0, *range(2, 9)]].any()
        assert typed["output_norm", 0] != one["output_norm", 0]
        with pytest.raises(ArgumentError, match="types has 2 numbers, expected 9: one for each id"):
            session.observe(IDS[:9], ["embedding"], types=[0, 1])
        with pytest.raises(ArgumentError, match="row 0: type is 2, expected 0 to 1"):
            session.observe(IDS[:1], ["embedding"], types=[2])
        assert session.length() == 0


@pytest.mark.parametrize("kind", ["an encoder", "a reranker"])
def test_every_stage_but_the_logits_works_alone_without_a_next_token(tmp_path: Path, kind: str) -> None:
    made = encoder(bert_config())
    if kind == "a reranker":
        scores: dict[str, Any] = {
            "tied_output": True,
            "scores_pairs": 1,
            "pooled_dim": (1,),
            "pooled_activation": ("sigmoid",),
        }
        made = checkpoint(replace(llama_config(), **scores))
    with (
        llamac.load(write_model(tmp_path / "m.bin", made, pooling="last" if kind == "a reranker" else "cls")) as model,
        model.session(context=9) as session,
    ):
        stages = [name for name in llamac.STAGES if name != "logits"]
        every = session.observe(IDS[:9], stages)
        assert {name for name, _ in every} == set(stages)
        for name in stages:
            session.truncate(0)
            found = session.observe(IDS[:9], [name])
            assert {key for key in every if key[0] == name} == set(found)
            assert all(rows.tobytes() == every[key].tobytes() for key, rows in found.items())
        session.truncate(0)
        for wrong in (["logits"], ["logits", "output_norm"], llamac.STAGES):
            with pytest.raises(UnsupportedError, match=f"the model is {kind}, which has no stage 'logits'"):
                session.observe(IDS[:9], wrong)
        assert session.length() == 0


# ---- values


@pytest.fixture(params=["f32", "f16"])
def seen(request: pytest.FixtureRequest, model: llamac.Model) -> dict[tuple[str, int], Floats]:
    """All stages of IDS, for each precision of the cache."""
    with model.session(kv_dtype=request.param) as session:
        found = session.observe(IDS, llamac.STAGES)
    found["kv is f16", 0] = np.array([request.param == "f16"], np.float32)
    return found


def test_each_stage_follows_from_the_stages_before_it(model: llamac.Model, seen: dict[tuple[str, int], Floats]) -> None:
    c = model.config
    embedding = tensor(model, "token_embedding.weight")[IDS]
    if c["position"] == "learned":
        embedding += tensor(model, "position_embedding.weight")[: len(IDS)]
    near(seen["embedding", 0], embedding)
    stream = seen["embedding", 0]
    for layer in range(c["n_layers"]):
        name = f"layers.{layer}"
        near(seen["v", layer], product(model, f"{name}.attn_v", seen["attn_norm", layer]))
        near(seen["attn_out", layer], product(model, f"{name}.attn_out", seen["attn_mix", layer]))
        middle = stream + seen["attn_out", layer]
        near(seen["ffn", layer], product(model, f"{name}.ffn_down", seen["ffn_hidden", layer]))
        near(seen["block", layer], middle + seen["ffn", layer])
        for norm, rows in (("attn_norm", stream), ("ffn_norm", middle)):
            near(seen[norm, layer], normed(model, f"{name}.{norm}", rows), 1e-4)
        stream = seen["block", layer]
    near(seen["output_norm", 0], normed(model, "output_norm", stream), 1e-4)
    output = "token_embedding" if c["tied_output"] else "output"
    near(seen["logits", 0], product(model, output, seen["output_norm", 0]))


def normed(model: llamac.Model, name: str, rows: NDArray[Any]) -> Doubles:
    """Apply the model's norm to each row."""
    x: Doubles = rows.astype(np.float64)
    layer_norm = model.config["norm"] == "layer"
    if layer_norm:
        x = x - x.mean(axis=1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + model.config["norm_eps"])
    return x * tensor(model, f"{name}.weight") + (tensor(model, f"{name}.bias") if layer_norm else 0.0)


def test_the_cache_holds_keys_and_values(seen: dict[tuple[str, int], Floats]) -> None:
    for layer in (0, 1):
        for name in ("k", "v"):
            numbers, held = seen[name, layer], seen[f"cache_{name}", layer]
            if seen["kv is f16", 0][0]:
                numbers = numbers.astype(np.float16).astype(np.float32)
            assert held.tobytes() == numbers.tobytes()
            assert len(np.unique(held)) > 1000


def test_scores_and_weighted_values_match_numpy(model: llamac.Model, seen: dict[tuple[str, int], Floats]) -> None:
    c, count = model.config, len(IDS)
    group = c["n_heads"] // c["n_kv_heads"]
    for layer in (0, 1):
        scores = seen["scores", layer]
        q = seen["q", layer].reshape(count, c["n_heads"], -1).astype(np.float64)
        k = seen["cache_k", layer].reshape(count, c["n_kv_heads"], -1).repeat(group, axis=1).astype(np.float64)
        v = seen["cache_v", layer].reshape(count, c["n_kv_heads"], -1).repeat(group, axis=1).astype(np.float64)
        expected = np.einsum("rhd,phd->rhp", q, k) * c["attention_scale"]
        looks = np.tril(np.ones((count, count), bool))[:, None, :].repeat(c["n_heads"], axis=1)
        assert (scores[:, :, :count][~looks] == -np.inf).all()
        assert (scores[:, :, count:] == -np.inf).all()
        near(scores[:, :, :count][looks], expected[looks])
        weights = np.exp(scores[:, :, :count] - scores.max(axis=2, keepdims=True).astype(np.float64))
        mix = np.einsum("rhp,phd->rhd", weights / weights.sum(axis=2, keepdims=True), v)
        near(seen["attn_mix", layer], mix.reshape(count, -1), 1e-4)
