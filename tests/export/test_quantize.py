"""Quantization: errors on random weights, exact bytes, the engine's products, and the choice of dtypes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import checkpoint, gpt2_config, llama_config, some_ids, write_model
from llamac import _core
from llamac.arguments import Numerics
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.errors import ArgumentError, ExportError
from llamac.export import products, reference
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.convert import export
from llamac.export.dtypes import DTYPES, FEW_BITS, choose_dtypes, parse_dtype_map, tiny_share, widen_coarse
from llamac.export.flat.model import read as read_flat
from llamac.export.quantize import CalibrationStats, Quantizer
from llamac.format.probes import divergence
from llamac.format.strips import CODEBOOKS, QUANTIZED, scale_columns, unpack_quantized, unpack_tensor

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
# Relative RMS error in percent that the quantizer must stay under, on normal and on Student-t(6) numbers.
LIMITS = {"q8": (0.65, 0.85), "q6": (2.1, 2.6), "q4": (6.2, 6.7), "q4s": (7.4, 8.4)}
LIMITS |= {"q3": (12.6, 13.3), "q2": (26.8, 27.8), "t2": (44, 52)}
CODES = {"q8": range(-127, 128), "q6": range(-32, 32), "q4": range(-32, 30), "q4s": range(-32, 30)}
CODES |= {"q3": range(-19, 14), "q2": range(-12, 8), "t2": range(-1, 2)}


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def student(*shape: int, seed: int = 0, freedom: int = 6) -> Floats:
    return np.random.RandomState(seed).standard_t(freedom, shape).astype(np.float32)


def pack(rows: Floats, dtype: str, stats: CalibrationStats | None = None) -> bytes:
    return Quantizer().pack(rows, dtype, stats)


def again(rows: Floats, dtype: str, stats: CalibrationStats | None = None) -> Floats:
    """Quantize rows and unpack them."""
    return unpack_tensor(pack(rows, dtype, stats), dtype, rows.shape)


def error(rows: Floats, found: Floats) -> float:
    """Relative RMS error in percent."""
    difference = found.astype(np.float64) - rows
    return float(100 * np.sqrt((difference**2).sum() / (rows.astype(np.float64) ** 2).sum()))


# ---- errors


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_the_error_on_random_weights_is_small(dtype: str) -> None:
    for rows, limit in zip((normal(64, 2048), student(64, 2048)), LIMITS[dtype], strict=True):
        assert error(rows, again(rows, dtype)) < limit


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_the_chosen_scales_are_close_to_an_exhaustive_search(dtype: str) -> None:
    """The search tries all scales and codes in float64. The pruned search can miss the best scale of a rare block."""
    rows = normal(16, 128)
    units, scales, _ = unpack_quantized(pack(rows, dtype), dtype, rows.shape)
    book = np.array(CODEBOOKS[dtype])
    width = scale_columns(dtype)
    best = np.zeros((16, 128 // width))
    for r in range(16):
        for b in range(best.shape[1]):
            block = rows[r, width * b : width * (b + 1)].astype(np.float64)
            levels = [float(units[r]) * s * (book + (s & 3)) for s in range(-127, 128)]
            best[r, b] = min(((block[:, None] - steps).__abs__().min(axis=1) ** 2).sum() for steps in levels)
    found = ((again(rows, dtype) - rows).astype(np.float64) ** 2).reshape(16, -1, width).sum(axis=2)
    assert found.sum() < 1.005 * best.sum()
    assert (found < 1.0001 * best).mean() > 0.9
    assert np.abs(scales).max() <= 127


def test_important_columns_get_smaller_errors() -> None:
    rows = normal(32, 256)
    importance = np.where(np.arange(256) % 2, 1, 50).astype(np.float32)
    for dtype in FEW_BITS:
        plain, weighted = again(rows, dtype), again(rows, dtype, CalibrationStats(importance, None))
        assert error(rows[:, ::2], weighted[:, ::2]) < 0.9 * error(rows[:, ::2], plain[:, ::2])
        assert error(rows, weighted) > error(rows, plain)


@pytest.mark.parametrize("kind", ["tails", "wide", "equal", "zeros"])
def test_ternary_rows_have_the_least_error_if_columns_have_importance(kind: str) -> None:
    """Compared with all sets of columns that are not rounded to 0; the mean of a set is its best scale."""
    random = np.random.RandomState(3)
    rows = student(64, 9, freedom=2)
    importance = 10 ** random.uniform(-4, 0, 9)
    if kind == "wide":
        rows = (10 ** random.uniform(-3, 0, rows.shape) * random.choice((-1, 1), rows.shape)).astype(np.float32)
    if kind == "equal":
        rows = np.round(rows)
    if kind == "zeros":
        importance[::2] = 0
    weights = importance.astype(np.float32).astype(np.float64)
    sets = np.arange(1, 1 << 9)[:, None] >> np.arange(9) & 1
    magnitudes = np.abs(rows.astype(np.float64))
    gains = ((weights * magnitudes) @ sets.T) ** 2 / np.maximum(sets @ weights, 1e-300)
    least = (weights * magnitudes**2).sum(axis=1) - gains.max(axis=1)
    found = again(rows, "t2", CalibrationStats(importance.astype(np.float32), None))
    assert ((weights * (found - rows.astype(np.float64)) ** 2).sum(axis=1) <= 1.000001 * least + 1e-9).all()


def test_ternary_rows_keep_their_numbers_with_any_importance() -> None:
    random = np.random.RandomState(4)
    rows = random.choice((-1, 0, 1), (32, 3000)) * np.abs(normal(32, 1))
    importance = (10 ** random.uniform(-6, 0, 3000) * random.choice((0, 1), 3000)).astype(np.float32)
    np.testing.assert_array_equal(again(rows, "t2", CalibrationStats(importance, None)), rows)


def test_ternary_rows_ignore_columns_without_importance() -> None:
    rows = np.where(np.arange(200) % 2, 1, 0.01).astype(np.float32)[None]
    importance = (np.arange(200) % 2 == 0).astype(np.float32)
    found = again(rows, "t2", CalibrationStats(importance, None))
    np.testing.assert_array_equal(found, np.full((1, 200), 0.01, np.float32))


@pytest.mark.parametrize("columns", [300, 512])
@pytest.mark.parametrize("dtype", FEW_BITS)
def test_feedback_halves_the_error_for_correlated_inputs(dtype: str, columns: int) -> None:
    """The inputs span only a few directions; the error of the product is measured."""
    random = np.random.RandomState(0)
    inputs = random.standard_normal((2000, 40)) @ random.standard_normal((40, columns))
    inputs += 0.1 * random.standard_normal(inputs.shape)
    square = inputs.T @ inputs / len(inputs)
    factor = np.linalg.cholesky(square[::-1, ::-1])[::-1, ::-1]  # square = factor factor^T, factor upper triangular
    diagonal = np.diag(factor)
    stats = CalibrationStats((diagonal**2).astype(np.float32), np.ascontiguousarray(factor / diagonal, np.float32))
    rows = normal(32, columns)
    plain, taught = (again(rows, dtype, way).astype(np.float64) - rows for way in (None, stats))
    lost = [float(np.einsum("ri,ij,rj", difference, square, difference)) for difference in (plain, taught)]
    assert lost[1] < 0.3 * lost[0]


# ---- bytes


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 33, 100, 128, 129, 150, 200, 333])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_width_is_stored_and_padded_as_specified(dtype: str, columns: int) -> None:
    rows = normal(19, columns)
    data = pack(rows, dtype)
    assert len(data) == _core.matrix_bytes(DTYPES[dtype], 19, columns)
    assert error(rows, unpack_tensor(data, dtype, rows.shape)) < max(10, 1.4 * LIMITS[dtype][1])
    padded = -(-columns // 32) * 32
    units, scales, codes = unpack_quantized(data, dtype, (32, padded))
    first = CODEBOOKS[dtype][0] if dtype in FEW_BITS else 0
    offset = np.repeat(scales & 3, scale_columns(dtype), axis=1)[:, :padded] + first if dtype in FEW_BITS else 0
    assert not units[19:].any()
    assert dtype == "t2" or not scales[19:].any()
    assert ((codes == offset)[19:]).all()
    assert ((codes == offset)[:, columns:]).all()
    if scale_columns(dtype) == 16:
        assert not np.repeat(scales, scale_columns(dtype), axis=1)[:, -(-columns // 16) * 16 :: 16].any()
    assert codes[:19, :columns].min() >= CODES[dtype][0]
    assert codes[:19, :columns].max() <= CODES[dtype][-1]


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_zeros_tiny_and_large_numbers_are_quantized(dtype: str) -> None:
    rows = normal(16, 96)
    rows[0] = 0
    rows[1] *= 1e-35
    rows[2] *= np.float32(2.0**110)
    rows[3] *= 1e-20
    rows[4, 32:] = 0
    rows[5, :] = 0
    rows[5, 7] = -3.5
    found = again(rows, dtype)
    assert not found[:2].any()
    assert not found[4, 32:].any()
    # q3 and q2 have the code 0 only in a grid without their largest code
    np.testing.assert_allclose(found[5], rows[5], rtol=0.08 if dtype in ("q3", "q2") else 1e-6)
    for r in (2, 3, 4):
        peak = np.abs(rows[r]).max()
        assert error(rows[r] / peak, found[r] / peak) < max(10, 1.4 * LIMITS[dtype][1])


def test_the_bytes_are_the_same_on_every_machine() -> None:
    """Recorded hashes of strips: the quantizer must not depend on the processor, the compiler or a library."""
    random = np.random.RandomState(0)

    def whole(*shape: int) -> Floats:
        """Roughly normal numbers, computed without logarithms, because libraries round those differently."""
        found: Floats = random.randint(-500, 501, (4, *shape)).sum(axis=0).astype(np.float32)
        return found

    rows = np.concatenate((whole(20, 333), whole(20, 333) * random.choice([1, 2, 16], (20, 333)).astype(np.float32)))
    stats = CalibrationStats(np.abs(whole(333)) + np.float32(50), np.triu(whole(333, 333) / np.float32(2**15), 1))
    found = {(dtype, way is stats): _hash(pack(rows, dtype, way)) for dtype in QUANTIZED for way in (None, stats)}
    assert found == HASHES


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


HASHES = {
    ("q8", False): "ddd3769e3320646e",
    ("q8", True): "0b2fcb0a7dbd4274",
    ("q6", False): "2130244410cadadf",
    ("q6", True): "31cc02030c186e13",
    ("q4", False): "90ca8823f602cecd",
    ("q4", True): "13ed8599562f4566",
    ("q4s", False): "4207f23f6a9e3477",
    ("q4s", True): "b8f7ddb0fe2d35f5",
    ("q3", False): "15e85c232073edbd",
    ("q3", True): "82aea99649b81e91",
    ("q2", False): "a0c433c075f2a5f6",
    ("q2", True): "87cf8fc31794fe84",
    ("t2", False): "a79ed5908bace3ec",
    ("t2", True): "0ddf0c629b7f0d28",
}


def test_the_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    rows = normal(500, 130)
    for dtype in QUANTIZED:
        with Quantizer(5) as quantizer:
            assert quantizer.pack(rows, dtype) == pack(rows, dtype)


def test_wrong_arguments_of_the_quantizer_are_refused() -> None:
    def attempt(dtype: str, size: int, importance: Floats | None = None, feedback: Floats | None = None) -> None:
        weight, shares = (None if way is None else way.data for way in (importance, feedback))
        _core.quantize(DTYPES[dtype], normal(16, 32).data, bytearray(size), weight, shares)

    size = _core.matrix_bytes(DTYPES["q4"], 16, 32)
    with pytest.raises(ArgumentError, match="buffer has 10000"):
        attempt("q4", 10_000)
    with pytest.raises(ArgumentError, match="dtype is 3"):
        attempt("bf16", 1024)
    with pytest.raises(ArgumentError, match="importance has 31"):
        attempt("q4", size, normal(31))
    with pytest.raises(ArgumentError, match="feedback is 32 x 31"):
        attempt("q4", size, None, normal(32, 31))
    with pytest.raises(ArgumentError, match="without feedback"):
        attempt("q8", _core.matrix_bytes(DTYPES["q8"], 16, 32), None, normal(32, 32))


# ---- the engine's products

CONFIGS = {
    "llama": llama_config(),
    "llama of wider layers": llama_config(dim=168, ffn=203),
    "gpt2, tied": gpt2_config(),
    "gpt2, untied": gpt2_config(dim=136, tied=False),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.mark.parametrize(("dtype", "numerics"), [*((dtype, "exact") for dtype in QUANTIZED), ("q8", "fast")])
def test_the_engine_matches_the_format(config: ModelConfig, dtype: str, numerics: Numerics, tmp_path: Path) -> None:
    """Compares products computed from the engine's own inputs, so that one differently rounded input does not spread.

    Then compares the logits of the whole graph.
    """
    path = write_model(tmp_path / "model.bin", checkpoint(config), dtype)
    ids = some_ids(9)
    stored = read_flat(path)
    with llamac.load(path, kv_dtype="f32", numerics=numerics) as model, model.session() as session:
        assert any(tensor.dtype == dtype for tensor in model.file.tensors)
        seen = session.observe(ids, llamac.STAGES)
        logits = model.logits(ids)
    weights = stored.tensors

    def product(x: Floats, name: str) -> Doubles:
        rows = x.reshape(len(ids), -1).astype(np.float64)
        return products.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"), numerics=numerics)

    for layer in range(len(config.layers)):
        name = f"layers.{layer}"
        near(seen["v", layer].reshape(len(ids), -1), product(seen["attn_norm", layer], f"{name}.attn_v"))
        near(seen["attn_out", layer], product(seen["attn_mix", layer], f"{name}.attn_out"))
        near(seen["ffn", layer], product(seen["ffn_hidden", layer], f"{name}.ffn_down"))
    head = "token_embedding" if config.tied_output else "output"
    near(seen["logits", 0], product(seen["output_norm", 0], head))
    expected = reference.forward(stored, [ids], numerics=numerics)[0]
    exact = reference.forward(stored, [ids])[0]
    noise = np.abs(logits - expected).mean()
    assert noise < 3e-3 * np.abs(expected).max()
    if (dtype, numerics) != ("q8", "exact"):
        # the engine must round its inputs as the format specifies
        assert noise < 0.5 * np.abs(exact - expected).mean()


def near(found: Floats, expected: Doubles) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_embedding_rows_match_the_format(dtype: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(gpt2_config(tied=False)), dtype)
    ids = some_ids(20)
    with llamac.load(path) as model, model.session() as session:
        seen = session.observe(ids, ["embedding"])["embedding", 0]
        tokens, positions = (model.file.tensor(f"{kind}_embedding.weight") for kind in ("token", "position"))
    np.testing.assert_array_equal(seen, tokens[ids] + positions[: len(ids)])


# ---- the choice of dtypes


def tensors(**matrices: Floats) -> dict[str, LazyTensor]:
    return {name: LazyTensor.of(values) for name, values in matrices.items()}


def chosen(made: Checkpoint, dtype: str, *, pure: bool = False, dtype_map: str = "") -> dict[str, str]:
    pairs = parse_dtype_map(dtype_map) if dtype_map else []
    found = choose_dtypes(made.tensors, dtype, pure=pure, dtype_map=pairs)
    return {name: kind for name, kind in found.items() if len(made.tensors[name].shape) == 2}


def test_the_output_matrix_gets_6_bits_and_attn_v_8() -> None:
    untied, tied = checkpoint(llama_config()), checkpoint(gpt2_config())
    found = chosen(untied, "q4")
    assert [name for name, kind in found.items() if kind == "q8"] == [f"layers.{i}.attn_v.weight" for i in (0, 1)]
    assert {name for name, kind in found.items() if kind == "q6"} == {"output.weight"}
    assert set(found.values()) == {"q8", "q6", "q4"}
    assert chosen(tied, "q4s")["token_embedding.weight"] == "q6"
    assert chosen(tied, "q4s")["position_embedding.weight"] == "q4s"
    assert set(chosen(tied, "q4", pure=True).values()) == {"q4"}
    for dtype in ("q8", "q6"):
        assert set(chosen(tied, dtype).values()) == {dtype}


def test_a_router_gets_4_bits_only_by_dtype_map() -> None:
    layer = LayerConfig("experts", 20, rope=0, n_experts=3, n_experts_used=2, shared_ffn_dim=20, shared_gate=1)
    made = checkpoint(replace(llama_config(), layers=(layer,)))
    router = "layers.0.ffn_router.weight"
    for pure in (False, True):
        assert chosen(made, "q4", pure=pure)[router] == "q8"
        assert chosen(made, "q4", pure=pure)["layers.0.shared_gate.weight"] == "q8"
        assert chosen(made, "q4", pure=pure)["layers.0.shared_ffn_up.weight"] == "q4"
        assert chosen(made, "q4", pure=pure)["layers.0.experts.2.ffn_down.weight"] == "q4"
    assert chosen(made, "bf16")[router] == "bf16"
    assert chosen(made, "q4", dtype_map=f"{router}=q4s")[router] == "q4s"
    with pytest.raises(ArgumentError, match=r"'x' matches no matrix; .*layers\.\*\.experts\.\*\.ffn_up\.weight,"):
        choose_dtypes(made.tensors, "q8", dtype_map=[("x", "q4")])


def test_the_first_matching_pattern_wins() -> None:
    made = checkpoint(llama_config())
    found = chosen(made, "q4", pure=True, dtype_map="layers.0.*=bf16, layers.?.ffn_*.weight=q8,output.weight=f32")
    assert found["layers.0.ffn_up.weight"] == "bf16"
    assert found["layers.1.ffn_up.weight"] == "q8"
    assert found["output.weight"] == "f32"
    assert found["token_embedding.weight"] == "q4"
    assert chosen(made, "bf16", dtype_map="*.attn_v.weight=q8")["layers.1.attn_v.weight"] == "q8"
    assert choose_dtypes(made.tensors, "q8", dtype_map=[("*", "q4")])["output_norm.weight"] == "f32"
    with pytest.raises(ArgumentError, match=r"'layers.7.\*' matches no matrix.* layers.\*.attn_q.weight"):
        chosen(made, "q4", dtype_map="layers.7.*=q8")
    with pytest.raises(ArgumentError, match="dtype is 'q5'"):
        chosen(made, "q4", dtype_map="*=q5")
    with pytest.raises(ArgumentError, match=r"dtype_map: 'output.weight' is not PATTERN=DTYPE"):
        chosen(made, "q4", dtype_map="output.weight")


def test_a_tensor_with_coarse_scales_becomes_q8() -> None:
    rows = normal(40, 320)
    outliers = rows.copy()
    outliers[:, 5] = 200
    given = tensors(fine=rows, coarse=outliers, named=outliers)
    assert tiny_share(given["fine"], "q4") == 0
    assert tiny_share(given["coarse"], "q4") == pytest.approx(0.95)
    dtypes = dict.fromkeys(given, "q4")
    found, warnings = widen_coarse(given, dtypes, lambda name: name == "named")
    assert found == {"fine": "q4", "coarse": "q8", "named": "q4"}
    assert len(warnings) == 1
    assert "coarse is stored as q8, not q4: in 95% of its blocks (limit 25%)" in warnings[0]


def test_the_share_of_a_large_matrix_is_estimated_from_some_of_its_rows() -> None:
    rows = normal(4096, 64)
    for head in range(0, 4096, 128):
        rows[head : head + 64, 5] = 200  # every second head of 64 rows has an outlier column
    exact = tiny_share(LazyTensor.of(rows[:1024]), "q4")
    read = []

    def count(first: int, last: int) -> Floats:
        read.append(last - first)
        return rows[first:last]

    assert exact == pytest.approx(0.5 * 0.75, abs=0.001)
    assert tiny_share(LazyTensor(rows.shape, "f32", count), "q4") == pytest.approx(exact, abs=0.05)
    assert sum(read) == 1024
    assert read == [16] * 64  # the first row and the last are among them


# ---- export


def test_export_mixes_dtypes_and_warns_of_coarse_tensors(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    up = made.tensors["layers.1.ffn_up.weight"].array().copy()
    up[:, 3] *= 1000
    made.tensors["layers.1.ffn_up.weight"] = LazyTensor.of(up)
    source = write_model(tmp_path / "source.bin", made)
    report = export(source, tmp_path / "a.bin", dtype="q4", threads=1, dtype_map=[("*.0.ffn_down.*", "q4s")])
    assert len(report.warnings) == 1
    assert "layers.1.ffn_up.weight is stored as q8" in report.warnings[0]
    export(source, tmp_path / "b.bin", dtype="q4", threads=3, dtype_map=[("*.0.ffn_down.*", "q4s")])
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    with llamac.load(tmp_path / "a.bin") as model:
        kinds = {tensor.name: tensor.dtype for tensor in model.file.tensors}
        assert model.file.metadata["dtype"] == "q4"
        results = replay_probes(model)
    assert (kinds["layers.1.ffn_up.weight"], kinds["output.weight"]) == ("q8", "q6")
    assert (kinds["layers.0.ffn_down.weight"], kinds["layers.0.ffn_up.weight"]) == ("q4s", "q4")
    assert {result.status for result in results} == {"identical"}
    assert all(0 < result.error <= result.tolerance < 1.2 * max(r.error for r in results) for result in results)
    assert all(result.divergence > 0 for result in results)


def test_exporting_a_quantized_file_warns(tmp_path: Path) -> None:
    source = write_model(tmp_path / "q4.bin", checkpoint(llama_config()), "q4")
    report = export(source, tmp_path / "f32.bin")
    assert report.dtype == "f32"
    for others in (report, export(source, tmp_path / "hf", to="hf")):
        assert any("quantized weights (q4, q6, q8)" in text for text in others.warnings)
    with llamac.load(source) as one, llamac.load(tmp_path / "f32.bin") as other:
        for name in ("layers.0.attn_k.weight", "output.weight"):
            np.testing.assert_array_equal(one.file.tensor(name), other.file.tensor(name))


def hashes(path: Path) -> dict[str, tuple[str, bytes]]:
    """The dtype and the hash of every tensor of a flat file."""
    with llamac.load(path) as model:
        return {tensor.name: (tensor.dtype, tensor.sha256) for tensor in model.file.tensors}


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("pure", [False, True])
def test_matrices_that_keep_their_quantized_dtype_are_copied(tmp_path: Path, dtype: str, pure: bool) -> None:
    options: dict[str, Any] = {"pure": pure} if dtype in (*FEW_BITS, "t2") else {}
    source = tmp_path / "source.bin"
    export(write_model(tmp_path / "f32.bin", checkpoint(llama_config())), source, dtype=dtype, **options)
    for number, chosen in enumerate(({"dtype": dtype, **options}, {"dtype": "auto"})):
        out = tmp_path / f"{number}.bin"
        report = export(source, out, name="another", **chosen)
        assert (report.dtype, report.warnings) == (dtype, [])
        assert hashes(out) == hashes(source)


def test_ternary_files_keep_the_embedding_by_default(tmp_path: Path) -> None:
    source = write_model(tmp_path / "t2.bin", checkpoint(llama_config()), "t2")
    export(source, tmp_path / "again.bin")
    assert {dtype for dtype, _ in hashes(source).values()} == {"f32", "q6", "t2"}
    assert hashes(tmp_path / "again.bin") == hashes(source)


def test_only_matrices_that_are_quantized_again_are_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "q4.bin", checkpoint(llama_config()), "q4")
    [warning] = export(source, tmp_path / "again.bin", dtype="q4s").warnings
    assert "quantized weights (q4), which are quantized again" in warning


def test_numbers_too_large_for_quantized_dtypes_are_refused(tmp_path: Path) -> None:
    for value, message in (
        (np.inf, "not finite"),
        (np.nan, "not finite"),
        (2e36, "does not fit q4: use --dtype f32 or bf16"),
    ):
        made = checkpoint(llama_config())
        key = made.tensors["layers.0.attn_k.weight"].array().copy()
        key[3, 4] = value
        made.tensors["layers.0.attn_k.weight"] = LazyTensor.of(key)
        with pytest.raises(ExportError, match=message):
            write_model(tmp_path / "out.bin", made, "q4")


def test_arguments_without_effect_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.bin", checkpoint(llama_config()))
    with pytest.raises(ArgumentError, match="pure is for dtype q4, q4s, q3, q2 and t2"):
        export(source, tmp_path / "out.bin", dtype="q8", pure=True)
    few = write_model(tmp_path / "q4.bin", checkpoint(llama_config()), "q4")
    with pytest.raises(ArgumentError, match="pure has no effect with dtype 'auto'"):
        export(few, tmp_path / "out.bin", dtype="auto", pure=True)
    with pytest.raises(ArgumentError, match="'q4' is for flat files only: to='hf' takes f32, f16, bf16"):
        export(source, tmp_path / "out", to="hf", dtype="q4")
    with pytest.raises(ArgumentError, match="threads is 0"):
        export(source, tmp_path / "out.bin", threads=0)


def test_divergence_compares_probabilities() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    expected = float((p * np.log(p / q)).sum())
    assert divergence(np.log(p) + 7, np.log(q) - 3) == pytest.approx(expected)
    assert divergence(np.log([p, p]), np.log([q, p])) == pytest.approx(expected / 2)
