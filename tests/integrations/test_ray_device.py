"""Devices and numbers on a Ray cluster: refused by name, before anything else. Ray is not needed."""

from __future__ import annotations

import pytest

from llamac.errors import ArgumentError, UnsupportedError
from llamac.exit_codes import ERROR
from llamac.integrations.ray_batch import answer_file, main
from llamac.integrations.ray_serve import arguments_of

MESSAGE = r"device is 'cuda', but on a Ray cluster llamac computes on CPUs only: run `llamac serve --device cuda`"


def test_replicas_on_a_device_are_refused() -> None:
    pytest.importorskip("msgspec")
    assert arguments_of({"device": "cpu"}).device == "cpu"
    with pytest.raises(UnsupportedError, match=MESSAGE):
        arguments_of({"device": "cuda"})


@pytest.mark.parametrize(
    ("name", "value"), [("max_prompt", "-1"), ("timeout", "nan"), ("context", "-5"), ("kv_tokens", "0")]
)
def test_a_wrong_number_is_refused_before_a_replica_begins(name: str, value: str) -> None:
    pytest.importorskip("msgspec")
    with pytest.raises(ArgumentError, match=f"{name} is {value}, expected more than 0"):
        arguments_of({name: value})


def test_batches_on_a_device_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=MESSAGE):
        answer_file("in.jsonl", "out.jsonl", device="cuda")
    assert main(["in.jsonl", "out.jsonl", "--device", "cuda"]) == ERROR
    assert "device is 'cuda', but on a Ray cluster" in capsys.readouterr().err
