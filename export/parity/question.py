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
# Longer windows are not exceeded unless the user asks for more tokens: captures grow with the square of the length.
LONGEST_WINDOW = 128


def make_question(model: Model, text: str | None = None, n_tokens: int | None = None) -> Question:
    """Choose a question for a model.

    Args:
        model: The model.
        text: The prompt; default: a text of prose, numbers and code. It is repeated until it is long enough. A model
            without a tokenizer gets ids from all of its vocabulary.
        n_tokens: The prompt's length. The default exceeds the model's windows, except long ones.

    Raises:
        ArgumentError: If the model's context is too short, or a text is given that it cannot tokenize.
    """
    if n_tokens is None:
        windows = [window for window in windows_of(model) if window <= LONGEST_WINDOW]
        n_tokens = max(TOKENS, max(windows, default=0) + STEPS + 4)
    longest = _longest(model, n_tokens)
    n_tokens = min(n_tokens, longest)
    if n_tokens <= STEPS:
        raise ArgumentError(f"a comparison needs more than {STEPS} tokens of prompt and {NEW_TOKENS} more of context")
    return Question(tuple(_ids(model, text, n_tokens)), STEPS, NEW_TOKENS, SEED, model.n_token_ids)


def windows_of(model: Model) -> list[int]:
    """The windows of the layers, each once, ascending."""
    return sorted({layer["window"] for layer in model.file.layers if layer["window"]})


def _longest(model: Model, n_tokens: int) -> int:
    """The longest prompt: transformers changes RoPE's table in the middle of a text that outgrows the first one."""
    longest: int = model.config["context"] - NEW_TOKENS
    for original in model.config["rope_original_context"]:
        if n_tokens - STEPS <= original < n_tokens + NEW_TOKENS:
            longest = min(longest, original - NEW_TOKENS)
    return longest


def _ids(model: Model, text: str | None, count: int) -> Sequence[int]:
    if not model.has_tokenizer:
        if text is not None:
            raise ArgumentError("the model has no tokenizer: it cannot read a text")
        return [(7 * i + i * i) % model.n_token_ids for i in range(1, count + 1)]
    ids = list(model.tokenize(text or TEXT))
    more = list(model.tokenize(text or TEXT, add_special=False))
    if not more:
        raise ArgumentError("the text has no tokens")
    while len(ids) < count:
        ids += more
    return ids[:count]
