"""Replays the probes of a model file on this machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from llamac.errors import ModelError
from llamac.format.probes import ProbeResult, ProbeSet, Status, damaged, decode, divergence, relative_error
from llamac.progress import Progress, silent

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.session import Logits, Session


def replay(model: Model, progress: Progress = silent) -> list[ProbeResult]:
    """Runs the probes of the model's file on this machine, with the model's own settings (KV dtype, threads, ISA).

    "identical": the hash of the logits of all probes is the stored one. Otherwise each probe is "within tolerance" or
    "different" by its error. Raises ModelError if the file has no probes or damaged ones.
    """
    blob = bytes(model.file.section("probes"))
    if not blob:
        raise ModelError("the file has no probes: it was exported without them")
    probe_set = decode(blob, model.config["vocab_size"])
    if probe_set.context > model.config["context"]:
        raise damaged(f"a probe has {probe_set.context} tokens, the model's context {model.config['context']}")
    with model.session(context=probe_set.context) as session:
        total = len(probe_set.probes)
        digest, rows = engine_logits(session, probe_set, lambda done: progress("probes", done, total))
        expected = probe_set.engine[session.kv_dtype]
    identical = digest == expected.sha256
    results = []
    for index, (probe, row) in enumerate(zip(probe_set.probes, rows, strict=True)):
        error = relative_error(row, probe.logits)
        close: Status = "within tolerance" if error <= expected.tolerance else "different"
        status = "identical" if identical else close
        nats = divergence(probe.logits, row)
        results.append(ProbeResult(index, probe.prompt, probe.ids, status, error, expected.tolerance, nats))
    return results


def engine_logits(session: Session, probe_set: ProbeSet, progress: Callable[[int], None]) -> tuple[str, list[Logits]]:
    """(SHA-256 over the logits of all positions of all probes as little-endian float32, the last logits of each probe).

    The session's context is to be the probes' (`ProbeSet.context`): it fixes the RoPE table of models that have a short
    and a long one. progress: called with the number of probes that are done, first with 0.
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
