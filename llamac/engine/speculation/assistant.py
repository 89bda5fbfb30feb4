"""An assistant as a drafter: a small model whose layers read the keys and values of the model that it drafts for.

A draft is computed from the model's embedding of the token before it and from a hidden state. For the first draft, this
is the output of the model's final norm at the position before that token; for further drafts, it is the assistant's own
state. All drafts of a pass are at the position of the text's last token, as in transformers
(`SinglePositionMultiTokenCandidateGenerator`), and see the positions before it.
"""

from __future__ import annotations

import time
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.speculation.drafter import Drafter
from llamac.engine.speculation.states import States, device_of, room_for
from llamac.errors import LlamacError

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
        self._place: int | None = None  # the last place in the text whose hidden state is known
        self._rows: States | None = None  # that state, then two of its own
        self._of_pass: States | None = None

    def follow(self, ids: array[int]) -> None:
        self._place = None

    def states(self, rows: int) -> States | None:
        """As the base class. There are none if the device has no memory for them: then there are no drafts."""
        device = device_of(self._head.session)
        with suppress(LlamacError):  # if the device has failed, the pass reports it
            self._of_pass = room_for(rows, self._dim, device, self._of_pass)
            return self._of_pass.first(rows)
        return None

    def keep(self, place: int, states: States | None, first: int, n: int) -> None:
        if states is None or not n:
            return
        self._place = None
        with suppress(LlamacError):
            self._rows = room_for(3, self._dim, states.device, self._rows)
            self._rows.take(0, states, first + n - 1, 1)
            self._place = place + n - 1

    def catch_up(self, ids: array[int], max_tokens: int) -> bool:
        return True  # a draft computes one row

    def draft(self, ids: array[int], n: int, sampler: Sampler) -> list[int]:
        """As the base class. There are no drafts if the hidden state before the last token is not known."""
        rows, session = self._rows, self._head.session
        if n <= 0 or rows is None or rows.device is not device_of(session) or self._place != len(ids) - 2:
            return []
        head, core = self._head, self._head.core()
        place = session._core.length(self.place)
        token, inputs = ids[-1], rows.place(0, 1)
        found: list[int] = []
        while len(found) < n:
            begun, hidden, position = time.perf_counter(), rows.place(1 + len(found) % 2, 1), len(ids) + len(found)
            with drawing_on_device(session, [sampler.device_draw(position)], core) as drawn:
                head.run(array("i", (token, self.place, place, 1)), inputs, hidden)
            token = core.sample(sampler.settings, self._n_ids, position) if drawn[0] is None else drawn[0]
            found.append(token)
            self.observe(time.perf_counter() - begun)
            inputs = hidden
        return found
