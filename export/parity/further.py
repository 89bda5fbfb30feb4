"""Looks for faults besides the cause of the first difference, and for the layers in which each fault repeats."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from llamac.export.checkpoint import Checkpoint
from llamac.export.parity.capture import Capture
from llamac.export.parity.causes import CANNOT_REPLAY, Explained, Search, Verdict, find_causes
from llamac.export.parity.compare import EXACT, Difference, Tolerance
from llamac.export.parity.replay import Array, difference_of, part_of, replay_part
from llamac.export.parity.stages import OF_CACHE, OUTSIDE, Key, keys_in_order
from llamac.export.parity.tensor_differences import ROUNDED

Found = tuple[tuple[Difference, Verdict], ...]

MOST_FURTHER = 3  # faults beside the first one
MOST_FITTED = 8  # layers in which a fault is looked for that only a fit finds, since fits take long
MOST_FILES = 4  # that differ in which of several corrections they have
# What a cause says of a layer by its number, and what it counts of the numbers of a stage.
NUMBER_OF_LAYER = re.compile(r"\b(layers?[ .])(\d+)")
COUNTED = re.compile(r" \(\d+ of \d+: [^)]*\)")


@dataclass
class _Fault:
    """A fault that is explained.

    Attributes:
        explained: Where it showed first.
        layers: The layers in which it has been found.
        n_fitted: The layers in which it has been looked for with a fit.
    """

    explained: Explained
    layers: list[int]
    n_fitted: int = 0
    sentences: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        difference, verdict = self.explained.difference, self.explained.verdict
        texts = (text for cause in verdict.causes for text in cause.sentence.split("; and "))
        self.sentences = frozenset(_without_numbers(text, difference.layer) for text in texts)

    def verdict(self, keys: list[Key]) -> Verdict:
        """The verdict with the layers of the fault. keys: all stages of the model."""
        if len(self.layers) < 2:
            return self.explained.verdict
        layers = tuple(sorted(self.layers))
        having = tuple(layer for stage, layer in keys if stage == self.explained.difference.stage)
        return replace(self.explained.verdict, layers=layers, is_everywhere=layers == having)


def _without_numbers(sentence: str, layer: int) -> str:
    """A sentence about a layer, reworded for another layer."""
    relative = lambda found: f"{found[1]}{int(found[2]) - layer:+d}"  # noqa: E731
    return NUMBER_OF_LAYER.sub(relative, COUNTED.sub("", sentence))


@np.errstate(all="ignore")
def find_further(
    checkpoint: Checkpoint, reference: Capture, first: Explained, original: Checkpoint | None = None
) -> tuple[Verdict, Found]:
    """Look for the layers that have the fault of the first difference, too, and for further faults: in the file that
    the corrections so far leave, each part from the reference's inputs.

    A fault of the config shows in many parts, and its correction corrects them all. If a correction is not known,
    the rest of the part is left out, and so is the same stage of others. So is what nothing explains.

    Args:
        checkpoint: As in `find_causes`, like `reference` and `original`.
        first: The first difference.

    Returns:
        The verdict on the first difference, and the further differences with theirs.
    """
    tolerance, verdict = first.difference.tolerance, first.verdict
    if tolerance.of_median or verdict.fault != "file" or not verdict.causes:
        return verdict, ()
    search = _Further(checkpoint, reference, first, original)
    keys = keys_in_order(checkpoint.config)
    for key in keys:
        search.look_at(key)
    found = tuple((fault.explained.difference, fault.verdict(keys)) for fault in search.faults[1:])
    return search.faults[0].verdict(keys), found


class _Further:
    """The search for further faults, from stage to stage.

    Attributes:
        faults: The faults so far.
    """

    def __init__(
        self, checkpoint: Checkpoint, reference: Capture, first: Explained, original: Checkpoint | None
    ) -> None:
        self.faults = [_Fault(first, [first.difference.layer])]
        self._reference, self._original = reference, original
        self._limit = Tolerance(max(first.difference.tolerance.limit, EXACT))
        self._named = {cause.sentence for cause in first.verdict.causes}
        self._files = first.corrected or (checkpoint,)
        self._done: set[int] = set()
        self._replayed: list[dict[Key, Array]] = []
        if not first.corrected:
            self._done.add(part_of(checkpoint, (first.difference.stage, first.difference.layer)))

    def look_at(self, key: Key) -> None:
        """Look for faults of a stage. The stages come in their order."""
        part = part_of(self._files[0], key)
        if part in self._done or key[0] in OF_CACHE or key not in self._reference.stages:
            return
        difference = self._difference(key, part)
        if difference is None:
            return
        explained = self._again(difference) or self._other(difference)
        if explained is None or not explained.corrected:
            self._done.add(part)  # later stages of the part follow from this one
        else:
            own = self._files[0]
            files = [_transferred(own, one, file) for file in self._files for one in explained.corrected]
            self._files, self._replayed = tuple(files[:MOST_FILES]), []

    def _difference(self, key: Key, part: int) -> Difference | None:
        """How the replayed stage differs; None if it agrees in any of the files, or cannot be computed."""
        if not self._replayed or key not in self._replayed[0]:
            try:
                self._replayed = [replay_part(file, self._reference, key) for file in self._files]
            except CANNOT_REPLAY:  # the correction needs tensors in each layer, such as norms, and has one layer's
                self._done.add(part)
                return None
        differences = [
            difference_of(file, self._reference, key, stages[key], self._limit)
            for file, stages in zip(self._files, self._replayed, strict=True)
            if key in stages
        ]
        return None if any(difference.is_within for difference in differences) else differences[0]

    def _again(self, difference: Difference) -> Explained | None:
        """The fault of another layer that explains a difference."""
        stage, layer = difference.stage, difference.layer
        for fault in self.faults:
            if fault.explained.difference.stage != stage or stage in OUTSIDE or layer in fault.layers:
                continue
            kind = "listed" if fault.explained.kind == "pair" else fault.explained.kind
            fault.n_fitted += kind in ("fitted", "factor")
            if fault.n_fitted > MOST_FITTED:
                continue
            sentences = fault.sentences
            is_wanted = lambda text, all=sentences: _without_numbers(text, layer) in all  # noqa: E731
            file, key = self._files[0], (stage, layer)
            search = Search(
                file, self._reference, key, self._limit, difference.relative, self._original, is_wanted=is_wanted
            )
            if causes := search.causes(kind):
                fault.layers.append(layer)
                self._named |= {cause.sentence for cause in causes}
                corrected = [search.corrected[one.sentence] for one in causes if one.sentence in search.corrected]
                return Explained(difference, Verdict("file", difference.relative, tuple(causes)), tuple(corrected[:1]))
        return None

    def _other(self, difference: Difference) -> Explained | None:
        """Another fault, which explains a difference."""
        first = self.faults[0].explained
        if len(self.faults) > MOST_FURTHER or (not first.corrected and difference.stage == first.difference.stage):
            return None
        explained = find_causes(self._files[0], self._reference, self._reference, difference, self._original)
        sentences = {cause.sentence for cause in explained.verdict.causes}
        is_named = any(one in other for one in sentences for other in self._named)  # also as one of a pair
        if not sentences or is_named or all(ROUNDED in one for one in (*sentences, *self._named)):
            return None  # the last: all tensors of the file are rounded
        self._named |= sentences
        self.faults.append(_Fault(explained, [difference.layer]))
        return explained


def _transferred(own: Checkpoint, corrected: Checkpoint, file: Checkpoint) -> Checkpoint:
    """A file with the correction that made one checkpoint of another."""
    new = {name: tensor for name, tensor in corrected.tensors.items() if tensor is not own.tensors.get(name)}
    kept = {name: x for name, x in file.tensors.items() if name in corrected.tensors or name not in own.tensors}
    layers = [
        replace(record, **_changes(before, after))
        for record, before, after in zip(file.config.layers, own.config.layers, corrected.config.layers, strict=True)
    ]
    config = replace(file.config, **{**_changes(own.config, corrected.config), "layers": tuple(layers)})
    metadata = corrected.metadata if corrected.metadata != own.metadata else file.metadata
    return replace(file, config=config, tensors=kept | new, metadata=metadata)


def _changes(own: Any, corrected: Any) -> dict[str, Any]:
    """The fields that differ."""
    names = [part.name for part in fields(own)]
    return {name: getattr(corrected, name) for name in names if getattr(own, name) != getattr(corrected, name)}
