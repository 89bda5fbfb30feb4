"""The energy that a machine uses, where the kernel shows the counters of RAPL to this process."""

from __future__ import annotations

import threading
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
UNITS = 1_000_000  # of a joule, in which the files count


class Energy:
    """Counts energy since it was made.

    The files begin again at 0 after `max_energy_range_uj`, which takes about half an hour of full load: energy is
    counted right if `joules` is called more often.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        """Find the counters.

        Args:
            folder: Where the kernel shows them.
        """
        self._lock = threading.Lock()
        self._last: dict[Path, int] = {}
        self._used: dict[Path, int] = {}
        self._names: dict[Path, str] = {}
        self._ranges: dict[Path, int] = {}
        for zone in sorted(folder.glob("intel-rapl:*")):  # processors of AMD have the same name
            try:
                name = (zone / "name").read_text().strip()
                self._last[zone] = _number(zone / "energy_uj")
                self._ranges[zone] = _number(zone / "max_energy_range_uj")
            except (OSError, ValueError):  # most systems let only root read them
                self._last.pop(zone, None)
                continue
            parent = zone.name.split(":")[1:-1]  # a part of a processor is intel-rapl:PACKAGE:PART
            self._names[zone] = f"package-{parent[0]}/{name}" if parent else name
            self._used[zone] = 0

    def joules(self) -> dict[str, float]:
        """The energy of each domain, such as "package-0"; empty where nothing can be read."""
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
