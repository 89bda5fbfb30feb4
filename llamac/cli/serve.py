"""`llamac serve`: answers HTTP requests in the formats that clients of other servers have."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamac import __version__
from llamac import models as built_in
from llamac.arguments import DEFAULT_SEQUENCES
from llamac.cli.loading import load_model
from llamac.cli.options import (
    Group,
    add_conversion,
    add_device,
    add_kernels,
    add_lora,
    add_max_memory,
    add_model,
    add_threads,
    session_settings,
)
from llamac.cli.parser import Parser
from llamac.cli.serve_models import DEFAULT_IDLE_SECONDS, models_of
from llamac.cli.text import safe_error
from llamac.engine.batching.engine import Engine
from llamac.errors import ArgumentError
from llamac.exit_codes import OK
from llamac.server.callback import call_back, check_url
from llamac.server.guard import LOGGER
from llamac.server.keys import KEY_VARIABLE, read_keys
from llamac.server.logs import FORMATS, writing_logs
from llamac.server.models import Models
from llamac.server.service import Service
from llamac.server.serving import (
    LOCAL_NAMES,
    address_of,
    check_certificate,
    check_libraries,
    connections_allowed,
    is_local,
    listen,
    listen_unix,
    serve,
    socket_file,
)
from llamac.server.settings import CLIENT_SECONDS, MAX_BODY_BYTES, Settings
from llamac.sizes import parse_size

MAX_QUEUE = 256
PORT = 8000
HOST = "127.0.0.1"
ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/?#@\s]+")  # as browsers send it

DESCRIPTION = (
    "Serve a model over HTTP, for clients of OpenAI's and Anthropic's APIs. The server computes requests together. "
    "After Ctrl-C or SIGTERM it finishes requests for at most --drain seconds, then stops; a second Ctrl-C stops it at "
    "once. docs/server.md describes the endpoints."
)
EXAMPLES = """\
  llamac serve                                          the built-in model on http://127.0.0.1:8000
  llamac serve model.gguf --port 9000 -v                log each request
  llamac serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  llamac serve --models-dir /srv/models --max-memory 8GiB
  llamac serve model.gguf --uds /run/llamac.sock --max-sequences 32
"""


def add_arguments(parser: Parser) -> None:
    """Add the command's options, in the order of the help."""
    _add_models(parser)
    _add_network(parser.add_argument_group("network"))
    _add_limits(parser.add_argument_group("limits"))
    _add_log(parser.add_argument_group("log"))
    add_conversion(parser.add_argument_group("conversion"))
    _add_machine(parser.add_argument_group("machine"))


def _add_models(parser: Parser) -> None:
    model = parser.add_argument_group("model")
    add_model(parser, built_in.CHAT)
    model.add_argument(
        "--models-dir",
        metavar="DIR",
        help="serve the models of this folder instead, and load each when a request names it; models.toml in the "
        "folder has names and settings",
    )
    model.add_argument(
        "--idle-seconds",
        type=float,
        metavar="S",
        help=f"with --models-dir: close a model after this many seconds without a request; 0: never (default: "
        f"{DEFAULT_IDLE_SECONDS})",
    )
    model.add_argument(
        "--alias", metavar="NAME", action="append", default=[], help="another name of the model; repeatable"
    )
    model.add_argument(
        "-z", "--tokenizer", metavar="FILE", help="use this tokenizer file or directory, not the model's tokenizer"
    )
    add_lora(model, "apply a LoRA adapter while the model runs")
    model.add_argument("--context", type=int, metavar="N", help="positions per request (default: the model's)")


