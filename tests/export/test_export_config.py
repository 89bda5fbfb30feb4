"""config.json: old and new keys, refused values and their messages, and RoPE frequencies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden.cases import GPT2, LLAMA, LLAMA3, LONGROPE, YARN
from golden.encoder_cases import ENCODER_CASES
from golden.family_cases import FAMILY_CASES
from golden.tiny_checkpoints import Config, changed, write_checkpoint, write_config
from hf_reading import parse, read
from llamac.errors import ExportError, UnsupportedError
from llamac.export import rope
from llamac.export.convert import export
from llamac.export.hf import config as hf_config
from llamac.format.flatfile import FlatFile

# ---- keys


def test_all_unknown_keys_are_reported() -> None:
    with pytest.raises(ExportError) as caught:
        parse({**LLAMA, "attn_logit_softcapping": 50.0, "residual_multiplier": 0.2, "sliding_window": None})
    assert "attn_logit_softcapping is 50.0" in str(caught.value)
    assert "residual_multiplier is 0.2" in str(caught.value)
    assert "sliding_window" not in str(caught.value)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_harmless_keys_are_ignored(config: Config) -> None:
    more = {
        "use_cache": True,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "id2label": {"0": "x"},
        "quantization_config": None,
        "tie_encoder_decoder": False,  # transformers 4 wrote it into full dumps, such as Kimi K2.5's
        "is_composition": True,  # Pixtral 12B's
        "is_matryoshka": True,
        "matryoshka_dimensions": [32, 64],
    }
    assert parse(config | more).model == parse(config).model


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"model_type": "mamba"}, "'mamba' is not supported; this version imports llama, .*gpt2"),
        (LLAMA, {"model_type": None}, "no model_type"),
        (LLAMA, {"model_type": ["llama"]}, "not supported"),
        (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, r"quantization_config is .*hqq.*quantized weights"),
        (LLAMA, {"hidden_act": "xielu"}, "hidden_act 'xielu'"),
        (LLAMA, {"hidden_act": 3}, "hidden_act 3"),
        (LLAMA, {"rope_scaling": {"type": "su", "factor": 2.0}}, "type 'su'"),
        (LLAMA, {"rope_interleaved": True}, "interleaved"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "differ by layer"),
        (GPT2, {"add_cross_attention": True}, "cross-attention"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "classifier with 2 classes"),
        (LLAMA, {"architectures": ["LlamaForCausalLM", "GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        (LLAMA, {"architectures": 7}, "architectures has 7"),
        (GPT2, {"architectures": ["GPT2DoubleHeadsModel"]}, "supported are GPT2LMHeadModel, GPT2Model"),
    ],
)
def test_unsupported_values_are_refused(config: Config, change: Config, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse(changed(config, **change))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_all_missing_keys_are_reported(config: Config) -> None:
    needed = {
        "llama": ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers", "intermediate_size"),
        "gpt2": ("n_embd", "n_head", "n_layer", "vocab_size"),
    }[config["model_type"]]
    with pytest.raises(ExportError) as caught:
        parse(changed(config, **dict.fromkeys(needed)))
    for key in needed:
        assert f"{key} is missing" in str(caught.value)


WRONG_SIZES = [0, -1, 1.5, "8", True, [8], 1 << 40]


@pytest.mark.parametrize("value", WRONG_SIZES, ids=repr)
@pytest.mark.parametrize(
    ("config", "key"),
    [
        *((LLAMA, key) for key in ("hidden_size", "num_key_value_heads", "head_dim", "max_position_embeddings")),
        *((GPT2, key) for key in ("n_embd", "n_head", "n_inner", "n_ctx", "vocab_size")),
    ],
)
def test_a_wrong_size_is_reported(config: Config, key: str, value: Any) -> None:
    with pytest.raises(ExportError, match=f"{key} is .*, expected an integer from 1 to"):
        parse({**config, key: value})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor"),
        (LLAMA, {"hidden_size": 42, "head_dim": None}, "expected a divisor of hidden_size"),
        (LLAMA, {"head_dim": 9}, "even"),
        (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', expected a number"),
        (LLAMA, {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        (LLAMA, {"rms_norm_eps": 2}, "rms_norm_eps is 2"),
        (LLAMA, {"rope_theta": 0.0}, "out of range"),
        (LLAMA, {"rope_theta": True}, "rope_theta is True"),
        (LLAMA, {"rope_theta": 1e300}, "rope_theta is 1e"),
        (LLAMA, {"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA, {"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor is '2'"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "out of range"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "cannot be used"),
        (LLAMA, {"rope_scaling": {"type": "yarn"}}, r"factor is missing"),
        (LLAMA, {"rope_scaling": {**YARN, "truncate": 1}}, r"truncate is 1, expected true or false"),
        (LLAMA, {"rope_scaling": {**YARN, "attention_factor": 0}}, "out of range"),
        (LLAMA, {"rope_scaling": {**YARN, "mystery": 1}}, r"rope_scaling\.mystery is 1: llamac does not know this key"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor has 1 numbers, expected 5"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "long_factor": 1}}, "long_factor is 1, expected a list"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "long_factor": [0] * 5}}, "out of range"),
        (LLAMA, {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "cannot be used"),
        (LLAMA, {"rope_scaling": YARN, "rope_parameters": LLAMA3}, "differ, expected"),
        (FAMILY_CASES["olmo_hybrid"].config, {"rope_parameters": YARN}, "expected none without rope_theta"),
        (GPT2, {"n_head": 3}, "n_head is 3, expected a divisor of n_embd"),
        (GPT2, {"rope_theta": 1e4}, "rope_theta is 10000.0: llamac does not know this key"),
    ],
)
def test_a_wrong_value_is_reported(config: Config, change: Config, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        parse(changed(config, **change))


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (LLAMA, {"num_hidden_layers": 200_000}, "num_hidden_layers"),
        (LLAMA, {"rms_norm_eps": 5.0}, "rms_norm_eps"),
        (LLAMA, {"num_attention_heads": "4", "num_key_value_heads": None, "head_dim": None}, "num_attention_heads"),
        (LLAMA, {"rope_scaling": 3}, "rope_scaling"),
        (LLAMA, {"hidden_size": 1 << 20, "num_attention_heads": 1, "head_dim": None}, "head_dim"),
        (GPT2, {"n_layer": 1 << 30}, "n_layer"),
        (GPT2, {"n_embd": 1 << 19, "n_inner": None}, "n_inner"),
    ],
)
def test_a_wrong_value_is_reported_once(tmp_path: Path, config: Config, change: Config, key: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", config)
    write_config(folder, changed(config, **{"num_key_value_heads": None, **change}))
    with pytest.raises(ExportError) as caught:
        export(folder, tmp_path / "out.bin", probe_source=None)
    (problem,) = str(caught.value).splitlines()[1:]
    assert problem.strip().startswith(f"{key} is ")
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"rms_norm_eps": NaN}', "\xff"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ExportError, match=r"config\.json"):
        read(tmp_path)


def test_two_rope_objects_can_differ_in_the_base_that_only_one_states() -> None:
    """A config.json for transformers 4 and 5. With both objects, transformers 5 reads the first."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = changed(LLAMA, rope_theta=7e3, rope_scaling=scaling, rope_parameters=None)
    for base, more in (("rope_scaling", "rope_parameters"), ("rope_parameters", "rope_scaling")):
        both = changed(old, **{base: scaling, more: {**scaling, "rope_theta": 7e3}})
        assert [rope.inv_freq.tolist() for rope in parse(both).ropes] == [x.inv_freq.tolist() for x in parse(old).ropes]
    for other in ({"rope_theta": 8e3}, {"rope_theta": 7e3, "factor": 4.0}):
        with pytest.raises(ExportError, match="rope_scaling and rope_parameters differ, expected only one of them"):
            parse(changed(old, rope_parameters={**scaling, **other}))


