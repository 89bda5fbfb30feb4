"""Models with multi-head latent attention: the definition, and what sessions can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import checkpoint, llama_config, write_model
from llamac import _core
from llamac.cli import run_command
from llamac.errors import ArgumentError
from llamac.export.checkpoint import LayerConfig, ModelConfig

HEADS, RANK, ROTATED, NOPE, VALUE, Q_RANK = 4, 32, 6, 10, 16, 20
FIELDS: dict[str, Any] = {
    "rope": 0,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "latent_norm_eps": 1e-2,
}
WITH_Q = LayerConfig("gated", 40, q_lora_rank=Q_RANK, **FIELDS)
WHOLE_Q = LayerConfig("gated", 40, **FIELDS)
CONTEXT = 700
IDS = [3 + (7 * i * i + 5 * i) % 200 for i in range(400)]


def config() -> ModelConfig:
    return replace(
        llama_config(dim=48, n_heads=HEADS, n_kv_heads=1, context=CONTEXT),
        head_dim=RANK + ROTATED,
        attention_scale=(NOPE + ROTATED) ** -0.5,
        rope_dim=(ROTATED,),
        layers=(WITH_Q, WHOLE_Q),
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("latent") / "model.bin", checkpoint(config()))


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[llamac.Model]:
    with llamac.load(path) as model:
        yield model


@pytest.fixture(scope="module")
def logits(model: llamac.Model) -> NDArray[Any]:
    """The logits of IDS, computed at once."""
    with model.session() as session:
        return session.eval(IDS, logits="all")


def rotate(x: NDArray[Any], angles: NDArray[Any]) -> NDArray[Any]:
    """Rotate the pairs (j, j + half) of the last axis."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def expanded(model: llamac.Model, layer: int, h: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Attention as DeepSeek-V2's authors define it, with keys and values of each head: its mix, and its result."""

    def weight(name: str) -> NDArray[Any]:
        return model.file.tensor(f"layers.{layer}.attn_{name}.weight").astype(np.float64)

    def norm(x: NDArray[Any], name: str) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * weight(name)

    n, inputs = len(h), h
    if model.file.layers[layer]["q_lora_rank"]:
        inputs = norm(h @ weight("q_a").T, "q_a_norm")
    q = (inputs @ weight("q").T).reshape(n, HEADS, ROTATED + NOPE)
    kv = h @ weight("kv_a").T
    latent = norm(kv[:, ROTATED:], "kv_a_norm")
    w_k, w_v = weight("k_b").reshape(HEADS, RANK, NOPE), weight("v_b").reshape(HEADS, VALUE, RANK)
    keys, values = np.einsum("pr,hrn->phn", latent, w_k), np.einsum("pr,hvr->phv", latent, w_v)
    angles = np.arange(n)[:, None] * model.file.tensor("rope.0.inv_freq").astype(np.float64)
    q_rotated, k_rotated = rotate(q[..., :ROTATED], angles[:, None]), rotate(kv[:, :ROTATED], angles)
    scores = np.einsum("ihn,jhn->hij", q[..., ROTATED:], keys) + np.einsum("ihr,jr->hij", q_rotated, k_rotated)
    scores = np.where(np.tri(n, dtype=bool), scores * (NOPE + ROTATED) ** -0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    mix = np.einsum("hij,jhv->ihv", p / p.sum(-1, keepdims=True), values).reshape(n, -1)
    return mix, mix @ weight("out").T


def test_latent_attention_computes_its_definition(model: llamac.Model) -> None:
    with model.session(kv_dtype="f32") as session:
        found = session.observe(IDS[:70], ["attn_norm", "attn_mix", "attn_out", "k", "cache_k", "cache_v"])
    for layer in (0, 1):
        mix, out = expanded(model, layer, found["attn_norm", layer].astype(np.float64))
        np.testing.assert_allclose(found["attn_mix", layer][:, : HEADS * VALUE], mix, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found["attn_out", layer], out, rtol=1e-4, atol=2e-4)
        np.testing.assert_array_equal(found["cache_k", layer], found["k", layer])
        latent = found["cache_v", layer].reshape(70, -1)[:, :RANK]
        np.testing.assert_array_equal(latent, found["k", layer].reshape(70, -1)[:, ROTATED:])
        assert np.abs(mix[40:]).max() > 1e-2


@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "q8"])
def test_the_bits_do_not_depend_on_chunks_threads_or_kernels(model: llamac.Model, kv_dtype: Any) -> None:
    with model.session(kv_dtype=kv_dtype, threads=1) as session:
        whole = session.eval(IDS[:90], logits="all")
    for isa in [name for name, is_supported in _core.isas() if is_supported]:
        for threads, sizes in ((1, (1,)), (2, (3, 40, 1)), (3, (64, 5))):
            with model.session(kv_dtype=kv_dtype, threads=threads, isa=isa) as session:
                at, parts = 0, list[NDArray[Any]]()
                while at < 90:
                    size = min(sizes[len(parts) % len(sizes)], 90 - at)
                    parts.append(session.eval(IDS[at : at + size], logits="all"))
                    at += size
            np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_sequences_are_cut_forked_and_saved(model: llamac.Model, logits: NDArray[Any], tmp_path: Path) -> None:
    with model.session(sequences=2) as session, model.session(sequences=2) as other:
        session.eval(IDS[:300], logits=None)
        for length in (299, 130, 64, 1):
            session.truncate(length)
            with session.fork(length=length) as fork:
                np.testing.assert_array_equal(fork.eval(IDS[length : length + 2]), logits[length + 1])
            np.testing.assert_array_equal(session.eval(IDS[length : length + 3]), logits[length + 2])
        session.copy_sequence(0, 1)
        session.save(tmp_path / "session")
        other.load(tmp_path / "session")
        np.testing.assert_array_equal(other.eval(IDS[4:9], sequence=1), logits[8])