def _add_network(network: Group) -> None:
    network.add_argument("--host", default=HOST, metavar="ADDRESS", help="the address to listen on")
    network.add_argument("--port", type=int, default=PORT, metavar="N", help="the port; 0: any free one")
    network.add_argument("--uds", metavar="PATH", help="listen on this Unix socket instead")
    network.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"accept only requests with one of the keys in this file, one per line, with its limits; {KEY_VARIABLE} "
        "adds a key",
    )
    network.add_argument(
        "--no-key", action="store_true", help="listen without a key on an address that other machines can reach"
    )
    network.add_argument(
        "--cors",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="allow requests from web pages of this origin, such as https://example.org; *: all; repeatable",
    )
    network.add_argument("--no-page", action="store_true", help="serve no web page at /")
    network.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate chain")
    network.add_argument("--tls-key", metavar="FILE", help="the private key of the certificate")
    network.add_argument(
        "--ready-callback", metavar="URL", help="POST a small JSON object to this URL when the server is ready"
    )


def _add_limits(limits: Group) -> None:
    limits.add_argument(
        "--max-sequences", type=int, default=DEFAULT_SEQUENCES, metavar="N", help="requests to compute at the same time"
    )
    limits.add_argument(
        "--max-queue",
        type=int,
        default=MAX_QUEUE,
        metavar="N",
        help="size of the queue; further requests get status 429",
    )
    limits.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="connections with a request; further requests get status 503 (default: 1000, if the system allows it)",
    )
    limits.add_argument(
        "--max-body", default=f"{MAX_BODY_BYTES >> 20}MiB", metavar="SIZE", help="maximum size of a request body"
    )
    limits.add_argument(
        "--max-prompt", type=int, metavar="N", help="maximum tokens in a prompt (default: what fits the context)"
    )
    limits.add_argument(
        "--timeout", type=float, metavar="S", help="time limit of a request in seconds (default: no limit)"
    )
    limits.add_argument(
        "--client-timeout",
        type=float,
        default=CLIENT_SECONDS,
        metavar="S",
        help="time limit in seconds for a client to send a header, to send a body, and to read data (default: "
        "%(default)g)",
    )
    limits.add_argument(
        "--drain", type=int, default=30, metavar="S", help="seconds for running requests to finish at shutdown"
    )


def _add_log(log: Group) -> None:
    log.add_argument("-v", "--verbose", action="store_true", help="log each request")
    log.add_argument("--log-format", choices=FORMATS, default="text", help="the format of log lines on standard error")
    log.add_argument("--log-prompts", action="store_true", help="also log prompts and answers; implies -v")


def _add_machine(machine: Group) -> None:
    machine.add_argument(
        "--kv-tokens",
        type=int,
        metavar="N",
        help="capacity of the KV cache in positions, for all requests together (default: as many as they need)",
    )
    add_threads(machine)
    add_kernels(machine)
    add_device(machine)
    add_max_memory(machine)


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    check_libraries()
    settings = _settings(options)
    tls = _tls(options)
    connections = connections_allowed(options.max_connections)
    opened = listen_unix(options.uds) if options.uds else listen(options.host, options.port)
    with (
        socket_file(options.uds),
        opened,
        writing_logs(options.log_format, verbose=options.verbose or options.log_prompts) as log,
    ):
        models = models_of(options) if options.models_dir else _only_model(options)
        try:
            settings.keys.check_models(models.names)
        except ArgumentError:
            models.close()
            raise
        address = address_of(opened)
        if tls:
            address = address.replace("http:", "https:", 1)
        served = ", ".join(entry.name for entry in models.entries)
        serve(
            Service(models, settings),
            opened,
            drain_seconds=options.drain,
            max_connections=connections,
            started=lambda: log.put(f"llamac: {safe_error(f'serving {served} on {address}')}"),
            stopping=lambda requests: log.put(_stopping(requests, options.drain)),
            ready=lambda: _call_back(options.ready_callback, address, models),
            reload=_reload(options, settings, models),
            **tls,
        )
    return OK


def _stopping(requests: int, seconds: int) -> str:
    running = "a request" if requests == 1 else f"{requests} requests"
    return f"llamac: finishing {running} for at most {seconds} s; Ctrl-C again stops at once"