def test_ambiguous_values_are_reported() -> None:
    warnings: list[str] = []
    config = changed(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 7e3, "factor": 2.0})
    parsed = hf_config.parse_config(config, warnings)
    assert len(parsed.ropes) == 1
    assert any("two values of rope_theta" in warning for warning in warnings)
    assert any("factor has no effect" in warning for warning in warnings)
    assert len(warnings) == 2
    (clear,) = parse(changed(LLAMA, rope_theta=7e3)).ropes
    np.testing.assert_array_equal(parsed.ropes[0].inv_freq, clear.inv_freq)
    warnings.clear()
    assert hf_config.parse_config({**GPT2, "n_ctx": 32}, warnings).model.context == 64
    assert len(warnings) == 1
    assert parse(changed(GPT2, n_positions=None)).model.context == 1024
    assert parse(changed(GPT2, n_positions=None, n_ctx=32)).model.context == 32


@pytest.mark.parametrize(
    ("changes", "turned"),
    [({}, 0.5), ({"partial_rotary_factor": 0.25}, 0.25), ({"rope_parameters": {"partial_rotary_factor": 0.75}}, 0.75)],
)
def test_proportional_frequencies_rotate_the_part_that_the_family_rotates(changes: Config, turned: float) -> None:
    nested = {"rope_type": "proportional", "rope_theta": 500.0, **changes.get("rope_parameters", {})}
    base = {**FAMILY_CASES["nemotron"].config, "head_dim": 16, "rope_theta": None, "partial_rotary_factor": None}
    (table,) = parse(changed(base, **{**changes, "rope_parameters": nested})).ropes
    assert np.count_nonzero(table.inv_freq) == turned * 8 == turned * len(table.inv_freq)


