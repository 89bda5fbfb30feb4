"""Export of each family to GGUF: the round trip, and llama.cpp's logits and continuations."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_mtp_samples import write_with_mtp
from gguf_samples import checkpoint_tensors, converted, metadata, write_tensors
from numpy.typing import NDArray
from test_mtp_layers import exaone, mtp_tensors
from to_gguf_cases import (
    AS_CONVERTED,
    GEMMA4,
    LLAMA_NAMES,
    NAMES,
    NO_BIAS,
    WITH_IMAGES,
    WITH_MTP,
    YARN,
    architecture_of,
    case_of,
    config_of,
    folder_of,
)

import llamac
from golden.family_cases import FAMILY_CASES
from golden.llama_cpp import INSTALLED, LlamaCpp
from golden.make import relative_errors
from golden.make_families import family_checkpoint
from golden.parity_table import with_table
from golden.tiny_checkpoints import (
    Config,
    changed,
    random_tensor,
    write_config,
    write_safetensors,
)
from llamac.errors import UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.convert import export
from llamac.export.distances import BIASES, alibi_slopes, by_slopes
from llamac.export.gguf import model as gguf_model
from llamac.export.gguf.families import WRITTEN
from llamac.export.gguf.mamba2 import folded
from llamac.export.gguf.mtp import REPEATED
from llamac.export.gguf.write import write_gguf
from llamac.export.hf import model as hf
from llamac.export.hf.families import FAMILIES

DOCUMENT = Path(__file__).parents[2] / "docs" / "gguf.md"


@pytest.mark.parametrize("name", NAMES)
def test_a_family_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    source = hf.read(folder_of(tmp_path, name), [])
    write_gguf(source, tmp_path / "m.gguf", "f32", [])
    again = gguf_model.read(tmp_path / "m.gguf", [])
    source = folded(source, WRITTEN[architecture_of(name)], [])
    ours, theirs = vars(source.config), vars(again.config)
    rounded = ["norm_eps", "attention_scale", "residual_scale", "logit_scale", "logit_soft_cap"]
    rounded.append("rope_attention_factor")
    for key, value in ours.items():
        if key in rounded:
            np.testing.assert_allclose(theirs[key], value, rtol=1e-6)
        else:
            assert theirs[key] == value, key
    assert again.tensors.keys() == source.tensors.keys()
    for part, tensor in source.tensors.items():
        if part.startswith("rope."):
            np.testing.assert_allclose(again.tensors[part].array(), tensor.array(), rtol=2e-6)
        else:
            np.testing.assert_array_equal(again.tensors[part].array(), tensor.array(), part)


@pytest.mark.parametrize("name", AS_CONVERTED)
def test_tensors_and_keys_are_those_of_the_converter(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, name)
    write_gguf(hf.read(folder, []), tmp_path / "m.gguf", "f32", [])
    ours = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor.data for tensor in ours.tensors}
    expected = converted(config_of(name), checkpoint_tensors(folder))
    assert found.keys() == expected.keys()
    for tensor, values in expected.items():
        assert found[tensor].size == values.size
        is_product = tensor.endswith(("ssm_a", "gate_inp.scale")) or name.startswith("falcon_h1")
        tolerance = 1e-6 if is_product else 0
        if tensor != "rope_freqs.weight" or set(values) <= {1, np.float32(1e30)}:  # any base has factors
            np.testing.assert_allclose(found[tensor].reshape(values.shape), values, rtol=tolerance, err_msg=tensor)
        assert [n for n in found[tensor].shape if n > 1] == [n for n in values.shape if n > 1]
    arch, keys = metadata(config_of(name))
    if config_of(name)["model_type"] == "nemotron_h":
        del keys["rope.freq_base"], keys["rope.dimension_count"]  # without RoPE, llama.cpp does not read them
    if not any(".ffn_up.weight" in tensor for tensor in found):
        del keys["feed_forward_length"]  # no layer has it, so only config.json knows it
    if "attention.recurrent_layers" in keys:
        del keys["full_attention_interval"]  # which the list overrides
    if arch != "gemma4" and "rope_freqs.weight" in found:
        del keys["rope.freq_base"]
    if keys.get("rope.scaling.type") == "none":
        del keys["rope.scaling.type"]  # the same as no key
    for key, value in keys.items():
        written = ours.fields[f"{arch}.{key}"].contents()
        if key == "attention.sliding_window_pattern" and isinstance(written, int):
            written = [(layer + 1) % written != 0 for layer in range(len(value))]
        stated = of_layers(value)
        is_text = isinstance(stated, str)
        assert of_layers(written) == (stated if is_text else pytest.approx(stated, rel=1e-6)), key


def of_layers(value: object) -> object:
    """A value of all layers; the common one if they have the same."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


