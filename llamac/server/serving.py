"""Runs a server until a signal ends it: the socket, uvicorn, and notifications of the service manager."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING, Any

from llamac.arguments import StrPath
from llamac.errors import ArgumentError, UnsupportedError
from llamac.server.app import create_app
from llamac.server.guard import LOGGER, Guard
from llamac.server.service import Service

if TYPE_CHECKING:
    import uvicorn

BACKLOG = 1024
MAX_CONNECTIONS = 1000
OTHER_FILES = 256  # open files of the process besides its connections
MAX_FILES = 1 << 20  # assumed limit if the system has none
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
HOW_TO_INSTALL = 'the server needs uvicorn and msgspec: pip install "llamac[serve]"'


def check_libraries() -> None:
    """Check that the libraries of the extra `serve` are installed.

    Raises:
        UnsupportedError: If a library is missing.
    """
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("uvicorn", "msgspec")):
        raise UnsupportedError(HOW_TO_INSTALL)


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def connections_allowed(asked: int | None) -> int:
    """Return the maximum number of connections, and raise this process's limit on open files as needed.

    Raises:
        ArgumentError: If the system does not allow as many as requested.
    """
    try:
        import resource
    except ImportError:  # not a Unix system
        return asked or MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else hard
    allowed = max(1, most - OTHER_FILES)
    count = asked or min(MAX_CONNECTIONS, allowed)
    if count > allowed:
        raise ArgumentError(
            f"--max-connections is {count}, but this process may open {most} files (ulimit -Hn): expected at most "
            f"{allowed}"
        )
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, most), hard))
    return count


def listen(host: str, port: int) -> socket.socket:
    """Open a TCP socket.

    Raises:
        ArgumentError: If the address does not belong to this machine, or is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio sends small packets at once (TCP_NODELAY) only if the socket names its protocol
        opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(BACKLOG)
            opened.setblocking(False)
        except OSError:
            opened.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(f"cannot listen on {host} port {port}: {reason}") from None
    return opened


