"""Each family imported from GGUF against the import of its checkpoint, which test_parity_families tests.

transformers is the reference of those tests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import checkpoint_tensors, converted, metadata, write_gguf, write_tensors
from numpy.typing import NDArray

import golden.cases
import llamac
from golden.cases import MIN_EFFECT, TOLERANCE, Case
from golden.delta_net_cases import DELTA_NET_CASES
from golden.family_cases import FAMILY_CASES
from golden.gemma4_cases import GEMMA4_CASES
from golden.make import relative_errors
from golden.make_families import family_checkpoint
from golden.mamba_cases import MAMBA_CASES
from golden.recurrent_cases import RECURRENT_CASES
from llamac.errors import ExportError, LlamacError, UnsupportedError
from llamac.export.checkpoint import LayerConfig
from llamac.export.convert import export
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.config import parse_config
from llamac.export.gguf.families import ARCHITECTURES
from llamac.export.gguf.file import open_gguf
from llamac.export.gguf.llama4 import has_norms
from llamac.export.hf import model as hf_model
from llamac.export.hf.families import FAMILIES
from llamac.export.hf.write_config import config_differences
from llamac.format.gguf_metadata import Value

Logits = NDArray[np.float32]
YARN = {**golden.cases.YARN, "truncate": True}  # llama.cpp always rounds

# llama.cpp knows only these scales, the original context that is the model's, and equal factors of YaRN.
_LONGROPE = {**golden.cases.LONGROPE, "original_max_position_embeddings": 64}
_LONGROPE |= {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0]}
_MAMBA: dict[str, object] = {"position_embedding_type": "nope"}
_MINICPM: dict[str, object] = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
# GGUF cannot express other windows, intervals, activations or scales than these. Shapes are the base case's.
CASES: dict[str, dict[str, object]] = {
    "arcee": {},
    "bitnet-attention_bias": {"hidden_act": "silu"},  # of llama.cpp
    "arcee-attention_bias": {},
    "arcee-yarn": {"rope_scaling": YARN},
    "mistral": {},
    "mistral-no_window": {},
    "mistral-tied": {},
    "mistral-yarn": {},
    "qwen2": {"use_sliding_window": False},
    "qwen2-tied": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3-attention_bias": {"use_sliding_window": False},
    "smollm3": {"no_rope_layer_interval": 4},
    "smollm3-llama3": {"no_rope_layer_interval": 4},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma-head_dim": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"query_pre_attn_scalar": 10},
    "gemma2-sliding_window": {"query_pre_attn_scalar": 10},
    "gemma2-final_logit_softcapping": {"query_pre_attn_scalar": 10},
    "gemma3_text": {"query_pre_attn_scalar": 10},
    "gemma3_text-rope_local_base_freq": {"query_pre_attn_scalar": 10},
    "phi3": {},
    "phi3-sliding_window": {},
    "phi3-long_factor": {},
    "phi3-rope_scaling": {"original_max_position_embeddings": None},
    "gpt_neox": {"hidden_act": "gelu"},
    "gpt_neox-use_parallel_residual": {"hidden_act": "gelu"},
    "gpt_neox-rotary_pct": {"hidden_act": "gelu"},
    "falcon": {"rope_theta": 10000.0},
    "falcon-new_decoder_architecture": {"rope_theta": 10000.0},
    "gpt_bigcode": {"activation_function": "gelu_pytorch_tanh"},
    **{name: {} for name in ("bloom", "bloom-num_attention_heads", "mpt", "mpt-num_attention_heads")},
    "olmo-attention_bias": {},
    "olmo2": {},
    "stablelm": {},
    "stablelm-use_parallel_residual": {},
    "stablelm-qk_layernorm": {},
    "granite": {},
    "granite-logits_scaling": {},
    "granite-residual_multiplier": {},
    "mixtral": {},
    "mixtral-num_experts_per_tok": {},
    "qwen2_moe": {},
    "qwen2_moe-num_experts_per_tok": {},
    "qwen3_moe": {},
    "olmoe": {},
    "gpt_oss": {"swiglu_limit": 7.0, "rope_scaling": YARN},
    "gpt_oss-num_experts_per_tok": {"swiglu_limit": 7.0, "rope_scaling": YARN},
    "gpt_oss-sliding_window": {"swiglu_limit": 7.0, "rope_scaling": YARN},
    "seed_oss": {},
    "starcoder2": {},
    "ministral3": {},
    "ministral3-llama_4_scaling_beta": {},
    "olmo3": {},
    "olmo3-sliding_window": {},
    "exaone4": {},
    "exaone4-sliding_window": {},
    "exaone4-llama3": {},
    "granitemoehybrid": _MAMBA,
    "granitemoehybrid-mamba_n_groups": _MAMBA,
    "granitemoehybrid-mamba_conv_bias": _MAMBA,
    "granitemoehybrid-experts": _MAMBA,
    **{name: {} for name in ("granitemoehybrid-dense", "falcon_h1-no_biases", "mamba2", "mamba2-num_heads")},
    "nemotron_h-experts": {"time_step_min": 0.0},
    "nemotron_h-dense": {"time_step_min": 0.0},
    "granitemoe": {},
    "granitemoe-residual_multiplier": {},
    "iquestcoder": {},
    "internlm3": {},
    "exaone": {},
    "mellum": {"norm_topk_prob": True},
    "mellum-yarn": {},
    "mellum-sliding_window": {},
    "youtu": {},
    "jais2": {},
    "jais2-yarn": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_dense-alpha": {},
    "ernie4_5": {},
    "glm": {},
    "glm-partial_rotary_factor": {},
    "glm4": {},
    "cohere2": {},
    "cohere2-logit_scale": {},
    "cohere2-sliding_window": {},
    "cohere2_moe": {},
    "cohere2_moe-rms_norm_eps": {},
    "cohere2_moe-num_shared_experts": {},
    "cohere2_moe-norm_topk_prob": {},
    "cohere": {},
    "cohere-logit_scale": {},
    "nemotron": {"partial_rotary_factor": 0.5},
    "nemotron-partial_rotary_factor": {},
    "phi": {},
    "phi-partial_rotary_factor": {},
    "qwen3_next": {"norm_topk_prob": True},
    "qwen3_next-layer_types": {"norm_topk_prob": True},
    "qwen3_next-linear_num_key_heads": {"norm_topk_prob": True},
    "qwen3_5_text": {},
    "qwen3_5_text-attention_bias": {},
    "qwen3_5_text-linear_num_value_heads": {},
    "qwen3_5_text-yarn": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_moe_text-layer_types": {},
    "qwen2_vl": {"use_sliding_window": False},
    "qwen2_vl-yarn": {"use_sliding_window": False},
    "qwen3_vl": {},
    "qwen3_vl-attention_bias": {},
    "qwen3_vl_moe": {},
    "qwen3_vl_moe-num_experts_per_tok": {},
    "minicpm3": _MINICPM,
    "minicpm3-qk_nope_head_dim": _MINICPM,
    "minicpm3-longrope": {**_MINICPM, "rope_scaling": _LONGROPE},
    "deepseek_v2": {},
    "deepseek_v2-yarn": {"rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 1.5}},
    "deepseek_v2-whole_q": {},
    "deepseek_v2-n_shared_experts": {},
    "deepseek_v3": {},
    "deepseek_v3-no_groups": {},
    "deepseek_v3-norm_topk_prob": {},
    "deepseek_v3-yarn": {"rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 1.5}},
    "glm4_moe_lite": {},
    "glm4_moe_lite-mlp_layer_types": {},
    "mistral4": {},
    "mistral4-llama_4_scaling_beta": {},
    "mistral4-norm_topk_prob": {},
    "apertus": {},
    "llama4_text-defaults": {},
    "glm4_moe": {},
    "glm4_moe-use_qk_norm": {},
    "glm4_moe-n_shared_experts": {},
    "solar_open": {"intermediate_size": 52},
    "dots1": {"sliding_window": 64, "max_window_layers": 3},
    "dots1-routed_scaling_factor": {"sliding_window": 64, "max_window_layers": 3},
    "afmoe": {"global_attn_every_n_layers": 4},
    "afmoe-num_shared_experts": {"global_attn_every_n_layers": 4},
    "exaone_moe": {},
    "exaone_moe-sliding_window": {},
    "minimax_m2": {},
    "minimax_m2-rotary_dim": {},
    "hunyuan_v1_moe": {},
    "hunyuan_v1_moe-moe_topk": {},
    "ernie4_5_moe": {},
    "ernie4_5_moe-moe_layer_interval": {},
    "lfm2": {},
    "lfm3": {},
    "lfm3-layer_types": {},
    "lfm3-partial_rotary_factor": {},
    "lfm3-rope_of_windows": {},
    "lfm2-conv_bias": {},
    "lfm2-layer_types": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "lfm2_moe-num_dense_layers": {"routed_scaling_factor": 1.0},
    "gemma4_unified_text": {},
    "gemma4_unified_text-attention_k_eq_v": {},
    "gemma4_unified_text-num_global_key_value_heads": {},
    "gemma4_unified_text-use_double_wide_mlp": {},
    "gemma4_unified_text-partial_rotary_factor": {},
    "gemma4_text": {},
    "gemma4_text-num_kv_shared_layers": {},
    "gemma4_text-no_layer_embeddings": {},
    "gemma4_text-26b": {},
}


DELTA_NETS = [name for name in CASES if name in DELTA_NET_CASES]
RECURRENT = [
    name
    for name in CASES
    if name in DELTA_NET_CASES | RECURRENT_CASES | MAMBA_CASES and "hybrid-dense" not in name and "falcon" not in name
]


def case_of(name: str) -> Case:
    changes = {**FAMILY_CASES[name].config, **CASES[name]}
    removed = {key for key, value in CASES[name].items() if value is None}
    return replace(FAMILY_CASES[name], config={key: value for key, value in changes.items() if key not in removed})


BASES = [name for name in CASES if FAMILY_CASES[name].base not in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("hf")
    return functools.cache(lambda name: family_checkpoint(root / name, case_of(name)))


@pytest.fixture(scope="module")
def from_hf(folder: Callable[[str], Path]) -> Callable[[str], Logits]:
    @functools.cache
    def found(name: str) -> Logits:
        return logits(folder(name), folder(name).with_suffix(".bin"), case_of(name).ids)

    return found


@pytest.fixture(scope="module")
def from_gguf(folder: Callable[[str], Path]) -> Callable[[str], Logits]:
    @functools.cache
    def found(name: str) -> Logits:
        path = folder(name).with_suffix(".gguf")
        changes = {"attention.sliding_window_pattern": 2} if name.startswith("gemma3") else {}
        write_gguf(path, case_of(name).config, checkpoint_tensors(folder(name)), changes=changes)
        return logits(path, path.with_suffix(".of-gguf.bin"), case_of(name).ids)

    return found


def logits(source: Path, target: Path, ids: list[int]) -> Logits:
    export(source, target, probe_source=None)
    with llamac.load(target, kv_dtype="f32") as model:
        return model.logits(ids)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_gives_the_logits_of_its_checkpoint(
    from_hf: Callable[[str], Logits], from_gguf: Callable[[str], Logits], name: str
) -> None:
    assert relative_errors(from_gguf(name), from_hf(name)).max() <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in CASES if FAMILY_CASES[name].base in CASES])
def test_every_key_changes_the_logits(from_gguf: Callable[[str], Logits], name: str) -> None:
    base = FAMILY_CASES[name].base
    assert base is not None
    assert relative_errors(from_gguf(name), from_gguf(base)).max() >= MIN_EFFECT


def test_what_files_of_llama_4_do_not_state_is_as_in_the_checkpoint(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Chunks of 8,192 positions and scaled queries change no logits of a short text, so the layers are compared."""
    name = "llama4_text-defaults"
    path, config, weights = tmp_path / "m.gguf", case_of(name).config, checkpoint_tensors(folder(name))
    write_gguf(path, config, weights)
    ours, theirs = gguf_model.read(path, []).config, hf_model.read(folder(name), []).config
    assert ours == replace(theirs, norm_eps=ours.norm_eps)
    assert [(layer.rope, layer.window_chunks, layer.query_offset) for layer in ours.layers] == [(0, 1, 0)] * 3 + [
        (-1, 0, 1)
    ]
    write_gguf(path, config, weights, changes={"attention.sliding_window": 0})
    with pytest.raises(ExportError, match=r"llama4\.attention\.sliding_window is 0, expected 8192, the chunks"):
        gguf_model.read(path, [])


