"""Tiny checkpoints that rank like Qwen3-Reranker, and transformers' scores of them, which are stored here.

    cd tests; python -m golden.reranker        (with the extra `parity`: computes the scores again and prints them)

The prompt is the one of Qwen3-Reranker's model card, written out, and transformers' own tokenizer encodes it. The
conversion to Qwen3ForSequenceClassification reads pairs of texts: joined by transformers' tokenizer, or in a chat
template with the roles of sentence-transformers.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vocab_samples import tokenizer_json, write_json

from golden.family_cases import FAMILY_CASES
from golden.make import transformers_logits
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import random_tensor, write_safetensors
from llamac.export.hf.safetensors_file import read_safetensors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
MERGES = ("n o", "y e", "ye s", "h e", "Ġ t", "Ġt he")
CONTEXT = 1024

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)

QUERY = "What is the capital of China?"
DOCUMENTS = (
    "The capital of China is Beijing.",
    "Gravity is a force that attracts two bodies towards each other.",
    "",
    "北京 is the capital, and yes, no other city is.",
)
# transformers' probability of "yes" for each document, by task.
SCORES = {
    TASK: [0.418060, 0.559453, 0.379784, 0.047695],
    "Find texts about physics": [0.298857, 0.132372, 0.382961, 0.218806],
}

# A template with the roles of sentence-transformers; the system message is the task.
PAIR_TEMPLATE = (
    "<|im_start|>user\n{% for message in messages if message['role'] == 'system' %}<Instruct>: "
    "{{ message['content'] }}\n{% endfor %}"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, EOS = SPECIAL[0], SPECIAL[2]
# Each way to join a pair: the chat template, and what the tokenizer puts around texts.
FORMS: dict[str, tuple[str | None, str]] = {
    "plain": (None, ""),
    "special": (None, f"{BOS} $A {BOS} $B"),
    "ends": (None, f"$A {EOS} $B {EOS}"),
    "template": (PAIR_TEMPLATE, ""),
}
# transformers' scores of the conversion for each document, by how the pair is joined and by task.
PAIR_SCORES: dict[tuple[str, str | None], list[float]] = {
    ("plain", None): [0.563284, 0.198524, 0.701851, 0.482356],
    ("special", None): [0.794863, 0.198792, 0.679926, 0.342614],
    ("template", None): [0.651516, 0.67323, 0.629327, 0.545612],
    ("template", TASK): [0.932521, 0.646918, 0.918777, 0.826347],
}


def make_folder(root: Path) -> Path:
    """Write the checkpoint with its tokenizer; return its directory."""
    tokenizer = tokenizer_json(post_processor=None, truncation=None)
    vocab = dict(list(tokenizer["model"]["vocab"].items())[:256])
    for merge in MERGES:
        vocab[merge.replace(" ", "")] = len(vocab)
    tokenizer["model"].update(vocab=vocab, merges=list(MERGES))
    first = len(vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": first + i, "content": name, **flags} for i, name in enumerate(SPECIAL)]
    folder = family_checkpoint(
        root / "reranker",
        FAMILY_CASES["qwen3-tied"],
        vocab_size=first + len(SPECIAL),
        max_position_embeddings=CONTEXT,
        use_sliding_window=False,
        bos_token_id=first,
        eos_token_id=first + 2,
        pad_token_id=first,
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": TEMPLATE}
    return write_json(folder, tokenizer=tokenizer, tokenizer_config=settings)


def make_scorer(root: Path, form: str) -> Path:
    """Write the conversion to Qwen3ForSequenceClassification, with a way to join pairs; return its directory."""
    folder = make_folder(root)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    tensors = {name: x.lazy().array() for name, x in read_safetensors(folder / "model.safetensors").items()}
    tensors["score.weight"] = random_tensor("score.weight", (1, config["hidden_size"]))
    write_safetensors(folder / "model.safetensors", tensors)
    template, pair = FORMS[form]
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    if pair:
        pieces = [_piece(name, index // 2) for index, name in enumerate(pair.split())]
        around = {name: config["bos_token_id"] + i for i, name in enumerate(SPECIAL) if name in pair}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": pieces[:2],
            "pair": pieces,
            "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in around.items()},
        }
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    settings |= {"chat_template": template} if template else {}
    return write_json(folder, config=config, tokenizer=tokenizer, tokenizer_config=settings)


def _piece(name: str, type_id: int) -> dict[str, Any]:
    """A piece of the tokenizer's template."""
    kind, name = ("Sequence", name[1:]) if name.startswith("$") else ("SpecialToken", name)
    return {kind: {"id": name, "type_id": type_id}}


def pair_scores(folder: Path, query: str = QUERY, task: str | None = None) -> list[float]:
    """transformers' scores of the conversion: the sigmoid of its logit for each document."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
    scores = []
    for document in DOCUMENTS:
        messages = [{"role": "system", "content": task}] if task else []
        messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if tokenizer.chat_template:
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        else:
            ids = tokenizer(query, document)["input_ids"]
        with torch.no_grad():
            logits: NDArray[np.float32] = model(torch.tensor([ids])).logits.numpy()
        scores.append(float(1 / (1 + np.exp(-logits.astype(np.float64)))[0, 0]))
    return scores


def transformers_scores(folder: Path, task: str) -> list[float]:
    """The model card's computation: the probability of "yes" after each document's prompt, against "no"."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    yes, no = (tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    scores = []
    for document in DOCUMENTS:
        text = f"{PREFIX}<Instruct>: {task}\n<Query>: {QUERY}\n<Document>: {document}{SUFFIX}"
        ids = tokenizer.encode(text, add_special_tokens=False)
        logits = transformers_logits(folder, ids)[-1].astype(np.float64)
        scores.append(float(1 / (1 + np.exp(logits[no] - logits[yes]))))
    return scores


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_folder(Path(temporary))
        for task in SCORES:
            print(task, [round(score, 6) for score in transformers_scores(folder, task)])
    for form, task in PAIR_SCORES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = make_scorer(Path(temporary), form)
            print(form, task, [round(score, 6) for score in pair_scores(folder, task=task)])


if __name__ == "__main__":
    main()
