"""The ladder's explanations that need no list of faults: tensors of the directory, and the numbers of a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from builders import write_model
from captures import Fault, Floats, both, changed, climb, configured, exchanged, recorded
from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.parity.capture import Capture
from llamac.export.parity.report import Report, check_parity
from llamac.export.parity.tensor_differences import TensorDifferences, listed, other_weights

Given = tuple[Checkpoint, Capture]
Q, GATE = "layers.1.attn_q.weight", "layers.1.experts.{}.ffn_gate.weight"
Q_NORM = "layers.1.attn_q_norm.weight"


def without(*names: str) -> Fault:
    """A checkpoint that lacks tensors."""
    return lambda checkpoint: replace(
        checkpoint, tensors={name: tensor for name, tensor in checkpoint.tensors.items() if name not in names}
    )


def experts_exchanged(checkpoint: Checkpoint) -> Checkpoint:
    """The first two experts of layer 1, whose router does not know."""
    for part in ("gate", "up", "down"):
        one, other = (f"layers.1.experts.{i}.ffn_{part}.weight" for i in (0, 1))
        checkpoint = exchanged(one, other)(checkpoint)
    return checkpoint


def heads(weight: Floats, order: list[int]) -> Floats:
    """A matrix with its heads in another order."""
    permuted: Floats = weight.reshape(len(order), -1, weight.shape[1])[order].reshape(weight.shape)
    return permuted


def tied(checkpoint: Checkpoint) -> Checkpoint:
    """Logits by the embedding's matrix, without the one that the original has for them."""
    return both(without("output.weight"), configured(tied_output=True))(checkpoint)


def to_bf16(weight: Floats) -> Floats:
    cut: Floats = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return cut


def times(weight: Floats, row: int, factor: float) -> Floats:
    factors = np.ones((len(weight), 1), np.float32)
    factors[row] = factor
    scaled: Floats = weight * factors
    return scaled


def sentences(report: Report) -> str:
    assert report.verdict is not None
    assert report.verdict.fault == "file"
    return "\n".join(cause.sentence for cause in report.verdict.causes)


# ---- tensors of the directory

WITH_THE_DIRECTORY: dict[str, tuple[str, Fault, str]] = {
    "experts in another order": (
        "qwen3_moe",
        experts_exchanged,
        f"6 tensors differ from the directory's: {GATE.format(0)}: it has the numbers of {GATE.format(1)}; ",
    ),
    "a norm twice": (
        "qwen3",
        lambda own: changed(Q_NORM, lambda _: own.tensors[Q_NORM.replace("_q_", "_k_")].array())(own),
        "the tensor layers.1.attn_q_norm.weight differs from the directory's: it has the numbers of "
        "layers.1.attn_k_norm.weight",
    ),
    "rounded": ("mistral", changed(Q, to_bf16), f"{Q} differs from the directory's: its numbers are rounded to bf16"),
    "a tensor and its number are missing": (
        "qwen2_moe",
        both(without("layers.1.shared_gate.weight"), recorded(1, shared_gate=0)),
        "a tensor differs from the directory's: layers.1.shared_gate.weight: the file does not have it; and "
        "shared_gate of layer 1 is 0 in the file; config.json gives 1",
    ),
    "the matrix of logits is missing": (
        "mistral",
        tied,
        "output.weight differs from the directory's: the file does not",
    ),
    "several tensors and a number are missing": (
        "qwen3",
        both(
            without(*(f"layers.{layer}.attn_{part}_norm.weight" for layer in range(3) for part in "qk")),
            configured(qk_norm="none"),
        ),
        "layers.0.attn_k_norm.weight: the file does not have it; and qk_norm is none in the file; config.json gives",
    ),
}


