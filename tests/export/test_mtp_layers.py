"""MTP layers of checkpoints: which tensors they become, whole, incomplete and in several files, and ways back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_mtp_samples import write_with_mtp
from gguf_samples import checkpoint_tensors

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

FAMILIES = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]
NORMS = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "norm": "output_norm"}


def mtp_tensors(weights: Tensors) -> tuple[int, Tensors]:
    """A layer with attention, and the tensors of an MTP layer that equals it."""
    layer = max(int(found[1]) for name in weights if (found := re.search(r"layers\.(\d+)\.self_attn", name)))
    dim = next(len(values) for name, values in weights.items() if name.endswith(".input_layernorm.weight"))
    own = {
        re.sub(rf"^.*layers\.{layer}\.", "mtp.layers.0.", name): values
        for name, values in weights.items()
        if f"layers.{layer}." in name
    }
    own |= {f"mtp.{name}.weight": random_tensor(name, (dim,)) for name in NORMS}
    return layer, own | {"mtp.fc.weight": random_tensor("fc", (dim, 2 * dim))}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], tuple[Path, int, Tensors]]:
    """Write the checkpoint of a family with an MTP layer. Returns the folder, the layer it equals, and its tensors."""

    def make(family: str) -> tuple[Path, int, Tensors]:
        path = make_folder(tmp_path, family)
        config = json.loads((path / "config.json").read_text())
        if "norm_topk_prob" in config:  # as in every GGUF file of this family
            (path / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
        weights = checkpoint_tensors(path)
        layer, own = mtp_tensors(weights)
        write_safetensors(path / "model.safetensors", weights | own)
        return path, layer, own

    return make


def check_layer(made: Checkpoint, layer: int, own: Tensors) -> None:
    n = len(made.config.layers)
    assert made.config.mtp == made.config.layers[layer]
    of_layer = {name for name in made.tensors if name.startswith(f"layers.{layer}.")}
    assert len(of_layer) > 8
    for name in of_layer:
        copy = made.tensors[name.replace(f"layers.{layer}.", f"layers.{n}.", 1)]
        np.testing.assert_array_equal(copy.array(), made.tensors[name].array(), name)
    for theirs, ours in NORMS.items():  # the checkpoints store the weights minus one
        np.testing.assert_array_equal(made.tensors[f"mtp.{ours}.weight"].array(), own[f"mtp.{theirs}.weight"] + 1)
    np.testing.assert_array_equal(made.tensors["mtp.in.weight"].array(), own["mtp.fc.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_read_and_written_back(
    folder: Callable[[str], tuple[Path, int, Tensors]], family: str, tmp_path: Path
) -> None:
    path, layer, own = folder(family)
    made = hf_reading.read(path)
    check_layer(made, layer, own)
    write_hf(made, tmp_path / "again", "f32")
    again = checkpoint_tensors(tmp_path / "again")
    for name in NORMS:
        np.testing.assert_allclose(again[f"mtp.{name}.weight"], own[f"mtp.{name}.weight"], atol=1e-6)
    check_layer(hf_reading.read(tmp_path / "again"), layer, own)


def test_the_layer_of_a_model_with_images_is_read(folder: Callable[[str], tuple[Path, int, Tensors]]) -> None:
    """Its tensors are beside the language model's, whose names are longer there."""
    path, layer, own = folder("qwen3_5_text")
    config = json.loads((path / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (path / "config.json").write_text(json.dumps({**whole, "vision_config": {"depth": 1}}))
    weights = checkpoint_tensors(path)
    longer = {re.sub(r"^model\.", "model.language_model.", name): values for name, values in weights.items()}
    write_safetensors(path / "model.safetensors", longer | {"model.visual.pos_embed.weight": np.ones((2, 2), "f4")})
    warnings: list[str] = []
    check_layer(hf.read(path, warnings), layer, own)
    assert warnings == ["config.json describes a multimodal model: only its language model is read"]


def test_a_flat_file_keeps_the_layer(folder: Callable[[str], tuple[Path, int, Tensors]], tmp_path: Path) -> None:
    path, layer, own = folder("qwen3_next")
    export(path, tmp_path / "model.bin", probe_source=None)
    check_layer(read_flat(tmp_path / "model.bin"), layer, own)


@pytest.mark.parametrize("missing", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"])
def test_an_incomplete_layer_is_left_out(folder: Callable[[str], tuple[Path, int, Tensors]], missing: str) -> None:
    path, _, _ = folder("qwen3_5_text")
    weights = checkpoint_tensors(path)
    del weights[missing]
    write_safetensors(path / "model.safetensors", weights)
    warnings: list[str] = []
    made = hf.read(path, warnings)
    assert made.config.mtp is None
    assert not [name for name in made.tensors if name.startswith(("mtp.", "layers.3."))]
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


def test_only_the_first_of_several_layers_is_kept(folder: Callable[[str], tuple[Path, int, Tensors]]) -> None:
    path, layer, own = folder("qwen3_5_text")
    weights = checkpoint_tensors(path)
    more = {name.replace("layers.0.", "layers.1."): values for name, values in own.items() if "layers.0." in name}
    write_safetensors(path / "model.safetensors", weights | more)
    check_layer(hf_reading.read(path), layer, own)


@pytest.mark.parametrize("listed", [True, False])
def test_shards_can_lack_the_layer(folder: Callable[[str], tuple[Path, int, Tensors]], listed: bool) -> None:
    """Copies of checkpoints without these tensors often keep the index of the original, and the other way round."""
    path, _, own = folder("qwen3_5_text")
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
