"""Encoders from GGUF files: llama.cpp's names of tensors and keys, written here from transformers' names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_samples import checkpoint_tensors, converted, finish, metadata, write_tensors
from nomic_moe_samples import DIM, EXPERTS, IDS, WIDTH, moe_rows, moe_tensors
from numpy.typing import NDArray

import llamac
from golden.encoder_cases import ENCODER_CASES
from golden.make_encoders import encoder_checkpoint
from golden.tiny_checkpoints import Config, random_tensor
from llamac import ExportError, UnsupportedError
from llamac.errors import LlamacWarning
from llamac.export.checkpoint import Checkpoint
from llamac.export.gguf.model import read
from llamac.export.gguf.write_keys import add_keys
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors

Arrays = dict[str, NDArray[np.float32]]

BERT_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "encoder.layer.": "blk.",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
NOMIC_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "encoder.layers.": "blk.",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
}
GEMMA_NAMES = {
    "embed_tokens": "token_embd",
    "layers.": "blk.",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_attention_layernorm": "post_attention_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Of nomic-embed-text-v2-moe and jina-embeddings-v3.
ROTARY_NAMES = {
    "roberta.": "",
    **{name: ours for name, ours in NOMIC_NAMES.items() if not name.startswith("mlp.")},
    "mixer.Wqkv": "attn_qkv",
    "mixer.out_proj": "attn_output",
    "mlp.router.layer": "ffn_gate_inp",
    "mlp.experts.mlp.w1": "ffn_up_exps.weight",
    "mlp.experts.mlp.w2": "ffn_down_exps.weight",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
MODERN_NAMES = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "layers.": "blk.",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "final_norm": "output_norm",
}
KEYS: dict[str, dict[str, Any]] = {
    "bert": {
        "context_length": 64,
        "embedding_length": 40,
        "feed_forward_length": 52,
        "block_count": 3,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 0.05,
        "attention.causal": False,
        "pooling_type": 2,
    },
    "nomic-bert": {
        "context_length": 64,
        "embedding_length": 40,
        "feed_forward_length": 52,
        "block_count": 3,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 0.05,
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": 500.0,
    },
    "modern-bert": {
        "context_length": 64,
        "embedding_length": 40,
        "feed_forward_length": 52,
        "block_count": 4,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 0.05,
        "attention.causal": False,
        "attention.sliding_window": 14,
        "attention.sliding_window_pattern": 2,
        "hidden_activation": "gelu",
        "pooling_type": 1,
        "rope.freq_base": 500.0,
        "rope.freq_base_swa": 100.0,
        "rope.scaling.type": "none",
    },
    "jina-bert-v3": {
        "context_length": 64,
        "embedding_length": 40,
        "feed_forward_length": 52,
        "block_count": 3,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon": 0.05,
        "attention.causal": False,
        "pooling_type": 1,
        "rope.freq_base": 500.0,
    },
    "gemma-embedding": {
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 52,
        "block_count": 4,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 10,
        "attention.value_length": 10,
        "attention.layer_norm_rms_epsilon": 0.9,
        "attention.sliding_window": 14,
        "pooling_type": 1,
        "rope.freq_base": 5000.0,
        "rope.freq_base_swa": 100.0,
    },
}
KEYS["nomic-bert-moe"] = {**KEYS["jina-bert-v3"], "expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2}
NO_VOCABULARY = {"tokenizer.ggml.model": "no_vocab"}
CASES = {
    "bert": "bert",
    "nomic-bert": "nomic_bert",
    "jina-bert-v3": "jina_embeddings_v3",
    "gemma-embedding": "gemma3_text",
    "modern-bert": "modernbert",
}
NAMES = {
    "bert": BERT_NAMES,
    "nomic-bert": NOMIC_NAMES,
    "jina-bert-v3": ROTARY_NAMES,
    "gemma-embedding": GEMMA_NAMES,
    "modern-bert": MODERN_NAMES,
}


def tensors_of(folder: Path, architecture: str) -> Arrays:
    """The tensors of a case under llama.cpp's names, without BERT's pooler."""
    found = {}
    for name, tensor in read_safetensors(folder / "model.safetensors").items():
        values = tensor.lazy().array()
        if "pooler" in name:
            continue
        if architecture == "gemma-embedding" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        renamed = name.removeprefix("model.")
        for theirs, ours in NAMES[architecture].items():
            renamed = renamed.replace(theirs, ours)
        found["output_norm.weight" if renamed == "norm.weight" else renamed] = values
    return found


def write(path: Path, architecture: str, tensors: Arrays, **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    keys = {"vocab_size": len(tensors["token_embd.weight"]), **KEYS[architecture], **changes}
    add_keys(writer, {f"{architecture}.{key}": value for key, value in keys.items()})
    add_keys(writer, {**NO_VOCABULARY, "tokenizer.ggml.token_type_count": len(tensors.get("token_types.weight", [0]))})
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def assert_same(found: Checkpoint, expected: Checkpoint) -> None:
    eps = float(np.float32(expected.config.norm_eps))
    assert found.config == replace(expected.config, norm_eps=eps)
    assert found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_allclose(found.tensors[name].array(), tensor.array(), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert", "jina-bert-v3", "modern-bert"])
def test_the_checkpoint_is_that_of_the_directory(tmp_path: Path, architecture: str) -> None:
    folder = encoder_checkpoint(tmp_path / "model", ENCODER_CASES[CASES[architecture]])
    path = write(tmp_path / "model.gguf", architecture, tensors_of(folder, architecture))
    assert_same(read(path, []), hf.read(folder, []))
    assert read(path, []).metadata["pooling"] == ("cls" if architecture == "bert" else "mean")
    with pytest.warns(LlamacWarning, match="no tokenizer"), llamac.load(path) as model:
        assert model.embed([5, 6, 7]).shape == (40,)


def write_decoder(path: Path, architecture: str, config: Config, stored: Arrays) -> Path:
    """Write a decoder that attends to both sides."""
    named = {full if full.startswith("model.") else f"model.{full}": values for full, values in stored.items()}
    keys = {f"{architecture}.{key}": value for key, value in metadata(config)[1].items()}
    tensors = converted(config, {full: values for full, values in named.items() if "lm_head" not in full})
    causal = {f"{architecture}.attention.causal": False}
    return write_tensors(path, tensors, keys={**NO_VOCABULARY, **keys, **causal}, arch=architecture)


@pytest.mark.parametrize(("architecture", "name"), [("llama-embed", "llama"), ("eurobert", "eurobert")])
def test_decoders_that_attend_to_both_sides_are_those_of_the_directory(
    tmp_path: Path, architecture: str, name: str
) -> None:
    case = ENCODER_CASES[name]
    folder = encoder_checkpoint(tmp_path / "model", case)
    path = write_decoder(tmp_path / "model.gguf", architecture, case.config, checkpoint_tensors(folder))
    assert_same(read(path, []), hf.read(folder, []))
    assert read(path, []).metadata["architecture"] == {"llama": "llama_bidirec"}.get(name, name)


def write_moe(path: Path, stored: Arrays) -> Path:
    """Write nomic-embed-text-v2-moe. The converter turns the matrices of inputs of the second product."""
    tensors = {}
    for name, values in stored.items():
        renamed = name
        for theirs, ours in ROTARY_NAMES.items():
            renamed = renamed.replace(theirs, ours)
        if ".mlp.w" in name:
            values = values.reshape(EXPERTS, WIDTH, DIM)
            values = values if name.endswith("1") else values.swapaxes(1, 2)
        if not name.endswith("experts.bias"):
            tensors[renamed] = np.ascontiguousarray(values)
    return write(path, "nomic-bert-moe", tensors)


def test_experts_of_nomic_bert_lack_the_bias_that_they_share(tmp_path: Path) -> None:
    """llama.cpp's converter leaves it out."""
    stored = {name: values * np.float32(not name.endswith("experts.bias")) for name, values in moe_tensors().items()}
    path = write_moe(tmp_path / "model.gguf", stored)
    warnings: list[str] = []
    read(path, warnings)
    assert [warning[:59] for warning in warnings] == ["the file lacks the bias that the experts of a layer share, "]
    llamac.export.export(path, tmp_path / "moe.bin")
    expected = moe_rows(stored).mean(axis=0)
    with llamac.load(tmp_path / "moe.bin") as model:
        np.testing.assert_allclose(model.embed(IDS, normalize=False), expected, rtol=0, atol=1e-4)


