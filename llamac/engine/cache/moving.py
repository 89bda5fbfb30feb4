"""Copies what a session holds into another session, which may be on another device."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from llamac import _core

if TYPE_CHECKING:
    from llamac.engine.session import Session


def copy_content(source: Session, target: Session) -> None:
    """Make a session hold all sequences of another one with the same settings, and its logits for `sample`.

    Raises:
        OutOfMemoryError: If there is no memory for the pages.
        DeviceError: If a device fails.
    """
    found, logits = _core.snapshot(source._core)
    copies: dict[int, _core.Page] = {}  # by the page's address: shared pages stay shared
    for number, (ids, shift, starts, groups) in enumerate(found):
        held = []
        for group, pages in enumerate(groups):
            for page in pages:
                if page.address not in copies:
                    copies[page.address] = copy = _core.take_page(target._core, group)
                    copy.view()[:] = page.view()
                held.append(copies[page.address])
        _core.restore(target._core, number, array("i", ids), array("i", starts), held, shift)
    target._n_prompt, target._mu = source._n_prompt, source._mu
    if logits is not None:
        _core.set_logits(target._core, array("f", logits))
