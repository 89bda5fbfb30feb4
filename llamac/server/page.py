"""The web page at `/`: its files, and the headers that restrict it to these files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llamac.server.exchange import Answer, HttpError

if TYPE_CHECKING:
    from llamac.server.call import Call
    from llamac.server.service import Service

FOLDER = Path(__file__).with_name("page")
PAGE_TYPE = "text/html; charset=utf-8"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": PAGE_TYPE,
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
# Scripts and styles come only from files of this server, so that no answer of a model can become one. Trusted types
# block all HTML that has not passed the sanitizer.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # the browser revalidates each time, and gets 304 if nothing has changed
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
}


@cache
def files() -> dict[str, bytes]:
    """Return the served files by path. Requests cannot name any other file."""
    found = (path for path in sorted(FOLDER.rglob("*")) if path.suffix in TYPES)
    return {path.relative_to(FOLDER).as_posix(): path.read_bytes() for path in found}


async def index(service: Service, call: Call) -> Answer:
    """Return the page."""
    return _answer("index.html", call)


async def part(service: Service, call: Call) -> Answer:
    """Return a script, a style sheet or an image of the page."""
    return _answer(call.name, call)


def _answer(name: str, call: Call) -> Answer:
    data = files().get(name)
    if data is None:
        raise HttpError(404, f"the page has no file {name!r}", "not_found")
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = {**HEADERS, "etag": tag}
    if call.headers.get("if-none-match") == tag:
        return Answer(b"", 304, headers)
    return Answer(data, 200, headers, TYPES[Path(name).suffix])