def test_a_file_of_lfm3_must_say_which_part_of_heads_rotates(folder: Callable[[str], Path], tmp_path: Path) -> None:
    config, weights = case_of("lfm3").config, checkpoint_tensors(folder("lfm3"))
    whole = {name: values for name, values in converted(config, weights).items() if name != "rope_freqs.weight"}
    arch, keys = metadata(config)
    prefixed = {f"{arch}.{key}": value for key, value in keys.items()}
    write_tensors(tmp_path / "m.gguf", whole, keys=prefixed, arch=arch)
    with pytest.raises(ExportError, match=r"the tensor rope_freqs\.weight is missing: it says which part of each head"):
        gguf_model.read(tmp_path / "m.gguf", [])


def test_llama_4_with_128_experts_has_no_norms_of_q_and_k() -> None:
    layer = LayerConfig("experts", 20, n_experts=128, n_experts_used=1)
    assert [has_norms((replace(layer, n_experts=n),)) for n in (16, 128)] == [True, False]


def test_every_architecture_has_a_case() -> None:
    with_cases = {FAMILY_CASES[name].config["model_type"] for name in CASES} | {"llama", "gpt2"}
    assert {row.family for row in ARCHITECTURES.values()} <= with_cases
    others = {family for row in ARCHITECTURES.values() for family in row.others}
    families = others - {"kimi_k2", "sarvam_mla", "internlm2", "minicpm", "mimo"}  # others by other names
    assert {family for family in families if not FAMILIES[family].written_as} <= with_cases


