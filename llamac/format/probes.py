"""The probes of a model file: a few token sequences with their reference logits.

The section is a safetensors file. Probe i has two tensors: "{i}.ids", I32 of shape (n,), and "{i}.logits", F32 of shape
(vocab_size,), the reference logits after the last token. `__metadata__` has three strings: `source`; `prompts`, a JSON
list with null for ids without a prompt; and `engine`, a JSON object with the numerics version, and a SHA-256 and a
tolerance for each KV dtype.

The SHA-256 covers the engine's own logits at every position of every probe, so equal hashes mean equal bits. If the
bits differ, the tolerance bounds max|difference| / max|reference|; the exporter measures it.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from llamac.arguments import KVDtype
from llamac.errors import ModelError
from llamac.format.strict_json import parse_array, parse_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]

KV_DTYPES: tuple[KVDtype, ...] = ("f16", "f32")
# Unknown hashes and tolerances are as long as real ones, so filling them in later does not change the section's size.
NO_HASH = "0" * 64
Status = Literal["identical", "within tolerance", "different"]


@dataclass(frozen=True)
class Probe:
    """A token sequence with its reference logits.

    Attributes:
        ids: The token ids.
        logits: The reference logits after the last token, shape (vocab_size,), float32.
        prompt: The text that the ids are from, or None.
    """

    ids: tuple[int, ...]
    logits: Logits
    prompt: str | None


@dataclass(frozen=True)
class EngineRecord:
    """The engine's result when the file was made, for one KV dtype.

    Attributes:
        sha256: The hash of the logits at every position of every probe, in hexadecimal.
        tolerance: The largest relative error to accept if the bits differ.
    """

    sha256: str = NO_HASH
    tolerance: float = 0.0


@dataclass(frozen=True)
class ProbeSet:
    """The probes of a file.

    Attributes:
        source: What computed the reference logits.
        numerics: The version of the order of operations that the hashes depend on, as in the header.
        probes: The probes.
        engine: The engine's records, by KV dtype.
    """

    source: str
    numerics: int
    probes: tuple[Probe, ...]
    engine: dict[str, EngineRecord]

    @property
    def context(self) -> int:
        """Positions that the longest probe needs."""
        return max(len(probe.ids) for probe in self.probes)

    def with_engine(self, engine: dict[str, EngineRecord]) -> ProbeSet:
        """Replace the engine's records. The encoded size stays the same."""
        return replace(self, engine=engine)


@dataclass(frozen=True)
class ProbeResult:
    """The result of replaying a probe.

    Attributes:
        index: The probe's index.
        prompt: Its text, or None.
        ids: Its token ids.
        status: How the logits compare with the reference.
        error: max|difference| / max|reference| of the last position's logits.
        tolerance: The largest error that counts as "within tolerance".
        divergence: Kullback-Leibler divergence of the probabilities from the reference's, in nats.
    """

    index: int
    prompt: str | None
    ids: tuple[int, ...]
    status: Status
    error: float
    tolerance: float
    divergence: float


# ---- comparison


def relative_error(logits: Logits, reference: Logits) -> float:
    """Compute max|logits - reference| / max|reference|.

    Args:
        logits: Shape (vocab_size,).
        reference: Shape (vocab_size,).

    Returns:
        The error; infinite if any number is not finite.
    """
    import numpy as np

    difference = np.abs(logits.astype(np.float64) - reference)
    error = float(difference.max() / max(float(np.abs(reference).max()), np.finfo(np.float32).tiny))
    return error if math.isfinite(error) else math.inf


def divergence(reference: NDArray[Any], logits: NDArray[Any]) -> float:
    """Compute the Kullback-Leibler divergence of the probabilities of `logits` from those of `reference`.

    Args:
        reference: Shape (..., vocab_size).
        logits: The same shape.

    Returns:
        The mean over all rows, in nats.
    """
    import numpy as np

    def log_softmax(x: NDArray[Any]) -> NDArray[np.float64]:
        shifted = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return found

    p, q = log_softmax(reference), log_softmax(logits)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


# ---- encoding


def encode(probe_set: ProbeSet) -> bytes:
    """Encode probes as the section's bytes. Their number does not depend on the engine's records."""
    import numpy as np

    header: dict[str, Any] = {
        "__metadata__": {
            "source": probe_set.source,
            "prompts": _json([probe.prompt for probe in probe_set.probes]),
            "engine": _json(
                {
                    "numerics": probe_set.numerics,
                    "sha256": {kv: record.sha256 for kv, record in probe_set.engine.items()},
                    "tolerance": {kv: f"{record.tolerance:.3e}" for kv, record in probe_set.engine.items()},
                }
            ),
        }
    }
    data = bytearray()
    for index, probe in enumerate(probe_set.probes):
        for name, dtype, values in (("ids", "<i4", probe.ids), ("logits", "<f4", probe.logits)):
            array = np.asarray(values, dtype)
            kind = "I32" if name == "ids" else "F32"
            span = [len(data), len(data) + array.nbytes]
            header[f"{index}.{name}"] = {"dtype": kind, "shape": [array.size], "data_offsets": span}
            data += array.tobytes()
    text = _json(header).encode()
    text += b" " * (-len(text) % 8)  # safetensors pads the header with spaces to align the data to 8 bytes
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# ---- decoding: the blob is untrusted


