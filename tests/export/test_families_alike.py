"""Families that transformers does not have are read like those that compute the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.cases import LLAMA
from golden.family_cases import FAMILY_CASES
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import Config, Tensors, changed, random_tensor, tensors, write_config, write_safetensors
from hf_reading import parse, read
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.write_config import config_differences

INTERNLM2: Config = {
    **changed(LLAMA, head_dim=None, attention_bias=None, mlp_bias=None),
    "architectures": ["InternLM2ForCausalLM"],
    "bias": True,
    "model_type": "internlm2",
}
# The names of InternLM 2's own code.
OF_INTERNLM2 = (
    (r"^model\.embed_tokens\.", "model.tok_embeddings."),
    (r"^lm_head\.", "output."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
)


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """Assert configs that are equal as float32, and tensors equal bit for bit."""
    assert config_differences(one.config, other.config) == {}
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.array(), other.tensors[name].array(), err_msg=name)


def test_kimi_k2_is_read_like_deepseek_v3(tmp_path: Path) -> None:
    case = FAMILY_CASES["deepseek_v3"]
    folder = family_checkpoint(tmp_path / "a", case)
    other = family_checkpoint(tmp_path / "b", case)
    write_config(other, {**case.config, "model_type": "kimi_k2"})
    assert_same(read(folder), read(other))


def write(folder: Path, config: Config, weights: Tensors) -> Path:
    folder.mkdir()
    write_config(folder, config)
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def fused(config: Config, weights: Tensors) -> Tensors:
    """The tensors of LLaMA as InternLM 2 stores them. Its code: rearrange(qkv, "b q (h gs d) -> b q h gs d")."""
    n_kv, dim = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    found = {}
    for name, values in weights.items():
        new_name = name
        for pattern, replacement in OF_INTERNLM2:
            new_name = re.sub(pattern, replacement, new_name)
        found[new_name] = values
    for name in [name for name in found if ".self_attn.q_proj." in name]:
        heads: list[NDArray[np.float32]] = []
        for part in "qkv":
            values = found.pop(name.replace("q_proj", f"{part}_proj"))
            heads.append(values.reshape(n_kv, -1, dim, *values.shape[1:]))
        joined = np.concatenate(heads, axis=1)
        found[name.replace("self_attn.q_proj", "attention.wqkv")] = joined.reshape(-1, *joined.shape[3:])
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_internlm2_is_read_like_llama(tmp_path: Path, bias: bool, tied: bool) -> None:
    llama = {**LLAMA, "attention_bias": bias, "mlp_bias": False, "tie_word_embeddings": tied}
    weights = tensors(llama)
    config = {**INTERNLM2, "bias": bias, "tie_word_embeddings": tied}
    found = read(write(tmp_path / "internlm2", config, fused(llama, weights)))
    assert found.config.tied_output == tied
    assert_same(found, read(write(tmp_path / "llama", llama, weights)))


def test_internlm2_is_written_under_its_own_names(tmp_path: Path) -> None:
    weights = fused(LLAMA, tensors({**LLAMA, "mlp_bias": False}))
    folder = write(tmp_path / "m", INTERNLM2, weights)
    export(folder, tmp_path / "m.bin", dtype="f32", probe_source=None)
    export(tmp_path / "m.bin", tmp_path / "again", to="hf")
    written = read_safetensors(tmp_path / "again" / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor.lazy().array(), weights[name], err_msg=name)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("internlm2", ["InternLM2ForCausalLM"])


def test_minicpm_is_read_like_granite(tmp_path: Path) -> None:
    common = {**LLAMA, "mlp_bias": False, "tie_word_embeddings": True}
    n_layers, dim, head_dim = common["num_hidden_layers"], common["hidden_size"], common["head_dim"]
    weights = tensors(common)
    granite = {
        **common,
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": head_dim**-0.5,
        "embedding_multiplier": 12,
        "logits_scaling": dim / 16,
        "model_type": "granite",
        "residual_multiplier": 1.4 / n_layers**0.5,
    }
    minicpm = {
        **changed(common, head_dim=None, mlp_bias=None, tie_word_embeddings=None),
        "architectures": ["MiniCPMForCausalLM"],
        "dim_model_base": 16,
        "model_type": "minicpm",
        "num_experts": 0,
        "scale_depth": 1.4,
        "scale_emb": 12,
    }
    assert_same(read(write(tmp_path / "a", minicpm, weights)), read(write(tmp_path / "b", granite, weights)))
    with pytest.raises(UnsupportedError, match=r"num_experts is 8 \(fixed for minicpm\)"):
        parse({**minicpm, "num_experts": 8})
    with pytest.raises(ExportError, match=r"sparse_config is .*: llamac does not know this key"):
        parse({**minicpm, "sparse_config": {"kernel_size": 32}})


def test_mimo_is_read_like_qwen2(tmp_path: Path) -> None:
    """Without its MTP layer."""
    qwen2 = {
        **changed(LLAMA, attention_bias=None, mlp_bias=None),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
    }
    weights = {
        name: values
        for name, values in tensors({**LLAMA, "mlp_bias": False}).items()
        if not name.endswith("o_proj.bias")
    }
    mimo = {**qwen2, "architectures": ["MiMoForCausalLM"], "attention_bias": True, "model_type": "mimo"}
    of_mtp = {f"model.mtp_layers.0.{name}": random_tensor(name, (40,)) for name in ("token_layernorm.weight", "x.bias")}
    folder = write(tmp_path / "a", {**mimo, "num_nextn_predict_layers": 1}, weights | of_mtp)
    assert_same(read(folder), read(write(tmp_path / "b", qwen2, weights)))
    with pytest.raises(UnsupportedError, match="attention_bias is False"):
        parse({**mimo, "attention_bias": False})
