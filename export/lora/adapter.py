"""The canonical form of an adapter: what it adds to a model's tensors, and which tensors it replaces."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamac.export.checkpoint import LazyTensor

EMBEDDING, OUTPUT = "token_embedding.weight", "output.weight"  # the same tensor if the output is tied


@dataclass(frozen=True)
class Factors:
    """The product scale * b a, which is added to a matrix of shape (rows, columns).

    Attributes:
        a: Shape (r, columns).
        b: Shape (rows, r).
        scale: Multiplies the product.
        magnitudes: The norms of the sum's rows (DoRA), shape (rows,), or None.
        by_column: Whether the magnitudes are the norms of columns, shape (columns,), as in PEFT's embeddings.
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    magnitudes: LazyTensor | None = None
    by_column: bool = False


@dataclass(frozen=True)
class Adapter:
    """An adapter. Its parts are indexed by the canonical names of the tensors that they change.

    Attributes:
        name: The name of its directory.
        factors: Products to add to matrices.
        biases: Vectors to add to biases, each with its scale.
        replaced: Tensors that replace the model's. If the output is tied, an entry for the embedding also replaces the
            output if both entries are the same object.
        replaced_rows: Token ids, and the rows that replace theirs, shape (ids, columns). If the output is tied, rows of
            the embedding also replace the output's, unless the output has its own entry.
    """

    name: str
    factors: dict[str, Factors] = field(default_factory=dict)
    biases: dict[str, tuple[LazyTensor, float]] = field(default_factory=dict)
    replaced: dict[str, LazyTensor] = field(default_factory=dict)
    replaced_rows: dict[str, tuple[list[int], LazyTensor]] = field(default_factory=dict)

    @property
    def unties(self) -> bool:
        """Whether it changes the embedding and the output differently, so that they can no longer be tied."""
        replaced = self.replaced.get(EMBEDDING) is not self.replaced.get(OUTPUT)
        return replaced or OUTPUT in self.replaced_rows or bool({EMBEDDING, OUTPUT} & self.factors.keys())
