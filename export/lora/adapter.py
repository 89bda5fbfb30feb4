"""An adapter in canonical form: what it adds to the tensors of a model, and which tensors it replaces."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamac.export.checkpoint import LazyTensor

EMBEDDING, OUTPUT = "token_embedding.weight", "output.weight"  # one tensor where the output is tied


@dataclass(frozen=True)
class Factors:
    """scale * b a, which is added to a matrix (rows, columns).

    a: (r, columns). b: (rows, r). magnitudes: the norms of the sum's rows (DoRA), (rows), or None. by_column: whether
    the magnitudes are norms of the columns instead, (columns), as PEFT has them for embeddings.
    """

    a: LazyTensor
    b: LazyTensor
    scale: float
    magnitudes: LazyTensor | None = None
    by_column: bool = False


@dataclass(frozen=True)
class Adapter:
    """The parts of an adapter by the canonical names of the tensors that they change.

    name: the name of its directory. factors: what is added to matrices. biases: what is added to biases, and its
    scale. replaced: tensors that take the place of the model's. replaced_rows: token ids, and the rows that take the
    place of theirs, (ids, columns). On a model with tied output, rows of the embedding alone replace the output's, too,
    and so does an embedding that is the same object as the output.
    """

    name: str
    factors: dict[str, Factors] = field(default_factory=dict)
    biases: dict[str, tuple[LazyTensor, float]] = field(default_factory=dict)
    replaced: dict[str, LazyTensor] = field(default_factory=dict)
    replaced_rows: dict[str, tuple[list[int], LazyTensor]] = field(default_factory=dict)

    @property
    def unties(self) -> bool:
        """Whether it changes an embedding and an output that were tied in different ways."""
        replaced = self.replaced.get(EMBEDDING) is not self.replaced.get(OUTPUT)
        return replaced or OUTPUT in self.replaced_rows or bool({EMBEDDING, OUTPUT} & self.factors.keys())
