"""The tags between which models write their reasoning."""

# The opening tag and the closing tag of each known style.
TAGS = {f"<{name}>": f"</{name}>" for name in ("think", "thinking", "thought", "reasoning")}
