"""lm-evaluation-harness: `local-completions` gives the figures of llamac's own model class.

The harness tokenizes for `local-completions` itself, with the tokenizer that transformers makes of the GGUF file. So
this also compares llamac's tokenizer with an independent one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from llamac.integrations.lm_eval import LlamacLM

QUESTIONS = [
    ("The capital of France is", ["Paris", "a fish", "seven"], 0),
    ("Water is made of hydrogen and", ["gold", "oxygen", "bread"], 1),
    ("Two plus two is", ["a river", "nine", "four"], 2),
    ("A cat is an", ["animal", "engine", "ocean"], 0),
    ("Snow is usually", ["hot", "white", "loud"], 1),
    ("The opposite of up is", ["green", "yesterday", "down"], 2),
]
COMMON = """\
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
"""
TASKS = {
    "llamac_choices": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "llamac_texts": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}. Café, naïve, 東京!"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "llamac_answers": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match, ignore_case: true}, {metric: bleu}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks."""
    made = tmp_path_factory.mktemp("tasks")
    data = made / "questions.jsonl"
    rows = [{"question": text, "choices": choices, "answer": right} for text, choices, right in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for name, task in TASKS.items():
        (made / f"{name}.yaml").write_text(f"task: {name}\n{COMMON % data}{task}", "utf-8")
    return made


@pytest.fixture(scope="module")
def direct() -> Iterator[LlamacLM]:
    model = LlamacLM(os.environ["LLAMAC_MODEL"], max_length=512)
    yield model
    model.close()


@pytest.fixture(scope="module")
def own(direct: LlamacLM, folder: Path) -> Any:
    """The figures of llamac's model class."""
    return evaluated(direct, folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> Any:
    """The figures of `local-completions`."""
    path = Path(os.environ["LLAMAC_MODEL"])
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder / "tokenizer")
    url = os.environ["LLAMAC_URL"] + "/v1/completions"
    options = f"model=smollm2,base_url={url},tokenizer={folder / 'tokenizer'},max_length=512,num_concurrent=4"
    return evaluated("local-completions", folder, model_args=options)


def evaluated(model: Any, folder: Path, **options: Any) -> Any:
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("task", TASKS)
def test_the_figures_are_the_same(own: Any, other: Any, task: str) -> None:
    figures = [{k: v for k, v in found["results"][task].items() if isinstance(v, float)} for found in (own, other)]
    assert len(figures[0]) >= 2
    assert figures[1] == pytest.approx(figures[0], rel=1e-4)


@pytest.mark.parametrize("task", ["llamac_choices", "llamac_texts"])
def test_every_log_probability_is_the_same(own: Any, other: Any, task: str) -> None:
    mine, theirs = (log_probabilities(found["samples"][task]) for found in (own, other))
    assert len(mine) >= len(QUESTIONS)
    assert theirs == pytest.approx(mine, abs=1e-3)


def log_probabilities(samples: Any) -> list[float]:
    found = [each for sample in sorted(samples, key=lambda sample: sample["doc_id"]) for each in sample["resps"]]
    return [float(each[0][0] if isinstance(each[0], tuple | list) else each[0]) for each in found]


def test_every_generated_text_is_the_same(own: Any, other: Any) -> None:
    mine, theirs = (
        {sample["doc_id"]: sample["resps"] for sample in found["samples"]["llamac_answers"]} for found in (own, other)
    )
    assert sum(len(text) for [[text]] in mine.values()) > 100
    assert theirs == mine
