"""The application: every path and what answers it."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from llamac.server.guard import Guard
from llamac.server.service import Service

if TYPE_CHECKING:
    from starlette.requests import Request

# The method of each path, and the function of a module of this package that answers it. The module is imported for the
# first request, so that the server starts sooner.
ENDPOINTS = {
    "/health": ("GET", "state.health"),
    "/ready": ("GET", "state.ready"),
    "/metrics": ("GET", "state.metrics"),
    "/openapi.json": ("GET", "openapi.openapi"),
    "/v1/models": ("GET", "state.models"),
    "/v1/models/{name:path}": ("GET", "state.one_model"),
    "/v1/completions": ("POST", "generation.completions"),
    "/v1/chat/completions": ("POST", "generation.chat_completions"),
    "/v1/responses": ("POST", "responses.responses"),
    "/v1/messages": ("POST", "messages.messages"),
    "/v1/messages/count_tokens": ("POST", "messages.count_tokens"),
    "/v1/embeddings": ("POST", "embedding.embeddings"),
    "/v1/rerank": ("POST", "embedding.rerank"),
    "/execute": ("POST", "execution.execute"),
    "/tokenize": ("POST", "conversions.tokenize"),
    "/detokenize": ("POST", "conversions.detokenize"),
    "/apply-template": ("POST", "conversions.apply_template"),
}
# Those of the web page, which operators can leave out.
PAGE_ENDPOINTS = {
    "/": ("GET", "page.index"),
    "/page/{name:path}": ("GET", "page.part"),
}


def create_app(service: Service) -> Guard:
    """The ASGI application that answers for a service.

    Raises:
        ModuleNotFoundError: If Starlette is not installed.
    """
    from starlette.routing import Route, Router

    routes = []
    endpoints = {**ENDPOINTS, **(PAGE_ENDPOINTS if service.settings.page else {})}
    for path, (method, place) in endpoints.items():
        routes.append(Route(path, _endpoint(service, place), methods=[method]))
    router = Router(routes=routes, redirect_slashes=False)
    return Guard(router, frozenset(endpoints), service.settings, service.metrics)


def _endpoint(service: Service, place: str) -> Callable[[Request], Awaitable[Any]]:
    module, _, name = place.partition(".")

    async def answer(request: Request) -> Any:
        function = getattr(importlib.import_module(f"llamac.server.{module}"), name)
        return await function(service, request)

    return answer
