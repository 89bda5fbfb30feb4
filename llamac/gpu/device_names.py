"""Names of devices, and the drivers that they stand for.

cpu         no device: the C core computes
cuda        the first GPU; cuda:N the one with number N
auto        the first GPU if the model can be on it, otherwise the CPU, with a warning that says why
emulator    the GPU's kernels, compiled for the CPU: for tests of the kernels, very slow
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llamac.arguments import AUTO, wrong_type
from llamac.errors import ArgumentError, DeviceError, UnsupportedError
from llamac.format.cache_folder import default_folder
from llamac.progress import Progress, silent

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

KERNEL_FOLDER = "kernels"  # of compiled kernels, in llamac's cache folder
EXPECTED = "'cpu', 'cuda', 'cuda:N' or 'auto'"
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,3}))?")


def check_name(device: object) -> str:
    """Return the canonical name of a device: "cuda" is "cuda:0".

    Raises:
        ArgumentError: It is not the name of a device; `ArgumentTypeError` if it is not a str.
    """
    if not isinstance(device, str):
        raise wrong_type("device", device, "a str")
    if found := _CUDA.fullmatch(device):
        return f"cuda:{found[1] or 0}"
    if device not in ("cpu", AUTO, "emulator"):
        raise ArgumentError(f"device is {device!r}, expected {EXPECTED}")
    return device


def open_driver(device: str, progress: Progress = silent) -> Driver:
    """Open a device by its canonical name, other than "cpu" and "auto". `progress` is called if kernels are compiled.

    Raises:
        DeviceError: There is no such device, or it fails. The message says what to do.
        UnsupportedError: What it needs is not installed.
    """
    cache = default_folder() / KERNEL_FOLDER
    if device == "emulator":
        from llamac.gpu.emulator.emulator import Emulator

        return Emulator(cache)
    from llamac.gpu.cuda import Cuda
    from llamac.gpu.devices import find_devices

    number = int(device.removeprefix("cuda:"))
    found = find_devices()
    if not found.devices:  # CuPy would not help
        raise DeviceError(f"there is no {device}: {found.problem}")
    last = len(found.devices) - 1
    if number > last:
        numbers = f"cuda:0 to cuda:{last}" if last else "only cuda:0"
        raise DeviceError(f"there is no {device}: the machine has {numbers}")
    try:
        return Cuda(number, cache, progress=progress)
    except UnsupportedError as error:
        if not found.problem:
            raise
        raise UnsupportedError(f"{device} cannot be used: {found.problem}") from error
