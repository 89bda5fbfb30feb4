"""Run the C tests as shipped, with fewer cases. `.ci/run` tries all cases, with clang; and it runs the tests under
sanitizers and on other processors.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from c import build


def test_c_tests_pass(request: pytest.FixtureRequest) -> None:
    """Later runs of the suite compile only what has changed."""
    cache = getattr(request.config, "cache", None)
    keep = [] if cache is None else ["--keep", cache.mkdir("c")]
    done = subprocess.run([sys.executable, build.__file__, "--sparse", *keep], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


def test_an_object_is_kept_until_its_text_or_its_flags_change(tmp_path: Path) -> None:
    source, header = tmp_path / "a.c", tmp_path / "a.h"
    source.write_text('#include "a.h"\nint x = X;\n')
    header.write_text("#define X 1\n")
    first = build.digest(["cc", "-O1"], source)
    assert build.digest(["cc", "-O1"], source) == first
    assert build.digest(["cc", "-O2"], source) != first
    header.write_text("#define X 2\n")
    second = build.digest(["cc", "-O1"], source)
    assert second != first
    (tmp_path / "made.o").write_text("2")
    kept = tmp_path / "kept"
    for name in (first, second):
        build.keep(kept, {kept / f"a-{name}.o": tmp_path / "made.o"})
    assert [path.name for path in kept.iterdir()] == [f"a-{second}.o"]
