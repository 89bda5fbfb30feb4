"""PEFT directories: each field of the config is honored or refused by name, and every tensor must fit."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_samples import PREFIX, small_adapter
from gguf_samples import checkpoint_tensors
from numpy.typing import NDArray

import llamac
from golden.adapter_cases import ADAPTER_CASES
from golden.cases import CASES
from golden.family_cases import FAMILY_CASES
from golden.make_adapters import adapter_files
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import write_checkpoint, write_safetensors
from llamac.arguments import adapters, parse_adapters
from llamac.errors import ArgumentError, ArgumentTypeError, ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_config
from llamac.export.lora import merge, read_adapter
from llamac.export.lora.adapter import Adapter
from llamac.export.lora.config import _FIELDS, _INERT, AdapterConfig
from llamac.export.patterns import matcher

MODEL = parse_config(CASES["llama"].config, []).model


def read(folder: Path) -> Adapter:
    return read_adapter(folder, "llama", MODEL)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "llama", CASES["llama"].config)


@pytest.mark.parametrize("inside", ["model.language_model.", "language_model.model."])
def test_adapters_of_a_language_model_with_images_fit_it(tmp_path: Path, inside: str) -> None:
    weights = {"A": np.ones((2, 40), np.float32), "B": np.ones((40, 2), np.float32)}
    module = f"{PREFIX}{inside}layers.0.self_attn.q_proj"
    named = {f"{module}.lora_{part}.weight": numbers for part, numbers in weights.items()}
    found = read(small_adapter(tmp_path / "inside", tensors=named))
    assert found.factors.keys() == read(small_adapter(tmp_path / "usual")).factors.keys()


# ---- fields

# Each field has the value that PEFT saves where the feature is used.
REFUSED: dict[str, Any] = {
    "alora_invocation_tokens": [5, 77],
    "arrow_config": {"top_k": 3},
    "corda_config": {"corda_method": "ipm"},
    "kasa_config": {"beta": 0.0001, "gamma": 0.001},
    "layer_replication": [[0, 2], [0, 2]],
    "lora_ga_config": {"direction": "ArB2r"},
    "megatron_config": {"num_layers": 2},
    "monteclora_config": {"num_samples": 8},
    "use_bdlora": {"nblocks": 3},
    "use_qalora": True,
    "velora_config": {"num_groups": 64},
    "use_something_new": True,
    "a_new_number": 1,
    "a_new_name": "x",
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_change_the_computation_are_refused_by_name(tmp_path: Path, name: str) -> None:
    adapter = small_adapter(tmp_path / "a", {name: REFUSED[name]})
    with pytest.raises(UnsupportedError, match=f"fields that this version does not support: {name}$"):
        read(adapter)
    values: list[Any] = [None, False, [], {}]
    for off in values:
        assert read(small_adapter(tmp_path / "a", {name: off})).factors


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "new", 5, ["eva"]])
def test_initializations_that_change_the_base_are_refused(tmp_path: Path, start: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"init_lora_weights {re.escape(repr(start))} \(the adapter fits"):
        read(small_adapter(tmp_path / "a", {"init_lora_weights": start}))


def test_all_unsupported_fields_are_reported_at_once(tmp_path: Path) -> None:
    adapter = small_adapter(
        tmp_path / "a", {"use_qalora": True, "kasa_config": {"beta": 1}, "init_lora_weights": "pissa"}
    )
    with pytest.raises(UnsupportedError, match="use_qalora, kasa_config, init_lora_weights 'pissa'"):
        read(adapter)
    with pytest.raises(UnsupportedError, match="peft_type is 'IA3'; only 'LORA'"):
        read(small_adapter(tmp_path / "a", {"peft_type": "IA3"}))


def test_every_field_of_peft_is_known() -> None:
    """A field that a new version of PEFT adds belongs in one of the tables or in the list of refused fields."""
    peft = pytest.importorskip("peft")
    names = {item.name for item in dataclasses.fields(peft.LoraConfig)}
    assert names <= {*_INERT, *_FIELDS, *REFUSED, "init_lora_weights"}
    assert not {*_INERT, *_FIELDS} & {*REFUSED}


def test_inert_fields_can_have_any_value(tmp_path: Path) -> None:
    values: dict[str, Any] = {name: {"x": 1} for name in _INERT - {"peft_type"}}
    assert read(small_adapter(tmp_path / "a", values)).factors


WRONG: dict[str, list[Any]] = {
    "r": [0, -1, 2.0, True, "2"],
    "rank_pattern": [[3], {"q_proj": 0}, {"q_proj": "2"}],
    "lora_alpha": ["much", True, [1]],
    "alpha_pattern": [[3], {"q_proj": "x"}],
    "use_rslora": [1, "true"],
    "use_dora": [1, {}],
    "lora_bias": ["all"],
    "ensure_weight_tying": [1],
    "peft_version": [0.18, ["0.18.1"]],
    "target_modules": [5, [5], {"a": 1}],
    "exclude_modules": [True, [None]],
    "layers_to_transform": ["1", [1.0], True],
    "layers_pattern": [5],
    "target_parameters": ["mlp.experts.gate_up_proj", [5]],
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [5, ["5"], {"embed_tokens": 5}, {"embed_tokens": [True]}],
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_the_wrong_type_are_an_error(tmp_path: Path, name: str) -> None:
    assert set(WRONG) == set(_FIELDS)
    for value in WRONG[name]:
        with pytest.raises(ExportError, match=f"{name} is .*, expected "):
            read(small_adapter(tmp_path / "a", {name: value}))
    read(small_adapter(tmp_path / "a", {name: None} if name != "r" else None))


def test_tensors_must_have_the_rank_of_the_config(tmp_path: Path) -> None:
    """PEFT computes the scale from the config's rank, and refuses tensors of another rank."""
    message = r"q_proj has factors \(2, 40\) and \(40, 2\), rank 8 of adapter_config.json needs \(8, 40\) and \(40, 8\)"
    for values in ({"r": 8}, {"r": None}, {"rank_pattern": {"q_proj": 8}}):
        with pytest.raises(ExportError, match=message):
            read(small_adapter(tmp_path / "a", values))
    assert read(small_adapter(tmp_path / "a", {"r": 8, "rank_pattern": {"q_proj": 2}})).factors


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": ["k_proj"]},
        {"target_modules": ["proj", "roj"]},
        {"target_modules": []},
        {"target_modules": r".*k_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": ["h"]},
        {"target_modules": "all-linear", "exclude_modules": ["q_proj"]},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"},
    ],
)
def test_tensors_of_modules_that_are_not_targets_are_an_error(tmp_path: Path, values: dict[str, Any]) -> None:
    """PEFT would not apply these tensors."""
    with pytest.raises(ExportError, match=r"surplus: layers\.0\.self_attn\.q_proj is adapted, but not a target"):
        read(small_adapter(tmp_path / "a", values))


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": None},
        {"target_modules": ["q_proj"]},
        {"target_modules": ["self_attn.q_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["layers"]},
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {
            "target_modules": ["model.layers.0.self_attn.q_proj"],
            "layers_to_transform": 1,
        },  # a full name matches any layer
        {"target_modules": r".*\.(q|k)_proj"},
        {"target_modules": r"(?!x).*"},  # a regular expression that llamac does not support
        {"target_modules": "all-linear", "exclude_modules": ["roj", "k_proj"]},
    ],
)
def test_targets_match_peft(tmp_path: Path, values: dict[str, Any]) -> None:
    assert read(small_adapter(tmp_path / "a", values)).factors
    utils = pytest.importorskip("peft.tuners.tuners_utils")
    peft = pytest.importorskip("peft")
    if values["target_modules"] not in (None, "all-linear"):
        settings = peft.LoraConfig(**values)
        assert utils.check_target_module_exists(settings, "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_every_module_that_peft_adapted_is_a_target(tmp_path: Path, name: str) -> None:
    """Some are modules for which PEFT's config and its tensors use different names."""
    config, shapes = adapter_files(name)
    small_adapter(tmp_path / "a", config)
    settings = AdapterConfig(tmp_path / "a" / "adapter_config.json")
    for tensor in shapes:
        if ".lora_" in tensor and ".experts" not in tensor:
            key = re.split(r"(?:\.base_layer)*\.lora_", tensor)[0].removeprefix(PREFIX)
            assert settings.is_parameter(f"{key}.weight") or settings.is_target(key)


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", "^a.b", "(q|k)_(proj|norm)$", r".*\.\d+\..*", "a{2,}b?", "(?:a|b)*c", "[^.]+", "", "a|b$", "(a?){3}"],
)
def test_patterns_match_what_re_matches(pattern: str) -> None:
    matches, matches_all = matcher(pattern), matcher(pattern, whole=True)
    texts = "q_proj a.q_proj aq_proj a.b x.a.b l.10.k_norm aab ab abac aaaa a.aaa"
    for text in ("", *texts.split()):
        assert matches(text) == bool(re.match(rf"(.*\.)?({pattern})$", text)), text
        assert matches_all(text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a" * 301, "has 301 characters, at most 300 are supported"),
        ("(" * 60 + "a" + ")" * 60, "is not supported from '"),
        ("a)", r"is not supported from '\)' on: expected characters, classes, groups"),
        ("(a", "is not supported from '' on"),
        ("*a", r"is not supported from '\*a' on"),
    ],
)
def test_patterns_that_are_not_understood_are_refused(pattern: str, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the pattern '.*' {problem}"):
        matcher(pattern)


def test_an_unsupported_pattern_is_an_error(tmp_path: Path) -> None:
    for name in ("alpha_pattern", "rank_pattern"):
        with pytest.raises(UnsupportedError, match=r"pattern '\(\?=q\)q_proj' is not supported"):
            read(small_adapter(tmp_path / "a", {name: {"(?=q)q_proj": 3}}))


@pytest.mark.parametrize("pattern", ["(" * 30 + "(a|a)*" + ")*" * 30, "(a?)" * 40 + "b", "(((a{9,}){9,}){9,})*$x"])
def test_hostile_patterns_are_matched_in_linear_time(pattern: str) -> None:
    """Python's `re` would take years."""
    assert not matcher(f"{pattern}c")("a" * 100)


# ---- tensors


def test_all_unfit_tensors_are_reported_at_once(tmp_path: Path) -> None:
    module = f"{PREFIX}model.layers.0.self_attn"
    one = np.ones((2, 40), np.float32)
    tensors = {
        f"{module}.q_proj.lora_A.weight": one,
        f"{module}.k_proj.lora_A.weight": one,
        f"{module}.k_proj.lora_B.weight": np.ones((7, 2), np.float32),
        f"{PREFIX}model.layers.9.self_attn.v_proj.lora_A.weight": one,
        f"{PREFIX}lm_head.weight": one,
        f"{module}.o_proj.lora_A.weight": np.ones((0, 40), np.float32),
        f"{module}.o_proj.lora_B.weight": np.ones((40, 0), np.float32),
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": one,
        "nonsense": one,
    }
    with pytest.raises(ExportError) as error:
        read(small_adapter(tmp_path / "a", tensors=tensors))
    for part in (
        "missing: layers.0.self_attn.q_proj.lora_B",
        "misshaped: layers.0.self_attn.k_proj has factors (2, 40) and (7, 2)",
        "surplus: base_model.model.model.layers.9.self_attn.v_proj.lora_A.weight",
        "misshaped: lm_head.weight is (2, 40)",
        "misshaped: layers.0.self_attn.o_proj has factors (0, 40) and (40, 0)",
        "misplaced: trainable_token_indices are not rows of embed_tokens, 0 to 300",
        "surplus: nonsense",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("values", "tensor", "message"),
    [
        ({}, "lora_magnitude_vector", r"surplus: layers\.0\.self_attn\.q_proj\.lora_magnitude_vector"),
        ({"use_dora": True}, "", r"missing: layers\.0\.self_attn\.q_proj\.lora_magnitude_vector"),
        ({}, "lora_B.bias", r"surplus: layers\.0\.self_attn\.q_proj\.lora_B\.bias"),
        ({"lora_bias": True}, "", r"missing: layers\.0\.self_attn\.q_proj\.lora_B\.bias"),
    ],
)
def test_tensors_must_agree_with_the_flags(tmp_path: Path, values: dict[str, Any], tensor: str, message: str) -> None:
    module = f"{PREFIX}model.layers.0.self_attn.q_proj"
    tensors: dict[str, NDArray[np.float32]] = {f"{module}.lora_A.weight": np.ones((2, 40), np.float32)}
    tensors[f"{module}.lora_B.weight"] = np.ones((40, 2), np.float32)
    if tensor:
        tensors[f"{module}.{tensor}"] = np.ones(40, np.float32)
    with pytest.raises(ExportError, match=message):
        read(small_adapter(tmp_path / "a", values, tensors))


def test_non_finite_numbers_are_an_error(checkpoint: Path, tmp_path: Path) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": np.full((2, 40), np.nan), f"{name}.lora_B.weight": np.ones((40, 2))}
    adapter = small_adapter(tmp_path / "a", tensors={key: value.astype(np.float32) for key, value in tensors.items()})
    with pytest.raises(ExportError, match=r"layers\.0\.attn_q\.weight \(an adapter's A\) holds numbers that are not"):
        export(checkpoint, tmp_path / "out.bin", lora=[adapter], probe_source=None)
    assert not (tmp_path / "out.bin").exists()
    export(checkpoint, tmp_path / "base.bin", probe_source=None)
    with pytest.raises(ExportError, match="are not finite"):
        llamac.load(tmp_path / "base.bin", lora=adapter)


def test_directories_without_an_adapter_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"is not an adapter: expected a PEFT directory with adapter_config\.json"):
        read(tmp_path)
    small_adapter(tmp_path / "style")
    with pytest.raises(ExportError, match=r"\(these directories inside have one: .*/style\)"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ExportError, match=r"has no weights: neither adapter_model\.safetensors nor"):
        read(tmp_path)
    with pytest.raises(UnsupportedError, match="the model's architecture is 'x': adapters are supported for"):
        read_adapter(tmp_path / "style", "x", MODEL)


