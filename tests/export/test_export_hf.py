"""Hugging Face directories: weights in every container, shards, tensors, and the exported model's logits."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vocab_samples import tokenizer_json, write_json

import llamac
from golden.cases import GPT2, LLAMA
from golden.tiny_checkpoints import Config, Tensors, changed, tensors, write_checkpoint, write_config, write_safetensors
from hf_reading import parse, read
from llamac.errors import ExportError, TokenizerError, UnsupportedError
from llamac.export import reference
from llamac.export.checkpoint import Checkpoint
from llamac.export.convert import export
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from torch_samples import write_torch

IDS = [5, 0, 300, 17, 17, 42, 8]


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype
        np.testing.assert_array_equal(tensor.array(), other.tensors[name].array(), err_msg=name)


# ---- containers of weights


def write_shards(folder: Path, weights: Tensors, count: int, write: Callable[[Path, Tensors], None], name: str) -> None:
    """Write weights in shards with an index. name: the name of the unsharded file."""
    stem, _, ending = name.rpartition(".")
    files = [f"{stem}-{i + 1:05}-of-{count:05}.{ending}" for i in range(count)]
    weight_map = {tensor: files[i % count] for i, tensor in enumerate(weights)}
    for file in files:
        write(folder / file, {tensor: weights[tensor] for tensor in weights if weight_map[tensor] == file})
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("form", ["safetensors-shards", "torch", "torch-shards", "bare-names"])
def test_every_container_gives_the_same_model(tmp_path: Path, config: Config, form: str) -> None:
    expected = read(write_checkpoint(tmp_path / "whole", config))
    folder, weights = tmp_path / form, tensors(config)
    folder.mkdir()
    write_config(folder, config)
    if form == "safetensors-shards":
        write_shards(folder, weights, 3, write_safetensors, "model.safetensors")
    elif form == "torch":
        write_torch(folder / "pytorch_model.bin", weights)
    elif form == "torch-shards":
        write_shards(folder, weights, 2, write_torch, "pytorch_model.bin")
    else:
        prefix = {"llama": "model.", "gpt2": "transformer."}[config["model_type"]]
        bare = {name.removeprefix(prefix): values for name, values in weights.items()}
        write_safetensors(folder / "model.safetensors", bare)
    found = read(folder)
    assert_same(found, expected)
    files = found.metadata["source"]["files"]
    assert files[0] == "config.json"
    assert sorted(files) == sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_files_written_by_torch_are_read(tmp_path: Path, config: Config) -> None:
    torch = pytest.importorskip("torch")
    expected = read(write_checkpoint(tmp_path / "whole", config))
    write_config(tmp_path, config)
    weights = {name: torch.from_numpy(values.copy()) for name, values in tensors(config).items()}
    state = OrderedDict((name, torch.nn.Parameter(values)) for name, values in weights.items())
    state._metadata = OrderedDict(version=1)  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(read(tmp_path), expected)
    torch.save({name: values.bfloat16() for name, values in weights.items()}, tmp_path / "pytorch_model.bin")
    for name, tensor in read(tmp_path).tensors.items():
        if not name.startswith("rope"):
            assert tensor.dtype == "bf16"
            rounded = torch.from_numpy(expected.tensors[name].array()).bfloat16().float().numpy()
            np.testing.assert_array_equal(tensor.array(), rounded)


def test_every_truncation_is_detected(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for write, reader in ((write_safetensors, read_safetensors), (write_torch, read_torch)):
        write(whole, {"a": np.ones((3, 2), np.float32), "b": np.ones(5, np.float32)})
        data = whole.read_bytes()
        assert set(reader(whole)) == {"a", "b"}
        for length in range(len(data)):
            part.write_bytes(data[:length])
            with pytest.raises(ExportError):
                reader(part)


def flips(data: bytes) -> Iterator[bytes]:
    for index in range(len(data)):
        yield data[:index] + bytes([data[index] ^ 0x15]) + data[index + 1 :]


def test_damage_raises_only_our_errors(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for write, reader in ((write_safetensors, read_safetensors), (write_torch, read_torch)):
        write(path, {"a": np.ones((3, 2), np.float32)})
        for damaged in flips(path.read_bytes()):
            path.write_bytes(damaged)
            try:
                for stored in reader(path).values():
                    if stored.dtype == "f32" and len(stored.shape) in (1, 2):
                        stored.read(0, stored.shape[0])
            except (ExportError, UnsupportedError):
                pass


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "tokenizer.model"])
def test_git_lfs_pointers_are_named(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "tiny", GPT2)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(ExportError, match=f"{name} is a Git LFS pointer.*git lfs pull"):
        export(folder, tmp_path / "out.bin")


# ---- shards


def test_all_problems_with_shards_are_reported(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    weights = tensors(LLAMA)
    write_shards(tmp_path, weights, 2, write_safetensors, "model.safetensors")
    one, two = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    in_two = [name for name, file in index["weight_map"].items() if file == two.name]
    moved = {name: weights[name] for name in in_two[1:]} | {"new": np.ones(1, np.float32)}
    write_safetensors(two, moved | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]})
    with pytest.raises(ExportError) as caught:
        read(tmp_path)
    for line in (
        f"missing: {in_two[0]} is not in {two.name}",
        f"extra: new in {two.name}",
        f"duplicate: model.embed_tokens.weight is in {two.name}, but the index says {one.name}",
    ):
        assert line in str(caught.value)


def test_ignored_tensors_can_be_missing_from_the_index_or_the_shard(tmp_path: Path) -> None:
    """Some conversions dropped RoPE's tables in only one of the two."""
    write_config(tmp_path, LLAMA)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}
    write_shards(tmp_path, tensors(LLAMA) | table, 2, write_safetensors, "model.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    weight_map["model.layers.1.self_attn.rotary_emb.inv_freq"] = weight_map.pop(next(iter(table)))
    path.write_text(json.dumps(index))
    assert_same(read(tmp_path), read(write_checkpoint(tmp_path / "whole", LLAMA)))


@pytest.mark.parametrize("equal", [True, False])
def test_the_output_matrix_of_a_tied_model_can_be_missing_from_the_index(tmp_path: Path, equal: bool) -> None:
    """transformers reads all tensors of the shards. Whether the output is tied depends on this one, as without shards.

    Programs that rewrote the index after tying left the matrix in its shard.
    """
    config = {**LLAMA, "tie_word_embeddings": True}
    weights = tensors(LLAMA)
    if equal:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for name, in_index in (("index", True), ("shard", False)):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, config)
        write_shards(tmp_path / name, weights, 2, write_safetensors, "model.safetensors")
        path = tmp_path / name / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        if not in_index:
            del index["weight_map"]["lm_head.weight"]
        path.write_text(json.dumps(index))
    found = hf.read(tmp_path / "shard", [])
    assert found.config.tied_output == equal
    assert_same(found, hf.read(tmp_path / "index", []))
    write_config(tmp_path / "shard", {**config, "tie_word_embeddings": False})
    with pytest.raises(ExportError, match=r"extra: lm_head\.weight in \S+ is not in the index"):
        hf.read(tmp_path / "shard", [])


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b", "", ".", ".."])
def test_shards_outside_the_directory_are_refused(tmp_path: Path, file: str) -> None:
    write_config(tmp_path, LLAMA)
    weight_map = {"weight_map": {"a": file, "b": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    with pytest.raises(ExportError, match=r"(?s)not the name.*gone\.safetensors is missing|missing.*not the name"):
        read(tmp_path)


def test_the_error_for_missing_weights_lists_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no config\.json"):
        read(tmp_path)
    write_config(tmp_path, LLAMA)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ExportError, match=r"has no weights.*adapter_model\.safetensors"):
        read(tmp_path)


def test_an_unsharded_file_is_preferred_to_shards(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", LLAMA)
    (folder / "model.safetensors.index.json").write_text("{}")
    warnings: list[str] = []
    hf.read(folder, warnings)
    (warning,) = warnings
    assert warning.endswith("model.safetensors.index.json exist: model.safetensors.index.json is ignored")


# ---- tensors


def test_all_wrong_tensors_are_reported(tmp_path: Path) -> None:
    write_config(tmp_path, GPT2)
    weights = tensors(GPT2)
    del weights["transformer.h.1.ln_1.bias"], weights["transformer.h.0.attn.c_attn.weight"]
    weights["transformer.h.0.mlp.c_fc.weight"] = weights["transformer.h.0.mlp.c_fc.weight"].T
    weights["transformer.h.2.ln_1.weight"] = np.ones(40, np.float32)
    weights["score.weight"] = np.ones((2, 40), np.float32)
    write_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(ExportError) as caught:
        read(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: transformer.h.1.ln_1.bias",
        "  missing: transformer.h.0.attn.c_attn.weight",
        "  misshaped: transformer.h.0.mlp.c_fc.weight is (171, 40), the config requires (40, 171)",
        "  unknown: score.weight (2, 40)",
        "  unknown: transformer.h.2.ln_1.weight (40,)",
    ]


def test_biases_that_the_config_denies_are_surplus(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", LLAMA)
    write_config(folder, changed(LLAMA, mlp_bias=False))
    with pytest.raises(ExportError, match=r"unknown: model\.layers\.0\.mlp\.down_proj\.bias"):
        read(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", LLAMA)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ExportError, match=r"dtype: model\.embed_tokens\.weight is i32"):
        read(folder)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LLAMA, ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]),
        (GPT2, ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
    ],
)
def test_tables_of_old_versions_are_ignored(tmp_path: Path, config: Config, names: list[str]) -> None:
    expected = read(write_checkpoint(tmp_path / "without", config))
    folder = write_checkpoint(tmp_path / "with", config)
    tables = {name: np.ones((1, 3), np.float32) for name in names}
    write_safetensors(folder / "model.safetensors", tensors(config) | tables)
    assert_same(read(folder), expected)


def test_a_tensor_with_two_names_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAMA)
    write_safetensors(tmp_path / "model.safetensors", tensors(LLAMA) | {"norm.weight": np.ones(40, np.float32)})
    with pytest.raises(ExportError, match=r"model\.norm\.weight and norm\.weight"):
        read(tmp_path)