def test_experts_in_separate_tensors_are_read(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The first files of Mixtral store each expert in its own tensor."""
    config = case_of("mixtral").config
    whole = converted(config, checkpoint_tensors(folder("mixtral")))
    alone = {name: values for name, values in whole.items() if "_exps." not in name}
    for name, values in whole.items():
        if "_exps." in name:
            alone |= {name.replace("_exps.", f".{expert}."): rows for expert, rows in enumerate(values)}
    arch, keys = metadata(config)
    prefixed = {f"{arch}.{key}": value for key, value in keys.items()}
    ours = gguf_model.read(write_tensors(tmp_path / "alone.gguf", alone, keys=prefixed), [])
    theirs = gguf_model.read(write_tensors(tmp_path / "whole.gguf", whole, keys=prefixed), [])
    assert ours.config == theirs.config
    assert ours.metadata["architecture"] == "mixtral"
    for name, tensor in theirs.tensors.items():
        np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)


def test_experts_share_the_ffn_width_if_none_is_given(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """llama.cpp does this for Qwen 3."""
    config, weights = case_of("qwen3_moe").config, checkpoint_tensors(folder("qwen3_moe"))
    changes = {"expert_feed_forward_length": None, "feed_forward_length": [52, 48, 48]}
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes), [])
    assert [layer.ffn_dim for layer in made.config.layers] == [52, 24, 24]


def test_the_class_rows_of_a_reranker_are_ignored(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """They repeat rows of the output matrix."""
    config, weights = case_of("qwen3").config, checkpoint_tensors(folder("qwen3"))
    extra = {"cls.output.weight": np.ones((2, 40), np.float32)}
    changes = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes, extra=extra), [])
    assert made.tensors.keys() == gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights), []).tensors.keys()


@pytest.mark.parametrize("name", RECURRENT)
def test_the_rearrangements_of_recurrent_layers_are_reverted(
    folder: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Heads of v are sorted in Qwen3.5, and q and its gate, or beta and a, are interleaved."""
    ours = gguf_model.read(write_gguf(tmp_path / "m.gguf", case_of(name).config, checkpoint_tensors(folder(name))), [])
    theirs = hf_model.read(folder(name), [])
    assert not config_differences(ours.config, theirs.config)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for tensor, numbers in theirs.tensors.items():
        tolerance = 1e-6 if tensor.endswith(("_decay.weight", "inv_freq")) else 0
        np.testing.assert_allclose(ours.tensors[tensor].array(), numbers.array(), rtol=tolerance, err_msg=tensor)


@pytest.mark.parametrize("name", [name for name in CASES if name in GEMMA4_CASES])
def test_what_differs_between_layers_is_read(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Heads, shared keys, scales, embeddings, experts; of a layer with shared keys, tensors that it does not use."""
    config, weights = case_of(name).config, checkpoint_tensors(folder(name))
    unused = {"blk.3.attn_k.weight": np.ones((16, 40), np.float32)}
    extra = unused if config.get("num_kv_shared_layers") else {}
    ours = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, extra=extra), [])
    theirs = hf_model.read(folder(name), [])
    assert not config_differences(ours.config, theirs.config)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for tensor, numbers in theirs.tensors.items():
        np.testing.assert_allclose(ours.tensors[tensor].array(), numbers.array(), rtol=1e-6, err_msg=tensor)


def test_layers_that_predict_further_tokens_are_left_out(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The converter puts them behind the others, and counts them among the blocks."""
    config, weights = case_of("qwen3_5_text").config, checkpoint_tensors(folder("qwen3_5_text"))
    extra = {"blk.3.nextn.eh_proj.weight": np.ones((40, 80), np.float32)}
    extra |= {
        name.replace("blk.1.", "blk.3."): values
        for name, values in converted(config, weights).items()
        if name.startswith("blk.1.")
    }
    changes: dict[str, object] = {"block_count": 4, "nextn_predict_layers": 1, "full_attention_interval": None}
    changes["attention.recurrent_layers"] = [True, False, True, False]
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes, extra=extra), [])
    plain = gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights), [])
    assert made.config == plain.config
    assert made.tensors.keys() == plain.tensors.keys()