# ---- arguments


def test_an_adapter_argument_is_one_adapter_or_several(checkpoint: Path, tmp_path: Path) -> None:
    a = Path("a")
    given: list[tuple[Any, list[tuple[Path, float]]]] = [
        ("a", [(a, 1)]),
        (a, [(a, 1)]),
        (("a", 0.5), [(a, 0.5)]),
        ((a, np.float32(0.5)), [(a, 0.5)]),
        (("a", "b"), [(a, 1), (Path("b"), 1)]),
        ((("a", 2), "b"), [(a, 2), (Path("b"), 1)]),
        ([("a", 0.5), a], [(a, 0.5), (a, 1)]),
        (iter(["a"]), [(a, 1)]),
        ((), []),
    ]
    for value, expected in given:
        assert adapters(value) == expected
    wrong: list[tuple[Any, str]] = [
        (5, "lora must be a path, a pair of a path and a strength, or a list of these, not int"),
        ({"a": 0.5}, "or a list of these, not dict"),
        (b"a", "or a list of these, not bytes"),
        (["a", 0.5], "lora must be .* not float"),
        (("a", None), "the strength of the adapter a must be a number, not NoneType"),
        (("a", True), "the strength of the adapter a must be a number, not bool"),
        ([("a", "0.5")], "the strength of the adapter a must be a number, not str"),
        ((5, 0.5), "lora must be .* not int"),
        ([("a", 0.5, 1)], "lora must be .* not tuple"),
    ]
    for value, message in wrong:
        with pytest.raises(ArgumentTypeError, match=message):
            adapters(value)
    with pytest.raises(ArgumentError, match="the strength of the adapter a is inf, expected a finite number"):
        adapters(("a", float("inf")))
    export(checkpoint, tmp_path / "base.bin", probe_source=None)
    style = str(small_adapter(tmp_path / "style"))
    pair, several = (llamac.load(tmp_path / "base.bin", lora=lora) for lora in ((style, 0.5), [(style, 0.5)]))
    with pair, several:
        assert pair.logits([1, 2]).tobytes() == several.logits([1, 2]).tobytes()


