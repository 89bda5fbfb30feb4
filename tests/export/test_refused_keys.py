"""Keys of config.json that contradict each other or that the engine cannot compute are refused by name."""

from __future__ import annotations

import json

import pytest

from golden.encoder_cases import ENCODER_CASES
from golden.family_cases import FAMILY_CASES
from golden.published_configs import PUBLISHED
from golden.tiny_checkpoints import Config
from hf_reading import parse
from llamac.errors import ExportError, LlamacError, UnsupportedError
from llamac.export.hf.config import parse_config
from llamac.export.hf.families import FAMILIES

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": None, "mscale_all_dim": 1.0}
COMMON = (
    "architectures",
    "layer_types",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "text_config",
    "torch_dtype",
)
CONFIGS = {name: case.config for name, case in (FAMILY_CASES | ENCODER_CASES).items()}
SCALING = FAMILY_CASES["ministral3"].config["rope_parameters"]
MISTRAL4 = "Mistral-Small-4-119B-2603 (bf16)"
NOT_SCALED = {key: value for key, value in SCALING.items() if key != "original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "ministral3",
            {"rope_parameters": {**SCALING, "llama_4_scaling_beta": 1e9}},
            "beta is 1e.09, expected at most",
        ),
        (
            "qwen3_next",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is 3, expected a multiple of linear_num_key",
        ),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention"]},
            "layer_types is .* linear_attention for each of 3 layers",
        ),
        (
            "qwen3_next",
            {"layer_types": "linear"},
            "layer_types is 'linear', expected full_attention or linear_attention",
        ),
        ("qwen3_next", {"linear_key_head_dim": 24}, "linear_key_head_dim is 24, expected a multiple of 16"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, expected 1 or null: new_deco"),
        ("falcon-new_decoder_architecture", {"parallel_attn": False}, "parallel_attn is False, expected true"),
        ("opt", {"word_embed_proj_dim": 20}, r"word_embed_proj_dim is 20, expected hidden_size \(40\): matrices"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is null, expected an integer from 1 to 10"),
        ("gpt_bigcode", {"new_decoder_architecture": True}, "new_decoder_architecture is True: llamac does not know"),
        ("gpt_neo", {"attention_types": [[["local"], 1 << 40]]}, "attention_types is .* global or local for each of 3"),
        ("gpt_neo", {"attention_layers": ["local"] * 3}, "attention_layers is .* the same kinds as attention_types"),
        ("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu', expected softmax or sigmoid"),
        ("cohere2_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most"),
        ("granitemoehybrid", {"mamba_d_state": 8}, "mamba_d_state is 8, expected a multiple of 16"),
        ("mamba2", {"state_size": 8}, "state_size is 8, expected a multiple of 16"),
        ("mamba2", {"expand": 3}, "num_heads is 6, expected a number for which the heads have 144 numbers together"),
        ("mamba2", {"num_attention_heads": 4}, "num_attention_heads is 4: llamac does not know this key"),
        ("granitemoehybrid", {"position_embedding_type": "learned"}, "is 'learned', expected rope, nope or null"),
        ("gemma4_text", {"per_layer_config": 3}, "per_layer_config is 3, expected .* of some of 4 layers, equal for"),
        (
            "xlm-roberta",
            {"pad_token_id": 60, "max_position_embeddings": 50},
            "pad_token_id is 60, expected an id below",
        ),
        ("hunyuan_v1_moe", {"moe_intermediate_size": 7}, "moe_intermediate_size is 7, expected 24, with which"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2, expected 1, with which transformers"),
        (
            "llama4_text",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9, expected at most the number of experts, 5",
        ),
        (
            "deepseek_v2",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok is 9, expected at most the number of experts, 5",
        ),
        ("lfm2_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number above 0"),
        ("minicpm3", {"kv_lora_rank": 20}, "kv_lora_rank is 20, expected a multiple of 16"),
        ("minicpm3", {"v_head_dim": 17}, "v_head_dim is 17, expected a multiple of 16"),
        ("minicpm3", {"kv_lora_rank": 4096}, "kv_lora_rank is 4096, expected at most .* together with qk_rope_head"),
        ("minicpm3", {"num_key_value_heads": 2}, r"num_key_value_heads is 2, expected num_attention_heads \(4\)"),
        ("deepseek_v3", {"qk_head_dim": 17}, "qk_head_dim is 17, expected 16, which follows from the other widths"),
        ("mistral4", {"head_dim": 6}, "head_dim is 6, expected 16, which follows from the other widths"),
        (
            "mistral4",
            {"rope_parameters": {**SCALING, "partial_rotary_factor": 0.5}},
            r"rope_parameters.partial_rotary_factor is 0.5, expected 0.375, by the widths",
        ),
        ("minicpm3", {"scale_emb": 0}, "scale_emb is 0, expected a number above 0"),
        ("deepseek_v3", {"rope_parameters": YARN, "rope_theta": None}, "mscale_all_dim needs a factor, which is null"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX', expected one of"),
        (
            "nemotron_h",
            {"layers_block_type": ["mamba", 5]},
            "layers_block_type is .*, expected one of .* for each of up",
        ),
        ("nemotron_h", {"layers_block_type": 5}, "layers_block_type is 5, expected one of M"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\], expected 2 nonnegative numbers"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1, expected 2 or more"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e9}, "block_ffn_dim_multiplier is 1.*, expected a number for which"),
        ("qwen2_vl", {"text_config": True}, "text_config is True, expected an object: the config of"),
        ("olmo3", {"rope_parameters": None, "rope_theta": 7.0}, "rope_theta is 7.0, expected 500000.* versions of"),
    ],
)
def test_contradictions_are_refused_by_name(name: str, changes: Config, problem: str) -> None:
    with pytest.raises(ExportError, match=problem):
        parse({**CONFIGS[name], **changes})


