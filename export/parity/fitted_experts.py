"""Suspects in the experts of a layer and their router, with corrections computed from the capture.

The output of a row is the sum of its experts' outputs, each times its weight. Least squares find the weights in the
reference's output, which show the order of the experts, and which of them the reference uses. As in `fitted`, `causes`
computes the stage with each correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.equations import chosen_experts
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect, swapped, transposed, with_changed, with_record
from llamac.export.parity.fitted_networks import Network, fitted_biases, is_known
from llamac.export.parity.fitting import least_squares, with_fitted
from llamac.export.parity.observed import of_one_expert, router_weights
from llamac.export.parity.replay import replay
from llamac.export.parity.tensor_differences import listed

Array = NDArray[np.float64]

# A row does not use an expert whose weight is below this.
UNUSED = 1e-4
MOST_EXPERTS = 3  # that are tried one by one
LEAST_ROWS = 3  # that show a bias: any change of a single row looks like one
MOST_GROUPS = 16
# The choice's bias moves by this share of the spread of the scores, at most this many times.
PACE, MOST_MOVES = 0.02, 3000


def fitted_experts(
    checkpoint: Checkpoint, reference: Capture, layer: int, not_searched: list[str]
) -> list[Iterator[Suspect]]:
    """The suspects of the stage "ffn" of a layer with experts, by kind. Arguments as for `fitted.fitted`."""
    record = checkpoint.config.layers[layer]
    is_own = record.expert_norms or checkpoint.config.expert_dim  # the experts do not read and return the stages
    if record.ffn != "experts" or is_own or not is_known(checkpoint, record):
        return []
    experts = _Experts(checkpoint, reference, layer)
    return [experts.one(), experts.biases_of_one(not_searched), experts.choice(), experts.order()]


class _Experts:
    """The experts of a layer, and the rows that they read."""

    def __init__(self, checkpoint: Checkpoint, reference: Capture, layer: int) -> None:
        self._checkpoint, self._reference, self._layer = checkpoint, reference, layer
        self._record = checkpoint.config.layers[layer]
        self._h = reference.stages["ffn_norm", layer].astype(np.float64)
        self._expected = reference.stages["ffn", layer].astype(np.float64)

    def _network(self, expert: int, rows: NDArray[np.intp] | slice, factor: Array) -> tuple[Network, Array | float]:
        """An expert for some rows, and what multiplies its output. factor (rows, 1): the expert's weights."""
        is_first = bool(self._record.expert_weights_first)
        name = f"layers.{self._layer}.experts.{expert}.ffn"
        before, after = (factor, 1.0) if is_first else (1.0, factor)
        return Network(self._checkpoint, self._record, name, self._h[rows], before), after

    def one(self) -> Iterator[Suspect]:
        """Faults of an expert that alone differs."""
        for expert in of_one_expert(self._checkpoint, self._reference, self._layer)[:MOST_EXPERTS]:
            start = f"layers.{self._layer}.experts.{expert}.ffn"
            for part in ("gate", "up", "down"):
                name = f"{start}_{part}.weight"
                yield Suspect(f"{name} is transposed", with_changed(self._checkpoint, name, transposed))
            if f"{start}_gate.weight" in self._checkpoint.tensors:
                text = f"{start}_gate and {start}_up are exchanged"
                yield Suspect(text, swapped(self._checkpoint, f"{start}_gate", f"{start}_up"))

    def biases_of_one(self, not_searched: list[str]) -> Iterator[Suspect]:
        """The bias of an expert that alone differs with which the output agrees."""
        weights = router_weights(self._checkpoint, self._reference, self._layer)
        for expert in of_one_expert(self._checkpoint, self._reference, self._layer)[:MOST_EXPERTS]:
            rows = np.flatnonzero(weights[:, expert])
            if len(rows) < LEAST_ROWS:
                continue
            network, after = self._network(expert, rows, weights[rows, expert, None])
            missing = self._expected[rows] - replay(self._checkpoint, self._reference, ("ffn", self._layer))[rows]
            squares = np.sum(np.ones((len(rows), 1)) * after**2)
            of_down = network.bias("down") + (after * missing).sum(axis=0) / squares
            yield with_fitted(self._checkpoint, {f"{network.name}_down.bias": of_down})
            yield from fitted_biases(self._checkpoint, network, network.output() + missing / after, not_searched)

    def choice(self) -> Iterator[Suspect]:
        """The groups, or the bias, with which the router chooses the experts that the reference uses."""
        record, layer = self._record, self._layer
        parts = self._weights_of_output()
        if parts is None:
            return
        used = np.abs(parts[1]) > UNUSED
        logits = replay(self._checkpoint, self._reference, ("ffn_router", layer))
        if (used.sum(axis=1) != record.n_experts_used).any():
            return
        name = f"layers.{layer}.ffn_router_choice.bias"
        found = self._checkpoint.tensors.get(name) if record.router_choice_bias else None
        own = np.zeros(record.n_experts) if found is None else found.array().astype(np.float64)

        def is_chosen(bias: Array, groups: tuple[int, int]) -> NDArray[np.bool_]:
            return chosen_experts(logits, record.n_experts_used, router=record.router, choice_bias=bias, groups=groups)

        own_groups = record.n_expert_groups, record.n_expert_groups_used
        if (is_chosen(own, own_groups) == used).all():
            return
        for count in range(2, min(MOST_GROUPS, record.n_experts // 2) + 1):
            for groups in ((count, chosen) for chosen in range(1, count)) if record.n_experts % count == 0 else ():
                if groups != own_groups and (is_chosen(own, groups) == used).all():
                    text = f"layer {layer} chooses experts from {own_groups[1]} of {own_groups[0]} groups; "
                    text = text if own_groups[0] else f"layer {layer} chooses from all experts; "
                    text += f"it should choose from {groups[1]} of {groups[0]} groups"
                    values = {"n_expert_groups": groups[0], "n_expert_groups_used": groups[1]}
                    yield Suspect(text, with_record(self._checkpoint, layer, **values))
        bias, pace = own.copy(), PACE * float(np.ptp(own) or 1.0)
        for _ in range(MOST_MOVES):
            wrong = used.astype(np.float64) - is_chosen(bias, own_groups)
            if not wrong.any():
                break
            bias += pace * np.sign(wrong.sum(axis=0))
        else:
            return
        text = f"{name} is {'wrong' if own.any() else 'missing'}: the reference uses other experts, and another bias "
        text += "chooses them"
        tensors = self._checkpoint.tensors | {name: LazyTensor.of(bias.astype(np.float32))}
        changed = with_record(self._checkpoint, layer, router_choice_bias=1)
        yield Suspect(text, replace(changed, tensors=tensors))

    def _weights_of_output(self) -> tuple[Array, Array] | None:
        """How much of each expert's output the file's output has, and the reference's, (n, experts) each.

        None if the expert's weights are not factors of their outputs, or if there are too many experts.
        """
        record, checkpoint = self._record, self._checkpoint
        if record.expert_weights_first or record.expert_factors or record.n_experts >= checkpoint.config.dim:
            return None
        every, ones = slice(None), np.ones((len(self._h), 1))
        outputs = np.stack(
            [self._network(expert, every, ones)[0].output() for expert in range(record.n_experts)], axis=2
        )
        own = replay(checkpoint, self._reference, ("ffn", self._layer))
        own_weights = router_weights(checkpoint, self._reference, self._layer)
        shared = own - np.einsum("ndx,nx->nd", outputs, own_weights, optimize=True)
        weights = [least_squares(*row) for row in zip(outputs, self._expected - shared, strict=True)]
        return own_weights, np.stack(weights)

    def order(self) -> Iterator[Suspect]:
        """The experts in the order in which the reference's output is their sum with the router's weights."""
        order = self._order_of_inputs() if self._record.expert_weights_first else self._order_of_outputs()
        if order is None or len(set(order.values())) < len(order):
            return
        n_experts, layer = self._record.n_experts, self._layer
        free = [expert for expert in range(n_experts) if expert not in order.values()]
        rest = [expert for expert in range(n_experts) if expert not in order]
        kept = [expert for expert in rest if expert in free]  # where nothing is known, an expert keeps its place
        moved = zip((i for i in rest if i not in kept), (i for i in free if i not in kept), strict=True)
        order |= {expert: expert for expert in kept} | dict(moved)
        tensors = dict(self._checkpoint.tensors)
        for name in self._checkpoint.tensors:
            start, _, end = name.partition(".experts.")
            if start == f"layers.{layer}" and end:
                expert, _, part = end.partition(".")
                tensors[name] = self._checkpoint.tensors[f"{start}.experts.{order[int(expert)]}.{part}"]
        places = [order[expert] for expert in range(n_experts)]
        text = f"the experts of layer {layer} are not in the order of the router's rows: "
        text += f"rows 0, 1, ... belong to the file's experts {listed(places)}"
        if rest:
            text += f" (the prompt does not use {listed(rest)})"
        yield Suspect(text, replace(self._checkpoint, tensors=tensors))

    def _order_of_outputs(self) -> dict[int, int] | None:
        """The file's expert of each row of the router that the prompt uses."""
        weights = self._weights_of_output()
        if weights is None:
            return None
        found, expected = weights
        used = np.flatnonzero(np.abs(found).max(axis=0) > UNUSED)
        return {int(i): int(np.abs(expected - found[:, [i]]).max(axis=0).argmin()) for i in used}

    def _order_of_inputs(self) -> dict[int, int] | None:
        """The same if the weights multiply the experts' inputs: what each expert would add in each row's place."""
        record = self._record
        weights = router_weights(self._checkpoint, self._reference, self._layer)
        if record.n_experts_used * record.n_experts >= self._checkpoint.config.dim:
            return None
        used = [int(i) for i in np.flatnonzero(weights.max(axis=0) > UNUSED)]
        outputs = {
            i: np.stack(
                [self._network(e, slice(None), weights[:, [i]])[0].output() for e in range(record.n_experts)], axis=2
            )
            for i in used
        }
        own = replay(self._checkpoint, self._reference, ("ffn", self._layer))
        sums = np.sum([outputs[i][..., i] * (weights[:, [i]] > 0) for i in used], axis=0)
        target = self._expected - (own - sums)
        shares: dict[int, list[Array]] = {i: [] for i in used}
        for row in range(len(target)):
            of_row = [i for i in used if weights[row, i] > 0]
            found = least_squares(np.concatenate([outputs[i][row] for i in of_row], axis=1), target[row])
            for i, share in zip(of_row, np.split(found, len(of_row)), strict=True):
                shares[i].append(share)
        return {i: int(np.mean(rows, axis=0).argmax()) for i, rows in shares.items() if rows}
