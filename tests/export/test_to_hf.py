"""Export to Hugging Face directories: tensors and config survive the round trip, and transformers computes the same."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vocab_samples import SPM_PIECES, field, llama2c_file, sentencepiece_file, tokenizer_json, write_json

import llamac
from builders import checkpoint, gpt2_config, llama_config
from golden.cases import CASES
from golden.delta_net_cases import DELTA_NET_CASES
from golden.family_cases import FAMILY_CASES
from golden.image_cases import IMAGE_CASES
from golden.make import relative_errors, transformers_logits
from golden.make_families import family_checkpoint
from golden.mamba_cases import MAMBA_CASES
from golden.parity_table import cases, make_folder
from golden.tiny_checkpoints import changed, tensors, write_checkpoint, write_config
from llamac.errors import ExportError, UnsupportedError
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.convert import export
from llamac.export.gguf.write import write_gguf
from llamac.export.hf import model as hf
from llamac.export.hf.write import write_hf
from llamac.export.hf.write_config import config_differences
from llamac.text.template_files import from_folder
from llamac.text.tokenizer import Tokenizer
from llamac.text.vocabulary.load import Vocabulary, load_vocabulary

# every kind of RoPE, grouped queries, biases, tied and untied outputs, every family
NAMES = ["llama", "llama-no-biases", "llama-tie_word_embeddings", "llama-wide-heads", "llama-gelu", "llama-linear"]
NAMES += ["llama-dynamic", "llama-yarn", "llama-llama3", "llama-longrope", "llama-rope_parameters-yarn"]
NAMES += ["gpt2", "gpt2-odd", "gpt2-scale_attn_weights", "gpt2-n_inner-by-default"]
NOT_WRITTEN = (
    "gpt_oss",
    "nanochat",
    "granitemoe",
    "granitemoeshared",
    "granitemoe_swa",
    *("falcon", "falcon_h1", "opt", "cohere2_moe", "bloom", "mpt"),
    "llama4",
    "mistral4",
    "llama4_text",
    *IMAGE_CASES,
)  # the last: test_families_images writes their language models
BASES = [name for name, case in FAMILY_CASES.items() if not case.base and name not in NOT_WRITTEN]
NAMES += [*BASES, "qwen2-tied", "smollm3-window", "gemma-untied", "phi3-mha", "gemma3_text-rope_parameters"]
NAMES += ["gpt_neox-use_parallel_residual", "gpt_neox-attention_bias", "gpt_neox-tied", "gpt_neox-linear"]
NAMES += ["stablelm-use_parallel_residual", "stablelm-qk_layernorm", "qwen3_moe-norm_topk_prob", "qwen3_moe-window"]
NAMES += ["qwen2_moe-window", "qwen2_moe-mlp_only_layers", "qwen2_moe-qkv_bias"]
TEXTS = ["The hello world", "", "  two  spaces", "Zoë \n\n 123 ab"]


def read_safetensors(path: Path, form: str = "pt") -> dict[str, tuple[str, NDArray[Any]]]:
    """Map each name to (dtype, numbers); bf16 as its 16 bits. Checks that the data follow in order, without gaps."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    assert size % 8 == 0 or not form
    header = json.loads(data[8 : 8 + size])
    assert header.pop("__metadata__", {}).get("format", "") == form
    found, end = {}, 0
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert first == end
        end = last
        kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry["dtype"]]
        numbers = np.frombuffer(data[8 + size + first : 8 + size + last], kind).reshape(entry["shape"])
        found[name] = (entry["dtype"], numbers)
    assert end == len(data) - 8 - size
    return found


