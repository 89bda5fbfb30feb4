"""The smallest interesting model file, and its annotated hexdump in docs/format.md.

    python docs/hexdump.py              print the dump
    python docs/hexdump.py FILE         write the model file
    python docs/hexdump.py --update     put the dump into docs/format.md

Names, types and offsets come from the core's table of fields. The model's numbers are chosen so that they are easily
found in the bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from llamac.export.checkpoint import Checkpoint, LayerConfig, LazyTensor, ModelConfig
from llamac.export.flat.plan import make_plan
from llamac.export.flat.stream import write_file
from llamac.format.flatfile import FIELDS, RECORD_BYTES, SECTIONS, FlatFile, TensorRecord, unpack_record

DOCUMENT = Path(__file__).with_name("format.md")
BEGIN, END = "<!-- hexdump: written by docs/hexdump.py -->\n", "<!-- end of hexdump -->\n"
BYTES_PER_LINE = 16
SHORTENED_ZEROS = 5  # so many zeros in a row, or more, are written as a number of them
SHOWN_TENSOR_RECORDS = 2
METADATA = {
    "architecture": "llama",
    "dtype": "bf16",
    "exporter": "docs/hexdump.py",
    "name": "tiny",
    "source": {"format": "example"},
}


# ---- the file


def tiny_checkpoint() -> Checkpoint:
    """A LLaMA of one layer: 3 tokens, width 2, two heads that share one KV head, a gated FFN of width 3."""
    layer = LayerConfig("gated", ffn_dim=3, rope=0)
    config = ModelConfig(
        dim=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=2,
        vocab_size=3,
        n_token_ids=3,
        context=4,
        norm="rms",
        position="rope",
        activation="silu",
        tied_output=True,
        norm_eps=1e-5,
        attention_scale=2**-0.5,
        layers=(layer,),
        rope_dim=(2,),
        rope_original_context=(0,),
        rope_attention_factor=(1.0,),
    )
    shapes = {
        "token_embedding.weight": (3, 2),
        "rope.0.inv_freq": (1,),
        "layers.0.attn_norm.weight": (2,),
        "layers.0.attn_q.weight": (4, 2),
        "layers.0.attn_k.weight": (2, 2),
        "layers.0.attn_v.weight": (2, 2),
        "layers.0.attn_out.weight": (2, 4),
        "layers.0.ffn_norm.weight": (2,),
        "layers.0.ffn_gate.weight": (3, 2),
        "layers.0.ffn_up.weight": (3, 2),
        "layers.0.ffn_down.weight": (2, 3),
        "output_norm.weight": (2,),
    }
    return Checkpoint(config, {name: _counting(shape) for name, shape in shapes.items()}, metadata=METADATA)


def _counting(shape: tuple[int, ...]) -> LazyTensor:
    """1, 2, 3, ... row by row; vectors hold ones."""
    numbers = np.ones(shape) if len(shape) == 1 else np.arange(1, np.prod(shape) + 1).reshape(shape)
    return LazyTensor(shape, "f32", lambda first, last: numbers[first:last].astype(np.float32))


def write_tiny_file(path: Path) -> None:
    """Writes the model file, with the exporter's own writer."""
    metadata = json.dumps(METADATA, sort_keys=True, separators=(",", ":")).encode()
    with open(path, "w+b") as file:
        write_file(file, make_plan(tiny_checkpoint(), "bf16", {"metadata": metadata}))


# ---- the dump


def annotated_dump(path: Path) -> str:
    """The dump of a model file: offset, bytes, and what they mean; one line or more per field."""
    file = FlatFile(path)
    data = bytes(file.buffer)
    end = 0
    lines: list[str] = []
    for first, last, meaning in _pieces(file):
        if any(data[end:first]) or first < end:
            raise AssertionError(f"bytes {end:#x} to {first:#x} were skipped or shown twice")
        if first > end:
            lines += _lines(data, end, first, f"padding to {first:#x}, a multiple of 64")
        if meaning is None:
            lines += ["", f"---- {_heading(file, first)}"]
        elif meaning.endswith("..."):
            lines.append(f"{first:08x}  {meaning}")
        else:
            lines += _lines(data, first, last, meaning)
        end = last
    file.close()
    if end != len(data):
        raise AssertionError(f"the dump ends at {end:#x}, the file at {len(data):#x}")
    return "\n".join(lines).strip("\n") + "\n"


