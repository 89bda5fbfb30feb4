"""Measured passes: the time and bytes of a plan's steps, by the steps of the graph that a profile tells apart.

csrc/profile.h describes those steps. A kernel that does two steps counts for the later one: a kernel that adds a branch
and normalizes the sum counts as the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamac import _core, plan_records
from llamac.gpu.buffers import HIDDEN_BUFFERS, OUTPUT_BUFFERS
from llamac.gpu.launches import STRIP_ROWS
from llamac.gpu.passes import KV_PAGE, CacheLayout, Pass, runs_of
from llamac.gpu.steps import AddAndNorm, Products, linears_of

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

STEPS = {name: number for number, name in enumerate(_core.steps())}
COPY_BYTES = 256 << 20  # of the copy that shows the device's bandwidth: more than its caches hold
COPIES = 5  # the fastest one counts

# The step of the graph that a product of a layer belongs to, by the buffer that it writes.
_OF_OUTPUT = {
    **dict.fromkeys(("q", "k", "v", "attn_gate", "q_latent", "latent_heads", "conv_in"), "qkv"),
    **dict.fromkeys(("state_z", "state_beta", "state_decay"), "qkv"),
    **dict.fromkeys(("gate", "up", "router", "shared_gate", "expert_gate", "expert_up", "expert_rows"), "ffn_up"),
    **dict.fromkeys(("expert_out", "expert_added", "expert_sums", "shared_out"), "ffn_down"),
}
_OF_KIND: dict[type, str] = {
    **dict.fromkeys(
        (plan_records.Heads, plan_records.Attend, plan_records.Convolve, plan_records.DeltaRule, plan_records.Scan),
        "attention",
    ),
    **dict.fromkeys((plan_records.HeadProduct, plan_records.Gate), "attention"),
    **dict.fromkeys((plan_records.Activate, plan_records.Route), "ffn_up"),
    plan_records.Combine: "ffn_down",
}


def places_of(steps: Sequence[Any]) -> list[tuple[int, int]]:
    """The (layer, step of the graph) that each of a plan's joined steps belongs to; layer 0 outside of the layers."""
    found: list[tuple[int, int]] = []
    name = "embed"
    for i, step in enumerate(steps):
        name = _outside(step, name) if step.layer < 0 else _inside(step, steps[i + 1 :], name)
        found.append((max(step.layer, 0), STEPS[name]))
    return found


def _outside(step: Any, before: str) -> str:
    written = getattr(step, "output", getattr(step, "buffer", ""))
    if written == "output_normed" or written in HIDDEN_BUFFERS:
        return "output_norm"
    if written in OUTPUT_BUFFERS:
        return "logits"
    return before if before in ("output_norm", "logits") else "embed"


def _inside(step: Any, later: Sequence[Any], before: str) -> str:
    if isinstance(step, AddAndNorm) or (isinstance(step, plan_records.Norm) and step.output == "normed"):
        reader = next((each for each in later if linears_of(_first(each)) and _first(each).input == "normed"), None)
        return "attn_norm" if reader is not None and _of_product(_first(reader), "") == "qkv" else "ffn_norm"
    if _reads_layer_inputs(step, later):
        return "ffn_down"
    if linears_of(_first(step)):
        return _of_product(_first(step), before)
    # All other steps add, scale, norm or observe what the previous step has written.
    return _OF_KIND.get(type(step), before)


def _reads_layer_inputs(step: Any, later: Sequence[Any]) -> bool:
    """Whether a step activates the layer's inputs, or computes the gate for that."""
    if getattr(step, "output", "") == "gate":
        step = next((each for each in later if isinstance(each, plan_records.Activate)), step)
    return isinstance(step, plan_records.Activate) and step.up == "layer_inputs"


def _first(step: Any) -> Any:
    return step.steps[0] if isinstance(step, Products) else step


def _of_product(step: Any, before: str) -> str:
    if step.output.endswith("projected") or step.input.endswith("projected"):
        return before  # an adapter's, after the product that it adapts
    if step.output in ("branch", "x"):
        return "ffn_down" if step.input in ("up", "expert_sums") else "attn_out"
    return _OF_OUTPUT.get(step.output, before)