def test_old_scaling_applies_to_all_layers_of_modernbert_and_to_full_attention_of_others() -> None:
    for config, is_scaled in ((ENCODER_CASES["modernbert"].config, True), (FAMILY_CASES["gemma3_text"].config, False)):
        plain = parse(changed(config, rope_scaling=None)).ropes
        scaled = parse(changed(config, rope_scaling={"rope_type": "linear", "factor": 4.0})).ropes
        np.testing.assert_array_equal(scaled[0].inv_freq, plain[0].inv_freq / 4)
        np.testing.assert_array_equal(scaled[1].inv_freq, plain[1].inv_freq / (4 if is_scaled else 1))


def test_the_scaling_that_all_layers_of_modernbert_share_is_read_once() -> None:
    old = {"rope_type": "linear", "factor": 4.0, "low_freq_factor": 1.0, "rope_theta": 500.0}
    config = {**ENCODER_CASES["modernbert"].config, "global_rope_theta": 800.0, "rope_scaling": old}
    warnings: list[str] = []
    of_all, of_windows = hf_config.parse_config(config, warnings).ropes
    np.testing.assert_array_equal(of_all.inv_freq, of_windows.inv_freq)  # its base takes precedence in both
    about_base, about_factor = warnings
    assert "two values of rope_theta" in about_base
    assert "low_freq_factor has no effect" in about_factor
    with pytest.raises(ExportError) as caught:
        hf_config.parse_config({**config, "rope_scaling": {**old, "factor": "4", "mystery": 1}}, [])
    message = str(caught.value)
    assert (message.count("rope_scaling.factor is"), message.count("rope_scaling.mystery is")) == (1, 1)


def test_a_factor_of_yarn_that_transformers_ignores_has_no_effect() -> None:
    """DeepSeek-R1-0528-Qwen3-8B has it."""
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}
    warnings: list[str] = []
    (table,) = hf_config.parse_config(changed(LLAMA, rope_scaling={**yarn, "attn_factor": 0.878}), warnings).ropes
    assert warnings == ["config.json: attn_factor has no effect for RoPE of type 'yarn': ignored"]
    (plain,) = parse(changed(LLAMA, rope_scaling=yarn)).ropes
    np.testing.assert_array_equal(table.inv_freq, plain.inv_freq)
    assert table.attention_factor == plain.attention_factor
    with pytest.raises(ExportError, match=r"attn_factor is 0\.878: llamac does not know this key"):
        parse(changed(LLAMA, rope_scaling={"rope_type": "linear", "factor": 2.0, "attn_factor": 0.878}))


def test_defaults_match_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    small = {key: LLAMA[key] for key in sizes}
    theirs, ours = transformers.LlamaConfig(**small), parse(small).model
    assert (ours.context, ours.norm_eps, ours.n_kv_heads, ours.head_dim) == (
        theirs.max_position_embeddings,
        theirs.rms_norm_eps,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert theirs.hidden_act == ours.activation == "silu"
    small = {key: GPT2[key] for key in ("model_type", "vocab_size", "n_embd", "n_layer", "n_head")}
    theirs, ours = transformers.GPT2Config(**small), parse(small).model
    assert ours.context == theirs.n_positions
    assert (ours.norm_eps, ours.layers[0].ffn_dim) == (theirs.layer_norm_epsilon, 4 * theirs.n_embd)
    assert (theirs.activation_function, ours.activation) == ("gelu_new", "gelu_tanh")


# ---- RoPE

ROPE_KINDS: dict[str, Config | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.7},
    "dynamic": {"rope_type": "dynamic", "factor": 1.1},
    "yarn": {"rope_type": "yarn", "factor": 4.3, "original_max_position_embeddings": 4096},
    "yarn-without-ramp": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    "yarn-all": {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7},
    "llama3": {**LLAMA3, "low_freq_factor": 1.3, "original_max_position_embeddings": 2048},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1 + math.sin(i) ** 2 for i in range(64)],
        "long_factor": [2 + 3 * math.cos(i) ** 2 for i in range(64)],
    },
}