def test_groups_of_experts_are_refused_where_scores_are_softmaxes() -> None:
    with pytest.raises(UnsupportedError, match="n_group is 4 and topk_group 2; only equal numbers are supported"):
        parse({**PUBLISHED[MISTRAL4], "n_group": 4, "topk_group": 2})
    assert parse({**PUBLISHED[MISTRAL4], "n_group": 4, "topk_group": 4}).model == parse(PUBLISHED[MISTRAL4]).model


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers"])
def test_a_wrong_key_does_not_make_the_keys_of_layers_unknown(key: str) -> None:
    for name, config in PUBLISHED.items():
        inner = config.get("text_config", config)
        if key not in inner:  # GPT-2, or a default
            continue
        wrong = {**config, **({key: 0} if key in config else {})}
        if inner is not config:
            wrong["text_config"] = {**inner, key: 0}
        with pytest.raises(ExportError, match=rf"\n  {key} is 0, expected an integer") as caught:
            parse(wrong)
        assert "does not know this key" not in str(caught.value), name


def test_an_unknown_key_is_named_beside_a_wrong_one() -> None:
    with pytest.raises(ExportError, match=r"vocab_size is 0(.|\n)*frobnicate is 1: llamac does not know this key"):
        parse({**CONFIGS["qwen3_next"], "vocab_size": 0, "frobnicate": 1})


def test_attention_in_chunks_for_a_million_tokens_is_not_applied_and_a_warning() -> None:
    """Of Qwen2.5-7B-Instruct-1M, and of Qwen3-30B-A3B-Instruct-2507, whose config_1m.json also has it."""
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    for name in ("Qwen2.5-0.5B", "Qwen3-0.6B", "Qwen3-30B-A3B"):
        warnings: list[str] = []
        found = parse_config({**PUBLISHED[name], "dual_chunk_attention_config": chunks}, warnings).model
        assert found == parse(PUBLISHED[name]).model
        assert ["dual_chunk_attention_config, which llamac ignores" in text for text in warnings] == [True]
    with pytest.raises(ExportError, match=r"dual_chunk_attention_config is .*: llamac does not know this key"):
        parse({**PUBLISHED["Llama-2-7B"], "dual_chunk_attention_config": chunks})


