"""Describes a source from its headers, without converting it or reading its weights."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from llamac import _core
from llamac.errors import TokenizerError, UnsupportedError
from llamac.export.attach_tokenizer import attach_tokenizer
from llamac.export.dtypes import DTYPES, nearest_dtypes
from llamac.export.read import read_checkpoint
from llamac.format.detect import Source, files_of
from llamac.progress import Progress
from llamac.text.decoding import kind_of


def outline(source: Source, progress: Progress) -> dict[str, Any]:
    """The facts that `llamac inspect` shows about a source.

    Raises:
        ExportError, UnsupportedError: As `export` does, if the headers are wrong or describe an unsupported model.
    """
    warnings: list[str] = []
    checkpoint = read_checkpoint(source.path, warnings, progress)
    try:
        attach_tokenizer(checkpoint, source.path, None, warnings)
    except (TokenizerError, UnsupportedError) as error:
        warnings.append(str(error))
    n_parameters: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        n_parameters[tensor.dtype] = n_parameters.get(tensor.dtype, 0) + math.prod(tensor.shape)
    metadata = checkpoint.metadata
    dtype, others = nearest_dtypes(checkpoint.tensors)
    mapped = dict(others)
    stored = sum(
        _core.matrix_bytes(DTYPES[mapped.get(name, dtype)], *tensor.shape)
        if len(tensor.shape) == 2
        else 4 * tensor.shape[0]
        for name, tensor in checkpoint.tensors.items()
    )
    tokenizer = checkpoint.tokenizer
    return {
        "path": str(source.path),
        "name": source.name or metadata.get("name", ""),
        "format": metadata["source"].get("format", "unknown"),
        "architecture": metadata.get("architecture", "unknown"),
        "bytes": sum(path.stat().st_size for path in files_of(source.path).values()),
        "files": sorted(path.name for path in files_of(source.path).values()),
        "parameters": checkpoint.n_parameters,
        "dtypes": n_parameters,
        "runs_as": "/".join(dict.fromkeys([dtype, *(other for _, other in others)])),
        "bits_per_weight": round(8 * stored / checkpoint.n_parameters, 3),
        "config": asdict(checkpoint.config),
        "tokenizer": {"kind": kind_of(tokenizer[0]), "ids": checkpoint.config.n_token_ids} if tokenizer else None,
        "chat_template": bool(checkpoint.chat_template),
        "generation": metadata.get("generation", {}),
        "pooling": metadata.get("pooling"),
        "warnings": warnings,
        "tensors": [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for name, tensor in checkpoint.tensors.items()
        ],
    }
