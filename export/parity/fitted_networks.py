"""Suspects in the biases inside a feed-forward network, with numbers fitted to the capture.

The network can be an expert. As in `fitted`, `causes` computes the stage with each correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LayerConfig
from llamac.export.equations import ACTIVATIONS
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect, with_changed
from llamac.export.parity.fitting import Work, with_fitted
from llamac.export.parity.tensor_differences import listed
from llamac.export.products import linear

Array = NDArray[np.float64]

PASSES = 40
DAMPING, SETTLED = 1e-2, 0.999
STARTS, FAR, SOLVED_ERROR = 8, 1.5, 1e-4
LEAST_SHARE = 1e-3  # of the mean effect: a number that has less hardly moves
STEP = 1e-6
EQUATIONS = 8  # for each number of a bias: more of the output's columns are not needed
MOST_STEPS = 1500  # of conjugate gradients
FIRST_STEPS, PROMISING = 100, 0.5  # after these steps, at most this share of the squared error may be left
SOLVED = 1e-12  # of the squared error may be left
TINY = 1e-30
SAME_FACTOR = 1e-3  # a smaller change of a factor is none


def is_known(checkpoint: Checkpoint, record: LayerConfig) -> bool:
    """Whether `Network` computes the networks of a layer."""
    return checkpoint.config.activation in ACTIVATIONS and not (record.sub_norms or checkpoint.config.rounds_inputs)


class Network:
    """A feed-forward network, or an expert, and some rows that it reads.

    Attributes:
        name: The start of its tensors' names, such as "layers.1.ffn".
        down: Its last matrix, (dim, ffn_dim).
        parts: Its matrices before that: "up", and "gate" if it has one.
    """

    def __init__(
        self, checkpoint: Checkpoint, record: LayerConfig, name: str, h: Array, before: Array | float = 1.0
    ) -> None:
        """h (n, dim): the rows. before (n, 1): what multiplies the products of the first matrices, as in Llama 4."""
        self.name, self._before, self._record = name, before, record
        self._activate: Callable[[Array], Array] = ACTIVATIONS[checkpoint.config.activation]
        is_plain = record.ffn == "plain" or bool(record.plain_experts)
        self.parts = ("up",) if is_plain else ("up", "gate")
        tensors = checkpoint.tensors
        self._biases = {part: tensors.get(f"{name}_{part}.bias") for part in (*self.parts, "down")}
        self._products: dict[str, Array] = {
            part: before * linear(h, tensors[f"{name}_{part}.weight"], self._biases[part]) for part in self.parts
        }
        self.down: Array = tensors[f"{name}_down.weight"].array().astype(np.float64)

    def hidden(self, part: str = "", change: Array | float = 0.0) -> Array:
        """What `down` multiplies, (n, ffn_dim), with a change of a part's bias."""
        rows = {one: x + (self._before * change if one == part else 0.0) for one, x in self._products.items()}
        if "gate" not in rows:
            return self._activate(rows["up"])
        up, gate = rows["up"], rows["gate"]
        if limit := self._record.activation_limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        hidden: Array = self._activate(gate) * (up + self._record.up_offset)
        return hidden

    def bias(self, part: str) -> Array:
        """The bias of a part; zeros if it has none."""
        found = self._biases[part]
        width = len(self.down) if part == "down" else self.down.shape[1]
        return np.zeros(width) if found is None else found.array().astype(np.float64)

    def output(self) -> Array:
        """The network's output, (n, dim)."""
        rows: Array = self.hidden() @ self.down.T + self.bias("down")
        return rows


def biases_of_network(
    checkpoint: Checkpoint, reference: Capture, layer: int, not_searched: list[str]
) -> Iterator[Suspect]:
    """The bias of up, or of gate, with which the network's output agrees."""
    record = checkpoint.config.layers[layer]
    if record.ffn not in ("plain", "gated") or not is_known(checkpoint, record):
        return
    h, expected = (reference.stages[stage, layer].astype(np.float64) for stage in ("ffn_norm", "ffn"))
    network = Network(checkpoint, record, f"layers.{layer}.ffn", h)
    yield from _factors(checkpoint, network, expected)
    yield from fitted_biases(checkpoint, network, expected, not_searched)


def _factors(checkpoint: Checkpoint, network: Network, expected: Array) -> Iterator[Suspect]:
    """Factors of the hidden numbers, each the same at all positions, with which the network's output agrees."""
    hidden = network.hidden()
    error = expected - network.bias("down") - hidden @ network.down.T
    change = _least_squares(hidden, network.down, error, 0.0, Work())
    wrong = np.abs(change) > SAME_FACTOR
    if wrong.any() and np.count_nonzero(wrong) <= len(wrong) // 2:  # a transposed matrix changes all
        what = f"rows of {network.name}_up.weight, or columns of {network.name}_down.weight,"
        text = f"{what} are off by factors of their own ({np.count_nonzero(wrong)} of {len(wrong)}: "
        text += f"{listed(np.flatnonzero(wrong).tolist())})"
        columns = lambda down: down * (1 + np.where(wrong, change, 0.0))  # noqa: E731
        yield Suspect(text, with_changed(checkpoint, f"{network.name}_down.weight", columns))


