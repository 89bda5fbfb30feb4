"""The tags between which models write their reasoning."""

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
# What comes before the answer in formats where it has a head of its own, as patterns by the opening tag.
HEADS = {"<|channel|>analysis<|message|>": r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"}