@pytest.mark.parametrize("name", WITH_MTP)
def test_an_mtp_layer_becomes_a_block_behind_the_others(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, name)
    weights = checkpoint_tensors(folder)
    weights |= mtp_tensors(weights, name)[1]
    write_safetensors(folder / "model.safetensors", weights)
    source = hf.read(folder, [])
    write_gguf(source, tmp_path / "ours.gguf", "f32", [])
    again = gguf_model.read(tmp_path / "ours.gguf", [])
    assert again.config.mtp == source.config.mtp is not None
    for part, tensor in source.tensors.items():
        if not part.startswith("rope."):
            np.testing.assert_array_equal(again.tensors[part].array(), tensor.array(), part)
    write_with_mtp(tmp_path / "theirs.gguf", config_of(name), weights)
    ours, theirs = (gguf.GGUFReader(tmp_path / f"{whose}.gguf") for whose in ("ours", "theirs"))
    expected = {tensor.name for tensor in theirs.tensors if not tensor.name.endswith(REPEATED)}
    assert {tensor.name for tensor in ours.tensors} == expected
    for key in ("block_count", "nextn_predict_layers", "attention.recurrent_layers"):
        found, needed = (file.fields.get(f"{metadata(config_of(name))[0]}.{key}") for file in (ours, theirs))
        assert needed is None or (found is not None and found.contents() == needed.contents()), key


def test_an_mtp_layer_that_an_architecture_does_not_have_is_left_out(tmp_path: Path) -> None:
    folder, _ = exaone(tmp_path, mtp_layer_types=["full_attention"], mtp_sliding_windows=[0])
    source, warnings = hf.read(folder, []), list[str]()
    assert source.config.mtp is not None
    write_gguf(source, tmp_path / "m.gguf", "f32", warnings)
    assert ["the MTP layer is left out" in warning for warning in warnings] == [True]
    again, kept = gguf_model.read(tmp_path / "m.gguf", []), source.without_mtp()
    assert (again.config.mtp, again.config.layers) == (None, source.config.layers)
    assert again.tensors.keys() == kept.tensors.keys() < source.tensors.keys()
    file = gguf.GGUFReader(tmp_path / "m.gguf")
    blocks = {tensor.name.split(".")[1] for tensor in file.tensors if tensor.name.startswith("blk.")}
    assert blocks == {str(layer) for layer in range(len(source.config.layers))}
    others = {tensor.name for tensor in file.tensors if not tensor.name.startswith("blk.")}
    assert others == {"token_embd.weight", "output_norm.weight", "output.weight"}


def test_the_mtp_layer_of_exaone_4_5_is_left_out(tmp_path: Path) -> None:
    """llama.cpp reads it and does not compute it."""
    folder = folder_of(tmp_path, "exaone4")
    weights = checkpoint_tensors(folder)
    write_safetensors(folder / "model.safetensors", weights | mtp_tensors(weights, "exaone4")[1])
    source, warnings = hf.read(folder, []), list[str]()
    assert source.config.mtp is not None
    write_gguf(source, tmp_path / "m.gguf", "f32", warnings)
    assert "the MTP layer is left out: llama.cpp does not compute it for the architecture exaone4" in warnings
    assert gguf_model.read(tmp_path / "m.gguf", []).config.mtp is None


