"""`llamac run --profile`: the table of time, bytes and shares of the machine's limit by step, and hardware counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac.engine.hardware.counters import Counters
from llamac.engine.inspection.benchmark import LimitMeter, read_block
from llamac.engine.inspection.profile import STEPS, Costs, Profile

if TYPE_CHECKING:
    from llamac.engine.generation.output import Completion
    from llamac.engine.generation.stream import Stream

HEAD = (
    f"{'step':<12}{'prompt ms':>10}{'%':>7}{'MB':>10}{'GB/s':>8}  "
    f"{'decode ms':>10}{'%':>7}{'MB':>10}{'GB/s':>8}{'of limit':>10}"
)


class RunProfile:
    """Measures a stream that has not begun.

    Args:
        stream: The stream.
        counters: Counters that count this process.

    Raises:
        UnsupportedError: If the stream's session is on a device that cannot measure.
    """

    def __init__(self, stream: Stream, counters: Counters) -> None:
        self._stream, self._counters = stream, counters
        self._profile = Profile(stream._session)
        self._device = None if stream._session.device == "cpu" else stream._session._model._working_device
        _, _, self._threads, self._isa, *_ = stream._session._core.describe()
        self._prompt: Costs = self._profile.costs()
        self._prompt_counts: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        stream._on_prefilled = self._end_prompt
        counters.start()

    def _end_prompt(self) -> None:
        self._prompt, self._prompt_counts = self._profile.costs(), self._counters.read()

    def table(self, completion: Completion) -> str:
        """The lines of the profile. Call it once, when the stream has ended."""
        if self._device is not None and self._stream._session.device == "cpu":
            return f"profile: {self._device.name} failed during the run; the rest, on the CPU, has not been measured\n"
        self._counts = self._counters.read()
        prompt, decode = self._prompt, self._profile.costs() - self._prompt
        steps = max(1, completion.usage.completion_tokens - 1)
        limit, about_limit = self._limit(decode.bytes.sum() / steps)
        seconds = completion.timings.prefill, completion.timings.decode
        lines = [HEAD]
        for i, name in enumerate(STEPS):
            parts = [(int(costs.ns[:, i].sum()), int(costs.bytes[:, i].sum())) for costs in (prompt, decode)]
            lines.append(_line(name, parts, seconds, limit))
        inside = [(int(costs.ns.sum()), int(costs.bytes.sum())) for costs in (prompt, decode)]
        outside = [(max(0, round(1e9 * s) - ns), 0) for s, (ns, _) in zip(seconds, inside, strict=True)]
        lines.append(_line("outside", outside, seconds, limit))
        whole = [(round(1e9 * s), read) for s, (_, read) in zip(seconds, inside, strict=True)]
        lines.append(_line("all", whole, seconds, limit))
        lines.append(f"limit: {about_limit}")
        if self._device is None:  # the counters are the processor's
            lines += self._counter_lines()
        return "".join(f"{line}\n" for line in lines)

    def _limit(self, step_bytes: float) -> tuple[float, str]:
        """The bytes per second that limit decode steps, and a text about them. step_bytes: what a decode step reads."""
        if self._device is not None:
            rate = self._device.copy_rate()
            return rate, f"{self._device.name} reads and writes {rate / 1e9:.1f} GB/s when it copies a large block"
        rate = LimitMeter(read_block(step_bytes), (), self._threads, self._isa).measure().read
        threads = f"{self._threads} thread{'' if self._threads == 1 else 's'}"
        return rate, f"this machine reads {rate / 1e9:.1f} GB/s with {threads} ({self._isa})"

    def _counter_lines(self) -> list[str]:
        problem = self._counters.problem
        lines = [] if problem is None else [f"counters: {problem}"]
        later = {name: count - self._prompt_counts.get(name, 0) for name, count in self._counts.items()}
        for phase, counts in (("prompt", self._prompt_counts), ("decode", later)):
            if counts:
                facts = [f"{count:,} {name}" for name, count in counts.items()]
                if counts.get("cycles") and "instructions" in counts:
                    facts.append(f"{counts['instructions'] / counts['cycles']:.2f} instructions per cycle")
                lines.append(f"counters, {phase}: {', '.join(facts)}")
        return lines


def _line(name: str, parts: list[tuple[int, int]], seconds: tuple[float, float], limit: float) -> str:
    """A line of the table. parts: nanoseconds and bytes of the prompt and of the decode steps."""
    columns = []
    for (ns, read), whole in zip(parts, seconds, strict=True):
        rate = f"{read / ns:.1f}" if read and ns else "-"
        size = f"{read / 1e6:.1f}" if read else "-"
        share = f"{100 * ns / 1e9 / whole:.1f}" if whole else "-"
        columns.append(f"{ns / 1e6:>10.2f}{share:>7}{size:>10}{rate:>8}")
    ns, read = parts[1]
    of_limit = f"{100 * read * 1e9 / ns / limit:.0f} %" if read and ns else "-"
    return f"{name:<12}{columns[0]}  {columns[1]}{of_limit:>10}"
