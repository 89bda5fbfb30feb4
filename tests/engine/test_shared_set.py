"""The set of weak references that threads share."""

from __future__ import annotations

import gc
import sys
import threading

from llamac.engine.shared_set import SharedWeakSet


class Member:
    """Something that weak references can refer to."""


def test_members_live_as_long_as_others_refer_to_them() -> None:
    members: SharedWeakSet[Member] = SharedWeakSet()
    one, other = Member(), Member()
    for member in one, other, one:
        members.add(member)
    assert sorted(map(id, members)) == sorted(map(id, (one, other)))
    del other, member
    gc.collect()
    assert list(members) == [one]


def test_a_thread_can_add_while_another_one_iterates() -> None:
    members: SharedWeakSet[Member] = SharedWeakSet()
    kept = [Member() for _ in range(3000)]

    def add_all() -> None:
        for member in kept:
            members.add(member)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding = threading.Thread(target=add_all)
        adding.start()
        while adding.is_alive():
            list(members)
        adding.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(list(members)) == len(kept)
