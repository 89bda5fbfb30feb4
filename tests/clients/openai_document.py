"""OpenAI's own OpenAPI document, cut to the paths that the server has, and prism, which checks traffic with it.

The document is 3 MB, so it is not part of this repository. It is downloaded from OpenAI's repository, at a fixed
revision, unless LLAMAC_OPENAI_DOCUMENT names a file. npm installs prism.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REVISION = "f85dbe223d40e1a31cba812ab2d755c7e98a92a3"  # of version 2.3.0, August 2026
SHA256 = "bbfd19abcde0e7412da99378deb2a959ccdd3a812f97c9e35901921e8e973f9a"
ADDRESS = f"https://raw.githubusercontent.com/openai/openai-openapi/{REVISION}/openapi.json"
PRISM = "5.16.0"
VERSION = f"openai-openapi {REVISION[:7]}"
# The operations that the server has.
KEPT = {
    "/chat/completions": "post",
    "/completions": "post",
    "/embeddings": "post",
    "/models": "get",
    "/models/{model}": "get",
    "/responses": "post",
}


class UnavailableError(Exception):
    """The document or prism cannot be had here."""


def whole_document() -> dict[str, Any]:
    """OpenAI's document.

    Raises:
        UnavailableError: If it cannot be downloaded, or is another version.
    """
    given = os.environ.get("LLAMAC_OPENAI_DOCUMENT")
    try:
        data = Path(given).read_bytes() if given else urllib.request.urlopen(ADDRESS, timeout=60).read()
    except OSError as error:
        raise UnavailableError(f"OpenAI's document cannot be read from {given or ADDRESS}: {error}") from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise UnavailableError(f"{given or ADDRESS} is not the openapi.json of revision {REVISION}")
    found: dict[str, Any] = json.loads(data)
    return found


def cut(document: dict[str, Any]) -> dict[str, Any]:
    """The operations of KEPT with everything that they refer to."""
    paths = {path: {method: document["paths"][path][method]} for path, method in KEPT.items()}
    components: dict[str, dict[str, Any]] = {"securitySchemes": document["components"]["securitySchemes"]}
    waiting: list[Any] = [paths]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
            if isinstance(value.get("$ref"), str):
                _, _, kind, name = value["$ref"].split("/")
                if name not in components.setdefault(kind, {}):
                    components[kind][name] = document["components"][kind][name]
                    waiting.append(components[kind][name])
    kept = {name: document[name] for name in ("openapi", "info", "security")}
    return {**kept, "servers": [{"url": "/v1"}], "paths": paths, "components": components}


def cut_document(work: Path) -> Path:
    """The file of the cut document in a folder.

    Raises:
        UnavailableError: If the document cannot be had.
    """
    path = work / "openai.json"
    if not path.exists():
        path.write_text(json.dumps(cut(whole_document())), "utf-8")
    return path


def prism(folder: Path) -> Path:
    """The command, which is installed in a folder.

    Raises:
        UnavailableError: If npm is missing or fails.
    """
    command = folder / "node_modules" / ".bin" / "prism"
    if not command.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise UnavailableError("npm is missing, which installs prism")
        install: list[Any] = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder]
        done = subprocess.run([*install, f"@stoplight/prism-cli@{PRISM}"], capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError(f"npm cannot install prism: {done.stderr.strip().splitlines()[-1]}")
    return command


@contextlib.contextmanager
def proxied(url: str, folder: Path, work: Path) -> Iterator[str]:
    """The address of a proxy that refuses requests and answers which the document excludes.

    Raises:
        UnavailableError: If the document or prism cannot be had.
    """
    document = cut_document(work)
    command = prism(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--errors", "--host", "127.0.0.1", "--port", str(port)]
    with (work / "prism.log").open("wb") as log:
        process = subprocess.Popen([command, "proxy", document, f"{url}/v1", *options], stdout=log, stderr=log)
        try:
            while not _listens(port):
                if process.poll() is not None:
                    raise RuntimeError(f"prism has not started: {(work / 'prism.log').read_text('utf-8')}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
