"""The ladder's explanations without a directory: faults whose correction is shown by the capture's numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from captures import (
    Fault,
    Floats,
    Planted,
    assert_named_alone,
    both,
    changed,
    climb,
    configured,
    exchanged,
    misread,
    numpy_capture,
    recorded,
)
from golden.parity_table import cases
from llamac.cli.check_against import _explanation
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.parity import fitted_states, fitting
from llamac.export.parity.capture import Capture

Given = tuple[Checkpoint, Capture]


def without_post_norms(checkpoint: Checkpoint) -> Checkpoint:
    """Layer 1 as an exporter writes it that does not know of norms after the branches."""
    checkpoint = recorded(1, placement="pre")(checkpoint)
    names = ("layers.1.attn_post_norm.weight", "layers.1.ffn_post_norm.weight")
    return replace(checkpoint, tensors={name: x for name, x in checkpoint.tensors.items() if name not in names})


def with_post_norms(checkpoint: Checkpoint) -> Checkpoint:
    """Layer 1 with norms after its branches that the original does not have."""
    checkpoint = recorded(1, placement="sandwich")(checkpoint)
    ones = LazyTensor.of(np.ones(checkpoint.config.dim, np.float32))
    new = {f"layers.1.{part}_post_norm.weight": ones for part in ("attn", "ffn")}
    return replace(checkpoint, tensors=checkpoint.tensors | new)


def norms_before(checkpoint: Checkpoint) -> Checkpoint:
    """Layer 1 with its norms before the branches instead of after them."""
    checkpoint = recorded(1, placement="pre")(checkpoint)
    names = {f"layers.1.{part}_post_norm.weight": f"layers.1.{part}_norm.weight" for part in ("attn", "ffn")}
    return replace(checkpoint, tensors={names.get(name, name): x for name, x in checkpoint.tensors.items()})


def reversed_taps(name: str) -> Fault:
    """The taps of layer 0 in reverse order."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        width = checkpoint.config.layers[0].conv_width
        turned: Callable[[Floats], Floats] = lambda taps: taps.reshape(width, -1)[::-1].reshape(-1)  # noqa: E731
        return changed(f"layers.0.{name}.weight", turned)(checkpoint)

    return plant


def skip_and_decay(checkpoint: Checkpoint) -> Checkpoint:
    """Mamba 2's D and A_log exchanged before the exporter stored minus the exponential of A_log."""
    skip, decay = "layers.0.mamba_skip.weight", "layers.0.mamba_decay.weight"
    own = checkpoint.tensors
    checkpoint = changed(skip, lambda _: np.log(-own[decay].array()))(checkpoint)
    return changed(decay, lambda _: -np.exp(own[skip].array()))(checkpoint)


def heads_of_values(checkpoint: Checkpoint) -> Checkpoint:
    """The value heads of layer 0's delta net in another order, with all that belongs to them but the last matrix."""
    record = checkpoint.config.layers[0]
    keys, order = 2 * record.state_key_heads * record.state_key_dim, np.roll(np.arange(record.state_heads), 1)

    def in_order(rows: Floats) -> Floats:
        moved: Floats = rows.reshape(len(order), -1, *rows.shape[1:])[order].reshape(rows.shape)
        return moved

    def of_values(rows: Floats) -> Floats:
        return np.concatenate([rows[:keys], in_order(rows[keys:])])

    def of_taps(taps: Floats) -> Floats:
        return np.concatenate([of_values(row) for row in taps.reshape(record.conv_width, -1)])

    whole = ("delta_z.weight", "delta_a.weight", "delta_beta.weight", "delta_dt.bias", "delta_decay.weight")
    return both(
        changed("layers.0.delta_qkv.weight", of_values),
        changed("layers.0.delta_conv.weight", of_taps),
        *(changed(f"layers.0.{name}", in_order) for name in whole),
    )(checkpoint)


def gate_and_up_in_turn(checkpoint: Checkpoint) -> Checkpoint:
    """Gate and up from the halves of a matrix that holds a row of each in turn."""
    names = ["layers.1.ffn_gate.weight", "layers.1.ffn_up.weight"]
    rows = np.stack([checkpoint.tensors[name].array() for name in names], axis=1).reshape(-1, checkpoint.config.dim)
    halves = zip(names, np.split(rows, 2), strict=True)
    return both(*(changed(name, lambda _, part=part: part) for name, part in halves))(checkpoint)  # type: ignore[misc]


