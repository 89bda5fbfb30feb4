"""Forward passes built from llamac.ops have the bits of every stage that an observer of the engine sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import checkpoint, gpt2_config, llama_config, some_ids, write_model
from llamac import ops
from llamac.arguments import KVDtype, Numerics

Floats = NDArray[np.float32]
Stages = dict[tuple[str, int], Floats]

IDS = some_ids(70)  # more than a page of the KV cache


class Pass:
    """A forward pass of a model with RMS norms and gated networks, or with layer norms and plain ones.

    Attributes:
        stages: The results, by the engine's names.
    """

    def __init__(self, model: llamac.Model, numerics: Numerics, kv_dtype: KVDtype) -> None:
        self.model, self.numerics, self.kv_dtype = model, numerics, kv_dtype
        self.tensors = {tensor.name: tensor.shape for tensor in model.file.tensors}
        self.is_llama = model.config["norm"] == "rms"
        self.stages: Stages = {}

    def vector(self, name: str) -> Floats | None:
        return self.model.file.tensor(name) if name in self.tensors else None

    def linear(self, x: Floats, name: str) -> Floats:
        matrix = ops.Matrix.of(self.model, f"{name}.weight")
        return ops.matmul(x, matrix, self.vector(f"{name}.bias"), numerics=self.numerics)

    def norm(self, x: Floats, name: str) -> Floats:
        weight, eps = self.model.file.tensor(f"{name}.weight"), self.model.config["norm_eps"]
        return (
            ops.rms_norm(x, weight, eps)
            if self.is_llama
            else ops.layer_norm(x, weight, self.vector(f"{name}.bias"), eps)
        )

    def embedding(self, ids: list[int]) -> Floats:
        x = ops.dequantize(ops.Matrix.of(self.model, "token_embedding.weight"), ids)
        if "position_embedding.weight" in self.tensors:
            x = x + ops.dequantize(ops.Matrix.of(self.model, "position_embedding.weight"), range(len(ids)))
        return self.seen("embedding", 0, x)

    def seen(self, stage: str, layer: int, x: Floats) -> Floats:
        self.stages[stage, layer] = x.reshape(len(x), -1)
        return x

    def attention(self, x: Floats, layer: int) -> Floats:
        config, n = self.model.config, len(x)
        x = self.seen("attn_norm", layer, self.norm(x, f"layers.{layer}.attn_norm"))
        q, k, v = (
            self.linear(x, f"layers.{layer}.attn_{name}").reshape(n, -1, config["head_dim"]) for name in ("q", "k", "v")
        )
        if self.is_llama:
            inv_freq = self.model.file.tensor("rope.0.inv_freq")
            q, k = ops.rope(q, range(n), inv_freq), ops.rope(k, range(n), inv_freq)
        for name, heads in (("q", q), ("k", k), ("v", v)):
            self.seen(name, layer, heads)
        mix = ops.attention(q, k, v, scale=config["attention_scale"], kv_dtype=self.kv_dtype)
        self.seen("attn_mix", layer, mix)
        return self.seen("attn_out", layer, self.linear(mix.reshape(n, -1), f"layers.{layer}.attn_out"))

    def network(self, x: Floats, layer: int) -> Floats:
        x = self.seen("ffn_norm", layer, self.norm(x, f"layers.{layer}.ffn_norm"))
        up = self.linear(x, f"layers.{layer}.ffn_up")
        hidden = ops.silu(self.linear(x, f"layers.{layer}.ffn_gate")) * up if self.is_llama else ops.gelu(up)
        self.seen("ffn_hidden", layer, hidden)
        return self.seen("ffn", layer, self.linear(hidden, f"layers.{layer}.ffn_down"))

    def run(self, ids: list[int]) -> Stages:
        x = self.embedding(ids)
        for layer in range(self.model.config["n_layers"]):
            x = x + self.attention(x, layer)
            x = self.seen("block", layer, x + self.network(x, layer))
        x = self.seen("output_norm", 0, self.norm(x, "output_norm"))
        self.seen("logits", 0, self.linear(x, "token_embedding" if self.model.config["tied_output"] else "output"))
        return self.stages


@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype", "numerics"),
    [
        ("llama", "f32", "f32", "exact"),
        ("llama", "q4", "f16", "exact"),
        ("llama", "q6", "q8", "fast"),
        ("gpt2", "bf16", "f32", "exact"),
        ("gpt2", "q8", "f16", "exact"),
    ],
)
def test_every_stage_has_the_engine_s_bits(
    tmp_path: Path, family: str, dtype: str, kv_dtype: KVDtype, numerics: Numerics
) -> None:
    made = checkpoint(llama_config() if family == "llama" else gpt2_config())
    path = write_model(tmp_path / "model.bin", made, dtype)
    with llamac.load(path, kv_dtype=kv_dtype, numerics=numerics, threads=1) as model:
        found = Pass(model, numerics, kv_dtype).run(IDS)
        with model.session(context=len(IDS)) as session:
            expected = session.observe(IDS, sorted({name for name, _ in found}))
    assert set(expected) == set(found)
    for stage, values in expected.items():
        assert found[stage].tobytes() == values.tobytes(), stage


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01, "seed": 5}]
)
def test_draws_are_those_of_a_generation(tiny_llama: Path, settings: Any) -> None:
    with llamac.load(tiny_llama) as model:
        prompt = IDS[:5]
        expected = model.generate(prompt, max_tokens=12, ignore_eos=True, **settings).tokens
        ids = list(prompt)
        while len(ids) < len(prompt) + 12:
            logits = Pass(model, "exact", "f32").run(ids)["logits", 0][-1]
            ids.append(ops.sample(logits[: model.n_token_ids], position=len(ids), **settings))
    assert ids[len(prompt) :] == list(expected)