def test_products_of_delta_nets_in_one_tensor_are_read(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The first files of Qwen3-Next have the rows in the order of transformers."""
    config, weights = case_of("qwen3_next").config, checkpoint_tensors(folder("qwen3_next"))
    tensors = converted(config, weights)
    early = dict(tensors)
    for name, values in weights.items():
        if found := re.fullmatch(r"model\.layers\.(\d)\.linear_attn\.in_proj_qkvz\.weight", name):
            del early[f"blk.{found[1]}.attn_qkv.weight"], early[f"blk.{found[1]}.attn_gate.weight"]
            early[f"blk.{found[1]}.ssm_in.weight"] = values
    arch, keys = metadata(config)
    prefixed = {f"{arch}.{key}": value for key, value in keys.items()}
    made = gguf_model.read(write_tensors(tmp_path / "m.gguf", early, keys=prefixed, arch=arch), [])
    plain = gguf_model.read(write_tensors(tmp_path / "n.gguf", tensors, keys=prefixed, arch=arch), [])
    assert made.config == plain.config
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(made.tensors[name].array(), tensor.array(), err_msg=name)


def test_sliding_window_patterns_and_defaults_are_read(folder: Callable[[str], Path], tmp_path: Path) -> None:
    config, weights = case_of("gemma2").config, checkpoint_tensors(folder("gemma2"))
    for pattern, windows in (
        (None, [7, 0, 7]),
        (3, [7, 7, 0]),
        (0, [7, 7, 7]),
        ([False, True, True], [0, 7, 7]),
    ):
        changes = {"attention.sliding_window_pattern": pattern}
        made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes), [])
        assert [layer.window for layer in made.config.layers] == windows
    absent = dict.fromkeys(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"))
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=absent), [])
    assert [layer.window for layer in made.config.layers] == [4096, 0, 4096]
    assert (made.config.attention_soft_cap, made.config.logit_soft_cap) == (50.0, 30.0)


def test_keys_of_mamba_in_a_granite_without_such_layers_are_ignored(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp's converter writes them for all models of this family, and the KV heads of each layer."""
    config, weights = case_of("granitemoehybrid-dense").config, checkpoint_tensors(folder("granitemoehybrid-dense"))
    sizes = {"conv_kernel": 4, "state_size": 256, "group_count": 1, "inner_size": 5120, "time_step_rank": 80}
    changes: dict[str, object] = {f"ssm.{key}": value for key, value in sizes.items()}
    changes |= {"attention.head_count_kv": [2, 2], "expert_count": 0, "expert_used_count": 0}
    changes |= {"rope.scaling.finetuned": True}
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes), [])
    assert made.config == gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights), []).config


