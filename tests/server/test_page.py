"""The web page without a browser: its headers, and that it is complete and needs nothing from the network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from http_server import Running, running
from llamac.server import page
from llamac.server.keys import Keys
from llamac.server.settings import Settings

OWN = [name for name in page.files() if not name.startswith("vendor/")]
MAX_LINES = 600


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("stories") as served:
        yield served


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in page.files())])
def test_every_file_has_headers_that_let_nothing_else_run(server: Running, path: str) -> None:
    response = server.client.get(path)
    assert response.status_code == 200
    rules = dict(rule.partition(" ")[::2] for rule in response.headers["content-security-policy"].split("; "))
    assert rules == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cross-origin-resource-policy"] == "same-origin"
    assert response.headers["content-type"] == page.TYPES[Path(path).suffix or ".html"]


def test_a_file_that_has_not_changed_is_not_sent_again(server: Running) -> None:
    first = server.client.get("/page/main.js")
    again = server.client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert not {"content-length", "content-type", "transfer-encoding"} & again.headers.keys()
    assert server.client.get("/page/main.js", headers={"if-none-match": '"other"'}).content == first.content
    assert server.client.head("/").content == b""


@pytest.mark.parametrize("name", ["", "nothing.js", "vendor/README.md", "../page.py", "%2e%2e/page.py", "/etc/passwd"])
def test_no_other_file_is_served(server: Running, name: str) -> None:
    response = server.client.get(f"/page/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_page_takes_no_other_method(server: Running) -> None:
    assert server.client.post("/", json={}).status_code == 405


def test_the_page_needs_no_key_but_what_it_asks_for_does() -> None:
    with running("stories", Settings(keys=Keys(["secret"]))) as server:
        assert server.client.get("/").status_code == server.client.get("/page/main.js").status_code == 200
        assert server.client.get("/v1/models").status_code == 401


def test_operators_can_leave_the_page_out() -> None:
    with running("stories", Settings(page=False)) as server:
        assert server.client.get("/").status_code == server.client.get("/page/main.js").status_code == 404
        assert server.client.get("/v1/models").status_code == 200


def references(name: str) -> Iterator[str]:
    """The files that a file names."""
    text = page.files()[name].decode()
    if name.endswith(".html"):
        yield from re.findall(r'(?:src|href)="([^"#]+)"', text)
    elif name.endswith(".js"):
        yield from re.findall(r'^(?:import|export)\b[^;]*?from "([^"]+)"', text, re.MULTILINE)
        yield from re.findall(r'\bimport\(\s*"([^"]+)"', text)
    else:
        yield from re.findall(r"(?:url\(|@import\s)\s*[\"']?([^)\"';]+)", text)


@pytest.mark.parametrize("name", page.files())
def test_every_reference_is_a_file_of_the_page(name: str) -> None:
    for target in references(name):
        found = target.removeprefix("page/") if name == "index.html" else target.removeprefix("./")
        assert found in page.files(), f"{name} names {target}"


def test_every_file_is_referenced() -> None:
    named = {target.removeprefix("page/").removeprefix("./") for name in page.files() for target in references(name)}
    assert named == set(page.files()) - {"index.html"}


@pytest.mark.parametrize("name", OWN)
def test_nothing_comes_from_the_network_and_nothing_is_inline(name: str) -> None:
    text = page.files()[name].decode()
    # The name of a namespace is no address, and the schemes in the sanitizer's rules have no host.
    assert re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", text.replace("http://www.w3.org/2000/svg", "")) == []
    if name.endswith(".html"):
        assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text) == []
    if name.endswith(".js"):
        sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
        assert re.findall(sinks, text) == []


@pytest.mark.parametrize("name", OWN)
def test_files_have_one_purpose_and_say_it(name: str) -> None:
    lines = page.files()[name].decode().splitlines()
    assert len(lines) <= MAX_LINES
    if name.endswith((".js", ".css")):
        assert lines[0].startswith(("// ", "/* "))


def test_every_label_and_script_finds_its_element() -> None:
    html = page.files()["index.html"].decode()
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    scripts = "".join(page.files()[name].decode() for name in OWN if name.endswith(".js"))
    wanted = re.findall(r'byId\("([^"]+)"\)', scripts)
    wanted += re.findall(r'\s(?:for|aria-labelledby|aria-controls)="([^"]+)"', html)
    assert wanted
    assert set(wanted) <= set(ids)


def test_what_others_wrote_has_its_licence_and_version() -> None:
    notes = (page.FOLDER / "vendor" / "README.md").read_text("utf-8")
    for name in page.files():
        if name.startswith("vendor/"):
            path = page.FOLDER / name
            assert path.with_suffix(".LICENSE").stat().st_size > 1000
            version = re.search(r"(?:marked v|DOMPurify )(\d+\.\d+\.\d+)", path.read_text("utf-8")[:400])
            assert version is not None
            assert re.search(rf"`{path.name}` \| \w+ {re.escape(version[1])} ", notes)


def test_the_package_has_every_file_of_the_page() -> None:
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        pytest.skip("the sources are not here: this is an installed copy")
    patterns = re.findall(r'"(page/[^"]+)"', (root / "pyproject.toml").read_text("utf-8"))
    packed = {path for pattern in patterns for path in page.FOLDER.parent.glob(pattern)}
    assert packed == {path for path in page.FOLDER.rglob("*") if path.is_file()}
