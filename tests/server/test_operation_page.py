"""The examples of docs/operation.md."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from documents import text_of
from llamac import models as built_in
from llamac.server.models_file import MODEL, ModelSettings, read_models

PAGE = text_of("operation.md")


def fenced(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no example of the kind {kind!r}"
    return found


def test_the_example_of_models_toml_can_be_used(tmp_path: Path) -> None:
    shutil.copy(built_in.path(), tmp_path / "SmolLM2-135M-Instruct.bin")
    (tmp_path / "pirate").mkdir()
    (tmp_path / "models.toml").write_text(fenced("toml")[0])
    found, default = read_models(tmp_path, ModelSettings(idle_seconds=900))
    assert default == "chat"
    chat, pirate = found
    assert chat.names == ("chat", "gpt-4o-mini")
    assert (chat.settings.pinned, chat.settings.context, chat.settings.sampling.temperature) == (True, 4096, 0.2)
    assert pirate.settings.adapters == ((tmp_path / "pirate", 0.8),)
    assert (pirate.settings.idle_seconds, chat.settings.idle_seconds) == (60, 900)


def test_every_key_of_models_toml_is_explained() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.split("| key | |")[1].split("\n\n")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(MODEL)
