"""The web page in headless Chromium: its width, its colors, its keys, and what screen readers announce."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from browsers import ANSWER, CONTRAST, Serve, scripted
from http_server import Running, running

PHONE = {"width": 390, "height": 844}
FENCE = "```"


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_window(visit: Serve, tmp_path: Path, width: int) -> None:
    wide = f"{'x' * 300}\n\n{FENCE}\n{'y' * 300}\n{FENCE}\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'zzzzzz|' * 30}"
    with running(scripted(tmp_path, wide)) as server:
        page = visit(server, viewport={"width": width, "height": 700})
        page.ask("?")
        page.press("Settings")
        size = page.page.evaluate(
            "[...document.querySelectorAll('body, #stage, #main, #thread, dialog')]"
            ".map((each) => each.scrollWidth - each.clientWidth)"
        )
        assert size == [0] * len(size)


def test_on_a_phone_the_list_is_a_drawer(server: Running, visit: Serve) -> None:
    page = visit(server, viewport=PHONE)
    assert not page.page.locator("#sidebar").is_visible()
    page.press("Show the list of conversations")
    page.until("document.activeElement.id === 'close-sidebar'")
    assert page.page.evaluate("document.getElementById('stage').inert")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector("#sidebar", state="hidden")
    assert page.page.evaluate("document.activeElement.id") == "open-sidebar"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(server: Running, visit: Serve, scheme: str) -> None:
    page = visit(server, color_scheme=scheme)
    page.ask("?")
    page.press("Token probabilities")
    page.page.locator(".token").nth(3).hover()
    page.page.wait_for_selector("#alternatives:not([hidden])")
    count, found = page.page.evaluate(CONTRAST)
    assert count > len(ANSWER)
    assert found == {}
    page.press("Settings")
    assert page.page.evaluate(CONTRAST)[1] == {}


def test_the_look_follows_the_system_or_the_user(server: Running, visit: Serve) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = visit(server, color_scheme="dark")
    dark = page.page.evaluate(ground)
    page.press("Look: as the system")
    light = page.page.evaluate(ground)
    assert dark != light
    page.page.reload()
    assert page.page.evaluate(ground) == light
    page.press("Look: light")
    assert page.page.evaluate(ground) == dark
    page.press("Look: dark")
    page.page.emulate_media(color_scheme="light")
    assert page.page.evaluate(ground) == light


def test_everything_that_is_operated_has_a_name(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    page.press("Answer again")
    page.wait()
    page.press("Token probabilities")
    for opened in (None, "Settings"):
        if opened:
            page.press(opened)
        session = page.page.context.new_cdp_session(page.page)
        nodes = session.send("Accessibility.getFullAXTree")["nodes"]
        operated = [node for node in nodes if node.get("role", {}).get("value") in OPERATED]
        assert len(operated) > 10
        assert [node for node in operated if not node.get("name", {}).get("value", "").strip()] == []


OPERATED = ("button", "textbox", "searchbox", "combobox", "link", "checkbox", "spinbutton", "dialog")


def test_a_conversation_needs_no_mouse(server: Running, visit: Serve) -> None:
    page = visit(server)
    keys = page.page.keyboard

    def tab_to(name: str, key: str = "Tab") -> None:
        for _ in range(60):
            keys.press(key)
            if page.page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''").startswith(name):
                return
        raise AssertionError(f"no way leads to {name}")

    page.page.evaluate("document.activeElement.blur()")
    keys.press("/")
    keys.type("?")
    keys.press("Enter")
    page.wait()
    tab_to("Token probabilities", "Shift+Tab")
    keys.press("Enter")
    assert page.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Token probabilities"
    tab_to("S, ", "Shift+Tab")
    keys.press("ArrowRight")
    page.page.wait_for_selector("#alternatives:not([hidden])")
    assert page.page.evaluate("document.activeElement.dataset.index") == "1"
    keys.press("Enter")
    assert page.page.evaluate("document.activeElement.className") == "other"
    keys.press("Escape")
    page.page.wait_for_selector("#alternatives", state="hidden")
    assert page.page.evaluate("document.activeElement.dataset.index") == "1"
    keys.press("Enter")
    keys.press("ArrowDown")
    keys.press("Enter")
    page.wait()
    assert page.text(".versions") == "2 / 2"
    keys.press("Control+Shift+O")
    assert page.page.locator(".message").count() == 0
    assert page.page.evaluate("document.activeElement.id") == "input"
