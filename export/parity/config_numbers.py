"""Suspects among the numbers of a config and the factors of tensors, with the values that fit the capture.

The value is the one unknown of a stage that has thousands of numbers, so a number that is right finds no other value
with which the stage agrees. `causes` computes the stage with the value that was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llamac.errors import LlamacError
from llamac.export.checkpoint import Checkpoint
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import MATRICES, Suspect, configured, is_matrix, with_record
from llamac.export.parity.compare import EXACT, Tolerance
from llamac.export.parity.replay import replay, replayed_difference
from llamac.export.parity.stages import Key, keys_in_order

Array = NDArray[np.float64]

PASSES, STEPS_TRIED = 12, 6  # each step half as long as the one before
STEP = 1e-4  # by which a number moves to measure its effect
ENOUGH = 0.999  # of the squared error may be left after a pass, or the fit is at its end
CHANGED = 1e-4  # a smaller relative change is none


@dataclass(frozen=True)
class _Number:
    """A number of the config.

    Attributes:
        name: The field.
        stages: The stages that it decides.
        of_layer: Whether it is a field of the layer's record.
        kind: "scale": of any sign, changed by factors; "positive": fitted as its logarithm; "cap": 0 is none, so the
            inverse of its square is fitted; "offset": changed by sums.
        start: Where the fit begins if the number is 0.
    """

    name: str
    stages: tuple[str, ...]
    of_layer: bool
    kind: str
    start: float = 0.0


OF_NORMS = ("attn_norm", "ffn_norm", "output_norm", "q", "k", "attn_mix")
NUMBERS = (
    _Number("embedding_scale", ("embedding",), of_layer=False, kind="scale"),
    _Number("norm_eps", OF_NORMS, of_layer=False, kind="positive"),
    _Number("state_norm_eps", ("attn_mix",), of_layer=False, kind="positive"),
    _Number("latent_norm_eps", ("q", "k", "v"), of_layer=True, kind="positive"),
    _Number("attention_scale", ("weights",), of_layer=False, kind="scale"),
    _Number("attention_soft_cap", ("weights",), of_layer=False, kind="cap"),
    _Number("query_beta", ("weights",), of_layer=True, kind="offset"),
    _Number("expert_scale", ("ffn",), of_layer=True, kind="scale"),
    _Number("up_offset", ("ffn",), of_layer=True, kind="offset"),
    _Number("activation_limit", ("ffn",), of_layer=True, kind="positive", start=7.0),
    _Number("residual_scale", ("ffn_norm", "block"), of_layer=False, kind="scale"),
    _Number("layer_scale", ("block",), of_layer=True, kind="scale"),
    _Number("logit_scale", ("logits",), of_layer=False, kind="scale"),
    _Number("logit_soft_cap", ("logits",), of_layer=False, kind="cap"),
)


def fitted_numbers(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Yield each number that decides a stage, with the value that fits.

    Args:
        checkpoint: The file.
        reference: The capture, in the engine's form; the stages before `key` agree with it.
        key: The first stage that differs.
    """
    stage, layer = key
    for number in NUMBERS:
        if stage not in number.stages:
            continue
        own = float(getattr(checkpoint.config.layers[layer] if number.of_layer else checkpoint.config, number.name))

        def change(value: float, number: _Number = number) -> Checkpoint:
            if number.of_layer:
                return with_record(checkpoint, layer, **{number.name: value})
            return configured(checkpoint, **{number.name: value})

        value = _fit(change, number, own, reference, key)
        if value is not None and abs(value - own) > CHANGED * max(abs(own), abs(value)):
            if not number.of_layer and not _fits_before(checkpoint, change(value), reference, key, number):
                continue
            where = f" of layer {layer}" if number.of_layer else ""
            text = f"{number.name}{where} is {own:.6g}; the stage agrees with {value:.4g}"
            yield Suspect(text, change(value))