def test_command_line_adapters_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "a=2").mkdir()
    texts = ["some/dir", "some/dir=0.5", f"{tmp_path}/a=2", f"{tmp_path}/a=2=3"]
    folders = [Path("some/dir"), Path("some/dir"), tmp_path / "a=2", tmp_path / "a=2"]
    assert parse_adapters(texts) == list(zip(folders, [1.0, 0.5, 1.0, 3.0], strict=True))
    for text, message in (("dir=much", "the strength is 'much', expected a number"), ("dir=nan", "expected a finite")):
        with pytest.raises(ArgumentError, match=message):
            parse_adapters([text])


@pytest.mark.parametrize("name", ["ernie4_5", "nanochat"])
def test_factors_follow_rows_that_the_importer_permutes(tmp_path: Path, name: str) -> None:
    """In families whose RoPE does not rotate halves."""
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES[name])
    base = hf.read(folder, [])
    weights, numbers = checkpoint_tensors(folder), np.random.default_rng(3)
    factors: dict[str, NDArray[np.float32]] = {}
    for x in "qkv":
        key = f"model.layers.1.self_attn.{x}_proj"
        a, b = (
            numbers.standard_normal(shape).astype(np.float32) for shape in ((2, 40), (len(weights[f"{key}.weight"]), 2))
        )
        factors |= {f"{PREFIX}{key}.lora_A.weight": a, f"{PREFIX}{key}.lora_B.weight": b}
        weights[f"{key}.weight"] = weights[f"{key}.weight"] + 2 * b @ a
    adapter = read_adapter(small_adapter(tmp_path / "a", {}, factors), name, base.config)
    merged = merge(base, [(adapter, 1.0)])
    changed = family_checkpoint(tmp_path / "changed", FAMILY_CASES[name])
    write_safetensors(changed / "model.safetensors", weights)
    for part, tensor in hf.read(changed, []).tensors.items():
        np.testing.assert_allclose(merged.tensors[part].array(), tensor.array(), atol=1e-5, err_msg=part)


