"""A headless Chromium for the tests of the web page, through Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STOP = 2  # a token
ANSWER = "Some **bold** text and more of it."
Serve = Callable[..., Any]  # the fixture `visit`
PATIENCE_MS = 60_000  # only a hang takes so long

# The number of texts that can be seen, and the contrast of those that are hard to read
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((each) => each / 255)
      .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "white";
  };
  const found = {};
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const isSeen = (each) => each.checkVisibility({ visibilityProperty: true }) && !each.closest(".sr, .skip, :disabled");
  const seen = [...document.querySelectorAll("body *")].filter((each) => hasText(each) && isSeen(each));
  for (const element of seen) {
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found[`${element.tagName} ${element.className} ${element.textContent.slice(0, 20)}`] = ratio;
  }
  return [seen.length, found];
}"""


def scripted(folder: Path, text: str, template: str = SCRIPT_TEMPLATE) -> Path:
    """A model that answers "?" with a text. The second likeliest token is always "q"."""
    script = [*byte_ids("?" + text), STOP]
    made = script_checkpoint(script, context=max(128, len(script) + 64), stop_ids=[STOP], second=byte_ids("q")[0])
    made.chat_template = template
    return write_model(folder / "script.bin", made, generation={"temperature": 0})


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser. The test is skipped if Playwright or Chromium is missing."""
    library = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    with library.sync_playwright() as playwright:
        if program is None and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("Chromium is not installed: apt-get install chromium, or playwright install chromium")
        # Chromium's own sandbox does not run for root, as in containers.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that a test has opened, and what went wrong in it.

    Attributes:
        page: Playwright's page.
        problems: Messages of errors in its console, and exceptions.
        requests: What it has sent: method, URL and JSON body.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[tuple[str, str, Any]] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", self._refuse)
        page.on("request", lambda request: self.requests.append((request.method, request.url, _json(request))))

    def _note(self, kind: str, text: str) -> None:
        if kind == "error":
            self.problems.append(text)

    def _refuse(self, dialog: Any) -> None:
        self.problems.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, url: str) -> None:
        """Open the page and wait until it has its models, or asks for a key."""
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready], dialog[open]")

    def ask(self, text: str, *, wait: bool = True) -> None:
        """Send a message, and wait for the end of its answer."""
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until no answer is being written."""
        self.page.wait_for_selector(".message:last-child:not(.live)")
        self.page.wait_for_selector("#send", state="visible")

    def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Playwright's own function for this needs `eval`."""
        limit = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < limit, expression
            self.page.wait_for_timeout(10)

    def forgive(self, part: str) -> None:
        """Forget the problems that are part of a test."""
        self.problems = [problem for problem in self.problems if part not in problem]

    def press(self, name: str) -> None:
        """Press the last button with a name."""
        self.page.get_by_role("button", name=name, exact=True).last.click()

    def text(self, selector: str) -> str:
        """The text of the last element that matches."""
        return str(self.page.locator(selector).last.inner_text())

    def bodies(self, path: str) -> list[Any]:
        """The bodies that were sent to a path."""
        return [body for _, url, body in self.requests if url.endswith(path)]


def _json(request: Any) -> Any:
    return request.post_data_json if request.method == "POST" else None
