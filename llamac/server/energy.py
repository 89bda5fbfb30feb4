"""The machine's energy use from RAPL counters, if the kernel lets this process read them."""

from __future__ import annotations

import threading
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
UNITS = 1_000_000  # units of the files per joule


class Energy:
    """Counts energy since its creation.

    The counters wrap around after `max_energy_range_uj`, which takes about half an hour at full load. The count is
    correct if `joules` is called more often than that.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        """Find the counters.

        Args:
            folder: The kernel's folder of counters.
        """
        self._lock = threading.Lock()
        self._last: dict[Path, int] = {}
        self._used: dict[Path, int] = {}
        self._names: dict[Path, str] = {}
        self._ranges: dict[Path, int] = {}
        for zone in sorted(folder.glob("intel-rapl:*")):  # AMD processors use the same name
            try:
                name = (zone / "name").read_text().strip()
                self._last[zone] = _number(zone / "energy_uj")
                self._ranges[zone] = _number(zone / "max_energy_range_uj")
            except (OSError, ValueError):  # on most systems only root can read them
                self._last.pop(zone, None)
                continue
            parent = zone.name.split(":")[1:-1]  # the name of a part of a package is intel-rapl:PACKAGE:PART
            self._names[zone] = f"package-{parent[0]}/{name}" if parent else name
            self._used[zone] = 0

    def joules(self) -> dict[str, float]:
        """Return the energy of each domain, such as "package-0"; empty if no counter is readable."""
        with self._lock:
            for zone, before in self._last.items():
                try:
                    now = _number(zone / "energy_uj")
                except (OSError, ValueError):
                    continue
                self._used[zone] += now - before if now >= before else now - before + self._ranges[zone] + 1
                self._last[zone] = now
            return {self._names[zone]: used / UNITS for zone, used in self._used.items()}


def _number(path: Path) -> int:
    return int(path.read_text())
