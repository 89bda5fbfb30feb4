"""The examples of docs/operation.md."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from documents import text_of
from http_server import running
from llamac import models as built_in
from llamac.cli import make_parser
from llamac.server.energy import Energy
from llamac.server.keys import LIMITS, Key, Keys, read_keys
from llamac.server.logs import JsonLines
from llamac.server.models_file import MODEL, ModelSettings, read_models
from llamac.server.settings import Settings

PAGE = text_of("operation.md")


def fenced(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no example of the kind {kind!r}"
    return found


def test_the_example_of_models_toml_can_be_used(tmp_path: Path) -> None:
    shutil.copy(built_in.path(), tmp_path / "SmolLM2-135M-Instruct.bin")
    (tmp_path / "pirate").mkdir()
    (tmp_path / "models.toml").write_text(fenced("toml")[0])
    found, default = read_models(tmp_path, ModelSettings(idle_seconds=900), pytest.fail)
    assert default == "chat"
    chat, pirate = found
    assert chat.names == ("chat", "gpt-4o-mini")
    assert (chat.settings.pinned, chat.settings.context, chat.settings.sampling.temperature) == (True, 4096, 0.2)
    assert pirate.settings.adapters == ((tmp_path / "pirate", 0.8),)
    assert (pirate.settings.idle_seconds, chat.settings.idle_seconds) == (60, 900)


def test_every_key_of_models_toml_is_explained() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.split("| key | |")[1].split("\n\n")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(MODEL)


# ---- services


def options_of(words: list[str]) -> argparse.Namespace:
    """The options of a command, which must all exist."""
    assert words[:2] == ["/opt/llamac/bin/llamac", "serve"]
    return make_parser().parse_args(words[1:])


def test_the_unit_of_systemd_starts_a_server() -> None:
    (unit,) = fenced("ini")
    values = dict(re.findall(r"^(\w+)=(.*)$", unit.replace("\\\n", " "), re.MULTILINE))
    options = options_of(shlex.split(values["ExecStart"]))
    assert (options.models_dir, options.api_key_file, options.host) == ("/srv/models", "%d/keys", "0.0.0.0")
    assert int(values["TimeoutStopSec"]) > options.drain
    assert values["Type"] == "notify"


def test_the_unit_of_systemd_has_no_unknown_settings(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze checks the unit, and is not installed")
    (unit,) = fenced("ini")
    file = tmp_path / "llamac.service"
    file.write_text(unit.replace("/opt/llamac/bin/llamac", sys.executable))
    done = subprocess.run([analyze, "verify", "--man=no", file], capture_output=True, text=True, timeout=60)
    assert "llamac.service" not in done.stderr, done.stderr


def test_the_container_starts_a_server() -> None:
    (text,) = fenced("dockerfile")
    lines = text.replace("\\\n", " ").splitlines()
    begin, rest = (json.loads(line.partition(" ")[2]) for line in lines if re.match("(ENTRYPOINT|CMD) ", line))
    options = options_of(begin + rest)
    assert (options.host, options.models_dir) == ("0.0.0.0", "/models")
    assert f"EXPOSE {options.port}" in lines
    (health,) = (json.loads(line.partition("CMD ")[2]) for line in lines if line.startswith("HEALTHCHECK"))
    assert f":{options.port}/health" in health[-1]
    compile(health[-1], "HEALTHCHECK", "exec")
    assert any(line.startswith("USER ") for line in lines)


# ---- keys and numbers


def test_the_example_of_a_file_with_keys_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(next(block for block in fenced("text") if "max_requests" in block))
    keys = read_keys(file, {})
    assert len(keys) == 3
    alice = keys.find("sk-4be1c70a95")
    assert alice is not None
    assert (alice.name, alice.limits.tokens_per_minute) == ("alice", 20000)
    keys.check_models(["chat", "pirate"])
    rows = PAGE.split("| name | |")[1].split("\n\n")[0]
    for name in ("name", *LIMITS):
        assert f"`{name}`" in rows


def test_every_number_of_the_metrics_is_explained(tmp_path: Path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for name, text in (("name", "package-0"), ("energy_uj", "1"), ("max_energy_range_uj", "10")):
        (zone / name).write_text(text)
    with running("stories") as server:
        server.service.metrics._energy = Energy(tmp_path)
        server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2})
        text = server.client.get("/metrics").text
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    explained = set(re.findall(r"`(llamac_\w+)`", PAGE.split("## Metrics")[1])) - {"llamac_model_"}
    sums = {name.replace("llamac_", "llamac_model_", 1) for name in explained} & names
    assert names == explained | sums


def test_every_field_of_the_log_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamac")
    with running("stories", Settings(keys=Keys([Key("secret", "alice")]))) as server:
        server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}, headers={"x-api-key": "secret"})
    (record,) = (record for record in caplog.records if record.message == "request")
    line = json.loads(JsonLines().format(record))
    rows = PAGE.split("| field | |")[1].split("\n\n")[0]
    assert set(line) == set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in rows.splitlines() if row)))


def test_the_example_of_a_callback_has_its_fields() -> None:
    (text,) = fenced("json")
    assert set(json.loads(text)) == {"status", "address", "models", "pid", "version"}
