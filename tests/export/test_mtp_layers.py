"""MTP layers of checkpoints: which tensors they become, whole, incomplete and in several files, and ways back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_mtp_samples import write_with_mtp
from gguf_samples import checkpoint_tensors, write_gguf
from quantized_checkpoints import check_refused, fp8, load, quantized_pair, write

import hf_reading
import llamac
from golden.parity_table import make_folder
from golden.tiny_checkpoints import Tensors, random_tensor, write_safetensors
from llamac.errors import ExportError
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.flat.model import read as read_flat
from llamac.export.gguf import model as gguf_model
from llamac.export.hf import model as hf
from llamac.export.hf.write import write_hf

QWEN = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
NUMBERED = ["deepseek_v3", "glm4_moe_lite", "glm4_moe"]  # the MTP layer has the number after the last layer's
FAMILIES = [*QWEN, *NUMBERED, "exaone4"]
# Our modules around the layer.
OURS = ["mtp.in", "mtp.embedding_norm", "mtp.hidden_norm", "mtp.output_norm"]
OF_QWEN = ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
OF_OTHERS = ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
ERNIE = "ernie4_5_moe"  # its layer has no norm of its own at the end
OF_ERNIE = ["model.mtp_linear_proj.0", "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"]


def theirs_of(weights: Tensors, family: str) -> list[str]:
    """The names of OURS in a checkpoint, of whose layers the MTP layer is not one."""
    if family not in NUMBERED:
        return OF_ERNIE if family == ERNIE else OF_QWEN
    n = 1 + max(int(found[1]) for name in weights if (found := re.search(r"^model\.layers\.(\d+)\.self_attn", name)))
    return [f"model.layers.{n}.{name}" for name in OF_OTHERS]


def mtp_tensors(weights: Tensors, family: str) -> tuple[int, Tensors]:
    """The layer with attention that the MTP layer is like, and the tensors of an MTP layer that equals it."""
    attends = [int(found[1]) for name in weights if (found := re.search(r"layers\.(\d+)\.self_attn", name))]
    layer = min(attends) if family in ("exaone4", ERNIE) else max(attends)
    dim = next(len(values) for name, values in weights.items() if name.endswith(".post_attention_layernorm.weight"))
    around = theirs_of(weights, family)
    prefix = (
        "model.mtp_block.0."
        if family == ERNIE
        else "mtp.layers.0."
        if family not in NUMBERED
        else around[0].removesuffix("eh_proj")
    )
    own = {
        re.sub(rf"^.*layers\.{layer}\.", prefix, name): values
        for name, values in weights.items()
        if f"layers.{layer}." in name
    }
    own |= {f"{name}.weight": random_tensor(name, (dim,)) for name in around[1:]}
    if family in NUMBERED:
        own[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        own[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"]
    return layer, own | {f"{around[0]}.weight": random_tensor("fc", (dim, 2 * dim))}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], tuple[Path, int, Tensors]]:
    """Write the checkpoint of a family with an MTP layer. Returns the folder, the layer it equals, and its tensors."""

    return lambda family: with_mtp_layer(tmp_path, family)


def with_mtp_layer(root: Path, family: str) -> tuple[Path, int, Tensors]:
    """Write the checkpoint of a family with an MTP layer; see `folder`."""
    path = make_folder(root, family)
    config = json.loads((path / "config.json").read_text())
    if "norm_topk_prob" in config:  # as in every GGUF file of this family
        (path / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    weights = checkpoint_tensors(path)
    layer, own = mtp_tensors(weights, family)
    write_safetensors(path / "model.safetensors", weights | own)
    return path, layer, own


def check_layer(made: Checkpoint, layer: int, own: Tensors) -> None:
    n = len(made.config.layers)
    assert made.config.mtp == made.config.layers[layer]
    of_layer = {name for name in made.tensors if name.startswith(f"layers.{layer}.")}
    assert len(of_layer) > 8
    for name in of_layer:
        copy = made.tensors[name.replace(f"layers.{layer}.", f"layers.{n}.", 1)]
        np.testing.assert_array_equal(copy.array(), made.tensors[name].array(), name)
    for name, values in around(own, str(made.metadata["architecture"])).items():
        np.testing.assert_array_equal(made.tensors[f"{name}.weight"].array(), values)


def around(own: Tensors, family: str) -> Tensors:
    """The values of OURS. Qwen's norms are stored minus one."""
    if "mtp.fc.weight" in own:
        one = family.startswith("qwen")
        names = zip(OURS, OF_QWEN, strict=True)
        return {name: own[f"{of_qwen}.weight"] + (one and name != "mtp.in") for name, of_qwen in names}
    if family == ERNIE:
        return {name: own[f"{theirs}.weight"] for name, theirs in zip(OURS[:3], OF_ERNIE, strict=True)}
    ends = tuple(f".{name}.weight" for name in OF_OTHERS)
    return {OURS[ends.index(end)]: own[name] for name in own for end in ends if name.endswith(end)}


