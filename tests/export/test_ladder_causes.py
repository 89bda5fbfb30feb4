"""The ladder's explanations: each planted fault is found at its stage, in its layer, and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import llamac
from captures import Fault, Floats, both, changed, climb, configured, exchanged, misread, recorded, to_neighbors
from llamac.cli.check_against import _explanation, table_row
from llamac.export.checkpoint import Checkpoint
from llamac.export.parity import report as report_module
from llamac.export.parity.capture import Capture, Question
from llamac.export.parity.engine_run import run_engine
from llamac.export.parity.report import RungResult
from llamac.export.parity.stages import LADDER, Key
from llamac.export.reference import Array, forward_part

Stages = dict[Key, Floats]
Given = tuple[Checkpoint, Capture]


@dataclass(frozen=True)
class Planted:
    """A fault, and how the ladder must report it.

    Attributes:
        case: The model.
        fault: Damages its checkpoint.
        stage: The stage and the layer that differ first.
        cause: A part of one of the causes.
    """

    case: str
    fault: Fault
    stage: tuple[str, int]
    cause: str


def first_to_neighbors(rows: Floats, width: int, rotated: int) -> Floats:
    """The same for the first `rotated` rows of each head of `width`, as in latent attention."""
    heads = rows.reshape(-1, width, rows.shape[1]).copy()
    heads[:, :rotated] = heads[:, np.arange(rotated).reshape(2, -1).T.reshape(-1)]
    turned: Floats = heads.reshape(rows.shape)
    return turned


def without(rows: Floats) -> Floats:
    return np.zeros_like(rows)


def unfused(checkpoint: Checkpoint) -> Checkpoint:
    """GPT-2's fused matrix of queries, keys and values read without transposing it."""
    names = [f"layers.1.attn_{part}.weight" for part in "qkv"]
    whole = misread(np.concatenate([checkpoint.tensors[name].array() for name in names]))
    for name, part in zip(names, np.split(whole, 3), strict=True):
        checkpoint = changed(name, lambda _, part=part: part)(checkpoint)  # type: ignore[misc]
    return checkpoint