def test_lists_of_nemotron_h_say_what_each_block_is(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A last block, which predicts a second token, also has an entry in each list."""
    name = "nemotron_h-experts"
    config, weights = case_of(name).config, checkpoint_tensors(folder(name))
    changes: dict[str, object] = {"block_count": 6, "nextn_predict_layers": 1}
    changes |= {"attention.head_count_kv": [0, 0, 2, 0, 0, 2], "feed_forward_length": [0, 20, 0, 20, 0, 20]}
    extra = {"blk.5.nextn.eh_proj.weight": np.ones((40, 80), np.float32)}
    made = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes, extra=extra), [])
    assert made.config == gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights), []).config
    for wrong, message in (
        ({"feed_forward_length": [0, 20, 0, 20]}, "feed_forward_length is .*, expected an integer from 0 to"),
        ({"attention.head_count_kv": [0, 0, 2, 0]}, "head_count_kv is .*, expected one number of heads, or 0"),
        ({"moe_latent_size": 8}, "moe_latent_size is 8: llamac does not know this key"),
    ):
        with pytest.raises(ExportError, match=message):
            gguf_model.read(write_gguf(tmp_path / "o.gguf", config, weights, changes=wrong), [])


def test_the_attention_factor_of_yarn_can_repeat_the_default(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """OLMo 3's files have it. llama.cpp ignores it and computes the default."""
    config, weights = case_of("olmo3").config, checkpoint_tensors(folder("olmo3"))
    yarn = {"type": "yarn", "factor": 8.0, "original_context_length": 16}
    changes: dict[str, object] = {f"rope.scaling.{key}": value for key, value in yarn.items()}
    plain = gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes), [])
    changes["rope.scaling.yarn_attn_factor"] = 1.2079441541679836
    made = gguf_model.read(write_gguf(tmp_path / "n.gguf", config, weights, changes=changes), [])
    assert made.config == plain.config
    assert made.config.rope_attention_factor[0] == pytest.approx(1.2079441541679836, rel=1e-6)
    changes["rope.scaling.yarn_attn_factor"] = 1.5
    with pytest.raises(ExportError, match=r"yarn_attn_factor is 1.5, expected 1 or 1.20794"):
        gguf_model.read(write_gguf(tmp_path / "o.gguf", config, weights, changes=changes), [])


