"""Chooses the dtype of every tensor in a flat file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llamac import _core
from llamac.errors import ArgumentError
from llamac.export.checkpoint import LazyTensor
from llamac.format.strips import FLOATS, STRIP_ROWS, scale_columns
from llamac.progress import Progress, silent

# The core's number of each dtype.
DTYPES = dict(_core.dtypes())
# GGUF's, whose blocks are regrouped: numbers are not changed.
BLOCK_DTYPES = tuple(name for name, number in DTYPES.items() if _core.gguf_row_bytes(number, 256))
OWN_DTYPES = tuple(name for name in DTYPES if name not in BLOCK_DTYPES)
# With grids of codes (docs/format.md): calibration and searches for scales are for these.
FEW_BITS = ("q4", "q4s", "q3", "q2")
# Stored wider if other matrices have at most 4 bits, because nothing averages out an error in the logits, or in the
# values that attention mixes. The output matrix is large, and q6 costs less per byte saved than q8 or q4
# (docs/quantization.md).
OUTPUT_DTYPE = "q6"
KEPT_AT_8_BITS = ("layers.*.attn_v.weight", "layers.*.attn_kv_a.weight")
# The values, in a layer where they are also the keys.
K_OF_V = re.compile(r"(layers\.\d+)\.attn_k\.weight")
# Of sources: what flat files hold exactly, besides GGUF's blocks and strips of other flat files.
KEPT_AS_THEY_ARE = (*FLOATS, "t2")
# Of Hugging Face's checkpoints: codes and factors (`hf.scaled`, `hf.integers`), which no dtype of flat files holds.
CODED = ("f8_e4m3", "f4", "nf4", "fp4", "i8", *(f"u{bits}" for bits in range(2, 9)))
ROUTERS = ("layers.*.ffn_router.weight", "layers.*.shared_gate.weight")
# A block whose largest number is at most this share of its row's gets a block scale of about 8 of 127, which is coarse.
TINY = 1 / 16
MAX_TINY_SHARE = 0.25
# Rows of a matrix that the share is estimated from, in runs spread evenly over it. Outlier columns, which make blocks
# tiny, are common to all rows or to the rows of some attention heads, so many short runs see them in proportion.
SAMPLED_ROWS, SAMPLED_RUNS = 1024, 64
MAX_READERS = 4  # threads of `widen_coarse`; each holds some rows of a matrix


def choose_dtypes(
    tensors: Mapping[str, LazyTensor], dtype: str, *, pure: bool = False, dtype_map: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """Choose the dtype of every tensor: f32 for vectors, `dtype` for matrices.

    With at most 4 bits, the output matrix is q6 and attn_v is q8 unless `pure`. Routers and gates of shared experts are
    q8 even then: they are small, and one wrong choice of experts costs more than any rounding. With t2, embeddings are
    q6 as well, and attn_v is t2: models are trained to have ternary matrices, but not ternary embeddings.

    Args:
        tensors: The tensors by name.
        dtype: The dtype of matrices. One of GGUF's is only for matrices that the source stores in its blocks.
        pure: With at most 4 bits, also store the output matrix, attn_v and embeddings in `dtype`.
        dtype_map: (pattern, dtype) pairs; the first pattern that matches a matrix's name decides. In a pattern, *
            matches any string, ? one character, [ab] one of several.

    Raises:
        ArgumentError: If a dtype is unknown or the source does not have it, or a pattern matches no matrix.
    """
    pairs = list(dtype_map)
    matrices = dict.fromkeys(name for name, tensor in tensors.items() if len(tensor.shape) == 2)
    _check_choices(matrices, dtype, pairs, pure=pure)
    chosen = dict.fromkeys(tensors, "f32")
    for name in matrices:
        mapped = (found for pattern, found in pairs if fnmatch.fnmatchcase(name, pattern))
        chosen[name] = next(mapped, None) or _usual_dtype(name, matrices, dtype, pure=pure)
        tensor = tensors[name]
        if chosen[name] in BLOCK_DTYPES and (tensor.blocks is None or tensor.dtype != chosen[name]):
            raise ArgumentError(
                f"{name} is {tensor.dtype} in the source and cannot become {chosen[name]}: GGUF's types are only kept,"
                f" which 'auto' does; expected one of {', '.join(OWN_DTYPES)}"
            )
    return chosen


def _check_choices(matrices: Collection[str], dtype: str, pairs: Iterable[tuple[str, str]], *, pure: bool) -> None:
    """Check the arguments of `choose_dtypes`."""
    for name in (dtype, *(found for _, found in pairs)):
        if name not in DTYPES:
            raise ArgumentError(f"dtype is {name!r}, expected one of {', '.join(OWN_DTYPES)}")
    if pure and dtype not in (*FEW_BITS, "t2"):
        raise ArgumentError(f"pure is for dtype q4, q4s, q3, q2 and t2: with {dtype!r} no tensor is stored wider")
    for pattern, _ in pairs:
        if not fnmatch.filter(matrices, pattern):
            raise ArgumentError(
                f"dtype_map: {pattern!r} matches no matrix; the matrices are {', '.join(name_patterns(matrices))}"
            )


def _usual_dtype(name: str, matrices: Collection[str], dtype: str, *, pure: bool) -> str:
    """The dtype of a matrix that no pattern matches."""
    if dtype not in (*FEW_BITS, "t2"):
        return dtype
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in ROUTERS):
        return "q8"
    if pure:
        return dtype
    if name == ("output.weight" if "output.weight" in matrices else "token_embedding.weight"):
        return OUTPUT_DTYPE
    if dtype == "t2":
        return OUTPUT_DTYPE if name.endswith("_embedding.weight") else dtype
    return "q8" if _has_values(name, matrices) else dtype


def _has_values(name: str, matrices: Collection[str]) -> bool:
    """Whether a matrix computes the values that attention mixes."""
    keys = K_OF_V.fullmatch(name)
    is_v = keys is not None and f"{keys[1]}.attn_v.weight" not in matrices
    return is_v or any(fnmatch.fnmatchcase(name, pattern) for pattern in KEPT_AT_8_BITS)


def nearest_dtypes(tensors: Mapping[str, LazyTensor]) -> tuple[str, list[tuple[str, str]]]:
    """Choose dtypes that preserve a source's quality: the source's own, or q8 for types that are quantized again.

    q8 adds next to no error to any quantized type (docs/gguf.md).

    Args:
        tensors: The tensors by name.

    Returns:
        The dtype of most parameters, and a dtype_map for the matrices that do not get their dtype with it.
    """
    found = {
        name: tensor.dtype if tensor.dtype in KEPT_AS_THEY_ARE or tensor.blocks or tensor.strips else "q8"
        for name, tensor in tensors.items()
        if len(tensor.shape) == 2
    }
    n_parameters: dict[str, int] = {}
    for name, dtype in found.items():
        rows, columns = tensors[name].shape
        n_parameters[dtype] = n_parameters.get(dtype, 0) + rows * columns
    most = max(n_parameters, key=lambda dtype: n_parameters[dtype], default="f32")
    usual = {name: _usual_dtype(name, found, most, pure=False) for name in found}
    return most, [(name, dtype) for name, dtype in found.items() if dtype != usual[name]]


def exact_dtype(tensors: Mapping[str, LazyTensor]) -> str:
    """The float dtype that all matrices are stored in, or f32 if they differ or llamac has quantized some of them.

    For matrices that others have quantized: the dtype of the embedding, in which the model was published; bf16 if it is
    quantized too.
    """
    found = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) == 2}
    if found - set(KEPT_AS_THEY_ARE) and found.isdisjoint(set(OWN_DTYPES) - set(KEPT_AS_THEY_ARE)):
        embedding = tensors.get("token_embedding.weight")
        return embedding.dtype if embedding is not None and embedding.dtype in FLOATS else "bf16"
    return found.pop() if len(found) == 1 and found <= set(FLOATS) else "f32"


def parse_dtype_map(text: str) -> list[tuple[str, str]]:
    """Parse "PATTERN=DTYPE,PATTERN=DTYPE".

    Raises:
        ArgumentError: If the text has another form.
    """
    pairs = []
    for item in text.split(","):
        pattern, equals, dtype = item.partition("=")
        if not (pattern and equals and dtype):
            raise ArgumentError(f"dtype_map: {item!r} is not PATTERN=DTYPE, e.g. layers.0.*=q8")
        pairs.append((pattern.strip(), dtype.strip()))
    return pairs


def name_patterns(names: Iterable[str]) -> list[str]:
    """Tensor names with * for layer and expert numbers, without repeats."""
    return list(dict.fromkeys(re.sub(r"\b(layers|experts)\.\d+\.", r"\1.*.", name) for name in names))


def widen_coarse(
    tensors: Mapping[str, LazyTensor],
    dtypes: dict[str, str],
    is_fixed: Callable[[str], bool],
    progress: Progress = silent,
    threads: int = 1,
) -> tuple[dict[str, str], list[str]]:
    """Move matrices of at most 4 bits with many tiny blocks to q8. Reads at most SAMPLED_ROWS rows of each.

    Args:
        tensors: The tensors by name.
        dtypes: Their dtypes.
        is_fixed: Whether the user chose the dtype of the tensor with this name.
        progress: Called with the phase "checking scales" and numbers of rows.
        threads: The number of threads that read tensors, at most `MAX_READERS`.

    Returns:
        The dtypes, and a warning about each matrix that was moved.
    """
    found, warnings = dict(dtypes), []
    names = [
        name
        for name, dtype in dtypes.items()
        if dtype in FEW_BITS and not is_fixed(name) and not tensors[name].has_strips_of(dtype)
    ]
    total = sum(tensors[name].shape[0] for name in names)
    done = 0
    with ThreadPoolExecutor(min(threads, MAX_READERS)) as pool:
        shares = pool.map(lambda name: tiny_share(tensors[name], dtypes[name]), names)
        for name, share in zip(names, shares, strict=True):
            if share > MAX_TINY_SHARE:
                found[name] = "q8"
                warnings.append(
                    f"{name} is stored as q8, not {dtypes[name]}: in {share:.0%} of its blocks (limit"
                    f" {MAX_TINY_SHARE:.0%}) the largest number is at most {TINY:g} of the row's, and their scales"
                    " would be coarse"
                )
            done += tensors[name].shape[0]
            progress("checking scales", done, total)
    return found, warnings


def tiny_share(tensor: LazyTensor, dtype: str) -> float:
    """The share of a matrix's nonzero blocks whose largest number is at most TINY of their row's.

    Estimated from SAMPLED_ROWS rows of a larger matrix.
    """
    columns, width = tensor.shape[1], scale_columns(dtype)
    starts = np.arange(0, columns, width)
    tiny = blocks = 0
    for sample in _sampled(tensor):
        for _, rows in sample.chunks(STRIP_ROWS):
            peaks = np.maximum.reduceat(np.abs(rows), starts, axis=1)
            row_peaks = peaks.max(axis=1, keepdims=True)
            tiny += int(((peaks <= TINY * row_peaks) & (peaks > 0)).sum())
            blocks += int((peaks > 0).sum())
    return tiny / max(blocks, 1)


def _sampled(tensor: LazyTensor) -> list[LazyTensor]:
    """Rows of a matrix: all, or SAMPLED_ROWS of them in SAMPLED_RUNS runs from the first to the last row."""
    rows, length = tensor.shape[0], SAMPLED_ROWS // SAMPLED_RUNS
    if rows <= SAMPLED_ROWS:
        return [tensor]
    starts = [(rows - length) * i // (SAMPLED_RUNS - 1) for i in range(SAMPLED_RUNS)]
    return [tensor.rows(start, start + length) for start in starts]
