"""Chooses what to compute: enough tokens to see windows, and no more than a capture can hold."""

from __future__ import annotations

from collections.abc import Sequence

from llamac.engine.model import Model
from llamac.errors import ArgumentError
from llamac.export.parity.capture import Question

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, three people flew to the Moon; two of them walked on it. "
    "def area(radius):\n    return 3.14159 * radius ** 2\n"
)
TOKENS, STEPS, NEW_TOKENS, SEED = 40, 4, 8, 7
# Ids below this one can be padding, to which RoBERTa gives no position.
FIRST_WORD = 4
# Longer windows are not exceeded unless the user asks for more tokens: captures grow with the square of the length.
LONGEST_WINDOW = 128


def make_question(model: Model, text: str | None = None, n_tokens: int | None = None) -> Question:
    """Choose a question for a model.

    Args:
        model: The model.
        text: The prompt; default: a text of prose, numbers and code. It is repeated until it is long enough. A model
            without a tokenizer gets ids from all of its vocabulary. A cross-encoder with token types reads the first
            third as the query.
        n_tokens: The prompt's length. The default exceeds the model's windows, except long ones.

    Raises:
        ArgumentError: If the model's context is too short, or a text is given that it cannot tokenize.
    """
    is_encoder = bool(model.config["two_sided"])
    steps, new_tokens = (0, 0) if is_encoder else (STEPS, NEW_TOKENS)
    if n_tokens is None:
        windows = [window for window in windows_of(model) if window <= LONGEST_WINDOW]
        n_tokens = max(TOKENS, max(windows, default=0) + STEPS + 4)
    n_tokens = min(n_tokens, _longest(model, n_tokens, steps, new_tokens))
    if n_tokens <= steps:
        raise ArgumentError(f"a comparison needs more than {steps} tokens of prompt and {new_tokens} more of context")
    kinds = model.config["scores_pairs"] and model.config["n_types"] > 1
    types = tuple(int(i >= n_tokens // 3) for i in range(n_tokens)) if kinds else ()
    ids = tuple(_ids(model, text, n_tokens))
    return Question(ids, steps, new_tokens, SEED, model.n_token_ids, types)


def windows_of(model: Model) -> list[int]:
    """The windows of the layers, each once, ascending."""
    return sorted({layer["window"] for layer in model.file.layers if layer["window"]})


def _longest(model: Model, n_tokens: int, steps: int, new_tokens: int) -> int:
    """The longest prompt: transformers changes RoPE's table in the middle of a text that outgrows the first one."""
    longest: int = model.config["context"] - new_tokens
    for original in model.config["rope_original_context"]:
        if n_tokens - steps <= original < n_tokens + new_tokens:
            longest = min(longest, original - new_tokens)
    return longest


def _ids(model: Model, text: str | None, count: int) -> Sequence[int]:
    if not model.has_tokenizer:
        if text is not None:
            raise ArgumentError("the model has no tokenizer: it cannot read a text")
        first = min(FIRST_WORD, model.n_token_ids - 1) if model.config["two_sided"] else 0
        return [first + (7 * i + i * i) % (model.n_token_ids - first) for i in range(1, count + 1)]
    ids = list(model.tokenize(text or TEXT))
    more = list(model.tokenize(text or TEXT, add_special=False))
    if not more:
        raise ArgumentError("the text has no tokens")
    while len(ids) < count:
        ids += more
    return ids[:count]