def test_blocks_survive_where_tensors_become_one() -> None:
    blocks = [np.arange(64, dtype=np.uint8).reshape(2, 32), np.arange(96, dtype=np.uint8).reshape(3, 32)]
    parts = [
        LazyTensor((len(rows), 32), "q8_0", lambda *_: np.zeros((0, 32), np.float32), partial(take, rows))
        for rows in blocks
    ]
    whole = LazyTensor.stacked(parts)
    assert whole.blocks is not None
    np.testing.assert_array_equal(whole.blocks(1, 4), np.concatenate(blocks)[1:4])
    mixed = LazyTensor.stacked([parts[0], replace(parts[1], dtype="q4_0")])
    assert (mixed.dtype, mixed.blocks) == ("f32", None)
    assert LazyTensor.stacked([parts[0], replace(parts[1], blocks=None)]).blocks is None


def take(rows: NDArray[np.uint8], first: int, last: int) -> NDArray[np.uint8]:
    return rows[first:last]


def test_a_model_without_rope_survives_the_round_trip(tmp_path: Path) -> None:
    source = hf.read(folder_of(tmp_path, "granite"), [])
    source.config = replace(source.config, layers=tuple(replace(layer, rope=-1) for layer in source.config.layers))
    write_gguf(source, tmp_path / "m.gguf", "f32", [])
    assert gguf_model.read(tmp_path / "m.gguf", []).config.layers == source.config.layers


@pytest.mark.parametrize(("family", "text"), WITH_IMAGES.items())
def test_the_language_model_of_a_vision_model_is_written(tmp_path: Path, family: str, text: str) -> None:
    name = next(name for name in [*LLAMA_NAMES, *NAMES] if config_of(name)["model_type"] == text)
    source = hf.read(folder_of(tmp_path, name), [])
    source.metadata["architecture"] = family
    write_gguf(source, tmp_path / "m.gguf", "f32", [])
    assert gguf_model.read(tmp_path / "m.gguf", []).metadata["architecture"] == text


def test_a_nemotron_h_without_mamba_is_refused_by_name(tmp_path: Path) -> None:
    source = hf.read(folder_of(tmp_path, "nemotron_h-dense"), [])
    none = tuple(replace(layer, mixer="none") if layer.mixer == "mamba2" else layer for layer in source.config.layers)
    source.config = replace(source.config, layers=none)
    with pytest.raises(
        UnsupportedError, match="files of the architecture nemotron_h have a Mamba 2 layer, but the mod"
    ):
        write_gguf(source, tmp_path / "m.gguf", "f32", [])


def test_a_nemotron_h_whose_experts_read_a_latent_is_refused_by_name(tmp_path: Path) -> None:
    source = hf.read(folder_of(tmp_path, "nemotron_h-moe_latent_size"), [])
    with pytest.raises(UnsupportedError, match=r"experts that read a latent \(expert_dim 20\) are not written"):
        write_gguf(source, tmp_path / "m.gguf", "f32", [])


def test_every_architecture_has_a_case() -> None:
    families = {family for row in WRITTEN.values() for family in (row.family, *row.others)}
    assert families - {"llama", "gpt2", *WITH_IMAGES} == {config_of(name)["model_type"] for name in NAMES}


def test_the_documented_exceptions_are_the_families_that_are_not_written() -> None:
    written = {family for row in WRITTEN.values() for family in (row.family, *row.others)}
    sentence = DOCUMENT.read_text("utf-8").partition("The writer supports all families of")[2].partition(".\n")[0]
    assert set(re.findall("`(.+?)`", sentence)) == FAMILIES.keys() - written


