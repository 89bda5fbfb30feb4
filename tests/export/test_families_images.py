"""Models with images, of which the language model is read: their configs, and the layouts of their tensors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from golden.family_cases import FAMILY_CASES
from golden.image_cases import IMAGE_CASES
from golden.make import auto_class, transformers_logits
from golden.make_families import family_checkpoint
from golden.published_images import IMAGES
from golden.tiny_checkpoints import Config, Tensors, changed, random_tensor, write_config, write_safetensors
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, ModelConfig
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.config import parse_config
from llamac.export.hf.families import FAMILIES, row_of
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.write import write_hf

BASES = [name for name, case in IMAGE_CASES.items() if not case.base]
WRITTEN = [name for name in BASES if name != "llama4"]  # its experts are stored only together
MULTIMODAL = "config.json describes a multimodal model: only its language model is read"


def published(name: str) -> ModelConfig:
    return parse_config(IMAGES[name], []).model


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    """Assert equal configs, and tensors equal bit for bit."""
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor.array(), other.tensors[name].array(), err_msg=name)


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a directory; matrices of experts are stacks of matrices."""
    stored = read_safetensors(folder / "model.safetensors")
    return {
        name: np.stack([tensor.part(i).lazy().array() for i in range(tensor.shape[0])])
        if len(tensor.shape) == 3
        else np.ones(tensor.shape, np.float32)  # of the vision tower
        if len(tensor.shape) > 3
        else tensor.lazy().array()
        for name, tensor in stored.items()
    }


# ---- configs


def test_the_types_of_layers_can_include_those_of_the_mtp_layers() -> None:
    """As published. transformers and vLLM use only the others."""
    text = IMAGES["EXAONE-4.5-33B"]["text_config"]
    for extra in (["sliding_attention"], ["full_attention"]):
        longer = changed(text, layer_types=text["layer_types"] + extra)
        config = changed(IMAGES["EXAONE-4.5-33B"], text_config=longer)
        assert parse_config(config, []).model == published("EXAONE-4.5-33B")
        without = changed(longer, num_nextn_predict_layers=0)
        with pytest.raises(ExportError, match=r"layer_types is .*, expected full_attention or sliding_attention"):
            parse_config(changed(config, text_config=without), [])


@pytest.mark.parametrize("name", IMAGES)
def test_published_configs_are_accepted_with_a_warning(name: str) -> None:
    warnings: list[str] = []
    model = parse_config(json.loads(json.dumps(IMAGES[name])), warnings).model
    sizes = IMAGES[name].get("text_config", IMAGES[name])
    # the default sizes of LLaMA and Mistral are missing in text_config of LLaVA
    assert model.dim == sizes.get("hidden_size", 4096)
    assert len(model.layers) == sizes.get("num_hidden_layers", 32)
    assert model.context == sizes["max_position_embeddings"]
    assert warnings[0] == MULTIMODAL
    assert len(warnings) == (2 if name == "Qwen2.5-VL-7B-again" else 1)


def test_published_configs_give_the_expected_models() -> None:
    qwen2, qwen3, experts = (published(name) for name in ("Qwen2.5-VL-7B", "Qwen3-VL-4B", "Qwen3-VL-30B-A3B"))
    assert (qwen2.head_dim, qwen2.n_kv_heads, qwen2.qk_norm, qwen2.tied_output) == (128, 4, "none", False)
    assert {layer.window for layer in qwen2.layers} == {0}
    assert published("Qwen2.5-VL-7B-again") == qwen2
    assert (qwen3.head_dim, qwen3.rope_dim, qwen3.qk_norm, qwen3.tied_output) == (128, (128,), "head", True)
    layer = experts.layers[0]
    assert (layer.n_experts, layer.n_experts_used, layer.ffn_dim, layer.expert_weights) == (128, 8, 768, 1)
    (rope,) = parse_config(IMAGES["Qwen3-VL-4B"], []).ropes
    np.testing.assert_allclose(rope.inv_freq[[0, 1, 63]], 5e6 ** (-np.array([0, 2, 126]) / 128), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Qwen2-VL-7B", {"mystery": 3}, "mystery is 3: llamac does not know this key"),
        ("Qwen2-VL-7B", {"head_dim": 64}, "head_dim is 64: llamac does not know this key"),
        ("Qwen2.5-VL-7B-again", {"mystery": 3}, "mystery is 3: llamac does not know this key"),
        ("Qwen3-VL-4B", {"mystery": 3}, "mystery is 3: llamac does not know this key"),
        ("Qwen3-VL-4B", {"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001: llamac does not know this key"),
        ("Qwen3-VL-4B", {"text_config": None}, "text_config is None, expected an object"),
        ("Qwen3-VL-4B", {"text_config": {"mystery": 3}}, "mystery is 3: llamac does not know this key"),
        ("Qwen3-VL-4B", {"text_config": {"rope_scaling": {"rope_type": "mystery"}}}, "has the type 'mystery'"),
        ("Qwen3-VL-4B", {"text_config": {"model_type": "qwen3"}}, "the language model's model_type is 'qwen3'"),
        ("Qwen3-VL-4B", {"architectures": ["Qwen3VLForEmbedding"]}, "'Qwen3VLForEmbedding', which is not a language"),
        ("Qwen3-VL-30B-A3B", {"text_config": {"norm_topk_prob": False}}, "norm_topk_prob is False"),
        ("SmolVLM-256M", {"mystery": 3}, "mystery is 3: llamac does not know this key"),
        ("SmolVLM-256M", {"vocab_size": 3}, "vocab_size is 3: llamac does not know this key"),
        ("SmolVLM-256M", {"text_config": {"qk_layer_norms": True, "vocab_size": 49280}}, "qk_layer_norms is T"),
        ("SmolVLM-256M", {"text_config": {"model_type": "mistral"}}, "the language model's model_type is 'mistral'"),
        ("GLM-4.1V-9B", {"attention_bias": False}, "attention_bias is False"),
        ("GLM-4.5V", {"text_config": {"num_local_experts": 9, "n_routed_experts": 8}}, "num_local_experts is 9, but n"),
        ("GLM-4.1V-9B", {"head_dim": 64}, "head_dim is 64, expected hidden_size / num_attention_heads"),
    ],
)
def test_wrong_keys_are_refused_by_name(name: str, change: Config, message: str) -> None:
    with pytest.raises((ExportError, UnsupportedError), match=message):
        parse_config({**IMAGES[name], **change}, [])


