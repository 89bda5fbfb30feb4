"""The fuzzing target of session files: the JSON object and the data, around which a valid beginning is put."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import llamac
from builders import checkpoint, llama_config, write_model
from fuzz.mutate import Parts
from llamac.engine.cache.session_file import BEGINNING, MAGIC, VERSION


def use_session(folder: Path) -> None:
    """Load the session file and go on with it."""
    head, data = (folder / "head.json").read_bytes(), (folder / "data.bin").read_bytes()
    size = BEGINNING.size + len(head) + len(data)
    beginning = BEGINNING.pack(MAGIC, VERSION, len(head), hashlib.sha256(head).digest(), size)
    (folder / "a.session").write_bytes(beginning + head + data)
    with _session_model().session(sequences=2) as session:
        session.load(folder / "a.session")
        session.eval([1, 2], logits=None)


@cache
def _session_model() -> llamac.Model:
    """A model with a recurrent layer beside attention."""
    config = llama_config(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, ffn=20, context=200)
    recurrent = replace(config.layers[0], mixer="short_conv", conv_width=3, rope=-1)
    config = replace(config, layers=(recurrent, config.layers[1]))
    path = write_model(Path(tempfile.mkdtemp()) / "model.bin", checkpoint(config), "f16")
    return llamac.load(path, threads=1)


def with_valid_digests(parts: Parts) -> Parts:
    """A session file whose checksums are those of its data, if its fields say where that is."""
    data = parts[1]
    try:
        head = json.loads(parts[0])
        sizes = [("tokens_sha256", 4 * sum(sequence["length"] for sequence in head["sequences"]))]
        if head["logits_sha256"] is not None:
            sizes.append(("logits_sha256", 4 * head["identity"]["vocab_size"]))
        for name, size in sizes:
            head[name], data = hashlib.sha256(data[:size]).hexdigest(), data[size:]
        pages = [head["identity"]["groups"][group][3] for group in head["page_groups"]]
        for i, size in enumerate(pages):
            head["page_sha256"][i], data = hashlib.sha256(data[:size]).hexdigest(), data[size:]
        return json.dumps(head).encode(), parts[1]
    except Exception:  # the reader must reject these fields
        return parts


def session_samples(folder: Path) -> Iterable[Parts]:
    """Files of two sequences that share pages and states."""
    model = _session_model()
    with model.session(sequences=2) as session:
        for length in (70, 3):
            session.prefill([length % 200 + i for i in range(length)])
            session.copy_sequence(0, 1, length=length - 2)
            session.save(folder / "sample")
            data = (folder / "sample").read_bytes()
            end = BEGINNING.size + BEGINNING.unpack(data[: BEGINNING.size])[2]
            yield data[BEGINNING.size : end], data[end:]
