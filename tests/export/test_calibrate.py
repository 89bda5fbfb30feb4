"""Calibration: the recorded inputs, the statistics derived from them, and the error of calibrated files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import checkpoint, gpt2_config, llama_config, write_model
from llamac.errors import ArgumentError, ExportError
from llamac.export import calibrate as calibrating
from llamac.export import equations, options, reference
from llamac.export.calibrate import calibrate, calibration_sequences, disk_bytes, input_stats
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.convert import export
from llamac.export.dtypes import FEW_BITS

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
TEXT = "The world tells the end: hello, the well held bell. " * 60


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate on few tokens, in sequences that are observed in two parts."""
    monkeypatch.setattr(calibrating, "TOKENS", 400)
    monkeypatch.setattr(calibrating, "SEQUENCE", 100)


def expert_checkpoint() -> Checkpoint:
    """Layers with three and with five experts; a wider dense layer between them. The last has a shared expert."""
    config = llama_config()
    experts = replace(config.layers[0], ffn="experts", ffn_dim=40, n_experts=3, n_experts_used=2, expert_weights=1)
    more = replace(experts, ffn_dim=24, n_experts=5, n_experts_used=2, shared_ffn_dim=33, shared_gate=1)
    return checkpoint(replace(config, layers=(experts, replace(config.layers[0], ffn_dim=50), more)))


CONFIGS = {
    "llama": lambda: checkpoint(llama_config()),
    "gpt2": lambda: checkpoint(gpt2_config()),
    "experts": expert_checkpoint,
}


@pytest.fixture(params=["llama", "gpt2", "experts"])
def made(request: pytest.FixtureRequest) -> Checkpoint:
    return CONFIGS[request.param]()


def recorded_inputs(made: Checkpoint, path: Path, text: str | None = TEXT) -> dict[str, Floats]:
    """The recorded inputs of every matrix."""
    sequences = None if text is None else calibration_sequences(made, text)
    with llamac.load(path, kv_dtype="f32") as model, calibrate(made, model, sequences, path.parent) as calibration:
        found = {name: calibration.inputs(name) for name, tensor in made.tensors.items() if len(tensor.shape) == 2}
    return {name: rows for name, rows in found.items() if rows is not None}


# ---- the inputs


