"""llama.cpp through the C functions of a shared library: logits of whole texts, for comparisons of quality.

The library is libllama.so, or any other one that exports llama.h, such as the extension module of the package
xllamacpp. Parameters are structs whose layout differs between versions. They are passed as opaque bytes; the few fields
that are set here are found by their default values.
"""

from __future__ import annotations

import ctypes
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
    """llama_batch."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_SILENT = LOG(lambda level, text, data: None)


class LlamaLibrary:
    """A model opened by llama.cpp, with an f32 KV cache.

    Args:
        library: The shared library.
        model: The GGUF file.
        context: The most tokens of a text.
        threads: How many threads compute.
    """

    def __init__(self, library: Path, model: Path, context: int, threads: int) -> None:
        self._lib: Any = ctypes.CDLL(str(library))
        for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        for name in ("llama_get_memory", "llama_get_logits"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(self._lib, name).restype = Parameters
        self._lib.llama_log_set(_SILENT, None)
        self._lib.llama_backend_init()
        self._model = self._lib.llama_model_load_from_file(str(model).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {model}")
        vocabulary = self._lib.llama_model_get_vocab(ctypes.c_void_p(self._model))
        self.vocab_size = int(self._lib.llama_vocab_n_tokens(ctypes.c_void_p(vocabulary)))
        settings = self._lib.llama_context_default_params()
        defaults = list(settings.words)
        if tuple(defaults[:3]) != SIZES:
            raise SystemExit(f"{library} is a version of llama.cpp with other parameters")
        settings.words[0:3] = [context] * 3
        at = _find(defaults, THREADS)
        settings.words[at : at + 2] = [threads] * 2
        at = _find(defaults, (F16, F16))
        settings.words[at : at + 2] = [F32] * 2
        self._context = self._lib.llama_init_from_model(ctypes.c_void_p(self._model), settings)
        if not self._context:
            raise SystemExit("llama.cpp cannot create a context")

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        """The logits of every position of a text."""
        memory = self._lib.llama_get_memory(ctypes.c_void_p(self._context))
        self._lib.llama_memory_clear(ctypes.c_void_p(memory), ctypes.c_bool(True))
        tokens = np.array(ids, np.int32)
        wanted = np.ones(len(ids), np.int8)
        batch = Batch(n_tokens=len(ids), token=tokens.ctypes.data, logits=wanted.ctypes.data)
        if self._lib.llama_decode(ctypes.c_void_p(self._context), batch):
            raise SystemExit("llama_decode failed")
        address = self._lib.llama_get_logits(ctypes.c_void_p(self._context))
        found = ctypes.cast(ctypes.c_void_p(address), ctypes.POINTER(ctypes.c_float))
        return np.array(np.ctypeslib.as_array(found, (len(ids), self.vocab_size)), np.float32)

    def close(self) -> None:
        """Free the context and the model."""
        self._lib.llama_free(ctypes.c_void_p(self._context))
        self._lib.llama_model_free(ctypes.c_void_p(self._model))


def _find(words: list[int], values: tuple[int, int]) -> int:
    """The first place of two adjacent words; those of `SIZES` and flags before the threads do not match."""
    return next(at for at in range(4, len(words)) if tuple(words[at : at + 2]) == values)