@pytest.mark.parametrize(
    "family",
    ["lfm3", "olmo", "flex_olmo"],
)
def test_families_that_are_not_written_are_refused(tmp_path: Path, family: str) -> None:
    source = hf.read(folder_of(tmp_path, "qwen3"), [])
    source.metadata["architecture"] = family
    with pytest.raises(UnsupportedError, match=f"architecture '{family}' cannot be written as GGUF, only llama"):
        write_gguf(source, tmp_path / "m.gguf", "f32", [])


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("qwen2", {"use_sliding_window": True}, r"layers\.1: window is 7, GGUF can only express 0"),
        ("qwen2-yarn", {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}}, "cannot express these RoPE"),
        ("smollm3", {"no_rope_layer_interval": 2}, r"layers\.1: rope is -1, GGUF can only express 0"),
        ("smollm3-llama3", {"attention_bias": False, "mlp_bias": False}, "cannot express these RoPE frequencies"),
        ("qwen3", {"attention_bias": True}, r"only q, k and v can have a bias"),
        ("gemma2", {"query_pre_attn_scalar": 30}, "attention_scale is 0.18"),
        ("gemma2", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, "must have a sliding window"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "must both have a soft cap"),
        ("gpt_neox", {"hidden_act": "gelu_new"}, "activation is gelu_tanh, GGUF can only express gelu_erf"),
        ("qwen3_moe", {"norm_topk_prob": False}, r"layers\.0: expert_weights is 0, GGUF can only express 1"),
        ("qwen2_moe", {"norm_topk_prob": True}, r"layers\.0: expert_weights is 1, GGUF can only express 0"),
        ("exaone4", {"head_dim": 14}, r"all heads together must be as wide as the model \(40\), but are 56"),
        ("exaone4", {"sliding_window": 7}, "llama.cpp has sliding windows only in models of 64 layers"),
        ("glm", {"head_dim": 20}, r"all heads together must be as wide as the model \(40\), but are 80"),
        ("ernie4_5", {"use_bias": True}, "only q, k and v can have a bias"),
        ("qwen3_next", {"norm_topk_prob": False}, r"layers\.0: expert_weights is 0, GGUF can only express 1"),
        ("qwen3_5_text", {"linear_value_head_dim": 32}, r"as wide as those of k \(16\), but have 32 dimensions"),
        ("gemma4_text", NO_BIAS, r"layers\.3 must share the keys of layer 2, but shares those of 1"),
        (GEMMA4[0], {"attention_bias": True}, r"no matrices can have a bias, but layers\.0\.attn_k\.weight has one"),
        ("dots1", {"num_key_value_heads": 2}, r"n_kv_heads must equal n_heads \(4\), but is 2"),
        ("deepseek_v3", {"attention_bias": True}, r"no matrices can have a bias, but layers\.0\.attn_kv_a\.weight"),
        ("minicpm3", {"scale_depth": 1.2}, "residual_scale is 0.8.*, GGUF can only express 0.98"),
        ("ernie4_5_moe", {"use_bias": False}, "either all layers after the first 1 or none must have experts"),
        ("llama4_text-defaults", {"attention_chunk_size": 16}, r"sliding_window is 16, expected 8192, the chunks"),
        ("olmoe", {"norm_topk_prob": True}, r"layers\.0: expert_weights is 1, GGUF can only express 0"),
    ],
)
def test_models_that_llama_cpp_would_compute_differently_are_refused(
    tmp_path: Path, name: str, changes: Config, problem: str
) -> None:
    folder = folder_of(tmp_path, name, **changes)
    with pytest.raises(UnsupportedError, match=problem):
        write_gguf(hf.read(folder, []), tmp_path / "m.gguf", "f32", [])


