"""Check and measure models on a GPU: the bits of the CPU, faults, leaks, and the share of the GPU's bandwidth.

    python -m bench.gpu [--device cuda:0] [--shapes llama-3.2-1b,llama-3-8b] [--dtypes q8,q4,bf16] [--batches 1,8,32]
                        [--decode 64] [--prompt 2048] [--folder FOLDER] [--result NAME]
    python -m bench.gpu [--device emulator] --faults --cycles 1000

First it checks the probes of the built-in models, and runs the tests of SESSIONS on this device. It makes calls of each
function of CUDA fail (tests/gpu/test_faults.py). It loads and closes a model 1000 times, and compares the memory of the
device and of this process before and after. The second form runs only these two parts; it also works on the emulator,
where it takes minutes.

Then it measures models with random weights: the tokens per second of a prompt, and of decode steps with each number of
sequences. Decode steps are measured three times: for a caller of `Session.eval_rows`, which returns all logits; for the
captured graph alone, which steps of at most 64 sequences have; and for an engine that draws on the device. `share` is
the weights' bytes per second over the bandwidth of a copy on this device, bytes read and written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import llamac
from bench.gpu_health import check_faults, check_leaks, run_tests
from bench.make_model import make
from bench.stamp import save
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.gpu.device_names import open_driver
from llamac.gpu.driver import Driver

COPY_BYTES = 1 << 30
ROUNDS = 5
WARM_STEPS = 4
CYCLES = 1000
SESSIONS = [f"tests/gpu/test_device_{name}.py" for name in ("sessions", "mixers", "encoders", "drafts")]
SESSIONS.append("tests/gpu/test_measuring.py")


def copy_bandwidth(driver: Driver) -> float:
    """Bytes read and written per second by a copy inside the device, the best of several."""
    addresses = [driver.alloc(COPY_BYTES) for _ in range(2)]
    best = 0.0
    for _ in range(ROUNDS):
        driver.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            driver.copy(addresses[1], addresses[0], COPY_BYTES)
        driver.synchronize()
        best = max(best, 4 * 2 * COPY_BYTES / (time.perf_counter() - start))
    for address in addresses:
        driver.free(address)
    return best


def check(device: str) -> dict[str, Any]:
    """Run all checks. Raises SystemExit if one fails."""
    found: dict[str, Any] = {"probes": {}}
    for name in llamac.models.NAMES:
        with llamac.load(name, device=device) as model:
            verdicts = {result.status for result in replay_probes(model)}
        found["probes"][name] = sorted(verdicts)
        print(f"probes of {name}: {', '.join(sorted(verdicts))}", flush=True)
        if verdicts != {"identical"}:
            raise SystemExit(f"the probes of {name} are not identical on {device}")
    run_tests(device, *SESSIONS)
    check_faults(device)
    found["leaks"] = check_leaks(device, CYCLES)._asdict()
    return found


def measure(path: Path, device: str, options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """The figures of a model file."""
    results = []
    with llamac.load(path, device=device, context=options.prompt + options.decode + 64) as model:
        most = max(options.batches)
        with model.session(sequences=most) as session:
            for batch in options.batches:
                results.append(decode(model, session, batch, options.decode, bandwidth))
        for batch in options.batches:
            results.append(generate(model, batch, options.decode))
        ids = [1 + 31 * i % 251 for i in range(options.prompt)]
        times = []
        for _ in range(ROUNDS):
            with model.session() as session:
                start = time.perf_counter()
                session.eval(ids)
                times.append(time.perf_counter() - start)
        results.append({"prompt": options.prompt, "tokens_per_second": options.prompt / min(times)})
    return results


def decode(model: llamac.Model, session: llamac.Session, batch: int, steps: int, bandwidth: float) -> dict[str, Any]:
    """Decode steps of `batch` sequences, each after one token."""
    assert model._device is not None
    times = []
    for step in range(WARM_STEPS + steps):
        rows = [(1 + (31 * step + i) % 251, i, session.length(i), True) for i in range(batch)]
        start = time.perf_counter()
        session.eval_rows(rows)
        times.append(time.perf_counter() - start)
    seconds = median(times[WARM_STEPS:])
    found = {"sequences": batch, "tokens_per_second": batch / seconds}
    (graph,) = model._device._graphs.values()
    captured = [each for (shape, _), each in graph._captured.items() if shape.rows == batch]
    if captured:
        model._device.driver.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            captured[-1].replay()
        model._device.driver.synchronize()
        alone = (time.perf_counter() - start) / steps
        found["graph_tokens_per_second"] = batch / alone
        found["share"] = model.weight_bytes / alone / bandwidth
    for i in range(batch):
        session.truncate(0, sequence=i)
    return found


def generate(model: llamac.Model, batch: int, steps: int) -> dict[str, Any]:
    """Tokens per second of an engine with `batch` requests."""
    found: dict[str, Any] = {"requests": batch}
    with llamac.Engine(model, max_sequences=batch, prefix_cache=False) as engine:
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            params = llamac.SamplingParams(
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                seed=1,
                max_tokens=steps,
                ignore_eos=True,
                speculation=False,
            )
            times = []
            for _ in range(3):  # the first one captures graphs
                start = time.perf_counter()
                handles = [engine.submit([1 + i], params) for i in range(batch)]
                for handle in handles:
                    handle.result()
                times.append(time.perf_counter() - start)
            found[name] = batch * steps / min(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", type=names, default=["llama-3.2-1b", "llama-3-8b"])
    parser.add_argument("--dtypes", type=names, default=["q8", "q4", "bf16"])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--faults", action="store_true", help="only make calls of CUDA fail")
    parser.add_argument("--cycles", type=int, metavar="N", help="only load and close N times")
    parser.add_argument("--decode", type=int, default=64, help="decode steps")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--folder", type=Path, help="where model files are created (default: a temporary folder)")
    parser.add_argument("--result", metavar="NAME", help="save the results as bench/results/DATE-NAME.json")
    options = parser.parse_args()
    if options.faults:
        check_faults(options.device)
    if options.cycles:
        check_leaks(options.device, options.cycles)
    if options.faults or options.cycles:
        return
    driver = open_driver(options.device)
    bandwidth = copy_bandwidth(driver)
    report: dict[str, Any] = {"device": driver.properties._asdict(), "copy_gb_s": bandwidth / 1e9, "models": []}
    driver.close()
    print(f"{report['device']['name']}: a copy moves {bandwidth / 1e9:.0f} GB/s", flush=True)
    if not options.no_checks:
        report |= check(options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for shape in options.shapes:
            for dtype in options.dtypes:
                path = Path(folder) / "model.bin"
                make(shape, dtype, path, pure=True)
                results = measure(path, options.device, options, bandwidth)
                facts = {"shape": shape, "dtype": dtype, "bytes": path.stat().st_size}
                report["models"].append({**facts, "results": results})
                path.unlink()
                for result in results:
                    text = ", ".join(f"{name} {value:.4g}" for name, value in result.items())
                    print(f"{shape} {dtype}: {text}", flush=True)
                if options.result:
                    save(options.result, report)


if __name__ == "__main__":
    main()
