"""Runs GPT-2 and LLaMA in tinygrad and captures what they compute: the second witness of `llamac check --against`.

tinygrad reads the checkpoint and computes every number. The two graphs follow "Language Models are Unsupervised
Multitask Learners" (2019) and "LLaMA" (arXiv 2302.13971), with the names and the layout of Hugging Face's checkpoints;
they share nothing with the engine. Shapes are the same in all passes of one length, because tinygrad compiles kernels
for shapes: caches have all positions from the beginning, and a mask hides those to come.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llamac.errors import ExportError, UnsupportedError
from llamac.export.parity.capture import WAYS, Capture, Chosen, Floats, Question
from llamac.export.parity.notes import Notes, choose_tokens
from llamac.format.strict_json import read_object

DEVICE = "CPU"
# tinygrad reads these as numbers that select a device; elsewhere they are paths.
HIDDEN = ("PYTHON", "CUDA")


def run_tinygrad(folder: Path, question: Question) -> Capture:
    """Compute a question with tinygrad on the CPU, in float32.

    Args:
        folder: The Hugging Face directory.
        question: The question.

    Raises:
        UnsupportedError: If tinygrad is not installed or cannot compile, or the model is an encoder, is of another
            family, or uses something that the graphs here do not have.
        ExportError: If a tensor is missing.
    """
    if question.is_for_encoder:
        raise UnsupportedError(
            "the witness tinygrad computes no encoders: compare with transformers (without --witness)"
        )
    config = read_object(folder / "config.json")
    graph = GRAPHS.get(str(config.get("model_type")))
    if graph is None:
        raise UnsupportedError(
            f"model_type is {config.get('model_type')!r}, and the witness tinygrad has only "
            f"{' and '.join(sorted(GRAPHS))}: compare with transformers (without --witness)"
        )
    with _hidden_variables():
        version = _check_installed()
        weights = _Weights(folder)
        notes = Notes()
        passes = _Passes(graph(config, weights), question.context)
        for part in question.parts:
            passes.forward(part, notes)

        def choose(way: str) -> Chosen:
            fresh = _Passes(passes.graph, question.context)
            return choose_tokens(question, way, lambda ids: fresh.forward(ids)[-1])

        chosen = {way: choose(way) for way in WAYS}
    return Capture(f"tinygrad {version}", question, notes.stages(len(question.ids)), chosen, config)


@contextlib.contextmanager
def _hidden_variables() -> Iterator[None]:
    """Run a block without variables of the environment that tinygrad would misread."""
    hidden = {name: os.environ.pop(name) for name in HIDDEN if not os.environ.get(name, "0").isdigit()}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _check_installed() -> str:
    """Return tinygrad's version, after a first computation."""
    import importlib.metadata

    try:
        from tinygrad import Tensor
    except ImportError as error:
        raise UnsupportedError(
            f"the witness tinygrad needs the package tinygrad ({error}): pip install tinygrad"
        ) from None
    try:
        (Tensor([1.0], device=DEVICE) + 1).numpy()
    except Exception as error:  # whatever it raises without a compiler
        raise UnsupportedError(
            f"tinygrad cannot compile for the CPU, for which it needs clang: {error!s:.300}"
        ) from None
    return importlib.metadata.version("tinygrad")