def fitted_biases(
    checkpoint: Checkpoint, network: Network, expected: Array, not_searched: list[str]
) -> Iterator[Suspect]:
    """The bias of up, or of gate, with which a network has the expected output."""
    down, target = network.down, expected - network.bias("down")
    count = min(len(down), -(-EQUATIONS * down.shape[1] // len(target)))
    columns = np.linspace(0, len(down) - 1, count).astype(int)
    down, target = down[columns], target[:, columns]
    for part in network.parts:
        own, name = network.bias(part), f"{network.name}_{part}"
        hidden = lambda change, part=part: network.hidden(part, change)  # noqa: E731
        for start in (np.zeros_like(own), *([-own] if own.any() else [])):  # from the file's bias, and from none
            work = Work()
            change = _fit_bias(hidden, down, target, start, work)
            if work.is_spent and (text := f"a bias of {name}") not in not_searched:
                not_searched.append(text)
            if change is not None:
                yield with_fitted(checkpoint, {f"{name}.bias": own + change})


def _fit_bias(hidden: Callable[[Array], Array], down: Array, target: Array, start: Array, work: Work) -> Array | None:
    """What to add to a bias, so that the hidden numbers times `down` give the target; None if no bias explains it.

    Activations are not monotonic, so a few numbers can end in a wrong minimum, far from the start. They begin again.
    """
    bias = start
    error = target - hidden(bias) @ down.T
    slopes = (hidden(bias + STEP) - hidden(bias - STEP)) / (2 * STEP)
    step = _least_squares(slopes, down, error, DAMPING, work, FIRST_STEPS)
    if work.is_spent or ((error - (slopes * step) @ down.T) ** 2).sum() > PROMISING * (error * error).sum():
        return None
    for _ in range(STARTS):
        bias, is_solved = _descend(hidden, down, target, bias, work)
        sizes = np.abs(bias - start)
        far = sizes > FAR * np.quantile(sizes, 0.9)
        if is_solved or work.is_spent or not far.any():
            break
        bias = np.where(far, start, bias)
    return bias


def _descend(
    hidden: Callable[[Array], Array], down: Array, target: Array, bias: Array, work: Work
) -> tuple[Array, bool]:
    """A minimum of the squared error (Levenberg and Marquardt), and whether the error vanishes there.

    It ends before the minimum if the work is spent.
    """
    damping = DAMPING
    error = target - hidden(bias) @ down.T
    for _ in range(PASSES):
        slopes = (hidden(bias + STEP) - hidden(bias - STEP)) / (2 * STEP)
        step = _least_squares(slopes, down, error, damping, work)
        left = target - hidden(bias + step) @ down.T
        before, now = float((error * error).sum()), float((left * left).sum())
        if now >= before:
            damping *= 4
            if work.is_spent:
                break
            continue
        bias, error, damping = bias + step, left, damping / 5
        if now > SETTLED * before or work.is_spent:
            break
    return bias, float(np.abs(error).max()) <= SOLVED_ERROR * float(np.abs(target).max())


def _least_squares(
    slopes: Array, down: Array, error: Array, damping: float, work: Work, most: int = MOST_STEPS
) -> Array:
    """The x for which (slopes * x) @ down.T is nearest to the error, by conjugate gradients with scaled columns.

    damping: Times the squared length of each column, it keeps x small.
    most: Steps.
    """
    squares = (slopes**2).sum(axis=0) * (down**2).sum(axis=0)
    scales = np.sqrt(np.maximum(squares, max(LEAST_SHARE * squares.mean(), TINY)))
    x, residual = np.zeros(slopes.shape[1]), error.copy()
    gradient = (slopes * (residual @ down)).sum(axis=0) / scales
    direction, square = gradient.copy(), float(gradient @ gradient)
    first = square
    for _ in range(min(4 * len(x), most)):
        if square <= SOLVED * first or not work.allows(2 * len(slopes) * down.size):
            break
        moved = (slopes * (direction / scales)) @ down.T
        length = square / max(float((moved * moved).sum() + damping * (direction @ direction)), TINY)
        x, residual = x + length * direction, residual - length * moved
        gradient = (slopes * (residual @ down)).sum(axis=0) / scales - damping * x
        square, before = float(gradient @ gradient), square
        direction = gradient + square / before * direction
    solved: Array = x / scales
    return solved