def test_the_inputs_of_every_product_are_recorded(made: Checkpoint, tmp_path: Path) -> None:
    found = recorded_inputs(made, write_model(tmp_path / "model.bin", made))
    head = "token_embedding.weight" if made.config.tied_output else "output.weight"
    products = {name for name in made.tensors if name.startswith("layers.") and len(made.tensors[name].shape) == 2}
    # routers and gates are never quantized to 4 bits
    routers = {name for name in products if "ffn_router" in name or "shared_gate" in name}
    assert set(found) == (products | {head}) - routers
    assert list(tmp_path.iterdir()) == [tmp_path / "model.bin"]
    assert {len(rows) for name, rows in found.items() if ".experts." not in name} == {400}
    with llamac.load(tmp_path / "model.bin") as model:
        ids = list(model.tokenize(TEXT))[:100]
    expected: dict[tuple[str, int], Doubles] = {}
    reference.forward(made, [ids], observe=lambda stage, layer, x: expected.__setitem__((stage, layer), x))
    for name, stage in (
        ("attn_v", "attn_norm"),
        ("attn_out", "attn_mix"),
        ("ffn_up", "ffn_norm"),
        ("ffn_down", "ffn_hidden"),
    ):
        exact = expected[stage, 1].reshape(100, -1)  # layer 1 is dense in every model
        np.testing.assert_allclose(found[f"layers.1.{name}.weight"][:100], exact, rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(found[head][:100], expected["output_norm", 0], rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("layer", [0, 2])
def test_an_expert_gets_the_inputs_routed_to_it(layer: int, tmp_path: Path) -> None:
    made = expert_checkpoint()
    found = recorded_inputs(made, write_model(tmp_path / "model.bin", made))
    with llamac.load(tmp_path / "model.bin") as model:
        ids = list(model.tokenize(TEXT))[:100]
    stages: dict[tuple[str, int], Doubles] = {}
    reference.forward(made, [ids], observe=lambda stage, at, x: stages.__setitem__((stage, at), x))
    record = made.config.layers[layer]
    weights = equations.expert_weights(stages["ffn_router", layer], record.n_experts_used, normalized=True)
    hidden, shared = np.split(stages["ffn_hidden", layer], [record.n_experts_used * record.ffn_dim], axis=1)
    hidden = hidden.reshape(100, record.n_experts_used, record.ffn_dim)
    for expert in range(record.n_experts):
        rows = np.flatnonzero(weights[:, expert])
        slots = (weights[rows, :expert] != 0).sum(axis=1)
        name = f"layers.{layer}.experts.{expert}."
        inputs = {kind: found[f"{name}{kind}.weight"] for kind in ("ffn_gate", "ffn_up", "ffn_down")}
        assert len({len(x) for x in inputs.values()}) == 1
        for kind in ("ffn_gate", "ffn_up"):
            exact = stages["ffn_norm", layer][rows]
            np.testing.assert_allclose(inputs[kind][: len(rows)], exact, rtol=2**-8, atol=1e-3)
        exact = hidden[rows, slots]
        np.testing.assert_allclose(inputs["ffn_down"][: len(rows)], exact, rtol=2**-8, atol=1e-3)
    if record.shared_ffn_dim:
        down_inputs = found[f"layers.{layer}.shared_ffn_down.weight"][:100]
        np.testing.assert_allclose(down_inputs, shared, rtol=2**-8, atol=1e-3)
    total = sum(len(found[f"layers.{layer}.experts.{expert}.ffn_down.weight"]) for expert in range(record.n_experts))
    assert total == 400 * record.n_experts_used


def test_an_expert_without_inputs_is_quantized_without_statistics(tmp_path: Path) -> None:
    made = expert_checkpoint()
    router = made.tensors["layers.0.ffn_router.weight"].array().copy()
    router[2] = router[1]  # ties go to the lowest index, so expert 2 gets no inputs
    router[0] = router[1]
    made.tensors["layers.0.ffn_router.weight"] = LazyTensor.of(router)
    source = write_model(tmp_path / "model.bin", made)
    assert "layers.0.experts.2.ffn_up.weight" not in recorded_inputs(made, source)
    for path, way in ((tmp_path / "plain.bin", None), (tmp_path / "calibrated.bin", "self")):
        export(source, path, dtype="q4", pure=True, calibrate=way)
    with llamac.load(tmp_path / "plain.bin") as plain, llamac.load(tmp_path / "calibrated.bin") as calibrated:
        for name in ("layers.0.experts.1.ffn_up.weight", "layers.0.experts.2.ffn_up.weight"):
            same = np.array_equal(plain.file.tensor(name), calibrated.file.tensor(name))
            assert same == ("experts.2" in name)


def test_experts_that_read_a_latent_are_quantized_without_statistics(tmp_path: Path) -> None:
    config = expert_checkpoint().config
    made = checkpoint(replace(config, layers=config.layers[:2], expert_dim=20))
    source = write_model(tmp_path / "model.bin", made)
    found = recorded_inputs(made, source)
    assert "layers.0.experts.0.ffn_up.weight" not in found
    assert found["layers.0.experts.0.ffn_down.weight"].shape[1] == 40
    export(source, tmp_path / "q4.bin", dtype="q4", pure=True, calibrate="self")


def test_generated_text_is_deterministic_and_varied(made: Checkpoint, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", made)
    one, two = (recorded_inputs(made, path, None) for _ in range(2))
    for name in one:
        assert one[name].tobytes() == two[name].tobytes()
    rows = one["layers.1.attn_q.weight"]
    assert len(np.unique(rows, axis=0)) > 0.5 * len(rows)
    made.tokenizer = None  # generation needs no tokenizer
    assert len(recorded_inputs(made, path, None)["layers.0.attn_q.weight"]) == 400


# ---- the statistics


def test_the_statistics_factor_the_second_moments() -> None:
    random = np.random.RandomState(0)
    inputs = (random.standard_normal((500, 30)) @ random.standard_normal((30, 70))).astype(np.float32)
    inputs[:, 9] = 0
    inputs[:, 11] *= 300
    stats = input_stats(inputs)
    assert stats.feedback is not None
    moments = inputs.astype(np.float64).T @ inputs / len(inputs)
    moments += calibrating.DAMPING * np.trace(moments) / 70 * np.eye(70)
    unit = stats.feedback.astype(np.float64)
    assert (np.diag(unit) == 1).all()
    assert not np.tril(unit, -1).any()
    assert stats.importance.max() == 1
    again = unit @ np.diag(stats.importance.astype(np.float64)) @ unit.T
    np.testing.assert_allclose(again / again[11, 11], moments / moments[11, 11], atol=2e-3)


def test_zero_inputs_give_equal_importance_and_no_feedback() -> None:
    stats = input_stats(np.zeros((40, 33), np.float32))
    assert stats.feedback is None
    assert (stats.importance == 1).all()


# ---- export


def cost(made: Checkpoint, path: Path, inputs: dict[str, Floats]) -> float:
    """The relative squared error of all products of few bits on these inputs, summed."""
    total = 0.0
    with llamac.load(path) as model:
        for tensor in model.file.tensors:
            if tensor.dtype in FEW_BITS and tensor.name in inputs:
                rows, weight = inputs[tensor.name].astype(np.float64), made.tensors[tensor.name].array()
                error = rows @ (model.file.tensor(tensor.name) - weight).T
                total += float((error**2).sum() / ((rows @ weight.T) ** 2).sum())
    return total


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_calibrated_products_have_less_error(made: Checkpoint, dtype: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", made)
    inputs = recorded_inputs(made, source)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    paths = [tmp_path / f"{number}.bin" for number in range(3)]
    for path, way in zip(paths, (None, text, "self"), strict=True):
        export(source, path, dtype=dtype, pure=True, calibrate=way)
    plain, from_text, from_self = (cost(made, path, inputs) for path in paths)
    assert from_text < 0.7 * plain
    assert from_self < 0.97 * plain  # the error is measured on another text, and the model is random
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".txt"}  # no temporary files are left


OTHER_TEXT = "Hello, hello: he held the bell of the end. All the world tells tales of wells. " * 40


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_calibrated_experts_have_less_error_on_another_text(dtype: str, tmp_path: Path) -> None:
    made = expert_checkpoint()
    source = write_model(tmp_path / "model.bin", made)
    text = with_text(TEXT)(tmp_path)
    for path, way in ((tmp_path / "plain.bin", None), (tmp_path / "calibrated.bin", text)):
        export(source, path, dtype=dtype, pure=True, calibrate=way)
    for read, limit in ((TEXT, 0.6), (OTHER_TEXT, 0.8)):
        inputs = {name: rows for name, rows in recorded_inputs(made, source, read).items() if ".experts." in name}
        assert len(inputs) >= 3 * 7
        plain, calibrated = (cost(made, tmp_path / f"{name}.bin", inputs) for name in ("plain", "calibrated"))
        assert calibrated < limit * plain


def test_a_calibrated_file_does_not_depend_on_threads(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    for threads in (1, 3):
        export(source, tmp_path / f"{threads}.bin", dtype="q4", calibrate="self", threads=threads)
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "3.bin").read_bytes()


def test_progress_is_reported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    phases: dict[str, tuple[int, int]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        assert done >= phases.get(phase, (0, 0))[0]
        phases[phase] = (done, total)

    export(source, tmp_path / "out.bin", dtype="q4", calibrate="self", progress=progress)
    assert {"checking scales", "generating text", "calibrating", "writing"} < set(phases)
    assert all(done == total for done, total in phases.values())


def with_text(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "text").write_text(text)
        return folder / "text"

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_text("too short"), "calibration text has [0-9]+ tokens, expected at least 99, better 396"),
        (with_text(""), "is empty"),
        (lambda folder: folder / "absent", "absent cannot be read"),
    ],
    ids=["short", "empty", "absent"],
)
def test_unusable_texts_are_refused(text: Callable[[Path], Path], message: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    with pytest.raises(ExportError, match=message):
        export(source, tmp_path / "out.bin", dtype="q4", calibrate=text(tmp_path), progress=only_verifying)
    assert not (tmp_path / "out.bin").exists()


def only_verifying(phase: str, done: int, total: int) -> None:
    """Fail in any slow phase."""
    assert phase == "verifying"


def test_only_the_start_of_a_long_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts characters, not bytes."""
    monkeypatch.setattr(options, "MAX_TEXT_CHARACTERS", 40)
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    text = with_text("é" * 1000)(tmp_path)
    with pytest.raises(ExportError, match=r"calibration text has 8\d tokens, expected at least 99, better 396"):
        export(source, tmp_path / "out.bin", dtype="q4", calibrate=text, progress=only_verifying)


def test_the_space_check_includes_the_inputs(made: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model.bin", made)
    sequences = calibration_sequences(made, TEXT)
    with llamac.load(source, kv_dtype="f32") as model, calibrate(made, model, sequences, tmp_path) as calibration:
        inputs = calibration._file.seek(0, 2)
    weights = source.stat().st_size
    assert 0 <= weights - (disk_bytes(made, 1000) - inputs) < 20_000  # the float copy has no tokenizer
    assert disk_bytes(made, 2 * weights) == 2 * weights + inputs
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=weights + inputs // 2))
    with pytest.raises(ExportError, match=r"B free, .* are needed"):
        export(source, tmp_path / "out.bin", dtype="q4", pure=True, calibrate="self", progress=before_the_reference)


def before_the_reference(phase: str, done: int, total: int) -> None:
    assert phase in ("verifying", "checking scales")


def test_calibration_without_4_bit_matrices_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config()))
    with pytest.raises(ArgumentError, match="for matrices in q4, q4s, q3 and q2; with dtype 'q8' the file has none"):
        export(source, tmp_path / "out.bin", dtype="q8", calibrate="self", progress=only_verifying)
    with pytest.raises(ArgumentError, match="calibrate is for flat files only, not with to='hf'"):
        export(source, tmp_path / "out", to="hf", calibrate="self")


def test_calibrating_copied_matrices_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model.bin", checkpoint(llama_config()), "q4")
    for dtype in ("q4", "auto"):
        with pytest.raises(ArgumentError, match="calibrate has no effect: all matrices of few bits are copied"):
            export(source, tmp_path / "out.bin", dtype=dtype, calibrate="self", progress=only_verifying)
    report = export(source, tmp_path / "out.bin", dtype="q4", dtype_map=[("*.ffn_up.*", "q3")], calibrate="self")
    assert [text for text in report.warnings if "calibrate" in text] == [
        "calibrate has no effect on copied matrices: token_embedding.weight, layers.*.attn_q.weight,"
        " layers.*.attn_k.weight, layers.*.attn_out.weight, layers.*.ffn_gate.weight, layers.*.ffn_down.weight"
    ]


def test_calibrating_on_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    made = checkpoint(llama_config())
    made.tokenizer = None
    source = write_model(tmp_path / "model.bin", made)
    with pytest.raises(ExportError, match="needs a tokenizer"):
        export(source, tmp_path / "out.bin", dtype="q4", calibrate=with_text(TEXT)(tmp_path))