def there_and_back(name: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """Return a tiny checkpoint in Hugging Face's layout, and the same after conversion to a flat file and back."""
    original = make_folder(folder, name)
    export(original, folder / "flat.bin", probe_source=None)
    export(folder / "flat.bin", folder / "again", to="hf", **options)
    return original, folder / "again"


# transformers saves these under their published names, and also reads them under those of its own classes
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("exaone", "sarvam_moe")])
def test_tensors_survive_the_round_trip_bit_by_bit(name: str, tmp_path: Path) -> None:
    """Norm weights stored minus one are compared after adding the one, because the flat file stores the sum.

    Of a logarithm, it stores the power, so the last bit can differ.
    """
    original, again = there_and_back(name, tmp_path)
    expected = read_safetensors(original / "model.safetensors", "")
    found = read_safetensors(again / "model.safetensors")
    assert set(found) == set(expected)
    folded = name.startswith(("gemma", "vaultgemma", "qwen3_next", "qwen3_5", "nemotron"))
    for key, (dtype, numbers) in found.items():
        assert dtype == "F32"
        if key.endswith(".A_log"):
            np.testing.assert_allclose(numbers, expected[key][1], rtol=1e-6)
            continue
        added = np.float32(1 if folded and key.endswith("norm.weight") else 0)
        np.testing.assert_array_equal(numbers + added, expected[key][1] + added, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    original, again = there_and_back(name, tmp_path)
    ids = cases()[name].ids
    found, expected = (transformers_logits(folder, ids) for folder in (again, original))
    if name in DELTA_NET_CASES | MAMBA_CASES:  # the last bit of a logarithm
        assert relative_errors(found, expected).max() < 1e-5
    else:
        np.testing.assert_array_equal(found, expected)


# the RoPE factors of phi3 and the parameters of YaRN and LLaMA 3's RoPE cannot be derived from frequencies
OF_SCALED_ROPE = ("exaone", "phi3", "ministral3", "hunyuan_v1_dense", "cwm", "apertus")
MADE = ["llama", "llama-linear", "gpt2", "phi3-rope_scaling"]
MADE += [name for name in BASES if name not in OF_SCALED_ROPE] + ["hunyuan_v1_dense-rope_scaling"]
MADE += ["gemma4_unified_text-nothing_rotates"]


@pytest.mark.parametrize("name", MADE)
def test_a_missing_config_is_generated(name: str, tmp_path: Path) -> None:
    """A model imported from GGUF has no config."""
    pytest.importorskip("transformers")
    original, ids = make_folder(tmp_path, name), cases()[name].ids
    made = hf.read(original, [])
    del made.metadata["config"]
    write_hf(made, tmp_path / "again", "f32")
    found, expected = (transformers_logits(folder, ids) for folder in (tmp_path / "again", original))
    assert relative_errors(found, expected).max() < 1e-5


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("base", [10000.0, 100000.0, 130000.0, 11158840.0, 1e10])
def test_the_base_of_frequencies_is_written_as_published(base: float, head_dim: int, tmp_path: Path) -> None:
    config = changed(CASES["llama"].config, rope_theta=base, head_dim=head_dim, rope_scaling=None)
    made = hf.read(write_checkpoint(tmp_path / "original", config), [])
    del made.metadata["config"]
    write_hf(made, tmp_path / "again", "f32")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["rope_theta"] == base


@pytest.mark.parametrize("name", BASES)
def test_a_config_that_contradicts_the_model_is_corrected(name: str, tmp_path: Path) -> None:
    """The keys of RoPE's frequencies are taken from the original config, the only place that has them."""
    made = hf.read(make_folder(tmp_path, name), [])
    original = made.metadata["config"]
    made.metadata["config"] = {
        key: value for key, value in original.items() if "rope" in key or "rotary" in key or key.endswith("_embeddings")
    } | {"model_type": name, "vocab_size": 7, "note": {}}
    with pytest.raises(UnsupportedError, match="note is"):
        write_hf(made, tmp_path / "out", "f32")
    del made.metadata["config"]["note"]
    write_hf(made, tmp_path / "out", "f32")
    assert_same(hf.read(tmp_path / "out", []), made)


@pytest.mark.parametrize("name", ["dots1-no_shared_experts", "gemma4_text-vocab_size_per_layer_input"])
def test_what_the_importer_omits_is_not_written(name: str, tmp_path: Path) -> None:
    """Matrices without elements, and rows of layer embeddings after the vocabulary."""
    made = hf.read(make_folder(tmp_path, name), [])
    write_hf(made, tmp_path / "out", "f32")
    assert_same(hf.read(tmp_path / "out", []), made)
    if "vocab" in name:
        written = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
        assert written["vocab_size_per_layer_input"] == made.config.vocab_size


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert not config_differences(one.config, other.config)
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(tensor.array(), other.tensors[name].array(), rtol=1e-6, atol=0, err_msg=name)


def test_only_the_language_model_of_a_vision_model_is_written(tmp_path: Path) -> None:
    folder, case = make_folder(tmp_path, "gemma3_text"), FAMILY_CASES["gemma3_text"]
    made = hf.read(folder, [])
    write_config(
        folder, {"model_type": "gemma3", "text_config": case.config, "vision_config": {}, "image_token_index": 60}
    )
    export(folder, tmp_path / "flat.bin", probe_source=None)
    export(tmp_path / "flat.bin", tmp_path / "out", to="hf")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert_same(hf.read(tmp_path / "out", []), made)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_matrices_are_rounded_and_vectors_are_not(dtype: str, tmp_path: Path) -> None:
    _, again = there_and_back("gpt2", tmp_path, dtype=dtype)
    expected = tensors(CASES["gpt2"].config)
    assert json.loads((again / "config.json").read_text())["dtype"] == {"f16": "float16", "bf16": "bfloat16"}[dtype]
    for key, (kind, numbers) in read_safetensors(again / "model.safetensors").items():
        assert kind == ("F32" if numbers.ndim == 1 else dtype.upper()), key
        wide = (numbers.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else numbers.astype(np.float32)
        np.testing.assert_allclose(wide, expected[key], rtol={"F32": 0, "F16": 2**-11, "BF16": 2**-8}[kind], atol=1e-7)


def test_the_config_changes_only_where_the_file_differs(tmp_path: Path) -> None:
    config = CASES["llama-yarn"].config | {"initializer_range": 0.125}
    original = write_checkpoint(tmp_path / "original", config)
    export(original, tmp_path / "again", to="hf", dtype="bf16")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "torch_dtype" not in written
    changed = {key for key in written if written[key] != config.get(key)}
    assert changed == {"dtype"}


# ---- tokenizers


def spm_source(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES))
    return folder


def bpe_source(folder: Path) -> Path:
    folder.mkdir()
    sidecar = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    return write_json(folder, tokenizer=tokenizer_json(truncation=None), tokenizer_config=sidecar)


def llama2c_source(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.bin").write_bytes(llama2c_file())
    return folder


@pytest.mark.parametrize("source", [spm_source, bpe_source, llama2c_source])
def test_auto_tokenizer_gives_the_same_ids(source: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = load_vocabulary(source(tmp_path / "tokenizer"))
    made = with_tokenizer(vocabulary)
    write_hf(made, tmp_path / "hf", "f32")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = Tokenizer.from_json(vocabulary.json, vocabulary.special)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (vocabulary.special.bos_id, vocabulary.special.eos_id)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text, add_special=True), text
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    has_model = source is spm_source  # llama2c's tokenizer.bin is not a SentencePiece model
    assert (tmp_path / "hf" / "tokenizer.model").exists() == has_model
    again = load_vocabulary(tmp_path / "hf")
    assert (again.special, again.spm) == (vocabulary.special, vocabulary.spm if has_model else None)
    if source is llama2c_source:  # here "</s>" is text; in transformers it is the special token
        assert theirs.encode("</s>", add_special_tokens=False) == [2]
        assert Tokenizer.from_json(*again[:2]).encode("</s>", parse_special=True) == [2]
    else:
        assert again.json == vocabulary.json


def test_a_sentencepiece_model_gives_the_same_ids_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES, b"", field(4, 1)))
    vocabulary = load_vocabulary(tmp_path)
    assert b'"sentencepiece":{' in vocabulary.json
    write_hf(with_tokenizer(vocabulary), tmp_path / "hf", "f32")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = Tokenizer.from_json(vocabulary.json, vocabulary.special)
    for text in ("ab c", "  a   abc ", "x\n"):
        assert theirs.encode(text) == ours.encode(text, add_special=True), text
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file([*SPM_PIECES, ("az", -4.0, 1)]))
    with pytest.raises(UnsupportedError, match=r"cannot express this SentencePiece"):
        write_hf(with_tokenizer(load_vocabulary(tmp_path)), tmp_path / "hf2", "f32")


