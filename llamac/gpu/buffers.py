"""The memory of a session's passes on a device: the plan's buffers, packed inputs, and what experts and attention need.

Its size depends on the number of rows. When it grows, addresses change, and captured graphs become invalid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac import plan_records
from llamac.gpu.drafter_launches import TILE_BYTES
from llamac.gpu.driver import ceil_div
from llamac.gpu.launches import STRIP_ROWS, Form, form_of, input_row_bytes, most_tiles
from llamac.gpu.layer_launches import sort_pairs_scratch
from llamac.gpu.steps import joined, linears_of

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

PAIR_BUFFERS = ("expert_gate", "expert_up", "expert_out", "expert_projected", "expert_added")  # rows are pairs
# rows are those that want logits
OUTPUT_BUFFERS = ("output_normed", "output_projected", "cluster_scores", "in_clusters", "head_logits", "logits")
HIDDEN = "hidden"
HIDDEN_BUFFERS = ("hidden_normed", "hidden_projected", HIDDEN)  # rows are those whose hidden states are wanted
MOST_NUMBERS = (1 << 31) - 1  # of a buffer: kernels number them in 32 bits
MOST_BLOCKS = (1 << 16) - 1  # of a grid along y, which are strips of outputs, or pairs of rows and experts
MOST_OUTPUTS = MOST_BLOCKS * STRIP_ROWS  # of the products of a launch
_ALIGNMENT = 256


class Buffers:
    """Memory by name.

    Names are those of the plan's buffers, and: "angles N" of RoPE table N; "query_scales"; "packed FORM" and
    "packed FORM normed", inputs of products in a form, of the buffer `normed` and of all others; "experts", "weights",
    "shared_weights", "starts", "pair_rows", "pair_of", "pair_weights", "masks" and "tiles" of the pairs of rows and
    experts; "cluster_tiles" and "cluster_rows" of those of rows and clusters.
    """

    def __init__(self, driver: Driver, plan: plan_records.Plan, *, fast: bool) -> None:
        self._driver = driver
        self._addresses: dict[str, int] = {}
        self._memory = 0
        self._capacity = (0, 0, 0)  # rows, rows that want logits, rows whose hidden states are wanted
        self.bytes = 0
        used = plan.max_experts_used
        # bytes of a row of the chunk, and of a row whose logits are wanted
        self._per_row: dict[str, int] = {"query_scales": 4}
        self._per_wanted: dict[str, int] = {}
        self._per_hidden = {name: 4 * plan.widths.get(name, 0) for name in HIDDEN_BUFFERS}
        self._fixed: dict[str, int] = {}
        for name, width in plan.widths.items():
            if name in OUTPUT_BUFFERS:
                self._per_wanted[name] = 4 * width
            elif name not in HIDDEN_BUFFERS:
                self._per_row[name] = 4 * width * (used if name in PAIR_BUFFERS else 1)
        for step in plan.steps:
            if isinstance(step, plan_records.Rope):
                self._per_row[f"angles {step.table}"] = 4 * step.dim
            elif isinstance(step, plan_records.Product):
                self._add_packed(step.input, step.linear, 1, fast)
            elif isinstance(step, plan_records.HeadProduct):
                self._add_packed_heads(step, fast)
            elif isinstance(step, plan_records.ClusterLogits):
                self._add_packed("output_normed", step.linear, 1, fast)
                self._per_wanted["cluster_tiles"] = TILE_BYTES * step.n_used
                self._per_wanted["cluster_rows"] = 4 * step.n_used
            elif isinstance(step, plan_records.ExpertProduct):
                for linear in filter(None, step.linears):
                    self._add_packed(step.input, linear, used if step.input in PAIR_BUFFERS else 1, fast)
        if used:
            n = max(step.n_experts for step in plan.steps if isinstance(step, plan_records.Route))
            for name in ("experts", "weights", "pair_rows", "pair_of", "pair_weights"):
                self._per_row[name] = 4 * used
            self._per_row["shared_weights"] = 4
            self._per_row["masks"] = sort_pairs_scratch(1, n)
            self._per_row["tiles"] = 12 * used
            self._fixed["starts"] = 4 * (n + 1)
            assert most_tiles(n, used) <= used  # so the tiles of any number of rows fit

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of a pass, without logits."""
        return sum(self._per_row.values())

    def _add_packed(self, name: str, linear: plan_records.Linear, rows: int, fast: bool) -> None:
        form = form_of(linear.dtype, fast=fast)
        if form is Form.F32 and not linear.rounds_inputs:
            return
        sizes = self._per_wanted if name in OUTPUT_BUFFERS else self._per_row
        place = packed_name(name, form)
        sizes[place] = max(sizes.get(place, 0), rows * input_row_bytes(form, linear.columns))

    def _add_packed_heads(self, step: plan_records.HeadProduct, fast: bool) -> None:
        form = form_of(step.linear.dtype, fast=fast)
        place = packed_name(step.input, form)
        size = step.heads * input_row_bytes(form, step.linear.columns)
        self._per_row[place] = max(self._per_row.get(place, 0), size)

    def reserve(self, rows: int, wanted: int, hidden: int) -> bool:
        """Make room for passes with these numbers of rows, rows with logits, and rows with hidden states.

        Returns whether addresses have changed.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        needed = rows, wanted, hidden
        rows, wanted, hidden = map(_grown, needed, self._capacity)
        capacity = rows, wanted, hidden
        if capacity == self._capacity:
            return False
        self.close()
        sizes = dict(self._fixed)
        sizes.update({name: size * capacity[0] for name, size in self._per_row.items()})
        sizes.update({name: size * capacity[1] for name, size in self._per_wanted.items()})
        sizes.update({name: size * capacity[2] for name, size in self._per_hidden.items()})
        places: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            places[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory, self.bytes = self._driver.alloc(end), end
        self._addresses = {name: self._memory + place for name, place in places.items()}
        self._capacity = capacity
        return True

    def __getitem__(self, name: str) -> int:
        """The address of a buffer."""
        return self._addresses[name]

    def close(self) -> None:
        """Free the memory."""
        if self._memory:
            self._driver.free(self._memory)
        self._memory, self._capacity, self.bytes = 0, (0, 0, 0), 0


def widest_row(plan: plan_records.Plan) -> int:
    """The most numbers that a row of a pass has in one buffer."""
    used = max(plan.max_experts_used, 1)
    return max(width * (used if name in PAIR_BUFFERS else 1) for name, width in plan.widths.items())


def most_outputs(plan: plan_records.Plan) -> int:
    """The most outputs that the products of a launch have, in whole strips."""
    strips = 0
    for step in joined(plan.steps, fast=False):
        matrices = [linears_of(product)[0] for product in getattr(step, "steps", ())]  # those of experts are alike
        strips = max(strips, sum(ceil_div(matrix.rows, STRIP_ROWS) for matrix in matrices))
    return STRIP_ROWS * strips


def packed_name(buffer: str, form: Form) -> str:
    """The place of a buffer's rows as packed inputs.

    A parallel block packs other rows while it still needs the normed ones, and rows that want logits are fewer.
    """
    return f"packed {form.name} {buffer if buffer in ('normed', 'output_normed') else 'other'}"


def _grown(needed: int, capacity: int) -> int:
    return capacity if needed <= capacity else 1 << (needed - 1).bit_length()
