"""The operands of a plan's steps as launches take them: addresses of weights, tables of experts, constants.

Tables and constants are made once, on the device, for all passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamac import plan_records
from llamac.gpu.drafter_launches import Clusters
from llamac.gpu.launches import STRIP_ROWS, Embedding, Experts, Matrix
from llamac.gpu.layer_launches import Norm
from llamac.gpu.passes import MAX_ROWS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.gpu.driver import Driver
    from llamac.gpu.weights import Weights


class Operands:
    """The operands of a plan on a device.

    Attributes:
        experts: By the id of an EXPERT_PRODUCT step: the experts' matrices as tables, one for each dtype.
        heads: By the id of a HEAD_PRODUCT step: the heads' matrices.
        clusters: By the id of a CLUSTER_LOGITS step: the clusters.
        adapted_experts: By layer with adapters of the experts' down matrices: the address of whether each expert has
            one.
    """

    def __init__(self, driver: Driver, weights: Weights, plan: plan_records.Plan) -> None:
        """Make the tables.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        self._driver = driver
        self._weights = weights
        self._constants: list[int] = []  # allocations
        self._factors: dict[float, tuple[int, int]] = {}  # by the scale of products: an address, and how many there
        try:
            for step in plan.steps:
                if isinstance(step, plan_records.Product) and step.scale != 1:
                    self.factors(step.scale, MAX_ROWS)
            expert_steps = [step for step in plan.steps if isinstance(step, plan_records.ExpertProduct)]
            self.experts = {id(step): self._tables_of(step) for step in expert_steps}
            self.adapted_experts = self._adapted(expert_steps)
            self.heads = {
                id(step): self._parts_of(step.linear, step.heads)
                for step in plan.steps
                if isinstance(step, plan_records.HeadProduct)
            }
            self.clusters = {
                id(step): self._clusters_of(step) for step in plan.steps if isinstance(step, plan_records.ClusterLogits)
            }
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the memory."""
        while self._constants:
            self._driver.free(self._constants.pop())

    def address(self, operand: plan_records.Operand | None) -> int:
        """Where an operand is; 0 for None."""
        return self._weights.address(operand)

    def matrix(self, linear: plan_records.Linear) -> Matrix:
        """A matrix, without its bias."""
        weights, scales = self.address(linear.weights), self.address(linear.scales)
        return Matrix(weights, linear.dtype, linear.rows, linear.columns, scales)

    def factors(self, scale: float, rows: int) -> int:
        """The address of at least `rows` floats, each of which is the scale of a product.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        import numpy as np

        address, count = self._factors.get(scale, (0, 0))
        if rows > count:
            count = max(2 * count, rows)  # the text of an encoder can have more rows than other passes
            address = self._constant(np.full(count, scale, np.float32))
            self._factors[scale] = address, count
        return address

    def embedding(self, linear: plan_records.Linear, adapter: plan_records.EmbeddingAdapter | None) -> Embedding:
        """An embedding."""
        if adapter is None:
            return Embedding(self.matrix(linear))
        a, b = self.address(adapter.a.weights), self.address(adapter.b.weights)
        return Embedding(self.matrix(linear), a, b, adapter.a.columns)

    def norm(self, norm: plan_records.NormWeights | None) -> Norm | None:
        """The weights of a norm."""
        if norm is None:
            return None
        return Norm(self.address(norm.weight), self.address(norm.bias), norm.eps, norm.is_rms)

    # ---- tables and constants

    def _constant(self, values: np.ndarray[Any, Any]) -> int:
        import numpy as np

        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        address = self._driver.alloc(data.nbytes)
        self._constants.append(address)
        self._driver.upload(address, data)
        return address

    def _tables_of(self, step: plan_records.ExpertProduct) -> list[Experts]:
        """The matrices of a layer's experts as tables, one for each dtype, without the experts of other dtypes."""
        import numpy as np

        found = []
        linears = [linear for linear in step.linears if linear]
        for dtype in sorted({linear.dtype for linear in linears}):
            table = np.zeros((len(step.linears), 3), np.uint64)
            for row, linear in zip(table, step.linears, strict=True):
                if linear and linear.dtype == dtype:
                    row[:] = [self.address(each) for each in (linear.weights, linear.scales, linear.bias)]
            shape = linears[0]
            found.append(Experts(self._constant(table), dtype, shape.rows, shape.columns))
        return found

    def _parts_of(self, linear: plan_records.Linear, n: int) -> Experts:
        """The n parts of a matrix, of equal size, that belong to heads or to clusters."""
        import numpy as np

        rows, numbers = linear.rows // n, np.arange(n, dtype=np.uint64)
        table = np.zeros((n, 3), np.uint64)
        size = rows // STRIP_ROWS * linear.strip_bytes
        table[:, 0] = np.uint64(self.address(linear.weights)) + numbers * np.uint64(size)
        if linear.bias:
            table[:, 2] = np.uint64(self.address(linear.bias)) + numbers * np.uint64(4 * rows)
        return Experts(self._constant(table), linear.dtype, rows, linear.columns)

    def _clusters_of(self, step: plan_records.ClusterLogits) -> Clusters:
        matrices = self._parts_of(step.linear, step.n_clusters)
        return Clusters(matrices, step.n_clusters, step.n_used, self.address(step.ids), step.vocab_size)

    def _adapted(self, steps: Sequence[plan_records.ExpertProduct]) -> dict[int, int]:
        import numpy as np

        found: dict[int, NDArray[np.int32]] = {}
        for step in steps:
            if step.output == "expert_added":
                has_one = found.setdefault(step.layer, np.zeros(len(step.linears), np.int32))
                has_one |= [linear is not None for linear in step.linears]
        return {layer: self._constant(has_one) for layer, has_one in found.items()}
