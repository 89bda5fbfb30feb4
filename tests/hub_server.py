"""A local server with the part of the Hugging Face Hub's API that its client needs to download a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

LARGE = (".safetensors", ".gguf", ".bin", ".model")  # files that the hub stores on another server


def commit_of(name: str) -> str:
    """A commit hash derived from a name."""
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Hub:
    """The server's content, its behavior, and the requests it got.

    Attributes:
        repos: The files of each repository.
        revisions: Names of a repository's only commit, besides its hash.
        gated: Repositories whose files need the token.
        token: The valid token.
        breaks: The number of bytes after which a connection breaks, for one download of a large file after the other.
        damaged: Files that are sent with a wrong bit.
        has_checksums: Whether the listing has checksums.
        has_incomplete_checksums: Whether its checksums lack the hash, as those of some mirrors do.
        ignores_ranges: Whether the server ignores the header Range.
        range_shift: Added to the first byte of a requested range.
        has_xet: Whether the server announces the Xet protocol. It does not implement it: the port is closed.
        status: The status of every response, if not 0.
        info: Replaces members of the listing.
        headers: Returns headers that replace those of a response to HEAD, given a file's name and the number of
            earlier HEAD requests for it.
        bodies: Replaces the content of files, which is then sent without a Content-Length.
        requests: Method, path and range of each request.
        tokens: The values of Authorization that the other server received.
        url: The server's address.
        store: The other server's address.
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", "v1.0", "refs/pr/1")
    gated: set[str] = field(default_factory=set)
    token: str = "secret"
    breaks: list[int] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    has_checksums: bool = True
    has_incomplete_checksums: bool = False
    ignores_ranges: bool = False
    range_shift: int = 0
    has_xet: bool = False
    status: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    headers: Callable[[str, int], dict[str, str]] = lambda name, count: {}
    bodies: dict[str, Callable[[], Iterable[bytes]]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""
    store: str = ""  # the same server under another host name

    def commit(self, repo: str) -> str:
        """The repository's commit, which changes with its files."""
        files = self.repos[repo]
        return commit_of(repo + "".join(name + hashlib.sha1(data).hexdigest() for name, data in sorted(files.items())))

    def requested(self, method: str) -> list[str]:
        """The names of the files that were requested by this method."""
        return [path.rsplit("/", 1)[1] for how, path, _ in self.requests if how == method and "/api/" not in path]

    def ranges(self) -> list[str]:
        """The requested ranges."""
        return [wanted for how, _, wanted in self.requests if how == "GET" and wanted]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: Hub = self.server.hub
        path = unquote(self.path.partition("?")[0])
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if hub.status:
            return self._send(hub.status, b"unavailable")
        if path.startswith("/api/models/"):
            return self._info(hub, path.removeprefix("/api/models/"))
        if path.startswith("/store/"):
            return self._stored(hub, path.removeprefix("/store/"))
        repo, found, rest = path[1:].partition("/resolve/")
        if not found:
            return self._fail(404, "RepoNotFound")
        files = self._files(hub, repo, rest)
        if files is None:
            return None
        revision = next(known for known in (*hub.revisions, hub.commit(repo)) if rest.startswith(f"{known}/"))
        return self._file(hub, repo, files, rest.removeprefix(f"{revision}/"))

    def _files(self, hub: Hub, repo: str, rest: str) -> dict[str, bytes] | None:
        """A repository's files, or None after an error response: no access, or an unknown revision."""
        is_allowed = self.headers.get("Authorization") == f"Bearer {hub.token}"
        if repo not in hub.repos:
            self._fail(404 if is_allowed else 401, "RepoNotFound")
        elif repo in hub.gated and not is_allowed:
            self._fail(403, "GatedRepo")
        elif not any(f"{rest}/".startswith(f"{known}/") for known in (*hub.revisions, hub.commit(repo))):
            self._fail(404, "RevisionNotFound")
        else:
            return hub.repos[repo]
        return None

    def _info(self, hub: Hub, path: str) -> None:
        if "/xet-read-token/" in path:
            end = str(2**33)  # a Unix time in the future
            values = {"Cas-Url": "http://127.0.0.1:9", "Access-Token": "x", "Token-Expiration": end}
            return self._send(200, b"{}", {f"X-Xet-{name}": value for name, value in values.items()})
        repo, _, revision = path.partition("/revision/")
        wants_checksums = "blobs=" in self.path.lower()
        is_allowed = self.headers.get("Authorization") == f"Bearer {hub.token}"
        gated = repo in hub.gated and not is_allowed  # anyone may list a gated repository
        files = hub.repos.get(repo) if gated else self._files(hub, repo, revision or "main")
        if files is None:
            return None
        siblings = []
        for name, data in files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith(LARGE) and hub.has_checksums and wants_checksums:
                complete = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
                sibling["lfs"] = {"oid": "sha256"} if hub.has_incomplete_checksums else complete
            siblings.append(sibling)
        info = {"id": repo, "modelId": repo, "sha": hub.commit(repo), "siblings": siblings, "private": False}
        return self._send(200, json.dumps({**info, **hub.info}).encode(), {"Content-Type": "application/json"})

    def _file(self, hub: Hub, repo: str, files: dict[str, bytes], name: str) -> None:
        data = files.get(name)
        headers = {"X-Repo-Commit": hub.commit(repo)}
        if self.command == "HEAD":
            count = hub.requested("HEAD").count(name) - 1
            changed = hub.headers(name, count)
        else:
            changed = {}
        if data is None:
            return self._fail(404, "EntryNotFound", headers | changed)
        if name.endswith(LARGE):
            digest = hashlib.sha256(data).hexdigest()
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "ETag": '"elsewhere"'}
            if hub.has_xet:
                refresh = f'<{hub.url}/api/models/{repo}/xet-read-token/main>; rel="xet-auth"'
                headers |= {"X-Xet-Hash": digest, "Link": refresh}
            return self._send(302, b"", {**headers, "Location": f"{hub.store}/store/{repo}/{name}"} | changed)
        headers["ETag"] = f'"{hashlib.sha1(data).hexdigest()}"'
        if self.command == "GET" and name in hub.bodies:
            return self._stream(headers, hub.bodies[name]())
        return self._send(200, data, headers | changed)

    def _stored(self, hub: Hub, path: str) -> None:
        hub.tokens.add(self.headers.get("Authorization"))
        org, repo, name = path.split("/", 2)
        data = hub.repos[f"{org}/{repo}"][name]
        if self.command == "GET" and name in hub.bodies:
            return self._stream({}, hub.bodies[name]())
        if name in hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        wanted = None if hub.ignores_ranges else self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) + hub.range_shift if wanted else 0
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if wanted else {}
        if self.command == "GET" and hub.breaks:
            self._head(206 if wanted else 200, len(data) - start, headers)
            self.wfile.write(data[start : start + hub.breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self._send(206 if wanted else 200, data[start:], headers)

    def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _head(self, status: int, size: int | None, headers: dict[str, str]) -> None:
        self.send_response(status)
        length = {} if size is None else {"Content-Length": str(size)}
        for name, value in {**length, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _stream(self, headers: dict[str, str], pieces: Iterable[bytes]) -> None:
        self._head(200, None, {**headers, "Transfer-Encoding": "chunked"})
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore connections that clients close."""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Run the hub at `hub.url` during the block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = hub  # type: ignore[attr-defined]  # for the handler
    hub.url, hub.store = (f"http://{host}:{server.server_address[1]}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