class _Weights:
    """The tensors of a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        from tinygrad.nn.state import safe_load

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ExportError(f"{folder} has no *.safetensors, and the witness tinygrad reads nothing else")
        self._tensors: dict[str, Any] = {}
        self._read: dict[str, Any] = {}
        for file in files:
            self._tensors |= safe_load(file)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Any:
        if name not in self._tensors:
            raise ExportError(f"the checkpoint has no tensor {name}")
        if name not in self._read:
            self._read[name] = self._tensors[name].to(DEVICE).float().realize()
        return self._read[name]

    def optional(self, name: str) -> Any:
        """A tensor, or None if the checkpoint has no such tensor."""
        return self[name] if name in self._tensors else None


def _require(config: dict[str, Any], **expected: Any) -> None:
    """Refuse settings other than these. A missing one has the first of its values."""
    for name, values in expected.items():
        found = config.get(name, values[0])
        if found not in values:
            raise UnsupportedError(f"{name} is {found!r}, which the witness tinygrad does not compute")


# ---- passes


class _Passes:
    """Passes over one sequence, whose keys and values they keep."""

    def __init__(self, graph: _Graph, context: int) -> None:
        shape = (graph.n_layers, graph.n_kv_heads, context, graph.head_dim)
        self.graph = graph
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._length = 0

    def forward(self, ids: tuple[int, ...], notes: Notes | None = None) -> Floats:
        """Compute further tokens; return their logits, shape (m, vocab_size)."""
        from tinygrad import Tensor

        begin, end = self._length, self._length + len(ids)
        positions = Tensor(np.arange(begin, end, dtype=np.float32), device=DEVICE)
        context = self._keys.shape[2]
        mask = np.where(np.arange(context) <= np.arange(begin, end)[:, None], 0, -np.inf).astype(np.float32)
        graph, hidden = self.graph, Tensor(mask, device=DEVICE)

        def note(stage: str, layer: int, x: Any) -> Any:
            """Compute a stage (m, width), and note it."""
            x = x.realize()
            if notes is not None:
                notes.note(stage, layer, x.numpy())
            return x

        x = note("embedding", 0, graph.embed(Tensor(np.array(ids, np.int32), device=DEVICE), positions))
        for layer in range(graph.n_layers):
            normed = note("attn_norm", layer, graph.attention_norm(layer, x))
            q, k, v = (heads.realize() for heads in graph.queries_keys_values(layer, normed, positions))
            self._keys[layer, :, begin:end] = k.numpy().transpose(1, 0, 2)
            self._values[layer, :, begin:end] = v.numpy().transpose(1, 0, 2)
            keys, values = (Tensor(part[layer], device=DEVICE) for part in (self._keys, self._values))
            repeats = graph.n_heads // graph.n_kv_heads
            keys, values = (part.repeat_interleave(repeats, dim=0) for part in (keys, values))
            scores = q.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(graph.head_dim) + hidden
            weights = scores.softmax(-1).realize()  # (heads, m, context)
            if notes is not None:
                for stage, heads in (("q", q), ("k", k), ("v", v)):
                    notes.note(stage, layer, _flat(heads.numpy()))
                of_cache = (part[layer, :, :end].transpose(1, 0, 2) for part in (self._keys, self._values))
                notes.note_cache(layer, *map(_flat, of_cache))
                notes.note_weights(layer, weights.numpy().transpose(1, 0, 2)[:, :, :end])
            mix = note("attn_mix", layer, (weights @ values).transpose(0, 1).reshape(len(ids), -1))
            x = (x + note("attn_out", layer, graph.attention_out(layer, mix))).realize()
            normed = note("ffn_norm", layer, graph.ffn_norm(layer, x))
            x = note("block", layer, x + note("ffn", layer, graph.ffn(layer, normed)))
        normed = note("output_norm", 0, graph.output_norm(x))
        self._length = end
        logits: Floats = note("logits", 0, graph.logits(normed)).numpy()
        return logits


def _flat(heads: Floats) -> Floats:
    """(m, heads, head_dim) as (m, heads * head_dim)."""
    return np.ascontiguousarray(heads).reshape(len(heads), -1)


# ---- the two families


class _Graph(Protocol):
    """The parts of a model, each a function of tensors (m, width)."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def embed(self, ids: Any, positions: Any) -> Any: ...

    def attention_norm(self, layer: int, x: Any) -> Any: ...

    def queries_keys_values(self, layer: int, x: Any, positions: Any) -> tuple[Any, Any, Any]:
        """(m, heads, head_dim) each."""

    def attention_out(self, layer: int, mix: Any) -> Any: ...

    def ffn_norm(self, layer: int, x: Any) -> Any: ...

    def ffn(self, layer: int, x: Any) -> Any: ...

    def output_norm(self, x: Any) -> Any: ...

    def logits(self, x: Any) -> Any: ...


