"""Continues token ids greedily through the C library alone, with ctypes: `generate.py LIBRARY MODEL COUNT ID...`.

LIBRARY is the path or the name of libllamac.so. The structures repeat those of llamac.h.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

VERSION = 0, 1  # of llamac.h whose structures these are
SAMPLE_SCRATCH = 16  # bytes per logit


class Error(ctypes.Structure):
    """llamac_error."""

    _fields_ = (("code", c_int), ("message", c_char * 400))


class ModelInfo(ctypes.Structure):
    """llamac_model_info."""

    _fields_ = (
        *((name, c_int) for name in ("context", "n_layers", "vocab_size", "n_token_ids", "bos_id", "add_bos")),
        ("n_stop_ids", c_int),
        ("stop_ids", c_int32 * 16),
        ("has_mtp", c_int),
        ("is_drafter", c_int),
    )


class SessionOptions(ctypes.Structure):
    """llamac_session_options."""

    _fields_ = (
        *((name, c_int) for name in ("n_sequences", "context", "kv_dtype", "threads")),
        ("isa", c_char_p),
        ("numerics", c_int),
        ("on_device", c_int),
        ("mtp", c_int),
        ("trunk", c_void_p),
        ("drafter", c_void_p),
    )


class Row(ctypes.Structure):
    """llamac_row."""

    _fields_ = tuple((name, c_int32) for name in ("token", "sequence", "position", "want_logits"))


class Sampling(ctypes.Structure):
    """llamac_sampling."""

    _fields_ = (
        ("temperature", c_float),
        ("top_k", c_int),
        ("top_p", c_float),
        ("min_p", c_float),
        ("seed", c_uint64),
        ("candidate", c_uint32),
        *((name, c_float) for name in ("typical_p", "xtc_probability", "xtc_threshold", "mirostat_tau")),
        ("mirostat_eta", c_float),
    )


# Arguments of the functions in use. ctypes would otherwise pass sizes as 32-bit numbers.
ARGUMENTS = {
    "llamac_model_open": (POINTER(c_void_p), c_void_p, c_size_t, POINTER(Error)),
    "llamac_model_describe": (c_void_p, POINTER(ModelInfo)),
    "llamac_session_open": (POINTER(c_void_p), c_void_p, POINTER(SessionOptions), POINTER(Error)),
    "llamac_eval": (c_void_p, POINTER(Row), c_int, POINTER(c_float), c_void_p, POINTER(Error)),
    "llamac_sample": (POINTER(c_float), c_int, POINTER(Sampling), c_uint64, c_void_p, c_void_p, POINTER(Error)),
    "llamac_session_close": (POINTER(c_void_p),),
    "llamac_model_close": (POINTER(c_void_p),),
}


def open_library(path: str) -> ctypes.CDLL:
    """Open the library and declare its functions.

    Raises:
        RuntimeError: If the library has other structures than this module.
    """
    library = ctypes.CDLL(path)
    version = library.llamac_version()
    if (version // 10000, version // 100 % 100) != VERSION:
        raise RuntimeError(f"{path} has version {version}, expected {VERSION[0]}.{VERSION[1]}")
    for name, arguments in ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    for name in ("llamac_session_close", "llamac_model_close", "llamac_model_describe"):
        getattr(library, name).restype = None
    return library


def generate(library: ctypes.CDLL, path: str, ids: list[int], count: int) -> list[int]:
    """Continue token ids.

    Args:
        library: The library of `open_library`.
        path: A model file.
        ids: The prompt, at least one id.
        count: The maximum number of new ids.

    Returns:
        The new ids, without the stop token.

    Raises:
        RuntimeError: If the library reports an error.
    """
    error, model, session = Error(), c_void_p(), c_void_p()

    def check(result: int) -> int:
        if result < 0:
            raise RuntimeError(error.message.decode())
        return result

    with open(path, "rb") as file:
        # ctypes takes the address of writable memory only; nothing is written
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory = (c_char * len(data)).from_buffer(data)
    try:
        check(library.llamac_model_open(byref(model), byref(memory), len(data), byref(error)))
        info = ModelInfo()
        library.llamac_model_describe(model, byref(info))
        options = SessionOptions(n_sequences=1, threads=1)
        check(library.llamac_session_open(byref(session), model, byref(options), byref(error)))
        logits = (c_float * info.vocab_size)()
        scratch = (c_char * (info.vocab_size * SAMPLE_SCRATCH))()
        greedy = Sampling(temperature=0, top_p=1)
        new: list[int] = []
        rows = [Row(token, 0, at, at == len(ids) - 1) for at, token in enumerate(ids)]
        while len(new) < count:
            check(library.llamac_eval(session, (Row * len(rows))(*rows), len(rows), logits, None, byref(error)))
            at = len(ids) + len(new)
            token = check(
                library.llamac_sample(
                    logits, info.n_token_ids, byref(greedy), at, None, ctypes.addressof(scratch), byref(error)
                )
            )
            if token in info.stop_ids[: info.n_stop_ids]:
                break
            new.append(token)
            rows = [Row(token, 0, at, 1)]
        return new
    finally:  # the session before the model, the model before its memory
        library.llamac_session_close(byref(session))
        library.llamac_model_close(byref(model))
        del memory
        data.close()


def main() -> None:
    """Print the continuation, an id per line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("model")
    parser.add_argument("count", type=int)
    parser.add_argument("ids", type=int, nargs="+")
    options = parser.parse_args()
    print(*generate(open_library(options.library), options.model, options.ids, options.count), sep="\n")


if __name__ == "__main__":
    main()
