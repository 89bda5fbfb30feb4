"""Batch files on a cluster of several nodes, of which one dies, and with a driver that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import llamac
from builders import checkpoint, llama_config, write_model
from llamac.engine.batching.engine import Engine
from llamac.errors import ArgumentError
from llamac.integrations.ray_batch import Summary, answer_file
from llamac.openai.batch_files import Input, Output
from llamac.openai.responses import fingerprint

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'llamac[ray]'")
pytest.importorskip("ray.data")
pytestmark = pytest.mark.filterwarnings("default")  # other libraries issue warnings of their own

from ray_clusters import cluster, kill_node_of  # noqa: E402

PATIENCE = 300.0  # seconds; only a hang takes so long
LINES = 300  # and one that is not JSON
SETTINGS: dict[str, Any] = {"threads": 1, "max_sequences": 4}


class Made(NamedTuple):
    """A cluster, a model, and a batch file."""

    cluster: Any
    model: Path
    source: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp("ray")
    model = write_model(folder / "tiny.bin", checkpoint(llama_config()))
    body = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": f"line-{number}", "url": "/v1/completions", "body": {"prompt": f"{number} abc", **body}}
        for number in range(LINES)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "this is not JSON\n")
    with cluster(2) as started:
        yield Made(started, model, folder / "in.jsonl")


def check(made: Made, output: Path) -> dict[str, str]:
    """Check that a file has each result once, and can be continued by `llamac batch`; return the texts."""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    names = [each["custom_id"] for each in found]
    assert len(names) == LINES + 1
    assert set(names) == {None, *(f"line-{number}" for number in range(LINES))}
    with llamac.load(made.model) as model, Engine(model) as engine, Input(str(made.source)) as source:
        system = fingerprint(engine)
        with Output(str(output), source, system) as opened:  # refuses a file with a line that it would not have written
            assert opened.done == {line.id for line in source.lines}
    [wrong] = [each for each in found if each["custom_id"] is None]
    assert wrong["response"]["body"]["error"]["code"] == "invalid_json_line"
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found if each is not wrong}


def test_a_batch_whose_driver_was_killed_is_continued_and_survives_a_dead_node(made: Made, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "llamac.integrations.ray_batch", str(made.source), str(output)]
    command += ["--address", made.cluster.address, "--model", str(made.model), "--threads", "1", "--max-sequences", "4"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as driver:
        limit = time.monotonic() + PATIENCE
        while not output.exists() or not output.stat().st_size:
            assert driver.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)
        driver.send_signal(signal.SIGKILL)
    before = output.read_bytes().count(b"\n")
    assert 0 < before < LINES

    calls: list[tuple[int, int]] = []

    def progress(phase: str, done: int, total: int) -> None:
        calls.append((done, total))
        if done == 20:  # while both workers compute
            kill_node_of(made.cluster, next(iter(made.cluster.worker_nodes)).node_id)

    summary = answer_file(str(made.source), str(output), model=str(made.model), progress=progress, **SETTINGS)
    assert summary == Summary(LINES + 1, LINES + 1, 1)
    left = LINES + 1 - before
    assert calls == [(done, left) for done in range(left + 1)]
    found = check(made, output)
    with llamac.load(made.model) as model:
        for name in ("line-0", f"line-{LINES - 1}"):
            prompt = f"{name.removeprefix('line-')} abc"
            expected = model.generate(prompt, max_tokens=200, ignore_eos=True, temperature=0).text
            assert found[name] == expected

    written = output.read_bytes()
    again = answer_file(str(made.source), str(output), model=str(made.model), **SETTINGS)
    assert (again, output.read_bytes()) == (summary, written)


def test_what_cannot_be_computed_is_refused_before_anything_is_written(made: Made, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for settings, message in (
        ({"workers": 0}, "workers is 0, expected at least 1"),
        ({"threads": 64}, "threads is 64, but no machine of the cluster has as many CPUs"),
    ):
        with pytest.raises(ArgumentError, match=message):
            answer_file(str(made.source), str(output), model=str(made.model), **settings)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a batch on a cluster reads and writes files"):
        answer_file("-", str(output), model=str(made.model))
    with pytest.raises(FileNotFoundError, match=r"none\.bin"):
        answer_file(str(made.source), str(output), model=str(tmp_path / "none.bin"), **SETTINGS)
    assert not output.exists()
