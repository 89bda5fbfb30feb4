"""State that all requests share: the models, the settings, the metrics, and a thread pool for blocking calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from llamac.openai.errors import wrong_type
from llamac.server.exchange import read_json, until_gone
from llamac.server.metrics import Metrics
from llamac.server.models import Entry, Models, Opened
from llamac.server.worker import Threads, Worker

if TYPE_CHECKING:
    from llamac.errors import LlamacError
    from llamac.server.call import Call
    from llamac.server.settings import Settings

# Threads of each kind. Long conversions share `interrupt.MAX_UNSTOPPABLE` more, and leave some of them to requests.
SUBMITTING, COMPUTING = 4, 2


class Service:
    """A server without its sockets.

    Attributes:
        models: The served models.
        settings: The settings.
        metrics: The metrics.
        is_warm: Whether the models that are opened at startup have computed a token.
    """

    def __init__(self, models: Models, settings: Settings) -> None:
        self.models = models
        self.settings = settings
        self.metrics = Metrics()
        self.is_warm = False
        self._threads = Threads(
            ThreadPoolExecutor(SUBMITTING, "llamac-submit"), ThreadPoolExecutor(COMPUTING, "llamac-compute")
        )

    async def begin(self, call: Call) -> tuple[Worker, dict[str, Any]]:
        """Read the body of a request, and keep the model that it names open until the request has been answered.

        The model is opened if necessary.

        Raises:
            HttpError: If the body is too large or does not arrive in time, or the model is not served or cannot be
                opened.
            InvalidRequestError: If the body is not a JSON object.
            ClientGoneError: If the client disconnects.
        """
        body = await read_json(call)
        name = body.get("model")
        if not isinstance(name, str | None):
            raise wrong_type("model", name, "a string")
        entry = self.models.find(name, call.allows)
        opened = await until_gone(call.receive, self._acquire(entry, call))
        return Worker(self.models, entry, opened, self.metrics, call, self._threads), body

    async def _acquire(self, entry: Entry, call: Call) -> Opened:
        opened = await self.models.take(entry)
        call.at_end.append(lambda: self.models.release(entry))
        call.model = call.fields["model"] = entry.name
        return opened

    @property
    def failure(self) -> LlamacError | None:
        """The error that stopped the engine of a pinned model, or None. Other models are reopened after an error."""
        failures = (opened.engine.failure for entry, opened in self.models.open_ones() if entry.pinned)
        return next((failure for failure in failures if failure is not None), None)

    async def warm_up(self) -> None:
        """Compute a token with each open model."""
        for _, opened in list(self.models.open_ones()):
            await opened.warm_up()
        self.is_warm = True

    def close(self) -> None:
        """End the threads and close the models."""
        self._threads.close()
        self.models.close()
