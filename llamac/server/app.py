"""The ASGI application: every path and its endpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llamac.server.exchange import HttpError
from llamac.server.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llamac.server.call import Call
    from llamac.server.exchange import Answer, EventStream
    from llamac.server.service import Service

NAME = "{name:path}"  # at the end of a path: matches any suffix
# The method and the endpoint of each path: a function of a module of this package. The module is imported at the first
# request, so that the server starts faster.
ENDPOINTS = {
    "/health": ("GET", "status.health"),
    "/ready": ("GET", "status.ready"),
    "/metrics": ("GET", "status.metrics"),
    "/openapi.json": ("GET", "openapi.openapi"),
    "/v1/models": ("GET", "status.models"),
    f"/v1/models/{NAME}": ("GET", "status.one_model"),
    "/v1/completions": ("POST", "generation.completions"),
    "/v1/chat/completions": ("POST", "generation.chat_completions"),
    "/v1/responses": ("POST", "responses.responses"),
    "/v1/messages": ("POST", "messages.messages"),
    "/v1/messages/count_tokens": ("POST", "messages.count_tokens"),
    "/v1/embeddings": ("POST", "embedding.embeddings"),
    "/v1/rerank": ("POST", "embedding.rerank"),
    "/v2/rerank": ("POST", "embedding.rerank"),  # of Cohere's clients
    "/execute": ("POST", "execution.execute"),
    "/tokenize": ("POST", "conversions.tokenize"),
    "/detokenize": ("POST", "conversions.detokenize"),
    "/apply-template": ("POST", "conversions.apply_template"),
}
# The endpoints of the web page, which operators can turn off.
PAGE_ENDPOINTS = {
    "/": ("GET", "page.index"),
    f"/page/{NAME}": ("GET", "page.part"),
}


def create_app(service: Service) -> Guard:
    """Create the ASGI application of a service."""
    endpoints = {**ENDPOINTS, **(PAGE_ENDPOINTS if service.settings.page else {})}
    router = Router(service, endpoints)
    return Guard(router.answer, frozenset(endpoints), service.settings, service.metrics)


class Router:
    """Finds and calls the endpoint of a request."""

    def __init__(self, service: Service, endpoints: Mapping[str, tuple[str, str]]) -> None:
        """Create a router for a service's endpoints, in the format of ENDPOINTS."""
        self._service = service
        self._exact = {path: found for path, found in endpoints.items() if not path.endswith(NAME)}
        self._named = {path.removesuffix(NAME): found for path, found in endpoints.items() if path.endswith(NAME)}

    async def answer(self, call: Call) -> Answer | EventStream:
        """Answer a request.

        Raises:
            HttpError: If the path does not exist or does not accept the method.
            LlamacError: Any error of the endpoint.
        """
        method, place = self._find(call)
        allowed = ("GET", "HEAD") if method == "GET" else (method,)
        if call.scope["method"] not in allowed:
            message = f"{call.path} does not accept the method {call.scope['method']}"
            raise HttpError(405, message, "method_not_allowed", headers={"allow": ", ".join(allowed)})
        module, _, name = place.partition(".")
        endpoint = getattr(importlib.import_module(f"llamac.server.{module}"), name)
        answer: Answer | EventStream = await endpoint(self._service, call)
        return answer

    def _find(self, call: Call) -> tuple[str, str]:
        """Return the method and the function for a request's path."""
        if call.path in self._exact:
            return self._exact[call.path]
        for start, found in self._named.items():
            if call.path.startswith(start):
                call.name = call.path.removeprefix(start)
                return found
        longer = f"/v1{call.path}"
        hint = f"; did you mean {longer!r}?" if longer in self._exact else ""
        raise HttpError(404, f"there is no {call.path!r} here{hint}", "not_found")
