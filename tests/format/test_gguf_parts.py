"""File names of the parts of split GGUF models."""

from __future__ import annotations

import pytest

from llamac.format.gguf_parts import MAX_PARTS, PartName, parse_part_name


def test_names_of_parts_are_parsed_and_built() -> None:
    part = parse_part_name("a-b\n-00002-of-00003.gguf")
    assert part == PartName("a-b\n", 3)
    assert part.all_names() == [f"a-b\n-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    assert len(PartName("x", 99999).all_names()) == MAX_PARTS


@pytest.mark.parametrize("name", ["a.gguf", "a-1-of-3.gguf", "a-00001-of-00003.bin", "a-00001-of-00003.gguf.partial"])
def test_other_names_are_not_those_of_parts(name: str) -> None:
    assert parse_part_name(name) is None
