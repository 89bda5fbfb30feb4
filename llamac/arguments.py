"""Types of arguments that several modules share, and checks whose errors name the argument."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from operator import index
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from llamac.errors import ArgumentError, ArgumentTypeError

# Number formats of a model file's matrices. (The core has this list, too; the command line starts without the core.)
DType: TypeAlias = Literal["f32", "f16", "bf16", "q8", "q6", "q4", "q4s", "q3", "q2", "t2"]
DTYPES: tuple[DType, ...] = get_args(DType)
# Number formats of the KV cache.
KVDtype: TypeAlias = Literal["f32", "f16", "q8"]
KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)
KV_NUMBERS: dict[KVDtype | None, int] = {None: 0, "f32": 1, "f16": 2, "q8": 4}  # in the core; 0: it chooses
# How products round their inputs.
Numerics: TypeAlias = Literal["exact", "fast"]
NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
DEFAULT_SEQUENCES = 16  # requests that an engine computes at a time
AUTO = "auto"  # the device: a GPU if it can be used, otherwise the CPU
# When a model file's weights are read, see `llamac.load`.
Memory: TypeAlias = Literal["map", "populate", "huge"]
# A file name: a str, a Path or another os.PathLike object.
StrPath: TypeAlias = str | os.PathLike[str]
# The folder of converted models: None is the default folder, False disables the cache.
CacheDir: TypeAlias = StrPath | Literal[False] | None
# A LoRA adapter: a PEFT directory, or a pair of one and its strength, which multiplies what it adds.
Adapter: TypeAlias = StrPath | tuple[StrPath, float]

# What names of other libraries and servers are called here (docs/coming-from.md).
FOREIGN = {
    **dict.fromkeys(("n_ctx", "num_ctx", "max_model_len"), "context"),
    **dict.fromkeys(("n_threads", "num_thread"), "threads"),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens"), "max_tokens"),
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "logits_processor": "logits_processors",
    "bad_words": "banned_strings",
    "num_return_sequences": "n",
    "num_beams": "beam_width",
    "assistant_model": "draft_model",
}


def meant_name(name: str, known: Iterable[str]) -> str:
    """The known name that an unknown one probably means; empty if there is none."""
    from difflib import get_close_matches  # not needed before the first error

    names = list(known)
    if FOREIGN.get(name) in names:
        return FOREIGN[name]
    return next(iter(get_close_matches(name, names, 1, 0.7)), "")


def unexpected_argument(name: str, known: Iterable[str]) -> ArgumentTypeError:
    """The error for an argument that a function does not have."""
    names = list(known)
    meant = meant_name(name, names)
    hint = f"; did you mean {meant!r}?" if meant else f": expected one of {', '.join(names)}"
    return ArgumentTypeError(f"unexpected argument {name!r}{hint}")


def wrong_type(name: str, value: object, expected: str) -> ArgumentTypeError:
    """The error for an argument of the wrong type."""
    return ArgumentTypeError(f"{name} must be {expected}, not {type(value).__name__}")


def to_int(value: object, name: str) -> int:
    """Convert an int or an integer type such as NumPy's to an int. A bool is an error."""
    if hasattr(value, "__index__") and not isinstance(value, bool):
        try:
            return index(value)
        except TypeError:  # a NumPy array has the method, but refuses
            pass
    raise wrong_type(name, value, "an integer")


def to_float(value: object, name: str) -> float:
    """Convert an int, a float or a numeric type such as NumPy's to a float. A bool or a str is an error."""
    if (hasattr(value, "__float__") or hasattr(value, "__index__")) and not isinstance(value, bool):
        try:
            return float(value)  # type: ignore[arg-type]  # mypy narrows one hasattr, not either of two
        except TypeError:  # a NumPy array has the method, but refuses
            pass
        except OverflowError:
            raise ArgumentError(f"{name} is too large for a number") from None
    raise wrong_type(name, value, "a number")