@pytest.mark.parametrize("name", WITH_THE_DIRECTORY)
def test_the_directory_explains_what_no_list_has(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    case, fault, expected = WITH_THE_DIRECTORY[name]
    checkpoint, capture = given(case)
    assert expected in sentences(climb(tmp_path / "m.bin", capture, fault(checkpoint), original=checkpoint))


def test_a_note_names_the_matrix_of_logits_that_the_file_lacks(given: Callable[[str], Given], tmp_path: Path) -> None:
    checkpoint, capture = given("mistral")
    report = climb(tmp_path / "m.bin", capture, tied(checkpoint))
    assert report.first is not None
    assert report.first.stage == "logits"
    assert [note for note in report.notes if "tie_word_embeddings is false" in note]


NUMBERS = np.arange(1, 13, dtype=np.float32).reshape(4, 3) / np.float32(7)
CHANGES: dict[str, Callable[[Floats], NDArray[np.floating[Any]]]] = {
    "all of its numbers are 0": np.zeros_like,
    "1 of its numbers are not finite": lambda w: np.where(w == w[1, 1], np.nan, w),
    "it has shape (3, 4), expected (4, 3)": lambda w: w.T,
    "it is transposed": lambda w: w.T.reshape(w.shape),
    "it has the numbers of other": lambda w: w + 1000,
    "its rows are in another order: they are the directory's 3, 1, 2, 0": lambda w: w[[3, 1, 2, 0]],
    "its blocks of 2 rows are in another order: they are the directory's 1, 0": lambda w: w[[2, 3, 0, 1]],
    "its columns are in another order: they are the directory's 2, 1, 0": lambda w: w[:, ::-1],
    "its numbers are 0.5 times as large": lambda w: w / 2,
    "its numbers are larger by 2": lambda w: w + 2,
    "its numbers are smaller by 1": lambda w: w - 1,
    "1 of 4 rows differs: 2": lambda w: times(w, 2, 3),
    "1 of 4 rows differs: 1": lambda w: times(w, 1, 1.004),
    "its numbers are 1.005 times as large": lambda w: w * np.float32(1.005),
    "its numbers are larger by 0.003": lambda w: w + np.float32(0.003),
    "3 of 4 rows differ: 0, 1, 3": lambda w: times(times(times(w, 0, 3), 1, 3), 3, 2),
    "all of its rows differ": lambda w: w * w,
    "its numbers are rounded to f16, by up to ": lambda w: w.astype(np.float16),
    "": lambda w: w,
}


@pytest.mark.parametrize("expected", CHANGES)
def test_a_difference_is_put_into_words(expected: str) -> None:
    original = {"name": LazyTensor.of(NUMBERS), "other": LazyTensor.of(NUMBERS + 1000)}
    own = LazyTensor.of(np.ascontiguousarray(CHANGES[expected](NUMBERS), np.float32))
    found = TensorDifferences({"name": own, "other": original["other"]}, original, list(original)).how
    assert list(found) == (["name"] if expected else [])
    assert found.get("name", "").startswith(expected)


def test_quantized_numbers_are_rounded() -> None:
    own = replace(LazyTensor.of(NUMBERS + np.float32(0.05)), dtype="q4")
    [how] = TensorDifferences({"name": own}, {"name": LazyTensor.of(NUMBERS)}, ["name"]).how.values()
    assert how == "its numbers are rounded to q4, by up to 2.9e-02 of the largest"


@pytest.mark.parametrize(("dtype", "change"), [("q8", 1.05), ("q4", 1.5), ("bf16", 1.004)])
def test_a_factor_is_not_called_rounding(dtype: str, change: float) -> None:
    own = replace(LazyTensor.of(NUMBERS * np.float32(change)), dtype=dtype)
    [how] = TensorDifferences({"name": own}, {"name": LazyTensor.of(NUMBERS)}, ["name"]).how.values()
    assert how == f"its numbers are {change} times as large"


def test_numbers_near_zeros_are_not_called_rounding() -> None:
    own, zeros = LazyTensor.of(np.full((2, 2), 1e-9, np.float32)), LazyTensor.of(np.zeros((2, 2), np.float32))
    [how] = TensorDifferences({"name": own}, {"name": zeros}, ["name"]).how.values()
    assert "rounded" not in how


def test_lists_of_numbers_are_short() -> None:
    assert listed([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7, 8"
    assert listed(range(0, 100, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, ..."


# ---- the numbers of a stage

WITHOUT_THE_DIRECTORY: dict[str, tuple[str, Fault, str, str]] = {
    "heads of queries": (
        "mistral",
        changed(Q, lambda w: heads(w, [0, 2, 1, 3])),
        f"the heads of {Q} are in another order: the original's are the file's 0, 2, 1, 3",
        "only 2 of 4 heads differ: 1, 2",
    ),
    "heads of values": (
        "mistral",
        changed("layers.1.attn_v.weight", lambda w: heads(w, [1, 0])),
        "the heads of layers.1.attn_v.weight are in another order: the original's are the file's 1, 0",
        "",
    ),
    "rows of values": (
        "mistral",
        changed("layers.1.attn_v.weight", lambda w: w[::-1]),
        "the rows of layers.1.attn_v.weight are in another order: the original's are the file's 27, 26, 25, ",
        "",
    ),
    "a row of a matrix": (
        "mistral",
        changed(Q, lambda w: times(w, 17, 1.5)),
        "number 17 of q of layer 1 is 1.5 times as large as it should be, at all positions",
        "only 1 of 4 heads differs: 1",
    ),
    "a norm's weight": (
        "mistral",
        exchanged("layers.1.attn_norm.weight", "layers.1.ffn_norm.weight"),
        "layers.1.attn_norm and layers.1.ffn_norm are exchanged",
        "",
    ),
    "a factor": (
        "mistral",
        changed("layers.1.attn_out.weight", lambda w: w * 2),
        "attn_out of layer 1 is 2 times as large as it should be, at all positions",
        "",
    ),
    "a number of values that should be 0": (
        "mistral",
        lambda checkpoint: checkpoint,
        "each number of v of layer 1 is off by a factor of its own",
        "only 1 of 2 heads differs: 0",
    ),
    "eps": ("llama", configured(norm_eps=0.5), "norm_eps is 0.5; it should be 0.05", ""),
}


@pytest.mark.parametrize("name", WITHOUT_THE_DIRECTORY)
def test_the_numbers_of_a_stage_explain_a_fault(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    case, fault, expected, extent = WITHOUT_THE_DIRECTORY[name]
    checkpoint, capture = given(case)
    stages = dict(capture.stages)
    if "should be 0" in name:
        stages["v", 1] = stages["v", 1] * (np.arange(stages["v", 1].shape[1]) != 3).astype(np.float32)
    report = climb(tmp_path / "m.bin", replace(capture, config={}, stages=stages), fault(checkpoint))
    assert expected in sentences(report)
    assert report.verdict is not None
    assert report.verdict.extent == extent


def test_weights_that_are_rounded_more_than_the_original_s_are_noted(
    given: Callable[[str], Given], tmp_path: Path
) -> None:
    checkpoint, capture = given("mistral")
    path = write_model(tmp_path / "m.bin", checkpoint, "bf16")
    with llamac.load(path, kv_dtype="f32", threads=1) as model:
        for dtype, is_noted in (("float32", True), ("bfloat16", False)):
            report = check_parity(model, replace(capture, config=capture.config | {"dtype": dtype}))
            assert any("rounding alone can exceed the tolerance" in note for note in report.notes) == is_noted


def another_revision(checkpoint: Checkpoint) -> Checkpoint:
    """The model after a little more training."""
    random = np.random.RandomState(3)
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) == 2:
            noise = 0.3 * tensor.array().std() * random.standard_normal(tensor.shape)
            checkpoint = changed(name, lambda w, noise=noise: w + noise)(checkpoint)  # type: ignore[misc]
    return checkpoint


@pytest.mark.parametrize(
    ("fault", "dtype", "is_noted"),
    [
        (another_revision, "f32", True),
        (another_revision, "q8", True),
        (lambda checkpoint: checkpoint, "q8", False),
        (lambda checkpoint: checkpoint, "q4", False),
        (changed(Q, lambda w: w * 2), "f32", False),
    ],
)
def test_another_model_s_weights_are_noted(
    given: Callable[[str], Given], tmp_path: Path, fault: Fault, dtype: Any, is_noted: bool
) -> None:
    checkpoint, capture = given("mistral")
    path = write_model(tmp_path / "m.bin", fault(checkpoint), dtype)
    with llamac.load(path, kv_dtype="f32", threads=1) as model:
        report = check_parity(model, capture, checkpoint)
    assert any("MODEL was made from another model, or from another revision" in x for x in report.notes) == is_noted


def test_large_tensors_are_no_part_of_the_sample() -> None:
    def refuse(first: int, last: int) -> Floats:
        raise AssertionError("read")

    large = LazyTensor((4096, 4097), "f32", refuse)
    own, other = ({"large": large, "small": LazyTensor.of(np.full((2, 4), x, np.float32))} for x in (1, 2))
    assert other_weights(own, own) == ""
    assert other_weights(own, other).startswith("1 of 1 tensors that were compared differ")