def with_tokenizer(vocabulary: Vocabulary) -> Checkpoint:
    """A LLaMA with one logit per id of the tokenizer."""
    n_ids = Tokenizer.from_json(vocabulary.json, vocabulary.special).n_ids
    made = checkpoint(replace(llama_config(), vocab_size=n_ids, n_token_ids=n_ids))
    return replace(
        made, tokenizer=(vocabulary.json, vocabulary.special, vocabulary.spm), metadata={"architecture": "llama"}
    )


def test_stop_ids_and_chat_template_survive_the_round_trip(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(bpe_source(tmp_path / "tokenizer"))
    special = replace(vocabulary.special, stop_ids=(5, 257))
    made = replace(with_tokenizer(vocabulary._replace(special=special)), chat_template="{{ messages }} Zoë")
    write_hf(made, tmp_path / "hf", "f32")
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 256, "eos_token_id": [5, 257]}
    export(tmp_path / "hf", tmp_path / "again.bin", probe_source=None)
    with llamac.load(tmp_path / "again.bin") as model:
        assert model.special == special
        assert model.file.text("template") == "{{ messages }} Zoë"


def with_named_tokens(folder: Path) -> Checkpoint:
    """A model whose chat template names special tokens, and whose checkpoint describes its answers."""
    sidecar: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "sep_token": "<turn>"}
    sidecar |= {"extra_special_tokens": {"image_token": "<image>"}}
    sidecar |= {"response_template": {"defaults": {"role": "assistant"}, "fields": {"content": {}}}}
    sidecar |= {"chat_template": "{{ messages[0].content }}{{ sep_token }}{{ image_token }}"}
    folder.mkdir()
    templates = from_folder(write_json(folder, tokenizer=tokenizer_json(truncation=None), tokenizer_config=sidecar), [])
    made = replace(with_tokenizer(load_vocabulary(folder)), chat_template=templates.default())
    made.metadata |= templates.metadata()
    return made


