"""The hidden states that a drafter keeps: the last ones of its text, in order, also when they move in memory."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np

from llamac.engine.speculation.mtp import KEPT, MtpDrafter


def test_the_last_states_of_a_text_are_kept_in_order() -> None:
    head = Mock()
    head.session.device = "cpu"
    drafter, place = MtpDrafter(head, 9, (3, 2)), 0
    for back, n in ((0, 5), (0, 300), (0, 1), (0, 63), (0, 64), (70, 2), (0, 200), (0, 60), *[(3, 7)] * 50):
        place -= back
        states = drafter.states(n + 1)
        assert states is not None
        numbers = np.asarray(states.place(1, n))
        numbers[:] = np.arange(place, place + n)[:, None]
        drafter.keep(place, states, 1, n)
        place += n
        known = drafter._known.tolist()
        assert known[-1] == place - 1
        assert known == sorted(set(known))
        assert len(known) <= KEPT
        assert drafter._kept is not None
        kept = np.asarray(drafter._kept.place(drafter._end - len(known), len(known)))
        assert kept.tolist() == [[float(each)] * 3 for each in known]
    assert len(known) == KEPT
