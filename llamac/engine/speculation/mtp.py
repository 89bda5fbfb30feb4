"""The MTP layer of a model, or an EAGLE-3 head, as a drafter: it predicts tokens from the model's own hidden states.

The row of a text's position i has the token at i + 1 and the hidden state at i; its logits predict the token at i + 2.
The hidden state is the output of the final norm. In the next draft, the hidden state of the MTP layer replaces it. An
EAGLE-3 head reads three states of the model's residual stream. In the next draft, its own state replaces them.

Hidden states are not kept with the KV cache. The drafter has those of the passes since it began to follow the text: the
last KEPT of a prompt, and all of what is generated. The layer's sequence leaves out positions without a hidden state,
and the others are adjacent there. This changes drafts, never results.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, cast

from llamac.engine.rows import appended_rows, common_prefix
from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.speculation.drafter import Drafter

if TYPE_CHECKING:
    from llamac import _core
    from llamac.engine.sampling.sampler import Sampler
    from llamac.engine.speculation.head import Head

KEPT = 256  # hidden states of a text that wait for its next draft
CONTEXT = 4096  # positions of the layer's sequences; a full sequence begins again with the last hidden states
TIMED_ROWS = 4  # a pass of up to this many rows takes about as long as one of a single row


class MtpDrafter(Drafter):
    """Drafts of the MTP layer, or of an EAGLE-3 head, for one text."""

    def __init__(self, head: Head, n_ids: int, widths: tuple[int, int], sequence: int = 0) -> None:
        """Use a sequence of a head.

        Args:
            head: The head of a session.
            n_ids: The number of token ids of the model.
            widths: The width of the model's hidden states that a row reads, and of the head's own.
            sequence: The sequence.
        """
        super().__init__()
        self._head = head
        self._n_ids = n_ids
        self._row_bytes, self._own_bytes = 4 * widths[0], 4 * widths[1]
        self._sequence = sequence
        self._hidden: deque[tuple[int, bytes]] = deque(maxlen=KEPT)  # places in the text, ascending, and their states
        self._places = array("i")  # of the sequence's rows in the text; the rows after these are of the last drafts
        self._text = array("i")  # the ids that the places refer to

    def follow(self, ids: array[int]) -> None:
        same = common_prefix(self._text, ids)
        self._text = ids[:]
        del self._places[bisect_left(self._places, same - 1) :]  # the row of a place has the token after it
        self._forget(same)

    def states(self, rows: int) -> memoryview:
        return _floats(bytearray(rows * self._row_bytes), rows)

    def keep(self, place: int, states: memoryview | None, first: int, n: int) -> None:
        if states is None:
            return
        self._forget(place)
        data, size = states.cast("B"), self._row_bytes
        for i in range(max(0, n - KEPT), n):
            self._hidden.append((place + i, bytes(data[(first + i) * size : (first + i + 1) * size])))

    def catch_up(self, ids: array[int], max_tokens: int) -> bool:
        return True  # `draft` computes at most KEPT rows of one layer

    def draft(self, ids: array[int], n: int, sampler: Sampler) -> list[int]:
        """As the base class. There are no drafts if the hidden state before the last token is not known."""
        last = len(ids) - 2
        if n <= 0 or not self._hidden or self._hidden[-1][0] != last:
            return []
        head, sequence = self._head, self._sequence
        core = head.core()
        n = min(n, core.describe()[0])
        new = self._new_states(core, last, n)
        self._text.extend(ids[len(self._text) :])
        start = len(self._places)
        core.truncate(start, sequence)
        tokens = array("i", (ids[place + 1] for place, _ in new))
        rows = appended_rows(tokens, sequence, start, "last")
        inputs = _floats(b"".join(state for _, state in new), len(new))
        hidden = _floats(bytearray(self._own_bytes), 1)
        found: list[int] = []
        begun = time.perf_counter()
        while True:
            position = len(ids) + len(found)
            with drawing_on_device(head.session, [sampler.device_draw(position)], core) as drawn:
                head.run(rows, inputs, hidden, is_first=not found)
            if not found:
                self._places.extend(place for place, _ in new)
            token = drawn[0]
            found.append(core.sample(sampler.core, self._n_ids, position) if token is None else token)
            if len(rows) // 4 <= TIMED_ROWS:
                self.observe(time.perf_counter() - begun)
            if len(found) == n:
                return found
            begun = time.perf_counter()
            inputs, hidden = hidden, _floats(bytearray(self._own_bytes), 1)
            rows = appended_rows(array("i", found[-1:]), sequence, start + len(new) + len(found) - 1, "last")

    def _new_states(self, core: _core.Session, last: int, n: int) -> list[tuple[int, bytes]]:
        """Make room for n drafts after place `last`. Return the places and hidden states that the sequence lacks."""
        # drop the places of drafts whose pass was cancelled, and those that the session lost with its device
        del self._places[min(bisect_left(self._places, last), core.length(self._sequence)) :]
        if self._places and len(self._places) < core.shortest_length(self._sequence):
            del self._places[:]  # layers with a window have dropped positions that the next rows would see
        newest = self._places[-1] if self._places else -1
        new = [(place, state) for place, state in self._hidden if place > newest]
        room = core.describe()[0] - (n - 1)
        if len(self._places) + len(new) <= room:
            return new
        del self._places[:]
        return list(self._hidden)[-room:]

    def _forget(self, place: int) -> None:
        """Drop the hidden states from a place of the text on."""
        while self._hidden and self._hidden[-1][0] >= place:
            self._hidden.pop()


def _floats(data: bytes | bytearray, rows: int) -> memoryview:
    """The buffer of hidden states, (rows, width)."""
    return cast("memoryview", memoryview(data).cast("f", (rows, len(data) // (4 * rows))))
