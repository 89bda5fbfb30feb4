"""The application of `llamac serve` under Ray Serve: `serve run llamac.integrations.ray_serve:app`.

Two deployments: each replica of `model` has a whole server of llamac without its sockets; `front` reads the body of a
request, chooses the replica by the beginning of the conversation, and passes the answer on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any

from llamac import models
from llamac.arguments import DEFAULT_SEQUENCES, KVDtype, Numerics
from llamac.engine.batching.engine import Engine
from llamac.engine.hardware.machine import plan_threads
from llamac.errors import ArgumentError, UnsupportedError
from llamac.server.app import create_app
from llamac.server.call import MESSAGES
from llamac.server.exchange import Answer, ClientGoneError, Receive, Scope, Send, event, until_gone
from llamac.server.failures import error_body, messages_error
from llamac.server.keys import read_keys
from llamac.server.models import Models
from llamac.server.models_file import nearest
from llamac.server.service import Service
from llamac.server.serving import check_libraries
from llamac.server.settings import MAX_BODY_BYTES, Settings
from llamac.sources.loading import load

HOW_TO_INSTALL = 'this needs Ray: pip install "llamac[ray]"'
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
BEGINNING = 256  # characters of the first message that choose a replica
ATTEMPTS = 4  # replicas that may die under a request before its client gets an error
AHEAD = 64  # parts of an answer that a replica computes before they are taken
POSITIVE = (
    *("threads", "num_replicas", "max_replicas", "max_sequences", "max_queue", "context", "kv_tokens"),
    *("max_body", "max_prompt", "timeout"),
)
# Of an ASGI scope.
PASSED_ON = ("type", "http_version", "method", "path", "query_string", "headers", "client")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What `build_app` takes, from a file of Ray Serve or as NAME=VALUE of `serve run`.

    Attributes:
        model: Whatever `llamac.load` opens, on each machine.
        alias: Another name of it.
        threads: Threads of a replica, which reserves as many CPUs; None: as many as `fewest_cpus`.
        num_replicas: Replicas; with `max_replicas`, at least so many.
        max_replicas: Most replicas: Ray starts and stops them with the load; None: their number is fixed.
        max_sequences: Requests that a replica computes at a time.
        max_queue: Requests that wait for a replica; further ones get the status 429.
        context: Positions per request; None: the model's.
        kv_dtype: Number format of the KV cache; None: llamac's own.
        numerics: How products round their inputs: "exact" or "fast".
        kv_tokens: Positions for which the KV cache of a replica has memory; None: as many as requests need.
        api_key_file: A file with API keys, on each machine.
        max_body: The largest body of a request, in bytes.
        max_prompt: The most tokens of a prompt; None: what fits the context.
        timeout: Seconds in which a request must be answered; None: no limit.
        page: Whether there is a web page at `/`.
        device: Where the model is computed: only "cpu" is accepted.
    """

    model: str = models.CHAT
    alias: str | None = None
    threads: int | None = None
    num_replicas: int = 1
    max_replicas: int | None = None
    max_sequences: int = DEFAULT_SEQUENCES
    max_queue: int = 256
    context: int | None = None
    kv_dtype: KVDtype | None = None
    numerics: Numerics = "exact"
    kv_tokens: int | None = None
    api_key_file: str | None = None
    max_body: int = MAX_BODY_BYTES
    max_prompt: int | None = None
    timeout: float | None = None
    page: bool = True
    device: str = "cpu"


def check_device(device: str) -> None:
    """Refuse devices other than the CPU.

    Raises:
        UnsupportedError: The device is another one.
    """
    if device != "cpu":
        raise UnsupportedError(
            f"device is {device!r}, but on a Ray cluster llamac computes on CPUs only: run `llamac serve --device "
            f"{device}` or `llamac batch --device {device}` on each machine with a GPU"
        )


def arguments_of(given: Mapping[str, Any]) -> Arguments:
    """Check arguments. `serve run` passes all of them as texts.

    Raises:
        ArgumentError: If one is unknown, or has a wrong value.
        UnsupportedError: If the device is not the CPU.
    """
    import msgspec

    names = [field.name for field in fields(Arguments)]
    for name in given:
        if name not in names:
            raise ArgumentError(f"build_app has no argument {name!r}{nearest(name, names)}")
    try:
        found: Arguments = msgspec.convert(dict(given), Arguments, strict=False)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"arguments of build_app: {error}") from None
    check_device(found.device)
    for name in POSITIVE:
        value = getattr(found, name)
        if value is not None and not value > 0:  # so that NaN is refused
            raise ArgumentError(f"{name} is {value:g}, expected more than 0")
    if found.max_replicas is not None and found.max_replicas < found.num_replicas:
        raise ArgumentError(
            f"max_replicas is {found.max_replicas}, expected at least num_replicas, {found.num_replicas}"
        )
    return found


