"""Finds the cause of a difference: corrects one possible fault after another until the difference vanishes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from llamac.errors import LlamacError
from llamac.export.checkpoint import Checkpoint
from llamac.export.parity.capture import Capture
from llamac.export.parity.changes import Suspect
from llamac.export.parity.compare import EXACT, Difference, Tolerance
from llamac.export.parity.config_numbers import fitted_factors, fitted_numbers
from llamac.export.parity.fitted import fitted
from llamac.export.parity.observed import Cause, extent, in_the_numbers, missing_bias
from llamac.export.parity.replay import Array, difference_of, part_of, replay_part, replayed_difference
from llamac.export.parity.shown import shown
from llamac.export.parity.stages import OF_CACHE, Key, keys_in_order
from llamac.export.parity.suspects import all_of_original, of_original, suspects

# A correction must remove at least this share of the difference.
VANISHES = 0.25
# Of several corrections, those whose error is at most so many times the smallest are named. Errors below the second
# number are alike: the other implementation computes in float32.
WORSE, ALIKE = 10, 1e-6
# The share of a difference that the correction of quantized weights by a fit may leave; of float weights, EXACT may be
# left. The rest of the effect would be another fault's.
OF_FIT = 0.02
MOST = 4  # causes
MOST_FURTHER = 3  # differences in other parts
# Of the corrections that do not suffice, so many with the least error are tried with each other one.
HALVES = 4
# The error of one part that a float64 pass computes from the reference's inputs is below this if the file is right.
OF_PART = Tolerance(3e-5)


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
    """

    fault: Literal["file", "engine", "rounding"]
    error: float
    causes: tuple[Cause, ...] = ()
    extent: str = ""


def find_causes(
    checkpoint: Checkpoint,
    engine: Capture,
    reference: Capture,
    first: Difference,
    original: Checkpoint | None = None,
) -> Verdict:
    """Explain the first stage that is out of tolerance.

    Args:
        checkpoint: The engine's file.
        engine: What the engine computed.
        reference: The capture, in the engine's form.
        first: The difference.
        original: What the exporter reads from the original now; None if there is no original.
    """
    key = first.stage, first.layer
    tolerance = first.tolerance
    base = replayed_difference(checkpoint, reference, key, tolerance)
    if base.is_within:
        own = replayed_difference(checkpoint, engine, key, tolerance)
        return Verdict("rounding" if own.is_within else "engine", own.relative)
    limit = replace(tolerance, limit=min(tolerance.limit, VANISHES * base.relative))
    # a loose tolerance would let wrong fits pass
    exact = replace(limit, limit=min(limit.limit, _of_a_fit(base.relative, tolerance)))
    seen: list[Checkpoint] = []

    def explaining(candidates: Iterable[Suspect], within: Tolerance = limit) -> tuple[list[Cause], list[Suspect]]:
        return _explaining(candidates, reference, key, within, seen)

    def of_one_part(start: Checkpoint) -> Iterator[Suspect]:
        yield from suspects(start, key, reference.config)
        if original is not None:
            yield from of_original(start, key, original)

    causes = missing_bias(checkpoint, reference, key, exact)
    found, halves = explaining(of_one_part(checkpoint))
    causes += found
    if not causes and original is not None:
        causes, together = explaining(all_of_original(checkpoint, key, original))
        halves = [*together, *halves]

    def pairs() -> list[Cause]:
        found: dict[frozenset[str], Cause] = {}
        for half in halves:
            for other in explaining(of_one_part(half.checkpoint))[0]:
                pair = Cause(f"{half.sentence}; and {other.sentence}", other.left)
                found.setdefault(frozenset((half.sentence, other.sentence)), pair)  # in one order
        return list(found.values())

    def corrected_by(*fits: Iterator[Suspect]) -> Iterator[list[Cause]]:
        for fit in fits if not tolerance.of_median else ():
            yield explaining(fit, exact)[0]

    def further() -> Iterator[list[Cause]]:
        """What is tried until something explains the difference."""
        if original is not None and halves:
            yield pairs()
        known = checkpoint, reference, key
        yield from corrected_by(shown(*known), fitted_numbers(*known), fitted(*known))
        yield in_the_numbers(*known, exact)
        yield from corrected_by(fitted_factors(*known), fitted(*known, together=True))
        if original is None:
            yield pairs()

    causes = causes or next((found for found in further() if found), [])
    return Verdict("file", base.relative, _best(causes), extent(checkpoint, reference, key, tolerance))


