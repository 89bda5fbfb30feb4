"""The prefix cache of an engine: sequences that were computed and may be needed again.

A radix tree finds the longest cached prefix of a request. Its leaves own the cached states: sequences of a session of
the cache's own. `fork` shares their pages with the requests that continue them. A model with windowed layers cannot be
cut at any position (`shortest_length`), so the cache knows at which lengths a state can be restored and the engine
asks it to keep further states where requests part. A state that cannot be cut at all, as a recurrent one, would be a
snapshot: it is restored whole, and what follows is computed again.

With a store (prefix_store.py) prefixes are also kept on disk, and found there after the engine that computed them has
ended.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamac import _core
from llamac.errors import OutOfMemoryError

if TYPE_CHECKING:
    from llamac.engine.cache.prefix_store import Loaded, Loading, PrefixStore

MIN_TOKENS = 16  # shorter prefixes take less time to compute than to look after


class _Node:
    """A run of tokens in the tree. The path from the root to its end is a prefix; a leaf owns its state."""

    __slots__ = ("children", "ids", "last_used", "parent", "slot", "start")

    def __init__(self, parent: _Node | None, start: int, ids: array[int]) -> None:
        self.parent = parent
        self.start = start  # tokens before the run
        self.ids = ids
        self.children: dict[int, _Node] = {}  # by the first token of their runs
        self.slot: int | None = None
        self.last_used = 0

    @property
    def end(self) -> int:
        """Tokens up to the end of the run."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of some ids.

    Attributes:
        length: Positions that can be restored; 0: none.
        shared: Positions that the ids have in common with a cached state. More than `length` if the state cannot be cut
            there.
        owner: The node whose state holds the prefix; None if the length is 0.
    """

    length: int
    shared: int
    owner: _Node | None


@dataclass
class PrefixStats:
    """Counts since the engine was opened.

    Attributes:
        lookups: Requests that looked for a prefix.
        hits: Requests that found one.
        tokens: Tokens of the prompts that looked for a prefix.
        hit_tokens: Tokens of prompts that were not computed again.
        hit_bytes: Bytes of the KV cache of these tokens.
        evictions: States that were removed for lack of memory.
        bytes: Bytes of the cached states now; pages that states share count once.
        max_bytes: The limit of these bytes; 0: as many as the model's budget allows.
        states: States in the cache now.
        disk_hits: Those of the hits that were found on disk.
        disk_hit_tokens: Their tokens.
        disk_read_bytes: Bytes of pages that were read from disk.
        disk_written_bytes: Bytes of files that were written.
        disk_evictions: Files that this process deleted for the limit.
        disk_errors: Files that were damaged, could not be written, or were given up because the disk is slow.
        disk_bytes: Bytes of all files, as this process knows.
    """

    lookups: int = 0
    hits: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    hit_bytes: int = 0
    evictions: int = 0
    bytes: int = 0
    max_bytes: int = 0
    states: int = 0
    disk_hits: int = 0
    disk_hit_tokens: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_evictions: int = 0
    disk_errors: int = 0
    disk_bytes: int = 0


def _common(left: array[int], right: array[int], start: int) -> int:
    """How many ids of `left` are equal to those of `right` from `start` on."""
    n = min(len(left), len(right) - start)
    if left[:n] == right[start : start + n]:
        return n
    return next(i for i in range(n) if left[i] != right[start + i])


class PrefixCache:
    """Computed sequences by their tokens. The engine's thread is the only user."""

    def __init__(
        self, session: _core.Session, states: int, max_bytes: int | None = None, store: PrefixStore | None = None
    ) -> None:
        """Begin with no states.

        Args:
            session: A session of the cache's own, with at least `states` sequences.
            states: Most states at a time.
            max_bytes: Most bytes of KV pages; None: as many as the model's budget allows.
            store: Keeps prefixes on disk, too. `close` closes it.
        """
        self._session = session
        self._store = store
        positions, page_bytes = session.page_size()
        self._position_bytes = page_bytes / positions
        self._max_bytes = max_bytes
        self._free = list(reversed(range(states)))
        self._root = _Node(None, 0, array("i"))
        self._owners: set[_Node] = set()
        self._clock = itertools.count(1)
        self._stats = PrefixStats(max_bytes=max_bytes or 0)

    @property
    def stats(self) -> PrefixStats:
        """The counts now."""
        if self._store is not None:
            for field, value in vars(self._store.stats).items():
                setattr(self._stats, f"disk_{field}", value)
        return self._stats

    def close(self) -> None:
        """Write to the disk what waits for it."""
        if self._store is not None:
            self._store.close()

    # ---- finding

    def find(self, ids: array[int]) -> Match:
        """Find the longest cached prefix. At least one id is left to compute."""
        node, shared = self._descend(ids)
        limit = min(shared, len(ids) - 1)
        length, owner = limit, self._owner_at(node, limit)
        ancestor = node
        while owner is None and ancestor.parent is not None:  # a state that ends earlier can be restored whole
            ancestor = ancestor.parent
            if ancestor.slot is not None:
                length, owner = ancestor.end, ancestor
        if owner is None or length < MIN_TOKENS:
            return Match(0, shared, None)
        return Match(length, shared, owner)

    def begin(self, ids: array[int]) -> Loading | None:
        """Begin to read the longest prefix of some ids from the disk, if that is longer than what is in memory."""
        if self._store is None:
            return None
        return self._store.begin(ids, max(self.find(ids).length + 1, MIN_TOKENS))

    def restore(self, ids: array[int], to: _core.Session, sequence: int, loaded: Loaded | None = None) -> Match:
        """Make a sequence of another session equal to the longest cached prefix of some ids.

        Args:
            ids: The ids.
            to: The other session.
            sequence: Its sequence.
            loaded: A prefix of the ids that was read from the disk.
        """
        match = self.find(ids)
        self._stats.lookups += 1
        self._stats.tokens += len(ids)
        if self._store is not None and loaded is not None and loaded.length > match.length:
            self._store.restore(ids, loaded, to, sequence)
            match = Match(loaded.length, max(loaded.length, match.shared), None)
            self.keep(ids[: loaded.length], to, sequence)
        if match.owner is not None:
            to.fork_from(self._session, match.length, self._slot(match.owner), sequence)
            self._touch(match.owner)
        if match.length:
            self._stats.hits += 1
            self._stats.hit_tokens += match.length
            self._stats.hit_bytes += int(match.length * self._position_bytes)
        return match

    # ---- keeping

    def keep(self, ids: array[int], source: _core.Session, sequence: int) -> None:
        """Keep the state of a sequence, which holds exactly these ids."""
        if len(ids) < MIN_TOKENS:
            return
        if self._store is not None:
            self._store.keep(ids, source, sequence)
        node, shared = self._descend(ids)
        if shared == len(ids) and (owner := self._owner_at(node, shared)) is not None:
            self._touch(owner)
            return
        while not self._free:
            self.evict()
        slot = self._free.pop()
        try:
            self._session.fork_from(source, len(ids), sequence, slot)
        except OutOfMemoryError:
            self._free.append(slot)
            return
        leaf = self._insert(ids)
        leaf.slot = slot
        self._owners.add(leaf)
        self._touch(leaf)
        self._drop_redundant(leaf)
        self._count()
        while self._max_bytes is not None and self._stats.bytes > self._max_bytes and self.evict():
            pass

    def evict(self) -> bool:
        """Remove the state that was used longest ago, up to where another one begins.

        Returns whether there was one, or whether pages that waited for the disk have been freed.
        """
        if not self._owners:
            return self._store is not None and self._store.drain()
        self._shorten(min(self._owners, key=lambda node: node.last_used))
        self._stats.evictions += 1
        self._count()
        return True

    def clear(self) -> None:
        """Remove all states."""
        while self._owners and self.evict():
            self._stats.evictions -= 1

    # ---- the tree

    def _descend(self, ids: array[int]) -> tuple[_Node, int]:
        """The node in or at whose end the ids leave the tree, and how many ids lie on the path to there."""
        node, matched = self._root, 0
        while matched < len(ids) and (child := node.children.get(ids[matched])) is not None:
            node = child
            common = _common(child.ids, ids, matched)
            matched += common
            if common < len(child.ids):
                break
        return node, matched

    def _insert(self, ids: array[int]) -> _Node:
        """Add ids to the tree. Returns the node at whose end they end."""
        node, shared = self._descend(ids)
        if shared < node.end:
            node = self._split(node, shared)
        if shared == len(ids):
            return node
        leaf = _Node(node, shared, ids[shared:])
        node.children[ids[shared]] = leaf
        return leaf

    def _split(self, node: _Node, at: int) -> _Node:
        """Divide a node after `at` tokens of its path. Returns the new node in front of it."""
        assert node.parent is not None
        front = _Node(node.parent, node.start, node.ids[: at - node.start])
        front.last_used = node.last_used
        node.parent.children[front.ids[0]] = front
        node.ids = node.ids[at - node.start :]
        node.start, node.parent = at, front
        front.children[node.ids[0]] = node
        return front

    def _shortest(self, slot: int) -> int:
        """The smallest length to which a state can be cut: its own length if it cannot be cut at all."""
        return self._session.shortest_length(slot)

    def _slot(self, owner: _Node) -> int:
        assert owner.slot is not None
        return owner.slot

    def _owner_at(self, node: _Node, length: int) -> _Node | None:
        """A state in a subtree that can be cut to `length` positions, which end in or at the end of the node's run."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node.slot is not None and self._shortest(node.slot) <= length:
                return node
            pending.extend(node.children.values())
        return None

    def _drop_redundant(self, leaf: _Node) -> None:
        """Remove the states of shorter prefixes that can be cut from a new one."""
        shortest = self._shortest(self._slot(leaf))
        node = leaf.parent
        while node is not None:
            if node.slot is not None and shortest <= node.end:
                self._release(node)
            node = node.parent

    def _shorten(self, owner: _Node) -> None:
        """Remove a state, or cut it to the prefix of its parent, if no other state holds that."""
        slot, parent = self._slot(owner), owner.parent
        assert parent is not None
        if owner.children:
            self._release(owner)
            return
        del parent.children[owner.ids[0]]
        needed = parent is not self._root and self._owner_at(parent, parent.end) is None
        if needed and self._shortest(slot) <= parent.end:
            self._session.truncate(parent.end, slot)
            self._owners.discard(owner)
            self._owners.add(parent)
            parent.slot, owner.slot = slot, None
            return
        self._release(owner)
        while parent.parent is not None and not parent.children and parent.slot is None:
            del parent.parent.children[parent.ids[0]]
            parent = parent.parent

    def _release(self, owner: _Node) -> None:
        slot = self._slot(owner)
        self._session.truncate(0, slot)
        self._free.append(slot)
        self._owners.discard(owner)
        owner.slot = None

    def _touch(self, node: _Node | None) -> None:
        now = next(self._clock)
        while node is not None:
            node.last_used = now
            node = node.parent

    def _count(self) -> None:
        self._stats.states = len(self._owners)
        self._stats.bytes = _core.held_bytes(self._session)