class _Llama:
    def __init__(self, config: dict[str, Any], weights: _Weights) -> None:
        _require(config, hidden_act=("silu",))
        self._weights, self._eps = weights, float(config.get("rms_norm_eps", 1e-6))
        self.n_layers, self.n_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        self.n_kv_heads = int(config.get("num_key_value_heads") or self.n_heads)
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // self.n_heads)
        self._frequencies = _frequencies(config, self.head_dim)

    def _linear(self, name: str, x: Any) -> Any:
        return x.linear(self._weights[f"{name}.weight"].T, self._weights.optional(f"{name}.bias"))

    def _norm(self, name: str, x: Any) -> Any:
        return x * (x.square().mean(-1, keepdim=True) + self._eps).rsqrt() * self._weights[f"{name}.weight"]

    def embed(self, ids: Any, positions: Any) -> Any:
        return self._weights["model.embed_tokens.weight"][ids]

    def attention_norm(self, layer: int, x: Any) -> Any:
        return self._norm(f"model.layers.{layer}.input_layernorm", x)

    def queries_keys_values(self, layer: int, x: Any, positions: Any) -> tuple[Any, Any, Any]:
        from tinygrad import Tensor

        q, k, v = (
            self._linear(f"model.layers.{layer}.self_attn.{name}_proj", x).reshape(x.shape[0], -1, self.head_dim)
            for name in "qkv"
        )
        angles = positions.reshape(-1, 1) * Tensor(self._frequencies, device=DEVICE).reshape(1, -1)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)  # the same for all heads

        def rotate(heads: Any) -> Any:
            first, second = heads.chunk(2, dim=-1)
            return (first * cos - second * sin).cat(second * cos + first * sin, dim=-1)

        return rotate(q), rotate(k), v

    def attention_out(self, layer: int, mix: Any) -> Any:
        return self._linear(f"model.layers.{layer}.self_attn.o_proj", mix)

    def ffn_norm(self, layer: int, x: Any) -> Any:
        return self._norm(f"model.layers.{layer}.post_attention_layernorm", x)

    def ffn(self, layer: int, x: Any) -> Any:
        gate, up = (self._linear(f"model.layers.{layer}.mlp.{name}_proj", x) for name in ("gate", "up"))
        return self._linear(f"model.layers.{layer}.mlp.down_proj", gate.silu() * up)

    def output_norm(self, x: Any) -> Any:
        return self._norm("model.norm", x)

    def logits(self, x: Any) -> Any:
        name = "lm_head" if "lm_head.weight" in self._weights else "model.embed_tokens"
        return self._linear(name, x)


def _frequencies(config: dict[str, Any], head_dim: int) -> Floats:
    """RoPE's frequencies, shape (head_dim / 2,): those of the paper, or of Llama 3.1's longer context."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
    found = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if kind == "llama3":
        factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = rope["original_max_position_embeddings"] * found / (2 * math.pi)  # within the original context
        share = np.clip((turns - low) / (high - low), 0, 1)  # of the original frequency
        found = share * found + (1 - share) * found / factor
    elif kind != "default":
        raise UnsupportedError(f"rope_type is {kind!r}, which the witness tinygrad does not compute")
    return found.astype(np.float32)


class _Gpt2:
    def __init__(self, config: dict[str, Any], weights: _Weights) -> None:
        _require(
            config,
            activation_function=("gelu_new", "gelu_pytorch_tanh"),
            scale_attn_weights=(True,),
            scale_attn_by_inverse_layer_idx=(False,),
        )
        self._weights, self._eps = weights, float(config.get("layer_norm_epsilon", 1e-5))
        self._prefix = "transformer." if "transformer.wte.weight" in weights else ""
        self.n_layers, self.n_heads = int(config["n_layer"]), int(config["n_head"])
        self.n_kv_heads, self.head_dim = self.n_heads, int(config["n_embd"]) // self.n_heads

    def _of(self, name: str) -> Any:
        return self._weights[self._prefix + name]

    def _conv1d(self, name: str, x: Any) -> Any:
        return x.linear(self._of(f"{name}.weight"), self._of(f"{name}.bias"))  # stored as (inputs, outputs)

    def _norm(self, name: str, x: Any) -> Any:
        return x.layernorm(eps=self._eps) * self._of(f"{name}.weight") + self._of(f"{name}.bias")

    def embed(self, ids: Any, positions: Any) -> Any:
        return self._of("wte.weight")[ids] + self._of("wpe.weight")[positions.cast("int32")]

    def attention_norm(self, layer: int, x: Any) -> Any:
        return self._norm(f"h.{layer}.ln_1", x)

    def queries_keys_values(self, layer: int, x: Any, positions: Any) -> tuple[Any, Any, Any]:
        q, k, v = self._conv1d(f"h.{layer}.attn.c_attn", x).reshape(x.shape[0], 3, self.n_heads, -1).chunk(3, dim=1)
        return q.squeeze(1), k.squeeze(1), v.squeeze(1)

    def attention_out(self, layer: int, mix: Any) -> Any:
        return self._conv1d(f"h.{layer}.attn.c_proj", mix)

    def ffn_norm(self, layer: int, x: Any) -> Any:
        return self._norm(f"h.{layer}.ln_2", x)

    def ffn(self, layer: int, x: Any) -> Any:
        return self._conv1d(f"h.{layer}.mlp.c_proj", self._conv1d(f"h.{layer}.mlp.c_fc", x).gelu())  # by tanh

    def output_norm(self, x: Any) -> Any:
        return self._norm("ln_f", x)

    def logits(self, x: Any) -> Any:
        head = self._weights.optional("lm_head.weight")
        return x.linear((self._of("wte.weight") if head is None else head).T)


GRAPHS: dict[str, Callable[[dict[str, Any], _Weights], _Graph]] = {"gpt2": _Gpt2, "llama": _Llama}