def decode(blob: bytes, vocab_size: int) -> ProbeSet:
    """Decode a probes section.

    Args:
        blob: The section's bytes.
        vocab_size: The model's number of logits.

    Raises:
        ModelError: If the section is damaged.
    """
    source = source_of(blob)
    header, data = _split(blob)
    metadata = _get(header, "__metadata__", dict)
    prompts = parse_array(_get(metadata, "prompts", str), "section probes: prompts", error=ModelError)
    if not prompts or not all(prompt is None or _is_text(prompt) for prompt in prompts):
        raise damaged("prompts is not a list of strings")
    engine = parse_object(_get(metadata, "engine", str), "section probes: engine", error=ModelError)
    if len(header) != 1 + 2 * len(prompts):
        raise damaged(f"{len(header) - 1} tensors, expected {2 * len(prompts)} for {len(prompts)} prompts")
    probes = []
    end = 0
    for index, prompt in enumerate(prompts):
        ids, end = _tensor(header, data, f"{index}.ids", "I32", None, end)
        logits, end = _tensor(header, data, f"{index}.logits", "F32", vocab_size, end)
        probes.append(_probe(index, ids, logits, prompt))
    if end != len(data):
        raise damaged(f"the data has {len(data)} bytes, the tensors need {end}")
    records: dict[str, EngineRecord] = {kv: _engine_record(engine, kv) for kv in KV_DTYPES}
    return ProbeSet(source, _get(engine, "numerics", int), tuple(probes), records)


def source_of(blob: bytes) -> str:
    """Read what computed the reference logits of a probes section.

    Raises:
        ModelError: If the section is damaged.
    """
    source: str = _get(_get(_split(blob)[0], "__metadata__", dict), "source", str)
    if not _is_text(source):
        raise damaged("source is not valid Unicode")
    return source


def _split(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    if len(blob) < 8:
        raise damaged(f"{len(blob)} bytes are too short for a header")
    (size,) = struct.unpack_from("<Q", blob)
    if size > len(blob) - 8:
        raise damaged(f"its header of {size} bytes does not fit in the section of {len(blob)} bytes")
    return parse_object(blob[8 : 8 + size], "section probes: the header", error=ModelError), blob[8 + size :]


def _get(record: dict[str, Any], key: str, kind: type) -> Any:
    value = record.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise damaged(f"{key} is missing or not of the type {kind.__name__}")
    return value


def _is_text(value: Any) -> bool:
    """Whether a value is a str without lone surrogates, which JSON can escape and UTF-8 cannot encode."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _tensor(
    header: dict[str, Any], data: bytes, name: str, dtype: str, length: int | None, start: int
) -> tuple[NDArray[Any], int]:
    """A tensor, and the end of its data. Each element has 4 bytes, and the data must begin at `start`."""
    import numpy as np

    entry = _get(header, name, dict)
    shape = _get(entry, "shape", list)
    if entry.get("dtype") != dtype or len(shape) != 1 or type(shape[0]) is not int or not 0 < shape[0] <= len(data):
        raise damaged(f"tensor {name} is not a one-dimensional {dtype} tensor that fits in the section")
    if length is not None and shape[0] != length:
        raise damaged(f"tensor {name} has {shape[0]} elements, the model's vocabulary {length}")
    end = start + 4 * shape[0]
    if entry.get("data_offsets") != [start, end] or end > len(data):
        raise damaged(f"tensor {name} is not at {[start, end]} of the data's {len(data)} bytes")
    return np.frombuffer(data, {"I32": "<i4", "F32": "<f4"}[dtype], shape[0], start), end


def _probe(index: int, ids: NDArray[Any], logits: NDArray[Any], prompt: str | None) -> Probe:
    import numpy as np

    if int(ids.min()) < 0 or int(ids.max()) >= len(logits):
        raise damaged(f"tensor {index}.ids has an id outside 0 to {len(logits) - 1}")
    if not np.isfinite(logits).all():
        raise damaged(f"tensor {index}.logits has a number that is not finite")
    return Probe(tuple(ids.tolist()), logits, prompt)


def _engine_record(engine: dict[str, Any], kv: str) -> EngineRecord:
    digest = _get(_get(engine, "sha256", dict), kv, str)
    tolerance = _get(_get(engine, "tolerance", dict), kv, str)
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise damaged(f"engine: sha256 of {kv} is not 64 hexadecimal digits")
    if not re.fullmatch(r"[0-9]\.[0-9]{3}e[+-][0-9]{2}", tolerance):
        raise damaged(f"engine: tolerance of {kv} is not a number such as 1.000e-04")
    return EngineRecord(digest, float(tolerance))


def damaged(problem: str) -> ModelError:
    """The error for a damaged section."""
    return ModelError(f"section probes: {problem}")