TIED = changed(LLAMA, tie_word_embeddings=True)


def with_output(folder: Path, config: Config, output: NDArray[np.float32] | None, embedding: bool = True) -> list[str]:
    """Write a checkpoint with this output matrix, or none; return the warnings of reading it."""
    weights = {name: values for name, values in tensors(TIED).items() if embedding or "embed_tokens" not in name}
    folder.mkdir(exist_ok=True)
    write_config(folder, config)
    write_safetensors(
        folder / "model.safetensors", weights if output is None else {**weights, "lm_head.weight": output}
    )
    warnings: list[str] = []
    hf.read(folder, warnings)
    return warnings


def test_the_tensors_decide_whether_the_output_is_tied(tmp_path: Path) -> None:
    embedding = tensors(TIED)["model.embed_tokens.weight"]
    other = tensors(LLAMA)["lm_head.weight"]
    tied = read(write_checkpoint(tmp_path / "tied", TIED))
    assert tied.config.tied_output
    assert "output.weight" not in tied.tensors
    untied = read(write_checkpoint(tmp_path / "untied", LLAMA))
    assert not untied.config.tied_output
    for name, output, with_embedding in (("both", embedding, True), ("output", embedding, False)):
        assert with_output(tmp_path / name, TIED, output, with_embedding) == []
        assert_same(read(tmp_path / name), tied)
    with pytest.raises(ExportError, match=r"missing: lm_head\.weight \(without it, tie_word_embeddings"):
        with_output(tmp_path / "no output", LLAMA, None)
    (warning,) = with_output(tmp_path / "another output", TIED, other)
    assert "they differ: both are kept" in warning
    assert_same(hf.read(tmp_path / "another output", []), untied)


