"""The tags between which models write their reasoning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac.errors import ArgumentError

if TYPE_CHECKING:
    from llamac.text.tokenizer import Tokenizer

# The opening tag and the closing tag of each known style.
TAGS = {f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning")}
# Those of single formats, which begin with a special token.
TOKEN_TAGS = {
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|channel>thought\n": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>",
}
# Of formats in which the answer has a head of its own, by the opening tag: the pattern of this head, and what comes
# between the closing tag and the answer.
HEADS = {
    "<|channel|>analysis<|message|>": (
        r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        "<|start|>assistant<|channel|>final<|message|>",
    )
}
CALL_END = b"<|call|>"  # a stop token that ends a call, which such a format has beside the answer


def tag_ids(tokenizer: Tokenizer, tag: str) -> list[int]:
    """The tokens whose bytes are exactly a tag. Many tokenizers add a space before a text that is encoded alone."""
    whole: list[int] = []
    for before in ("", "\n", "a", "."):
        whole = tokenizer.encode(before + tag, parse_special=True)
        for start in range(len(whole)):
            if b"".join(token_name(tokenizer, token) for token in whole[start:]) == tag.encode():
                return whole[start:]
    return whole


def token_name(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token, or the name of a special token. Padding ids have none."""
    try:
        return tokenizer.token_bytes(token)
    except ArgumentError:
        return b""