def test_keys_outside_text_config_that_repeat_others_do_not_count() -> None:
    """transformers reads text_config alone; the keys outside are those of the file that it had read."""
    warnings: list[str] = []
    again = IMAGES["Qwen2.5-VL-7B-again"]
    model = parse_config({**again, "rms_norm_eps": 1e-3}, warnings).model
    assert model == published("Qwen2.5-VL-7B")
    assert warnings[1].endswith("its text_config, which counts, of rms_norm_eps, sliding_window")


def test_the_language_model_of_mistral3_is_mistral_where_the_config_does_not_say() -> None:
    config = IMAGES["Mistral-Small-3.1-24B"]
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    assert parse_config({**config, "text_config": text}, []).model == published("Mistral-Small-3.1-24B")


def test_the_language_model_has_the_default_family_where_the_config_does_not_say() -> None:
    """In transformers, this is Qwen 2 in InternVL, and Cohere 2 in Aya Vision, whose logits have a scale."""
    for name in ("InternVL3-8B-hf", "aya-vision-8b"):
        text = changed(IMAGES[name]["text_config"], model_type=None)
        assert parse_config({**IMAGES[name], "text_config": text}, []).model == published(name)
    assert published("aya-vision-8b").logit_scale == 0.25


def test_the_logits_of_command_a_have_a_scale() -> None:
    """transformers 5.24 ignores it; vLLM multiplies by it. That of Command A Vision is 0.25."""
    for name in ("command-a-plus-05-2026", "aya-vision-8b"):
        text = changed(IMAGES[name]["text_config"], logit_scale=0.25)
        assert parse_config({**IMAGES[name], "text_config": text}, []).model.logit_scale == 0.25
    assert published("command-a-plus-05-2026").logit_scale == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Ovis2-1B-hf", {"hidden_size": 1536, "vocab_size": 151643}),  # transformers' defaults
        ("llava-1.5-7b-hf", {"vocab_size": 32000}),
        ("llava-v1.6-mistral-7b-hf", {"vocab_size": 32000}),
        ("llava-onevision-qwen2-7b-ov-hf", {"vocab_size": 152128}),
    ],
)
def test_sizes_outside_text_config_that_only_images_need_do_not_count(name: str, changes: Config) -> None:
    warnings: list[str] = []
    assert parse_config({**IMAGES[name], **changes}, warnings).model == published(name)
    assert warnings == [MULTIMODAL]


def test_how_internvl_was_trained_does_not_count() -> None:
    """InternVL 3.5 has these keys."""
    keys = {"debug": False, "ep_size": 1, "micro_forward": False, "skip_checkpoint": False, "use_deepep": False}
    for name in ("InternVL3-8B-hf", "InternVL3_5-8B-HF"):
        text = {**IMAGES[name]["text_config"], **keys}
        assert parse_config({**IMAGES[name], "text_config": text}, []).model == published(name)


def test_the_language_model_of_mistral_small_4_is_read(tmp_path: Path) -> None:
    """Its family is in text_config."""
    plain = family_checkpoint(tmp_path / "plain", FAMILY_CASES["mistral4"])
    text = json.loads((plain / "config.json").read_text())
    outer = {**IMAGES["Mistral-Small-4-119B-2603 (bf16), with images"], "text_config": text}
    (tmp_path / "m").mkdir()
    write_config(tmp_path / "m", changed(outer, tie_word_embeddings=None))
    names = {name: re.sub(r"^model\.", "language_model.model.", name) for name in tensors_of(plain)}
    weights = {names[name].replace("lm_head", "language_model.lm_head"): x for name, x in tensors_of(plain).items()}
    tower = {"vision_tower.patch_conv.weight": np.ones((4, 3, 2, 2), np.float32)}
    write_safetensors(tmp_path / "m" / "model.safetensors", weights | tower)
    assert_same(hf.read(tmp_path / "m", []), hf.read(plain, []))