PLANTED = {
    # norms
    "eps": Planted("llama", configured(norm_eps=1e-3), ("attn_norm", 0), "norm_eps is 0.001 in the file; config.json"),
    "plus one": Planted("gemma3_text", changed("layers.0.attn_norm.weight", lambda w: w - 1), ("attn_norm", 0), "+ 1"),
    "plus one in the middle": Planted(
        "gemma3_text",
        changed("layers.1.attn_post_norm.weight", lambda w: w - 1),
        ("ffn_norm", 1),
        "attn_post_norm.weight lacks + 1",
    ),
    "plus one of keys": Planted(
        "gemma3_text", changed("layers.1.attn_k_norm.weight", lambda w: w - 1), ("k", 1), "attn_k_norm.weight lacks + 1"
    ),
    "plus one twice": Planted("qwen3", changed("output_norm.weight", lambda w: w + 1), ("output_norm", 0), "has + 1"),
    "norm bias": Planted(
        "gpt2", changed("layers.1.ffn_norm.bias", without), ("ffn_norm", 1), "ffn_norm.bias is missing"
    ),
    # RoPE
    "rope pairs": Planted(
        "mistral", changed("layers.0.attn_q.weight", to_neighbors(14)), ("q", 0), "wrong RoPE convention"
    ),
    "rope pairs of keys": Planted(
        "mistral", changed("layers.1.attn_k.weight", to_neighbors(14)), ("k", 1), "wrong RoPE convention"
    ),
    "rope theta": Planted(
        "mistral",
        changed("rope.0.inv_freq", lambda table: (1e4 ** (-np.arange(len(table)) / len(table))).astype(np.float32)),
        ("q", 0),
        "RoPE's frequencies (rope.0.inv_freq) are not those of config.json",
    ),
    "rope table": Planted(
        "gemma3_text", recorded(1, rope=1), ("q", 1), "of layer 1 is 1 in the file; config.json gives 0"
    ),
    "norm after rope": Planted("qwen3", configured(qk_norm_after_rope=1), ("q", 0), "qk_norm_after_rope"),
    # products
    "transposed": Planted("gpt2", changed("layers.1.attn_out.weight", misread), ("attn_out", 1), "is transposed"),
    "transposed in the FFN": Planted(
        "gpt2", changed("layers.0.ffn_down.weight", misread), ("ffn", 0), "ffn_down.weight is transposed"
    ),
    "transposed and fused": Planted(
        "gpt2", unfused, ("q", 1), "the fused matrix of layer 1's queries, keys and values is transposed"
    ),
    "bias of queries": Planted("qwen2", changed("layers.1.attn_q.bias", without), ("q", 1), "attn_q.bias is missing"),
    "bias of values": Planted("qwen2", changed("layers.0.attn_v.bias", without), ("v", 0), "attn_v.bias is missing"),
    "bias of the output": Planted(
        "gpt2", changed("layers.1.attn_out.bias", without), ("attn_out", 1), "attn_out.bias is missing"
    ),
    "bias of the FFN": Planted(
        "gpt2", changed("layers.1.ffn_down.bias", without), ("ffn", 1), "ffn_down.bias is missing"
    ),
    "gate and up": Planted(
        "mistral", exchanged("layers.1.ffn_gate.weight", "layers.1.ffn_up.weight"), ("ffn", 1), "are exchanged"
    ),
    "keys and values": Planted(
        "mistral", exchanged("layers.1.attn_k.weight", "layers.1.attn_v.weight"), ("k", 1), "are exchanged"
    ),
    # attention
    "window + 1": Planted(
        "mistral", recorded(1, window=8), ("weights", 1), "window of layer 1 is 8 in the file; config.json gives 7"
    ),
    "window - 1": Planted(
        "mistral", recorded(0, window=6), ("weights", 0), "window of layer 0 is 6 in the file; config.json gives 7"
    ),
    "no window": Planted("gemma3_text", recorded(0, window=0), ("weights", 0), "window of layer 0 is 0 in the file"),
    "attention scale": Planted(
        "llama", configured(attention_scale=1.0), ("weights", 0), "attention_scale is 1 in the file"
    ),
    "soft cap": Planted("gemma2", configured(attention_soft_cap=0.0), ("weights", 0), "attention_soft_cap"),
    "pairs of latent attention": Planted(
        "minicpm3",
        changed("layers.1.attn_q.weight", lambda rows: first_to_neighbors(rows, 16, 6)),
        ("q", 1),
        "wrong RoPE convention: the rows of attn_q of layer 1",
    ),
    # recurrent layers
    "decay": Planted(
        "qwen3_5_text", changed("layers.0.delta_decay.weight", lambda w: np.log(-w)), ("attn_mix", 0), "is a logarithm"
    ),
    "taps": Planted(
        "lfm2",
        changed("layers.0.conv_taps.weight", lambda w: w.reshape(3, -1)[::-1].reshape(-1)),
        ("attn_mix", 0),
        "the taps of layers.0.conv_taps.weight are in reverse order",
    ),
    "parts of a convolution": Planted(
        "lfm2",
        changed("layers.0.conv_in.weight", lambda w: w.reshape(3, -1, w.shape[1])[[1, 0, 2]].reshape(w.shape)),
        ("attn_mix", 0),
        "the parts b and c",
    ),
    "transposed in a recurrent layer": Planted(
        "qwen3_5_text", changed("layers.0.delta_out.weight", misread), ("attn_out", 0), "delta_out.weight is transposed"
    ),
    # two in one stage
    "two numbers": Planted(
        "qwen3_moe",
        recorded(1, n_experts_used=1, expert_weights=0),
        ("ffn", 1),
        "config.json gives 2; and expert_weights of layer 1 is 0 in the file",
    ),
    "a number and a tensor": Planted(
        "gemma3_text",
        both(configured(norm_eps=1e-3), changed("layers.0.attn_norm.weight", lambda w: w - 1)),
        ("attn_norm", 0),
        "the original stores the norm's weight minus one; and norm_eps is 0.001",
    ),
    # the rest of a layer
    "activation": Planted(
        "mistral", configured(activation="gelu_tanh"), ("ffn", 0), "activation is gelu_tanh in the file"
    ),
    "experts' weights": Planted("qwen3_moe", recorded(1, expert_weights=0), ("ffn", 1), "expert_weights of layer 1"),
    "fewer experts": Planted("qwen3_moe", recorded(1, n_experts_used=1), ("ffn", 1), "n_experts_used of layer 1 is 1"),
    "residual scale": Planted(
        "granite", configured(residual_scale=1.0), ("ffn_norm", 0), "residual_scale is 1 in the file"
    ),
    "parallel": Planted("phi", recorded(1, placement="pre"), ("ffn_norm", 1), "placement of layer 1 is pre"),
    # outside the layers
    "embedding scale": Planted(
        "gemma3_text", configured(embedding_scale=1.0), ("embedding", 0), "embedding_scale is 1"
    ),
    "positions": Planted(
        "gpt2", changed("position_embedding.weight", lambda rows: np.roll(rows, 1, 0)), ("embedding", 0), "off by 1"
    ),
    "logit scale": Planted("granite", configured(logit_scale=1.0), ("logits", 0), "logit_scale is 1 in the file"),
    "logit cap": Planted("gemma2", configured(logit_soft_cap=0.0), ("logits", 0), "logit_soft_cap is 0"),
}


