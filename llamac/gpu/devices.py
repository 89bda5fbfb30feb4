"""The machine's CUDA devices, as `llamac inspect` lists them. Asks the driver's library itself, which needs no CuPy.

Nothing is started on a device and no memory is taken.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import NamedTuple

from llamac.gpu.cuda_errors import why_not_started

OLDEST = (7, 5)  # the compute capability that the kernels need: Turing, of 2018
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy", "cupy-cuda11x")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS = 75, 76, 16  # of enum CUdevice_attribute


class FoundDevice(NamedTuple):
    """A device."""

    number: int  # N of cuda:N
    name: str
    capability: tuple[int, int]  # compute capability, as (9, 0)
    multiprocessors: int
    memory_bytes: int


class FoundDevices(NamedTuple):
    """What a machine has for `device="cuda"`."""

    devices: tuple[FoundDevice, ...]
    driver: str | None  # the CUDA version that the driver supports, as "13.0"
    cupy: str | None  # the package and version of CuPy, as "cupy-cuda13x 14.2.0"
    problem: str | None  # why no device can be used, with what to do


def find_devices() -> FoundDevices:
    """The machine's devices. Never raises: `problem` says what is missing."""
    cupy = _installed_cupy()
    problem: str | None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        problem = "the machine has no driver of NVIDIA (libcuda.so.1); a container gets it with the option --gpus"
        return FoundDevices((), None, cupy, problem)
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    status = cuda.cuInit(0)
    if status:
        problem = f"the driver does not start: {_error_text(cuda, status)}{why_not_started(status)}"
        return FoundDevices((), driver, cupy, problem)
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    devices = tuple(_device(cuda, number) for number in range(count.value))
    problem = None
    if not devices:
        problem = "the driver has no device; CUDA_VISIBLE_DEVICES or the container's option --gpus may hide it"
    elif all(device.capability < OLDEST for device in devices):
        problem = f"no device has compute capability {OLDEST[0]}.{OLDEST[1]} or more"
    elif cupy is None:
        extra = "cuda13" if version.value >= 13000 else "cuda12"
        problem = f"CuPy is not installed: pip install 'llamac[{extra}]'"
    elif cupy.startswith("cupy-cuda13x") and version.value < 13000:
        problem = f"the driver supports CUDA {driver} only: pip uninstall cupy-cuda13x; pip install 'llamac[cuda12]'"
    return FoundDevices(devices, driver, cupy, problem)


def _device(cuda: ctypes.CDLL, number: int) -> FoundDevice:
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    capability = attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)
    text = name.value.decode(errors="replace")
    return FoundDevice(number, text, capability, attribute(_MULTIPROCESSORS), size.value)


def _error_text(cuda: ctypes.CDLL, status: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    cuda.cuGetErrorString(status, ctypes.byref(text))
    return f"{(name.value or b'error %d' % status).decode()}: {(text.value or b'unknown').decode()}"


def _installed_cupy() -> str | None:
    for package in _CUPY:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
