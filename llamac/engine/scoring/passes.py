"""Groups texts of different lengths into sessions and passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamac.engine.model import Model

# Maximum rows and sequences of a pass. A pass computes at least one text, even if it is longer.
PASS_ROWS = 1024
PASS_SEQUENCES = 64


def contexts_for(model: Model, lengths: Sequence[int], context: int | None = None) -> Iterator[tuple[int, list[int]]]:
    """Group texts by the context that each would have alone. Yields the context and the texts' indices.

    Models with two RoPE tables select the table by the context, so a text's result would otherwise depend on the other
    texts. All other models have one group.

    Args:
        model: The model.
        lengths: Positions of each text.
        context: The context of all texts. Default: the argument of `load`, or as many as the texts need.
    """
    chosen = model._session_defaults.context if context is None else context
    if chosen is not None:
        yield chosen, list(range(len(lengths)))
        return
    switches = [positions for positions in model.config["rope_original_context"] if positions > 0]
    groups: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        groups.setdefault(sum(length > positions for positions in switches), []).append(i)
    for group in groups.values():
        yield max(1, *(lengths[i] for i in group)), group