def test_a_shift_rotates_the_shared_part_of_the_keys(model: llamac.Model) -> None:
    """After positions are removed, keys are those of their new positions, up to rounding; values are the same."""
    with model.session(kv_dtype="f32") as session, model.session(kv_dtype="f32") as fresh:
        session.eval(IDS[:40], logits=None)
        session.shift(8, 16)
        fresh.eval([*IDS[:8], *IDS[16:40]], logits=None)
        # layer 0 reads only embeddings, so its keys do not depend on the removed positions
        found, expected = (one.observe(IDS[40:41], ["scores"])["scores", 0] for one in (session, fresh))
        np.testing.assert_allclose(found[..., :33], expected[..., :33], rtol=1e-3, atol=1e-3)


def test_the_cache_holds_one_head_of_the_latent(model: llamac.Model) -> None:
    with model.session(kv_dtype="f32") as session:
        session.eval(IDS[:64], logits=None)
        page = 64 * 2 * 4 * (RANK + ROTATED + RANK)
        assert page <= session.memory()["kv"] <= page + 4096


def test_an_engine_gives_each_request_its_own_tokens(model: llamac.Model) -> None:
    prompts = [IDS[:200], IDS[:150], [*IDS[:199], 9, 10], IDS[200:230]]
    options: dict[str, Any] = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    expected = [model.generate(prompt, **options).tokens for prompt in prompts]
    with llamac.Engine(model) as engine:
        for _ in range(2):
            requests = [engine.submit(prompt, **options) for prompt in prompts]
            assert [request.result().tokens for request in requests] == expected
        cached = engine.submit(IDS[:200], **options).result()
        assert cached.tokens == expected[0]
        assert cached.usage.cached_tokens >= 128


@pytest.mark.parametrize("dtype", ["q8", "q4", "q4s"])
def test_quantized_weights_are_close(path: Path, model: llamac.Model, tmp_path: Path, dtype: str) -> None:
    target = write_model(tmp_path / "model.bin", checkpoint(config()), dtype)
    with llamac.load(target) as small, small.session(threads=2) as session:
        found, exact = session.eval(IDS[:40], logits="all"), model.logits(IDS[:40])
        steps = np.stack([session.eval([token], sequence=0) for token in IDS[40:44]])
        session.truncate(40)
        np.testing.assert_array_equal(session.eval(IDS[40:44], logits="all"), steps)
    errors = np.abs(found - exact).max(-1) / np.abs(exact).max(-1)
    assert 0 < np.median(errors) < (0.1 if dtype == "q8" else 0.8)  # random weights amplify some rows


def test_matrices_of_single_heads_have_no_adapters(path: Path) -> None:
    with llamac.load(path) as model:
        flat = memoryview(np.zeros(16 * 64, np.float32).tobytes()).cast("f")
        with pytest.raises(ArgumentError, match="matrices of single heads cannot have adapters"):
            model.file.core.adapt("layers.0.attn_k_b.weight", 1, flat, flat, None)


def test_inspect_names_the_latent(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", str(path)]) == 0
    assert "4 heads (1 KV) of 38, a latent of 32" in capsys.readouterr().out