def ones(made: Checkpoint, name: str) -> None:
    """Put other numbers in the place of a tensor."""
    made.tensors[name] = LazyTensor.of(2 * np.ones(made.tensors[name].shape, np.float32))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        (
            "cohere2",
            lambda made: ones(made, "layers.1.ffn_norm.weight"),
            "layers.1: the norms of attention and network must",
        ),
        (
            "cohere2",
            lambda made: ones(made, "layers.0.attn_norm.bias"),
            r"layers\.0\.attn_norm\.bias must be zeros: the",
        ),
        (
            "jais2",
            lambda made: made.tensors.pop("layers.0.attn_q.bias"),
            r"must have a bias, but layers\.0\.attn_q\.weight has",
        ),
        ("gemma", lambda made: ones(made, "output.weight"), "the output matrix must be the token embedding"),
        (
            "gemma3_text",
            lambda made: ones(made, "rope.1.inv_freq"),
            "cannot scale the RoPE frequencies of layers with a sl",
        ),
        ("mpt", lambda made: ones(made, BIASES), r"distance_bias\.weight: GGUF cannot express these biases"),
        (
            "bloom",
            lambda made: made.tensors.update({BIASES: by_slopes(alibi_slopes(4, 16.0), 63)}),
            r"distance_bias\.weight: GGUF cannot express these biases",
        ),
    ],
)
def test_tensors_that_have_no_place_in_a_file_are_named(
    tmp_path: Path, name: str, change: Callable[[Checkpoint], object], problem: str
) -> None:
    made = hf.read(folder_of(tmp_path, name), [])
    if name == "gemma":
        made.config = replace(made.config, tied_output=False)
        made.tensors["output.weight"] = made.tensors["token_embedding.weight"]
    change(made)
    with pytest.raises(UnsupportedError, match=problem):
        write_gguf(made, tmp_path / "m.gguf", "f32", [])
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-44, 3e38])
def test_unusual_frequencies_are_restored_or_refused(tmp_path: Path, name: str, value: float) -> None:
    """Frequencies are either refused or restored exactly."""
    source = hf.read(folder_of(tmp_path, name), [])
    for number in (0, -1):
        table = source.tensors["rope.0.inv_freq"].array().copy()
        table[number] = value
        source.tensors["rope.0.inv_freq"] = LazyTensor.of(table)
        with contextlib.suppress(UnsupportedError), np.errstate(all="raise"):
            write_gguf(source, tmp_path / "m.gguf", "f32", [])
            again = gguf_model.read(tmp_path / "m.gguf", []).tensors["rope.0.inv_freq"].array()
            np.testing.assert_allclose(again, table, rtol=2e-6)
            (tmp_path / "m.gguf").unlink()


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "olmoe", "stablelm", "gpt_neox"])
def test_shapes_match_llama_cpp(tmp_path: Path, name: str) -> None:
    write_gguf(hf.read(folder_of(tmp_path, name), []), tmp_path / "m.gguf", "f16", [])

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    shapes = {full: tuple(int(n) for n in tensor.shape) for full, tensor in found.items()}
    shapes_of: dict[str, dict[str, tuple[int, ...]]] = {
        "qwen3_moe": {"blk.1.ffn_gate_exps.weight": (40, 24, 5), "blk.1.ffn_down_exps.weight": (24, 40, 5)},
        "qwen2_moe": {"blk.1.ffn_gate_inp_shexp.weight": (40,), "blk.0.ffn_down_shexp.weight": (36, 40)},
        "olmoe": {"blk.0.ffn_gate_inp.weight": (40, 5)},
        "stablelm": {"blk.0.attn_q_norm.weight": (10, 4), "blk.0.attn_k_norm.weight": (10, 2)},
        "gpt_neox": {"blk.0.attn_qkv.weight": (40, 120), "blk.0.attn_qkv.bias": (120,)},
    }
    assert shapes_of[name].items() <= shapes.items()
    kinds = {tensor.tensor_type.name for full, tensor in found.items() if "norm" in full or "gate_inp" in full}
    assert kinds == {"F32"}


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_windows_that_llama_cpp_ignores_give_a_warning(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path, name, sliding_window=7)
    warnings: list[str] = []
    write_gguf(hf.read(folder, []), tmp_path / "m.gguf", "f32", warnings)
    assert any("llama.cpp has no sliding window" in line and "beyond 7 tokens" in line for line in warnings)
    assert {layer.window for layer in gguf_model.read(tmp_path / "m.gguf", []).config.layers} == {7}


