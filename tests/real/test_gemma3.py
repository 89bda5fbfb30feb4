"""Gemma 3 270M from its GGUF file: a large vocabulary, windowed layers, four types of GGUF in one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from chat_samples import TEMPLATES, USER

import llamac
from commands import GREEDY, Command
from llamac import _core
from llamac.export.gguf.file import open_gguf

pytestmark = pytest.mark.real

# What transformers continues these prompts with, computing the dequantized weights in float32 (bench.gguf_model).
CONTINUED = {
    "The capital of France is": [
        506,
        5279,
        529,
        506,
        2891,
        529,
        7001,
        236761,
        1030,
        563,
        506,
        7488,
        3207,
        528,
        7001,
        532,
    ],
    "Water boils at": [
        236743,
        236770,
        236771,
        236771,
        10674,
        57356,
        236761,
        108,
        17390,
        104264,
        657,
        236743,
        236770,
        236771,
        236771,
        10674,
    ],
    "def fibonacci(n):": [
        107,
        140,
        584,
        538,
        1251,
        236743,
        236771,
        236787,
        107,
        144,
        2060,
        236743,
        236771,
        107,
        140,
        36208,
    ],
}
TURN = ("<start_of_turn>", "<end_of_turn>", "user", "model", "\n")


@pytest.fixture(scope="module")
def model(gemma3: Path) -> Iterator[llamac.Model]:
    with llamac.load(gemma3) as opened:
        yield opened


def test_the_first_start_needs_no_quantizer(gemma3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix keeps its type of the file, which has Q8_0, Q5_0, Q4_K and Q6_K."""

    def quantize(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a matrix is quantized")

    monkeypatch.setattr(_core, "quantize", quantize)
    with llamac.load(gemma3, cache_dir=False) as opened:
        kept = Counter(tensor.dtype.upper() for tensor in opened.file.tensors if len(tensor.shape) == 2)
        published = Counter(tensor.type.name for tensor in open_gguf(gemma3).tensors.values() if len(tensor.shape) == 2)
        assert kept == published
        assert len(kept) == 4
        assert opened.generate("The three primary colors are", temperature=0, max_tokens=1).text == " red"


@pytest.mark.parametrize("prompt", CONTINUED)
def test_greedy_tokens_are_those_of_transformers(model: llamac.Model, prompt: str) -> None:
    result = model.generate(prompt, temperature=0, max_tokens=16)
    assert list(result.tokens) == CONTINUED[prompt]


def test_bits_do_not_depend_on_threads(model: llamac.Model) -> None:
    ids = model.tokenize("The quick brown fox jumps over the lazy dog near the river bank.")
    with model.session(threads=1) as one, model.session(threads=2) as two:
        np.testing.assert_array_equal(one.eval(ids, logits="all"), two.eval(ids, logits="all"))
        np.testing.assert_array_equal(one.eval(ids[:1]), two.eval(ids[:1]))


def test_turns_of_a_chat_are_single_tokens_of_the_large_vocabulary(model: llamac.Model) -> None:
    """The file, a base model's, has no chat template. Gemma's own template names tokens that the vocabulary has."""
    with pytest.raises(llamac.ArgumentError, match="no chat template"):
        model.chat([USER])
    prompt = llamac.ChatTemplate(TEMPLATES["gemma"], {"bos_token": "<bos>"}).render([USER])
    ids = model.tokenize(prompt)
    start, end, user, role, newline = (model.tokenize(text, add_special=False) for text in TURN)
    assert (len(start), len(end)) == (1, 1)
    assert ids[:4] == [model.special.bos_id, *start, *user, *newline]
    assert ids[-5:] == [*end, *newline, *start, *role, *newline]
    assert model.detokenize(ids[4:-5]) == USER["content"]


def test_the_first_start_answers(llamac_command: Command, gemma3: Path) -> None:
    result = llamac_command("run", gemma3, "-i", "The three primary colors are", "-n", "5", *GREEDY, "--no-cache")
    assert (result.code, result.out) == (0, "The three primary colors are red, blue, and\n")
