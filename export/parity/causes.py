"""Finds the cause of a difference: corrects one possible fault at a time until the difference vanishes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from llamac.errors import LlamacError
from llamac.export.checkpoint import Checkpoint
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect
from llamac.export.parity.compare import EXACT, Difference, Tolerance
from llamac.export.parity.config_numbers import fitted_factors, fitted_numbers
from llamac.export.parity.fitted import fitted, fitted_together
from llamac.export.parity.fitting import MIN_ROWS
from llamac.export.parity.observed import Cause, extent, in_the_numbers, missing_bias
from llamac.export.parity.replay import Array, difference_of, part_of, replay_part, replayed_difference
from llamac.export.parity.shown import shown
from llamac.export.parity.stages import OF_CACHE, Key, keys_in_order
from llamac.export.parity.suspects import all_of_original, of_original, suspects

# A correction must remove at least this share of the difference.
VANISHES = 0.25
# Corrections are named if their error is at most this many times the smallest one. Errors below the second
# number are alike: the other implementation computes in float32.
WORSE, ALIKE = 10, 1e-6
# The share of a difference that the correction of quantized weights by a fit may leave; of float weights, EXACT may be
# left. The rest of the effect would be another fault's.
OF_FIT = 0.02
MOST = 4  # causes
# Of the corrections that do not suffice, this many with the least error are tried in pairs with all others.
MOST_HALVES = 4
# The error of one part that a float64 pass computes from the reference's inputs is below this if the file is right.
OF_PART = Tolerance(3e-5)
# What replaying a correction that does not fit the model raises.
CANNOT_REPLAY = (LlamacError, ValueError, IndexError, KeyError)


@dataclass(frozen=True)
class Verdict:
    """What is known about a difference.

    Attributes:
        fault: "file": the file's weights or numbers are wrong, because a float64 pass over them, from the reference's
            inputs, does not give the reference's stage. "engine": the engine's arithmetic is wrong, because such a pass
            from the engine's own inputs does not give the engine's stage. "rounding": both do; small differences of
            the stages before have added up.
        error: The relative error of the pass that decided it.
        causes: For faults of the file, explanations that were tested: correcting any of them alone makes the stage
            agree. A pair of faults is one explanation.
        extent: For faults of the file, which heads or numbers of the stage differ; "" if they are many.
        not_searched: If there are no causes, what llamac did not look for to the end, since it costs too much.
        layers: The layers in which the same stage has the same cause, if they are several.
        is_everywhere: Whether these are all layers that have the stage.
    """

    fault: Literal["file", "engine", "rounding"]
    error: float
    causes: tuple[Cause, ...] = ()
    extent: str = ""
    not_searched: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    is_everywhere: bool = False


@dataclass(frozen=True)
class Explained:
    """A difference, what is known about it, and the file without its fault.

    Attributes:
        difference: The difference.
        verdict: What is known about it.
        corrected: The checkpoints that the causes of the verdict correct, as far as they are known.
        kind: The kind of correction that has these causes, of `Search`.
    """

    difference: Difference
    verdict: Verdict
    corrected: tuple[Checkpoint, ...] = ()
    kind: str = ""


@np.errstate(all="ignore")  # damaged weights and wrong corrections give numbers that are not finite
def find_causes(
    checkpoint: Checkpoint,
    engine: Capture,
    reference: Capture,
    first: Difference,
    original: Checkpoint | None = None,
) -> Explained:
    """Explain the first stage that is out of tolerance.

    Args:
        checkpoint: The engine's file.
        engine: What the engine computed.
        reference: The capture, in the engine's form.
        first: The difference.
        original: What the exporter reads from the original now; None if there is no original.
    """
    key = first.stage, first.layer
    base = replayed_difference(checkpoint, reference, key, first.tolerance)
    if base.is_within:
        own = replayed_difference(checkpoint, engine, key, first.tolerance)
        return Explained(first, Verdict("rounding" if own.is_within else "engine", own.relative))
    search = Search(checkpoint, reference, key, first.tolerance, base.relative, original)
    causes = _best(search.of_whole_parts(search.causes()))
    left_out = () if causes else tuple(search.not_searched)
    verdict = Verdict("file", base.relative, causes, extent(checkpoint, reference, key, first.tolerance), left_out)
    known = (search.corrected.get(cause.sentence) for cause in causes)
    return Explained(first, verdict, tuple([one for one in known if one is not None]), search.kind)


class Search:
    """The search for the causes of one difference, whose stage is replayed with one correction after another.

    Attributes:
        corrected: The checkpoints that causes correct, by their sentences.
        not_searched: What the fits have left out for its cost.
        kind: The kind of correction that had causes: "listed", "together", "pair", "fitted", "seen" or "factor".
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        reference: Capture,
        key: Key,
        tolerance: Tolerance,
        effect: float,
        original: Checkpoint | None,
        is_wanted: Callable[[str], bool] = lambda sentence: True,
    ) -> None:
        """Arguments as for `find_causes`.

        effect: The relative error of the replayed stage.
        is_wanted: Whether a sentence is looked for; others are not tried.
        """
        self._checkpoint, self._reference, self._key, self._original = checkpoint, reference, key, original
        self._tolerance = tolerance
        self._limit = replace(tolerance, limit=min(tolerance.limit, VANISHES * effect))
        # a loose tolerance would let wrong fits pass
        self._of_fits = replace(tolerance, limit=min(self._limit.limit, _of_a_fit(effect, tolerance)))
        # with fewer rows, what fits would absorb what another fault has done
        self._can_fit = len(reference.stages[key]) >= MIN_ROWS
        self._is_wanted = is_wanted
        self._seen: list[Checkpoint] = []
        self._halves: list[Suspect] = []
        self.kind = ""
        self.corrected: dict[str, Checkpoint] = {}
        self.not_searched: list[str] = []

    def causes(self, kind: str = "") -> list[Cause]:
        """What explains the difference: the causes of the first kind of correction that has any.

        kind: Only this kind is tried; "": all are.
        """
        known = self._checkpoint, self._reference, self._key
        kinds: list[tuple[str, Callable[[], list[Cause]]]] = [("listed", self._listed)]
        if self._original is not None:
            kinds += [("together", self._together), ("pair", self._pairs)]
        if self._can_fit:
            kinds.append(("fitted", self._shown_or_fitted))
            kinds.append(("seen", lambda: in_the_numbers(*known, self._of_fits)))
            kinds.append(("factor", lambda: self._fitted(fitted_factors(*known), fitted_together(*known))))
        if self._original is None:
            kinds.append(("pair", self._pairs))
        for self.kind, search in kinds:
            if kind not in ("", self.kind):
                continue
            if causes := [cause for cause in search() if self._is_wanted(cause.sentence)]:
                return causes
        return []

    def _listed(self) -> list[Cause]:
        causes = self._missing_bias() if self._can_fit else []
        found, self._halves = self._explaining(self._of_one_part(self._checkpoint), self._limit)
        return causes + found

    def _shown_or_fitted(self) -> list[Cause]:
        known = self._checkpoint, self._reference, self._key
        return self._fitted(shown(*known), fitted_numbers(*known), fitted(*known, self.not_searched))

    def _together(self) -> list[Cause]:
        assert self._original is not None
        changed = all_of_original(self._checkpoint, self._key, self._original)
        causes, together = self._explaining(changed, self._limit)
        self._halves = [*together, *self._halves]
        return causes

    def of_whole_parts(self, causes: list[Cause]) -> list[Cause]:
        """Of several causes, those whose correction makes most parts agree; all causes if there is none.

        These are the part of the stage, and those that the correction changes, too. A norm with the weight of the next
        layer's, two norms that are exchanged and two layers that are exchanged look alike at the first of the norms.
        """
        known = [cause for cause in causes if cause.sentence in self.corrected]
        if len(causes) < 2 or not known:
            return causes
        counts = {cause: self._agreeing_parts(self.corrected[cause.sentence]) for cause in known}
        most = max(counts.values())
        return [cause for cause in causes if counts.get(cause, most) == most] if most else causes

    def _agreeing_parts(self, corrected: Checkpoint) -> int:
        """How many parts agree that a correction changes; 0 if one of them does not."""
        limit = Tolerance(max(EXACT, self._tolerance.limit), self._tolerance.of_median)
        own = self._checkpoint.tensors
        changed = [name for name, tensor in corrected.tensors.items() if tensor is not own.get(name)]
        layers = {int(name.split(".")[1]) for name in changed if name.startswith("layers.")}
        keys = [self._key, *(("block", layer) for layer in layers - {part_of(corrected, self._key)})]
        try:
            for key in keys:
                for one, stage in replay_part(corrected, self._reference, key).items():
                    if not difference_of(corrected, self._reference, one, stage, limit).is_within:
                        return 0
        except CANNOT_REPLAY:
            return 0
        return len(keys)

    def _of_one_part(self, start: Checkpoint) -> Iterator[Suspect]:
        yield from suspects(start, self._key, self._reference.config)
        if self._original is not None:
            yield from of_original(start, self._key, self._original)

    def _missing_bias(self) -> list[Cause]:
        found = missing_bias(self._checkpoint, self._reference, self._key, self._of_fits)
        for cause, corrected in found:
            try:
                left = replayed_difference(corrected, self._reference, self._key, self._limit)
            except CANNOT_REPLAY:
                continue
            if left.is_within:
                self.corrected[cause.sentence] = corrected
        return [cause for cause, _ in found]

    def _fitted(self, *fits: Iterator[Suspect]) -> list[Cause]:
        """The causes of the first of the fits that has any; rounding exceeds what a fit of quantized weights leaves."""
        for fit in fits if not self._tolerance.of_median else ():
            if found := self._explaining(fit, self._of_fits)[0]:
                return found
        return []

    def _pairs(self) -> list[Cause]:
        """Pairs of corrections, neither of which suffices."""
        found: dict[frozenset[str], Cause] = {}
        for half in self._halves:
            for other in self._explaining(self._of_one_part(half.checkpoint), self._limit)[0]:
                pair = Cause(f"{half.sentence}; and {other.sentence}", other.left)
                names = frozenset((half.sentence, other.sentence))
                if found.setdefault(names, pair) is pair:  # in one order
                    self.corrected[pair.sentence] = self.corrected[other.sentence]
        return list(found.values())

    def _explaining(self, candidates: Iterable[Suspect], limit: Tolerance) -> tuple[list[Cause], list[Suspect]]:
        """The suspects whose correction leaves an error within a limit, and of the others those that leave the least.

        A correction that has been tried is not tried again: something else has named it.
        """
        found: list[Cause] = []
        others: list[tuple[float, Suspect]] = []
        for suspect in filter(lambda one: self._is_wanted(one.sentence), candidates):
            if suspect.checkpoint in self._seen or any(suspect.checkpoint == other.checkpoint for _, other in others):
                continue
            try:
                left = replayed_difference(suspect.checkpoint, self._reference, self._key, limit)
            except CANNOT_REPLAY:
                continue  # a correction that does not fit this model
            if left.is_within:
                found.append(Cause(suspect.sentence, left.relative))
                self.corrected[suspect.sentence] = suspect.checkpoint
                self._seen.append(suspect.checkpoint)
            else:
                others = sorted([*others, (left.relative, suspect)], key=lambda other: other[0])[:MOST_HALVES]
        halves = [suspect for _, suspect in others]
        self._seen += [suspect.checkpoint for suspect in halves]
        return found, halves