def without_qk_norms(checkpoint: Checkpoint) -> Checkpoint:
    kept = {name: x for name, x in checkpoint.tensors.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    return replace(checkpoint, tensors=kept, config=replace(checkpoint.config, qk_norm="none"))


def frequencies(theta: float, factor: float = 1.0) -> Callable[[Floats], Floats]:
    return lambda table: (factor * theta ** (-np.arange(len(table)) / len(table))).astype(np.float32)


CHANGES: dict[str, Callable[[Floats], Floats]] = {
    "squares": lambda w: w * w,
    "the reverse": lambda w: w[::-1],
    "a factor": lambda w: w * np.float32(1.3),
    "one number": lambda w: w * np.where(np.arange(len(w)) == 3, 2, 1).astype(np.float32),
}
FITTED = "with numbers that are fitted to the capture, the stage agrees"
PLANTED = {
    # experts
    # norms
    "norm after attention and before the FFN": Planted(
        "gemma2",
        exchanged("layers.1.attn_post_norm.weight", "layers.1.ffn_norm.weight"),
        ("ffn_norm", 1),
        "layers.1.attn_post_norm and layers.1.ffn_norm are exchanged",
    ),
    "norms after the branches": Planted(
        "olmo2",
        exchanged("layers.1.attn_post_norm.weight", "layers.1.ffn_post_norm.weight"),
        ("ffn_norm", 1),
        "layers.1.attn_post_norm and layers.1.ffn_post_norm are exchanged",
    ),
    "norms of queries and keys": Planted(
        "qwen3",
        exchanged("layers.1.attn_q_norm.weight", "layers.1.attn_k_norm.weight"),
        ("q", 1),
        "layers.1.attn_q_norm and layers.1.attn_k_norm are exchanged",
    ),
    "another layer's norm": Planted(
        "mistral",
        exchanged("layers.0.attn_norm.weight", "layers.1.attn_norm.weight"),
        ("attn_norm", 0),
        "layers.0.attn_norm and layers.1.attn_norm are exchanged",
    ),
    "no norms after the branches": Planted(
        "gemma2",
        without_post_norms,
        ("ffn_norm", 1),
        "layer 1 lacks the norms after its branches (attn_post_norm and ffn_post_norm)",
    ),
    "norms after the branches that should not be": Planted(
        "mistral", with_post_norms, ("ffn_norm", 1), "layer 1 has norms after its branches; it should not have them"
    ),
    "norms before the branches": Planted(
        "olmo2",
        norms_before,
        ("attn_norm", 1),
        "the norms of layer 1 come before its branches; they should come after them",
    ),
    "a norm's weight": Planted(
        "mistral",
        changed("layers.1.ffn_norm.weight", lambda w: w * np.linspace(0.5, 2, len(w), dtype=np.float32)),
        ("ffn_norm", 1),
        "each number of ffn_norm of layer 1 is off by a factor of its own, the same at all positions: "
        "layers.1.ffn_norm.weight is wrong (",
    ),
    **{
        f"{change} of {module} in {case}": Planted(
            case,
            changed(f"layers.1.{module}.weight", CHANGES[change]),
            ("ffn_norm", 1),
            f"layers.1.{module}.weight is wrong: {FITTED}",
        )
        for case, module, change in (
            ("gemma2", "ffn_norm", "squares"),
            ("gemma2", "ffn_norm", "a factor"),
            ("gemma2", "attn_post_norm", "squares"),
            ("gemma3_text", "ffn_norm", "the reverse"),
            ("gemma3_text", "ffn_norm", "one number"),
            ("gemma3_text", "attn_post_norm", "the reverse"),
        )
    },
    # latent attention
    "norm of latents": Planted(
        "deepseek_v3",
        changed("layers.1.attn_kv_a_norm.weight", lambda w: w[::-1]),
        ("k", 1),
        "each number of k of layer 1 is off by a factor of its own, the same at all positions: "
        "layers.1.attn_kv_a_norm.weight is wrong (",
    ),
    "bias of latents": Planted(
        "deepseek_v3",
        changed("layers.1.attn_kv_a.bias", np.zeros_like),
        ("k", 1),
        f"layers.1.attn_kv_a.bias is missing: {FITTED}",
    ),
    "bias of the latents of queries": Planted(
        "deepseek_v3",
        changed("layers.1.attn_q_a.bias", np.negative),
        ("q", 1),
        f"layers.1.attn_q_a.bias is wrong: {FITTED}",
    ),
    "eps of latents": Planted(
        "deepseek_v3",
        recorded(1, latent_norm_eps=0.01),
        ("q", 1),
        "latent_norm_eps of layer 1 is 0.01; it should be 1e-",
    ),
    # recurrent layers
    "taps of Mamba 2": Planted(
        "granitemoehybrid",
        reversed_taps("mamba_conv"),
        ("attn_mix", 0),
        "the taps of layers.0.mamba_conv.weight are in reverse order",
    ),
    "taps beside attention": Planted(
        "falcon_h1",
        reversed_taps("mamba_conv"),
        ("attn_mix", 0),
        "the taps of layers.0.mamba_conv.weight are in reverse order",
    ),
    "taps of a delta net": Planted(
        "qwen3_5_text",
        reversed_taps("delta_conv"),
        ("attn_mix", 0),
        "the taps of layers.0.delta_conv.weight are in reverse order",
    ),
    "no D": Planted(
        "granitemoehybrid",
        changed("layers.0.mamba_skip.weight", np.zeros_like),
        ("attn_mix", 0),
        f"layers.0.mamba_skip.weight is missing: {FITTED}",
    ),
    "dt_bias": Planted(
        "granitemoehybrid",
        changed("layers.2.mamba_step.bias", lambda w: w[::-1]),
        ("attn_mix", 2),
        f"layers.2.mamba_step.bias is wrong: {FITTED}",
    ),
    "A_log": Planted(
        "nemotron_h",
        changed("layers.0.mamba_decay.weight", lambda w: w[::-1]),
        ("attn_mix", 0),
        f"layers.0.mamba_decay.weight is wrong: {FITTED}",
    ),
    "A_log without the minus": Planted(
        "granitemoehybrid",
        changed("layers.0.mamba_decay.weight", np.negative),
        ("attn_mix", 0),
        "layers.0.mamba_decay.weight is the exponential of the original's logarithm; it should be minus that",
    ),
    "D beside attention": Planted(
        "falcon_h1",
        changed("layers.1.mamba_skip.weight", lambda w: w + 1),
        ("attn_mix", 1),
        f"layers.1.mamba_skip.weight is wrong: {FITTED}",
    ),
    "D and dt_bias": Planted(
        "granitemoehybrid",
        exchanged("layers.0.mamba_skip.weight", "layers.0.mamba_step.bias"),
        ("attn_mix", 0),
        "layers.0.mamba_skip.weight and layers.0.mamba_step.bias are exchanged",
    ),
    "D and A_log": Planted(
        "granitemoehybrid",
        skip_and_decay,
        ("attn_mix", 0),
        "layers.0.mamba_skip.weight and layers.0.mamba_decay.weight are exchanged",
    ),
    "dt_bias of a delta net": Planted(
        "qwen3_5_text",
        changed("layers.0.delta_dt.bias", np.zeros_like),
        ("attn_mix", 0),
        f"layers.0.delta_dt.bias is missing: {FITTED}",
    ),
    "A_log of a delta net": Planted(
        "qwen3_5_text",
        changed("layers.0.delta_decay.weight", lambda w: w[::-1] * 1.5),
        ("attn_mix", 0),
        f"layers.0.delta_decay.weight is wrong: {FITTED}",
    ),
    "A_log of a delta net without the minus": Planted(
        "qwen3_5_text",
        changed("layers.0.delta_decay.weight", np.negative),
        ("attn_mix", 0),
        "layers.0.delta_decay.weight is the exponential of the original's logarithm; it should be minus that",
    ),
    "beta and a": Planted(
        "qwen3_5_text",
        exchanged("layers.0.delta_beta.weight", "layers.0.delta_a.weight"),
        ("attn_mix", 0),
        "delta_beta and delta_a of layer 0 are exchanged",
    ),
    "two vectors": Planted(
        "granitemoehybrid",
        both(
            changed("layers.0.mamba_skip.weight", lambda w: w[::-1] + np.float32(0.5)),
            changed("layers.0.mamba_step.bias", lambda w: w[::-1] + np.float32(0.5)),
        ),
        ("attn_mix", 0),
        f"layers.0.mamba_skip.weight is wrong and layers.0.mamba_step.bias is wrong: {FITTED}",
    ),
    "bias of a convolution": Planted(
        "granitemoehybrid",
        changed("layers.2.mamba_conv.bias", np.zeros_like),
        ("attn_mix", 2),
        f"layers.2.mamba_conv.bias is missing: {FITTED}",
    ),
    "heads of a delta net": Planted(
        "qwen3_5_text",
        heads_of_values,
        ("attn_mix", 0),
        "the heads of delta_qkv.weight, delta_conv.weight, delta_z.weight, delta_a.weight, delta_beta.weight, "
        "delta_dt.bias and delta_decay.weight of layer 0 are in another order: the original's are the file's 1 to 3, 0",
    ),
    # attention
    "another theta": Planted(
        "mistral",
        changed("rope.0.inv_freq", frequencies(2e4)),
        ("q", 0),
        "RoPE's frequencies (rope.0.inv_freq) should be the plain ones of rope_theta 500",
    ),
    "linear scaling": Planted(
        "mistral",
        changed("rope.0.inv_freq", lambda table: table / np.float32(4)),
        ("q", 0),
        "RoPE's frequencies (rope.0.inv_freq) are 0.25 times as large as they should be",
    ),
    "a factor of RoPE": Planted(
        "mistral",
        configured(rope_attention_factor=(1.3,)),
        ("q", 0),
        "rope_attention_factor is 1.3; the capture shows 1",
    ),
    **{
        f"a factor of {stage} in layer {layer}": Planted(
            "mistral",
            changed(f"layers.{layer}.attn_{stage}.weight", CHANGES["a factor"]),
            (stage, layer),
            f"{stage} of layer {layer} is 1.3 times as large as it should be, at all positions "
            f"(layers.{layer}.attn_{stage}.weight)",
        )
        for stage, layer in (("q", 0), ("q", 1), ("k", 1))
    },
    "a window": Planted(
        "mistral", recorded(1, window=11), ("weights", 1), "layer 1 has a window of 11 positions; it should have a"
    ),
    "sinks": Planted(
        "gpt_oss",
        changed("layers.1.attn_sinks.weight", lambda w: w[::-1]),
        ("weights", 1),
        "layers.1.attn_sinks.weight is wrong: the sums of the attention weights show others",
    ),
    "a factor before a norm, not eps": Planted(
        "gemma3_text",
        changed("layers.1.attn_k.weight", CHANGES["a factor"]),
        ("k", 1),
        "the numbers of layers.1.attn_k.weight are 1.3 times as large as they should be",
    ),
    "eps": Planted("mistral", configured(norm_eps=0.03), ("attn_norm", 0), "norm_eps is 0.03; the stage agrees with"),
    "no norms of queries and keys": Planted(
        "qwen3", without_qk_norms, ("q", 0), "layer 0 lacks the norms of queries and keys (qk_norm is none"
    ),
    "bias before RoPE and a norm": Planted(
        "llama4_text-attn_temperature_tuning",
        changed("layers.0.attn_k.bias", np.zeros_like),
        ("k", 0),
        f"layers.0.attn_k.bias is missing: {FITTED}",
    ),
    "weights of keys and values": Planted(
        "qwen2",
        exchanged("layers.1.attn_k.weight", "layers.1.attn_v.weight"),
        ("k", 1),
        "the weights of layers.1.attn_k and layers.1.attn_v, but not their biases, are exchanged",
    ),
    "columns of heads": Planted(
        "mistral",
        changed("layers.1.attn_out.weight", lambda w: w.reshape(len(w), 4, -1)[:, [1, 2, 3, 0]].reshape(w.shape)),
        ("attn_out", 1),
        "the heads in the columns of layers.1.attn_out.weight are in another order: the original's are the file's",
    ),
    # the rest of a layer
    "bias of up": Planted(
        "gpt2", changed("layers.1.ffn_up.bias", np.zeros_like), ("ffn", 1), f"layers.1.ffn_up.bias is missing: {FITTED}"
    ),
    "negated bias of up": Planted(
        "gpt2", changed("layers.1.ffn_up.bias", lambda w: -w), ("ffn", 1), f"layers.1.ffn_up.bias is wrong: {FITTED}"
    ),
    "too large a bias of up": Planted(
        "gpt2", changed("layers.1.ffn_up.bias", lambda w: w * 4), ("ffn", 1), f"layers.1.ffn_up.bias is wrong: {FITTED}"
    ),
    "a row of up": Planted(
        "mistral",
        changed("layers.1.ffn_up.weight", lambda w: w * (1 + (np.arange(len(w)) == 5))[:, None]),
        ("ffn", 1),
        "rows of layers.1.ffn_up.weight, or columns of layers.1.ffn_down.weight, are off by factors of their own (1 of",
    ),
    "weights of gate and up": Planted(
        "llama",
        exchanged("layers.1.ffn_gate.weight", "layers.1.ffn_up.weight"),
        ("ffn", 1),
        "the weights of layers.1.ffn_gate and layers.1.ffn_up, but not their biases, are exchanged",
    ),
    "gate and up in turn": Planted(
        "mistral", gate_and_up_in_turn, ("ffn", 1), "the fused matrix of layer 1's gate and up was divided in halves;"
    ),
    "norm of embeddings in layers": Planted(
        "gemma4_text",
        changed("layer_embedding_norm.weight", lambda w: w[::-1]),
        ("block", 0),
        f"layer_embedding_norm.weight is wrong: {FITTED}",
    ),
    "norm of what embeddings add": Planted(
        "gemma4_text",
        changed("layers.1.layer_embedding_post_norm.weight", lambda w: w[::-1]),
        ("block", 1),
        f"layers.1.layer_embedding_post_norm.weight is wrong: {FITTED}",
    ),
    "two norms": Planted(
        "gemma2",
        both(
            changed("layers.1.attn_post_norm.weight", lambda w: w * np.linspace(0.5, 2, len(w), dtype=np.float32)),
            changed("layers.1.ffn_norm.weight", lambda w: w[::-1]),
        ),
        ("ffn_norm", 1),
        f"layers.1.attn_post_norm.weight is wrong and layers.1.ffn_norm.weight is wrong: {FITTED}",
    ),
    "an expert's matrix": Planted(
        "qwen3_moe",
        changed("layers.1.experts.1.ffn_down.weight", misread),
        ("ffn", 1),
        "layers.1.experts.1.ffn_down.weight is transposed",
    ),
    "a gate": Planted(
        "mistral",
        changed("layers.1.ffn_gate.weight", lambda w: w * np.float32(1.3)),
        ("ffn", 1),
        "the numbers of layers.1.ffn_gate.weight are 1.3 times as large as they should be",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_named_from_the_capture_alone(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    assert_named_alone(tmp_path / "m.bin", given(PLANTED[name].case), PLANTED[name])


# Faults that nothing explains.
UNEXPLAINED: dict[str, tuple[str, Fault]] = {
    "an expert's matrix": ("mixtral", changed("layers.0.experts.1.ffn_up.weight", lambda w: w * w)),
    "a recurrent layer's matrix": ("granitemoehybrid", changed("layers.0.mamba_xbc.weight", lambda w: w * w)),
    "a delta net's matrix": ("qwen3_5_text", changed("layers.0.delta_a.weight", lambda w: w * w)),
    "the order of hidden numbers": ("mistral", changed("layers.1.ffn_up.weight", lambda w: w[::-1])),
    "a matrix of queries": ("qwen3", changed("layers.1.attn_q.weight", lambda w: w * w)),
    "taps": ("granitemoehybrid", changed("layers.0.mamba_conv.weight", lambda w: w * w)),
    "a matrix of latents": ("deepseek_v3", changed("layers.1.attn_kv_a.weight", lambda w: w * w)),
    "a matrix of the latents of queries": ("deepseek_v3", changed("layers.1.attn_q_a.weight", lambda w: w * w)),
    "a router's matrix": ("deepseek_v3", changed("layers.1.ffn_router.weight", lambda w: w * w)),
    "a matrix of embeddings in layers": (
        "gemma4_text",
        changed("layers.1.layer_embedding_out.weight", lambda w: w * w),
    ),
    "attention's matrix": ("gemma2", changed("layers.1.attn_out.weight", lambda w: w * w)),
}


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_no_cause_is_named_that_the_numbers_do_not_show(
    given: Callable[[str], Given], tmp_path: Path, name: str
) -> None:
    case, fault = UNEXPLAINED[name]
    checkpoint, capture = given(case)
    report = climb(tmp_path / "m.bin", replace(capture, config={}), fault(checkpoint))
    assert report.verdict is not None
    assert (report.verdict.fault, report.verdict.causes) == ("file", ())


@pytest.mark.parametrize("way", ["constant", "factor"])
def test_a_loose_tolerance_lets_no_numbers_nearly_fit(given: Callable[[str], Given], tmp_path: Path, way: str) -> None:
    """A constant, or factors, remove most of the difference, and leave what another fault has done."""
    own, capture = given("llama")
    random, stage = np.random.default_rng(0), capture.stages["attn_out", 1]
    size: Floats = np.max(np.abs(stage), axis=1, keepdims=True)
    rest = np.float32(0.2) * (random.random(stage.shape, np.float32) - np.float32(0.5))
    columns = np.float32(0.5) + random.random(stage.shape[1], np.float32)
    wrong = size * rest + (stage + size.max() * columns if way == "constant" else stage * columns)
    capture = replace(capture, stages=capture.stages | {("attn_out", 1): wrong}, config={})
    report = climb(tmp_path / "m.bin", capture, own, tolerance=0.25)
    assert report.verdict is not None
    assert (report.verdict.fault, report.verdict.causes) == ("file", ())


def test_a_loose_tolerance_does_not_fit_norms(given: Callable[[str], Given], tmp_path: Path) -> None:
    """The reference adds attention 2.5 times. Its rows are similar, so that the norm after it nearly fits."""
    own, _ = given("mistral")
    bias = LazyTensor.of(np.random.default_rng(0).normal(0, 30, own.config.dim).astype(np.float32))
    own = replace(own, tensors=own.tensors | {"layers.0.attn_out.bias": bias})
    own = changed("layers.0.ffn_down.weight", lambda w: w * 0.02)(own)
    times = [changed(f"layers.0.attn_out.{part}", lambda w: w * 2.5) for part in ("weight", "bias")]
    capture = numpy_capture(both(*times)(own), cases()["mistral"])
    branch = capture.stages["attn_out", 0] / np.float32(2.5)
    capture = replace(capture, stages=capture.stages | {("attn_out", 0): branch}, config={})
    report = climb(tmp_path / "m.bin", capture, own, tolerance=0.25)
    assert report.first is not None
    assert (report.first.stage, report.first.layer) == ("block", 0)
    assert report.verdict is not None
    assert not [cause for cause in report.verdict.causes if "lacks the norms" in cause.sentence]


@pytest.mark.parametrize(
    ("case", "fault", "stage", "name"),
    [
        ("gpt2", changed("layers.1.ffn_up.bias", np.zeros_like), "ffn", "layers.1.ffn_up"),
        (
            "granitemoehybrid",
            changed("layers.0.mamba_conv.bias", np.zeros_like),
            "attn_mix",
            "layers.0.mamba_conv",
        ),
    ],
)
def test_the_report_says_what_is_too_costly_to_fit(
    given: Callable[[str], Given],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    fault: Fault,
    stage: str,
    name: str,
) -> None:
    monkeypatch.setattr(fitting, "MOST_WORK", 1)
    checkpoint, capture = given(case)
    report = climb(tmp_path / "m.bin", replace(capture, config={}), fault(checkpoint))
    assert report.first is not None
    assert report.first.stage == stage
    assert report.verdict is not None
    assert (report.verdict.causes, report.verdict.not_searched) == ((), (f"a bias of {name}",))
    text = f"not searched to the end, since it takes too long: a bias of {name}"
    assert _explanation(report)[-1] == text


@pytest.mark.parametrize("error", [np.linalg.LinAlgError, KeyError, ValueError])
def test_a_vector_that_cannot_be_fitted_leaves_the_others(
    given: Callable[[str], Given], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    checkpoint, capture = given("granitemoehybrid")
    own = fitted_states._fit

    def fit(run: fitted_states._Layer, names: Sequence[str]) -> dict[str, fitted_states.Array]:
        if "layers.0.mamba_skip.weight" in names:
            raise error
        return {name: numbers + 1 for name, numbers in own(run, names).items()}  # no other numbers fit

    def names() -> list[str]:
        found = fitted_states.fitted_states(checkpoint, capture, 0, [])
        return [suspect.sentence.split()[0] for suspect in found]

    monkeypatch.setattr(fitted_states, "_fit", fit)
    assert names()[:2] == ["layers.0.mamba_step.bias", "layers.0.mamba_decay.weight"]


@pytest.mark.parametrize(
    ("case", "name"),
    [("granitemoehybrid", "layers.0.mamba_z.weight"), ("qwen3_5_text", "layers.0.delta_qkv.weight")],
)
def test_equations_without_finite_numbers_print_nothing(
    given: Callable[[str], Given], tmp_path: Path, capfd: pytest.CaptureFixture[str], case: str, name: str
) -> None:
    """LAPACK would print to the standard output, which has the JSON of `llamac check --json`."""
    checkpoint, capture = given(case)
    report = climb(tmp_path / "m.bin", replace(capture, config={}), changed(name, np.zeros_like)(checkpoint))
    assert report.first is not None
    assert capfd.readouterr().out == ""
