"""Admission of requests: here, to the memory for drafts. test_aging.py and test_engine.py have the rest."""

from __future__ import annotations

import llamac


def test_drafts_need_two_pages_for_each_request_and_two_more(model: llamac.Model) -> None:
    with llamac.Engine(model, max_sequences=4) as engine:
        admission = engine._batch._admission
        _, page_bytes = engine._session._core.page_size()
        assert admission.has_room_for_drafts(3)  # without a budget
        for missing in (0, 1):
            model.kv_budget = model.kv_bytes + 8 * page_bytes - missing
            assert admission.has_room_for_drafts(3) == (not missing)