def test_a_bare_model_is_a_language_model_if_its_output_is_the_embedding(tmp_path: Path) -> None:
    bare = {**TIED, "architectures": ["LlamaModel"]}
    assert with_output(tmp_path / "tied", bare, None) == []
    with pytest.raises(UnsupportedError, match=r"LlamaModel has no output matrix.*tie_word_embeddings"):
        with_output(tmp_path / "untied", {**bare, "tie_word_embeddings": False}, None)
    assert with_output(tmp_path / "own", {**bare, "tie_word_embeddings": False}, tensors(LLAMA)["lm_head.weight"]) == []
    for name in ("LlamaForCausalLM", "LLaMAForCausalLM"):
        assert parse({**LLAMA, "architectures": [name]}).model == parse(LLAMA).model


@pytest.mark.parametrize("output", ["none", "equal", "other"])
def test_transformers_agrees_about_tying(tmp_path: Path, output: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from golden.make import relative_errors, transformers_logits

    matrices = {
        "none": None,
        "equal": tensors(TIED)["model.embed_tokens.weight"],
        "other": tensors(LLAMA)["lm_head.weight"],
    }
    with_output(tmp_path / "x", TIED, matrices[output])
    logits = reference.forward(hf.read(tmp_path / "x", []), [IDS])[0]
    assert relative_errors(transformers_logits(tmp_path / "x", IDS), logits).max() < 1e-4


# ---- tokenizer and chat template


def test_a_damaged_tokenizer_is_left_out_only_on_request(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", GPT2)
    out = tmp_path / "out.bin"
    (warning,) = export(folder, out, probe_source=None).warnings
    assert "has no tokenizer" in warning
    assert "only takes token ids" in warning
    out.unlink()
    for name, data in {"tokenizer.json": b"{", "tokenizer.model": b"\x0a\x03abc"}.items():
        (folder / name).write_bytes(data)
        with pytest.raises((TokenizerError, UnsupportedError), match=rf"{name}.*--no-tokenizer leaves it out"):
            export(folder, out)
        assert not out.exists()
        report = export(folder, out, tokenizer=False, probe_source=None)
        assert (report.tokenizer, report.warnings) == ("none", [])
        out.unlink()
        (folder / name).unlink()


@pytest.mark.parametrize("to", ["llamac", "hf"])
@pytest.mark.parametrize(
    ("file", "eos", "message"),
    [
        ("generation_config.json", [2, 5000], "a stop id is 5000"),
        ("config.json", 5000, "eos_id is 5000, a stop id is 5000"),
    ],
)
def test_special_tokens_outside_the_vocabulary_are_reported_early(
    tmp_path: Path, to: str, file: str, eos: Any, message: str
) -> None:
    folder = write_json(write_checkpoint(tmp_path / "tiny", GPT2), tokenizer=tokenizer_json())
    config = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**config, "eos_token_id": eos}))
    phases: list[str] = []
    arguments: dict[str, Any] = {} if to == "hf" else {"probe_source": "llamac"}
    with pytest.raises(ExportError, match=f"outside the model's vocabulary .*: {message};"):
        export(folder, tmp_path / "out", to=to, progress=lambda phase, *_: phases.append(phase), **arguments)
    assert phases == []


