"""Every operation of llamac.ops: microseconds of NumPy, of plain C (kernel set `scalar`) and of the best kernel set.

    python -m bench.ops [--threads 2] [--case matmul] [--result NAME]

The functions of a case alternate, and a time is the median of the rounds. NumPy computes in float32: products with its
BLAS and dequantized weights, everything else in the straightforward way. Quantizing has no equivalent in NumPy.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.stamp import save

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

SIDE = 2048  # rows and columns of matrices
ROUNDS = 5
MIN_SECONDS = 0.01  # of a measurement; short calls are repeated


class Case(NamedTuple):
    """A call of an operation, given a kernel set, and what NumPy computes instead, if there is an equivalent."""

    name: str
    call: Callable[[str | None], object]
    naive: Callable[[], object] | None


def normal(*shape: int) -> Floats:
    """Normally distributed numbers."""
    import numpy as np

    return np.random.default_rng(1).standard_normal(shape, np.float32)


def matrix_cases(threads: int) -> Iterator[Case]:
    """Products with matrices of llamac's own formats, conversions of matrices."""
    from llamac import ops
    from llamac.format.strips import unpack_tensor

    weights = normal(SIDE, SIDE)
    for dtype in ("f32", "bf16", "q8", "q6", "q4"):
        matrix = ops.quantize(weights, dtype)
        numbers = matrix.dequantize()
        for rows in (1, 16):
            x = normal(rows, SIDE)
            yield Case(
                f"matmul {dtype}, {rows} x {SIDE} x {SIDE}",
                lambda isa, x=x, matrix=matrix: ops.matmul(x, matrix, isa=isa, threads=threads),  # type: ignore[misc]
                lambda x=x, numbers=numbers: x @ numbers.T,  # type: ignore[misc]
            )
    data = matrix.data.tobytes()
    yield Case(
        f"dequantize q4, {SIDE} x {SIDE}",
        lambda isa: ops.dequantize(matrix, isa=isa),
        lambda: unpack_tensor(data, "q4", matrix.shape),
    )
    for dtype in ("q8", "q4"):
        yield Case(
            f"quantize {dtype}, 64 x {SIDE}",
            lambda isa, dtype=dtype: ops.quantize(weights[:64], dtype, isa=isa, threads=threads),  # type: ignore[misc]
            None,
        )


def row_cases() -> Iterator[Case]:
    """Norms, softmax, activations, RoPE, and draws."""
    import numpy as np

    from llamac import ops

    x, weight = normal(256, SIDE), normal(SIDE)
    shape = f"256 x {SIDE}"

    def layer_norm() -> Floats:
        centered = x - x.mean(-1, keepdims=True)
        variance = np.square(centered).mean(-1, keepdims=True)
        normed: Floats = centered / np.sqrt(variance + np.float32(1e-5)) * weight
        return normed

    def softmax() -> Floats:
        powers = np.exp(x - x.max(-1, keepdims=True))
        result: Floats = powers / powers.sum(-1, keepdims=True)
        return result

    def gelu() -> Floats:
        cubic = np.float32(0.7978846) * (x + np.float32(0.044715) * x * x * x)
        result: Floats = np.float32(0.5) * x * (1 + np.tanh(cubic))
        return result

    yield Case(
        f"rms_norm, {shape}",
        lambda isa: ops.rms_norm(x, weight, isa=isa),
        lambda: x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(1e-5)) * weight,
    )
    yield Case(f"layer_norm, {shape}", lambda isa: ops.layer_norm(x, weight, isa=isa), layer_norm)
    yield Case(f"softmax, {shape}", lambda isa: ops.softmax(x, isa=isa), softmax)
    yield Case(f"silu, {shape}", lambda isa: ops.silu(x, isa=isa), lambda: x / (1 + np.exp(-x)))
    yield Case(f"gelu (tanh), {shape}", lambda isa: ops.gelu(x, isa=isa), gelu)

    heads, positions = normal(256, 32, 64), np.arange(256)
    inv_freq = (10000.0 ** (-np.arange(32) / 32)).astype(np.float32)

    def rope() -> Floats:
        angles = (positions[:, None].astype(np.float32) * inv_freq)[:, None]
        cosine, sine, (a, b) = np.cos(angles), np.sin(angles), np.split(heads, 2, axis=-1)
        return np.concatenate((a * cosine - b * sine, b * cosine + a * sine), axis=-1)

    yield Case("rope, 256 x 32 x 64", lambda isa: ops.rope(heads, positions, inv_freq, isa=isa), rope)

    logits = 2 * normal(128_256)

    def sample() -> int:
        order = np.argsort(-logits)
        powers = np.exp((logits[order] - logits[order[0]]) / np.float32(0.8))
        sums = np.cumsum(powers)
        kept = int(np.searchsorted(sums, 0.95 * sums[-1])) + 1
        return int(order[np.searchsorted(sums[:kept], 0.5 * sums[kept - 1])])

    yield Case(
        "sample, top-p, 128256 logits", lambda isa: ops.sample(logits, temperature=0.8, top_p=0.95, isa=isa), sample
    )


