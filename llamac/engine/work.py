"""The work of an eval: whether it can take so long that it must be interruptible (llamac/interrupt.py).

The unit is the time to read a byte of weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.format.flatfile import TensorRecord

# The work above which an eval on the CPU can take longer than about 10 ms.
LONG_WORK = 100_000_000
LONG_WORK_SCALAR = 2_000_000
MULTIPLY_ADD = 2
EXP_WORK = 16  # cost of an exponential in multiply-adds


class Work(NamedTuple):
    """The work of the parts of an eval.

    Attributes:
        first: Of the first row, which reads the weights.
        further: Of each further row: its multiply-adds with all matrices.
        position: Of attention, per row and preceding position.
    """

    first: int
    further: int
    position: int

    def of(self, rows: int, positions: int) -> int:
        """The work of an eval. positions: the number of positions before each row, summed over the rows."""
        return self.first + self.further * max(0, rows - 1) + self.position * positions


def work_of(model: Model) -> Work:
    """The work of a model's passes."""
    return Work(
        model.weight_bytes,
        MULTIPLY_ADD * model._multiply_adds,
        _attention_work(model.config, model.config["n_layers"]),
    )


def mtp_work_of(model: Model) -> Work:
    """The work of the passes of a model's MTP layer, which has the output matrix of the model."""
    of_layer = ("mtp.", f"layers.{model.config['n_layers']}.")
    output = "token_embedding.weight" if model.config["tied_output"] else "output.weight"
    tensors = [each for each in model.file.tensors if each.name.startswith(of_layer) or each.name == output]
    return Work(
        sum(tensor.bytes for tensor in tensors), MULTIPLY_ADD * multiply_adds(tensors), _attention_work(model.config, 1)
    )


def multiply_adds(tensors: Iterable[TensorRecord]) -> int:
    """Multiply-adds of a row with all matrices. This includes embeddings, although they are only looked up."""
    return sum(math.prod(tensor.shape) for tensor in tensors if len(tensor.shape) == 2)


def _attention_work(config: Mapping[str, Any], layers: int) -> int:
    n_heads: int = config["n_heads"]
    per_head: int = 2 * config["head_dim"] + EXP_WORK
    return MULTIPLY_ADD * layers * n_heads * per_head