def test_the_tokens_of_chat_templates_survive_the_round_trip(tmp_path: Path) -> None:
    made = with_named_tokens(tmp_path / "tokenizer")
    warnings: list[str] = []
    write_hf(made, tmp_path / "hf", "f32", warnings=warnings)
    assert (from_folder(tmp_path / "hf", []), warnings) == (from_folder(tmp_path / "tokenizer", []), [])


def test_transformers_knows_the_tokens_of_chat_templates(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_hf(with_named_tokens(tmp_path / "tokenizer"), tmp_path / "hf", "f32")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.pad_token == "<pad>"
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<turn><image>"


def test_what_a_directory_does_not_hold_is_named(tmp_path: Path) -> None:
    made = with_tokenizer(load_vocabulary(bpe_source(tmp_path / "tokenizer")))
    made = replace(made, chat_template="{{ image_token }}")
    made.metadata |= {"special_tokens": {"image_token": "Zoë", "video_token": "Zoë"}}
    made.metadata |= {"generation": {"xtc_probability": 0.5, "top_p": 0.9}}
    warnings: list[str] = []
    write_hf(made, tmp_path / "hf", "f32", warnings=warnings)
    assert warnings == [
        "a Hugging Face directory has no place for special tokens that the chat template names (image_token): it"
        " renders other prompts",
        "a Hugging Face directory has no place for the recommended xtc_probability",
    ]


@pytest.mark.parametrize("name", ["special_tokens", "chat_templates", "response_template"])
@pytest.mark.parametrize("wrong", [None, ["x"], "x"])
def test_metadata_of_another_form_are_left_out(name: str, wrong: object, tmp_path: Path) -> None:
    """Other programs write metadata, too."""
    made = with_tokenizer(load_vocabulary(bpe_source(tmp_path / "tokenizer")))
    made = replace(made, chat_template="{{ pad_token }}")
    made.metadata[name] = wrong
    warnings: list[str] = []
    write_hf(made, tmp_path / "hf", "f32", warnings=warnings)
    write_gguf(made, tmp_path / "m.gguf", "f32", warnings)
    is_named = name == "response_template" and wrong is not None
    assert [text for text in warnings if "has no place for" in text] == [
        f"{kind} has no place for the format of answers (response_template)"
        for kind in ("a Hugging Face directory", "a GGUF file")
        if is_named
    ]


def test_frequencies_of_zero_are_written_without_a_config(tmp_path: Path) -> None:
    made = hf.read(make_folder(tmp_path, "gemma4_unified_text-nothing_rotates"), [])
    del made.metadata["config"]
    write_hf(made, tmp_path / "again", "f32")
    assert_same(hf.read(tmp_path / "again", []), made)


def test_named_chat_templates_are_written_if_their_names_can_be_files(tmp_path: Path) -> None:
    templates = {"tool_use": "{{ tools }}", "../escape": "{{ x }}", "rag": 3}
    made = replace(checkpoint(llama_config()), metadata={"architecture": "llama", "chat_templates": templates})
    warnings: list[str] = []
    size = write_hf(made, tmp_path / "hf", "f32", warnings=warnings)
    [written] = (tmp_path / "hf").rglob("*.jinja")
    assert (written.name, written.read_text()) == ("tool_use.jinja", "{{ tools }}")
    assert warnings == ["a Hugging Face directory has no place for chat templates with the names '../escape'"]
    assert size == sum(path.stat().st_size for path in (tmp_path / "hf").rglob("*") if path.is_file())


# ---- refused models


def test_an_end_of_text_without_a_token_is_refused(tmp_path: Path) -> None:
    data, special, _ = load_vocabulary(bpe_source(tmp_path / "tokenizer"))
    made = checkpoint(replace(llama_config(), vocab_size=300, n_token_ids=300))  # more logits than tokens
    tokenizer = (data, replace(special, eos_id=299), None)
    made = replace(made, tokenizer=tokenizer, metadata={"architecture": "llama"})
    with pytest.raises(UnsupportedError, match="EOS is the id 299, for which the tokenizer has no token"):
        write_hf(made, tmp_path / "hf", "f32")


def test_a_model_that_rounds_its_inputs_is_refused(tmp_path: Path) -> None:
    made = replace(checkpoint(llama_config()), metadata={"architecture": "llama"})
    made.config = replace(made.config, rounds_inputs=1)
    with pytest.raises(UnsupportedError, match="rounds its inputs to 8 bits cannot be written"):
        write_hf(made, tmp_path / "hf", "f32")


def test_models_that_config_json_cannot_express_are_refused_by_name(tmp_path: Path) -> None:
    made = replace(checkpoint(llama_config(ffn=32)), metadata={"architecture": "llama"})
    other = np.array([1.0, 0.3, 0.2, 0.05], np.float32)
    layers = (replace(made.config.layers[0], window=8), *made.config.layers[1:])
    made.config = replace(made.config, attention_scale=1.0, logit_scale=0.5, layers=layers)
    made.tensors["rope.0.inv_freq"] = LazyTensor.of(other)
    with pytest.raises(UnsupportedError) as caught:
        write_hf(made, tmp_path / "hf", "f32")
    assert list(tmp_path.iterdir()) == []
    for problem in (
        "attention_scale is 1.0,",
        "logit_scale is 0.5,",
        "layers is",
        "rope.0.inv_freq: config.json has no",
    ):
        assert problem in str(caught.value)


def test_norms_that_a_family_shares_must_be_equal(tmp_path: Path) -> None:
    made = hf.read(family_checkpoint(tmp_path / "m", FAMILY_CASES["stablelm"]), [])
    made.tensors["layers.1.ffn_norm.weight"] = LazyTensor.of(np.ones(40, np.float32))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.input_layernorm\.weight is shared by .*, but they differ"):
        write_hf(made, tmp_path / "out", "f32")


def test_norms_without_parameters_must_have_none(tmp_path: Path) -> None:
    made = hf.read(family_checkpoint(tmp_path / "m", FAMILY_CASES["olmo"]), [])
    made.tensors["layers.1.ffn_norm.bias"] = LazyTensor.of(np.ones(40, np.float32))
    with pytest.raises(UnsupportedError, match=r"layers\.1\.ffn_norm\.bias: the norms of the family 'olmo'"):
        write_hf(made, tmp_path / "out", "f32")


def test_a_bias_without_the_others_is_refused(tmp_path: Path) -> None:
    made = replace(checkpoint(llama_config()), metadata={"architecture": "llama"})
    made.tensors["layers.0.attn_q.bias"] = LazyTensor.of(np.zeros(48, np.float32))
    with pytest.raises(UnsupportedError, match=r"missing: model\.layers\.0\.self_attn\.k_proj\.bias"):
        write_hf(made, tmp_path / "hf", "f32")


def test_unknown_families_and_missing_biases_are_refused(tmp_path: Path) -> None:
    made = checkpoint(gpt2_config())
    with pytest.raises(UnsupportedError, match="dtype is 'q8', expected f32, f16, bf16 for a Hugging Face directory"):
        write_hf(made, tmp_path / "hf", "q8")
    with pytest.raises(UnsupportedError, match="families llama, arcee"):
        write_hf(replace(made, metadata={"architecture": "mamba"}), tmp_path / "hf", "f32")
    del made.tensors["layers.0.attn_k.bias"]
    with pytest.raises(UnsupportedError, match=r"c_attn\.bias combines .* has no layers\.0\.attn_k\.bias"):
        write_hf(replace(made, metadata={"architecture": "gpt2"}), tmp_path / "hf", "f32")
    del made.tensors["output_norm.bias"]
    with pytest.raises(ExportError, match=r"missing: output_norm\.bias"):
        write_hf(replace(made, metadata={"architecture": "gpt2"}), tmp_path / "hf", "f32")


@pytest.mark.parametrize("name", ["gpt_oss", "nanochat", "falcon_h1"])
def test_families_that_cannot_be_written_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """gpt-oss has one tensor of all experts with alternating columns, nanochat an embedding without norm; Falcon-H1's
    multipliers are parts of its matrices.
    """
    made = hf.read(family_checkpoint(tmp_path / "m", FAMILY_CASES[name]), [])
    with pytest.raises(UnsupportedError, match=f"the family '{name}' cannot be written as a Hugging Face directory"):
        write_hf(made, tmp_path / "hf", "f32")


def test_experts_with_own_norms_are_refused_by_name(tmp_path: Path) -> None:
    made = hf.read(family_checkpoint(tmp_path / "m", FAMILY_CASES["gemma4_text-26b"]), [])
    with pytest.raises(UnsupportedError, match="experts with norms of their own cannot be written"):
        write_hf(made, tmp_path / "hf", "f32")