def _pieces(file: FlatFile) -> Iterator[tuple[int, int, str | None]]:
    """(first byte, byte behind the last, meaning) of everything but padding; a heading where the meaning is None."""
    yield 0, 0, None
    yield from _record(file, "header", 0)
    at = RECORD_BYTES["header"]
    for _ in SECTIONS:
        yield at, at, None
        yield from _record(file, "section", at)
        at += RECORD_BYTES["section"]
    for name, section in file.sections.items():
        if section.bytes == 0:
            continue
        first, last = section.offset, section.offset + section.bytes
        yield first, first, None
        if name == "config":
            yield from _record(file, "config", first)
        elif name == "layers":
            yield from _record(file, "layer", first)
        elif name == "tensors":
            yield from _tensor_table(file, first)
        elif name == "data":
            for tensor in file.tensors:
                yield from _tensor(tensor)
        else:
            text = file.section(name).decode()
            step = BYTES_PER_LINE
            for start in range(0, len(text), step):
                yield first + start, min(first + start + step, last), text[start : start + step]


def _heading(file: FlatFile, at: int) -> str:
    if at == 0:
        return "header"
    index, rest = divmod(at - RECORD_BYTES["header"], RECORD_BYTES["section"])
    if index < len(SECTIONS) and rest == 0:
        return f"section table, {index + 1} of {len(SECTIONS)}: {SECTIONS[index]}"
    return f"section {next(name for name, section in file.sections.items() if section.offset == at and section.bytes)}"


def _record(file: FlatFile, record: str, at: int) -> Iterator[tuple[int, int, str]]:
    """The members of a record, one after the other."""
    values = unpack_record(record, file.buffer[at : at + RECORD_BYTES[record]])
    ends = [member.offset for member in FIELDS[record][1:]] + [RECORD_BYTES[record]]
    for member, end in zip(FIELDS[record], ends, strict=True):
        yield at + member.offset, at + end, _meaning(member.name, values[member.name])


def _meaning(name: str, value: object) -> str:
    if isinstance(value, bytes):
        return name
    if isinstance(value, list):
        return f"{name} = {', '.join(item if isinstance(item, str) else f'{item:.9g}' for item in value)}"
    return f"{name} = {value:.9g}" if isinstance(value, float) else f"{name} = {value}"


def _tensor_table(file: FlatFile, at: int) -> Iterator[tuple[int, int, str]]:
    size = RECORD_BYTES["tensor"]
    for index, tensor in enumerate(file.tensors):
        start = at + index * size
        if index < SHOWN_TENSOR_RECORDS:
            yield from _record(file, "tensor", start)
        else:
            place = f"{tensor.bytes} bytes at {tensor.offset:#x}"
            yield start, start + size, f"the record of {tensor.name}: {tensor.dtype}, {tensor.shape}, {place} ..."


def _tensor(tensor: TensorRecord) -> Iterator[tuple[int, int, str]]:
    """A vector whole; a matrix of 16-bit numbers plane by plane (one strip: there are at most 16 rows)."""
    if len(tensor.shape) == 1:
        yield tensor.offset, tensor.offset + tensor.bytes, tensor.name
        return
    plane = 32
    for k in range(tensor.bytes // plane):
        column = f"column {k} of 16 rows" if k < tensor.shape[1] else "no column: padding"
        start = tensor.offset + k * plane
        yield start, start + plane, f"{tensor.name}, {column}" if k == 0 else column


def _lines(data: bytes, first: int, last: int, meaning: str) -> Iterator[str]:
    """The lines of one piece; the meaning stands on the first."""
    at = first
    for text, count in _groups(data[first:last]):
        yield f"{at:08x}  {text:<{3 * BYTES_PER_LINE}}  {meaning}".rstrip()
        at, meaning = at + count, ""


def _groups(data: bytes) -> Iterator[tuple[str, int]]:
    """(text, number of bytes) of lines of at most 16 bytes, a long run of zeros counted instead of written."""
    parts: list[str] = []
    count = 0
    for is_zero, run in groupby(data, lambda byte: byte == 0):
        items = list(run)
        if is_zero and len(items) >= SHORTENED_ZEROS:
            shown = f"00 x {len(items)}"
            if len(" ".join([*parts, shown])) > 3 * BYTES_PER_LINE:
                yield " ".join(parts), count
                parts, count = [], 0
            yield " ".join([*parts, shown]), count + len(items)
            parts, count = [], 0
            continue
        for byte in items:
            parts.append(f"{byte:02x}")
            count += 1
            if len(parts) == BYTES_PER_LINE:
                yield " ".join(parts), count
                parts, count = [], 0
    if parts:
        yield " ".join(parts), count


# ---- the document


def dump_of_tiny_file() -> str:
    """The dump, with the file's size and SHA-256 in front."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiny.bin")
        write_tiny_file(path)
        data = path.read_bytes()
        return f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}\n\n{annotated_dump(path)}"


def with_dump(document: str, dump: str) -> str:
    """The document with the dump between its two marks."""
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n```text\n{dump}```\n\n{END}{after}"


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--update"]:
        DOCUMENT.write_text(with_dump(DOCUMENT.read_text("utf-8"), dump_of_tiny_file()), "utf-8")
    elif arguments:
        write_tiny_file(Path(arguments[0]))
    else:
        print(dump_of_tiny_file(), end="")


if __name__ == "__main__":
    main()
