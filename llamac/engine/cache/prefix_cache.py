"""The prefix cache of an engine: computed sequences that later requests can reuse.

A radix tree finds the longest cached prefix of a request. Its leaves own the cached states: sequences of a separate
session. `fork` shares their pages with the requests that continue them. In a model with windowed layers, a state cannot
be cut at every position, and one with recurrent layers only where its state is kept (`cut_length`). The cache therefore
knows at which lengths a state can be restored, and the engine stores additional states where requests diverge.

With a store (prefix_store.py), prefixes are also kept on disk and outlive the engine that computed them.
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

MIN_TOKENS = 16  # shorter prefixes are cheaper to compute than to manage


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
        length: Number of positions that can be restored; 0: none.
        shared: Length of the longest common prefix with a cached state. It exceeds `length` if the state cannot be cut
            there.
        owner: The node whose state contains the prefix; None if the length is 0.
    """

    length: int
    shared: int
    owner: _Node | None


@dataclass
class PrefixStats:
    """Counters since the engine was opened.

    Attributes:
        lookups: Requests that looked for a prefix.
        hits: Requests that found a prefix.
        tokens: Prompt tokens of these requests.
        hit_tokens: Prompt tokens that were reused.
        hit_bytes: Bytes of the KV cache of the reused tokens.
        evictions: States that were evicted for lack of memory.
        bytes: Current bytes of the cached states; shared pages count once.
        max_bytes: The limit of `bytes`; 0: only the model's budget applies.
        states: Current number of cached states.
        disk_hits: Hits that were found on disk.
        disk_hit_tokens: Tokens of these hits.
        disk_read_bytes: Bytes of pages read from disk.
        disk_written_bytes: Bytes of files written.
        disk_evictions: Files that this process deleted to keep the limit.
        disk_errors: Files that were damaged, could not be written, or were skipped because the disk is slow.
        disk_bytes: Bytes of all files, as far as this process knows.
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
    """Return the number of equal ids of `left` and `right[start:]`."""
    n = min(len(left), len(right) - start)
    if left[:n] == right[start : start + n]:
        return n
    return next(i for i in range(n) if left[i] != right[start + i])


class PrefixCache:
    """Maps token ids to computed states. Only the engine's thread uses it."""

    def __init__(
        self, session: _core.Session, states: int, max_bytes: int | None = None, store: PrefixStore | None = None
    ) -> None:
        """Create an empty cache.

        Args:
            session: A session that only this cache uses, with at least `states` sequences.
            states: Maximum number of states.
            max_bytes: Maximum bytes of KV pages; None: only the model's budget applies.
            store: Also stores prefixes on disk. `close` closes it.
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
        """Return the current counters."""
        if self._store is not None:
            for field, value in vars(self._store.stats).items():
                setattr(self._stats, f"disk_{field}", value)
        return self._stats

    def close(self) -> None:
        """Write pending pages to disk and close the store."""
        if self._store is not None:
            self._store.close()

    # ---- finding

    def find(self, ids: array[int]) -> Match:
        """Find the longest cached prefix that leaves at least one id to compute."""
        node, shared = self._descend(ids)
        limit = min(shared, len(ids) - 1)
        length, owner = self._longest_cut(node, limit)
        ancestor = node
        while length < limit and ancestor.parent is not None:  # fall back to states that end earlier
            ancestor = ancestor.parent
            if ancestor.slot is not None and ancestor.end > length:
                length, owner = ancestor.end, ancestor
        if owner is None or length < MIN_TOKENS:
            return Match(0, shared, None)
        return Match(length, shared, owner)

    def begin(self, ids: array[int]) -> Loading | None:
        """Start reading the longest prefix of ids from disk, if it is longer than the one in memory."""
        if self._store is None:
            return None
        return self._store.begin(ids, max(self.find(ids).length + 1, MIN_TOKENS))

    def restore(self, ids: array[int], to: _core.Session, sequence: int, loaded: Loaded | None = None) -> Match:
        """Make a sequence of another session equal to the longest cached prefix of ids.

        Args:
            ids: The ids.
            to: The other session.
            sequence: The index of its sequence.
            loaded: A prefix of the ids that was read from disk.
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
        """Add the state of a sequence that contains exactly these ids."""
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
        """Evict the least recently used state, except the prefix that it shares with others.

        Returns whether anything was freed, including pages that were waiting to be written to disk.
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
        """Return the node in which, or at whose end, the ids leave the tree, and the number of ids up to that point."""
        node, matched = self._root, 0
        while matched < len(ids) and (child := node.children.get(ids[matched])) is not None:
            node = child
            common = _common(child.ids, ids, matched)
            matched += common
            if common < len(child.ids):
                break
        return node, matched

    def _insert(self, ids: array[int]) -> _Node:
        """Add ids to the tree. Returns the node that ends with them."""
        node, shared = self._descend(ids)
        if shared < node.end:
            node = self._split(node, shared)
        if shared == len(ids):
            return node
        leaf = _Node(node, shared, ids[shared:])
        node.children[ids[shared]] = leaf
        return leaf

    def _split(self, node: _Node, at: int) -> _Node:
        """Split a node after `at` tokens of its path. Returns the new parent node."""
        assert node.parent is not None
        front = _Node(node.parent, node.start, node.ids[: at - node.start])
        front.last_used = node.last_used
        node.parent.children[front.ids[0]] = front
        node.ids = node.ids[at - node.start :]
        node.start, node.parent = at, front
        front.children[node.ids[0]] = node
        return front

    def _cut_length(self, slot: int, length: int) -> int:
        """Return the largest length, up to `length`, to which a state can be cut."""
        return self._session.cut_length(slot, length)

    def _longest_cut(self, node: _Node, limit: int) -> tuple[int, _Node | None]:
        """Return the longest prefix up to `limit` to which a state in a subtree can be cut, and that state."""
        best, owner = 0, None
        pending = [node]
        while pending and best < limit:
            node = pending.pop()
            if node.slot is not None and (cut := self._cut_length(node.slot, min(limit, node.end))) > best:
                best, owner = cut, node
            pending.extend(node.children.values())
        return best, owner

    def _slot(self, owner: _Node) -> int:
        assert owner.slot is not None
        return owner.slot

    def _owner_at(self, node: _Node, length: int) -> _Node | None:
        """Return a state in a subtree that can be cut to `length` positions, a length within the node's run."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node.slot is not None and self._cut_length(node.slot, length) == length:
                return node
            pending.extend(node.children.values())
        return None

    def _drop_redundant(self, leaf: _Node) -> None:
        """Remove the states of shorter prefixes that can be cut from a new one."""
        slot, node = self._slot(leaf), leaf.parent
        while node is not None:
            if node.slot is not None and self._cut_length(slot, node.end) == node.end:
                self._release(node)
            node = node.parent

    def _shorten(self, owner: _Node) -> None:
        """Remove a state, or cut it to its parent's prefix if no other state contains that prefix."""
        slot, parent = self._slot(owner), owner.parent
        assert parent is not None
        if owner.children:
            self._release(owner)
            return
        del parent.children[owner.ids[0]]
        needed = parent is not self._root and self._owner_at(parent, parent.end) is None
        if needed and self._cut_length(slot, parent.end) == parent.end:
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
