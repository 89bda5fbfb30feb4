"""Compiles the kernels for a device with NVRTC, CUDA's compiler, through CuPy, and keeps the results in a folder.

NVRTC needs no device and no driver. Compiled code depends on the sources, the options, the compiler and the device's
compute capability; its file's name is a hash of all these.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from llamac.errors import DeviceError
from llamac.format.private_files import open_own, remove_abandoned_in, replacing
from llamac.gpu.sources import included
from llamac.progress import Progress, silent

if TYPE_CHECKING:
    from llamac.gpu.cupy_modules import Nvrtc

# Every operation rounds as C's does: nothing is fused, flushed or approximated. Functions and tables of the core's
# headers, which no __device__ marks, are the device's.
OPTIONS = (
    *("--std=c++20", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"),
    "--device-as-default-execution-space",
)

# NVRTC has no headers of C. The functions that the core's headers use of them are built in.
_INTEGERS = """typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long long uint64_t, uintptr_t;
"""
C_HEADERS = {"stdint.h": _INTEGERS, "stddef.h": "", "string.h": "", "math.h": ""}

_DIGEST_BYTES = 32  # of the SHA-256 before the code in a file


def compile_kernels(
    nvrtc: Nvrtc,
    sources: Sequence[Path],
    capability: tuple[int, int],
    cache: Path | None = None,
    progress: Progress = silent,
) -> list[bytes]:
    """The code (a cubin) of each file of kernels.

    Args:
        nvrtc: CuPy's module.
        sources: The .cu files.
        capability: The device's compute capability, as (9, 0).
        cache: The folder that keeps compiled code, which is created if it does not exist; None to keep nothing.
        progress: Called if files must be compiled.

    Raises:
        DeviceError: NVRTC refuses a file or the device.
    """
    version = nvrtc.getVersion()
    keys = [f"{source.stem}-{_key(source, capability, version)}.cubin" for source in sources]
    found = [_kept(cache / key) if cache else None for key in keys]
    missing = [index for index, code in enumerate(found) if code is None]
    if not missing:
        return [code for code in found if code is not None]
    progress("compiling kernels", 0, len(missing))
    with ThreadPoolExecutor() as pool:
        tasks = {index: pool.submit(compile_file, nvrtc, sources[index], capability) for index in missing}
        for done, (index, task) in enumerate(tasks.items(), 1):
            found[index] = task.result()
            if cache:
                _keep(cache / keys[index], task.result())
            progress("compiling kernels", done, len(missing))
    return [code for code in found if code is not None]


def compile_file(nvrtc: Nvrtc, source: Path, capability: tuple[int, int]) -> bytes:
    """The code of one file.

    Raises:
        DeviceError: NVRTC refuses the file or the device.
    """
    program = create_program(nvrtc, source)
    try:
        nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{capability[0]}{capability[1]}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        version = nvrtc.getVersion()
        package = "nvidia-cuda-nvrtc-cu12" if version[0] == 12 else "nvidia-cuda-nvrtc"
        raise DeviceError(
            f"NVRTC {version[0]}.{version[1]} does not compile {source.name} for compute capability "
            f"{capability[0]}.{capability[1]}; a newer device needs a newer NVRTC (pip install -U {package}): {error}\n"
            f"{nvrtc.getProgramLog(program)[:2000]}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def create_program(nvrtc: Nvrtc, source: Path) -> int:
    """A program of NVRTC, with the headers that a file includes."""
    headers = {**C_HEADERS, **included(source)}
    names = [name.encode() for name in headers]
    texts = [text.encode() for text in headers.values()]
    return nvrtc.createProgram(source.read_text("utf-8"), source.name, texts, names)


def kernel_names(code: bytes) -> list[str]:
    """The names of the sections of code that may be kernels."""
    return sorted({name.decode() for name in re.findall(rb"\0\.text\.(\w+)(?=\0)", code)})


def _key(source: Path, capability: tuple[int, int], version: tuple[int, int]) -> str:
    parts = (source.read_text("utf-8"), sorted(included(source).items()), C_HEADERS, OPTIONS, capability, version)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _kept(path: Path) -> bytes | None:
    """The code in a file of this user; None if the file does not exist or is damaged."""
    try:
        with open_own(path) as file:
            digest, code = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> None:
    with contextlib.suppress(OSError):  # without a file it is compiled again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned_in(path.parent)
        with replacing(path, sync=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