def test_embedding_gemma_has_windows_on_both_sides_and_dense_layers(tmp_path: Path) -> None:
    folder = encoder_checkpoint(tmp_path / "model", ENCODER_CASES["gemma3_text"])
    tensors = tensors_of(folder, "gemma-embedding")
    dense = {"dense_2.weight": random_tensor("a", (96, 64)), "dense_3.weight": random_tensor("b", (64, 96))}
    path = write(tmp_path / "model.gguf", "gemma-embedding", tensors | dense, dense_2_feat_in=64)
    found, expected = read(path, []), hf.read(folder, [])
    assert found.config.pooled_dim == (96, 64)
    assert [layer.window for layer in found.config.layers] == [8, 8, 8, 8]  # every sixth layer sees all positions
    assert {layer.window for layer in expected.config.layers} == {0, 8}
    for name, tensor in expected.tensors.items():
        if not name.startswith("rope."):
            np.testing.assert_allclose(found.tensors[name].array(), tensor.array(), rtol=1e-6, err_msg=name)
    with pytest.warns(LlamacWarning, match="no tokenizer"), llamac.load(path) as model:
        assert model.embed([5, 6, 7]).shape == (64,)


@pytest.mark.parametrize("name", ["xlm-roberta-scores", "roberta-scores"])
def test_cross_encoders_are_those_of_the_directory(tmp_path: Path, name: str) -> None:
    """As the converter writes them: without the positions that RoBERTa does not use, and with two more layers."""
    folder = encoder_checkpoint(tmp_path / "model", ENCODER_CASES[name])
    expected = hf.read(folder, [])
    tensors = {}
    for full, values in tensors_of(folder, "bert").items():
        renamed = (
            full.removeprefix("roberta.")
            .replace("classifier.dense", "cls")
            .replace("classifier.out_proj", "cls.output")
        )
        tensors[renamed] = values[-expected.config.context :] if renamed == "position_embd.weight" else values
    path = write(tmp_path / "model.gguf", "bert", tensors, context_length=expected.config.context, pooling_type=4)
    found = read(path, [])
    assert_same(found, expected)
    assert found.metadata["pair_separators"] == expected.metadata["pair_separators"] == 2
    assert found.metadata["pooling"] == expected.metadata["pooling"] == "cls"


