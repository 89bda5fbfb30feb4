"""Tight memory limits cause errors, never an abort of the tokenizers library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vocab_samples import SPM_PIECES, field, sentencepiece_file, tokenizer_json

from llamac.errors import OutOfMemoryError
from llamac.text import headroom

resource = pytest.importorskip("resource")

PROGRAM = """
import json, pathlib, resource, sys
from llamac import ChatTemplate, LlamacError, Tokenizer
from llamac.text.special_tokens import SpecialTokens
data, spare = pathlib.Path(sys.argv[1]).read_bytes(), int(sys.argv[2])
tokenizer = Tokenizer.from_json(data, SpecialTokens(None, False, False, None, ()))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + spare, used + spare))
try:
    template = ChatTemplate("{{ messages[0].content }}")
    for text in ("Hi", "<s>", "word " * 5000):
        for run in template.render_runs([{"content": text}], tokenizer.special_names):
            tokenizer.encode(run.text, parse_special=run.parse_special)
except (LlamacError, MemoryError, ImportError) as error:
    print(type(error).__name__)
else:
    print("done")
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_chat_under_a_tight_memory_limit_is_an_error(tmp_path: Path) -> None:
    document = tokenizer_json()
    vocab = document["model"]["vocab"]
    vocab |= {f"word{number:06}": 1000 + number for number in range(60_000)}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(document))
    found = set()
    for mib in (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 1024):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, path, str(mib << 20)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (mib, done.returncode, done.stderr[-500:])
        found.add(done.stdout.strip())
    assert "OutOfMemoryError" in found
    assert found <= {"MemoryError", "OutOfMemoryError", "ImportError", "done"}
    assert "done" in found


SENTENCEPIECE_PROGRAM = """
import resource, sys
from llamac import LlamacError, Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
spare = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (used + spare, used + spare))
try:
    print(len(tokenizer.encode("word a b " * int(sys.argv[3]), parse_special=True)))
except (LlamacError, MemoryError, ImportError) as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("words", [1, 200_000])
def test_sentencepiece_under_a_tight_memory_limit_is_an_error(tmp_path: Path, words: int) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_file(SPM_PIECES, b"", field(4, 1)))  # it removes spaces: the library encodes it
    found = []
    for mib in (16, 64, 128, 256, 1024):
        command = [sys.executable, "-c", SENTENCEPIECE_PROGRAM, str(path), str(mib << 20), str(words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (mib, done.returncode, done.stderr[-500:])
        found.append(done.stdout.strip())
    assert found[0] == "OutOfMemoryError"
    assert found[-1] == str(8 * words)


def test_the_error_names_the_user_and_the_amount_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "_is_limited", lambda: True)
    headroom.require_memory(1 << 20, "this")
    with pytest.raises(OutOfMemoryError, match=r"^this needs about 1099511627776 MiB of memory, .*ulimit -v"):
        headroom.require_memory(1 << 60, "this")
    monkeypatch.setattr(headroom, "_is_limited", lambda: False)
    headroom.require_memory(1 << 60, "this")  # without a limit, the system decides