def listen_unix(path: str) -> socket.socket:
    """Open a Unix socket that only this user can access. Replaces a stale socket of a dead server.

    Raises:
        ArgumentError: If the path exists and is not a socket, or another process listens there or may listen there.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ArgumentError(f"--uds {path}: this is not a socket, so llamac does not replace it")
        with socket.socket(socket.AF_UNIX) as other:
            other.setblocking(False)
            message = f"--uds {path}: another process listens there"
            try:
                other.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except FileNotFoundError:
                pass
            except BlockingIOError:  # its queue is full
                raise ArgumentError(message) from None
            except OSError as error:
                unknown = "llamac cannot tell whether a process still uses this socket"
                reason = error.strerror or error
                raise ArgumentError(f"--uds {path}: {unknown} ({reason}): delete it or choose another path") from None
            else:
                raise ArgumentError(message)
    opened = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        opened.bind(path)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        raise ArgumentError(f"--uds {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return opened


@contextlib.contextmanager
def socket_file(path: str | None) -> Iterator[None]:
    """Delete the file of a Unix socket when the block ends, unless another server has replaced it."""
    own = None if path is None else os.stat(path)
    try:
        yield
    finally:
        if path is not None and own is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(path), own):
                    os.unlink(path)


def check_certificate(certificate: StrPath, key: StrPath) -> None:
    """Check the files of `--tls-cert` and `--tls-key`.

    Raises:
        ArgumentError: If they cannot be used. The message says which file is wrong.
        OSError: If a file cannot be read.
    """
    import ssl

    for option, path, what in (("--tls-cert", certificate, "CERTIFICATE"), ("--tls-key", key, "PRIVATE KEY")):
        with open(path, "rb") as file:
            if f"{what}-----".encode() not in file.read():
                raise ArgumentError(f"{option} {path}: expected a PEM file, with a line -----BEGIN {what}-----")

    def password() -> str:
        hint = "llamac does not ask for passwords: store the key without one (openssl pkey -in FILE -out OTHER)"
        raise ArgumentError(f"--tls-key {key}: the key is encrypted, and {hint}")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ArgumentError(f"--tls-key {key}: this is not the key of the certificate {certificate}") from None
        raise ArgumentError(f"--tls-cert {certificate} and --tls-key {key}: {error.reason or error}") from None


def address_of(opened: socket.socket) -> str:
    """Return the address of a socket, as a URL or a path."""
    if opened.family == socket.AF_UNIX:
        return f"unix:{opened.getsockname()}"
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    service: Service,
    opened: socket.socket,
    *,
    drain_seconds: int,
    max_connections: int,
    started: Callable[[], object] = lambda: None,
    ready: Callable[[], object] = lambda: None,
    stopping: Callable[[int], object] = lambda requests: None,
    reload: Callable[[], object] | None = None,
    **settings: Any,
) -> None:
    """Serve until SIGTERM or SIGINT, then raise the signal again for the previous handlers.

    SIGTERM and the first SIGINT stop the server after all requests have been answered; a second SIGINT stops it at
    once.

    Args:
        service: The service. It is closed at the end.
        opened: The socket to listen on. It is closed at the end.
        drain_seconds: Maximum seconds for running requests at the end.
        max_connections: Maximum number of concurrent requests; further ones get the status 503.
        started: Called when the server listens.
        ready: Called when the models that are opened at startup have computed a token.
        stopping: Called with the number of running requests when SIGINT makes the server wait for them.
        reload: Called for SIGHUP. None: SIGHUP ends the process.
        settings: Further settings of uvicorn.
    """
    server = make_server(create_app(service), drain_seconds, max_connections, **settings)

    end = server.handle_exit

    def handle_exit(number: int, frame: FrameType | None) -> None:
        requests = len(server.server_state.tasks)
        if number == signal.SIGINT and requests and not server.should_exit:
            stopping(requests)
        end(number, frame)

    server.handle_exit = handle_exit  # type: ignore[assignment, method-assign]

    async def run() -> None:
        if server.config.is_ssl:  # uvicorn has no setting for this
            loop = asyncio.get_running_loop()
            seconds = service.settings.header_seconds
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=seconds)  # type: ignore[method-assign]
        running = asyncio.ensure_future(server.serve(sockets=[opened]))
        while not server.started and not running.done():
            await asyncio.sleep(0.001)
        started()
        if reload is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        beats = asyncio.ensure_future(_begin(service, ready))
        try:
            await running
        finally:
            notify("STOPPING=1")
            beats.cancel()

    try:
        asyncio.run(run())
    finally:
        service.close()


def make_server(app: Guard, drain_seconds: int, max_connections: int, **settings: Any) -> uvicorn.Server:
    """Create a uvicorn server for an application."""
    import uvicorn

    from llamac.server.connection import MAX_HEADER_BYTES, Connection, Connections

    chosen = app.settings
    limits = Connections(max_connections, chosen.header_seconds, chosen.send_seconds, app.metrics)
    protocol: Any = partial(Connection, limits)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=protocol,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=drain_seconds,
        backlog=BACKLOG,
        **settings,
    )
    return uvicorn.Server(config)


async def _begin(service: Service, ready: Callable[[], object]) -> None:
    """Warm up the models, report that the server is ready, and ping the service manager's watchdog."""
    try:
        await service.warm_up()
    except Exception as error:
        LOGGER.error("a model cannot be computed", exc_info=error)
        return
    notify("READY=1")
    ready()
    interval = watchdog_seconds()
    while interval is not None:
        await asyncio.sleep(interval)
        if service.failure is None:
            notify("WATCHDOG=1")


def watchdog_seconds() -> float | None:
    """Return the interval of watchdog pings; None if the service manager expects none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # the pings are expected from another process
    return int(microseconds) / 2e6 if microseconds.isdecimal() and int(microseconds) else None


def notify(state: str) -> None:
    """Notify systemd, or a compatible service manager, of the server's state."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
        notifier.connect("\0" + address[1:] if address[0] == "@" else address)
        notifier.send(state.encode())
