"""Writes a trace as a page: one HTML file with its script, its styles and its data, which loads nothing else."""

from __future__ import annotations

import base64
import codecs
import hashlib
import json
import re
import zlib
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac.engine.inspection.profile import OUTSIDE, STEPS
from llamac.export.targets import atomic_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.trace.record import Trace

FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("data.js", "text.js", "token.js", "views.js", "main.js")
TYPES = {"int32": "i4", "float32": "f4", "uint16": "u2", "uint8": "u1"}


def write_page(path: Path, model: Model, trace: Trace) -> None:
    """Write the page of a trace.

    Args:
        path: The file. An existing one is replaced.
        model: The model, for the texts of its tokens.
        trace: The trace.
    """
    arrays = dict(_arrays(trace))
    about = trace.about | {
        "arrays": {name: [TYPES[array.dtype.name], array.shape] for name, array in arrays.items()},
        "ids": trace.ids.tolist(),
        "tokens": _texts(model, trace),
        "texts": _names(model, trace),
        "special": sorted(set(trace.ids) & _special(model)),
        "heads": trace.attention.heads,
        "block": trace.attention.block,
        "lens": sorted(trace.lens),
        "experts": [{"layer": each.layer, "total": each.total, "used": each.chosen.shape[1]} for each in trace.experts],
        "times": None if trace.costs is None else {"steps": STEPS, "outside": OUTSIDE, "seconds": trace.seconds},
    }
    with atomic_file(path, sync=False) as file:
        for piece in _pieces(about, arrays):
            file.write(piece)


def _arrays(trace: Trace) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of the page by name."""
    yield from trace.predictions._asdict().items()
    for layer, found in trace.lens.items():
        if found is not trace.predictions:
            yield from ((f"lens.{layer}.{name}", array) for name, array in found._asdict().items() if name != "entropy")
    yield "stream", trace.stream
    yield "branches", trace.branches
    maps, first = trace.attention.maps(), 0
    for layer, heads in enumerate(trace.attention.heads):
        if not heads:
            continue
        end = first + heads
        yield f"links.{layer}", trace.attention.targets[first:end]
        yield f"weights.{layer}", trace.attention.weights[first:end]
        yield f"maps.{layer}", maps[first:end]
        first = end
    for each in trace.experts:
        yield f"experts.{each.layer}.chosen", each.chosen
        yield f"experts.{each.layer}.weights", each.weights
    if trace.costs is not None:
        yield "costs", (trace.costs.ns / 1e6).astype("float32")


def _pieces(about: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Iterator[bytes]:
    """The parts of the file."""
    script = "\n".join((FOLDER / name).read_text("utf-8") for name in SCRIPTS)
    style = (FOLDER / "style.css").read_text("utf-8")
    rules = (f"script-src {_hash(script)}", f"style-src {_hash(style)}", "base-uri 'none'", "form-action 'none'")
    n = len(about["ids"])
    values = {
        "POLICY": "; ".join(("default-src 'none'", *rules)),
        "TITLE": escape(f"{about['model']}: {n} token{'' if n == 1 else 's'}"),
        "STYLE": style,
        "SCRIPT": script,
    }
    template = (FOLDER / "index.html").read_text("utf-8")
    # in one pass: a model can be called @SCRIPT@
    before, after = (re.sub("@([A-Z]+)@", lambda m: values[m[1]], part) for part in template.split("@DATA@"))
    yield before.encode()
    # no text of the model or of the user can end the element: a JSON string has no "<"
    text = json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")
    yield f'<script type="application/json" id="about">{text}</script>\n'.encode()
    for name, array in arrays.items():
        data = zlib.compress(array.astype(array.dtype.newbyteorder("<"), order="C", copy=False).tobytes(), 6)
        yield f'<script type="application/octet-stream" id="data-{name}">'.encode()
        yield base64.b64encode(data)
        yield b"</script>\n"
    yield after.encode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _bytes(model: Model, token: int) -> bytes:
    if not model.has_tokenizer or not 0 <= token < model.tokenizer.n_ids:
        return b""
    return model.tokenizer.token_bytes(token)


def _special(model: Model) -> frozenset[int]:
    return model.tokenizer._loaded.texts.special if model.has_tokenizer else frozenset()


def _texts(model: Model, trace: Trace) -> list[str]:
    """The text of each token. A character of several tokens belongs to the last one; the others have no text."""
    decoder, special = codecs.getincrementaldecoder("utf-8")("replace"), _special(model)
    texts = []
    for token in trace.ids:
        if token in special or not model.has_tokenizer:
            texts.append(decoder.decode(b"", final=True) + _bytes(model, token).decode("utf-8", "replace"))
            decoder.reset()
        else:
            texts.append(decoder.decode(_bytes(model, token)))
    return texts


def _names(model: Model, trace: Trace) -> dict[int, str]:
    """The texts of all tokens that the page names, each by itself."""

    def ids() -> Iterable[int]:
        yield from trace.ids
        for found in (trace.predictions, *trace.lens.values()):
            yield from found.top.ravel().tolist()

    names = {token: _bytes(model, token).decode("utf-8", "replace") for token in sorted(set(ids()))}
    return {token: name for token, name in names.items() if name}
