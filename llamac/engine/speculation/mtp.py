"""The MTP layer of a model, or an EAGLE-3 head, as a drafter: it predicts tokens from the model's own hidden states.

The row of a text's position i has the token at i + 1 and the hidden state at i; its logits predict the token at i + 2.
The hidden state is the output of the final norm. In the next draft, the hidden state of the MTP layer replaces it. An
EAGLE-3 head reads three states of the model's residual stream. In the next draft, its own state replaces them.

Hidden states are not kept with the KV cache. The drafter has those of the passes since it began to follow the text, of
at most KEPT positions. The layer's sequence leaves out positions without a hidden state, and the others are adjacent
there. This changes drafts, never results.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

from llamac.engine.rows import ROW, appended_rows, common_prefix
from llamac.engine.sampling.device_draws import drawing_on_device
from llamac.engine.speculation.drafter import Drafter
from llamac.engine.speculation.states import States, device_of, room_for
from llamac.errors import LlamacError

if TYPE_CHECKING:
    from llamac import _core
    from llamac.engine.sampling.sampler import Sampler
    from llamac.engine.speculation.head import Head
    from llamac.gpu.device_model import DeviceModel

KEPT = 256  # hidden states of a text that wait for its next draft
ROOM = KEPT + 64  # rows of memory for them: they move to its beginning once every 64 tokens
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
        self._widths = widths
        self._sequence = sequence
        self._known = array("i")  # the places in the text, ascending, whose hidden states are in `_kept`
        self._kept: States | None = None  # side by side, up to row `_end`
        self._end = 0
        self._own: States | None = None  # two states of the layer, of a draft and of the one before
        self._of_pass: States | None = None
        self._places = array("i")  # of the sequence's rows in the text; the rows after these are of the last drafts
        self._text = array("i")  # the ids that the places refer to

    def follow(self, ids: array[int]) -> None:
        same = common_prefix(self._text, ids)
        self._text = ids[:]
        del self._places[bisect_left(self._places, same - 1) :]  # the row of a place has the token after it
        self._forget(same)

    def states(self, rows: int) -> States | None:
        """As the base class. There are none if the device has no memory for them: then there are no drafts."""
        device = device_of(self._head.session)
        with suppress(LlamacError):  # if the device has failed, the pass reports it
            self._of_pass = room_for(rows, self._widths[0], device, self._of_pass)
            return self._of_pass.first(rows)
        return None

    def keep(self, place: int, states: States | None, first: int, n: int) -> None:
        if states is None:
            return
        self._forget(place)
        new = min(n, KEPT)
        try:
            kept = self._room_on(states.device)
            self._make_room(kept, new)
            kept.take(self._end, states, first + n - new, new)
        except LlamacError:
            self._forget(0)
            return
        self._end += new
        self._known.extend(range(place + n - new, place + n))
        del self._known[:-KEPT]

    def _room_on(self, device: DeviceModel | None) -> States:
        """Memory for the states that are kept. Those of another device are forgotten.

        Raises as `States`.
        """
        if self._kept is None or self._kept.device is not device:
            self._forget(0)
            self._kept = None
            self._own, self._kept = States(2, self._widths[1], device), States(ROOM, self._widths[0], device)
        return self._kept

    def _make_room(self, kept: States, n: int) -> None:
        """Make room for n more states, if there is none: move the states to keep to the beginning."""
        if self._end + n <= ROOM:
            return
        staying = min(len(self._known), KEPT - n)
        distance = self._end - staying
        for at in range(0, staying, distance):  # parts that do not overlap with what they replace
            kept.take(at, kept, distance + at, min(distance, staying - at))
        del self._known[: len(self._known) - staying]
        self._end = staying

    def catch_up(self, ids: array[int], max_tokens: int) -> bool:
        return True  # `draft` computes at most KEPT rows of one layer

    def draft(self, ids: array[int], n: int, sampler: Sampler) -> list[int]:
        """As the base class. There are no drafts if the hidden state before the last token is not known."""
        last = len(ids) - 2
        kept, own = self._kept, self._own
        if n <= 0 or kept is None or own is None or not self._known or self._known[-1] != last:
            return []
        if kept.device is not device_of(self._head.session):
            return []
        head, sequence = self._head, self._sequence
        core = head.core()
        n = min(n, core.describe()[0])
        new = self._new_places(core, last, n)
        self._text.extend(ids[len(self._text) :])
        start = len(self._places)
        core.truncate(start, sequence)
        tokens = array("i", (ids[place + 1] for place in new))
        rows = appended_rows(tokens, sequence, start, "last")
        inputs = kept.place(self._end - len(new), len(new))
        found: list[int] = []
        begun = time.perf_counter()
        while True:
            position, hidden = len(ids) + len(found), own.place(len(found) % 2, 1)
            with drawing_on_device(head.session, [sampler.device_draw(position)], core) as drawn:
                head.run(rows, inputs, hidden, is_first=not found)
            if not found:
                self._places.extend(new)
            token = drawn[0]
            found.append(core.sample(sampler.settings, self._n_ids, position) if token is None else token)
            if len(rows) // ROW <= TIMED_ROWS:
                self.observe(time.perf_counter() - begun)
            if len(found) == n:
                return found
            begun, inputs = time.perf_counter(), hidden
            rows = appended_rows(array("i", found[-1:]), sequence, start + len(new) + len(found) - 1, "last")

    def _new_places(self, core: _core.Session, last: int, n: int) -> array[int]:
        """Make room for n drafts after place `last`. Return the last known places, which the sequence lacks."""
        # drop the places of drafts whose pass was cancelled, and those that the session lost with its device
        del self._places[min(bisect_left(self._places, last), core.length(self._sequence)) :]
        if self._places and len(self._places) < core.shortest_length(self._sequence):
            del self._places[:]  # layers with a window have dropped positions that the next rows would see
        newest = self._places[-1] if self._places else -1
        new = self._known[bisect_left(self._known, newest + 1) :]
        room = core.describe()[0] - (n - 1)
        if len(self._places) + len(new) <= room:
            return new
        del self._places[:]
        return self._known[-room:]

    def _forget(self, place: int) -> None:
        """Drop the hidden states from a place of the text on."""
        n = len(self._known)
        del self._known[bisect_left(self._known, place) :]
        self._end -= n - len(self._known)