def _fits_before(checkpoint: Checkpoint, changed: Checkpoint, reference: Capture, key: Key, number: _Number) -> bool:
    """Whether earlier stages of the layer, and of the one before it, that agree with the file do so with a change.

    A factor before a norm, for example, looks like another eps, which all norms share.
    """
    keys = keys_in_order(checkpoint.config)
    for stage, layer in keys[: keys.index(key)]:
        if stage not in number.stages or not key[1] - 1 <= layer <= key[1] or (stage, layer) not in reference.stages:
            continue
        left = (replayed_difference(one, reference, (stage, layer), Tolerance(EXACT)) for one in (checkpoint, changed))
        if [difference.is_within for difference in left] == [True, False]:
            return False
    return True


def fitted_factors(checkpoint: Checkpoint, reference: Capture, key: Key) -> Iterator[Suspect]:
    """Yield each matrix of a stage whose numbers are times a factor, with the factor that fits. Arguments as above."""
    stage, layer = key
    tables = {
        "embedding": ("token_embedding.weight", "position_embedding.weight"),
        "weights": ("distance_bias.weight",),
    }
    names = [
        [name for name in checkpoint.tensors if is_matrix(name, layer, module)] for module in MATRICES.get(stage, ())
    ] + [[name] for name in tables.get(stage, ()) if name in checkpoint.tensors]
    for some in names:
        if not some:
            continue

        def change(value: float, some: list[str] = some) -> Checkpoint:
            tensors = {name: checkpoint.tensors[name].times(value) for name in some}
            return replace(checkpoint, tensors=checkpoint.tensors | tensors)

        value = _fit(change, _Number("", (), of_layer=True, kind="scale"), 1.0, reference, key)
        if value and abs(value - 1) > CHANGED:
            what = some[0] if len(some) == 1 else f"{some[0].split('.')[-2]} of layer {layer}'s experts"
            yield Suspect(f"the numbers of {what} are {1 / value:.4g} times as large as they should be", change(value))


def _fit(
    change: Callable[[float], Checkpoint], number: _Number, own: float, reference: Capture, key: Key
) -> float | None:
    """As `_nearest`; None, too, if the model cannot be computed with other values."""
    try:
        return _nearest(change, number, own, reference, key)
    except (LlamacError, KeyError, ValueError, np.linalg.LinAlgError):
        return None


def _nearest(
    change: Callable[[float], Checkpoint], number: _Number, own: float, reference: Capture, key: Key
) -> float | None:
    """The value with which the stage is nearest to the reference's, by the Gauss-Newton method; None if there is none.

    change: The checkpoint with a value.
    """
    to_value, start = _parameter(number, own)
    if start is None:
        return None
    expected = reference.stages[key].astype(np.float64)

    def error(parameter: float) -> Array:
        found = replay(change(to_value(parameter)), reference, key)
        return (expected.reshape(len(expected), -1) - found.reshape(len(found), -1)).reshape(-1)

    parameter, left = start, error(start)
    with np.errstate(all="ignore"):
        for _ in range(PASSES):
            effect = (left - error(parameter + STEP)) / STEP
            if not (size := float(effect @ effect)) > 0:
                return None
            step, before = float(effect @ left) / size, float(left @ left)
            for _ in range(STEPS_TRIED):
                now = error(parameter + step)
                if now @ now < before:
                    break
                step /= 2
            else:
                break
            parameter, left = parameter + step, now
            if left @ left > ENOUGH * before:
                break
    return to_value(parameter)


def _parameter(number: _Number, own: float) -> tuple[Callable[[float], float], float | None]:
    """How a fitted parameter becomes a value, and where the fit begins."""
    if number.kind == "positive":
        start = own or number.start
        return (lambda x: float(np.exp(np.clip(x, -60, 60)))), (float(np.log(start)) if start > 0 else None)
    if number.kind == "cap":  # cap tanh(x / cap) is about x - x^3 / (3 cap^2)
        return (lambda x: x**-0.5 if x > 0 else 0.0), (own**-2 if own else 0.0)
    if number.kind == "scale":
        return (lambda x: own * x), (1.0 if own else None)
    return (lambda x: x), own