@pytest.mark.parametrize("family", [*FAMILIES, ERNIE])
def test_the_layer_is_read_and_written_back(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, tmp_path: Path
) -> None:
    path, layer, own = folder(family)
    made = hf_reading.read(path)
    check_layer(made, layer, own)
    write_hf(made, tmp_path / "again", "f32")
    again = checkpoint_tensors(tmp_path / "again")
    copies = {name for name in own if name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))}
    assert {name for name in again if name in own} == own.keys() - copies
    check_layer(hf_reading.read(tmp_path / "again"), layer, own)


def test_the_norm_after_the_layer_of_ernie_is_the_models(folder: Callable[[str], tuple[Path, int, Tensors]]) -> None:
    """It has no experts, even in a model all of whose layers have some."""
    path, _, _ = folder(ERNIE)
    made = hf_reading.read(path)
    ours, of_model = (made.tensors[f"{name}.weight"].array() for name in ("mtp.output_norm", "output_norm"))
    np.testing.assert_array_equal(ours, of_model)
    config = json.loads((path / "config.json").read_text())
    found = hf_reading.parse({**config, "moe_layer_start_index": 0, "moe_layer_end_index": -1})
    assert {layer.ffn for layer in found.model.layers} == {"experts"}
    assert found.mtp_layer == made.config.mtp == made.config.layers[0]


def exaone(folder: Path, **changes: Any) -> tuple[Path, Tensors]:
    """A K-EXAONE whose MTP layer has the tensors of layer 0, which has a dense network; and the tensors around it."""
    path = make_folder(folder, "exaone_moe")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1, **changes}))
    weights = checkpoint_tensors(path)
    first = "model.layers.0."
    layer = {name.replace(first, "mtp.layers.0."): x for name, x in weights.items() if name.startswith(first)}
    dim = config["hidden_size"]
    own = {f"{name}.weight": random_tensor(name, (dim,)) for name in OF_QWEN[1:]}
    own |= {"mtp.fc.weight": random_tensor("fc", (dim, 2 * dim))}
    write_safetensors(path / "model.safetensors", weights | layer | own)
    return path, own


