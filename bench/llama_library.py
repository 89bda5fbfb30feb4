"""llama.cpp, or ik_llama.cpp, through the C functions of a shared library: speed, and logits of whole texts.

The library is libllama.so, or any other one that exports llama.h, such as the extension module of the package
xllamacpp. Parameters are structs whose layout differs between versions, so this module passes them as opaque bytes.
With the folders of the library's headers, a C program prints the offsets of the fields. Without them, the module finds
the few fields that it sets by their default values.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PARAMETER_BYTES = 1024  # more than any version's parameters
F16, F32 = 1, 0  # ggml's numbers
SIZES = (512, 2048, 512)  # defaults: positions, tokens of a batch, tokens of a step
THREADS = (4, 4)  # defaults: threads of a token, of a batch


class Parameters(ctypes.Structure):
    """A struct passed by value, of which only its beginning is meaningful."""

    _fields_ = (("words", ctypes.c_int32 * (PARAMETER_BYTES // 4)),)


class Batch(ctypes.Structure):
    """llama_batch, followed by fields that only older versions read."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
        ("unused", ctypes.c_int32 * 3),
    )


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = LOG(lambda level, text, data: None)


class LlamaLibrary:
    """A model opened by llama.cpp.

    Args:
        library: The shared library.
        model: The GGUF file.
        context: The most tokens of a text.
        threads: How many threads compute.
        cache: The type of the KV cache, `F16` or `F32`.
        step: Tokens that are computed together at most (default: all).
        headers: Folders of the library's headers. Required by ik_llama.cpp, whose matrices are then repacked when the
            model is loaded (its option -rtr), and which computes without flash attention.
    """

    def __init__(
        self,
        library: Path,
        model: Path,
        context: int,
        threads: int,
        *,
        cache: int = F32,
        step: int | None = None,
        headers: Sequence[Path] = (),
    ) -> None:
        self._lib: Any = ctypes.CDLL(str(library))
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._lib.llama_get_logits.restype = ctypes.c_void_p
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(self._lib, name).restype = Parameters
        self._lib.llama_log_set(_SILENT, None)
        self._lib.llama_backend_init()
        of_model = self._lib.llama_model_default_params()
        of_context = self._lib.llama_context_default_params()
        sizes = (context, context, step or context)
        if headers:
            _set_fields(of_model, "llama_model_params", {"repack_tensors": 1, "use_mmap": 0}, headers)
            wanted = dict(zip(("n_ctx", "n_batch", "n_ubatch"), sizes, strict=True)) | {"flash_attn": 0}
            wanted |= {"n_threads": threads, "n_threads_batch": threads, "type_k": cache, "type_v": cache}
            _set_fields(of_context, "llama_context_params", wanted, headers)
        else:
            _set_by_defaults(library, of_context, sizes, threads, cache)
        self._model = self._lib.llama_model_load_from_file(str(model).encode(), of_model)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        vocabulary = self._lib.llama_model_get_vocab(ctypes.c_void_p(self._model))
        self.vocab_size = int(self._lib.llama_vocab_n_tokens(ctypes.c_void_p(vocabulary)))
        self._context = self._lib.llama_init_from_model(ctypes.c_void_p(self._model), of_context)
        if not self._context:
            raise SystemExit("llama.cpp cannot create a context")

    def clear(self) -> None:
        """Forget all tokens."""
        if not hasattr(self._lib, "llama_get_memory"):
            self._lib.llama_kv_cache_clear(ctypes.c_void_p(self._context))
            return
        self._lib.llama_get_memory.restype = ctypes.c_void_p
        memory = self._lib.llama_get_memory(ctypes.c_void_p(self._context))
        self._lib.llama_memory_clear(ctypes.c_void_p(memory), ctypes.c_bool(True))

    def decode(self, ids: Sequence[int], start: int, *, all_logits: bool = False) -> None:
        """Compute tokens from position `start` on, and the logits of all or of the last one."""
        n = len(ids)
        tokens, positions = np.array(ids, np.int32), np.arange(start, start + n, dtype=np.int32)
        ones, sequence = np.ones(n, np.int32), np.zeros(1, np.int32)
        sequences = np.full(n, sequence.ctypes.data, np.uintp)
        wanted = np.full(n, all_logits, np.int8)
        wanted[-1] = 1
        arrays: dict[str, NDArray[Any]] = {
            "token": tokens,
            "pos": positions,
            "n_seq_id": ones,
            "seq_id": sequences,
            "logits": wanted,
        }
        batch = Batch(n_tokens=n, **{name: array.ctypes.data for name, array in arrays.items()})
        if self._lib.llama_decode(ctypes.c_void_p(self._context), batch):
            raise SystemExit("llama_decode failed")
        self._lib.llama_synchronize(ctypes.c_void_p(self._context))

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """The logits of every position of a text."""
        self.clear()
        self.decode(ids, 0, all_logits=True)
        address = self._lib.llama_get_logits(ctypes.c_void_p(self._context))
        found = ctypes.cast(ctypes.c_void_p(address), ctypes.POINTER(ctypes.c_float))
        return np.array(np.ctypeslib.as_array(found, (len(ids), self.vocab_size)), np.float32)

    def close(self) -> None:
        """Free the context and the model."""
        self._lib.llama_free(ctypes.c_void_p(self._context))
        self._lib.llama_model_free(ctypes.c_void_p(self._model))


def _set_fields(to: Parameters, struct: str, values: dict[str, int], headers: Sequence[Path]) -> None:
    """Set fields of 1 or 4 bytes at the offsets that the C compiler gives them."""
    lines = [
        f'printf("%zu %zu\\n", offsetof(struct {struct}, {name}), sizeof(((struct {struct} *)0)->{name}));'
        for name in values
    ]
    source = "#include <stddef.h>\n#include <stdio.h>\n#include <llama.h>\nint main(void) {" + "".join(lines) + "}"
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/offsets"
        command = ["cc", "-x", "c", "-", "-o", program, *(f"-I{header}" for header in headers)]
        subprocess.run(command, input=source, text=True, check=True)
        printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    for line, value in zip(printed, values.values(), strict=True):
        offset, size = map(int, line.split())
        ctypes.memmove(ctypes.addressof(to) + offset, value.to_bytes(size, "little"), size)


def _set_by_defaults(library: Path, to: Parameters, sizes: tuple[int, int, int], threads: int, cache: int) -> None:
    defaults = list(to.words)
    if tuple(defaults[:3]) != SIZES:
        raise SystemExit(f"{library} is a version of llama.cpp with other parameters")
    to.words[0:3] = sizes
    at = _find(defaults, THREADS)
    to.words[at : at + 2] = [threads] * 2
    at = _find(defaults, (F16, F16))
    to.words[at : at + 2] = [cache] * 2


def _find(words: list[int], values: tuple[int, int]) -> int:
    """The first place of two adjacent words; those of `SIZES` and flags before the threads do not match."""
    return next(at for at in range(4, len(words)) if tuple(words[at : at + 2]) == values)
