"""The strict JSON reader: no ambiguous documents; limits on size, depth and number of values."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llamac.errors import ExportError, ModelError, TokenizerError
from llamac.format.small_files import read_small
from llamac.format.strict_json import MAX_DEPTH, parse_array, parse_object, read_object


def test_a_document_is_parsed() -> None:
    values = {"a": [1, 2.5, None, True, "é,[{"], "b": {"c": {}}}
    assert parse_object(json.dumps(values).encode(), "it") == values
    assert parse_object(json.dumps(values), "it") == values
    assert parse_array(b'[1, "a"]', "it") == [1, "a"]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"a": 1, "b": 2, "a": 1}', "it is not valid JSON: duplicate key 'a'"),
        (b'{"x": [{"a": 1, "a": 1}]}', "it is not valid JSON: duplicate key 'a'"),
        (b'{"a": NaN}', "it is not valid JSON: NaN is not a JSON number"),
        (b'{"a": -Infinity}', "it is not valid JSON: -Infinity is not a JSON number"),
        (b'{"a": "\xff"}', "it is not valid JSON, which is in UTF-8: byte 7 is 0xff"),
        (b"\xef\xbb\xbf{}", "it is not valid JSON: it begins with a byte order mark"),
        ('{"a": "\ud800"}', "it is not valid JSON, which is in UTF-8: byte 7 is 0xed"),
        (b'{"a": 1} {}', "it is not valid JSON"),
        (b"", "it is not valid JSON"),
        (b"[]", "it is not a JSON object"),
        (b'"a"', "it is not a JSON object"),
    ],
)
def test_ambiguous_documents_are_errors(data: bytes | str, problem: str) -> None:
    with pytest.raises(TokenizerError, match=problem):
        parse_object(data, "it", error=TokenizerError)


def test_an_array_is_not_an_object() -> None:
    with pytest.raises(ModelError, match="it is not a JSON array"):
        parse_array(b"{}", "it", error=ModelError)


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_nesting_is_limited() -> None:
    assert parse_object(nested(MAX_DEPTH), "it")
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ExportError, match="it is nested more than 100 deep"):
            parse_object(nested(depth), "it")
    assert parse_object(b'{"a":' * 5 + b"1" + b"}" * 5, "it", max_depth=5)
    with pytest.raises(ExportError, match="it is nested more than 4 deep"):
        parse_object(b'{"a":' * 5 + b"1" + b"}" * 5, "it", max_depth=4)


def test_size_and_number_of_values_are_limited_before_parsing() -> None:
    garbage = b"[{" * 50  # also invalid, but the size is checked first
    with pytest.raises(ExportError, match="it has 100 bytes, the limit is 99"):
        parse_object(garbage, "it", max_bytes=99)
    with pytest.raises(ExportError, match="it has more than 99 values"):
        parse_object(garbage, "it", max_values=99)


@pytest.mark.parametrize("text", [",[{" * 9, '",[' * 9, "\\,", '\\",' * 9, "\\\\" * 3 + ",,,"])
def test_strings_can_hold_any_number_of_commas_and_brackets(text: str) -> None:
    document = {"a": [text, 1], text: ""}
    data = json.dumps(document)
    assert parse_object(data, "it", max_values=4) == document
    with pytest.raises(ExportError, match="it has more than 3 values"):
        parse_object(data, "it", max_values=3)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
    path.write_text("{")
    with pytest.raises(TokenizerError, match=rf"^{path} is not valid JSON"):
        read_object(path, error=TokenizerError)
    path.write_text('{"a": "%s"}' % ("x" * 100))
    with pytest.raises(ExportError, match=rf"^{path} has 109 bytes, more than the 99 bytes"):
        read_object(path, max_bytes=99)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ExportError, match="is not a regular file"):
        read_small(tmp_path / "config.json")
    with pytest.raises(ExportError, match="is not a regular file"):
        read_small(Path("/dev/zero"))


def test_small_files_can_be_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    assert read_small(tmp_path / "b") == b"abc"
