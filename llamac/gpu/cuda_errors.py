"""CUDA's errors as those of this library: by name, with what to do."""

from __future__ import annotations

from llamac.errors import DeviceError, LlamacError, OutOfMemoryError, UnsupportedError

_OUT_OF_MEMORY = 2

# Errors of a driver that does not start, by their numbers, which the runtime and the driver share. Once it has started,
# it does not work any more.
_CANNOT_START = {
    3: "CUDA cannot start in a process that was forked after CUDA had started; start it with the method spawn",
    34: "the driver's library is a stub; remove CUDA's stubs folder from LD_LIBRARY_PATH",
    35: "the driver is missing or older than CuPy's CUDA; install a newer driver, or llamac[cuda12] in place of "
    "llamac[cuda13]",
    46: "another process has the device for itself, or its compute mode forbids it; nvidia-smi shows which",
    100: "there is no device; nvidia-smi, CUDA_VISIBLE_DEVICES or the container's option --gpus may show why",
    101: "no device has this number; `llamac inspect` lists devices",
    802: "the system's device manager is not ready (nvidia-fabricmanager)",
    803: "the driver's library and its kernel module differ; restart the machine",
    804: "the device does not support the forward compatibility of this driver; install another driver",
}

# Errors after which CUDA no longer works in this process.
_LOST = {
    214: "the device's memory is defective; replace the device if this happens again",
    220: "a connection to another device over NVLink failed",
    226: "the device's hardware, or a connection between devices, failed",
    700: "a kernel used an address that is not the device's",
    702: "a kernel ran too long: the device also drives a display",
    710: "a kernel stopped itself",
    714: "a kernel failed",
    715: "a kernel has an instruction that the device does not know",
    716: "a kernel used an address that is not aligned",
    717: "a kernel used an address of another kind of memory",
    718: "a kernel jumped to a wrong address",
    719: "a kernel failed",
    721: "a kernel failed",
    810: "the server of MPS, which shares the device among processes, has ended",
    911: "something outside of CUDA that shares data with the device failed",
    999: "the driver failed; `dmesg` may show why (Xid)",
}
_LATER = "this process can no longer use its devices: restart it, or load the model for the CPU"


def why_not_started(status: int) -> str:
    """What a status of a driver that does not start means, and what to do, as the end of a message; "" if unknown."""
    return f". That is, {_CANNOT_START[status]}" if status in _CANNOT_START else ""


def llamac_error(error: Exception, what: str, *, has_started: bool) -> LlamacError:
    """An exception of CuPy as an error of this library.

    Args:
        error: CuPy's CUDARuntimeError or CUDADriverError, which have a `status`, or another exception of CuPy.
        what: What failed, as "loading the kernels".
        has_started: Whether the device has worked before.
    """
    status = getattr(error, "status", None)
    text = f"{what}: {error}"
    found: LlamacError
    if status == _OUT_OF_MEMORY:
        found = OutOfMemoryError(text)
    elif status in _LOST:
        found = DeviceError(f"{text}. That is, {_LOST[status]}; {_LATER}", lost=True)
    elif status in _CANNOT_START:
        text += why_not_started(status)
        found = DeviceError(text, lost=True) if has_started else UnsupportedError(text)
    else:
        found = DeviceError(text)
    found.__cause__ = error
    return found