def test_blocks_that_predict_further_tokens_are_left_out(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """llama.cpp counts them as blocks, with tensors like those of others and a few more."""
    config, weights = case_of("glm4_moe").config, checkpoint_tensors(folder("glm4_moe"))
    n = config["num_hidden_layers"]
    more = {f"blk.{n}.{name}.weight": np.zeros((4, 8), np.float32) for name in ("attn_q", "nextn.eh_proj")}
    path = write_gguf(
        tmp_path / "m.gguf", config, weights, changes={"block_count": n + 1, "nextn_predict_layers": 1}, extra=more
    )
    made, plain = (gguf_model.read(file, []) for file in (path, write_gguf(tmp_path / "n.gguf", config, weights)))
    assert made.config == plain.config
    assert made.tensors.keys() == plain.tensors.keys()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("apertus", {"xielu.beta": [0.25, 0.25]}, r"xielu\.beta is \[0.25, 0.25\], expected 0.5 in all layers"),
        ("apertus", {"xielu.alpha_p": [0.25]}, r"xielu\.alpha_p is .*, expected a number for each of 2 layers"),
        ("dots1", {"expert_gating_func": None}, "expert_gating_func is None, expected 1, softmax, or 2, sigmoid"),
        ("glm4_moe", {"expert_group_count": 4}, "expert_group_count is 4, expected a divisor of expert_count .6."),
        ("glm4_moe", {"expert_gating_func": 3}, "expert_gating_func is 3, expected 1, softmax, or 2, sigmoid"),
    ],
)
def test_other_activations_and_routers_are_refused(
    folder: Callable[[str], Path], tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    config, weights = case_of(name).config, checkpoint_tensors(folder(name))
    with pytest.raises(ExportError, match=message):
        gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes), [])