# Faults that are also named without the model's config.json.
BLIND = {
    "eps": Planted("mistral-rms_norm_eps", configured(norm_eps=1e-3), ("attn_norm", 0), "it should be 1e-05"),
    "rope theta": Planted(
        "mistral-rope_theta",
        changed("rope.0.inv_freq", lambda table: table * table),
        ("q", 0),
        "should be the plain ones of rope_theta 10000",
    ),
    "rope table": Planted("gemma3_text", recorded(1, rope=1), ("q", 1), "it should use table 0"),
    "norm after rope": Planted("qwen3", configured(qk_norm_after_rope=1), ("q", 0), "comes after RoPE"),
    "no window": Planted("gemma3_text", recorded(0, window=0), ("weights", 0), "it should have a window of 7"),
    "window + 1": Planted("mistral", recorded(1, window=8), ("weights", 1), "off by one: 8 positions; it should be 7"),
    "window - 1": Planted("mistral", recorded(0, window=6), ("weights", 0), "off by one: 6 positions; it should be 7"),
    "attention scale": Planted("mistral", configured(attention_scale=1.0), ("weights", 0), "attention_scale is 1; it"),
    "activation": Planted("mistral", configured(activation="relu"), ("ffn", 0), "it should be silu"),
    "experts' weights": Planted("qwen3_moe", recorded(1, expert_weights=0), ("ffn", 1), "are not divided by their sum"),
    "more experts": Planted("qwen3_moe", recorded(1, n_experts_used=1), ("ffn", 1), "it should use 2"),
    "parallel": Planted("phi", recorded(1, placement="pre"), ("ffn_norm", 1), "they should be in parallel"),
    "embedding scale": Planted(
        "gemma3_text", configured(embedding_scale=1.0), ("embedding", 0), "embedding_scale is 1;"
    ),
    "logit scale": Planted(
        "mistral", configured(logit_scale=0.25), ("logits", 0), "logit_scale is 0.25; it should be 1"
    ),
}


def assert_named(path: Path, given: Given, planted: Planted) -> None:
    """Assert that the ladder names a fault, and where it shows first."""
    checkpoint, capture = given
    report = climb(path, capture, planted.fault(checkpoint))
    assert not report.is_within
    assert report.first is not None
    assert (report.first.stage, report.first.layer) == planted.stage
    assert report.verdict is not None
    assert report.verdict.fault == "file"
    assert any(planted.cause in cause.sentence for cause in report.verdict.causes), report.verdict.causes
    assert all(cause.left <= report.first.tolerance.limit for cause in report.verdict.causes)
    assert report.further == ()  # a fault has one explanation, however many layers it changes


def test_faults_of_several_layers_are_named_at_once(given: Callable[[str], Given], tmp_path: Path) -> None:
    checkpoint, capture = given("mistral")
    faults = both(
        changed("layers.0.ffn_down.weight", misread),
        changed("layers.1.attn_v.weight", misread),
        changed("output_norm.weight", lambda w: w + 1),
    )
    report = climb(tmp_path / "m.bin", replace(capture, config={}), faults(checkpoint))
    assert report.first is not None
    assert report.verdict is not None
    found = [(report.first, report.verdict), *report.further]
    assert [(one.stage, one.layer) for one, _ in found] == [("ffn", 0), ("v", 1), ("output_norm", 0)]
    for (_, verdict), cause in zip(found, ("ffn_down.weight is transposed", "attn_v.weight is", "+ 1"), strict=True):
        assert any(cause in one.sentence for one in verdict.causes)