def big_llama(theta: float, scaling: Config | None) -> Config:
    config = changed(LLAMA, hidden_size=256, num_attention_heads=2, head_dim=128, max_position_embeddings=8192)
    return changed(config, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("theta", [500.0, 10000.0, 12345.6, 500000.0, 1e7])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_rope_tables_match_transformers_bit_for_bit(monkeypatch: pytest.MonkeyPatch, kind: str, theta: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def powers_of_torch(base: float, dim: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)).numpy()
        return found

    base = theta
    exact = rope._powers(base, 128)
    distance = np.abs(exact.view(np.int32) - powers_of_torch(base, 128).view(np.int32))
    assert distance.max() <= 1  # torch's last bit depends on the machine's vector width

    monkeypatch.setattr(rope, "_powers", powers_of_torch)
    config = big_llama(theta, ROPE_KINDS[kind])
    (ours,) = parse(config).ropes
    theirs_config = transformers.LlamaConfig(**json.loads(json.dumps(config)))
    theirs = LlamaRotaryEmbedding(theirs_config)
    assert ours.inv_freq.dtype == np.float32
    np.testing.assert_array_equal(ours.inv_freq, theirs.inv_freq.numpy())
    assert ours.attention_factor == theirs.attention_scaling
    if kind == "longrope":
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](theirs_config, "cpu", seq_len=4097)
        np.testing.assert_array_equal(ours.inv_freq_long, long.numpy())
        assert ours.original_context == 4096
    else:
        assert ours.inv_freq_long is None


def test_powers_are_correctly_rounded() -> None:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 50
        for theta in (500.0, 10000.0, 500000.0):
            for dim in (10, 64, 80, 128):
                exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
                exact = [Decimal(theta) ** Decimal(float(exponent)) for exponent in exponents]
                found = rope._powers(theta, dim)
                for value, power in zip(found, exact, strict=True):
                    half_ulp = Decimal(float(np.spacing(value))) / 2
                    assert abs(Decimal(float(value)) - power) <= half_ulp


def test_dynamic_rope_equals_the_default_within_the_context() -> None:
    dynamic, default = parse(big_llama(10000.0, ROPE_KINDS["dynamic"])), parse(big_llama(10000.0, None))
    np.testing.assert_allclose(dynamic.ropes[0].inv_freq, default.ropes[0].inv_freq, rtol=1e-6)
    assert dynamic.model == default.model


NEW_NAMES = {"rope_type": "type", "dtype": "torch_dtype"}


@pytest.mark.parametrize("kind", [name for name in ROPE_KINDS if name != "longrope"])
def test_old_and_new_keys_give_the_same_file(tmp_path: Path, kind: str) -> None:
    scaling = ROPE_KINDS[kind] or {"rope_type": "default"}
    old_scaling = {NEW_NAMES.get(key, key): value for key, value in scaling.items()}
    old = changed(LLAMA, rope_theta=2e3, torch_dtype="float32", rope_scaling=old_scaling)
    new = changed(
        LLAMA, rope_theta=None, torch_dtype=None, dtype="float32", rope_parameters={**scaling, "rope_theta": 2e3}
    )
    files = []
    for name, config in (("old", old), ("new", new)):
        export(write_checkpoint(tmp_path / name, config), tmp_path / f"{name}.bin", probe_source=None)
        files.append(FlatFile(tmp_path / f"{name}.bin"))
    one, two = files
    assert (one.config, one.layers) == (two.config, two.layers)
    assert [(x.name, x.dtype, x.sha256) for x in one.tensors] == [(x.name, x.dtype, x.sha256) for x in two.tensors]
