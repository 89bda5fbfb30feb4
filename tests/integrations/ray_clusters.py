"""Local Ray clusters of several nodes for tests."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

STORE_BYTES = 80_000_000  # about the least that a node starts with
HEAD = 0  # CPUs: no replica and no worker runs on the node that the tests are connected to


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Any]:
    """Start a head and further nodes with one CPU each, and connect to them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # by default 5, too few for a busy machine
    os.environ.setdefault("RAY_worker_niceness", "0")  # by default 15: other work on the machine would stop the workers
    import ray
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args=_node(HEAD))
    try:
        for _ in range(nodes):
            started.add_node(**_node(1))
        ray.init(address=started.address, logging_level="WARNING", log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


def kill_node_of(started: Any, node_id: str) -> None:
    """Kill the processes of a node without notifying the others."""
    [node] = [each for each in started.worker_nodes if each.node_id == node_id]
    started.remove_node(node, allow_graceful=False)


def _node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}
