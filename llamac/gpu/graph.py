"""The graph on a device: owns the memory of passes, runs the plan's steps, and replays the graphs that it captured.

step_runner.py launches the kernels of the steps.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from llamac import _core, plan_records
from llamac.gpu.attention_tiles import AttentionTiles
from llamac.gpu.buffers import HIDDEN, Buffers
from llamac.gpu.draws import DrawMemory
from llamac.gpu.measuring import Measuring
from llamac.gpu.observing import Observing
from llamac.gpu.operands import Operands
from llamac.gpu.passes import CacheLayout, DeviceRows, Pass, RowMemory, Shape, as_bytes, shape_of
from llamac.gpu.step_runner import StepRunner
from llamac.gpu.steps import attention_kind, joined

if TYPE_CHECKING:
    from llamac.gpu.draws import Drawing
    from llamac.gpu.driver import Driver, Graph
    from llamac.gpu.weights import Weights

CAPTURED_ROWS = 64  # most rows of a pass whose kernels take less time than their launches
MAX_CAPTURED = 32  # graphs
MAX_SHAPES = 4 * MAX_CAPTURED  # of passes whose attention is divided
OUTPUT_NORM = _core.stages().index("output_norm"), -1  # stage and layer


class PassGraph:
    """Runs the passes of sessions with the same settings. One thread at a time uses it.

    Args:
        driver: The device.
        plan: The model's plan.
        weights: Its weights on the device.
        cache: The sessions' pages.
        long_ropes: The RoPE tables of which the sessions use the long form.
        fast: Whether numerics are fast.
    """

    def __init__(
        self,
        driver: Driver,
        plan: plan_records.Plan,
        weights: Weights,
        cache: CacheLayout,
        *,
        long_ropes: Collection[int],
        fast: bool,
    ) -> None:
        self._driver = driver
        self._cache = cache
        self._widths = plan.widths
        self._steps = joined([step for step in plan.steps if not isinstance(step, plan_records.Observe)], fast=fast)
        self._all_steps = joined(plan.steps, fast=fast)
        self._rows = RowMemory(driver, cache.groups)
        self._buffers = Buffers(driver, plan, fast=fast)
        kinds = {attention_kind(step) for step in plan.steps if isinstance(step, plan_records.Attend)}
        self._tiles = AttentionTiles(driver, kinds, cache.dtype)
        self._draws = DrawMemory(driver)
        self._captured: dict[tuple[Shape, bool], Graph] = {}  # by shape, and whether they have marks
        self._measuring: dict[bool, Measuring] = {}  # by whether passes are observed
        self._warm: set[Shape] = set()  # shapes that ran once: all kernels are loaded
        self._operands = Operands(driver, weights, plan)  # last: nothing is left on the device if it fails
        memory = self._rows, self._buffers, self._tiles
        self._runner = StepRunner(driver, plan, self._operands, cache, memory, long_ropes=long_ropes, fast=fast)

    def run(self, job: Pass, drawing: Drawing | None = None) -> None:
        """Compute a pass: keys and values go to the cache's pages, all results to the host.

        Output norms, from which embeddings are made, are in a buffer after the pass, as logits are. Observers of other
        stages copy what the steps leave behind, so their passes are never captured.
        With `drawing`, tokens are drawn on the device, and only the logits of rows without a token go to the host.

        Raises:
            OutOfMemoryError: The device has too little memory for the pass.
            DeviceError: The device failed.
        """
        shape = shape_of(job)
        self._reserve(shape)
        self._rows.upload(job, shape)
        self._take_inputs(job)
        norms = job.observers.get(OUTPUT_NORM)
        observed = bool(job.observers.keys() - {OUTPUT_NORM})
        measuring = self._measured(observed) if job.costs is not None else None
        if observed:
            observing = Observing(self._driver, job)
            try:
                self._runner.run(self._all_steps, shape, observing, measuring)
                observing.finish()
            finally:
                observing.close()
        elif shape.rows <= CAPTURED_ROWS:
            self._run_captured(shape, measuring)
        else:
            self._runner.run(self._steps, shape, measuring=measuring)
        if job.logits is not None and shape.logits:
            self._draws.deliver(self._buffers["logits"], job.logits, drawing)
        elif job.hidden is None or isinstance(job.hidden, DeviceRows):
            self._driver.synchronize()
        if norms is not None and not observed:
            self._driver.download(self._buffers["output_normed"], as_bytes(norms))
        self._deliver_hidden(job)
        if measuring:
            measuring.add(job)

    def _take_inputs(self, job: Pass) -> None:
        to = self._buffers["states"] if job.inputs is not None else 0
        if isinstance(job.inputs, DeviceRows):
            self._driver.copy(to, job.inputs.address, 4 * self._widths["states"] * job.inputs.n)
        elif job.inputs is not None:
            self._driver.upload(to, as_bytes(job.inputs))

    def _deliver_hidden(self, job: Pass) -> None:
        source = self._buffers[HIDDEN] if job.hidden is not None else 0
        if isinstance(job.hidden, DeviceRows):
            self._driver.copy(job.hidden.address, source, 4 * self._widths[HIDDEN] * job.hidden.n)
        elif job.hidden is not None:
            self._driver.download(source, as_bytes(job.hidden))

    def _measured(self, observed: bool) -> Measuring:
        """Return what measures passes with or without observers. It is made on first use."""
        if observed not in self._measuring:
            steps = self._all_steps if observed else self._steps
            self._measuring[observed] = Measuring(self._driver, steps, self._cache)
        return self._measuring[observed]

    def _reserve(self, shape: Shape) -> None:
        """Reserve memory for passes of a shape. Drops graphs whose addresses change, even if a later part fails."""
        if self._rows.reserve(shape):
            self._drop_captured()
        if self._buffers.reserve(shape.rows, max(shape.wanted, 1), shape.hidden):
            self._drop_captured()
        if shape not in self._tiles and len(self._tiles) >= MAX_SHAPES:
            self._forget_shapes()
        if self._tiles.reserve(shape):
            self._drop_captured()

    def _run_captured(self, shape: Shape, measuring: Measuring | None) -> None:
        """Replay the graph of a shape. Capture it when the shape comes for the second time, or when it is measured.

        Outside of a graph, the marks would measure the launches.
        """
        key = shape, measuring is not None
        if key in self._captured:
            self._captured[key].replay()
        elif shape not in self._warm and not measuring:
            self._runner.run(self._steps, shape)
            self._warm.add(shape)
        else:
            if len(self._captured) == MAX_CAPTURED:
                self._captured.pop(next(iter(self._captured))).close()
            with self._driver.capture() as graph:
                self._runner.run(self._steps, shape, measuring=measuring)
            self._captured[key] = graph
            graph.replay()

    def _drop_captured(self) -> None:
        for graph in self._captured.values():
            graph.close()
        self._captured.clear()

    def _forget_shapes(self) -> None:
        self._drop_captured()
        self._warm.clear()
        self._tiles.forget()

    @property
    def groups(self) -> int:
        """Groups of layers, each with its own pages."""
        return self._cache.groups

    @property
    def bytes(self) -> int:
        """Device memory of the passes, without weights and pages."""
        return self._buffers.bytes + self._rows.bytes + self._tiles.bytes + self._draws.bytes

    def close(self) -> None:
        """Free all memory."""
        self._forget_shapes()
        for measuring in self._measuring.values():
            measuring.close()
        self._measuring.clear()
        self._tiles.close()
        self._rows.close()
        self._buffers.close()
        self._draws.close()
        self._operands.close()
