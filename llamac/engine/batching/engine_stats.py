"""The counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from llamac.engine.cache.prefix_cache import PrefixStats


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine.

    Attributes:
        running: Requests that are being computed now.
        waiting: Requests in the queue now.
        steps: Passes through the model.
        rows: Tokens computed in these passes.
        generated: Sampled tokens.
        preemptions: How many times a running request was paused to free its memory.
        drafted_tokens: Computed drafts.
        accepted_tokens: Drafts that became tokens of requests.
        kv_bytes: Bytes of KV pages in use now, including the prefix cache.
        prefix: Counters of the prefix cache.
    """

    running: int
    waiting: int
    steps: int
    rows: int
    generated: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    kv_bytes: int
    prefix: PrefixStats