def build_app(args: dict[str, Any]) -> Any:
    """The application for Ray Serve: `import_path: llamac.integrations.ray_serve:build_app`.

    Args:
        args: Those of `Arguments`.

    Returns:
        A `ray.serve.Application`.

    Raises:
        ArgumentError: If an argument is wrong.
        UnsupportedError: If Ray or a library of the server is missing.
    """
    if find_spec("ray") is None:
        raise UnsupportedError(HOW_TO_INSTALL)
    check_libraries()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    arguments = arguments_of(args)
    scaling: dict[str, Any] = {"num_replicas": arguments.num_replicas}
    if arguments.max_replicas is not None:
        limits = {"min_replicas": arguments.num_replicas, "max_replicas": arguments.max_replicas}
        # below what a replica can compute at a time, so that new ones start before requests wait
        scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": max(1, arguments.max_sequences // 2)}}
    model = serve.deployment(
        Replica,
        name="model",
        max_ongoing_requests=arguments.max_sequences,
        max_queued_requests=arguments.max_queue,
        health_check_period_s=2,
        ray_actor_options={"num_cpus": arguments.threads or fewest_cpus()},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **scaling,
    )
    front = serve.deployment(
        serve.ingress()(Front),
        name="front",
        max_ongoing_requests=10_000,  # it only passes on: `model` has the limits
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(model.bind(arguments), arguments.max_body)


def __getattr__(name: str) -> Any:
    """`app` is the application with the default arguments. It is built on first use, because building it needs Ray."""
    if name == "app":
        return build_app({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fewest_cpus() -> int:
    """The CPUs of the machine of the cluster that has fewest, of those that have any.

    `serve run` makes the application before it connects to a cluster: then the cores of this machine.
    """
    import ray

    if not ray.is_initialized():
        return plan_threads().threads
    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min((count for count in counts if count), default=1)


# ---- a replica


class Replica:
    """A server without its sockets, in a process that Ray starts."""

    def __init__(self, arguments: Arguments) -> None:
        """Open the model. It computes with as many threads as Ray has reserved CPUs."""
        import ray
        from ray import serve

        self._header = (b"x-llamac-replica", serve.get_replica_context().replica_id.unique_id.encode())
        cpus = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
        model = load(
            arguments.model,
            context=arguments.context,
            kv_dtype=arguments.kv_dtype,
            numerics=arguments.numerics,
            threads=max(1, cpus),
            progress=False,
        )
        engine = Engine(
            model,
            max_sequences=arguments.max_sequences,
            kv_tokens=arguments.kv_tokens,
            max_queue=arguments.max_queue,
        )
        settings = Settings(
            keys=read_keys(arguments.api_key_file),
            max_body_bytes=arguments.max_body,
            max_prompt_tokens=arguments.max_prompt,
            request_seconds=arguments.timeout,
            page=arguments.page,
        )
        self._service = Service(Models.of_one(engine, [arguments.alias] if arguments.alias else []), settings)
        self._app = create_app(self._service)

    async def check_health(self) -> None:
        """Ray asks this before it sends requests, and every few seconds. An engine that has stopped is replaced."""
        if not self._service.is_warm:
            await self._service.warm_up()
        if self._service.failure is not None:
            raise self._service.failure

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
        """Answer a request.

        Args:
            scope: Its ASGI scope.
            body: Its body.

        Returns:
            The ASGI messages of the answer, as many at a time as there are. When nobody takes them any longer, the
            request ends.
        """
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(AHEAD)
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            await self._app(scope, receive, send)  # never raises
            await messages.put(None)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await messages.put(message)

        task = asyncio.ensure_future(run())
        try:
            while True:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                some = [message for message in found if message is not None]
                if some:
                    yield some
                if len(some) < len(found):
                    return
        finally:
            gone.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def __del__(self) -> None:
        service = getattr(self, "_service", None)  # there is none if the model could not be opened
        if service is not None:
            service.close()


# ---- the front


def session_of(body: bytes) -> str:
    """What chooses the replica of a request: a hash of the beginning of its conversation or prompt.

    It stays the same while the conversation grows: instructions, and the beginning of the first other message.

    Returns:
        The hash; "" if the body has no such beginning: then any replica answers.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    text = next((document[name] for name in ("messages", "input", "prompt") if document.get(name)), None)
    if text is None:
        return ""
    parts = [document.get(name) for name in ("model", "system", "instructions", "tools")]
    for message in text if isinstance(text, list) else [text]:
        if isinstance(message, dict) and message.get("role") in ("system", "developer"):
            parts.append(message.get("content"))
            continue
        first = message.get("content") if isinstance(message, dict) else text
        parts.append(json.dumps(first)[:BEGINNING])
        break
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Front:
    """Passes requests to replicas, and their answers to clients."""

    def __init__(self, replicas: Any, max_body: int) -> None:
        """Begin to pass on.

        Args:
            replicas: The handle of the replicas' deployment.
            max_body: Bytes of a body after which the rest is not passed on.
        """
        self._replicas = replicas
        self._max_body = max_body

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application, which Ray asks for. uvicorn would take a bound method for an ASGI 2 application."""

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(scope, receive, send)

        return application

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        with contextlib.suppress(ClientGoneError):
            body = await self._read(receive)
            await until_gone(receive, _Passing(scope, send).run(self._replicas, body))

    async def _read(self, receive: Receive) -> bytes:
        """The body. One that is too large is cut to one byte more than the limit, so the replica refuses it."""
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            if size <= self._max_body:
                parts.append(part)
            size += len(part)
            more = message.get("more_body", False)
        return b"".join(parts)[: self._max_body + 1]


class _Passing:
    """One request on its way to a replica, and its answer on the way back."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = {name: scope[name] for name in PASSED_ON if name in scope}
        self._scope["path"] = path = "/" + scope["path"].removeprefix(scope.get("root_path", "")).lstrip("/")
        self._scope["headers"] = [tuple(pair) for pair in scope["headers"] if pair[0] != b"content-length"]
        self._is_messages = path.startswith(MESSAGES)
        self._send = send
        self._has_begun = self._is_stream = False

    async def run(self, replicas: Any, body: bytes) -> None:
        """Pass a request on, and its answer back. A replica that dies before the answer has begun is replaced."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        if self._scope["path"] == "/metrics":
            message = "each replica counts for itself: Ray's own metrics have the numbers of all of them"
            await self._fail(404, message, "not_found", "invalid_request_error")
            return
        session = session_of(body) if body else ""
        for attempt in range(ATTEMPTS):
            answers = replicas.options(stream=True, session_id=session).answer.remote(self._scope, body)
            try:
                await self._pass(answers)
                return
            except RayActorError:
                if self._has_begun or attempt + 1 == ATTEMPTS:
                    message = "the process that computed the answer has died: send the request again"
                    await self._fail(503, message, "replica_died", "server_error")
                    return
            except BackPressureError:
                await self._fail(429, "too many requests are waiting: try again", "rate_limit_exceeded", "requests")
                return
            except DeploymentUnavailableError:
                await self._fail(503, "no replica can be started", "replicas_unavailable", "server_error")
                return

    async def _pass(self, answers: Any) -> None:
        try:
            async for messages in answers:
                for message in messages:
                    if message["type"] == "http.response.start":
                        # Ray gives each request an id, which the replica has read, and adds it to the answer itself
                        kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                        message = {**message, "headers": kept}
                        types = [value for name, value in kept if name == b"content-type"]
                        self._is_stream = types[:1] == [b"text/event-stream; charset=utf-8"]
                    await self._send(message)
                    self._has_begun = True
        except asyncio.CancelledError:
            answers.cancel()
            raise

    async def _fail(self, status: int, message: str, code: str, kind: str) -> None:
        """Answer with an error, or end a stream with one. A whole answer that has begun cannot be ended well."""
        body = error_body(message, kind, code)
        if self._is_messages:
            body = messages_error(status, message, "")
        if not self._has_begun:
            await Answer(body, status, {"retry-after": "1"})(self._scope, _nothing, self._send)
        elif self._is_stream:
            data = event(body, "error" if self._is_messages else None)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
        else:
            raise ConnectionAbortedError(message)


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
