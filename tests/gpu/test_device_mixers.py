"""Recurrent layers and latent attention on an emulated device: the CPU's bits in every stage, forks and rewinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from builders import Floats, checkpoint, llama_config, some_ids, write_model
from golden.tiny_checkpoints import random_tensor
from llamac.arguments import KVDtype
from llamac.export.checkpoint import LayerConfig, ModelConfig

IDS = some_ids(150)
GATED = LayerConfig("gated", 40, rope=0, output_gate="element")
DELTA = LayerConfig(
    *("gated", 40),
    mixer="delta_net",
    state_key_heads=2,
    state_heads=4,
    state_key_dim=16,
    state_value_dim=80,  # 64 columns of a state, and 16
    conv_width=4,
)
MAMBA = replace(DELTA, mixer="mamba2")
BESIDE = replace(DELTA, mixer="attention_mamba2", rope=0)
CONV = LayerConfig("gated", 40, mixer="short_conv", conv_width=3)
LATENT = LayerConfig(
    *("gated", 40),
    rope=0,
    q_lora_rank=20,
    kv_lora_rank=128,  # attention packs values of 128 numbers
    qk_nope_head_dim=10,
    v_head_dim=16,
    latent_norm_eps=1e-2,
)


def latent_config(*layers: LayerConfig) -> ModelConfig:
    base = llama_config(dim=40, n_heads=4, n_kv_heads=1)
    return replace(base, head_dim=128 + 6, rope_dim=(6,), attention_scale=0.25, layers=layers)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LLAMAC_CACHE", str(kernel_cache.parent))
    return str(request.config.getoption("device"))


def with_values(tensor: Any, values: Floats) -> Any:
    return type(tensor)(values.shape, "f32", lambda first, last: values[first:last])


KINDS = {"delta_net": DELTA, "mamba2": MAMBA, "short_conv": CONV, "attention_mamba2": BESIDE, "latent": LATENT}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[llamac.Model]:
    kind = KINDS[request.param]
    last, between = replace(kind, ffn_dim=37), replace(GATED, output_gate="head" if kind is CONV else "element")
    if kind is BESIDE:  # norms of both mixers' sum
        last = replace(last, placement="sandwich", window=30)
    config = replace(llama_config(dim=40, n_heads=4, n_kv_heads=2), layers=(kind, between, last))
    if kind is LATENT:
        config = latent_config(kind, replace(last, placement="parallel", q_lora_rank=0, rope=-1, window=30))
    if kind is DELTA:
        config = replace(config, state_norm_eps=0.25, state_beta_doubled=1)
    if kind in (MAMBA, BESIDE):
        config = replace(config, state_norm="before_gate", state_step_min=0.25, state_step_max=1.5)
    made = checkpoint(config, {"layers.0.conv_taps.bias": random_tensor("bias", (40,))} if kind is CONV else {})
    for name in [name for name in made.tensors if name.endswith("_decay.weight")]:
        tensor = made.tensors[name]
        decays = -np.abs(tensor.read(0, DELTA.state_heads)) - np.float32(0.01)
        made.tensors[name] = with_values(tensor, decays)
    with llamac.load(write_model(tmp_path / "m.bin", made)) as model:
        yield model


def history(session: llamac.Session) -> Floats:
    """Logits of sequences that share passes, fork, and are cut where a state is kept."""
    found = [session.eval(IDS[:70], logits="all")]  # a prompt: states are kept at 64 and 70
    for token in IDS[70:74]:  # captured graphs
        found.append(session.eval([token], logits="all"))
    session.copy_sequence(0, 1)
    rows = [(IDS[i], i % 2, 74 + i // 2, True) for i in range(10)]  # segments of one row, by turns
    found.append(session.eval_rows([*rows, (IDS[20], 2, 0, True), (IDS[21], 2, 1, True)]))
    session.truncate(64)
    found.append(session.eval(IDS[64:80], logits="all"))
    session.eval(IDS[:5], sequence=1, logits=None)
    session.truncate(0, sequence=1)
    found.append(session.eval(IDS[3:6], sequence=1, logits="all"))
    return np.concatenate(found)


def test_states_are_computed_forked_and_cut_as_on_the_cpu(model: llamac.Model, device: str) -> None:
    results: list[Floats] = []
    for name in ("cpu", device):
        with model.session(device=name, sequences=3) as session:
            results.append(history(session))
            with session.to(device if name == "cpu" else "cpu") as moved:
                results.append(np.concatenate([results[-1], moved.eval(IDS[80:83], logits="all")]))
            results[-2] = np.concatenate([results[-2], session.eval(IDS[80:83], logits="all")])
    assert np.isfinite(results[0]).all()
    for found in results[1:]:
        np.testing.assert_array_equal(found.view(np.uint32), results[0].view(np.uint32))


def test_prompts_of_several_chunks_have_the_bits_of_the_cpu(model: llamac.Model, device: str) -> None:
    ids = some_ids(300)
    with model.session(context=310) as cpu, model.session(device=device, context=310) as session:
        # as many rows of a chunk as on the CPU, because all want logits
        expected, found = (each.eval(ids, logits="all") for each in (cpu, session))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_observed_stages_have_the_bits_of_the_cpu(model: llamac.Model, device: str) -> None:
    with model.session(context=70) as cpu, model.session(device=device, context=70) as session:
        expected, found = (each.observe(IDS[:9], llamac.STAGES) for each in (cpu, session))
    assert expected.keys() == found.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key].view(np.uint32), values.view(np.uint32), str(key))


def test_an_engine_gives_the_tokens_of_the_cpu(model: llamac.Model, device: str, tmp_path: Path) -> None:
    prompts = [IDS[:70], IDS[:70] + IDS[:12], IDS[30:33]]
    expected = [model.generate(ids, max_tokens=6, seed=4, ignore_eos=True).tokens for ids in prompts]
    with (
        llamac.load(tmp_path / "m.bin", device=device) as on_device,
        llamac.Engine(on_device, max_sequences=2) as engine,
    ):
        results = engine.generate(prompts, max_tokens=6, seed=4, ignore_eos=True, progress=False)
    assert [result.tokens for result in results] == expected


def test_speculation_gives_the_tokens_of_the_cpu(model: llamac.Model, device: str, tmp_path: Path) -> None:
    """Drafts of a tree have states of their own."""
    ids = IDS[:20] + IDS[:12]
    settings: dict[str, Any] = {"max_tokens": 12, "seed": 4, "ignore_eos": True, "speculation": True}
    expected = model.generate(ids, **settings).tokens
    with llamac.load(tmp_path / "m.bin", device=device) as on_device:
        assert on_device.generate(ids, **settings).tokens == expected


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bf16", "f32"), ("q8", "q8"), ("q4", "f16")])
def test_latent_attention_in_every_format_has_the_bits_of_the_cpu(
    tmp_path: Path, device: str, dtype: str, kv_dtype: KVDtype
) -> None:
    """With contexts whose blocks of positions are merged."""
    ids, layer = some_ids(264), replace(LATENT, placement="sandwich")
    experts = replace(
        LATENT, ffn="experts", n_experts=4, n_experts_used=2, shared_ffn_dim=20, router="sigmoid", window=200
    )
    path = write_model(tmp_path / "m.bin", checkpoint(latent_config(layer, experts)), dtype)
    with (
        llamac.load(path, kv_dtype=kv_dtype) as model,
        model.session(context=270) as cpu,
        model.session(device=device, context=270) as session,
    ):
        expected = cpu.eval(ids, logits="all")
        found = [session.eval(ids[first:last], logits="all") for first, last in ((0, 192), (192, 260))]
        found += [session.eval([token], logits="all") for token in ids[260:]]
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(np.concatenate(found).view(np.uint32), expected.view(np.uint32))
