"""Products of every dtype on a GPU: microseconds, the share of the memory's bandwidth, and multiply-adds per second.

    python -m bench.gpu_products [--dtypes q4_k,q8,bf16] [--shape 4096x4096] [--m 1,8,64,512] [--fast] [--result NAME]

A captured graph cycles through matrices of random bytes that together exceed the GPU's caches, so neither caches nor
launches affect the figures. The best of five replays counts. GB/s: bytes of weights. TOPS: two operations per weight
and row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench.stamp import save
from llamac import _core
from llamac.gpu import launches
from llamac.gpu.device_names import open_driver
from llamac.gpu.launches import Matrix, Part

if TYPE_CHECKING:
    from llamac.gpu.driver import Driver

CACHE_BYTES = 256 << 20  # more than any GPU's caches hold
REPLAYS = 5


class Product(NamedTuple):
    """What is measured: a dtype, rows and columns of the matrix, rows of the inputs, and the numerics."""

    dtype: str
    rows: int
    columns: int
    m: int
    fast: bool


def measure(driver: Driver, product: Product, cache_bytes: int = CACHE_BYTES) -> dict[str, Any]:
    """The best time of one product, and what follows from it."""
    number = dict(_core.dtypes())[product.dtype]
    size = _core.matrix_bytes(number, product.rows, product.columns)
    count = max(2, -(-cache_bytes // size))
    form = launches.form_of(number, fast=product.fast)
    random = np.random.default_rng(0)
    x = random.standard_normal((product.m, product.columns), np.float32)
    floats, y = driver.alloc(x.nbytes), driver.alloc(4 * product.m * product.rows)
    inputs = driver.alloc(product.m * launches.input_row_bytes(form, product.columns))
    weights = driver.alloc(size * count)
    driver.upload(floats, x.reshape(-1).view(np.uint8))
    driver.upload(weights, random.integers(0, 256, size * count, np.uint8))
    if form is not launches.Form.F32:
        launches.pack(driver, form, floats, product.m, product.columns, inputs)
    matrices = [Matrix(weights + i * size, number, product.rows, product.columns) for i in range(count)]
    with driver.capture() as graph:
        for matrix in matrices:
            source = floats if form is launches.Form.F32 else inputs
            launches.products(driver, [Part(matrix, y)], source, product.m, form)
    times = []
    for _ in range(REPLAYS + 1):  # the first one warms up
        driver.synchronize()
        start = time.perf_counter()
        graph.replay()
        driver.synchronize()
        times.append((time.perf_counter() - start) / count)
    graph.close()
    for address in (floats, y, inputs, weights):
        driver.free(address)
    best = min(times[1:])
    operations = 2 * product.rows * product.columns * product.m
    return {**product._asdict(), "us": best * 1e6, "gb_s": size / best / 1e9, "tops": operations / best / 1e12}


def table(driver: Driver, products: Sequence[Product], cache_bytes: int = CACHE_BYTES) -> list[dict[str, Any]]:
    """Measure products, and print a line for each."""
    print(f"{driver.properties.name}\n{'dtype':8} {'shape':>12} {'m':>5}       {'us':>8} {'GB/s':>7} {'TOPS':>7}")
    results = []
    for product in products:
        result = measure(driver, product, cache_bytes)
        shape = f"{product.rows}x{product.columns}"
        numerics = "fast" if product.fast else "exact"
        print(f"{product.dtype:8} {shape:>12} {product.m:5} {numerics:5} ", end="")
        print(f"{result['us']:8.1f} {result['gb_s']:7.0f} {result['tops']:7.2f}", flush=True)
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join(name for name, _ in _core.dtypes()))
    parser.add_argument("--shape", default="4096x4096", help="rows x columns of the matrix")
    parser.add_argument("--m", default="1,8,64,512", help="rows of the inputs")
    parser.add_argument("--fast", action="store_true", help="fast numerics where they differ")
    parser.add_argument("--result", help="write bench/results/DATE-NAME.json")
    arguments = parser.parse_args()
    rows, columns = map(int, arguments.shape.split("x"))
    products = [
        Product(dtype, rows, columns, int(m), arguments.fast)
        for dtype in arguments.dtypes.split(",")
        for m in arguments.m.split(",")
    ]
    driver = open_driver("cuda:0")
    name, results = driver.properties.name, table(driver, products)
    driver.close()
    if arguments.result:
        save(arguments.result, {"device": name, "products": results})


if __name__ == "__main__":
    main()
