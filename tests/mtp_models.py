"""Tiny models with an MTP layer, and its equations in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recurrent_models import GATED, config, delta_nets

import llamac
from builders import checkpoint, llama_config
from golden.tiny_checkpoints import random_tensor
from llamac import _core
from llamac.engine.rows import appended_rows, as_ids
from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.equations import rms_norm
from llamac.export.reference import forward_part
from llamac.export.rounding import Array

LATENT = LayerConfig(
    "gated",
    40,
    rope=0,
    q_lora_rank=20,
    kv_lora_rank=32,
    qk_nope_head_dim=10,
    v_head_dim=16,
    latent_norm_eps=1e-6,
)
LATENT_EXPERTS = replace(
    LATENT,
    ffn="experts",
    ffn_dim=24,
    n_experts=4,
    n_experts_used=2,
    router="sigmoid",
    router_choice_bias=1,
    expert_weights=1,
    expert_weights_eps=1e-20,
    expert_scale=2.5,
    shared_ffn_dim=20,
)


def attention_config() -> ModelConfig:
    """Two layers of gated attention and an MTP layer, as in Qwen 3.5."""
    return replace(config(), layers=(GATED, GATED), mtp=GATED)


def latent_config() -> ModelConfig:
    """Latent attention, experts in all layers but the first, and an MTP layer, as in DeepSeek V3."""
    return replace(
        llama_config(dim=48, n_heads=4, n_kv_heads=1, context=900),
        head_dim=32 + 6,
        attention_scale=(10 + 6) ** -0.5,
        rope_dim=(6,),
        layers=(LATENT, LATENT_EXPERTS),
        mtp=LATENT_EXPERTS,
    )


def post_config() -> ModelConfig:
    """Norms after attention and after the network, windows, and an MTP layer, as in EXAONE 4.5."""
    layer = LayerConfig("gated", 40, placement="post", window=5, rope=0)
    return replace(attention_config(), layers=(replace(layer, window=0, rope=-1), layer), mtp=layer)


def with_mtp(made: Checkpoint) -> Checkpoint:
    """The model with a random MTP layer of gated attention."""
    wanted = replace(made.config, mtp=GATED)
    return replace(made, config=wanted, tensors={**checkpoint(wanted).tensors, **made.tensors})


def mtp_model() -> Checkpoint:
    """A model with recurrent layers and an MTP layer."""
    return with_mtp(delta_nets())


def attention_model() -> Checkpoint:
    """A model with two layers of attention and an MTP layer."""
    return checkpoint(attention_config())


def latent_model() -> Checkpoint:
    """A model with latent attention and experts, in its MTP layer as well."""
    return checkpoint(latent_config())


def cyclic(step: int, model: ModelConfig | None = None) -> Checkpoint:
    """A model in which token t is followed by t + 7, and the MTP layer's prediction is t + `step` after token t.

    All branches of the layers are zero, so a hidden state is a normed embedding. Row t of the output matrix is the
    embedding of token t - 7. `mtp.in` reads only the embedding of the next token.
    """
    made = checkpoint(replace(model or attention_config(), tied_output=False))
    n, dim = made.config.vocab_size, made.config.dim
    embedding = random_tensor("embedding", (n, dim))
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    ids = np.arange(n)
    given = {
        "token_embedding.weight": embedding,
        "output.weight": embedding[(ids - 7) % made.config.n_token_ids] * 20,
        "mtp.in.weight": np.hstack([np.eye(dim, dtype=np.float32), np.zeros((dim, dim), np.float32)]),
    }
    given |= {
        name: np.zeros(tensor.shape, np.float32)
        for name, tensor in made.tensors.items()
        if name.endswith(("attn_out.weight", "ffn_down.weight"))
    }
    norms = ("output_norm", "mtp.embedding_norm", "mtp.hidden_norm", "mtp.output_norm")
    given |= {f"{name}.weight": np.ones(dim, np.float32) for name in norms}
    if step != 7:  # the layer's own hidden states are those of other tokens
        turn = np.linalg.lstsq(embedding, embedding[(ids + step - 7) % made.config.n_token_ids], rcond=None)[0]
        given["mtp.in.weight"][:, :dim] = turn.T
    return replace(made, tensors={**made.tensors, **{name: LazyTensor.of(values) for name, values in given.items()}})


def continue_cyclic(session: llamac.Session, prompt: list[int]) -> list[int]:
    """Generate 13 tokens with the model `cyclic(7)`, all of whose drafts must be right. Returns the whole text."""
    found = session.generate(prompt, max_tokens=13, temperature=0, ignore_eos=True)
    n = session.model.n_token_ids
    assert found.tokens == [(prompt[-1] + 7 * i) % n for i in range(1, 14)]
    assert found.usage.drafted_tokens == found.usage.accepted_tokens == 10
    return [*prompt, *found.tokens]


def hidden_of(model: llamac.Model, ids: list[int], n: int | None = None, **options: Any) -> NDArray[np.float32]:
    """The hidden states of the last n tokens, computed at once."""
    hidden = np.empty((len(ids) if n is None else n, model.config["dim"]), np.float32)
    with model.session(**options) as session:
        session._core.eval_rows(appended_rows(as_ids(ids), 0, 0, "last"), hidden=hidden.data)
    return hidden


def mtp_logits(
    model: llamac.Model, tokens: list[int], hidden: NDArray[np.float32], pieces: list[int], **options: Any
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What a session of the MTP layer computes in pieces of these sizes: hidden states and logits."""
    core = _core.Session(model._core, context=len(tokens), mtp=True, **options)
    states = np.empty_like(hidden)
    logits = np.empty((len(tokens), core.vocab_size), np.float32)
    start = 0
    for size in pieces:
        end = start + size
        rows = appended_rows(as_ids(tokens[start:end]), 0, start, "all")
        core.eval_rows(
            rows, logits[start:end].reshape(-1).data, inputs=hidden[start:end].data, hidden=states[start:end].data
        )
        start = end
    core.close()
    return states, logits


def mtp_reference(made: Checkpoint, tokens: list[int], hidden: Array) -> tuple[Array, Array]:
    """The MTP layer's hidden states and logits in float64, at positions 0, 1, ...

    Args:
        made: The model.
        tokens: The token after each position.
        hidden: (n, dim): the model's normed hidden state at each position.
    """
    config, tensors = made.config, made.tensors

    def norm(x: Array, name: str) -> Array:
        return rms_norm(x, tensors[f"mtp.{name}.weight"].array().astype(np.float64), config.norm_eps)

    embedding = tensors["token_embedding.weight"].array().astype(np.float64)
    pair = np.hstack([norm(embedding[tokens], "embedding_norm"), norm(hidden.astype(np.float64), "hidden_norm")])
    own = f"layers.{len(config.layers)}."
    alone = {name.replace(own, "layers.0.", 1): tensor for name, tensor in tensors.items() if name.startswith(own)}
    alone |= {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    stages: dict[str, Array] = {}
    forward_part(
        Checkpoint(replace(config, layers=made.config.all_layers[-1:], mtp=None), alone),
        tokens,
        0,
        pair @ tensors["mtp.in.weight"].array().astype(np.float64).T,
        context=config.context,
        observe=lambda stage, layer, values: stages.update({stage: values}),
    )
    found = norm(stages["block"], "output_norm")
    output = embedding if config.tied_output else tensors["output.weight"].array().astype(np.float64)
    return found, found @ output.T