class Measuring:
    """Measures passes of a list of joined steps. Its marks can be captured.

    Args:
        driver: The device.
        steps: The steps.
        cache: The sessions' pages.

    Raises:
        UnsupportedError: The device cannot measure.
    """

    def __init__(self, driver: Driver, steps: Sequence[Any], cache: CacheLayout) -> None:
        self._steps, self._cache = steps, cache
        self._places = places_of(steps)
        new = [i for i, place in enumerate(self._places) if i == 0 or place != self._places[i - 1]]
        self._marks = {step: mark for mark, step in enumerate(new)}
        self._marked = [self._places[step] for step in new]
        # the number of experts of a row
        self._used = {step.layer: step.n_used for step in steps if isinstance(step, plan_records.Route)}
        self._timer = driver.timer(len(new) + 1)

    def before(self, step: int) -> None:
        """Set a mark before a step, if it begins a step of the graph."""
        if step in self._marks:
            self._timer.mark(self._marks[step])

    def end(self) -> None:
        """Set the last mark."""
        self._timer.mark(len(self._marks))

    def add(self, job: Pass) -> None:
        """Add the costs of a finished pass to its `costs`."""
        import numpy as np

        assert job.costs is not None
        layers, steps = np.array(self._marked).T
        np.add.at(job.costs[:, :, 0], (layers, steps), self._timer.read().astype(np.uint64))
        for step, (layer, place) in zip(self._steps, self._places, strict=True):
            job.costs[layer, place, 1] += self._bytes_of(step, job)

    def close(self) -> None:
        """Free the timer. Close the graphs that set its marks first."""
        self._timer.close()

    def _bytes_of(self, step: Any, job: Pass) -> int:
        """The bytes of weights, keys and values that a step reads."""
        rows = len(job.tokens)
        if isinstance(step, Products):
            return sum(self._bytes_of_product(each, job) for each in step.steps)
        if isinstance(step, plan_records.HeadProduct):
            return step.linear.weights.bytes
        if isinstance(step, plan_records.ClusterLogits):
            n_wanted = len(job.wanted) if job.logits is not None else 0
            return step.linear.weights.bytes * min(step.n_clusters, n_wanted * step.n_used) // step.n_clusters
        if isinstance(step, plan_records.Embed):
            return sum(rows * _row_bytes(table) for table in (step.tokens, step.types, step.positions) if table)
        if isinstance(step, plan_records.LayerInputs):
            return rows * _row_bytes(step.table)
        if isinstance(step, plan_records.Attend):
            page = step.n_kv_heads * self._cache.layers[step.kv_source].head_bytes
            return _positions(job, step.window) * page // KV_PAGE
        return 0

    def _bytes_of_product(self, step: Any, job: Pass) -> int:
        whole = sum(linear.weights.bytes for linear in linears_of(step))
        if isinstance(step, plan_records.ExpertProduct):  # as many experts as the rows can choose
            n = len(step.linears)
            return whole * min(n, len(job.tokens) * self._used[step.layer]) // n
        if step.output in HIDDEN_BUFFERS:
            return whole if job.hidden is not None else 0
        is_wanted = step.output not in OUTPUT_BUFFERS or (job.logits is not None and len(job.wanted) > 0)
        return whole if is_wanted else 0


def _row_bytes(linear: plan_records.Linear) -> int:
    return linear.strip_bytes // STRIP_ROWS


def _positions(job: Pass, window: int) -> int:
    """The number of positions that the rows see, each once per sequence. window: as in an Attend step."""
    count = 0
    for first, end in runs_of(job.table_of):
        start, length = int(job.positions[first]), int(job.ends[first:end].max())
        seen = 0 if window == 0 else start + 1 - window if window > 0 else start - start % -window
        count += length - max(seen, 0)
    return count


def copy_rate(driver: Driver) -> float:
    """The bytes per second that the device reads and writes when it copies a large block.

    Raises:
        OutOfMemoryError: The device has no memory left.
        UnsupportedError: The device cannot measure.
    """
    size = min(COPY_BYTES, driver.memory()[0] // 4)
    timer, block = driver.timer(COPIES + 1), 0
    try:
        block = driver.alloc(2 * size)
        driver.fill(block, 0, 2 * size)
        for number in range(COPIES):
            timer.mark(number)
            driver.copy(block, block + size, size)
        timer.mark(COPIES)
        driver.synchronize()
        return 2 * size * 1e9 / max(1, int(timer.read().min()))
    finally:
        timer.close()
        if block:
            driver.free(block)