@pytest.mark.parametrize(("inside", "outside"), [(True, False), (True, None), (None, True)])
def test_the_embedding_is_tied_if_one_of_the_objects_says_so(inside: bool | None, outside: bool | None) -> None:
    config = IMAGES["Qwen2.5-VL-7B-again"]
    text = changed(config["text_config"], tie_word_embeddings=inside)
    assert parse_config(changed({**config, "text_config": text}, tie_word_embeddings=outside), []).model.tied_output


# ---- tensors


@pytest.mark.parametrize(
    "name", [name for name in BASES if name not in ("idefics3", "lfm2_vl", "lfm3_vl", "llama4", "smolvlm")]
)
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_the_weights_are_found_under_old_and_new_names(name: str, prefix: str, tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "m", IMAGE_CASES[name])
    tensors = tensors_of(folder)
    tower = "vision_tower" if any("vision_tower." in full_name for full_name in tensors) else "visual"
    assert any(f"{tower}." in full_name for full_name in tensors)
    shutil.copytree(folder, tmp_path / "renamed")
    usual = "model." if name.startswith("qwen2") else "model.language_model."  # as transformers 5 saves it
    published = "language_model.model."
    usual = published if f"{published}norm.weight" in tensors else usual
    renamed = {
        re.sub(f"^{usual}(?!{tower})", prefix, full_name).replace(f"model.{tower}.", f"{tower}."): numbers
        for full_name, numbers in tensors.items()
    }
    assert f"{usual}norm.weight" in tensors
    assert f"{prefix}norm.weight" in renamed
    write_safetensors(tmp_path / "renamed" / "model.safetensors", renamed)
    assert_same(hf.read(folder, []), hf.read(tmp_path / "renamed", []))


def test_experts_are_read_with_inputs_first_as_published(tmp_path: Path) -> None:
    """transformers 4 has them so, transformers 5 has outputs first."""
    folder = family_checkpoint(tmp_path / "m", IMAGE_CASES["qwen3_vl_moe"])
    expected, tensors = hf.read(folder, []), tensors_of(folder)
    turned = {
        name: np.ascontiguousarray(numbers.swapaxes(1, 2)) if ".experts." in name else numbers
        for name, numbers in tensors.items()
    }
    assert {numbers.shape for name, numbers in turned.items() if name.endswith("gate_up_proj")} == {(5, 40, 48)}
    shutil.copytree(folder, tmp_path / "turned")
    write_safetensors(tmp_path / "turned" / "model.safetensors", turned)
    assert_same(expected, hf.read(tmp_path / "turned", []))


@pytest.mark.parametrize("name", BASES)
def test_a_checkpoint_saved_by_transformers_is_the_same(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = family_checkpoint(tmp_path / "m", IMAGE_CASES[name])
    auto_class(folder).from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert "text_config" in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert_same(hf.read(folder, []), hf.read(tmp_path / "saved", []))


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path / "m", IMAGE_CASES["qwen3_vl"])
    tensors = {**tensors_of(folder), "model.language_model.layers.0.mystery.weight": random_tensor("x", (4,))}
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ExportError, match=r"unknown: model\.layers\.0\.mystery\.weight"):
        hf.read(folder, [])


# ---- writing


VARIANTS = ["qwen2_vl-yarn", "qwen2_5_vl-layer_types", "qwen3_vl-yarn", "qwen3_vl-tied"]


@pytest.mark.parametrize("name", [*WRITTEN, *VARIANTS])
def test_the_language_model_is_written_as_a_family_without_images(name: str, tmp_path: Path) -> None:
    case = FAMILY_CASES[name]
    folder = family_checkpoint(tmp_path / "m", case)
    export(folder, tmp_path / "flat.bin", probe_source=None)
    export(tmp_path / "flat.bin", tmp_path / "again", to="hf")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    row = row_of(case.config)
    assert row is not None
    family = FAMILIES[row.written_as]
    assert (written["model_type"], written["architectures"]) == (family.model_type, [family.architectures[0]])
    assert "vision_config" not in written
    assert_same(hf.read(tmp_path / "again", []), hf.read(folder, []))
    pytest.importorskip("transformers")
    found, expected = (transformers_logits(path, case.ids) for path in (tmp_path / "again", folder))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_a_missing_config_is_generated(tmp_path: Path) -> None:
    """A model imported from GGUF has no config."""
    made = hf.read(family_checkpoint(tmp_path / "m", IMAGE_CASES["qwen3_vl_moe"]), [])
    del made.metadata["config"]
    write_hf(made, tmp_path / "again", "f32")
    assert_same(hf.read(tmp_path / "again", []), made)