def _of_a_fit(effect: float, tolerance: Tolerance) -> float:
    """The error that a fit may leave of a difference: next to nothing, since it has unknowns that absorb others."""
    share = OF_FIT * effect
    return max(EXACT, share) if tolerance.of_median else min(EXACT, max(OF_PART.limit, share))


def _best(causes: list[Cause]) -> tuple[Cause, ...]:
    """The causes that the numbers do not tell apart."""
    smallest = max(min((cause.left for cause in causes), default=0.0), ALIKE)
    return tuple([cause for cause in causes if cause.left <= WORSE * smallest][:MOST])


@np.errstate(all="ignore")
def find_small_fault(
    checkpoint: Checkpoint, reference: Capture, first: Difference, original: Checkpoint | None = None
) -> Explained | None:
    """Look for a fault that is within tolerance, before a difference to which small ones add up.

    GELU and its tanh form, for example, differ by 0.0002 in a layer, which later layers amplify.

    Args:
        checkpoint: As in `find_causes`, like `reference`, `first` and `original`.

    Returns:
        The first stage that a correction makes agree, with its causes; None if there is none.
    """
    if first.tolerance.of_median:
        return None
    replayed: dict[Key, Array] = {}
    for key in keys_in_order(checkpoint.config):
        if key == (first.stage, first.layer):
            break
        if key[0] in OF_CACHE:  # they repeat the keys and values
            continue
        if key not in replayed:
            replayed = replay_part(checkpoint, reference, key)
        found = difference_of(checkpoint, reference, key, replayed[key], OF_PART)
        if not found.is_within:
            explained = find_causes(checkpoint, reference, reference, found, original)
            return explained if explained.verdict.causes else None
    return None
