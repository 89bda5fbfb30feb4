"""The network of `helper`: Qwen3's architecture in plain PyTorch, with the tensor names of its checkpoints.

The training uses this network and not transformers', because it takes a mask per document and compiles as a whole. A
test compares the two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .vocabulary import CONTEXT, SIZE

THETA = 1_000_000.0
EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a network."""

    vocabulary: int = SIZE
    width: int = 512
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 128
    hidden: int = 896

    def config(self) -> dict[str, Any]:
        """The config.json of the checkpoint."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "max_position_embeddings": CONTEXT,
            "rope_theta": THETA,
            "rms_norm_eps": EPSILON,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class Norm(nn.Module):  # type: ignore[misc]
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension, in the type of x."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), EPSILON)


class Attention(nn.Module):  # type: ignore[misc]
    """Grouped-query attention with norms of q and k and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)
        self.q_norm = Norm(shape.head)
        self.k_norm = Norm(shape.head)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """x: (rows, length, width). mask: what to add to the scores, (rows or 1, 1, length, length)."""
        rows, length, _ = x.shape
        head, keys = self.shape.head, self.shape.kv_heads
        group = self.shape.heads // keys
        q = self.q_norm(self.q_proj(x).view(rows, length, -1, head)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, -1, head)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, -1, head).transpose(1, 2)
        q, k = rotated(q, turn), rotated(k, turn)
        # All scores at once, as products of whole matrices: for short rows, CPUs with bf16 instructions are faster so
        # than with PyTorch's attention, which works block by block. The heads of a group share one product.
        q = q.reshape(rows * keys, group * length, head)
        scores = torch.bmm(q, k.reshape(rows * keys, length, head).transpose(1, 2)).view(rows, -1, length, length)
        weights = torch.softmax(scores.float() * head**-0.5 + mask, dim=-1).to(x.dtype)
        mixed = torch.bmm(weights.view(rows * keys, group * length, length), v.reshape(rows * keys, length, head))
        mixed = mixed.view(rows, -1, length, head).transpose(1, 2).reshape(rows, length, -1)
        out: Tensor = self.o_proj(mixed)
        return out


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the position's angles."""
    cos, sin = (part.to(x.dtype) for part in turn)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Feed(nn.Module):  # type: ignore[misc]
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated network to each position."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and feed-forward network, each after a norm and with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.width)
        self.mlp = Feed(shape)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """One layer."""
        x = x + self.self_attn(self.input_layernorm(x), turn, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):  # type: ignore[misc]
    """The whole network; its output layer is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocabulary, shape.width),
                "layers": nn.ModuleList(Layer(shape) for _ in range(shape.layers)),
                "norm": Norm(shape.width),
            }
        )
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # The outputs of a layer are added up, so they begin smaller.
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)

    def forward(self, ids: Tensor, documents: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """Return the logits of ids (rows, length).

        documents: the number of the document that each id belongs to; without it, a row is one document.
        places: numbers of the positions, counted over all rows, whose logits are returned: (places, vocabulary).
        """
        x = self.model["embed_tokens"](ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        half = torch.arange(0, self.shape.head, 2, device=ids.device, dtype=torch.float32) / self.shape.head
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32), THETA**-half)
        angles = torch.cat((angles, angles), dim=-1)
        turn = angles.cos(), angles.sin()
        mask = mask_of(torch.zeros_like(ids[:1]) if documents is None else documents)
        for layer in self.model["layers"]:
            x = layer(x, turn, mask)
        x = self.model["norm"](x)
        if places is not None:
            x = x.view(-1, self.shape.width)[places]
        return functional.linear(x, self.model["embed_tokens"].weight)


def mask_of(documents: Tensor) -> Tensor:
    """What to add to scores: 0 where a position may look (earlier in its own document, or at itself), else very low."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    seen = same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()
    return torch.where(seen, 0.0, -1e4)


def save(network: Network, directory: Path, shard_bytes: int = 15_000_000) -> None:
    """Write config.json, generation_config.json and the weights in bf16, in files of at most `shard_bytes`."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(network.shape.config(), indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, weight in network.state_dict().items():
        if used + 2 * weight.numel() > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = weight.detach().to("cpu", torch.bfloat16).contiguous()
        used += 2 * weight.numel()
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    where: dict[str, str] = {}
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, str(directory / file), metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(2 * w.numel() for shard in shards for w in shard.values())}}
    document = json.dumps(index | {"weight_map": where}, indent=1)
    (directory / "model.safetensors.index.json").write_text(document + "\n", encoding="utf-8")


def load(network: Network, directory: Path) -> None:
    """Read the weights of a checkpoint directory, such as one that `save` or `llamac export` wrote."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(directory.glob("model*.safetensors")):
        weights |= load_file(str(file))
    network.load_state_dict(weights)
