"""Devices on a Ray cluster: refused by name, before anything else. Ray is not needed."""

from __future__ import annotations

import pytest

from llamac.errors import UnsupportedError
from llamac.integrations.ray_batch import answer_file, main
from llamac.integrations.ray_serve import arguments_of

MESSAGE = r"device is 'cuda', but on a Ray cluster llamac computes on CPUs only: run `llamac serve --device cuda`"


def test_replicas_on_a_device_are_refused() -> None:
    pytest.importorskip("msgspec")
    assert arguments_of({"device": "cpu"}).device == "cpu"
    with pytest.raises(UnsupportedError, match=MESSAGE):
        arguments_of({"device": "cuda"})


def test_batches_on_a_device_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedError, match=MESSAGE):
        answer_file("in.jsonl", "out.jsonl", device="cuda")
    with pytest.raises(SystemExit):
        main(["in.jsonl", "out.jsonl", "--device", "cuda"])
    assert "device is 'cuda', but on a Ray cluster" in capsys.readouterr().err
