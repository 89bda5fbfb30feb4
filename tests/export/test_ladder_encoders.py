"""The ladder of `llamac check --against` for encoders: every family against transformers, and planted faults.

Stored captures in golden/captures make most of it run without torch (golden/make_captures.py writes them).
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import llamac
from captures import Fault, Floats, both, changed, check_stored, climb, configured, encoder_capture, exchanged, recorded
from commands import Command
from golden.encoder_cases import ENCODER_CASES
from golden.make_captures import ENCODERS, FOLDER, captured, encoder_question, question_of
from golden.make_encoders import encoder_checkpoint, is_scorer
from golden.tiny_checkpoints import write_safetensors
from llamac.errors import UnsupportedError
from llamac.export.checkpoint import Checkpoint
from llamac.export.flat.model import model_config
from llamac.export.hf import model as hf
from llamac.export.hf.families import FAMILIES
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.parity import transformers_modules
from llamac.export.parity.capture import Capture, read_capture
from llamac.export.parity.compare import Tolerance, difference
from llamac.export.parity.encoder_run import run_encoder
from llamac.export.parity.question import make_question
from llamac.export.parity.report import check_parity
from llamac.export.parity.stages import ENCODER_LADDER, keys_in_order
from llamac.export.parity.tinygrad_run import run_tinygrad
from llamac.export.parity.transformers_run import NAME, Calls
from llamac.export.pooling import pool
from sentence_folders import TANH, modules, write_dense, write_json

# A scorer of a language model's family sees earlier positions only: the ladder refuses it.
NAMES = [
    name
    for name, case in ENCODER_CASES.items()
    if case.base is None or (is_scorer(case) and case.config["model_type"] not in FAMILIES)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: encoder_checkpoint(root / name, ENCODER_CASES[name]))


# ---- captures


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_climb_the_ladder_against_stored_captures(model_file: Callable[[str], Path], name: str) -> None:
    capture = read_capture(FOLDER / f"{name}.safetensors")
    assert capture.question == question_of(name)
    report = check_stored(model_file(name), capture, ENCODER_LADDER)
    assert [result.rung.number for result in report.rungs if not result.worst] == [0, 3]


def test_the_command_compares_an_encoder_with_a_capture(
    llamac_command: Command, model_file: Callable[[str], Path]
) -> None:
    done = llamac_command(
        "check", model_file("bert-scores"), "--reference", FOLDER / "bert-scores.safetensors", "--threads", "1"
    )
    assert (done.code, done.err) == (0, "")
    assert "text       12 tokens at once, the last 8 of type 1" in done.out
    assert " 3  KV cache                                             -         an encoder keeps none: it " in done.out
    for rung in ENCODER_LADDER[4:]:
        [line] = [line for line in done.out.splitlines() if line.startswith(f"{rung.number:>2}  {rung.title} ")]
        assert " ok" in line
    assert done.out.splitlines()[-1].split()[-1] == "score"


def test_the_command_refuses_what_encoders_do_not_have(
    llamac_command: Command, model_file: Callable[[str], Path], folder: Callable[[str], Path]
) -> None:
    model, language = model_file("bert-scores"), FOLDER / "gpt2.safetensors"
    done = llamac_command("check", model, "--reference", language)
    done.refuses_with("the capture is of a language model, and the model is an encoder")
    done = llamac_command("check", "stories", "--reference", FOLDER / "bert-scores.safetensors")
    done.refuses_with("the capture is of an encoder, and the model is a language model")
    llamac_command("check", model, "--against", folder("bert-scores"), "--costs", "2").fails_with("--costs", "encoder")
    done = llamac_command("check", model_file("llama-scores"), "--reference", language)
    done.fails_with("--against and --reference support only encoders and models that predict a next token")


# ---- transformers


@pytest.mark.parametrize("name", NAMES)
def test_every_encoder_climbs_the_ladder_against_installed_transformers(
    model_file: Callable[[str], Path], folder: Callable[[str], Path], name: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    with llamac.load(model_file(name), kv_dtype="f32", threads=1) as model:
        capture = run_encoder(folder(name), make_question(model))
        report = check_parity(model, capture)
        assert set(capture.stages) == set(keys_in_order(model_config(model.file)))
    assert report.is_within, report.first
    assert capture.problems == ()


@pytest.mark.parametrize("name", ENCODERS)
def test_stored_captures_of_encoders_are_those_of_installed_transformers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    stored, live = read_capture(FOLDER / f"{name}.safetensors"), captured(tmp_path, name)
    assert (stored.question, stored.config) == (live.question, live.config)
    assert stored.stages.keys() == live.stages.keys()
    for key, rows in live.stages.items():
        assert difference(key, stored.stages[key], rows, 0, Tolerance(1e-4)).is_within, key


def test_the_modules_of_sentence_transformers_are_compared(
    llamac_command: Command, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """The whole command, with a capture that a machine without torch can use."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    directory = shutil.copytree(folder("bert"), tmp_path / "bert")
    write_json(directory / "modules.json", modules("Transformer", "Pooling", "Dense", "Normalize"))
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write_dense(directory / "2_Dense", 40, 24, TANH, bias=True)
    assert llamac_command("export", directory, tmp_path / "m.bin").code == 0
    done = llamac_command("check", tmp_path / "m.bin", "--against", directory, "--capture", tmp_path / "capture")
    assert (done.code, done.err) == (0, "")
    capture = read_capture(tmp_path / "capture")
    assert capture.stages["pooled", 0].shape == (1, 24)
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    done = llamac_command("check", tmp_path / "m.bin", "--against", directory)
    assert done.code == 1
    assert "cause: the pooling is cls; it should be mean" in done.out
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": "median"})
    done = llamac_command("check", tmp_path / "m.bin", "--against", directory)
    done.fails_with("names the pooling median; supported are mean, cls, lasttoken")
    write_json(directory / "modules.json", modules("Transformer", "Pooling"))
    joined = ["cls", "max", "weightedmean", "mean_sqrt_len_tokens", "lasttoken"]
    write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": joined})
    assert llamac_command("export", directory, tmp_path / "joined.bin").code == 0
    done = llamac_command("check", tmp_path / "joined.bin", "--against", directory, "--capture", tmp_path / "joined")
    assert (done.code, done.err) == (0, "")
    assert read_capture(tmp_path / "joined").stages["pooled", 0].shape == (1, 200)


