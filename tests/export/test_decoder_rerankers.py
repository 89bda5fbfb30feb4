"""Decoders saved as *ForSequenceClassification with one label: how they read pairs of texts, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import write_json

import llamac
from commands import Command
from golden.encoder_cases import ENCODER_CASES
from golden.reranker import (
    DOCUMENTS,
    PAIR_SCORES,
    PAIR_TEMPLATE,
    QUERY,
    SCORES,
    TASK,
    make_folder,
    make_scorer,
    pair_scores,
)
from golden.tiny_checkpoints import write_safetensors
from hf_reading import parse
from llamac import ArgumentError, ChatTemplateError, ContextFullError, ExportError, ModelError, UnsupportedError
from llamac.errors import ArgumentTypeError
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from sentence_folders import IDENTITY, modules

SIGMOID = "torch.nn.modules.activation.Sigmoid"
TOLERANCE = 1e-5  # of a score
QWEN3 = ENCODER_CASES["qwen3-scores"].config


def scores(path: Path, query: str = QUERY, **options: Any) -> list[float]:
    """The scores of the documents, in their order."""
    with llamac.load(path) as model:
        ranked = model.rerank(query, DOCUMENTS, **options)
    return [found.score for found in sorted(ranked, key=lambda found: found.index)]


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Path]:
    """Exports a directory after changes of its files; returns the flat file."""

    def export(folder: Path, **files: Any) -> Path:
        for name, changes in files.items():
            path = folder / f"{name}.json"
            old = json.loads(path.read_text()) if path.exists() else {}
            write_json(folder, **{name: old | changes})
        llamac.export.export(folder, tmp_path / "model.bin", overwrite=True)
        return tmp_path / "model.bin"

    return export


@pytest.mark.parametrize(("form", "task"), PAIR_SCORES)
def test_scores_are_those_of_transformers(
    tmp_path: Path, exported: Callable[..., Path], form: str, task: str | None
) -> None:
    found = scores(exported(make_scorer(tmp_path, form)), task=task)
    assert found == pytest.approx(PAIR_SCORES[form, task], abs=TOLERANCE)


@pytest.mark.parametrize(("form", "task"), PAIR_SCORES)
def test_stored_scores_are_current(tmp_path: Path, form: str, task: str | None) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = pair_scores(make_scorer(tmp_path, form), task=task)
    assert found == pytest.approx(PAIR_SCORES[form, task], abs=TOLERANCE)


def test_the_default_prompt_of_sentence_transformers_counts(tmp_path: Path, exported: Callable[..., Path]) -> None:
    """In a template it is the system message; without one, it precedes the query."""
    prompts = {"prompts": {"web": TASK}, "default_prompt_name": "web"}
    path = exported(make_scorer(tmp_path / "a", "template"), config_sentence_transformers=prompts)
    assert scores(path) == pytest.approx(PAIR_SCORES["template", TASK], abs=TOLERANCE)
    folder = make_scorer(tmp_path / "b", "plain")
    expected = scores(exported(folder), TASK + QUERY)
    assert scores(exported(folder, config_sentence_transformers=prompts)) == expected
    changes: list[dict[str, Any]] = [{"prompts": {}}, {"prompts": None}, {"default_prompt_name": 3}]
    for wrong in changes:
        with pytest.raises(ExportError, match=r"default_prompt_name is .*, expected the name of one of its prompts"):
            exported(folder, config_sentence_transformers={**prompts, **wrong})


def test_a_raw_logit_is_a_score_if_the_files_say_so(tmp_path: Path, exported: Callable[..., Path]) -> None:
    settings = {"activation_fn": "torch.nn.modules.linear.Identity"}
    logits = scores(exported(make_scorer(tmp_path, "plain"), config_sentence_transformers=settings))
    assert 1 / (1 + np.exp(-np.array(logits))) == pytest.approx(PAIR_SCORES["plain", None], abs=TOLERANCE)


def test_padding_at_the_end_does_not_count(tmp_path: Path, exported: Callable[..., Path]) -> None:
    """transformers takes the last token that is not the padding token, even if the tokenizer has put it there."""
    folder = make_scorer(tmp_path, "ends")
    path = exported(folder, config={"pad_token_id": 260})
    with llamac.load(path) as model:
        eos = model.special.eos_id
        assert model.special.add_eos
    kept, cut = scores(path), scores(exported(folder, config={"pad_token_id": eos}))
    assert cut != pytest.approx(kept, abs=0.001)
    assert scores(exported(folder, tokenizer={"post_processor": None})) != pytest.approx(cut, abs=0.001)


def test_names_of_special_tokens_are_text_unless_they_are_parsed(tmp_path: Path, exported: Callable[..., Path]) -> None:
    path = exported(make_scorer(tmp_path, "plain"))
    with llamac.load(path) as model:
        query = "<|im_start|>user\n" + QUERY
        plain, parsed = (model.rerank(query, ["a"], parse_special=value)[0].score for value in (False, True))
        ids = [*model.tokenize(query, parse_special=True), *model.tokenize("a")]
        assert ids[0] == model.tokenizer.id_of("<|im_start|>")
    assert plain != pytest.approx(parsed, abs=0.001)


def test_arguments_without_effect_are_errors(tmp_path: Path, exported: Callable[..., Path]) -> None:
    with llamac.load(exported(make_scorer(tmp_path / "a", "plain"))) as model:
        with pytest.raises(ArgumentError, match="task is for models with a chat template"):
            model.rerank(QUERY, ["a"], task=TASK)
        with pytest.raises(ArgumentError, match=r"documents\[0\] and its query have no tokens"):
            model.rerank("", [""])
        with pytest.raises(ContextFullError, match=r"documents\[1\] does not fit the context with its query"):
            model.rerank(QUERY, ["a", "word " * 1000])
    with llamac.load(exported(make_scorer(tmp_path / "b", "template"))) as model:
        with pytest.raises(ArgumentError, match="parse_special needs a model without a chat template for pairs"):
            model.rerank(QUERY, ["a"], parse_special=True)
        with pytest.raises(ContextFullError, match=r"documents\[1\] does not fit the context with its query"):
            model.rerank(QUERY, ["a", "word " * 1000])


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{{ messages[-1].content }}{# 'query' 'document' #}", "query"),
        ("{{ messages[0].content[:3] }}{% if messages[1].role == 'document' %}'query'{% endif %}", "query"),
        (
            "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} 'document'",
            "document",
        ),
    ],
)
def test_a_template_that_drops_a_text_is_an_error(
    tmp_path: Path, exported: Callable[..., Path], template: str, role: str
) -> None:
    path = exported(make_scorer(tmp_path, "plain"), tokenizer_config={"chat_template": template})
    with llamac.load(path) as model, pytest.raises(ChatTemplateError, match=f"leaves out or changes the {role}"):
        model.rerank(QUERY, ["some text"])


def test_a_text_that_the_template_also_writes_does_not_hide_that_it_drops_a_document(
    tmp_path: Path, exported: Callable[..., Path]
) -> None:
    template = "user: {{ messages[0].content }}{# 'query' 'document' #}"
    path = exported(make_scorer(tmp_path, "plain"), tokenizer_config={"chat_template": template})
    with llamac.load(path) as model:
        for document in ("pan", "user", ""):
            with pytest.raises(ChatTemplateError, match=r"leaves out or changes the document of documents\[0\]"):
                model.rerank("panda", [document])
        assert model.rerank("panda", []) == []


def test_a_pair_without_tokens_is_an_error(tmp_path: Path, exported: Callable[..., Path]) -> None:
    template = "{{ messages[0].content }}{{ messages[1].content }}{# 'query' 'document' #}"
    files = {"tokenizer_config": {"chat_template": template}}
    for folder in (make_scorer(tmp_path / "a", "plain"), make_folder(tmp_path / "b")):
        with (
            llamac.load(exported(folder, **files)) as model,
            pytest.raises(ArgumentError, match=r"documents\[1\] and its query have no tokens: expected some text"),
        ):
            model.rerank("", ["a", ""])


def test_options_of_sentence_transformers_reach_the_template(tmp_path: Path, exported: Callable[..., Path]) -> None:
    folder = make_scorer(tmp_path, "template")
    plain = scores(exported(folder))
    always = PAIR_TEMPLATE.replace("{% if add_generation_prompt %}", "{% if true %}")
    expected = scores(exported(folder, tokenizer_config={"chat_template": always}))
    assert expected != pytest.approx(plain, abs=0.001)
    files: dict[str, Any] = {"tokenizer_config": {"chat_template": PAIR_TEMPLATE}}
    for value, same in ((True, expected), (False, plain)):
        options = {"chat_template": {"add_generation_prompt": value}}
        assert scores(exported(folder, **files, sentence_bert_config={"processing_kwargs": options})) == same


@pytest.mark.parametrize("options", [{"documents": []}, {"add_generation_prompt": 1}, "yes"])
def test_other_options_of_sentence_transformers_are_a_warning(tmp_path: Path, options: Any) -> None:
    folder, warnings = make_scorer(tmp_path, "template"), list[str]()
    write_json(folder, sentence_bert_config={"processing_kwargs": {"chat_template": options}})
    assert "pair_options" not in hf.read(folder, warnings).metadata
    assert [text for text in warnings if "processing_kwargs.chat_template is" in text]


@pytest.mark.parametrize(
    ("form", "wrong", "message"),
    [
        ("plain", {"prompt": 5}, "prompt is 5, expected a text"),
        ("template", {"prompt": 5}, "prompt is 5, expected a text"),
        ("template", {"pair_options": {"tools": True}}, "pair_options is {'tools': True}, expected add_generation_"),
        ("template", {"pair_options": [1]}, r"pair_options is \[1\], expected add_generation_prompt and enable_"),
    ],
)
def test_damaged_metadata_is_an_error(
    tmp_path: Path, exported: Callable[..., Path], form: str, wrong: dict[str, Any], message: str
) -> None:
    with llamac.load(exported(make_scorer(tmp_path, form))) as model:
        model.file.metadata.update(wrong)
        with pytest.raises(ModelError, match=f"model.bin: metadata: {message}"):
            model.rerank(QUERY, ["a"])


def test_a_task_is_a_str(tmp_path: Path, exported: Callable[..., Path]) -> None:
    for folder in (
        make_scorer(tmp_path / "a", "template"),
        make_scorer(tmp_path / "b", "plain"),
        make_folder(tmp_path),
    ):
        with (
            llamac.load(exported(folder)) as model,
            pytest.raises(ArgumentTypeError, match="task must be a str, not int"),
        ):
            model.rerank(QUERY, ["a"], task=5)  # type: ignore[arg-type]


def test_a_template_of_chats_does_not_join_pairs(tmp_path: Path, exported: Callable[..., Path]) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    path = exported(make_scorer(tmp_path, "plain"), tokenizer_config={"chat_template": template})
    assert scores(path) == pytest.approx(PAIR_SCORES["plain", None], abs=TOLERANCE)


@pytest.mark.parametrize(
    "end", ["{ANSWER}", "{% if add_generation_prompt and enable_thinking is false %}{ANSWER}{% endif %}"]
)
def test_a_language_model_gets_a_template_for_pairs_too(
    tmp_path: Path, exported: Callable[..., Path], end: str
) -> None:
    """Qwen3-Reranker's scores are the same in its own words and in a template that writes them."""
    words = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    )
    answer = "<|im_start|>assistant\n<think>\n\n</think>\n\n" + ("\n" if end == "{ANSWER}" else "")
    template = words + PAIR_TEMPLATE.partition("{% if add")[0] + end.replace("{ANSWER}", answer)
    path = exported(make_folder(tmp_path), tokenizer_config={"chat_template": template})
    with llamac.load(path, kv_dtype="f32") as model:
        ranked = {found.index: found.score for found in model.rerank(QUERY, DOCUMENTS, task=TASK)}
    assert [ranked[i] for i in range(len(DOCUMENTS))] == pytest.approx(SCORES[TASK], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("answers", "activation"), [((256, 257), SIGMOID), ((257, 256), IDENTITY), ((40, None), IDENTITY)]
)
def test_a_language_model_answers_with_the_tokens_of_its_files(
    tmp_path: Path, exported: Callable[..., Path], answers: tuple[int, int | None], activation: str
) -> None:
    """The score is made of the logits after the pair in the chat template, with the options of the files."""
    folder = make_folder(tmp_path)
    write_json(
        folder,
        modules=modules("Transformer", "LogitScore"),
        tokenizer_config={**json.loads((folder / "tokenizer_config.json").read_text()), "chat_template": PAIR_TEMPLATE},
    )
    (folder / "1_LogitScore").mkdir()
    write_json(folder / "1_LogitScore", config=dict(zip(("true_token_id", "false_token_id"), answers, strict=True)))
    path = exported(
        folder,
        config_sentence_transformers={
            "prompts": {"web": TASK},
            "default_prompt_name": "web",
            "activation_fn": activation,
        },
        sentence_bert_config={"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
    )
    with llamac.load(path, kv_dtype="f32") as model:
        found = {ranked.index: ranked.score for ranked in model.rerank(QUERY, DOCUMENTS)}
        for i, document in enumerate(DOCUMENTS):
            messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
            written = [{"role": "system", "content": TASK}, *messages]
            ids = model.chat_ids(written, template_options={"add_generation_prompt": True})
            logits = model.logits(ids)[-1].astype(np.float64)
            expected = logits[answers[0]] - (0 if answers[1] is None else logits[answers[1]])
            expected = 1 / (1 + np.exp(-expected)) if activation == SIGMOID else expected
            assert found[i] == pytest.approx(expected, abs=TOLERANCE)
        model.file.metadata["answers"] = {"ids": [1, 2, 3]}
        with pytest.raises(ModelError, match=r"answers is .*, expected ids: one or two token ids"):
            model.rerank(QUERY, DOCUMENTS)


def test_tokenizers_that_join_texts_otherwise_are_refused(tmp_path: Path, exported: Callable[..., Path]) -> None:
    folder = make_scorer(tmp_path, "special")
    processor = json.loads((folder / "tokenizer.json").read_text())["post_processor"]
    single, pair_of = processor["single"], processor["pair"]
    pairs: list[list[Any]] = [[*single, *single], [*single, pair_of[3]], []]
    for pair in pairs:
        with pytest.raises(UnsupportedError, match=r"joins the texts .*, expected the forms of two single"):
            exported(folder, tokenizer={"post_processor": {**processor, "pair": pair}})
    for kind in ("BertProcessing", "RobertaProcessing"):
        fixed = {"type": kind, "sep": ["</s>", 1], "cls": ["<s>", 0], "trim_offsets": True, "add_prefix_space": False}
        with pytest.raises(UnsupportedError, match="joins the texts of a pair as"):
            exported(folder, tokenizer={"post_processor": fixed})


def test_a_reranker_does_nothing_else(tmp_path: Path, exported: Callable[..., Path], llamac_command: Command) -> None:
    folder = make_scorer(tmp_path, "plain")
    path = exported(folder)
    with llamac.load(path) as model:
        for refused in (
            lambda: model.generate("a"),
            lambda: model.logits([1, 2]),
            lambda: model.perplexity("a b c d"),
            lambda: model.score("a", ["b"]),
        ):
            with pytest.raises(UnsupportedError, match="the model is a reranker, which "):
                refused()
        with pytest.raises(UnsupportedError, match="scores pairs of texts and does not embed them: use rerank"):
            model.embed("a")
    refused_options: list[dict[str, Any]] = [{"to": "hf"}, {"to": "gguf"}, {"calibrate": "self", "dtype": "q4"}]
    for options in refused_options:
        with pytest.raises(UnsupportedError, match="a reranker"):
            llamac.export.export(folder, tmp_path / "other", **options)
    assert "reranker    scores pairs of texts: rerank (pooling last)" in llamac_command("inspect", path).out
    assert "probes     none: a reranker has no logits to compare" in llamac_command("check", path).out
    llamac_command("run", path, "-i", "a").fails_with("the model is a reranker, which generates no text: use rerank")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "a classifier with 2 classes"),
        ({"id2label": None}, "a classifier with 2 classes"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "which is not a language model of the family 'qwen3'"),
        ({"mystery": 3}, "mystery is 3: llamac does not know this key"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "the activation of scores is 'torch.nn.modules.activation.Tanh'",
        ),
    ],
)
def test_configs_that_the_engine_does_not_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in {**QWEN3, **changes}.items() if value is not None}
    with pytest.raises((UnsupportedError, ExportError), match=message):
        parse(config)


def test_the_output_matrix_is_left_out(tmp_path: Path) -> None:
    folder = make_scorer(tmp_path, "plain")
    stored = read_safetensors(folder / "model.safetensors")
    tensors = {name: tensor.lazy().array() for name, tensor in stored.items()}
    write_safetensors(folder / "model.safetensors", tensors | {"lm_head.weight": np.ones((3, 3), np.float32)})
    found = hf.read(folder, [])
    assert {name for name in found.tensors if name.startswith(("output.", "pooled."))} == {"pooled.0.weight"}
    del tensors["score.weight"]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ExportError, match=r"missing: .*score\.weight"):
        hf.read(folder, [])
