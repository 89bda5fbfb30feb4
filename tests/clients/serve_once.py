"""Follows the README's steps for a new user of the server, with the `llamac` of this interpreter's environment.

    python tests/clients/serve_once.py

It starts the README's `llamac serve`, opens the page at the address that the README names, with all files that the page
refers to, sends the request of the README's `curl`, and ends the server with SIGTERM. It needs nothing but llamac.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

README = Path(__file__).parents[2] / "README.md"
LIMIT_S = 60.0  # only a hang takes so long


def main() -> None:
    """Do all of it.

    Raises:
        SystemExit: If something is not as the README says.
    """
    text = README.read_text("utf-8")
    typed = line_of(text, r"llamac serve +# .*then open http://")
    address = re.findall(r"http://\S+", typed)[0]
    command = shlex.split(typed, comments=True)
    program = Path(sys.executable).with_name(command[0])
    server = subprocess.Popen([program, *command[1:]], stderr=subprocess.PIPE, text=True)
    try:
        wait_until_ready(server, address)
        look_at_page(address)
        content = answer_of(line_of(text, r"curl http"))
        server.send_signal(signal.SIGTERM)
        _, printed = server.communicate(timeout=LIMIT_S)
    finally:
        server.kill()
    if server.returncode != -signal.SIGTERM or printed != f"llamac: serving helper on {address}\n":
        raise SystemExit(f"the server ends with {server.returncode} and has printed: {printed}")
    print(f"`{shlex.join(command)}` shows its page and answers: {content}")


def line_of(text: str, pattern: str) -> str:
    """The only line of a text that begins with a pattern.

    Raises:
        SystemExit: If there is another number of them.
    """
    found = [line for line in text.splitlines() if re.match(pattern, line)]
    if len(found) != 1:
        raise SystemExit(f"README.md has {len(found)} lines that begin with {pattern}, expected 1")
    return found[0]


def wait_until_ready(server: subprocess.Popen[str], address: str) -> None:
    """Wait until a server is ready.

    Raises:
        SystemExit: If it ends before, or takes too long.
    """
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        try:
            get(urljoin(address, "/ready"))
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"the server has ended: {server.communicate()[1]}") from None
            time.sleep(0.05)
        else:
            return
    raise SystemExit(f"the server is not ready after {LIMIT_S:g} seconds")


def get(url: str, data: bytes | None = None) -> tuple[str, bytes]:
    """The type and the body of an answer with the status 200. With data it is a POST, with the type that curl sends.

    Raises:
        OSError: If there is none.
    """
    with urllib.request.urlopen(url, data, timeout=LIMIT_S) as answer:
        return answer.headers.get_content_type(), answer.read()


def look_at_page(address: str) -> None:
    """Get a page, and what it refers to.

    Raises:
        SystemExit: If it is not the server's page.
        OSError: If a file of it is missing.
    """
    kind, page = get(address)
    files = re.findall(r'(?:href|src)="(/?page/[^"]+)"', page.decode())
    if kind != "text/html" or b"<title>llamac</title>" not in page or not files:
        raise SystemExit(f"{address} is not the page: {kind}, {page[:200]!r}")
    for name in files:
        get(urljoin(address, name))


def answer_of(command: str) -> str:
    """What the model says to the request that a command of curl sends.

    Raises:
        SystemExit: If the answer is not an answer to a chat.
        OSError: If the request is refused.
    """
    _, url, option, body = shlex.split(command)
    if option != "-d":
        raise SystemExit(f"this command has another form than expected: {command}")
    _, data = get(url, body.encode())
    answer = json.loads(data)
    content = answer["choices"][0]["message"]["content"]
    if answer["object"] != "chat.completion" or not content.strip():
        raise SystemExit(f"{url} answers: {data.decode()}")
    return str(content)


if __name__ == "__main__":
    main()