def _call_back(url: str | None, address: str, models: Models) -> None:
    if url is not None:
        about = {"status": "ready", "address": address, "models": list(models.names)}
        call_back(url, {**about, "pid": os.getpid(), "version": __version__})


def _reload(options: argparse.Namespace, settings: Settings, models: Models) -> Callable[[], None] | None:
    """What SIGHUP does: it reloads the file with the API keys. A wrong file leaves the keys unchanged."""

    def reload() -> None:
        try:
            keys = read_keys(options.api_key_file)
            keys.check_models(models.names)
        except (ArgumentError, OSError) as error:
            LOGGER.error("the API keys remain unchanged", extra={"fields": {"reason": str(error)}})
            return
        settings.keys.replace(keys)
        LOGGER.info("the API keys were reloaded", extra={"fields": {"keys": len(keys)}})

    return None if options.api_key_file is None else reload


def _only_model(options: argparse.Namespace) -> Models:
    """The table of the one model that a command names."""
    model = load_model(options, tokenizer=options.tokenizer, **session_settings(options))
    try:
        engine = Engine(
            model,
            max_sequences=options.max_sequences,
            kv_tokens=options.kv_tokens,
            max_queue=options.max_queue,
        )
    except BaseException:
        model.close()
        raise
    return Models.of_one(engine, options.alias, _file_names(options.model or model.file.path))


def _file_names(source: str | Path) -> tuple[str, ...]:
    """The name of a file without its suffix, or of a directory; none if there is neither."""
    path = Path(os.path.abspath(source))  # "." has no name
    return (path.name if path.is_dir() else path.stem,) if path.exists() and path.name else ()


def _settings(options: argparse.Namespace) -> Settings:
    keys = read_keys(options.api_key_file)
    local = bool(options.uds) or is_local(options.host)
    if not (local or keys or options.no_key):
        raise ArgumentError(
            f"--host {options.host} accepts connections from other machines: give --api-key-file FILE or {KEY_VARIABLE}"
            ", or --no-key"
        )
    if options.ready_callback is not None:
        check_url(options.ready_callback)
    if not 0 <= options.port <= 65535:
        raise ArgumentError(f"--port is {options.port}, expected 0 to 65535")
    for name in ("max_queue", "max_connections", "max_prompt", "drain", "timeout", "client_timeout"):
        value = getattr(options, name)
        if value is not None and not value > 0:  # so that NaN is refused
            raise ArgumentError(f"--{name.replace('_', '-')} is {value:g}, expected more than 0")
    if options.idle_seconds is not None and options.models_dir is None:
        raise ArgumentError("--idle-seconds needs --models-dir")
    if options.idle_seconds is not None and not options.idle_seconds >= 0:
        raise ArgumentError(f"--idle-seconds is {options.idle_seconds:g}, expected 0 (never) or more")
    if not all(options.alias):
        raise ArgumentError("--alias is '', expected a name")
    for origin in options.cors:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ArgumentError(f"--cors is {origin!r}, expected an origin such as https://example.org, or *")
    return Settings(
        keys=keys,
        origins=tuple(options.cors),
        hosts=() if keys or options.uds or not local else tuple(dict.fromkeys((*LOCAL_NAMES, options.host.lower()))),
        max_body_bytes=parse_size(options.max_body, "--max-body"),
        max_prompt_tokens=options.max_prompt,
        request_seconds=options.timeout,
        page=not options.no_page,
        log_prompts=options.log_prompts,
        **dict.fromkeys(("header_seconds", "body_seconds", "send_seconds"), options.client_timeout),
    )


def _tls(options: argparse.Namespace) -> dict[str, Any]:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ArgumentError("--tls-cert and --tls-key belong together: give both")
    if options.tls_cert is None:
        return {}
    check_certificate(options.tls_cert, options.tls_key)
    return {"ssl_certfile": options.tls_cert, "ssl_keyfile": options.tls_key}
