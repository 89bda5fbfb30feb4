"""Tiny Gemma 4 models with assistants, and transformers' results for several drafts in a row.

python -m golden.assistant computes the results again, with torch and transformers, and stores them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.tiny_checkpoints import random_tensor, write_config

PATH = Path(__file__).with_suffix(".npz")
N_DRAFTS = 4
PROMPT = [(5 * i * i + 3 * i + 7) % 96 for i in range(30)]
Config = dict[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
_TEXT: Config = {
    "model_type": "gemma4_unified_text",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    },
    "use_bidirectional_attention": "vision",
    "tie_word_embeddings": True,
}
TRUNK: Config = {
    **_TEXT,
    "architectures": ["Gemma4UnifiedForCausalLM"],
    "num_hidden_layers": 5,
    "layer_types": [FULL, SLIDING, SLIDING, FULL, FULL],
    "final_logit_softcapping": 20.0,
}
PLAIN: Config = {
    "model_type": "gemma4_unified_assistant",
    "architectures": ["Gemma4UnifiedAssistantForCausalLM"],
    "backbone_hidden_size": 24,
    "tie_word_embeddings": True,
    "text_config": {
        **_TEXT,
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL],
        "final_logit_softcapping": 20.0,
    },
}
CLUSTERED: Config = {**PLAIN, "use_ordered_embeddings": True, "num_centroids": 6, "centroid_intermediate_top_k": 2}
ASSISTANTS = {"plain": PLAIN, "clustered": CLUSTERED}


def _shapes(config: Config, *, has_keys: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a text model's tensors."""
    dim, ffn, n = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], dim)}
    for layer, kind in enumerate(config["layer_types"]):
        name, is_full = f"model.layers.{layer}", kind == FULL
        head = config["global_head_dim" if is_full else "head_dim"]
        kv = head * config["num_global_key_value_heads" if is_full else "num_key_value_heads"]
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{name}.{norm}_layernorm.weight"] = (dim,)
        shapes |= {
            f"{name}.self_attn.q_proj.weight": (n * head, dim),
            f"{name}.self_attn.o_proj.weight": (dim, n * head),
            f"{name}.self_attn.q_norm.weight": (head,),
            f"{name}.mlp.gate_proj.weight": (ffn, dim),
            f"{name}.mlp.up_proj.weight": (ffn, dim),
            f"{name}.mlp.down_proj.weight": (dim, ffn),
            f"{name}.layer_scalar": (1,),
        }
        if has_keys:
            shapes |= {f"{name}.self_attn.k_norm.weight": (head,), f"{name}.self_attn.k_proj.weight": (kv, dim)}
        if has_keys and not is_full:
            shapes[f"{name}.self_attn.v_proj.weight"] = (kv, dim)
    return {**shapes, "model.norm.weight": (dim,)}


def tensors(config: Config) -> dict[str, NDArray[Any]]:
    """The tensors of a model or an assistant."""
    if "text_config" not in config:
        return {name: random_tensor(name, shape) for name, shape in _shapes(config, has_keys=True).items()}
    text, dim = config["text_config"], config["backbone_hidden_size"]
    shapes = _shapes(text, has_keys=False)
    shapes["pre_projection.weight"] = (text["hidden_size"], 2 * dim)
    shapes["post_projection.weight"] = (dim, text["hidden_size"])
    found: dict[str, NDArray[Any]] = {}
    if config.get("use_ordered_embeddings"):
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], text["hidden_size"])
        order = np.random.RandomState(5).permutation(text["vocab_size"])
        found["masked_embedding.token_ordering"] = order.astype(np.int64)
    return found | {name: random_tensor(f"assistant {name}", shape) for name, shape in shapes.items()}


def write(folder: Path, config: Config) -> Path:
    """Write the Hugging Face directory of a model or an assistant; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    numbers = {np.dtype(np.float32): "F32", np.dtype(np.int64): "I64"}
    header, data = {}, b""
    for name, values in tensors(config).items():
        header[name] = {
            "dtype": numbers[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + values.nbytes],
        }
        data += values.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def references() -> dict[str, NDArray[np.float32]]:
    """The stored results: "plain.logits" (N_DRAFTS, vocab_size), "plain.states" (N_DRAFTS, dim), ..."""
    with np.load(PATH) as found:
        return dict(found)


def compute(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Compute the results with transformers, in float64, as its candidate generator drives an assistant."""
    import torch
    from transformers import AutoModelForCausalLM

    found: dict[str, NDArray[np.float32]] = {}
    options: Any = {"dtype": torch.float64, "attn_implementation": "eager"}
    trunk: Any = AutoModelForCausalLM.from_pretrained(write(folder / "trunk", TRUNK), **options)
    ids = torch.tensor([PROMPT[:-1]])
    with torch.no_grad():
        run = trunk(ids, output_hidden_states=True, return_shared_kv_states=True)
        for name, config in ASSISTANTS.items():
            assistant: Any = AutoModelForCausalLM.from_pretrained(write(folder / name, config), **options)
            token, state = torch.tensor([[PROMPT[-1]]]), run.hidden_states[-1][:, -1:]
            logits, states = [], []
            for _ in range(N_DRAFTS):
                out = assistant(
                    inputs_embeds=torch.cat([trunk.get_input_embeddings()(token), state], dim=-1),
                    position_ids=torch.tensor([[len(PROMPT) - 1]]),
                    shared_kv_states=run.shared_kv_states,
                )
                token, state = out.logits.argmax(dim=-1), out.last_hidden_state
                logits.append(out.logits[0, 0].numpy())
                states.append(state[0, 0].numpy())
            found[f"{name}.logits"] = np.array(logits, np.float32)
            found[f"{name}.states"] = np.array(states, np.float32)
    return found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        np.savez_compressed(PATH, **compute(Path(made)))