@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize("name", ["falcon_h1", "cohere2_moe"])
def test_factors_follow_weights_that_the_importer_multiplies(tmp_path: Path, name: str, is_dora: bool) -> None:
    """And so do biases and magnitudes."""
    folder = family_checkpoint(tmp_path / "m", FAMILY_CASES[name])
    base = hf.read(folder, [])
    weights, numbers = checkpoint_tensors(folder), np.random.default_rng(3)
    tensors: dict[str, NDArray[np.float32]] = {}
    for key, weight in checkpoint_tensors(folder).items():
        if key.endswith("_proj.bias"):
            tensors[f"{PREFIX}{key}"] = weights[key] = numbers.standard_normal(weight.shape).astype(np.float32)
        elif key.endswith("_proj.weight") and weight.ndim == 2:
            module = f"{PREFIX}{key.removesuffix('.weight')}"
            a, b = (
                numbers.standard_normal(shape).astype(np.float32) for shape in ((2, weight.shape[1]), (len(weight), 2))
            )
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            weights[key] = weight + 2 * b @ a
            if is_dora:
                tensors[f"{module}.lora_magnitude_vector"] = np.abs(b[:, 0])
                weights[key] *= np.abs(b[:, :1]) / np.linalg.norm(weights[key], axis=1, keepdims=True)
    adapter = small_adapter(tmp_path / "a", {"use_dora": is_dora}, tensors)
    merged = merge(base, [(read_adapter(adapter, name, base.config, base.metadata["config"]), 1.0)])
    changed = family_checkpoint(tmp_path / "changed", FAMILY_CASES[name])
    write_safetensors(changed / "model.safetensors", weights)
    for part, tensor in hf.read(changed, []).tensors.items():
        np.testing.assert_allclose(merged.tensors[part].array(), tensor.array(), atol=1e-5, err_msg=part)
    for source, out in ((folder, "base.bin"), (changed, "changed.bin")):
        export(source, tmp_path / out, dtype="f32", probe_source=None)
    adapted = llamac.load(tmp_path / "base.bin", kv_dtype="f32", lora=adapter)
    with adapted, llamac.load(tmp_path / "changed.bin", kv_dtype="f32") as model:
        np.testing.assert_allclose(adapted.logits([1, 2, 3]), model.logits([1, 2, 3]), atol=1e-3)


