"""An assistant as a drafter: a small model whose layers read the keys and values of the model that it drafts for.

A draft is computed from the model's embedding of the token before it and from a hidden state. For the first draft, this
is the output of the model's final norm at the position before that token; for further drafts, it is the assistant's own
state. All drafts of a pass are at the position of the text's last token, as in transformers
(`SinglePositionMultiTokenCandidateGenerator`), and see the positions before it.
"""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, cast

from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.speculation.drafter import Drafter

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.sampling.sampler import Sampler
    from llamac.engine.speculation.head import Head


class AssistantDrafter(Drafter):
    """Drafts of an assistant for one text."""

    def __init__(self, head: Head, model: Model) -> None:
        """Use the head of a session of the model."""
        super().__init__()
        self._head = head
        self._n_ids = model.n_token_ids
        self._dim: int = model.config["dim"]
        self._state: tuple[int, memoryview] | None = None  # the last known place in the text and its hidden state

    def follow(self, ids: array[int]) -> None:
        self._state = None

    def states(self, rows: int) -> memoryview:
        shape = (rows, self._dim)
        return cast("memoryview", memoryview(bytearray(4 * rows * self._dim)).cast("f", shape))

    def keep(self, place: int, states: memoryview | None, first: int, n: int) -> None:
        if states is None or not n:
            return
        state = self.states(1)
        size = 4 * self._dim
        end = (first + n) * size
        state.cast("B")[:] = states.cast("B")[end - size : end]
        self._state = place + n - 1, state

    def catch_up(self, ids: array[int], max_tokens: int) -> bool:
        return True  # a draft computes one row

    def draft(self, ids: array[int], n: int, sampler: Sampler) -> list[int]:
        """As the base class. There are no drafts if the hidden state before the last token is not known."""
        if n <= 0 or self._state is None or self._state[0] != len(ids) - 2:
            return []
        head, core = self._head, self._head.core()
        place = head.session._core.length(self.place)
        token, inputs = ids[-1], self._state[1]
        found: list[int] = []
        while len(found) < n:
            begun, hidden, position = time.perf_counter(), self.states(1), len(ids) + len(found)
            with drawing_on_device(head.session, [sampler.device_draw(position)], core) as drawn:
                head.run(array("i", (token, self.place, place, 1)), inputs, hidden)
            token = core.sample(sampler.core, self._n_ids, position) if drawn[0] is None else drawn[0]
            found.append(token)
            self.observe(time.perf_counter() - begun)
            inputs = hidden
        return found
