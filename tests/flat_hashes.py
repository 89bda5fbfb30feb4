"""Recomputes the hashes of modified flat files, as a hostile writer would."""

from __future__ import annotations

import hashlib

from llamac.format.flatfile import FIELDS, RECORD_BYTES, SECTIONS, Section, unpack_record

HEAD_BYTES = RECORD_BYTES["header"] + RECORD_BYTES["section"] * len(SECTIONS)


def rehashed(data: bytes | bytearray) -> bytes:
    """The file with all hashes recomputed, for the sections and tensors that its own tables list."""
    fixed = bytearray(data)
    header = unpack_record("header", bytes(fixed[: RECORD_BYTES["header"]]))
    sections = read_sections(fixed)
    tensors = sections["tensors"]
    hashes = b""
    for start in range(tensors.offset, tensors.offset + tensors.bytes, RECORD_BYTES["tensor"]):
        record = unpack_record("tensor", bytes(fixed[start : start + RECORD_BYTES["tensor"]]))
        digest = hashlib.sha256(fixed[record["offset"] : record["offset"] + record["bytes"]]).digest()
        put(fixed, "tensor", start, "sha256", digest)
        hashes += digest
    digests = []
    for index, (name, section) in enumerate(sections.items()):
        covered = hashes if name == "data" else fixed[section.offset : section.offset + section.bytes]
        digests.append(hashlib.sha256(covered).digest())
        put(fixed, "section", RECORD_BYTES["header"] + index * RECORD_BYTES["section"], "sha256", digests[-1])
    put(fixed, "header", 0, "id", hashlib.sha256(b"".join(digests)).digest())
    put(fixed, "header", 0, "sha256", bytes(len(header["sha256"])))
    put(fixed, "header", 0, "sha256", hashlib.sha256(fixed[:HEAD_BYTES]).digest())
    return bytes(fixed)


def rehashed_header(data: bytes | bytearray) -> bytes:
    """The file with only the header's hash recomputed, for section tables that are no longer valid."""
    fixed = bytearray(data)
    put(fixed, "header", 0, "sha256", bytes(32))
    put(fixed, "header", 0, "sha256", hashlib.sha256(fixed[:HEAD_BYTES]).digest())
    return bytes(fixed)


def read_sections(data: bytes | bytearray) -> dict[str, Section]:
    """The section table. Positions give the names, because names in the file may be damaged."""
    found = {}
    for index, name in enumerate(SECTIONS):
        start = RECORD_BYTES["header"] + index * RECORD_BYTES["section"]
        record = unpack_record("section", bytes(data[start : start + RECORD_BYTES["section"]]))
        found[name] = Section(record["offset"], record["bytes"], record["sha256"])
    return found


def put(data: bytearray, record: str, start: int, name: str, value: bytes) -> None:
    """Write a field of the record at `start`."""
    member = next(member for member in FIELDS[record] if member.name == name)
    data[start + member.offset : start + member.offset + len(value)] = value
