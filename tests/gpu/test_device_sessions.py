"""Sessions on an emulated device: the bits of the CPU, for everything that the graph can compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import small_adapter
from graph_cases import CASES, COMBINATIONS, FEATURES

import llamac
from builders import Floats, checkpoint, gpt2_config, llama_config, some_ids, write_model
from llamac import _core
from llamac.arguments import DTYPES, KV_DTYPES, KVDtype, Numerics
from llamac.errors import UnsupportedError
from llamac.export.checkpoint import ModelConfig
from llamac.format.flatfile import FlatFile
from llamac.gpu.emulator.emulator import Emulator
from llamac.trace.record import trace

IDS = some_ids(70)
F32 = dict(_core.dtypes())["f32"]
# With chunks of many rows, of few, and of one: products, attention and captured graphs take different ways.
SIZES = (33, 1, 1, 1, 20, 5)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device (--device), whose compiled kernels later tests reuse."""
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    return str(request.config.getoption("device"))


def in_chunks(session: llamac.Session, ids: Sequence[int], sizes: Sequence[int] = SIZES) -> Floats:
    """The logits of all ids, evaluated in chunks of these sizes, repeatedly."""
    found: list[Any] = []
    at = 0
    while at < len(ids):
        size = sizes[len(found) % len(sizes)]
        found.append(session.eval(ids[at : at + size], logits="all"))
        at += size
    return np.concatenate(found)


def sessions(model: llamac.Model, device: str, **settings: Any) -> Iterator[llamac.Session]:
    """A session on the CPU and one on the device."""
    for name in ("cpu", device):
        with model.session(device=name, **settings) as session:
            yield session


def assert_same(model: llamac.Model, device: str, ids: Sequence[int] = IDS, **settings: Any) -> None:
    """Compare the bits of the CPU, in one chunk, with those of the device."""
    cpu, found = (
        in_chunks(session, ids, SIZES if session.device != "cpu" else (len(ids),))
        for session in sessions(model, device, **settings)
    )
    assert np.isfinite(cpu).all()
    np.testing.assert_array_equal(found.view(np.uint32), cpu.view(np.uint32))


@pytest.mark.parametrize("name", [*list(COMBINATIONS)[::5], *FEATURES])
def test_every_feature_has_the_bits_of_the_cpu(tmp_path: Path, device: str, name: str) -> None:
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(CASES[name])), kv_dtype="f32") as model:
        assert_same(model, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_the_bits_of_the_cpu(tmp_path: Path, device: str, dtype: str) -> None:
    config = llama_config(dim=320, n_heads=5, n_kv_heads=5, ffn=160)
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(config), dtype)) as model:
        assert_same(model, device, some_ids(40))


def test_values_of_another_dtype_are_products_of_the_same_launch(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of one row with exact numerics. Inputs of both dtypes come from the norm."""
    path, launched = write_model(tmp_path / "m.bin", checkpoint(llama_config()), "q4"), list[str]()
    cases: tuple[tuple[Numerics, int, int], ...] = ("exact", 1, 2), ("exact", 2, 0), ("fast", 1, 0)
    for numerics, rows, mixed in cases:
        with llamac.load(path, device=device, numerics=numerics) as model, model.session() as session:
            assert model._device is not None
            driver = model._device.driver
            launch = driver.launch

            def record(name: str, *arguments: Any, to: Any = launch, **options: Any) -> None:
                launched.append(name)
                to(name, *arguments, **options)

            launched.clear()
            monkeypatch.setattr(driver, "launch", record)
            session.eval(IDS[:rows])
        assert launched.count("product_q4_q8_one") == mixed
        assert any(name.startswith("product_q8_") for name in launched) == (not mixed)
        assert "pack_int16" not in launched


@pytest.mark.parametrize(
    ("dtype", "numerics"), [("t2", "exact"), ("f32", "exact"), ("q8", "exact"), ("q8", "fast"), ("bf16", "fast")]
)
def test_rounded_inputs_have_the_bits_of_the_cpu(tmp_path: Path, device: str, dtype: str, numerics: Numerics) -> None:
    config = replace(CASES["sub-norms"], rounds_inputs=1)
    path = write_model(tmp_path / "m.bin", checkpoint(config), dtype)
    with llamac.load(path) as model:
        assert_same(model, device, some_ids(40), numerics=numerics)


@pytest.mark.parametrize(("kv_dtype", "bias_distance"), [*((dtype, 0) for dtype in KV_DTYPES), ("f16", 310)])
def test_long_contexts_have_the_bits_of_the_cpu(
    tmp_path: Path, device: str, kv_dtype: KVDtype, bias_distance: int
) -> None:
    config = llama_config(n_layers=2)
    layers = config.layers[0], replace(config.layers[1], window=300)
    config = replace(config, layers=layers, bias_distance=bias_distance)
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(config)), kv_dtype=kv_dtype) as model:
        assert_same(model, device, some_ids(560))


def test_learned_positions_have_the_bits_of_the_cpu(tmp_path: Path, device: str) -> None:
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(gpt2_config()))) as model:
        assert_same(model, device)


def test_replaced_tensors_have_the_bits_of_the_cpu(tmp_path: Path, device: str) -> None:
    """They are not in the model's file."""
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()))
    with llamac.load(path) as original:
        ids, before = IDS[:9], original.logits(IDS[:9])
        weight = original.file.tensor("output_norm.weight")
    file = FlatFile(path)
    file.core.replace("output_norm.weight", 1, np.ascontiguousarray(-2 * weight).view(np.uint8).data)
    with llamac.Model(file) as model:
        assert (model.logits(ids) != before).any()
        assert_same(model, device, ids)


