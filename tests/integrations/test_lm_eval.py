"""The model class for lm-evaluation-harness against the harness's own `hf` model; runs where both are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from vocab_samples import tokenizer_json, write_json

import llamac
from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint

pytest.importorskip("lm_eval")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # other libraries issue warnings of their own

TEXTS = [("hello", " world"), ("hello ", "world"), ("", "hello"), ("a b c", " the end"), ("he" * 60, "hehe" * 3)]


class Models(NamedTuple):
    """One checkpoint, opened by llamac and by transformers."""

    ours: Any
    theirs: Any


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    from lm_eval.models.huggingface import HFLM

    from llamac.integrations.lm_eval import LlamacLM

    root = tmp_path_factory.mktemp("harness")
    config = {**CASES["llama"].config, "vocab_size": 259}  # without padding, which transformers generates
    folder = write_json(write_checkpoint(root / "hf", config), tokenizer=tokenizer_json())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    llamac.export.export(folder, root / "model.bin", dtype="f32")
    ours = LlamacLM(str(root / "model.bin"))
    yield Models(ours, HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1))
    ours.close()


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_the_harness_chooses_the_device(models: Models) -> None:
    with pytest.raises((llamac.DeviceError, llamac.UnsupportedError), match="cuda:99"):
        type(models.ours)(models.ours._path, device="cuda:99")


def test_loglikelihoods_are_equal(models: Models) -> None:
    asked = requests("loglikelihood", *TEXTS)
    ours, theirs = models.ours.loglikelihood(asked), models.theirs.loglikelihood(asked)
    assert [found for _, found in ours] == [found for _, found in theirs]
    assert [found for found, _ in ours] == pytest.approx([found for found, _ in theirs], abs=1e-3)


def test_rolling_loglikelihoods_are_equal(models: Models) -> None:
    asked = requests("loglikelihood_rolling", ("hello world the end " * 20,), ("x",))
    ours, theirs = models.ours.loglikelihood_rolling(asked), models.theirs.loglikelihood_rolling(asked)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_greedy_texts_are_equal(models: Models) -> None:
    settings = [{"max_gen_toks": 6}, {"until": ["e", "a"], "max_gen_toks": 20}, {"max_gen_toks": 55}]
    asked = requests("generate_until", *(("hello the end", each) for each in settings))
    assert models.ours.generate_until(asked) == models.theirs.generate_until(asked)


def test_the_harness_finds_the_model_by_name() -> None:
    from lm_eval.api.registry import get_model

    from llamac.integrations.lm_eval import LlamacLM

    assert get_model("llamac") is LlamacLM
