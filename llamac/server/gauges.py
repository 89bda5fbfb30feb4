"""Prometheus metrics of a server's models: their current state, and the counters of their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llamac.engine.batching.engine import Engine
    from llamac.server.energy import Energy
    from llamac.server.models import Models

Labels = Mapping[str, str]


class Gauge(NamedTuple):
    """A metric with a value for each combination of labels."""

    name: str
    kind: str
    help: str
    values: Sequence[tuple[Labels, float]]


# The current state of each engine: llamac_NAME is the sum, llamac_model_NAME the value of each model.
NOW = {
    "requests_running": "Requests being computed.",
    "requests_waiting": "Requests in the queue.",
    "kv_bytes": "Bytes of the KV cache in use.",
    "kv_pages": "Pages of the KV cache in use.",
    "prefix_bytes": "Bytes of cached prefixes.",
    "device_bytes": "Bytes of a GPU's memory: weights, KV cache and buffers.",
    "threads": "Threads of a pass.",
}

# Counters of all engines: the metric's name, its help text, and its key in `Models.counts`.
COUNTED = (
    ("llamac_engine_steps_total", "Passes through the models.", "steps"),
    ("llamac_engine_rows_total", "Tokens computed in these passes.", "rows"),
    ("llamac_preemptions_total", "Requests paused for lack of memory.", "preemptions"),
    ("llamac_drafted_tokens_total", "Draft tokens computed.", "drafted_tokens"),
    ("llamac_accepted_tokens_total", "Draft tokens that became tokens of requests.", "accepted_tokens"),
    ("llamac_prefix_lookups_total", "Requests that looked for a prefix.", "prefix_lookups"),
    ("llamac_prefix_hits_total", "Requests that found a prefix.", "prefix_hits"),
    ("llamac_prefix_evictions_total", "Prefixes evicted from memory.", "prefix_evictions"),
)


def gauges_of(models: Models, energy: Energy) -> list[Gauge]:
    """Return all metrics."""
    is_open = {entry.name: float(entry.opened is not None) for entry in models.entries}
    loads = {entry.name: float(entry.loads) for entry in models.entries}
    unloads = {entry.name: float(entry.unloads) for entry in models.entries}
    found = [
        Gauge("llamac_models_loaded", "gauge", "Models that are open.", [({}, sum(is_open.values()))]),
        Gauge("llamac_model_loaded", "gauge", "Whether each model is open.", _by_model(is_open)),
        Gauge("llamac_model_loads_total", "counter", "How often each model was opened.", _by_model(loads)),
        Gauge("llamac_model_unloads_total", "counter", "How often each model was closed.", _by_model(unloads)),
    ]
    now = {entry.name: _now(opened.engine) for entry, opened in models.open_ones()}
    for name, help_text in NOW.items():
        parts = {model: numbers[name] for model, numbers in now.items()}
        found.append(Gauge(f"llamac_{name}", "gauge", help_text, [({}, sum(parts.values()))]))
        found.append(Gauge(f"llamac_model_{name}", "gauge", f"Of each open model: {help_text}", _by_model(parts)))
    counts = models.counts()
    found += [Gauge(name, "counter", help_text, [({}, counts.get(key, 0))]) for name, help_text, key in COUNTED]
    joules = energy.joules()
    if joules:
        values = [({"domain": domain}, value) for domain, value in joules.items()]
        found.append(Gauge("llamac_energy_joules_total", "counter", "Energy that the machine used (RAPL).", values))
    return found


def _now(engine: Engine) -> dict[str, float]:
    stats, (_, page_bytes) = engine.stats(), engine.page_size
    device = engine.model._device
    return {
        "requests_running": stats.running,
        "requests_waiting": stats.waiting,
        "kv_bytes": stats.kv_bytes,
        "kv_pages": stats.kv_bytes // page_bytes if page_bytes else 0,  # recurrent layers alone have only states
        "prefix_bytes": stats.prefix.bytes,
        "device_bytes": 0 if device is None else device.bytes,
        "threads": engine.threads,
    }


def _by_model(values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [({"model": name}, value) for name, value in values.items()]