def test_weights_whose_multipliers_are_unknown_cannot_be_adapted(tmp_path: Path) -> None:
    """In models from GGUF files, which do not state them."""
    module = f"{PREFIX}model.layers.1.self_attn.q_proj"
    a, b = np.ones((2, 40), np.float32), np.ones((48, 2), np.float32)
    adapter = small_adapter(tmp_path / "a", {}, {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})
    base = parse_config(FAMILY_CASES["cohere2_moe"].config, []).model
    assert read_adapter(adapter, "cohere2_moe", base).factors.keys() == {"layers.1.attn_q.weight"}
    base = parse_config(FAMILY_CASES["falcon_h1"].config, []).model
    problem = (
        r"unsupported: layers\.1\.attn_q\.weight is multiplied by a number of config\.json, which .* does not state"
    )
    with pytest.raises(ExportError, match=problem):
        read_adapter(adapter, "falcon_h1", base)
    tensors = {f"{PREFIX}lm_head.weight": np.ones((base.vocab_size, 40), np.float32)}
    with pytest.raises(ExportError, match=r"output\.weight is multiplied by a number of config\.json"):
        read_adapter(small_adapter(tmp_path / "b", {}, tensors), "falcon_h1", base)
    tensors = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones((1, 40), np.float32)}
    adapter = small_adapter(tmp_path / "c", {"trainable_token_indices": [5]}, tensors)
    with pytest.raises(ExportError, match=r"token_embedding\.weight is multiplied by a number of config\.json"):
        read_adapter(adapter, "falcon_h1", base)