def attention_cases(threads: int) -> Iterator[Case]:
    """A prompt, and a token after many positions: 32 heads, 8 KV heads, f16."""
    import numpy as np

    from llamac import ops

    for rows, n in ((256, 256), (1, 4096)):
        q, k, v = normal(rows, 32, 64), normal(n, 8, 64), normal(n, 8, 64)

        def naive(q: Floats = q, k: Floats = k, v: Floats = v) -> Floats:
            rows, n = len(q), len(k)
            keys, values = np.repeat(k, 4, axis=1).transpose(1, 2, 0), np.repeat(v, 4, axis=1).transpose(1, 0, 2)
            scores = q.transpose(1, 0, 2) @ keys * np.float32(0.125)
            hidden = np.arange(n) > np.arange(n - rows, n)[:, None]
            scores = np.where(hidden, np.float32(-np.inf), scores)
            powers = np.exp(scores - scores.max(-1, keepdims=True))
            mixed: Floats = (powers / powers.sum(-1, keepdims=True) @ values).transpose(1, 0, 2)
            return mixed

        yield Case(
            f"attention, {rows} x 32 heads, {n} x 8 x 64",
            lambda isa, q=q, k=k, v=v: ops.attention(q, k, v, kv_dtype="f16", isa=isa, threads=threads),  # type: ignore[misc]
            naive,
        )


def seconds(function: Callable[[], object]) -> float:
    """The mean time of a call, over as many calls as take MIN_SECONDS."""
    started = time.perf_counter()
    calls = 0
    while (spent := time.perf_counter() - started) < MIN_SECONDS or not calls:
        function()
        calls += 1
    return spent / calls


def measure(case: Case) -> dict[str, Any]:
    """The median times of a case in microseconds, and how often llamac computes it while NumPy does so once."""
    ways: dict[str, Callable[[], object]] = {
        "scalar": lambda: case.call("scalar"),
        "best": lambda: case.call(None),
    }
    if case.naive is not None:
        ways["numpy"] = case.naive
    for function in ways.values():
        function()  # the first call touches memory
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, function in ways.items():
            times[name].append(seconds(function))
    found: dict[str, Any] = {f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in times.items()}
    found["over_scalar"] = round(found["scalar_us"] / found["best_us"], 2)
    if "numpy_us" in found:
        found["over_numpy"] = round(found["numpy_us"] / found["best_us"], 2)
    return {"case": case.name, **found}


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    numpy, ratio = (found.get(name, "") for name in ("numpy_us", "over_numpy"))
    return (
        f"{found['case']:<38} {numpy:>10} {found['scalar_us']:>10} {found['best_us']:>10} {ratio:>11} "
        f"{found['over_scalar']:>11}"
    )


def main() -> None:
    """Print a table, and save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of llamac and of NumPy's BLAS (default: 1)")
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/DATE-NAME.json")
    options = parser.parse_args()
    if "numpy" in sys.modules:
        raise SystemExit("NumPy has been imported before its number of threads could be set")
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = str(options.threads)
    print(f"{'microseconds':<38} {'NumPy':>10} {'scalar':>10} {'best':>10} {'over NumPy':>11} {'over scalar':>11}")
    results = []
    for cases in (matrix_cases(options.threads), row_cases(), attention_cases(options.threads)):
        for case in cases:
            if options.case in case.name:
                results.append(measure(case))
                print(row(results[-1]), flush=True)
    if options.result:
        settings = {"threads": options.threads, "rounds": ROUNDS}
        print(save(options.result, {"bench": "ops", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