def adapted(path: Path) -> FlatFile:
    """A model file with random adapters on two of three matrices, of ranks 1 to 4, some with scales."""
    file = FlatFile(path)
    random = np.random.default_rng(4)

    def factor(rows: int, columns: int) -> Any:
        strips = random.standard_normal(_core.matrix_bytes(F32, rows, columns) // 4)
        return (0.1 * strips).astype(np.float32).data

    matrices = [(tensor.name, tensor.shape) for tensor in file.tensors if len(tensor.shape) == 2]
    if file.config["tied_output"]:
        matrices.append(("output.weight", matrices[0][1]))
    for i, (name, (rows, columns)) in enumerate(matrices):
        if i % 3 == 2:
            continue
        rank, is_embedding = 1 + i % 4, name.endswith("embedding.weight")
        a = factor(columns, rank) if is_embedding else factor(rank, columns)
        scales = random.uniform(0.5, 1.5, rows).astype(np.float32).data
        file.core.adapt(name, rank, a, factor(rows, rank), scales if i % 5 == 3 and not is_embedding else None)
    return file


ADAPTED = {
    "shared experts": (CASES["shared experts"], "f32"),
    "biased shared experts": (CASES["biased shared experts"], "q8"),
    "scales": (CASES["sandwich-whole-gated-rms"], "q8"),
    "learned positions": (gpt2_config(), "q4"),
    "untied": (gpt2_config(tied=False), "f16"),
    "layer embeddings": (CASES["layer embeddings"], "q8"),
    "experts beside a network": (CASES["experts beside a network"], "f32"),
    "rounded inputs": (replace(CASES["sub-norms"], rounds_inputs=1), "f32"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_have_the_bits_of_the_cpu(tmp_path: Path, device: str, name: str) -> None:
    config, dtype = ADAPTED[name]
    path = write_model(tmp_path / "m.bin", checkpoint(config), dtype)
    with llamac.load(path) as base:
        before = base.logits(IDS[:9])
    with llamac.Model(adapted(path)) as model:
        assert (model.logits(IDS[:9]) != before).any()
        assert_same(model, device, IDS[:60])
        cpu, found = (session.observe(IDS[:4], llamac.STAGES) for session in sessions(model, device, context=70))
        for key, values in cpu.items():
            np.testing.assert_array_equal(found[key].view(np.uint32), values.view(np.uint32), str(key))


@pytest.mark.parametrize(
    ("config", "products"),
    [
        (llama_config(n_layers=2), 4 + 4 + 1),  # q, k and v; out; up and gate; down; and the output matrix
        (gpt2_config(), 4 + 4 + 1),
        (CASES["pre-none-experts-rms"], 5 + 4 + 5 + 1),  # the router; up and gate of all experts are also one launch
    ],
    ids=["llama", "gpt2", "experts"],
)
def test_products_of_the_same_inputs_are_one_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, config: ModelConfig, products: int
) -> None:
    if device != "emulator":
        pytest.skip("the launches of an emulated device are counted")
    launched: list[str] = []
    launch = Emulator.launch

    def counted(self: Emulator, kernel: str, *arguments: Any, **options: Any) -> None:
        launched.append(kernel)
        launch(self, kernel, *arguments, **options)

    monkeypatch.setattr(Emulator, "launch", counted)
    path = write_model(tmp_path / "m.bin", checkpoint(config), "q8")
    with llamac.load(path) as model, model.session(device=device) as session:
        session.eval(IDS[:1])
    assert len([kernel for kernel in launched if kernel.startswith("product_")]) == products


@pytest.mark.parametrize("name", ["shared experts", "experts beside a network", "layer embeddings", "routers"])
def test_observed_stages_have_the_bits_of_the_cpu(tmp_path: Path, device: str, name: str) -> None:
    """Of models with shared experts, windows, and layers of different shapes."""
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(CASES[name])), kv_dtype="f16") as model:
        cpu, found = (session.observe(IDS[:9], llamac.STAGES) for session in sessions(model, device, context=70))
        assert cpu.keys() == found.keys()
        for key, values in cpu.items():
            np.testing.assert_array_equal(found[key].view(np.uint32), values.view(np.uint32), str(key))