def test_llama_with_attention_to_both_sides_climbs_the_ladder(folder: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    directory = shutil.copytree(folder("llama"), tmp_path / "llama")
    config = {key: value for key, value in ENCODER_CASES["llama"].config.items() if key != "is_causal"}
    config |= {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "pooling": "cls"}
    write_json(directory / "config.json", config)
    llamac.export.export(directory, tmp_path / "m.bin")
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32", threads=1) as model:
        assert model.file.metadata["pooling"] == "cls"
        write_json(directory / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
        report = check_parity(model, run_encoder(directory, make_question(model)))
    assert report.is_within, report.first
    scorer = {"architectures": ["LlamaBidirectionalForSequenceClassification"], "id2label": {"0": "a"}}
    write_json(directory / "config.json", config | scorer)
    with pytest.raises(UnsupportedError, match="transformers has no cross-encoder llama_bidirec"):
        run_encoder(directory, encoder_question("llama", 8))


def test_gte_under_its_first_name_climbs_the_ladder(folder: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    directory = old_gte(folder("gte"), tmp_path / "new")
    llamac.export.export(directory, tmp_path / "m.bin")
    with llamac.load(tmp_path / "m.bin", kv_dtype="f32", threads=1) as model:
        capture = run_encoder(directory, make_question(model))
        report = check_parity(model, capture)
    assert report.is_within, report.first
    assert capture.problems == ()


def old_gte(source: Path, folder: Path) -> Path:
    """A directory like the published ones of gte, whose model_type is "new"."""
    folder.mkdir()
    config = dict(ENCODER_CASES["gte"].config)
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "pack_qkv": True}
    write_json(folder / "config.json", config | {"model_type": "new", "architectures": ["NewModel"]})
    stored = read_safetensors(source / "model.safetensors")
    tensors = {f"new.{name}": tensor.lazy().array() for name, tensor in stored.items()}
    tensors["new.pooler.dense.bias"] = np.zeros(40, np.float32)  # embeddings do not use it
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


# ---- planted faults


def without(rows: Floats) -> Floats:
    return np.zeros_like(rows)


def pooled_as(name: str) -> Fault:
    """Pool in another way."""
    return lambda checkpoint: replace(checkpoint, metadata=checkpoint.metadata | {"pooling": name})


def queries_and_keys(checkpoint: Checkpoint) -> Checkpoint:
    names = [(f"layers.1.attn_q.{kind}", f"layers.1.attn_k.{kind}") for kind in ("weight", "bias")]
    return both(*(exchanged(*pair) for pair in names))(checkpoint)


def backwards(rows: Floats) -> Floats:
    """The biases of 4 heads by distance, later positions first."""
    return rows.reshape(4, -1)[:, ::-1].reshape(rows.shape)


# (case, fault, the stage and the layer that differ first, a part of the cause with config.json or without it)
PLANTED: dict[str, tuple[str, Fault, tuple[str, int], str]] = {
    "eps": ("bert", configured(norm_eps=1e-3), ("attn_norm", 0), "norm_eps is 0.001 in the file; config.json gives"),
    "usual eps": ("bert-layer_norm_eps", configured(norm_eps=1e-2), ("attn_norm", 0), "norm_eps is 0.01"),
    "bias": ("bert", changed("layers.1.attn_q.bias", without), ("q", 1), "attn_q.bias is missing"),
    "bias of a norm": ("gte", changed("layers.1.attn_norm.bias", without), ("attn_norm", 1), "norm.bias is missing"),
    "bias of the FFN": ("mpnet", changed("layers.2.ffn_down.bias", without), ("ffn", 2), "ffn_down.bias is missing"),
    "queries and keys": ("bert", queries_and_keys, ("q", 1), "layers.1.attn_q and layers.1.attn_k are exchanged"),
    "positions": (  # the padding token's id is 2: position 0 has row 3
        "xlm-roberta",
        changed("position_embedding.weight", lambda rows: np.roll(rows, 3, 0)),
        ("embedding", 0),
        "off by 3: position p has the row of position p - 3",
    ),
    "types": (
        "bert-scores",
        changed("type_embedding.weight", lambda rows: rows[::-1]),
        ("embedding", 0),
        "the rows of type_embedding are in another order",
    ),
    "no types": (
        "bert",
        changed("type_embedding.weight", without),
        ("embedding", 0),
        "type_embedding.weight is missing",
    ),
    "no types of pairs": (
        "bert-scores",
        changed("type_embedding.weight", without),
        ("embedding", 0),
        "type_embedding.weight is missing: the same numbers are missing at all positions of a type",
    ),
    "a factor of distances": (
        "mpnet",
        changed("distance_bias.weight", lambda rows: rows * np.float32(1.5)),
        ("weights", 0),
        "the numbers of distance_bias.weight are 1.5 times as large as they should be",
    ),
    "pooling": ("bert", pooled_as("cls"), ("pooled", 0), "the pooling is cls; it should be mean"),
    "pooling of scores": (
        "eurobert-scores-late",
        pooled_as("mean"),
        ("score", 0),
        "pooling is mean; it should be late",
    ),
    "no sigmoid": ("bert-scores", configured(pooled_activation=("tanh", "none")), ("score", 0), "pooled_activation is"),
    "activation of the head": (
        "distilbert-scores",
        configured(pooled_activation=("tanh", "sigmoid")),
        ("score", 0),
        "pooled_activation is",
    ),
    "pre-norm": ("bert", recorded(1, placement="pre"), ("ffn_norm", 1), "placement of layer 1 is pre in the file"),
    "pre-norm at first": ("modernbert", recorded(0, placement="pre"), ("ffn_norm", 0), "placement of layer 0 is pre"),
    "window + 1": ("modernbert", recorded(1, window=9), ("weights", 1), "window of layer 1 is 9 in the file"),
    "window - 1": ("gemma3_text", recorded(0, window=7), ("weights", 0), "window of layer 0 is 7 in the file"),
    "GELU": ("bert", configured(activation="gelu_tanh"), ("ffn", 0), "activation is gelu_tanh in the file; config"),
    "distances": ("mpnet", changed("distance_bias.weight", backwards), ("weights", 0), "are in reverse order"),
    "rope theta": (
        "nomic_bert",
        changed("rope.0.inv_freq", lambda table: table * table),
        ("q", 0),
        "RoPE's frequencies (rope.0.inv_freq) are not those of config.json",
    ),
    "gate and up": (
        "gte",
        exchanged("layers.1.ffn_gate.weight", "layers.1.ffn_up.weight"),
        ("ffn", 1),
        "are exchanged",
    ),
}
# Without config.json.
BLIND = {
    "usual eps": "it should be 1e-12",
    "positions": "position p has the row of position p - 3",
    "types": "type t has the row of type t + 1",
    "pre-norm": "they should be one after the other, each added to the normed residual stream (post-norm)",
    "pre-norm at first": "they should be one after the other, attention alone added to the normed residual stream",
    "window + 1": "off by one: 9 positions; it should be 8",
    "window - 1": "off by one: 7 positions; it should be 8",
    "GELU": "the activation is gelu_tanh; it should be gelu_erf",
    "pooling": "it should be mean",
    "no sigmoid": "the activation after pooled.1.weight is none; it should be sigmoid",
    "activation of the head": "the activation after pooled.0.weight is tanh; it should be relu",
}


@pytest.fixture(scope="module")
def given(folder: Callable[[str], Path]) -> Callable[[str], tuple[Checkpoint, Capture]]:
    """The checkpoint of a case, and the capture of the float64 forward pass."""

    @functools.cache
    def made(name: str) -> tuple[Checkpoint, Capture]:
        checkpoint = hf.read(folder(name), [])
        return checkpoint, encoder_capture(checkpoint, ENCODER_CASES[name])

    return made


@pytest.mark.parametrize(
    ("name", "has_config"), [*((name, True) for name in PLANTED), *((name, False) for name in BLIND)]
)
def test_a_planted_fault_of_an_encoder_is_named(
    given: Callable[[str], tuple[Checkpoint, Capture]], tmp_path: Path, name: str, has_config: bool
) -> None:
    case, fault, stage, cause = PLANTED[name]
    checkpoint, capture = given(case)
    capture = capture if has_config else replace(capture, config={})
    report = climb(tmp_path / "m.bin", capture, fault(checkpoint))
    assert not report.is_within
    assert report.first is not None
    assert (report.first.stage, report.first.layer) == stage
    assert report.verdict is not None
    assert report.verdict.fault == "file"
    cause = cause if has_config else BLIND[name]
    assert any(cause in found.sentence for found in report.verdict.causes), report.verdict.causes
    assert all(found.left <= report.first.tolerance.limit for found in report.verdict.causes)
    json.dumps(report.facts(), allow_nan=False)


@pytest.mark.parametrize("name", sorted({case for case, *_ in PLANTED.values()}))
def test_a_correct_file_of_an_encoder_has_no_difference(
    given: Callable[[str], tuple[Checkpoint, Capture]], tmp_path: Path, name: str
) -> None:
    checkpoint, capture = given(name)
    report = climb(tmp_path / "m.bin", capture, checkpoint)
    assert report.is_within
    assert (report.first, report.verdict) == (None, None)


def test_only_the_score_can_pool_late(given: Callable[[str], tuple[Checkpoint, Capture]], tmp_path: Path) -> None:
    checkpoint, capture = given("bert")
    last = capture.stages["output_norm", 0][-1:]
    capture = replace(capture, stages=capture.stages | {("pooled", 0): last}, config={})
    report = climb(tmp_path / "m.bin", capture, checkpoint)
    assert report.verdict is not None
    assert [cause.sentence for cause in report.verdict.causes] == ["the pooling is mean; it should be last"]
    late = pooled_as("late")(checkpoint)
    assert pool(late, capture.stages["output_norm", 0].astype(np.float64)).shape == last.shape


def test_one_position_shows_nothing_that_is_the_same_at_all(
    given: Callable[[str], tuple[Checkpoint, Capture]], tmp_path: Path
) -> None:
    checkpoint, _ = given("bert")
    capture = replace(encoder_capture(checkpoint, ENCODER_CASES["bert"], 1), config={})
    report = climb(tmp_path / "m.bin", capture, changed("layers.1.attn_q.weight", lambda w: w * w)(checkpoint))
    assert report.first is not None
    assert (report.first.stage, report.first.layer) == ("q", 1)
    assert report.verdict is not None
    assert report.verdict.causes == ()


def test_tinygrad_computes_no_encoders(folder: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedError, match="the witness tinygrad computes no encoders: "):
        run_tinygrad(folder("llama"), encoder_question("bert", 8))


def test_an_encoder_without_a_pooling_is_pooled_alike(folder: Callable[[str], Path], tmp_path: Path) -> None:
    directory = shutil.copytree(folder("bert"), tmp_path / "bert")
    write_json(directory / "modules.json", modules("Transformer", "Pooling", "Normalize"))
    assert hf.read(directory, []).metadata["pooling"] == "mean"


def test_the_registered_attention_keeps_no_module(folder: Callable[[str], Path]) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run_encoder(folder("bert"), encoder_question("bert", 8))
    [calls] = [
        cell.cell_contents
        for cell in transformers.AttentionInterface()[NAME].__closure__
        if isinstance(cell.cell_contents, Calls)
    ]
    assert not any((calls.attention, calls.layers, calls.latents, calls.neighbors))


def test_layers_without_a_norm_after_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(2, 4), "layers": torch.nn.ModuleList([layer])})
    model.forward = lambda input_ids: layer(model["embedding"](input_ids))
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1))
    monkeypatch.setattr(transformers_modules, "_layer", lambda *args: None)
    with pytest.raises(UnsupportedError, match="no norm follows the layers"):
        transformers_modules.find_encoder(torch, model, [])