@pytest.mark.parametrize("name", BASES)
def test_no_value_of_a_key_is_more_than_an_error(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """Values of other types than the key has: the file is refused, or the value is ignored."""
    file = open_gguf(write_gguf(tmp_path / "m.gguf", case_of(name).config, checkpoint_tensors(folder(name))))
    shapes = {full: tensor.shape for full, tensor in file.tensors.items()}
    arch = file.values["general.architecture"]
    assert isinstance(arch, str)
    values: tuple[Value, ...] = ([1], "x", -1)
    refused = 0
    for key in {key for key in file.values if "." in key} | {f"{arch}.{key}" for key in ARCHITECTURES[arch].keys}:
        for value in values:
            try:
                parse_config({**file.values, key: value}, shapes, True, {}, [])
            except LlamacError:
                refused += 1
    assert refused >= 20


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ministral3", {"attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon is missing"),
        (
            "arcee",
            {"attention.head_count": 3, "attention.head_count_kv": 3, "rope.dimension_count": None},
            r"attention.head_count is 3, expected a divisor of embedding_length \(40\), because key_length is missing",
        ),
        (
            "gemma3_text",
            {"attention.sliding_window_pattern": "x"},
            "pattern is 'x', expected a number, or a boolean for each",
        ),
        ("qwen2_moe", {"expert_weights_norm": 2}, "expert_weights_norm is 2, expected true or false"),
        ("mistral", {"rope.scaling.type": 3}, "rope.scaling.type is 3, expected a string"),
        ("dots1", {"expert_gating_func": [1]}, r"expert_gating_func is \[1\], expected 1, softmax, or 2, sigmoid"),
        ("granitemoehybrid", {"ssm.inner_size": 97}, "ssm.inner_size is 97, expected a multiple of ssm.time_step_rank"),
        (
            "granitemoehybrid",
            {"ssm.group_count": 4},
            "ssm.time_step_rank is 6, expected a multiple of ssm.group_count .4.",
        ),
        ("granitemoehybrid", {"ssm.state_size": 24}, "ssm.state_size is 24, expected a multiple of 16"),
        ("qwen3_next", {"ssm.inner_size": 96}, "ssm.inner_size is 96, expected a multiple of 16 for each of 4 heads"),
        ("lfm2", {"shortconv.l_cache": 1}, "shortconv.l_cache is 1, expected 2 or more"),
        ("mamba2", {"attention.head_count": 4}, "attention.head_count is 4, expected 0, since no layer has attention"),
        ("qwen3_next", {"ssm.inner_size": 97}, "ssm.inner_size is 97, expected a multiple of ssm.time_step_rank"),
        ("qwen3_next", {"ssm.group_count": 3}, "ssm.time_step_rank is 4, expected a multiple of ssm.group_count .3."),
        (
            "qwen3_next",
            {"attention.recurrent_layers": [True]},
            "attention.recurrent_layers is .*, expected a boolean for each",
        ),
        (
            "gemma4_text",
            {"attention.value_length_swa": 12},
            "value_length_swa is 12, expected the same as attention.key_len",
        ),
        ("gemma4_text", {"attention.head_count_kv": 3}, r"attention.head_count_kv is 3, expected divisors of .* \(4\)"),
        ("gemma4_text", {"attention.head_count_kv": None}, "attention.head_count_kv is missing"),
        ("gemma4_text", {"attention.shared_kv_layers": 3}, "attention.shared_kv_layers is 3, expected less: a kind of"),
        ("minicpm3", {"rope.dimension_count": 16}, "rope.dimension_count is 16, expected less than the 16 dimensions"),
        ("minicpm3", {"attention.kv_lora_rank": 20}, "attention.kv_lora_rank is 20, expected a multiple of 16"),
        (
            "deepseek_v2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "YaRN without rope.scaling.yarn_log",
        ),
    ],
)
def test_contradictions_are_refused_by_name(
    folder: Callable[[str], Path], tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    config, weights = case_of(name).config, checkpoint_tensors(folder(name))
    with pytest.raises((ExportError, UnsupportedError), match=message):
        gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes=changes), [])


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3_next"])
@pytest.mark.parametrize("key", ["ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"])
def test_a_wrong_width_of_a_recurrent_layer_is_named_once(
    folder: Callable[[str], Path], tmp_path: Path, name: str, key: str
) -> None:
    config, weights = case_of(name).config, checkpoint_tensors(folder(name))
    with pytest.raises(ExportError, match=f"{key} is 0, expected an integer from 1 to") as caught:
        gguf_model.read(write_gguf(tmp_path / "m.gguf", config, weights, changes={key: 0}), [])
    assert str(caught.value).count("expected") == 1
