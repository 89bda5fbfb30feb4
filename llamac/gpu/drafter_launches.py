"""Launches of the kernels that only drafters need: inputs side by side, and the logits of some of the tokens.

Addresses are integers in the device's memory. The kernels' comments give shapes, and name the functions of the core
whose results they reproduce bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llamac.gpu import launches
from llamac.gpu.driver import arguments, ceil_div
from llamac.gpu.launches import Experts, Form

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

TILE_BYTES = 12  # struct row_tile of kernels/epilogue.cuh
_FILLED = 4096  # logits of a block of threads, as in drafter.cu


class Clusters(NamedTuple):
    """The output matrix as parts of equal size, one for each cluster of tokens."""

    matrices: Experts
    n: int
    n_used: int  # of a row
    ids: int  # (n * matrices.rows) floats: the tokens of the matrices' rows
    vocab_size: int


class ClusterMemory(NamedTuple):
    """The buffers that the launches of `cluster_logits` pass to each other."""

    tiles: int  # (rows, n_used) tiles
    pair_rows: int  # (rows, n_used) int32
    in_clusters: int  # (rows, n_used, matrices.rows) floats


def copy_rows(driver: Driver, rows: int, width: int, x: int, y: int, stride: int) -> None:
    """COPY: the rows of x (rows, width) become parts of those of y, which are `stride` numbers apart."""
    driver.launch("copy_rows", (ceil_div(width, 256), rows, 1), 256, arguments("ppii", x, y, width, stride))


def cluster_logits(
    driver: Driver,
    rows: int,
    clusters: Clusters,
    scores: int,
    inputs: int,
    form: Form,
    memory: ClusterMemory,
    logits: int,
) -> None:
    """CLUSTER_LOGITS: logits (rows, vocab_size) of the tokens in each row's best clusters, and of all others.

    Args:
        driver: The device.
        rows: The number of rows.
        clusters: The clusters.
        scores: (rows, n) floats, the clusters' scores.
        inputs: The rows, packed.
        form: Their form.
        memory: The buffers between the launches.
        logits: Receives the logits.
    """
    n, used, size = clusters.n, clusters.n_used, clusters.matrices.rows
    chosen = arguments("piipp", scores, n, used, memory.tiles, memory.pair_rows)
    driver.launch("choose_clusters", (ceil_div(n, 256), rows, 1), 256, chosen)
    pairs = rows * used
    launches.tile_products(
        driver, clusters.matrices, inputs, memory.pair_rows, pairs, memory.tiles, form, memory.in_clusters
    )
    filled = arguments("piip", memory.in_clusters, used * size, clusters.vocab_size, logits)
    driver.launch("fill_other_logits", (ceil_div(clusters.vocab_size, _FILLED), rows, 1), 256, filled)
    spread = (
        *arguments("ppp", memory.in_clusters, memory.tiles, clusters.ids),
        *arguments("iiip", used, size, clusters.vocab_size, logits),
    )
    driver.launch("spread_clusters", (ceil_div(used * size, 256), rows, 1), 256, spread)


def spread_logits(driver: Driver, rows: int, n: int, vocab_size: int, head_logits: int, ids: int, logits: int) -> None:
    """SPREAD_LOGITS: logits (rows, vocab_size) = head_logits (rows, n) at their ids (n); elsewhere minus infinity."""
    given = arguments("ppiip", head_logits, ids, n, vocab_size, logits)
    driver.launch("spread_head_logits", (ceil_div(vocab_size, 256), rows, 1), 256, given)
