"""A model on a device: its weights there, the pages of its sessions, and the passes that sessions compute.

The core calls a `DeviceModel` for everything that it needs of the device (csrc/device.h).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

from llamac import _core, plan_records
from llamac.arguments import NUMERICS
from llamac.errors import CancelledError, ClosedError, DeviceError, LlamacError, UnsupportedError
from llamac.gpu.buffers import HIDDEN, MOST_BLOCKS, MOST_NUMBERS, MOST_OUTPUTS, Buffers, most_outputs, widest_row
from llamac.gpu.device_names import open_driver
from llamac.gpu.draws import drawing_of
from llamac.gpu.driver import ceil_div
from llamac.gpu.graph import PassGraph
from llamac.gpu.measuring import copy_rate
from llamac.gpu.passes import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    KV_PAGE,
    SEGMENT,
    CacheLayout,
    DeviceRows,
    LayerCache,
    Pass,
    chains_of,
)
from llamac.gpu.weights import Weights
from llamac.interrupt import in_main_thread, interruptible
from llamac.progress import Progress, silent

if TYPE_CHECKING:
    from llamac.format.flatfile import FlatFile
    from llamac.gpu.driver import Driver
    from llamac.gpu.passes import Floats

    Observers = dict[tuple[int, int], Floats]

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
Method = Callable[Concatenate["DeviceModel", Parameters], Result]

OUTPUT_STAGES = tuple(_core.stages().index(name) for name in ("output_norm", "logits"))

# The memory that must remain free besides the weights: for the device itself, the activations of a chunk, some pages.
MARGIN = 256 << 20
MTP_MARGIN = 128 << 20  # in addition, for the passes of an MTP layer or an EAGLE-3 head
# The most tokens of an encoder's text, which is one chunk. Wide models compute fewer, and so do those with several
# experts per token (MOST_NUMBERS, MOST_BLOCKS).
LONGEST_TEXT = 1 << 15


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory.

    Attributes:
        name: The device.
        weights: The weights of the model, and of assistants and EAGLE-3 heads that draft for it.
        kv: The pages of its sessions, including free pages that the next session can use.
        activations: The activations of its passes, and the hidden states that drafters read.
        free: The free memory of the device.
        total: The device's memory.
    """

    name: str
    weights: int
    kv: int
    activations: int
    free: int
    total: int


class GraphKey(NamedTuple):
    """The properties of a session that determine the graphs of its passes.

    Attributes:
        kv_dtype: The number format of its KV cache.
        numerics: How its products round their inputs.
        long_ropes: The RoPE tables in long form.
        part: The number of the part that it computes.
    """

    kv_dtype: int
    numerics: int
    long_ropes: frozenset[int]
    part: int


_MODEL, _MTP = 0, 1


class Part(NamedTuple):
    """What passes compute: the model, its MTP layer, or its drafter.

    Attributes:
        number: _MODEL or _MTP; others are numbered in the order in which they were added.
        plan: Its plan.
        ropes: The steps of the plan that compute angles.
        weights: Its weights.
        most_rows: The most rows of a chunk, of an encoder's as well.
    """

    number: int
    plan: plan_records.Plan
    ropes: tuple[plan_records.Rope, ...]
    weights: Weights
    most_rows: int


class Drafter(NamedTuple):
    """A drafter for the model.

    Attributes:
        file: Its file.
        parts: What its passes compute. An EAGLE-3 head has two parts: from the model's states, and from its own after a
            draft.
        weights: Its weights.
        kv_room: The maximum bytes of the pages of an EAGLE-3 head; 0 for an assistant, which has none.
        margin: The bytes that stay free for its passes.
    """

    file: weakref.ref[FlatFile]
    parts: tuple[Part, ...]
    weights: Weights
    kv_room: int
    margin: int

    @property
    def bytes(self) -> int:
        """The bytes by which the drafter reduces the room for the pages of the model's sessions."""
        return self.weights.bytes + self.kv_room + self.margin


