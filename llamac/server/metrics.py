"""What a server counts, as text in the format of Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from llamac.server.energy import Energy

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.server.models import Models

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # of a whole request
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)  # of a token


class Counter:
    """A number for each combination of labels that only grows."""

    def __init__(self, name: str, help_text: str, *labels: str) -> None:
        self.name = name
        self._help = help_text
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        self._lock = threading.Lock()

    def add(self, n: float, *values: str) -> None:
        """Add to the number of these values of the labels."""
        with self._lock:
            self._values[values] = self._values.get(values, 0) + n

    def lines(self) -> Iterator[str]:
        """The lines of the text."""
        yield from head(self.name, self._help, "counter")
        with self._lock:
            values = sorted(self._values.items())
        for labels, value in values:
            yield f"{self.name}{_labelled(zip(self._labels, labels, strict=True))} {written(value)}"


class Histogram:
    """How many seconds something took."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._help = help_text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Count one more."""
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._sum += seconds

    def lines(self) -> Iterator[str]:
        """The lines of the text."""
        yield from head(self.name, self._help, "histogram")
        with self._lock:
            counts, total = list(self._counts), self._sum
        so_far = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            so_far += count
            yield f'{self.name}_bucket{{le="{bound}"}} {so_far}'
        yield f"{self.name}_sum {total:.6f}"
        yield f"{self.name}_count {so_far}"


class Metrics:
    """The numbers of one server."""

    def __init__(self) -> None:
        self.requests = Counter("llamac_requests_total", "Requests by path and status.", "path", "status")
        self.prompt_tokens = Counter("llamac_prompt_tokens_total", "Tokens of prompts.")
        self.cached_tokens = Counter("llamac_cached_tokens_total", "Tokens of prompts that were not computed again.")
        self.new_tokens = Counter("llamac_generated_tokens_total", "Tokens that requests received.")
        self.finished = Counter("llamac_generations_total", "Generations by what ended them.", "reason")
        self.request_s = Histogram("llamac_request_seconds", "From the first byte to the last one.", LONG_S)
        self.queue_s = Histogram("llamac_queue_seconds", "Before the computation of a request began.", LONG_S)
        self.first_token_s = Histogram("llamac_first_token_seconds", "Until the first token, the queue too.", LONG_S)
        self._energy = Energy()
        self.token_s = Histogram("llamac_token_seconds", "Between two tokens of a request, its mean.", SHORT_S)

    def record(self, completion: Completion) -> None:
        """Count a result, with all its candidates."""
        usage, timings = completion.usage, completion.timings
        self.prompt_tokens.add(usage.prompt_tokens)
        self.cached_tokens.add(usage.cached_tokens)
        self.queue_s.observe(timings.queued)
        self.first_token_s.observe(timings.queued + timings.prefill)
        for choice in completion.choices:
            self.new_tokens.add(choice.usage.completion_tokens)
            self.finished.add(1, choice.finish_reason)
            if choice.usage.completion_tokens > 1:
                self.token_s.observe(choice.timings.decode / (choice.usage.completion_tokens - 1))

    def text(self, models: Models) -> str:
        """Everything, with what the engines do now."""
        from llamac.server.gauges import gauges_of

        own = [metric for metric in vars(self).values() if isinstance(metric, Counter | Histogram)]
        lines = [line for metric in own for line in metric.lines()]
        for gauge in gauges_of(models, self._energy):
            lines += head(gauge.name, gauge.help, gauge.kind)
            lines += [f"{gauge.name}{_labelled(labels.items())} {written(value)}" for labels, value in gauge.values]
        return "\n".join(lines) + "\n"


def written(value: float) -> str:
    """A number with all its digits: whole ones have no fraction."""
    return str(int(value)) if value == int(value) else repr(value)


def head(name: str, help_text: str, kind: str) -> list[str]:
    """The lines before those of a number."""
    return [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]


def _labelled(pairs: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{{{text}}}" if text else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
