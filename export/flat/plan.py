"""Plans a flat file: every tensor's dtype, offset and size, before a byte is written.

Planning reports all missing, surplus and misshaped tensors at once, and gives the file's exact size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llamac import _core
from llamac.errors import ArgumentError, ExportError
from llamac.export.checkpoint import Checkpoint, LazyTensor, ModelConfig
from llamac.export.dtypes import DTYPES, choose_dtypes
from llamac.format.flatfile import ALIGNMENT, RECORD_BYTES, SECTIONS, pack_record
from llamac.text.special_tokens import SpecialTokens

LAYERS = ("layers", "mtp")  # the fields of a config that are layer records
# The sections that a plan's caller may fill. `make_plan` adds "config" and "layers"; the writer adds the rest.
DEFAULT_SECTIONS = {"metadata": b"{}", "tokenizer": b"", "spm": b"", "template": b"", "probes": b""}


@dataclass(frozen=True)
class Slot:
    """A tensor's position in the file.

    Attributes:
        offset: From the start of the data section, in bytes.
        bytes: The stored size.
    """

    name: str
    tensor: LazyTensor
    dtype: str
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    @property
    def is_matrix(self) -> bool:
        return len(self.tensor.shape) == 2


@dataclass(frozen=True)
class Plan:
    """The layout of a flat file.

    Attributes:
        slots: The tensors in file order.
        sections: The content of every section except "tensors" and "data".
        data_bytes: The size of the data section.
    """

    slots: tuple[Slot, ...]
    sections: dict[str, bytes]
    data_bytes: int

    def offsets(self) -> dict[str, int]:
        """Each section's offset in the file; the key "" maps to the file's end."""
        sizes = {name: len(data) for name, data in self.sections.items()}
        sizes["tensors"] = RECORD_BYTES["tensor"] * len(self.slots)
        sizes["data"] = self.data_bytes
        offsets, end = {}, RECORD_BYTES["header"] + RECORD_BYTES["section"] * len(SECTIONS)
        for name in SECTIONS:
            offsets[name] = aligned(end)
            end = offsets[name] + sizes[name]
        return {**offsets, "": end}

    @property
    def file_bytes(self) -> int:
        return self.offsets()[""]

    @property
    def bits_per_weight(self) -> float:
        """Bits of the data section per model parameter."""
        n_parameters = sum(int(np.prod(slot.tensor.shape)) for slot in self.slots)
        return 8 * self.data_bytes / n_parameters


def aligned(offset: int) -> int:
    """`offset` rounded up to the file's alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def make_plan(
    checkpoint: Checkpoint,
    dtype: str,
    sections: Mapping[str, bytes] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Plan:
    """Lay out all tensors of a checkpoint.

    Args:
        checkpoint: The model.
        dtype: The dtype of the matrices; vectors are f32.
        sections: Content of the metadata, tokenizer, spm, template and probes sections. Missing ones are empty.
        dtypes: The dtype of every tensor by name. Default: `choose_dtypes`.

    Raises:
        ExportError: If tensors are missing, surplus or misshaped. The message lists all of them.
    """
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
    config, layers = config_records(checkpoint)
    tensors = matching_tensors(checkpoint)
    dtypes = dtypes or choose_dtypes(tensors, dtype)
    slots, offset = [], 0
    for name, tensor in tensors.items():
        is_matrix = len(tensor.shape) == 2
        size = _core.matrix_bytes(DTYPES[dtypes[name]], *tensor.shape) if is_matrix else 4 * tensor.shape[0]
        slots.append(Slot(name, tensor, dtypes[name], offset := aligned(offset), size))
        offset += size
    return Plan(tuple(slots), {"config": config, "layers": layers, **DEFAULT_SECTIONS, **(sections or {})}, offset)


def config_records(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """Pack the config record and the layer records.

    Raises:
        ExportError: If a number is out of the format's range.
    """
    config = checkpoint.config
    special = checkpoint.tokenizer[1] if checkpoint.tokenizer else None
    stop_ids = sorted({*checkpoint.stop_ids, *(special.stop_ids if special else ())})
    _check_special_ids(special, stop_ids, config.vocab_size)
    values = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__ if name not in LAYERS}
    values |= {
        "n_layers": len(config.layers),
        "mtp_layers": int(config.mtp is not None),
        "tied_output": int(config.tied_output),
        "n_rope": len(config.rope_dim),
        "n_pooled": len(config.pooled_dim),
        "bos_id": special.bos_id if special and special.bos_id is not None else -1,
        "eos_id": special.eos_id if special and special.eos_id is not None else -1,
        "add_bos": int(special.add_bos) if special else 0,
        "add_eos": int(special.add_eos) if special else 0,
        "n_stop_ids": len(stop_ids),
        "stop_ids": stop_ids,
    }
    try:
        layers = b"".join(pack_record("layer", vars(layer)) for layer in config.all_layers)
        return pack_record("config", values), layers
    except ArgumentError as error:
        raise ExportError(f"the model does not fit into a flat file: {error}") from None


def _check_special_ids(special: SpecialTokens | None, stop_ids: list[int], vocab_size: int) -> None:
    """Raise ExportError listing every special id that the model has no logit for."""
    named = [("bos_id", special.bos_id), ("eos_id", special.eos_id)] if special else []
    named += [("a token after BOS", token) for token in (special.after_bos if special else ())]
    named += [("a stop id", token) for token in stop_ids]
    beyond = [f"{name} is {token}" for name, token in named if token is not None and token >= vocab_size]
    if beyond:
        raise ExportError(
            f"special tokens are outside the model's vocabulary of {vocab_size} ids: {', '.join(beyond)}; fix"
            " bos_token_id and eos_token_id in the tokenizer's files, config.json or generation_config.json"
        )


def matching_tensors(checkpoint: Checkpoint) -> dict[str, LazyTensor]:
    """The checkpoint's tensors in file order.

    Raises:
        ExportError: If tensors are missing, surplus or misshaped. The message lists all of them.
    """
    expected = _core.slots(*config_records(checkpoint))
    problems, known = [], set()
    for name, required, is_matrix, rows, columns in expected:
        known.add(name)
        shape = (rows, columns) if is_matrix else (columns,)
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            if required:
                problems.append(f"missing: {name} {shape}")
        elif tensor.shape != shape:
            problems.append(f"misshaped: {name} is {tensor.shape}, the config needs {shape}")
    surplus = sorted(set(checkpoint.tensors) - known)
    problems += [f"surplus: {name} {checkpoint.tensors[name].shape}" for name in surplus]
    if problems:
        raise ExportError("the checkpoint's tensors do not fit its config:\n  " + "\n  ".join(problems))
    return {name: checkpoint.tensors[name] for name, *_ in expected if name in checkpoint.tensors}