def _not_in_main_thread(method: Method[Parameters, Result]) -> Method[Parameters, Result]:
    """Let a helper thread run a method of the main thread, where a signal handler could interrupt it anywhere.

    The handler may raise an error, as for Ctrl-C, or compute with other sessions, which then wait for the method.
    """

    @wraps(method)
    def run(self: DeviceModel, /, *arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if in_main_thread() and not sys.is_finalizing():  # then no other thread still runs
            return interruptible(partial(method, self, *arguments, **options), lambda: None)
        return method(self, *arguments, **options)

    return run


class DeviceModel:
    """A model on a device.

    Attributes:
        name: The device's canonical name.
        driver: The device.
        most_rows: The most rows of a chunk.
        kv_room: The maximum bytes of its sessions' pages: the memory that was free after the weights, less the memory
            for passes, `mtp_kv_room` and drafters.
        mtp_kv_room: The maximum bytes of the pages of all sessions of its MTP layer. Without room, they do not draft.
        lost: Why only `close` still works; None while the device works.
    """

    def __init__(self, file: FlatFile, name: str, least_kv: int, progress: Progress = silent) -> None:
        """Upload a model.

        Args:
            file: The model's file.
            name: The canonical name of a device (device_names.py).
            least_kv: Bytes that a KV cache needs at least.
            progress: Called if kernels are compiled.

        Raises:
            DeviceError: There is no such device, or it fails.
            UnsupportedError: What it needs is not installed, or the model is too wide for devices.
            OutOfMemoryError: It has too little memory. The message has the sizes.
        """
        self.name = name
        # the plan of the model, and the plan of its MTP layer if it has one
        plans = [_core.plan(file.core, mtp=bool(i)) for i in range(1 + file.config["mtp_layers"])]
        self.driver = open_driver(name, progress)
        row_bytes = max(Buffers(self.driver, plan, fast=False).row_bytes for plan in plans)
        most = min(CHUNK_BYTES // row_bytes, *map(_most_rows, plans))
        self.most_rows = next((n for n in CHUNK_ROWS if n <= most), CHUNK_ROWS[-1])
        self.lost: DeviceError | None = None
        self._is_abandoned = False
        self._lock = threading.Lock()  # the driver belongs to one thread at a time
        self._graphs: dict[GraphKey, PassGraph] = {}
        self._page_bytes: dict[int, int] = {}  # the sizes of the slabs of pages, by address
        self._state_bytes: dict[int, int] = {}  # those of drafters' hidden states
        self._freed: deque[int] = deque()  # the addresses of slabs to free when the driver is idle
        self._close = weakref.finalize(self, _close, self.driver, self._graphs)  # runs once, even without `close`
        self._close.atexit = False  # other threads may still compute
        try:
            self._least_kv = least_kv
            self._margin = MARGIN + MTP_MARGIN * (len(plans) - 1) if name != "emulator" else 0
            self._weights = Weights(self.driver, file, plans, least_kv, self._margin)
            self._file = weakref.ref(file)
            self._n_parts = 0  # made so far: the next one's number
            self._parts = [self._part(plan, self._weights) for plan in plans]
            self._trunk_parts: dict[tuple[int, int, int], Part] = {}  # that record states after these layers
            self._drafters: list[Drafter] = []
            room = self.driver.memory()[0] - self._margin
            self.mtp_kv_room = layers_share(room, least_kv, file.config["n_layers"], 1) if len(plans) > 1 else 0
            self.kv_room = room - self.mtp_kv_room
            file.core.use_device(self)
        except BaseException:
            self._close()
            raise

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Use the driver.

        Raises:
            DeviceError: The device is lost.
        """
        with self._lock:
            if self.lost is not None:
                raise self.lost_error()
            self._free_pages()
            try:
                yield
            except DeviceError as failure:
                if failure.lost:
                    self._lose(failure)
                raise

    def _lose(self, failure: DeviceError) -> None:
        if self.lost is None:
            self.lost = DeviceError(str(failure), lost=True)  # without the traceback, whose frames hold much memory

    def lost_error(self) -> DeviceError:
        """The error of a call that needs the lost device."""
        return DeviceError(
            f"{self.name} has failed and cannot compute: use device='cpu', and Session.to('cpu') for sessions that "
            f"are open: {self.lost}",
            lost=True,
        )

    def _free_pages(self) -> None:
        """Free the memory that `free` could not free at once."""
        while self._freed:
            address = self._freed.popleft()
            (self._state_bytes if address in self._state_bytes else self._page_bytes).pop(address)
            with contextlib.suppress(LlamacError):  # nothing is left to free on a lost device
                if self._close.alive:
                    self.driver.free(address)

    # ---- drafters

    def _part(self, plan: plan_records.Plan, weights: Weights) -> Part:
        """A new part.

        Raises:
            UnsupportedError: Its chunks have more numbers than kernels can index, or its products too many outputs.
        """
        width, outputs = widest_row(plan), most_outputs(plan)
        if outputs > MOST_OUTPUTS:
            raise UnsupportedError(
                f"a product of the model has {outputs} outputs, and GPUs compute at most {MOST_OUTPUTS}: "
                "use device='cpu'"
            )
        if MOST_NUMBERS // width < self.most_rows:
            raise UnsupportedError(
                f"the model computes {width} numbers for a token, and GPUs compute at most "
                f"{MOST_NUMBERS // self.most_rows}: use device='cpu'"
            )
        self._n_parts += 1
        return Part(self._n_parts - 1, plan, ropes_of(plan), weights, min(_most_rows(plan), LONGEST_TEXT))

    @_not_in_main_thread
    def add_drafter(self, drafter: FlatFile, trunk: FlatFile) -> None:
        """Upload a drafter, once, so that its sessions can draft for this model's. This reduces `kv_room`.

        First frees the drafters whose files have been closed.

        Args:
            drafter: The file of an assistant or an EAGLE-3 head.
            trunk: The file of this model.

        Raises:
            ArgumentError: The two do not match.
            DeviceError: The device fails.
            OutOfMemoryError: It has too little memory. The message has the sizes.
            UnsupportedError: The drafter has an adapter of clusters.
        """
        is_head = drafter.config["drafter"] == "eagle3"
        plans = [_core.plan(drafter.core, trunk=trunk.core, after_draft=bool(i)) for i in range(1 + is_head)]
        with self._exclusively():
            self._drop_closed_drafters(trunk)
            if any(each.file() is drafter for each in self._drafters):
                return
            least_kv = max(0, self._least_kv - self.kv_bytes)
            margin = MTP_MARGIN if is_head and self._margin else 0
            weights = Weights(self.driver, drafter, plans, least_kv, self._margin + margin, self._weights)
            room = 0
            if is_head:
                sizes = self.kv_room - weights.bytes - margin, self._least_kv
                room = layers_share(*sizes, trunk.config["n_layers"], drafter.config["n_layers"])
            parts = tuple(self._part(plan, weights) for plan in plans)
            self._drafters.append(Drafter(weakref.ref(drafter), parts, weights, room, margin))
            self.kv_room -= self._drafters[-1].bytes
            self._share_room(trunk)

    def _share_room(self, trunk: FlatFile) -> None:
        """Limit the pages of all heads together to the sum of their rooms."""
        trunk.core.set_head_kv_budget(sum(each.kv_room for each in self._drafters))

    def _drop_closed_drafters(self, trunk: FlatFile) -> None:
        """Free the drafters whose files have been closed. After an error, the next call continues."""
        for drafter in self._drafters[:]:
            file = drafter.file()
            if file is not None and not file.core.released:
                continue
            self._close_graphs([part.number for part in drafter.parts])
            drafter.weights.close()
            self._drafters.remove(drafter)
            self.kv_room += drafter.bytes
            self._share_room(trunk)
        if not self._drafters:  # no session still records states for a head
            self._close_graphs({part.number for part in self._trunk_parts.values()})
            self._trunk_parts.clear()

    def _close_graphs(self, parts: Collection[int]) -> None:
        """Close the graphs of these parts."""
        for key in [key for key in self._graphs if key.part in parts]:
            self._graphs.pop(key).close()

    def _part_of(self, chunk: _core.Chunk, *, is_mtp: bool) -> Part:
        """What a chunk computes.

        Raises:
            ClosedError: The drafter has been freed.
        """
        if chunk.is_of_drafter():
            for drafter in self._drafters:
                file = drafter.file()
                if file is not None and chunk.is_of_drafter(file.core):
                    return drafter.parts[chunk.after_draft()]
            raise ClosedError("the draft model is closed")
        layers = chunk.state_layers()
        if layers is None:
            return self._parts[_MTP if is_mtp else _MODEL]
        if layers not in self._trunk_parts:
            file = self._file()
            assert file is not None  # a session uses it
            self._trunk_parts[layers] = self._part(_core.plan(file.core, state_layers=layers), self._weights)
        return self._trunk_parts[layers]

    # ---- what the core calls

    @_not_in_main_thread
    def alloc(self, size: int) -> int:
        """New memory for pages."""
        with self._exclusively():
            address = self.driver.alloc(size)
            self._page_bytes[address] = size
            return address

    @_not_in_main_thread
    def alloc_states(self, size: int) -> int:
        """New memory for hidden states, which `free` frees."""
        with self._exclusively():
            address = self.driver.alloc(size)
            self._state_bytes[address] = size
            return address

    @_not_in_main_thread
    def free(self, address: int) -> None:
        """Free memory of pages or hidden states: now, or after what the driver is doing.

        The garbage collector can call this in the middle of a pass, even of a capture, in the same thread.
        """
        self._freed.append(address)
        if self._lock.acquire(blocking=False):
            try:
                self._free_pages()
            finally:
                self._lock.release()

    @_not_in_main_thread
    def copy(self, to: int, source: int, size: int) -> None:
        """Copy inside the device."""
        with self._exclusively():
            self.driver.copy(to, source, size)

    @_not_in_main_thread
    def download(self, address: int, to: memoryview) -> None:
        """Copy to the host."""
        import numpy as np

        with self._exclusively():
            self.driver.download(address, np.frombuffer(to, np.uint8))

    @_not_in_main_thread
    def upload(self, address: int, source: memoryview) -> None:
        """Copy from the host."""
        import numpy as np

        with self._exclusively():
            self.driver.upload(address, np.frombuffer(source, np.uint8))

    def forward(self, chunk: _core.Chunk) -> None:
        """Compute a chunk of an eval."""
        with self._exclusively():
            if chunk.cancelled:
                raise CancelledError("cancelled", 0)
            context, kv_dtype, numerics, is_mtp = chunk.session()
            part = self._part_of(chunk, is_mtp=is_mtp)
            if chunk.n_rows > part.most_rows:
                raise UnsupportedError(
                    f"a text has {chunk.n_rows} tokens, and a GPU computes texts of at most {part.most_rows}: split "
                    "it, or use device='cpu'"
                )
            plan = part.plan
            long_ropes = frozenset(step.table for step in part.ropes if 0 < step.original_context < context)
            key = GraphKey(kv_dtype, numerics, long_ropes, part.number)
            if key not in self._graphs:
                layers = [LayerCache(*place) for place in chunk.places()]
                groups = 1 + max(layer.group for layer in layers)
                self._graphs[key] = PassGraph(
                    self.driver,
                    plan,
                    part.weights,
                    CacheLayout(_core.dtype_name(kv_dtype) or "", groups, layers),
                    long_ropes=long_ropes,
                    fast=NUMERICS[numerics] == "fast",
                )
            graph = self._graphs[key]
            graph.run(self._pass_of(chunk, plan, context, graph.groups), drawing_of(chunk))

    def _pass_of(self, chunk: _core.Chunk, plan: plan_records.Plan, context: int, groups: int) -> Pass:
        import numpy as np

        def floats(memory: memoryview | None, buffer: str) -> Floats | None:
            """Rows of a buffer; None if there are none."""
            return np.frombuffer(memory, np.float32).reshape(-1, plan.widths[buffer]) if memory else None

        def states(memory: memoryview | tuple[int, int] | None, buffer: str) -> Floats | DeviceRows | None:
            """Hidden states, which can be on the device."""
            return DeviceRows(*memory) if isinstance(memory, tuple) else floats(memory, buffer)

        rows = np.frombuffer(chunk.rows(), np.int32).reshape(-1, 4)
        tokens, _, positions, wants = rows.T
        table_of, last_table_of, sequences, ends, viewpoints = (np.empty(len(rows), np.int32) for _ in range(5))
        count = chunk.tables(table_of.data, last_table_of.data, sequences.data)
        chunk.ends(ends.data)
        chunk.viewpoints(viewpoints.data)
        types = chunk.types()
        pages = ceil_div(int(ends.max()), KV_PAGE)
        tables = [np.empty((count, pages), np.uint64) for _ in range(groups)]
        for group, table in enumerate(tables):
            for addresses, sequence in zip(table, sequences[:count].tolist(), strict=True):
                chunk.page_addresses(sequence, group, addresses.data)
        segments = np.zeros(len(rows), SEGMENT)
        segments = segments[: chunk.segments(segments.view(np.uint8).data)]
        segments, starts = chains_of(segments)
        costs = chunk.costs()
        return Pass(
            tokens=tokens,
            positions=positions,
            table_of=table_of,
            last_table_of=last_table_of,
            wanted=np.flatnonzero(wants).astype(np.int32),
            ends=ends,
            types=np.zeros(len(rows), np.int32) if types is None else np.frombuffer(types, np.int32),
            viewpoints=viewpoints,
            segments=segments,
            starts=starts,
            tables=tables,
            logits=floats(chunk.logits(), "logits"),
            inputs=states(chunk.inputs(), "states"),
            hidden=states(chunk.hidden(), HIDDEN),
            observers=self._observers(chunk, plan) if chunk.is_observed else {},
            context=context,
            costs=None if costs is None else np.frombuffer(costs, np.uint64).reshape(-1, len(_core.steps()), 2),
        )

    def _observers(self, chunk: _core.Chunk, plan: plan_records.Plan) -> Observers:
        import numpy as np

        found = {}
        for step in plan.steps:
            stage = getattr(step, "stage", -1)
            rows = chunk.n_wanted if stage in OUTPUT_STAGES else chunk.n_rows
            if stage < 0 or not rows or (memory := chunk.observer(stage, max(step.layer, 0))) is None:
                continue
            found[stage, step.layer] = np.frombuffer(memory, np.float32).reshape(rows, -1)
        return found

    # ---- facts

    @property
    def kv_bytes(self) -> int:
        """The bytes of the pages of its sessions, including free pages that the next session can use."""
        return sum(list(self._page_bytes.values()))

    @property
    def bytes(self) -> int:
        """The device memory that the model uses now. Does not wait for a running pass."""
        return 0 if self.lost else self._weight_bytes + self.kv_bytes + self._pass_bytes

    @property
    def _weight_bytes(self) -> int:
        return self._weights.bytes + sum(drafter.weights.bytes for drafter in list(self._drafters))

    @property
    def _pass_bytes(self) -> int:
        states = sum(list(self._state_bytes.values()))
        return states + sum(graph.bytes for graph in list(self._graphs.values()))

    @_not_in_main_thread
    def memory(self) -> DeviceMemory | None:
        """The memory in use now; None if the device is lost."""
        with contextlib.suppress(DeviceError), self._exclusively():
            return DeviceMemory(
                self.name,
                self._weight_bytes,
                self.kv_bytes,
                self._pass_bytes,
                *self.driver.memory(),
            )
        return None

    @_not_in_main_thread
    def check_timer(self) -> None:
        """Raise UnsupportedError if the device cannot measure."""
        with self._exclusively():
            self.driver.timer(1).close()

    @_not_in_main_thread
    def copy_rate(self) -> float:
        """The bytes per second that the device reads and writes when it copies a large block.

        Raises:
            DeviceError: The device has failed.
            OutOfMemoryError: It has no memory left for the block.
            UnsupportedError: It cannot measure.
        """
        with self._exclusively():
            return copy_rate(self.driver)

    @_not_in_main_thread
    def abandon(self, failure: DeviceError) -> bool:
        """Free everything while sessions still have pages on the device, which has failed.

        Returns whether this is the first time.
        """
        with self._lock:
            is_first, self._is_abandoned = not self._is_abandoned, True
            self._lose(failure)
            self._close()
        return is_first

    @_not_in_main_thread
    def close(self) -> None:
        """Free everything. No session may still use the device."""
        with self._lock:
            self._free_pages()
            self._close()


def _most_rows(plan: plan_records.Plan) -> int:
    """The most rows of a chunk."""
    return min(MOST_NUMBERS // widest_row(plan), MOST_BLOCKS // max(plan.max_experts_used, 1))


def ropes_of(plan: plan_records.Plan) -> tuple[plan_records.Rope, ...]:
    """The steps of a plan that compute angles."""
    return tuple(step for step in plan.steps if isinstance(step, plan_records.Rope))


def layers_share(room: int, least_kv: int, n_layers: int, n: int) -> int:
    """Return the maximum bytes of the pages of n drafting layers: their share by layers, without touching `least_kv`.

    Args:
        room: The bytes for all pages.
        least_kv: The bytes that the model's own pages need at least.
        n_layers: The number of the model's layers.
        n: The number of layers of an MTP layer (1) or of an EAGLE-3 head.
    """
    return max(1, min(room * n // (n_layers + n), room - least_kv))


def _close(driver: Driver, graphs: dict[GraphKey, PassGraph]) -> None:
    for graph in graphs.values():
        with contextlib.suppress(LlamacError):  # a lost device, for one
            graph.close()
    graphs.clear()
    driver.close()  # frees weights and pages, too