def test_an_epsilon_of_delta_nets_that_llama_cpp_does_not_have_gives_a_warning(tmp_path: Path) -> None:
    for eps, expected in ((1e-6, 0), (0.05, 1)):
        warnings: list[str] = []
        folder = folder_of(tmp_path / str(eps), "qwen3_5_text", rms_norm_eps=eps)
        write_gguf(hf.read(folder, []), tmp_path / "m.gguf", "f32", warnings)
        assert sum("normalizes q and k of delta nets with" in line for line in warnings) == expected


def test_a_least_step_that_files_of_nemotron_h_do_not_have_gives_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    folder = folder_of(tmp_path, "nemotron_h-dense", time_step_min=0.25)
    write_gguf(hf.read(folder, []), tmp_path / "m.gguf", "f32", warnings)
    assert ["(time_step_min, 0.25): logits can differ" in line for line in warnings] == [True]


# ---- llama.cpp


@pytest.fixture(scope="module")
def distance(tmp_path_factory: pytest.TempPathFactory, llama_cpp: LlamaCpp) -> Callable[[str], float]:
    """The largest distance of a case's logits from llama.cpp's, in float32."""

    @functools.cache
    def found(name: str) -> float:
        root, ids = tmp_path_factory.mktemp("gguf"), case_of(name).ids
        folder = folder_of(root, name)
        export(folder, root / "m.gguf", to="gguf", dtype="f32")
        theirs = llama_cpp.logits(root / "m.gguf", ids)
        export(folder, root / "m.bin", dtype="f32", probe_source=None)
        with llamac.load(root / "m.bin", kv_dtype="f32") as model:
            return float(relative_errors(model.logits(ids), theirs).max())

    return found


@pytest.mark.parametrize("name", [*LLAMA_NAMES, *NAMES])
def test_llama_cpp_computes_the_same_logits(distance: Callable[[str], float], name: str) -> None:
    """llama.cpp computes GELU from a float16 table, and GPT-NeoX's and MPT's with its tanh form."""
    families = "bloom", "gemma", "gpt", "mpt", "starcoder2"
    has_gelu = name.startswith(families) or case_of(name).config["model_type"] == "phi"
    assert distance(name) <= (3e-3 if has_gelu else 1e-4)


def test_the_documented_distances_from_llama_cpp_are_current(distance: Callable[[str], float]) -> None:
    if not DOCUMENT.is_file() or INSTALLED:
        pytest.skip("the documents are not here, or llama.cpp computes the results again")
    names: dict[str, list[str]] = {}
    for name in [*LLAMA_NAMES, *NAMES]:
        names.setdefault(architecture_of(name), []).append(name)
    assert names.keys() == WRITTEN.keys()
    rows = [f"| `{arch}` | {len(cases)} | {max(map(distance, cases)):.0e} |" for arch, cases in sorted(names.items())]
    text = DOCUMENT.read_text("utf-8")
    assert with_table(text, "llama.cpp", rows) == text, "\n".join(rows)


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_continues_an_f16_model_alike(tmp_path: Path, llama_cpp: LlamaCpp, name: str) -> None:
    folder, start = folder_of(tmp_path, name), case_of(name).ids[:8]
    export(folder, tmp_path / "m.gguf", to="gguf", dtype="f16")
    export(tmp_path / "m.gguf", tmp_path / "m.bin", probe_source=None)
    taken = llama_cpp.continue_greedily(tmp_path / "m.gguf", start, 24)
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        rows = model.logits(start + taken)[len(start) - 1 : -1]
    gap = rows.max(axis=1) - rows[np.arange(len(taken)), taken]
    # near-ties; with rounded inputs, llama.cpp can choose other experts
    assert (gap / np.abs(rows).max(axis=1)).max() <= (2e-2 if name.startswith("gpt_oss") else 5e-3)


