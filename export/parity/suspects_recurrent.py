"""What can be wrong with a recurrent layer of a model file: its convolution, and its vectors and inputs.

As in `suspects`, no correction needs numbers of the reference; `fitted_states` has those that do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from llamac.export.checkpoint import Checkpoint, LazyTensor
from llamac.export.parity.changes import Suspect, configured, swapped, with_changed

# The vectors that have a number for each head.
VECTORS = ("mamba_skip.weight", "mamba_step.bias", "mamba_decay.weight", "delta_dt.bias", "delta_decay.weight")


def of_states(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Faults of a layer that mixes positions with a convolution or a state."""
    record, prefix = checkpoint.config.layers[layer], f"layers.{layer}"
    for name in (f"{prefix}.{part}.weight" for part in ("delta_conv", "mamba_conv", "conv_taps")):
        if name in checkpoint.tensors:
            turned = lambda taps: taps.reshape(record.conv_width, -1)[::-1].reshape(taps.shape)  # noqa: E731
            yield Suspect(f"the taps of {name} are in reverse order", with_changed(checkpoint, name, turned))
            by_tap = lambda taps: taps.reshape(-1, record.conv_width).T.reshape(taps.shape)  # noqa: E731
            text = f"the taps of {name} are stored channel by channel; they should be stored tap by tap"
            yield Suspect(text, with_changed(checkpoint, name, by_tap))
    for name in (f"{prefix}.{part}_decay.weight" for part in ("delta", "mamba")):
        if name not in checkpoint.tensors:
            continue
        text = f"{name} is a logarithm, as in the original; it should be minus its exponential"
        yield Suspect(text, with_changed(checkpoint, name, lambda logarithm: -np.exp(logarithm)))
        if (checkpoint.tensors[name].array() > 0).all():
            text = f"{name} is the exponential of the original's logarithm; it should be minus that"
            yield Suspect(text, with_changed(checkpoint, name, np.negative))
    yield from _of_exchanged_vectors(checkpoint, layer)
    if f"{prefix}.delta_beta.weight" in checkpoint.tensors:
        text = f"delta_beta and delta_a of layer {layer} are exchanged"
        yield Suspect(text, swapped(checkpoint, f"{prefix}.delta_beta", f"{prefix}.delta_a"))
        doubled = int(not checkpoint.config.state_beta_doubled)
        text = f"state_beta_doubled is {1 - doubled}; it should be {doubled}"
        yield Suspect(text, configured(checkpoint, state_beta_doubled=doubled))
    yield from _of_exchanged_parts(checkpoint, layer)
    name = f"{prefix}.conv_in.weight"
    if name in checkpoint.tensors:
        exchange = lambda rows: rows.reshape(3, -1, rows.shape[1])[[1, 0, 2]].reshape(rows.shape)  # noqa: E731
        yield Suspect(f"the parts b and c of {name} are exchanged", with_changed(checkpoint, name, exchange))


def _of_exchanged_parts(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """The parts of equal size of a recurrent layer's input exchanged: q and k, or B and C."""
    record = checkpoint.config.layers[layer]
    keys, values = record.state_key_heads * record.state_key_dim, record.state_heads * record.state_value_dim
    for module, conv, what, first in (
        ("delta_qkv", "delta_conv", "q and k", 0),
        ("mamba_xbc", "mamba_conv", "B and C", values),
    ):
        name = f"layers.{layer}.{module}.weight"
        if name not in checkpoint.tensors:
            continue
        order = np.arange(2 * keys + values)
        order[first : first + 2 * keys] = np.roll(order[first : first + 2 * keys], keys)
        rows_of = lambda rows, order=order: rows[order]  # noqa: E731
        changed = with_changed(checkpoint, name, rows_of)
        yield Suspect(f"the parts {what} of {name} are exchanged", changed)
        names = (f"layers.{layer}.{conv}.weight", f"layers.{layer}.{conv}.bias")
        channels = lambda x, order=order: x.reshape(-1, len(order))[:, order].reshape(x.shape)  # noqa: E731
        text = f"the parts {what} of {name} and its convolution are exchanged"
        yield Suspect(text, with_changed(changed, names, channels))


def _of_exchanged_vectors(checkpoint: Checkpoint, layer: int) -> Iterator[Suspect]:
    """Two vectors of a recurrent layer in each other's place. A decay is minus the exponential of the original's."""
    tensors, prefix = checkpoint.tensors, f"layers.{layer}"
    vectors = [name for part in VECTORS if (name := f"{prefix}.{part}") in tensors]
    stored = {name: tensors[name].array() for name in vectors}
    with np.errstate(all="ignore"):
        original = {name: np.log(-x) if name.endswith("decay.weight") else x for name, x in stored.items()}
        for i, one in enumerate(vectors):
            for other in vectors[i + 1 :]:
                exchanged = {one: original[other], other: original[one]}
                if not all(np.isfinite(numbers).all() for numbers in exchanged.values()):
                    continue
                changed = {
                    name: LazyTensor.of((-np.exp(x) if name.endswith("decay.weight") else x).astype(np.float32))
                    for name, x in exchanged.items()
                }
                yield Suspect(f"{one} and {other} are exchanged", replace(checkpoint, tensors=tensors | changed))
