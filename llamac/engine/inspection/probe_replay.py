"""Replays the probes of a model file on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from llamac.errors import ModelError, UnsupportedError
from llamac.format.probes import ProbeResult, ProbeSet, Status, damaged, decode, divergence, relative_error
from llamac.progress import Progress, silent

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.session import Logits, Session


def replay_probes(model: Model, progress: Progress = silent) -> list[ProbeResult]:
    """Replay the probes of a model's file, with the model's default settings (KV dtype, threads, ISA).

    If the hash of all logits equals the stored hash, every probe is "identical". Otherwise a probe's error decides
    whether it is "within tolerance" or "different".

    Args:
        model: The model.
        progress: Called with the phase "probes" and the number of finished probes.

    Returns:
        The result of each probe.

    Raises:
        ModelError: If the file has no probes, or damaged ones.
        UnsupportedError: If the probes have no reference for the model's KV dtype.
    """
    blob = bytes(model.file.section("probes"))
    if not blob:
        raise ModelError("the file has no probes: it was exported without them")
    probe_set = decode(blob, model.config["vocab_size"])
    if probe_set.context > model.config["context"]:
        raise damaged(f"a probe has {probe_set.context} tokens, but the model's context is {model.config['context']}")
    with model.session(context=probe_set.context) as session:
        if session.kv_dtype not in probe_set.engine:
            expected_dtypes = " or ".join(probe_set.engine)
            raise UnsupportedError(
                f"the probes have no reference for a KV cache in {session.kv_dtype}: load the model with kv_dtype "
                f"{expected_dtypes}"
            )
        total = len(probe_set.probes)
        digest, rows = engine_logits(session, probe_set, lambda done: progress("probes", done, total))
        expected = probe_set.engine[session.kv_dtype]
    identical = digest == expected.sha256
    results = []
    for index, (probe, row) in enumerate(zip(probe_set.probes, rows, strict=True)):
        error = relative_error(row, probe.logits)
        status: Status = "within tolerance" if error <= expected.tolerance else "different"
        if identical:
            status = "identical"
        nats = divergence(probe.logits, row)
        results.append(ProbeResult(index, probe.prompt, probe.ids, status, error, expected.tolerance, nats))
    return results


def engine_logits(session: Session, probe_set: ProbeSet, progress: Callable[[int], None]) -> tuple[str, list[Logits]]:
    """Compute the logits of probes.

    Args:
        session: A session whose context is `probe_set.context`, which selects the RoPE table of models that have two.
        probe_set: The probes.
        progress: Called with the number of finished probes, first with 0.

    Returns:
        The SHA-256 of the logits at all positions of all probes as little-endian float32, in hexadecimal; and the last
        logits of each probe, shape (vocab_size,), float32.
    """
    digest = hashlib.sha256()
    rows: list[Logits] = []
    progress(0)
    for probe in probe_set.probes:
        session.truncate(0)
        logits = session.eval(probe.ids, logits="all")
        assert logits is not None
        digest.update(logits.astype("<f4", copy=False).tobytes())
        rows.append(logits[-1].copy())
        progress(len(rows))
    return digest.hexdigest(), rows
