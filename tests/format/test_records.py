"""Records of flat files: values that do not fit their fields are refused by the names of record and field."""

from __future__ import annotations

from typing import Any

import pytest

from llamac.errors import ArgumentError
from llamac.format.flatfile import FIELDS, pack_record, unpack_record

STOP_IDS = next(field.count for field in FIELDS["config"] if field.name == "stop_ids")
NAME_BYTES = next(field.count for field in FIELDS["tensor"] if field.name == "name")


@pytest.mark.parametrize(
    ("record", "values", "message"),
    [
        ("config", {"stop_ids": [1] * (STOP_IDS + 1)}, f"config: stop_ids has {STOP_IDS + 1} elements, at most"),
        ("config", {"width": 1, "depth": 2}, "a config record has no member depth, width"),
        ("config", {"norm": "batch"}, "config: norm is 'batch', expected one of rms, layer"),
        ("config", {"dim": 0}, "config: dim is 0, expected 1 to "),
        ("config", {"stop_ids": [5, -1]}, "config: stop_ids is -1, expected 0 to "),
        ("tensor", {"name": "x" * NAME_BYTES}, f"is longer than {NAME_BYTES - 1} bytes"),
    ],
)
def test_values_that_do_not_fit_are_refused(record: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as found:
        pack_record(record, values)
    assert message in str(found.value)


def test_values_at_the_limits_are_packed() -> None:
    config = {"stop_ids": [7] * STOP_IDS, "dim": 1, "norm": "layer"}
    found = unpack_record("config", pack_record("config", config))
    assert (list(found["stop_ids"]), found["dim"], found["context"]) == ([7] * STOP_IDS, 1, 0)
    name = "x" * (NAME_BYTES - 1)
    assert unpack_record("tensor", pack_record("tensor", {"name": name}))["name"] == name