def test_the_chat_template_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", GPT2)
    config_file = folder / "tokenizer_config.json"
    assert read(folder).chat_template == ""
    config_file.write_text(json.dumps({"chat_template": "{{ a }}"}))
    assert read(folder).chat_template == "{{ a }}"
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    config_file.write_text(json.dumps({"chat_template": several}))
    assert read(folder).chat_template == "d"
    config_file.write_text(json.dumps({"chat_template": several[:1]}))
    warnings: list[str] = []
    assert hf.read(folder, warnings).chat_template == ""
    assert "tools" in warnings[0]
    config_file.write_text(json.dumps({"chat_template": 1}))
    with pytest.raises(ExportError, match="chat_template"):
        read(folder)
    config_file.write_text(json.dumps({"chat_template": "x\ud800"}))
    with pytest.raises(ExportError, match="chat_template contains a lone surrogate"):
        read(folder)
    (folder / "chat_template.jinja").write_text("{{ ß }}", encoding="utf-8")
    assert read(folder).chat_template == "{{ ß }}"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ExportError, match="UTF-8"):
        read(folder)


# ---- the whole way


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_exported_model_matches_the_checkpoint(tmp_path: Path, config: Config, dtype: str) -> None:
    folder = write_checkpoint(tmp_path / "x", config)
    if dtype == "bf16":
        write_safetensors(
            folder / "model.safetensors", {name: bf16(values) for name, values in tensors(config).items()}
        )
    report = export(folder, tmp_path / "x.bin", dtype=dtype)
    assert report.dtype == dtype
    assert report.source["format"] == "huggingface"
    expected = reference.forward(hf.read(folder, []), [IDS])[0]
    with llamac.load(tmp_path / "x.bin", kv_dtype="f32") as model:
        logits = model.logits(IDS)
    error = np.abs(logits - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert error.max() <= 1e-4


def bf16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Truncate to numbers that bf16 holds exactly."""
    cut: NDArray[np.float32] = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


def test_metadata_record_the_source(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", GPT2)
    assert read(folder).metadata == {
        "name": "tiny",
        "architecture": "gpt2",
        "source": {"format": "huggingface", "files": ["config.json", "model.safetensors"]},
        "config": GPT2,
    }
