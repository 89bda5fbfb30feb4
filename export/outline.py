"""What a foreign source holds, told from its headers: nothing is converted, and of the weights nothing is read."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from llamac.errors import TokenizerError, UnsupportedError
from llamac.export.convert import attach_tokenizer, read_checkpoint
from llamac.export.quantize import nearest_dtypes
from llamac.progress import Progress
from llamac.sources import Source, files_of
from llamac.tokenizer import kind_of


def outline(source: Source, progress: Progress) -> dict[str, Any]:
    """The facts of a source as `llamac inspect` tells them. Raises what `export` would raise of its headers."""
    warnings: list[str] = []
    checkpoint = read_checkpoint(source.path, warnings, progress)
    try:
        attach_tokenizer(checkpoint, source.path, None, warnings)
    except (TokenizerError, UnsupportedError) as error:
        warnings.append(str(error))
    numbers: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + math.prod(tensor.shape)
    metadata = checkpoint.metadata
    dtype, others = nearest_dtypes(checkpoint.tensors)
    tokenizer = checkpoint.tokenizer
    return {
        "path": str(source.path),
        "name": source.name or metadata.get("name", ""),
        "format": metadata["source"].get("format", "unknown"),
        "architecture": metadata.get("architecture", "unknown"),
        "bytes": sum(path.stat().st_size for path in files_of(source.path).values()),
        "files": sorted(path.name for path in files_of(source.path).values()),
        "parameters": sum(numbers.values()),
        "dtypes": numbers,
        "runs_as": "/".join(dict.fromkeys([dtype, *(other for _, other in others)])),
        "config": asdict(checkpoint.config),
        "tokenizer": {"kind": kind_of(tokenizer[0]), "ids": checkpoint.config.n_token_ids} if tokenizer else None,
        "chat_template": bool(checkpoint.chat_template),
        "warnings": warnings,
        "tensors": [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for name, tensor in checkpoint.tensors.items()
        ],
    }