def test_other_files_are_refused(tmp_path: Path) -> None:
    folder = encoder_checkpoint(tmp_path / "model", ENCODER_CASES["bert"])
    tensors = tensors_of(folder, "bert")
    with pytest.raises(ExportError, match=r"bert\.attention\.causal is True, expected false"):
        read(write(tmp_path / "causal.gguf", "bert", tensors, **{"attention.causal": True}), [])
    square = tensors["blk.0.attn_q.weight"]
    for more in (
        {"cls.weight": square},
        {"cls.output.weight": square[:1]},
        {"cls.weight": square, "cls.output.weight": square},
    ):
        with pytest.raises(UnsupportedError, match="is a cross-encoder, but not one of RoBERTa"):
            read(write(tmp_path / "scores.gguf", "bert", {**tensors, **more}), [])
    kept = {name: values for name, values in tensors.items() if name != "blk.1.layer_output_norm.bias"}
    with pytest.raises(ExportError, match=r"missing: blk\.1\.layer_output_norm\.bias"):
        read(write(tmp_path / "missing.gguf", "bert", kept), [])
    modern = tensors_of(encoder_checkpoint(tmp_path / "modern", ENCODER_CASES["modernbert"]), "modern-bert")
    with pytest.raises(UnsupportedError, match="hidden_activation is 'relu'; supported are gelu, silu"):
        read(write(tmp_path / "relu.gguf", "modern-bert", modern, hidden_activation="relu"), [])
    scores = {"cls.weight": square, "cls.output.weight": square[:1], "cls.norm.weight": square[0]}
    with pytest.raises(UnsupportedError, match="is a cross-encoder, but not one of RoBERTa"):
        read(write(tmp_path / "modern.gguf", "modern-bert", {**modern, **scores}), [])
