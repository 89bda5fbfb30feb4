"""lm-evaluation-harness: `local-completions` gives the figures of llamac's own model class."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

QUESTIONS = [
    ("The capital of France is", ["Paris", "a fish", "seven"], 0),
    ("Water is made of hydrogen and", ["gold", "oxygen", "bread"], 1),
    ("Two plus two is", ["a river", "nine", "four"], 2),
    ("A cat is an", ["animal", "engine", "ocean"], 0),
    ("Snow is usually", ["hot", "white", "loud"], 1),
    ("The opposite of up is", ["green", "yesterday", "down"], 2),
]
TASK = """\
task: llamac_tiny
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def test_the_figures_over_http_are_those_of_the_model_class(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    rows = [{"question": text, "choices": choices, "answer": right} for text, choices, right in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "llamac_tiny.yaml").write_text(TASK % data, "utf-8")
    model = os.environ["LLAMAC_MODEL"]
    from llamac.integrations.lm_eval import LlamacLM

    direct = LlamacLM(model)
    own = evaluated(direct, tmp_path)
    folder = tmp_path / "tokenizer"
    write_tokenizer(direct, folder)
    direct.close()
    url = os.environ["LLAMAC_URL"] + "/v1/completions"
    options = f"model=smollm2,base_url={url},tokenizer={folder},tokenizer_backend=huggingface,num_concurrent=1"
    other = evaluated("local-completions", tmp_path, model_args=options)
    assert other["metrics"] == own["metrics"]
    for mine, theirs in zip(own["logprobs"], other["logprobs"], strict=True):
        assert abs(mine - theirs) < 1e-3


def evaluated(model: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Accuracies, and the log probability of every choice."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=["llamac_tiny"], task_manager=manager, batch_size=1, **options)
    metrics = {name: value for name, value in found["results"]["llamac_tiny"].items() if name.startswith("acc")}
    samples = sorted(found["samples"]["llamac_tiny"], key=lambda sample: sample["doc_id"])
    return {"metrics": metrics, "logprobs": [float(each[0]) for sample in samples for each in sample["filtered_resps"]]}


def write_tokenizer(model: Any, folder: Path) -> None:
    """The model's own tokenizer as transformers reads it."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(model._model.file.text("tokenizer"), "utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
