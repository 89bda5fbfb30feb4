"""Makes the tokenizer: byte-level BPE whose words have the same pieces with and without a space before them.

A model that copies a word from a sentence into a JSON string must write the same pieces again, with another character
before them. Merges are therefore learned from words without spaces, and merges of a space with a piece come last.
Digits and the marks that end sentences are never merged. GPT-2's regular expression splits the words, so GGUF has a
name for it.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import generator
from .rendering import TEMPLATE, render

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZE = 3072
WITH_SPACE = 900  # pieces that can have a space before them
SEED = 3
CONVERSATIONS = 12_000
CONTEXT = 1024

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>"),
)
SPECIAL = (END_OF_TEXT, START, END)
_WORDS = r"\p{L}+|\p{N}|[.!?]|[^\s\p{L}\p{N}.!?]+|\s+"
_SPACE = "Ġ"  # the space in the alphabet of byte-level BPE


def texts(count: int = CONVERSATIONS) -> list[str]:
    """The conversations that the vocabulary is made from (a series of their own)."""
    return [render(generator.conversation(SEED, index)) for index in range(count)]


def make(samples: list[str], size: int = SIZE, with_space: int = WITH_SPACE) -> Tokenizer:
    """Train the tokenizer on texts."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    marks = [*SPECIAL, *MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=size - with_space,
        special_tokens=marks,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(samples, trainer)
    learned = json.loads(learner.to_str())["model"]
    vocabulary: dict[str, int] = learned["vocab"]
    merges = [tuple(merge) for merge in learned["merges"]]
    for piece in _after_space(learner, samples, with_space):
        merges.append((_SPACE, piece))
        vocabulary[_SPACE + piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def _after_space(learner: Tokenizer, samples: list[str], count: int) -> list[str]:
    """The pieces that most often follow a space, apart from digits, in the order of their ids."""
    vocabulary = learner.get_vocab()
    found: Counter[str] = Counter()
    for encoding in learner.encode_batch(samples):
        pieces = encoding.tokens
        for before, piece in itertools.pairwise(pieces):
            if before == _SPACE and not piece.isdigit() and not piece.startswith((_SPACE, "<", "Ċ")):
                found[piece] += 1
    return sorted((piece for piece, _ in found.most_common(count)), key=vocabulary.__getitem__)


def write(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