def test_a_scaling_of_rope_that_transformers_ignores_is_not_applied_and_a_warning() -> None:
    """Of Cohere's models with experts. transformers saves it beside the rope_parameters with which it computes."""
    scaling, plain = {"rope_type": "linear", "factor": 4.0}, parse(CONFIGS["cohere2_moe"])
    saved = {"rope_scaling": scaling, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    for changes in ({"rope_scaling": scaling}, saved):
        warnings: list[str] = []
        found = parse_config({**CONFIGS["cohere2_moe"], **changes}, warnings)
        assert found.model == plain.model
        assert [x.inv_freq.tolist() for x in found.ropes] == [x.inv_freq.tolist() for x in plain.ropes]
        assert ["rope_scaling, which llamac ignores" in text for text in warnings] == [True]


def test_scaled_queries_need_the_context_before_the_extension() -> None:
    with pytest.raises(ExportError, match=r"llama_4_scaling_beta is 0.5, .* with original_max_position_embeddings"):
        parse({**CONFIGS["ministral3"], "rope_parameters": {**NOT_SCALED, "rope_type": "default"}})


def test_experts_that_are_chosen_by_groups_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="topk_method is 'group_limited_greedy'; only 'greedy' is supported"):
        parse({**CONFIGS["deepseek_v2"], "topk_method": "group_limited_greedy"})


@pytest.mark.parametrize(
    ("name", "changes", "same"),
    [
        ("llama4_text", {"attn_temperature_tuning": 4}, {"attn_temperature_tuning": True}),
        # transformers 4.57 writes both names' values
        ("cohere2-layer_types", {"sliding_window_pattern": None, "_sliding_window_pattern": 4}, {}),
        ("cohere2_moe-layer_types", {"_sliding_window_pattern": 4}, {}),
        ("falcon_h1", {"mlp_multipliers": None}, {"mlp_multipliers": [1.0, 1.0]}),
        (
            "lfm2",
            {"block_ffn_dim_multiplier": None, "block_multiple_of": 1},
            {"block_auto_adjust_ff_dim": False, "intermediate_size": 34},
        ),
    ],
)
def test_other_spellings_mean_the_same(name: str, changes: Config, same: Config) -> None:
    assert parse({**CONFIGS[name], **changes}).model == parse({**CONFIGS[name], **same}).model


def test_two_contexts_before_the_extension_are_a_warning() -> None:
    config = CONFIGS["phi3"]
    inner = {**config["rope_scaling"], "original_max_position_embeddings": 7}
    warnings: list[str] = []
    found = parse_config(json.loads(json.dumps({**config, "rope_scaling": inner})), warnings)
    assert found.model == parse(config).model
    assert warnings == [
        "config.json has two values of original_max_position_embeddings, 7 in its RoPE object and "
        f"{config['original_max_position_embeddings']}: using {config['original_max_position_embeddings']}"
    ]


@pytest.mark.parametrize("name", [name for name in CONFIGS if not (FAMILY_CASES | ENCODER_CASES)[name].base])
def test_no_value_of_a_key_is_more_than_an_error(name: str) -> None:
    """Values of other types than the key has: the config is refused, or the value is ignored."""
    family = FAMILIES.get(CONFIGS[name]["model_type"])
    config = {**dict.fromkeys(COMMON), **(family.keys if family is not None else {}), **CONFIGS[name]}
    refused = 0
    for key in config:
        for value in ([[1]], {"a": 1}, "x", True, -1):
            try:
                parse_config({**config, key: value}, [])
            except LlamacError:
                refused += 1
    assert refused > 20
