"""Numbers of bytes as text, both ways."""

from __future__ import annotations

import pytest

from llamac.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *(
            ("2GiB", 2 << 30),
            ("512 MiB", 512 << 20),
            (" 1.5GB ", 1_500_000_000),
            ("7", 7),
            ("3kb", 3000),
            ("1TiB", 1 << 40),
        ),
        *((12, 12), ("0.1GB", 10**8), ("0.5KiB", 512)),
    ],
)
def test_sizes_are_parsed_exactly(text: object, count: int) -> None:
    assert parse_size(text, "size") == count


def test_sizes_are_formatted() -> None:
    assert [size_text(n) for n in (999, 1000, 1_500_000, 2 << 30)] == ["999 B", "1.0 kB", "1.5 MB", "2.1 GB"]
