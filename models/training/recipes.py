"""What the two built-in models are: their sizes, their tokenizers, and how a checkpoint directory is written."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .generator import story

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 512
VOCABULARY = 1536
DIM = 256
LAYERS = 4
HEADS = 8
FFN = 512
TRAIN_SEED, VALIDATION_SEED, TOKENIZER_SEED = 1, 2, 3
TOKENIZER_STORIES = 20_000
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """One built-in model: how to make its tokenizer and its network, and the settings of its training.

    `tokenizer` writes the tokenizer's files into a directory and returns the tokenizer; `network` returns a freshly
    initialised transformers model. `bos` begins a document and `eos` ends it; where both are the same id, one token
    stands between two documents. Every step reads `tokens_per_step` tokens; `long_rows` (step, steps) says whether in
    rows of the full context or in short ones.
    """

    name: str
    tokenizer: Callable[[Path], Tokenizer]
    network: Callable[[], Any]
    bos: int
    eos: int
    peak_lr: float
    steps: int
    tokens_per_step: int
    long_rows: Callable[[int, int], bool]


def _tokenizer_text() -> list[str]:
    """The stories that the vocabularies are made from (a series of their own)."""
    return [story(TOKENIZER_SEED, index).text for index in range(TOKENIZER_STORIES)]


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def llama_tokenizer(directory: Path) -> Tokenizer:
    """Train a SentencePiece BPE vocabulary with byte fallback; write tokenizer.model, .json and _config.json."""
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    blob = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # A sentence is a paragraph: newlines are left to the byte pieces, as in Llama's own vocabulary.
        sentence_iterator=iter([paragraph for text in _tokenizer_text() for paragraph in text.split("\n")]),
        model_writer=blob,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(blob.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=blob.getvalue())
    vocabulary = {pieces.id_to_piece(token): token for token in range(pieces.get_piece_size())}
    # SentencePiece joins the pair whose result has the best score, and scores fall with the id. Every way to cut a
    # piece into two known pieces is therefore a merge with the rank of the result.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in vocabulary
        if not pieces.is_byte(vocabulary[piece]) and not pieces.is_control(vocabulary[piece]) and piece != "<unk>"
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_eos_token": False,
            "legacy": True,
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    return tokenizer


def gpt2_tokenizer(directory: Path) -> Tokenizer:
    """Train a byte-level BPE vocabulary; write tokenizer.json, vocab.json, merges.txt and tokenizer_config.json.

    Unlike GPT-2's own, this tokenizer puts `<|endoftext|>` before a text, because each training document began so.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_text(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{END_OF_TEXT} $A", f"{END_OF_TEXT} $A {END_OF_TEXT} $B", [(END_OF_TEXT, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_bos_token": True,
            "add_prefix_space": False,
            "unk_token": END_OF_TEXT,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    return tokenizer


def llama_network() -> Any:
    """Return a LLaMA network: RMSNorm, rotary positions, grouped-query attention (8 heads on 4), SwiGLU, tied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def gpt2_network() -> Any:
    """Return a GPT-2 network: LayerNorm, learned positions, full attention, GELU (tanh), biases, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=DIM,
        n_inner=FFN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=CONTEXT,
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def last_part(step: int, steps: int) -> bool:
    """Long rows at the end: enough for rotary positions, which carry over from short rows."""
    return step >= 0.85 * steps


def every_fourth(step: int, steps: int) -> bool:
    """Long rows all along: learned positions know only what they have seen."""
    return step % 4 == 3


RECIPES = {
    "stories": Recipe(
        name="stories",
        tokenizer=llama_tokenizer,
        network=llama_network,
        bos=1,
        eos=2,
        peak_lr=2e-3,
        steps=3600,
        tokens_per_step=4096,
        long_rows=last_part,
    ),
    "stories-gpt2": Recipe(
        name="stories-gpt2",
        tokenizer=gpt2_tokenizer,
        network=gpt2_network,
        bos=0,
        eos=0,
        peak_lr=1.5e-3,
        steps=3600,
        tokens_per_step=4096,
        long_rows=every_fourth,
    ),
}