def test_texts_are_traced_with_the_bits_of_the_cpu(tmp_path: Path, device: str) -> None:
    path = write_model(tmp_path / "m.bin", checkpoint(CASES["shared experts"]))
    with llamac.load(path) as on_cpu, llamac.load(path, device=device) as on_device:
        expected, found = trace(on_cpu, IDS[:9]), trace(on_device, IDS[:9])
        with pytest.raises(UnsupportedError, match="only the CPU reads inputs"):
            trace(on_device, None, inputs=np.zeros((2, on_device.config["dim"]), np.float32))
    assert expected.costs is not None
    assert found.costs is not None
    assert found.seconds > 0
    assert found.costs.bytes.any(axis=1).all()
    for one, other in zip(expected.predictions, found.predictions, strict=True):
        assert one.tobytes() == other.tobytes()
    assert expected.attention.weights.tobytes() == found.attention.weights.tobytes()
    assert [each.chosen.tobytes() for each in expected.experts] == [each.chosen.tobytes() for each in found.experts]


def test_sequences_of_one_pass_fork_shrink_and_shift_as_on_the_cpu(tmp_path: Path, device: str) -> None:
    def history(session: llamac.Session) -> Floats:
        session.eval(IDS[:66], sequence=0, logits=None)
        session.copy_sequence(0, 1, length=65)
        session.eval(IDS[5:30], sequence=2, logits=None)
        session.truncate(64, sequence=0)  # the page ends here: sequence 1 also holds it
        rows = [(IDS[3], 0, 64, True), (IDS[4], 1, 65, True), (IDS[5], 2, 25, True), (IDS[6], 1, 66, False)]
        found = [session.eval_rows(rows)]
        session.shift(4, 20, sequence=1)
        found.append(session.eval(IDS[8:12], sequence=1, logits="all"))
        return np.concatenate(found)

    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(llama_config()))) as model:
        cpu, found = (history(session) for session in sessions(model, device, sequences=3))
        np.testing.assert_array_equal(found.view(np.uint32), cpu.view(np.uint32))


def test_a_session_moves_between_devices_in_a_file(tmp_path: Path, device: str) -> None:
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(llama_config()))) as model:
        with model.session() as session:
            session.eval(IDS[:40], logits=None)
            session.save(tmp_path / "cpu.session")
            expected = session.eval(IDS[40:], logits="all")
        with model.session(device=device) as session:
            session.load(tmp_path / "cpu.session")
            np.testing.assert_array_equal(session.eval(IDS[40:], logits="all"), expected)
            session.truncate(40)
            session.save(tmp_path / "device.session")
        assert (tmp_path / "device.session").read_bytes()[-4096:] == (tmp_path / "cpu.session").read_bytes()[-4096:]


def test_a_session_moves_between_devices(tmp_path: Path, device: str) -> None:
    with llamac.load(write_model(tmp_path / "m.bin", checkpoint(llama_config()))) as model, model.session() as cpu:
        cpu.prefill(IDS[:40])
        with cpu.to(device) as moved, moved.to("cpu") as back:
            assert (moved.device, back.device) == (device, "cpu")
            assert moved.tokens() == back.tokens() == IDS[:40]
            assert len({session.sample(seed=1) for session in (cpu, moved, back)}) == 1
            rest = [session.eval(IDS[40:], logits="all") for session in (cpu, moved, back)]
        for found in rest[1:]:
            np.testing.assert_array_equal(found.view(np.uint32), rest[0].view(np.uint32))


def test_an_engine_with_adapters_gives_the_tokens_of_the_cpu(tmp_path: Path, device: str) -> None:
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config(dim=40, n_heads=4, n_kv_heads=4)), "q8")
    lora = [(small_adapter(tmp_path / "adapter"), 0.5)]
    prompts = [IDS[:20], IDS[30:33]]
    with llamac.load(path) as base, llamac.load(path, lora=lora) as model:
        before, expected = (
            [each.generate(ids, max_tokens=8, seed=4, ignore_eos=True).tokens for ids in prompts]
            for each in (base, model)
        )
    assert expected != before
    with llamac.load(path, lora=lora, device=device) as model, llamac.Engine(model, max_sequences=2) as engine:
        results = engine.generate(prompts, max_tokens=8, seed=4, ignore_eos=True, progress=False)
    assert [result.tokens for result in results] == expected


def test_engines_and_speculation_give_the_tokens_of_the_cpu(tmp_path: Path, device: str) -> None:
    path = write_model(tmp_path / "m.bin", checkpoint(llama_config()), "q8")
    prompts = [IDS[:20], IDS[:20] + IDS[:12], IDS[30:33], IDS[:20]]
    with llamac.load(path) as model:
        expected = [model.generate(ids, max_tokens=12, seed=4, ignore_eos=True).tokens for ids in prompts]
    with llamac.load(path, device=device) as model:
        assert (
            model.generate(prompts[1], max_tokens=12, seed=4, ignore_eos=True, speculation=True).tokens == expected[1]
        )
        with llamac.Engine(model, max_sequences=3) as engine:
            results = engine.generate(prompts, max_tokens=12, seed=4, ignore_eos=True, progress=False)
        assert [result.tokens for result in results] == expected
