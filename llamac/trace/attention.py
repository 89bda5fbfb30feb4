"""Reduces a text's attention to the strongest links of every token and a map of each head.

A map of a long text has a cell for a block of tokens. Links keep the tokens themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

MAX_LINKS = 8  # of a token in a head
LINK_BYTES = 4
WHOLE = (1 << 16) - 1  # the number that represents weight 1


class Attention:
    """Collects the attention of a text.

    Attributes:
        heads: The number of heads of each layer; 0 for layers without attention.
        block: The number of tokens of a cell's side.
        targets: The tokens with the largest weights, the largest first: (heads of all layers, n, links), u16.
        weights: Their weights in units of 1 / 65535, rounded: the same shape, u16.

    Args:
        n: The number of tokens.
        heads: The number of heads of each layer.
        budget: The most bytes for the links, and for the maps. There is at least one link for each token.
    """

    def __init__(self, n: int, heads: list[int], budget: int) -> None:
        import numpy as np

        total = sum(heads)
        links = min(MAX_LINKS, n, max(1, budget // max(1, total * n * LINK_BYTES)))
        side = min(n, max(1, int((budget / max(1, total)) ** 0.5)))
        self.heads, self.block = heads, -(-n // side)
        self.targets = np.zeros((total, n, links), np.uint16)
        self.weights = np.zeros((total, n, links), np.uint16)
        side = -(-n // self.block)
        self._sums = np.zeros((total, side, side), np.float32)
        self._n = n

    def add(self, layer: int, start: int, weights: Floats) -> None:
        """Add the weights of successive tokens in a layer: (tokens, heads, n). The array is overwritten."""
        import numpy as np

        first, n_heads, rows = sum(self.heads[:layer]), self.heads[layer], len(weights)
        end = start + rows
        weights = np.ascontiguousarray(weights[:, :, :end])
        by_column = np.add.reduceat(weights, np.arange(0, end, self.block), axis=2)
        for row in range(rows):
            self._sums[first : first + n_heads, (start + row) // self.block, : by_column.shape[2]] += by_column[row]
        across, heads = np.arange(rows)[:, None], np.arange(n_heads)[None, :]
        for link in range(self.targets.shape[2]):
            best = weights.argmax(axis=2)
            self.targets[first : first + n_heads, start:end, link] = best.T
            values = np.maximum(weights[across, heads, best], 0)
            self.weights[first : first + n_heads, start:end, link] = np.rint(values.T * np.float32(WHOLE))
            weights[across, heads, best] = -1

    def maps(self) -> NDArray[np.uint8]:
        """The maps of all heads: (heads of all layers, side, side), u8.

        Cell (i, j) is 255 sqrt(w), rounded; w is the weight that a token of block i gives to the tokens of block j
        together, on average.
        """
        import numpy as np

        side = self._sums.shape[1]
        counts = np.minimum(self.block, self._n - self.block * np.arange(side)).astype(np.float32)
        mean = np.minimum(self._sums / counts[:, None], 1)
        cells: NDArray[np.uint8] = np.rint(255 * np.sqrt(mean)).astype(np.uint8)
        return cells
