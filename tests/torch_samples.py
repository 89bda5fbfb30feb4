"""Files as torch.save writes them, valid and invalid ones, without torch."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from golden.tiny_checkpoints import Tensors


class Global:
    """Pickles as the qualified name of a function, which need not exist."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> None:
        """Exist, because only a callable object is pickled as a function."""


class TorchPickler(pickle._Pickler):  # the C class rejects names of missing modules
    """Writes pickles like torch.save."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)

    def save_named(self, value: Global) -> None:
        module, _, name = value.name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())  # type: ignore[attr-defined]

    dispatch[Global] = save_named

    def persistent_id(self, value: Any) -> Any:
        return value[1] if isinstance(value, tuple) and value[:1] == ("persistent",) else None


class Call:
    """Pickles as a call of a named function."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments

    def __reduce__(self) -> Any:
        return Global(self.name), self.arguments


def storage(key: str, numbers: int, kind: str = "FloatStorage") -> Any:
    """A persistent id of a storage with this number of elements."""
    return ("persistent", ("storage", Global(f"torch.{kind}"), key, "cpu", numbers))


def old_storage(key: str, numbers: int, part: Any = None, kind: str = "FloatStorage") -> Any:
    """Like `storage`, in the format before PyTorch 1.6."""
    return ("persistent", ("storage", Global(f"torch.{kind}"), key, "cpu", numbers, part))


def torch_tensor(store: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Call:
    """A tensor on a storage."""
    hooks = Call("collections.OrderedDict")
    return Call("torch._utils._rebuild_tensor_v2", store, offset, shape, strides, False, hooks)


def write_archive(path: Path, document: Any, storages: dict[str, bytes], **members: bytes) -> Path:
    """Write a file as torch.save does; return its path. members: further members of the archive."""
    stream = io.BytesIO()
    TorchPickler(stream, 2).dump(document)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        for name, data in ({"byteorder": b"little"} | members).items():
            archive.writestr(f"archive/{name}", data)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
    return path


def write_old(
    path: Path,
    document: Any,
    storages: dict[str, tuple[int, bytes]],
    *,
    version: Any = 1001,
    machine: Any = None,
    keys: Any = None,
) -> Path:
    """Write a file as torch.save did before PyTorch 1.6; return its path. storages: (number of elements, bytes)."""
    stream = io.BytesIO()
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}} if machine is None else machine
    for value in (0x1950A86A20F9469CFC6C, version, machine, document, list(storages) if keys is None else keys):
        TorchPickler(stream, 2).dump(value)
    for numbers, data in storages.values():
        stream.write(struct.pack("<q", numbers) + data)
    path.write_bytes(stream.getvalue())
    return path


def write_torch(path: Path, weights: Tensors) -> None:
    """Write weights as a pytorch_model.bin. Every matrix is stored transposed, as training leaves some of them."""
    document: dict[str, Any] = {}
    storages = {}
    for index, (name, values) in enumerate(weights.items()):
        # seven other numbers precede these, so that the offset matters
        storages[str(index)] = np.zeros(7, "<f4").tobytes() + values.T.astype("<f4").tobytes()
        strides = (1,) if values.ndim == 1 else (1, values.shape[0])
        document[name] = torch_tensor(storage(str(index), values.size + 7), values.shape, strides, 7)
    write_archive(path, document, storages)
