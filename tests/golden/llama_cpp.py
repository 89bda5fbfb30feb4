"""llama.cpp's results for the GGUF files of the tests: live if llama-cpp-python is installed, else recorded ones.

`pytest tests/export --record-llama-cpp` runs llama.cpp and replaces llama_cpp_references.npz. The key of an entry has a
digest of the file's tensors and keys, so that a test never compares with the results of another file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

REFERENCES = Path(__file__).parent / "llama_cpp_references.npz"
INSTALLED = find_spec("llama_cpp") is not None
# Keys that do not affect the results.
IGNORED_KEYS = ("GGUF.", "general.", "tokenizer.chat_template")

Array = NDArray[Any]


class LlamaCpp:
    """llama.cpp 0.3.36 of llama-cpp-python, in float32 with one thread, or its recorded results."""

    def __init__(self, record: bool = False) -> None:
        if record and not INSTALLED:
            raise RuntimeError("cannot record results: llama-cpp-python is not installed")
        self._recorded: dict[str, Array] = {}
        self._record = record
        if REFERENCES.exists() and not record:
            with np.load(REFERENCES) as stored:
                self._recorded = dict(stored)

    def logits(self, path: Path, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of every position, shape (len(ids), vocab_size)."""

        def run() -> Array:
            model = _open(path, n_ctx=64, logits_all=True, **_YARN_FROM_FILE)
            model.eval(list(ids))
            scores: Array = model.scores[: len(ids)].copy()
            model.close()
            return scores

        return self._result("logits", path, list(ids), run)

    def rows(self, path: Path, ids: Sequence[int]) -> NDArray[np.float32]:
        """The rows of an encoder's last layer, shape (len(ids), dim)."""

        def run() -> Array:
            model = _open(path, n_ctx=64, embedding=True, pooling_type=0)
            model.tokenize = lambda *_: list(ids)
            (rows,) = model.embed(["ids"])
            model.close()
            return np.array(rows, np.float32)

        return self._result("rows", path, list(ids), run)

    def continue_greedily(self, path: Path, ids: Sequence[int], n: int) -> list[int]:
        """The n token ids that follow a prompt at temperature 0."""

        def run() -> Array:
            model = _open(path, n_ctx=128)
            generated = list(itertools.islice(model.generate(list(ids), temp=0.0, repeat_penalty=1.0), n))
            model.close()
            return np.array(generated, np.int32)

        return [int(token) for token in self._result("greedy", path, [list(ids), n], run)]

    def tokenize(self, path: Path, text: str) -> list[int]:
        """The token ids of a prompt, with BOS if the file says so. Names of special tokens are text."""

        def run() -> Array:
            model = _open(path, n_ctx=128)
            ids = model.tokenize(text.encode(), add_bos=True, special=False)
            model.close()
            return np.array(ids, np.int32)

        return [int(token) for token in self._result("tokens", path, text, run)]

    def save(self) -> None:
        """Write the recorded results."""
        if self._record and self._recorded:
            np.savez_compressed(REFERENCES, **dict(sorted(self._recorded.items())))  # type: ignore[arg-type]

    def _result(self, kind: str, path: Path, request: Any, run: Callable[[], Array]) -> Array:
        key = f"{kind}-{digest_of(path)}-{hashlib.sha256(json.dumps(request).encode()).hexdigest()[:8]}"
        if INSTALLED:
            result = run()
            if self._record:
                self._recorded[key] = result
            return result
        assert key in self._recorded, (
            f"no result is recorded for {path.name}: its tensors or keys have changed. Install llama-cpp-python and "
            "run pytest tests/export --record-llama-cpp"
        )
        return self._recorded[key]


def digest_of(path: Path) -> str:
    """The first 16 hex digits of a SHA-256 over the tensors and the keys of a GGUF file."""
    reader = gguf.GGUFReader(path)
    digest = hashlib.sha256()
    for name in sorted(reader.fields):
        if not name.startswith(IGNORED_KEYS):
            digest.update(json.dumps([name, reader.fields[name].contents()]).encode())
    for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.tensor_type.name, tensor.shape.tolist()]).encode())
        digest.update(tensor.data.tobytes())
    return digest.hexdigest()[:16]


# -1: the value in the file.
_YARN_FROM_FILE = {f"yarn_{key}": -1.0 for key in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")}


def _open(path: Path, **options: Any) -> Any:
    import llama_cpp

    return llama_cpp.Llama(str(path), n_threads=1, verbose=False, type_k=0, type_v=0, **options)