@pytest.mark.parametrize(
    ("changes", "window", "rope"),
    [
        ({"mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]}, 0, -1),  # as published
        ({"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [5]}, 5, 0),
        ({"mtp_layer_types": ["full_attention"], "layer_types": ["full_attention"] * 3}, 0, 0),
    ],
)
def test_keys_describe_the_layer_of_k_exaone(changes: dict[str, Any], window: int, rope: int, tmp_path: Path) -> None:
    windows = [0, 0, 0] if "layer_types" in changes else [7, None, 7]
    path, own = exaone(tmp_path, **changes, sliding_windows=windows, is_moe_layer=[False, True, True])
    made = hf_reading.read(path)
    write_hf(made, tmp_path / "again", "f32")
    for read in (made, hf_reading.read(tmp_path / "again")):
        assert read.config.mtp == replace(read.config.layers[0], window=window, rope=rope)
        assert read.config.mtp.ffn == "gated"
        for name, theirs in zip(OURS, OF_QWEN, strict=True):
            np.testing.assert_array_equal(read.tensors[f"{name}.weight"].array(), own[f"{theirs}.weight"])
        for name in ("attn_q", "attn_k_norm", "ffn_down", "ffn_norm"):
            ours, first = (read.tensors[f"layers.{layer}.{name}.weight"].array() for layer in (3, 0))
            np.testing.assert_array_equal(ours, first)


def test_a_layer_of_k_exaone_of_unknown_kind_is_left_out(tmp_path: Path) -> None:
    """As published at first."""
    warnings: list[str] = []
    made = hf.read(exaone(tmp_path)[0], warnings)
    assert made.config.mtp is None
    assert "config.json has no mtp_layer_types" in warnings[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_windows": [7, 7, 7]}, "sliding_windows is [7, 7, 7], expected [7, 0, 7], as the other keys say"),
        ({"sliding_windows": 7}, "sliding_windows is 7, expected [7, 0, 7], as the other keys say"),
        ({"is_moe_layer": [True] * 3}, "is_moe_layer is [True, True, True], expected [False, True, True]"),
        ({"mtp_layer_types": ["linear"]}, "mtp_layer_types is ['linear'], expected full_attention or sliding"),
        ({"mtp_layer_types": "full_attention"}, "mtp_layer_types is 'full_attention', expected"),
        ({"mtp_layer_types": ["sliding_attention"]}, "mtp_sliding_windows is missing, expected an integer from 1"),
    ],
)
def test_contradicting_keys_of_k_exaone_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError) as caught:
        hf.read(exaone(tmp_path, **changes)[0], [])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        ("qwen3_5_text", {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"]}),
        ("exaone4", {"model_type": "exaone4_5", "architectures": ["Exaone4_5_ForConditionalGeneration"]}),
    ],
)
def test_the_layer_of_a_model_with_images_is_read(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, whole: dict[str, Any]
) -> None:
    """Its tensors are beside the language model's, whose names are longer there."""
    path, layer, own = folder(family)
    whole = {**whole, "text_config": json.loads((path / "config.json").read_text())}
    (path / "config.json").write_text(json.dumps({**whole, "vision_config": {"depth": 1}}))
    weights = checkpoint_tensors(path)
    longer = {re.sub(r"^model\.", "model.language_model.", name): values for name, values in weights.items()}
    write_safetensors(path / "model.safetensors", longer | {"model.visual.pos_embed.weight": np.ones((2, 2), "f4")})
    warnings: list[str] = []
    check_layer(hf.read(path, warnings), layer, own)
    assert warnings == ["config.json describes a multimodal model: only its language model is read"]


def test_types_of_layers_that_list_the_layer_are_written_without_it(
    folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path
) -> None:
    """transformers refuses more types than layers."""
    path, layer, own = folder("exaone4")
    text = json.loads((path / "config.json").read_text())
    text |= {"layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]}
    whole = {"model_type": "exaone4_5", "text_config": text | {"num_nextn_predict_layers": 1, "architectures": None}}
    (path / "config.json").write_text(json.dumps(whole))
    write_hf(hf.read(path, []), tmp_path / "again", "f32")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["layer_types"] == text["layer_types"][:4]
    check_layer(hf_reading.read(tmp_path / "again"), layer, own)


def test_a_flat_file_keeps_the_layer(folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path) -> None:
    path, layer, own = folder("qwen3_next")
    export(path, tmp_path / "model.bin", probe_source=None)
    check_layer(read_flat(tmp_path / "model.bin"), layer, own)


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("qwen3_5_text", "mtp.fc.weight"),
        ("qwen3_5_text", "mtp.layers.0.self_attn.q_proj.weight"),
        ("exaone4", "mtp.layers.0.post_feedforward_layernorm.weight"),
        (ERNIE, "model.mtp_emb_norm.0.weight"),
        (ERNIE, "model.mtp_block.0.mlp.down_proj.weight"),
    ],
)
def test_an_incomplete_layer_is_left_out(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, missing: str
) -> None:
    path, _, _ = folder(family)
    weights = checkpoint_tensors(path)
    del weights[missing]
    write_safetensors(path / "model.safetensors", weights)
    warnings: list[str] = []
    made = hf.read(path, warnings)
    n = len(made.config.layers)
    assert made.config.mtp is None
    assert not [name for name in made.tensors if name.startswith(("mtp.", f"layers.{n}."))]
    (warning,) = warnings
    assert "the MTP layer is left out" in warning
    assert "missing: " in warning


def test_a_problem_of_the_model_is_not_hidden_by_its_mtp_layer(
    folder: Callable[[str], tuple[Path, int, Tensors]],
) -> None:
    path, _, _ = folder("qwen3_5_text")
    weights = checkpoint_tensors(path)
    del weights["model.layers.1.self_attn.q_proj.weight"]
    write_safetensors(path / "model.safetensors", weights)
    with pytest.raises(ExportError, match=r"missing: model\.layers\.1\.self_attn\.q_proj\.weight"):
        hf.read(path, [])


def test_a_quantized_layer_without_a_factor_is_left_out(
    folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path
) -> None:
    """And so is one that config.json names, but that the quantizer did not save. Other factors are needed."""
    path, _, own = folder("glm4_moe")
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    attention = (*own, "model.layers.0.self_attn.o_proj.weight")
    _, quantized = quantized_pair(
        tmp_path, path, config, lambda name: name in attention and "self_attn" in name, fp8((16, 16))
    )
    tensors = load(quantized)
    changed = json.loads((quantized / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    assert hf_reading.read(quantized).config.mtp is not None
    factor = next(name for name in tensors if name in {f"{name}_scale_inv" for name in own})
    needed = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    without = {name: stored for name, stored in tensors.items() if name != factor}
    absent = {name: stored for name, stored in tensors.items() if name.removesuffix("_scale_inv") not in own}
    for left, message in ((without, f"missing: {factor}"), (absent, "config.json has num_nextn_predict_layers 1, but")):
        warnings: list[str] = []
        made = hf.read(write(quantized, changed, left), warnings)
        assert made.config.mtp is None
        (warning,) = warnings
        assert "the MTP layer is left out" in warning
        assert message in warning
    for left in (tensors, without):
        damaged = {name: stored for name, stored in left.items() if name != needed}
        check_refused(quantized, changed, damaged, f"missing: {needed}")


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [("qwen3_5_text", "layers.0.", "layers.1."), ("glm4_moe", "layers.3.", "layers.4."), (ERNIE, ".0.", ".1.")],
)
def test_only_the_first_of_several_layers_is_kept(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, first: str, second: str
) -> None:
    path, layer, own = folder(family)
    weights = checkpoint_tensors(path)
    names = {name: re.sub(f"({re.escape(first)})", second, name, count=1) for name in own}
    more = {name: own[old] for old, name in names.items() if name != old}
    write_safetensors(path / "model.safetensors", weights | more)
    check_layer(hf_reading.read(path), layer, own)


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_layer_with_matrices_of_its_own_is_left_out(
    folder: Callable[[str], tuple[Path, int, Tensors]], copy: str
) -> None:
    path, _, own = folder("glm4_moe")
    weights = checkpoint_tensors(path)
    name = next(name for name in own if name.endswith(f".{copy}.weight"))
    write_safetensors(path / "model.safetensors", weights | {name: weights[name] * 2})
    warnings: list[str] = []
    assert hf.read(path, warnings).config.mtp is None
    (warning,) = warnings
    assert f"the MTP layer is left out, so llamac cannot draft with it: {name} and " in warning


def test_layers_that_config_does_not_count_are_refused(folder: Callable[[str], tuple[Path, int, Tensors]]) -> None:
    """Without the tensors around an MTP layer, they do not form one."""
    path, _, _ = folder("glm4_moe")
    weights = {name: values for name, values in checkpoint_tensors(path).items() if not name.endswith("eh_proj.weight")}
    write_safetensors(path / "model.safetensors", weights)
    with pytest.raises(ExportError, match=r"unknown: model\.layers\.3\.embed_tokens\.weight"):
        hf.read(path, [])


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
@pytest.mark.parametrize("listed", [True, False])
def test_shards_can_lack_the_layer(
    folder: Callable[[str], tuple[Path, int, Tensors]], listed: bool, family: str
) -> None:
    """Copies of checkpoints without these tensors often keep the index of the original, and the other way round."""
    path, _, own = folder(family)
    weights = checkpoint_tensors(path)
    stored = {name: values for name, values in weights.items() if name not in own} if listed else weights
    (path / "model.safetensors").unlink()
    write_safetensors(path / "model-00001-of-00001.safetensors", stored)
    names = weights if listed else weights.keys() - own.keys()
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hf_reading.read(path).config.mtp is None


# ---- GGUF


def gguf_of(path: Path, tmp_path: Path, **options: Any) -> Path:
    """The GGUF file of a directory. options: see `write_with_mtp`."""
    config = json.loads((path / "config.json").read_text())
    return write_with_mtp(tmp_path / "model.gguf", config, checkpoint_tensors(path), **options)


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_has_the_layer_of_its_checkpoint(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, more: int, tmp_path: Path
) -> None:
    """Of several blocks that predict further tokens, the first counts."""
    path, _, _ = folder(family)
    ours, theirs = gguf_model.read(gguf_of(path, tmp_path, more=more), []), hf_reading.read(path)
    assert ours.config.mtp == theirs.config.mtp is not None
    assert ours.tensors.keys() == theirs.tensors.keys()
    n = len(theirs.config.layers)
    for name, tensor in theirs.tensors.items():
        if name.startswith(("mtp.", f"layers.{n}.")):
            np.testing.assert_array_equal(ours.tensors[name].array(), tensor.array(), name)


def test_a_flat_file_keeps_the_layer_of_a_gguf_file(
    folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path
) -> None:
    path, _, _ = folder("qwen3_5_text")
    for source, file in ((path, "hf.bin"), (gguf_of(path, tmp_path), "gguf.bin")):
        export(source, tmp_path / file, probe_source=None)
    with llamac.load(tmp_path / "hf.bin") as theirs, llamac.load(tmp_path / "gguf.bin") as ours:
        assert ours.file.mtp_layers == theirs.file.mtp_layers != []
        options: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        assert ours.generate([3, 4, 5], **options).tokens == theirs.generate([3, 4, 5], **options).tokens


def test_the_norm_of_a_block_can_be_that_of_the_model(
    folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path
) -> None:
    path, _, _ = folder("qwen3_5_text")
    made = gguf_model.read(gguf_of(path, tmp_path, without="nextn.shared_head_norm.weight"), [])
    np.testing.assert_array_equal(
        made.tensors["mtp.output_norm.weight"].array(), made.tensors["output_norm.weight"].array()
    )


@pytest.mark.parametrize("missing", ["nextn.hnorm.weight", "nextn.eh_proj.weight"])
def test_an_incomplete_block_is_left_out(
    folder: Callable[[str], tuple[Path, int, Tensors]], missing: str, tmp_path: Path
) -> None:
    """Some files have the key, and not these tensors."""
    path, _, _ = folder("qwen3_5_text")
    warnings: list[str] = []
    made = gguf_model.read(gguf_of(path, tmp_path, without=missing), warnings)
    assert made.config.mtp is None
    assert not [name for name in made.tensors if name.startswith(("mtp.", "layers.3."))]
    expected = ["missing: blk.3.nextn.hnorm.weight (40,)"] if missing == "nextn.hnorm.weight" else []
    assert [warning.split("\n")[-1].strip() for warning in warnings] == expected


def test_a_file_of_the_block_alone_is_refused_by_name(
    folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path
) -> None:
    path, _, _ = folder("glm4_moe")
    with pytest.raises(ExportError, match="has only the blocks that predict further tokens: use the file of the whole"):
        gguf_model.read(gguf_of(path, tmp_path, alone=True), [])


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3_5_text", "mtp_num_hidden_layers"),
        *((family, "num_nextn_predict_layers") for family in (*NUMBERED, "exaone4")),
    ],
)
def test_a_written_directory_says_that_it_has_the_layer(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, key: str, tmp_path: Path
) -> None:
    """Other programs look for the layer only if config.json has this key."""
    path, _, _ = folder(family)
    made = gguf_model.read(gguf_of(path, tmp_path), [])
    write_hf(made, tmp_path / "from_gguf", "f32")
    assert json.loads((tmp_path / "from_gguf" / "config.json").read_text())[key] == 1
    assert hf_reading.read(tmp_path / "from_gguf").config.mtp == made.config.mtp
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: 3}))
    for kept, expected in ((hf_reading.read(path), 1), (hf_reading.read(path).without_mtp(), 0)):
        write_hf(kept, tmp_path / str(expected), "f32")
        assert json.loads((tmp_path / str(expected) / "config.json").read_text())[key] == expected


def test_a_block_with_a_long_number_is_unknown(tmp_path: Path) -> None:
    """Python refuses to read numbers of more than 4,300 digits."""
    path = make_folder(tmp_path, "glm4_moe")
    extra = {f"blk.{'9' * 5000}.attn_norm.weight": np.ones(4, np.float32)}
    config = json.loads((path / "config.json").read_text())
    file = write_gguf(tmp_path / "model.gguf", config, checkpoint_tensors(path), extra=extra)
    with pytest.raises(ExportError, match=r"unknown: blk\.999"):
        gguf_model.read(file, [])
