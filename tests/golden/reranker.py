"""A tiny checkpoint that ranks like Qwen3-Reranker, and transformers' scores of it, which are stored here.

    cd tests; python -m golden.reranker        (with the extra `parity`: computes the scores again and prints them)

The prompt is the one of Qwen3-Reranker's model card, written out, and transformers' own tokenizer encodes it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from vocab_samples import tokenizer_json, write_json

from golden.family_cases import FAMILY_CASES
from golden.make import transformers_logits
from golden.make_families import family_checkpoint

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
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    return write_json(folder, tokenizer=tokenizer, tokenizer_config=settings)


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


if __name__ == "__main__":
    main()
