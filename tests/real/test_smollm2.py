"""SmolLM2-135M-Instruct from its GGUF file: its numbers are kept, and what programs do with a model works on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import llamac
from commands import GREEDY, Command
from llamac.export import reference
from llamac.export.gguf.file import Tensor, open_gguf
from llamac.export.gguf.model import read

pytestmark = pytest.mark.real

COLORS = [{"role": "user", "content": "Name three colors."}]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Water boils at", "Once upon a time"]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Iterator[llamac.Model]:
    with llamac.load(smollm2) as opened:
        yield opened


# ---- the file as published


def test_the_first_start_answers(llamac_command: Command, smollm2: Path) -> None:
    result = llamac_command("run", str(smollm2), "-i", "The capital of France is", "-n", "2", *GREEDY, "--no-cache")
    assert (result.code, result.out) == (0, "The capital of France is Paris.\n")


def log_softmax(logits: reference.Array) -> reference.Array:
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def test_probabilities_are_those_of_the_dequantized_model(model: llamac.Model, smollm2: Path) -> None:
    """Inputs are rounded to 15 bits, so logits differ by a thousandth; llama.cpp's divergence is 0.004."""
    ids = model.tokenize("The quick brown fox jumps over the lazy dog near the river bank.")
    expected = log_softmax(reference.forward(read(smollm2, []), [ids])[0])
    found = log_softmax(model.logits(ids).astype(float))
    divergence = (np.exp(expected) * (expected - found)).sum(1)
    assert divergence.mean() < 1.5e-5
    assert (found.argmax(1) == expected.argmax(1)).all()


def test_the_text_that_other_engines_generate(model: llamac.Model) -> None:
    assert model.chat(COLORS, temperature=0, max_tokens=60).text == "1. Red\n2. Blue\n3. Green"
    assert model.chat(FRANCE, temperature=0, max_tokens=60).text == "The capital of France is Paris."
    code = model.generate(PROMPTS[1], temperature=0, max_tokens=48).text
    assert "return fibonacci(n - 1) + fibonacci(n - 2)" in code


@pytest.mark.parametrize("settings", [{"threads": 2}, {"threads": 3}, {"isa": "scalar", "threads": 1}])
def test_bits_do_not_depend_on_threads_and_kernels(model: llamac.Model, settings: dict[str, object]) -> None:
    ids = model.tokenize(PROMPTS[0])
    with model.session(threads=1) as one, model.session(**settings) as other:  # type: ignore[arg-type]
        np.testing.assert_array_equal(one.eval(ids, logits="all"), other.eval(ids, logits="all"))


def blocks(tensor: Tensor) -> bytes:
    rows, columns = tensor.shape
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return file.read(rows * tensor.type.row_bytes(columns))


def test_the_blocks_are_written_back_bit_for_bit(llamac_command: Command, smollm2: Path, tmp_path: Path) -> None:
    exported = tmp_path / "back.gguf"
    assert llamac_command("export", str(smollm2), str(exported), "--to", "gguf").code == 0
    before, after = open_gguf(smollm2).tensors, open_gguf(exported).tensors
    matrices = [name for name, tensor in before.items() if tensor.type.name == "Q4_1"]
    assert len(matrices) > 200
    for name in matrices:
        assert after[name].type.name == "Q4_1"
        assert blocks(after[name]) == blocks(before[name])


# ---- what programs do with it


def test_requests_of_a_batch_get_what_they_get_alone(model: llamac.Model) -> None:
    settings = llamac.SamplingParams(max_tokens=16, temperature=0.8, seed=5)
    alone = [model.generate(prompt, settings) for prompt in PROMPTS]
    with llamac.Engine(model, max_sequences=3, context=model.config["context"]) as engine:
        together = engine.generate(PROMPTS, settings)
    assert [result.tokens for result in together] == [result.tokens for result in alone]


def test_a_second_turn_computes_only_what_is_new(model: llamac.Model) -> None:
    with model.session() as session:
        first = session.chat(COLORS, temperature=0, max_tokens=30)
        turns = [*COLORS, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And two more?"}]
        second = session.chat(turns, temperature=0, max_tokens=4)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 2
    assert second.tokens == model.chat(turns, temperature=0, max_tokens=4).tokens


def test_speculation_changes_no_token(model: llamac.Model) -> None:
    prompt = "Repeat this line ten times: The red fox sleeps.\nThe red fox sleeps.\nThe red fox sleeps.\n"
    settings = llamac.SamplingParams(temperature=0, max_tokens=60)
    plain = model.generate(prompt, settings, speculation=False)
    assert model.generate(prompt, settings, speculation=True).tokens == plain.tokens


def test_a_guide_makes_json(model: llamac.Model) -> None:
    pytest.importorskip("llguidance", reason="the extra `guided` is not installed")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    result = model.chat(
        [{"role": "user", "content": "Describe Tom, who is 7 years old, in JSON."}],
        temperature=0,
        max_tokens=100,
        guide=llamac.Json(schema),
    )
    assert json.loads(result.text).keys() == {"name", "age"}


def test_a_saved_session_continues(model: llamac.Model, tmp_path: Path) -> None:
    ids = model.tokenize("One two three four five six seven")
    with model.session() as session, model.session() as other:
        session.eval(ids)
        session.save(tmp_path / "state")
        other.load(tmp_path / "state")
        np.testing.assert_array_equal(session.eval([ids[-1]]), other.eval([ids[-1]]))


def test_a_receipt_is_repeated(model: llamac.Model) -> None:
    result = model.generate(PROMPTS[3], max_tokens=12, temperature=1, seed=9, receipt=True)
    assert result.receipt is not None
    assert llamac.replay(result.receipt, model).identical


def test_likely_continuations_and_similar_texts_score_higher(model: llamac.Model) -> None:
    paris, banana = model.score(PROMPTS[0], [" Paris", " banana"])
    assert paris.logprob > banana.logprob
    assert model.perplexity("The cat sat on the mat and looked at the dog.") < model.perplexity("mat the dog sat on")
    cat, kitten, tax = model.embed(["a cat", "a kitten", "the tax law of 1986"], pooling="mean")
    assert cat @ kitten > cat @ tax