def file_path(value: object, name: str) -> Path:
    """Convert a path argument to a Path.

    Raises:
        ArgumentTypeError: If the value is neither a str nor an os.PathLike of one.
        ArgumentError: If no file can have this name.
    """
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise wrong_type(name, value, "a str or an os.PathLike")
    try:
        is_name = bool(path) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ArgumentError(f"{name} is {path!r}, which is not a file name")
    return Path(path)


def parse_adapters(texts: Iterable[str]) -> list[tuple[Path, float]]:
    """Convert the command line's --lora arguments, DIR or DIR=STRENGTH. An existing directory may have a "=" in it."""
    found = []
    for text in texts:
        folder, equals, strength = text.rpartition("=")
        if not equals or Path(text).exists():
            found.append((file_path(text, "--lora"), 1.0))
            continue
        try:
            found.append((file_path(folder, "--lora"), float(strength)))
        except ValueError:
            raise ArgumentError(f"--lora {text}: the strength is {strength!r}, expected a number") from None
    return adapters(found)


def adapters(value: Adapter | Iterable[Adapter]) -> list[tuple[Path, float]]:
    """Convert an argument `lora` to pairs of a directory and a strength.

    Args:
        value: A path, a pair of a path and a strength, or several of these. The strength of a path alone is 1.

    Raises:
        ArgumentTypeError: The argument or a part of it has another type.
        ArgumentError: A strength is not finite, or a path cannot name a file.
    """
    expected = "a path, a pair of a path and a strength, or a list of these"
    if isinstance(value, str | os.PathLike) or _is_pair(value):
        value = [value]  # type: ignore[list-item]  # mypy does not see that a pair is one adapter
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise wrong_type("lora", value, expected)
    found = []
    for adapter in value:
        path, strength = adapter if isinstance(adapter, tuple) and len(adapter) == 2 else (adapter, 1.0)
        if not isinstance(path, str | os.PathLike):
            raise wrong_type("lora", path, expected)
        folder = file_path(path, "lora")
        number = to_float(strength, f"the strength of the adapter {folder}")
        if not math.isfinite(number):
            raise ArgumentError(f"the strength of the adapter {folder} is {number}, expected a finite number")
        found.append((folder, number))
    return found


def _is_pair(value: object) -> bool:
    """Whether a value is a pair of a path and a strength, and not two adapters."""
    return isinstance(value, tuple) and len(value) == 2 and not isinstance(value[1], str | os.PathLike | tuple)


def checked_inputs(inputs: Any, n: int, dim: int) -> Any:
    """Check the numbers in place of the embeddings of n rows, or None. Returns them as an array (n, dim), float32.

    Raises:
        ArgumentError: If their shape is another one; `ArgumentTypeError` if they are not an array of float32.
    """
    import numpy as np

    if inputs is None:
        return None
    if not isinstance(inputs, np.ndarray) or inputs.dtype != np.float32:
        raise ArgumentTypeError("inputs must be an array of float32")
    if inputs.shape != (n, dim):
        raise ArgumentError(f"inputs has shape {inputs.shape}, expected ({n}, {dim}): a row of dim numbers for each id")
    return np.ascontiguousarray(inputs)


def check_session_names(kv_dtype: object, isa: object, numerics: object) -> None:
    """Check the settings of a session that are names. `isa` is checked when it is chosen.

    Raises:
        ArgumentError: If a name is not known, or not a str.
    """
    for name, value in (("kv_dtype", kv_dtype), ("isa", isa)):
        if not isinstance(value, str | None):
            raise wrong_type(name, value, "a str")
    if kv_dtype not in (*KV_DTYPES, None):
        raise ArgumentError(f"kv_dtype is {kv_dtype!r}, expected 'f32', 'f16', 'q8' or None")
    if not isinstance(numerics, str):
        raise wrong_type("numerics", numerics, "a str")
    if numerics not in NUMERICS:
        raise ArgumentError(f"numerics is {numerics!r}, expected {' or '.join(map(repr, NUMERICS))}")