def in_layers(layers: Sequence[int], fault: Callable[[int], Fault]) -> Fault:
    return both(*map(fault, layers))


def plus_one(norm: str) -> Callable[[int], Fault]:
    return lambda layer: changed(f"layers.{layer}.{norm}.weight", lambda w: w + 1)


# (case, fault, and of each difference the stage, the layer, the cause and the layers of the fault)
REPEATED: dict[str, tuple[str, Fault, list[tuple[str, int, str, tuple[int, ...], bool]]]] = {
    "norms": (
        "qwen3",
        both(in_layers(range(3), plus_one("attn_norm")), in_layers((1, 2), plus_one("ffn_norm"))),
        [
            ("attn_norm", 0, "layers.0.attn_norm.weight has + 1", (0, 1, 2), True),
            ("ffn_norm", 1, "layers.1.ffn_norm.weight has + 1", (1, 2), False),
        ],
    ),
    "pairs of queries and keys": (
        "qwen3",
        in_layers(range(3), lambda i: both(*(changed(f"layers.{i}.attn_{x}.weight", to_neighbors(14)) for x in "qk"))),
        [("q", 0, "wrong RoPE convention: the rows of the weights", (0, 1, 2), True)],
    ),
    "factors of norms": (
        "qwen3",
        in_layers(
            range(3),
            lambda i: changed(
                f"layers.{i}.attn_norm.weight", lambda w: w * np.linspace(0.5, 2 + i, len(w), dtype=np.float32)
            ),
        ),
        [("attn_norm", 0, "each number of attn_norm of layer 0 is off by a factor", (0, 1, 2), True)],
    ),
    "a fault in one layer beside it": (
        "qwen3",
        both(in_layers(range(3), plus_one("ffn_norm")), changed("layers.1.attn_v.weight", misread)),
        [
            ("ffn_norm", 0, "layers.0.ffn_norm.weight has + 1", (0, 1, 2), True),
            ("v", 1, "layers.1.attn_v.weight is transposed", (), False),
        ],
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_fault_of_several_layers_is_one(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    case, fault, expected = REPEATED[name]
    checkpoint, capture = given(case)
    report = climb(tmp_path / "m.bin", replace(capture, config={}), fault(checkpoint))
    assert report.first is not None
    assert report.verdict is not None
    found = [(report.first, report.verdict), *report.further]
    assert len(found) == len(expected)
    for (first, verdict), (stage, layer, cause, layers, is_everywhere) in zip(found, expected, strict=True):
        assert (first.stage, first.layer) == (stage, layer)
        assert any(one.sentence.startswith(cause) for one in verdict.causes), verdict.causes
        assert (verdict.layers, verdict.is_everywhere) == (layers, is_everywhere)
        places = "every layer" if is_everywhere else f"layers {', '.join(map(str, layers))}"
        assert (f"the same in {places}" in _explanation(report)) == bool(layers)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    assert_named(tmp_path / "m.bin", given(PLANTED[name].case), PLANTED[name])


@pytest.mark.parametrize("name", BLIND)
def test_a_planted_fault_is_named_without_config_json(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    checkpoint, capture = given(BLIND[name].case)
    assert_named(tmp_path / "m.bin", (checkpoint, replace(capture, config={})), BLIND[name])


@pytest.mark.parametrize("name", sorted({planted.case for planted in (*PLANTED.values(), *BLIND.values())}))
def test_a_correct_file_has_no_difference(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    checkpoint, capture = given(name)
    report = climb(tmp_path / "m.bin", capture, checkpoint)
    assert report.is_within
    assert (report.first, report.verdict) == (None, None)


def test_a_rung_compares_the_first_layer_that_has_its_stages(given: Callable[[str], Given], tmp_path: Path) -> None:
    """Only the second of LFM2's three layers has attention."""
    checkpoint, capture = given("lfm2")
    report = climb(tmp_path / "m.bin", capture, checkpoint)
    layers = {result.rung.number: result.worst.layer for result in report.rungs if result.worst}
    assert [layers[number] for number in (1, 2, 3, 4, 6, 7)] == [0, 1, 1, 1, 0, 0]
    damaged = climb(tmp_path / "m.bin", capture, changed("layers.1.attn_q.weight", misread)(checkpoint))
    assert [result.rung.number for result in damaged.rungs if not result.is_within][:2] == [2, 4]


def test_a_rung_without_stages_says_so() -> None:
    row = table_row(RungResult(LADDER[3], is_within=True))
    assert row.split() == ["3", "KV", "cache", "-", "no", "layer", "has", "this"]


def test_the_original_names_a_damaged_tensor(given: Callable[[str], Given], tmp_path: Path) -> None:
    checkpoint, capture = given("gpt2")
    damaged = changed("layers.1.ffn_up.bias", lambda bias: bias[::-1])(checkpoint)
    report = climb(tmp_path / "m.bin", capture, damaged)
    assert report.verdict is not None
    assert [cause.sentence.partition(":")[0] for cause in report.verdict.causes] == ["layers.1.ffn_up.bias is wrong"]
    report = climb(tmp_path / "m.bin", capture, damaged, original=checkpoint)
    assert report.verdict is not None
    assert [cause.sentence for cause in report.verdict.causes] == [
        "the tensor layers.1.ffn_up.bias differs from the directory's: its numbers are in another order: they are the "
        "directory's 170, 169, 168, 167, 166, 165, 164, 163, ..."
    ]


# ---- faults that are not the file's


def engine_with(change: Callable[[Stages], None]) -> Callable[[llamac.Model, Question], Capture]:
    """An engine that computes something else."""

    def run(model: llamac.Model, question: Question) -> Capture:
        found = run_engine(model, question)
        change(found.stages)
        return found

    return run


def test_wrong_arithmetic_is_the_engine_s(
    given: Callable[[str], Given], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(stages: Stages) -> None:
        stages["attn_mix", 1][5, 9:11] += 0.1

    monkeypatch.setattr(report_module, "run_engine", engine_with(change))
    checkpoint, capture = given("llama")
    report = climb(tmp_path / "m.bin", capture, checkpoint)
    assert report.first is not None
    assert report.verdict is not None
    assert (report.verdict.fault, report.verdict.causes) == ("engine", ())
    assert (report.first.stage, report.first.layer, report.first.position) == ("attn_mix", 1, 5)
    assert (report.first.head, report.first.index) in {divmod(at, checkpoint.config.head_dim) for at in (9, 10)}


def test_small_differences_that_add_up_are_nobody_s_fault(
    given: Callable[[str], Given], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is just within tolerance, and the next layer amplifies its difference."""
    checkpoint, capture = given("llama")
    tolerance = 0.01
    inputs = capture.stages["block", 0].astype(np.float64)
    noise = np.random.RandomState(1).standard_normal(inputs.shape)
    inputs += (
        0.9 * tolerance * np.abs(inputs).max(axis=1, keepdims=True) * noise / np.abs(noise).max(axis=1, keepdims=True)
    )

    def change(stages: Stages) -> None:
        stages["block", 0] = inputs.astype(np.float32)

        def observe(stage: str, layer: int, values: Array) -> None:
            if (stage, layer) in stages:
                stages[stage, layer] = values.reshape(stages[stage, layer].shape).astype(np.float32)

        question = capture.question
        forward_part(checkpoint, question.ids, 1, inputs, context=question.context, observe=observe)

    monkeypatch.setattr(report_module, "run_engine", engine_with(change))
    report = climb(tmp_path / "m.bin", capture, checkpoint, tolerance=tolerance)
    assert report.first is not None
    assert report.first.layer == 1
    assert report.verdict is not None
    assert (report.verdict.fault, report.verdict.causes) == ("rounding", ())


def test_models_of_other_sizes_are_not_compared(given: Callable[[str], Given], tmp_path: Path) -> None:
    report = climb(tmp_path / "m.bin", given("mistral")[1], given("qwen3")[0])
    load = report.rungs[0]
    assert not load.is_within
    assert load.problems[0] == "the engine has 3 layers, the reference 2"
    assert report.verdict is None or report.verdict.causes == ()
    json.dumps(report.facts(), allow_nan=False)