def test_quantized_experts_match_llama_cpp(tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    config = changed(config_of("mixtral"), hidden_size=64, intermediate_size=96, head_dim=16, sliding_window=None)
    expert = {"w1": (96, 64), "w3": (96, 64), "w2": (64, 96)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (61, 64), "lm_head.weight": (61, 64)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}_layernorm.weight": (64,) for norm in ("input", "post_attention")}
        shapes |= {f"{name}.self_attn.{x}_proj.weight": (64 if x in "qo" else 32, 64) for x in "qkvo"}
        moe = f"{name}.block_sparse_moe"
        shapes[f"{moe}.gate.weight"] = (5, 64)
        shapes |= {f"{moe}.experts.{e}.{w}.weight": shape for e in range(5) for w, shape in expert.items()}
    shapes["model.norm.weight"] = (64,)
    folder = tmp_path / "hf"
    folder.mkdir()
    write_config(folder, config)
    weights = {name: random_tensor(name, shape) for name, shape in shapes.items()}
    write_safetensors(folder / "model.safetensors", weights)
    export(folder, tmp_path / "m.gguf", to="gguf", dtype="q8_0")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    stack = found["blk.1.ffn_down_exps.weight"]
    assert (stack.tensor_type.name, stack.shape.tolist()) == ("Q8_0", [96, 64, 5])
    numbers = gguf.quants.dequantize(stack.data, stack.tensor_type).reshape(5, 64, 96)
    exact = np.stack([weights[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"] for e in range(5)])
    np.testing.assert_allclose(numbers, exact, atol=0.005)
    ids = case_of("mixtral").ids
    theirs = llama_cpp.logits(tmp_path / "m.gguf", ids)
    export(tmp_path / "m.gguf", tmp_path / "m.bin", dtype="f32", probe_source=None)
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        errors = relative_errors(model.logits(ids), theirs)
    assert np.median(errors) <= 0.1  # llama.cpp rounds inputs to 8 bits, which can change the choice of experts


# ---- files of other programs


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("mistral3", {}),
        ("mistral3", {"rope.scaling.yarn_beta_fast": 2.0, "rope.scaling.original_context_length": 64}),
        ("mistral3", {"rope.scaling.yarn_log_multiplier": 1.0}),
        ("mistral3", {"rope.scaling.yarn_log_multiplier": 0.5, "rope.scaling.attn_factor": 1.3}),
        ("llama", {"rope.scaling.attn_factor": 1.3}),
        ("llama", {"rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.3}),
        ("granite", {"rope.scaling.finetuned": False}),
        ("granite", {"rope.scaling.finetuned": True}),
    ],
)
def test_keys_are_interpreted_as_in_llama_cpp(tmp_path: Path, llama_cpp: LlamaCpp, arch: str, keys: Config) -> None:
    name = "granite" if arch == "granite" else "mistral"
    config = changed(config_of(name), sliding_window=None)
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    values = {**metadata(config)[1], **{f"rope.scaling.{key}": value for key, value in yarn.items()}, **keys}
    prefixed = {f"{arch}.{key}": value for key, value in values.items()}
    weights = converted(config, checkpoint_tensors(family_checkpoint(tmp_path / "case", FAMILY_CASES[name])))
    path = write_tensors(tmp_path / "m.gguf", weights, keys={"tokenizer.ggml.model": "no_vocab", **prefixed}, arch=arch)
    ids = case_of(name).ids
    theirs = llama_cpp.logits(path, ids)
    export(path, tmp_path / "m.bin", probe_source=None)
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32") as model:
        assert relative_errors(model.logits(ids), theirs).max() <= 1e-4