def _of_a_fit(effect: float, tolerance: Tolerance) -> float:
    """The error that a fit may leave of a difference: next to nothing, since it has unknowns that absorb others."""
    return max(EXACT, OF_FIT * effect) if tolerance.of_median else EXACT


def _best(causes: list[Cause]) -> tuple[Cause, ...]:
    """The causes that the numbers do not tell apart."""
    smallest = max(min((cause.left for cause in causes), default=0.0), ALIKE)
    return tuple([cause for cause in causes if cause.left <= WORSE * smallest][:MOST])


def find_small_fault(
    checkpoint: Checkpoint, reference: Capture, first: Difference, original: Checkpoint | None = None
) -> tuple[Difference, Verdict] | None:
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
            verdict = find_causes(checkpoint, reference, reference, found, original)
            return (found, verdict) if verdict.causes else None
    return None


def find_further(
    checkpoint: Checkpoint, reference: Capture, first: Difference, verdict: Verdict, original: Checkpoint | None = None
) -> tuple[tuple[Difference, Verdict], ...]:
    """Look for faults in other parts than that of the first difference, which is explained.

    A fault of the config shows in many parts, at the same stage or with the same cause; these are left out, and so is
    what nothing explains.

    Args:
        checkpoint: As in `find_causes`, like `reference`, `first` and `original`.
        verdict: What is known about `first`.
    """
    if first.tolerance.of_median or verdict.fault != "file" or not verdict.causes:
        return ()
    limit = Tolerance(max(first.tolerance.limit, EXACT))
    found: list[tuple[Difference, Verdict]] = []
    named = {cause.sentence for cause in verdict.causes}
    done = {part_of(checkpoint, (first.stage, first.layer))}
    replayed: dict[Key, Array] = {}
    for key in keys_in_order(checkpoint.config):
        part = part_of(checkpoint, key)
        if part in done or key[0] in OF_CACHE or key not in reference.stages or len(found) == MOST_FURTHER:
            continue
        if key not in replayed:
            replayed = replay_part(checkpoint, reference, key)
        difference = difference_of(checkpoint, reference, key, replayed[key], limit)
        if difference.is_within:
            continue
        done.add(part)  # later stages of the part follow from this one
        if key[0] == first.stage:
            continue
        further = find_causes(checkpoint, reference, reference, difference, original)
        sentences = {cause.sentence for cause in further.causes}
        is_named = any(one in other for one in sentences for other in named)  # also as one of a pair
        if sentences and not is_named:
            named |= sentences
            found.append((difference, further))
    return tuple(found)


def _explaining(
    candidates: Iterable[Suspect], reference: Capture, key: Key, limit: Tolerance, seen: list[Checkpoint]
) -> tuple[list[Cause], list[Suspect]]:
    """The suspects whose correction leaves an error within `limit`, and of the others those that leave the least.

    Their checkpoints are appended to `seen`. Those that were there are not tried again: something else has named them.
    """
    found: list[Cause] = []
    others: list[tuple[float, Suspect]] = []
    for suspect in candidates:
        if suspect.checkpoint in seen or any(suspect.checkpoint == other.checkpoint for _, other in others):
            continue
        try:
            left = replayed_difference(suspect.checkpoint, reference, key, limit)
        except (LlamacError, ValueError, IndexError, KeyError):
            continue  # a correction that does not fit this model
        if left.is_within:
            found.append(Cause(suspect.sentence, left.relative))
            seen.append(suspect.checkpoint)
        else:
            others = sorted([*others, (left.relative, suspect)], key=lambda other: other[0])[:HALVES]
    halves = [suspect for _, suspect in others]
    seen += [suspect.checkpoint for suspect in halves]
    return found, halves