def test_parameters_of_gpt_oss_and_the_embedding_of_nanochat_cannot_be_adapted(tmp_path: Path) -> None:
    base = parse_config(FAMILY_CASES["gpt_oss"].config, []).model
    key = f"{PREFIX}model.layers.0.mlp.experts"
    factors = {
        f"{key}.lora_A.weight": np.ones((10, 40), np.float32),
        f"{key}.lora_B.weight": np.ones((104, 10), np.float32),
    }
    fields = {"target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(ExportError, match=r"surplus: base_model\.model\.model\.layers\.0\.mlp\.experts\.lora_A"):
        read_adapter(small_adapter(tmp_path / "a", fields, factors), "gpt_oss", base)
    base = parse_config(FAMILY_CASES["nanochat"].config, []).model
    key = f"{PREFIX}model.embed_tokens"
    factors = {
        f"{key}.lora_embedding_A": np.ones((2, 61), np.float32),
        f"{key}.lora_embedding_B": np.ones((40, 2), np.float32),
    }
    with pytest.raises(ExportError, match="surplus: the embedding is adapted, which this family norms"):
        read_adapter(small_adapter(tmp_path / "b", {}, factors), "nanochat", base)


def expert_adapter(
    folder: Path, ffn: int, old: bool, leaves: Sequence[str] = ("gate_up_proj", "down_proj"), **fields: str
) -> tuple[Path, dict[str, Any]]:
    """Write an adapter of tensors of layer 1 with 5 experts, width 40. Returns it, and what it adds to each tensor.

    old: Whether PEFT took their shapes as (experts, inputs, outputs), as before its version 0.19.1.
    """
    shapes, numbers = {"gate_up_proj": (2 * ffn, 40), "down_proj": (40, ffn)}, np.random.default_rng(3)
    tensors: dict[str, NDArray[np.float32]] = {}
    sums: dict[str, Any] = {}
    for leaf in leaves:
        inputs, outputs = shapes[leaf] if old else shapes[leaf][::-1]
        a, b = (numbers.standard_normal(shape).astype(np.float32) for shape in ((10, inputs), (outputs, 10)))
        key = f"{PREFIX}model.layers.1.mlp.experts{'' if leaf == leaves[-1] else '.base_layer'}"
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        order = "eio" if old else "eoi"
        sums[leaf] = 2 * np.einsum(f"ore,eri->{order}", b.reshape(outputs, 2, 5), a.reshape(5, 2, inputs))
    config = {"target_modules": [], "target_parameters": [*leaves], **fields}
    return small_adapter(folder, config, tensors), sums


def check_experts(adapter: Adapter, sums: dict[str, Any]) -> None:
    for expert, (name, parts) in itertools.product(range(5), PARTS_OF_EXPERTS.items()):
        if name in sums:
            factors = [adapter.factors[f"layers.1.experts.{expert}.{part}.weight"] for part in parts]
            found = np.concatenate([one.scale * one.b.array() @ one.a.array() for one in factors])
            np.testing.assert_allclose(found, sums[name][expert], rtol=1e-4, atol=1e-4)


PARTS_OF_EXPERTS = {"gate_up_proj": ("ffn_gate", "ffn_up"), "down_proj": ("ffn_down",)}


@pytest.mark.parametrize("old", [False, True])
def test_experts_of_old_and_new_versions_of_peft_are_read(tmp_path: Path, old: bool) -> None:
    """Old ones adapt the transposed matrices."""
    adapter, sums = expert_adapter(tmp_path / "a", 24, old)
    check_experts(read_adapter(adapter, "qwen3_moe", parse_config(FAMILY_CASES["qwen3_moe"].config, []).model), sums)


def test_experts_whose_shapes_fit_both_layouts_are_those_of_the_other_experts_or_of_the_version(tmp_path: Path) -> None:
    """As in OLMoE-1B-7B and MiniMax M2: the experts' gate and up are as wide as the model together."""
    base = parse_config({**FAMILY_CASES["olmoe"].config, "intermediate_size": 20}, []).model
    for old in (False, True):
        adapter, sums = expert_adapter(tmp_path / "a", 20, old)
        check_experts(read_adapter(adapter, "olmoe", base), sums)
    for version, old in (("0.18.1", True), ("0.19.0", True), ("0.19.1", False), ("0.20.0", False)):
        adapter, sums = expert_adapter(tmp_path / "b", 20, old, ["gate_up_proj"], peft_version=version)
        check_experts(read_adapter(adapter, "olmoe", base), sums)
    adapter, _ = expert_adapter(tmp_path / "c", 20, False, ["gate_up_proj"])
    problem = r"unclear: layers\.1\.mlp\.experts\.gate_up_proj has factors .* which fit .* set peft_version"
    with pytest.raises(ExportError, match=problem):
        read_adapter(adapter, "olmoe", base)


def test_parts_of_a_stored_matrix_cannot_be_adapted(tmp_path: Path) -> None:
    """In OLMo Hybrid, whose delta nets have q, k and v apart."""
    base = parse_config(FAMILY_CASES["olmo_hybrid"].config, []).model
    key = f"{PREFIX}model.layers.1.linear_attn.k_proj"
    factors = {
        f"{key}.lora_A.weight": np.ones((2, 40), np.float32),
        f"{key}.lora_B.weight": np.ones((128, 2), np.float32),
    }
    problem = (
        r"unsupported: .*linear_attn\.k_proj is a part of layers\.1\.delta_qkv\.weight, which has no adapters of parts"
    )
    with pytest.raises(ExportError, match=problem):
        read_adapter(small_adapter(tmp_path / "a", {"target_modules": ["k_proj"]}, factors), "olmo_hybrid", base)
