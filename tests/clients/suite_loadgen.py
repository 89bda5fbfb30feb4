"""mlcommons-loadgen requests streamed completions at Poisson arrival times, and judges the run valid."""

from __future__ import annotations

import array
import json
import os
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import mlperf_loadgen as loadgen

TOKENS = 12
QUERIES = 600  # with fewer, the load generator does not trust the 99th percentile
PROMPTS = [f"Story number {i}: once upon a time" for i in range(16)]
COUNTED: list[int] = []


def stream(sample: Any) -> None:
    """Send a request, and tell the load generator of its first and its last token."""
    body = {"prompt": PROMPTS[sample.index], "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    url = os.environ["LLAMAC_TINY_URL"] + "/v1/completions"
    headers = {"content-type": "application/json", "x-api-key": os.environ["LLAMAC_TINY_KEY"]}
    count = 0
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                count += bool(json.loads(line[6:])["choices"][0]["text"])
                if count == 1:
                    responses([sample.id], loadgen.FirstTokenComplete)
    COUNTED.append(count)
    responses([sample.id], loadgen.QuerySamplesComplete)


def responses(ids: list[int], tell: Any) -> None:
    data = array.array("i", [TOKENS] * TOKENS)
    address, length = data.buffer_info()
    tell([loadgen.QuerySampleResponse(each, address, length * data.itemsize, TOKENS) for each in ids])


def issue(samples: Any) -> None:
    for sample in samples:
        threading.Thread(target=stream, args=(sample,)).start()


def test_a_run_with_poisson_arrivals_is_valid(tmp_path: Path) -> None:
    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.use_token_latencies = True
    settings.server_target_qps = 60
    settings.ttft_latency = settings.tpot_latency = 10 * 10**9  # nanoseconds
    settings.min_duration_ms = 5000
    settings.min_query_count = QUERIES
    output = loadgen.LogOutputSettings()
    output.outdir = str(tmp_path)
    log = loadgen.LogSettings()
    log.log_output = output
    system = loadgen.ConstructSUT(issue, lambda: None)
    library = loadgen.ConstructQSL(len(PROMPTS), len(PROMPTS), lambda _: None, lambda _: None)
    loadgen.StartTestWithLogSettings(system, library, settings, log)
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(system)
    summary = next(tmp_path.glob("*summary.txt")).read_text("utf-8")
    assert re.search(r"Result is : VALID", summary), summary
    assert len(COUNTED) >= QUERIES
    assert min(COUNTED) > 0
