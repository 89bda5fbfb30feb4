"""Profiles a session: time and bytes of each step of the graph, as the core measures them at its barriers, or a device
between its kernels (llamac/gpu/measuring.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamac import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.session import Session

STEPS: tuple[str, ...] = _core.steps()
OUTSIDE = ("embed", "output_norm", "logits")  # of the layers


@dataclass(frozen=True)
class Costs:
    """What evals have cost, by layer and step. Steps outside the layers are in layer 0.

    Attributes:
        ns: Nanoseconds of the calling thread, with its waits for other threads, or of the device: (n_layers, steps).
        bytes: Weights, keys and values that all threads have read, also from caches: (n_layers, steps). On a device,
            each counts once per pass, and experts count as if the rows had chosen as many different ones as they can.
    """

    ns: NDArray[np.int64]
    bytes: NDArray[np.int64]

    def __sub__(self, earlier: Costs) -> Costs:
        return Costs(self.ns - earlier.ns, self.bytes - earlier.bytes)


class Profile:
    """Measures the evals of a session from now on, until the session is closed. Results stay the same.

    Args:
        session: The session.

    Raises:
        UnsupportedError: If the session's device cannot measure.
    """

    def __init__(self, session: Session) -> None:
        import numpy as np

        device = None if session.device == "cpu" else session._model._working_device
        if device is not None:
            device.check_timer()
        self._costs = np.zeros((session._model.config["n_layers"], len(STEPS), 2), np.uint64)
        _core.profile(session._core, self._costs.data)

    def costs(self) -> Costs:
        """The costs so far. They stay available after the session is closed."""
        found = self._costs.astype("int64")
        return Costs(found[:, :, 0], found[:, :, 1])
