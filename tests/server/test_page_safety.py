"""The web page in headless Chromium: whatever a model or a user writes stays text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from browsers import Serve, scripted
from http_server import Running, running

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FENCE = "```"
HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<svg onload=\"document.title='owned'\"><script>document.title='owned'</script></svg>",
    "<iframe srcdoc=\"<script>parent.document.title='owned'</script>\"></iframe>",
    "<math><mtext><table><mglyph><style><img onerror=\"document.title='owned'\"></style></mglyph></table></mtext>",
    "<form action=/x><button formaction=javascript:alert(1)>b</button><input autofocus onfocus=alert(1)></form>",
    "<style>*{display:none}</style><link rel=stylesheet href=/x.css><meta http-equiv=refresh content=0;url=/x>",
    "<base href=//example.invalid/><object data=/x></object><embed src=/x><a href=/x ping=/y>l</a>",
    "[l](javascript:document.title='owned')",
    "[l](JaVaScRiPt&colon;alert(1)) [l](java&#10;script:alert(1)) [l](vbscript:x) <javascript:alert(1)>",
    "[l](data:text/html,<script>alert(1)</script>) [l](data:image/svg+xml,<svg/onload=alert(1)>)",
    "[l]: javascript:alert(1)\n\n[l] [l](/relative) [l](//example.invalid/x) [l](blob:x)",
    "![i](http://example.invalid/track.png) ![i](data:image/svg+xml;base64,PHN2Zy8+) ![i](javascript:alert(1))",
    f"{FENCE}html\n<script>document.title='owned'</script>\n{FENCE}\n{FENCE}\" onclick=alert(1) class=x\ncode\n{FENCE}",
    '[l](http://example.invalid/"onmouseover=alert(1)) **<b onclick=alert(1)>b</b>** `<img src=x onerror=alert(1)>`',
    "| <img src=x onerror=alert(1)> | b |\n|---|:-:|\n| <script>alert(1)</script> | `x` |",
    "<!--><script>alert(1)</script--> <![CDATA[<script>alert(1)</script>]]> <?php ?> </p></div><script>alert(1)",
    "<a id=input name=send href=/x>x</a><form id=composer name=stop></form>",
    "[" * 40 + "](" * 40 + "*_" * 40 + "<" * 20 + "&lt;script&gt;alert(1)&lt;/script&gt;",
]
# What Markdown becomes, with the elements and attributes that the page adds itself.
ALLOWED = """() => {
  const tags = new Set("A P BR CODE DEL EM STRONG PRE UL OL LI TABLE THEAD TBODY TR TH TD H1 H2 H3 H4 H5 H6 HR"
    .concat(" BLOCKQUOTE DIV SPAN BUTTON SVG PATH").split(" "));
  const names = new Set("href title align start class target rel type aria-label aria-hidden tabindex role viewBox d"
    .split(" "));
  const found = [];
  for (const element of document.querySelectorAll(".assistant .body *")) {
    if (!tags.has(element.tagName.toUpperCase())) found.push(element.outerHTML);
    for (const { name, value } of element.attributes) {
      if (!names.has(name)) found.push(`${name}=${value}`);
      if (name === "href" && !/^(https?:\\/\\/|mailto:)/.test(value)) found.push(value);
    }
    if (element.target && element.rel !== "noopener noreferrer nofollow") found.push(element.outerHTML);
  }
  return found;
}"""


@pytest.mark.parametrize("text", HOSTILE)
def test_an_answer_never_becomes_script(visit: Serve, tmp_path: Path, text: str) -> None:
    with running(scripted(tmp_path, text)) as server:
        page = visit(server)
        page.ask("?")
        assert page.page.locator(".assistant .error").count() == 0
        assert page.page.locator(".assistant .body").inner_text().strip()
        assert page.page.evaluate(ALLOWED) == []
        page.press("Token probabilities")
        assert page.page.evaluate("document.querySelector('.tokens').textContent.length") >= len(text)
        for link in page.page.locator(".assistant .body a").all():
            link.dispatch_event("mouseover")
        assert page.page.title() == "llamac"
        base = f"http://127.0.0.1:{server.port}/"
        assert [url for _, url, _ in page.requests if not url.startswith(base)] == []
        known = (base, f"{base}page/", f"{base}v1/", f"{base}apply-template")
        assert [url for _, url, _ in page.requests if url != base and not url.startswith(known[1:])] == []


def test_neither_thoughts_nor_calls_nor_titles_become_script(visit: Serve, tmp_path: Path) -> None:
    image = "<img src=x onerror=alert(1)>"
    call = json.dumps({"name": image, "arguments": {image: image}})
    with running(scripted(tmp_path, f"<think>{image}</think>a\n<tool_call>\n{call}\n</tool_call>")) as server:
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        page = visit(server, {"tools": json.dumps([tool])})
        page.ask("?")
        page.page.click(".user", force=True)
        page.page.hover("#conversations li.open")
        page.press("Rename “?”")
        page.page.keyboard.type(image)
        page.page.keyboard.press("Enter")
        assert image in page.text("#conversations")
        assert image in page.page.locator(".thought").text_content()
        assert page.page.locator("#thread img, #conversations img").count() == 0


def test_what_users_write_is_text(server: Running, visit: Serve) -> None:
    page = visit(server, {"system": "<b>s</b>"})
    page.ask("<img src=x onerror=alert(1)>**a**")
    assert page.text(".user .body") == "<img src=x onerror=alert(1)>**a**"
    assert page.page.locator("#thread img").count() == 0


def test_the_browser_refuses_scripts_that_get_into_the_page(server: Running, visit: Serve) -> None:
    page = visit(server)
    attempts = [
        "document.createElement('script').text = 'document.title = 1'",
        "document.body.innerHTML = '<p>x'",
        "document.body.setAttribute('onclick', 'document.title = 1')",
        "trustedTypes.createPolicy('evil', {})",
    ]
    for attempt in attempts:
        caught = f"() => {{ try {{ {attempt}; }} catch (error) {{ return error.name; }} }}"
        assert page.page.evaluate(caught) == "TypeError", attempt
    fetched = "() => fetch('http://example.invalid/').then(() => 'sent', (error) => error.name)"
    assert page.page.evaluate(fetched) == "TypeError"
    assert page.page.title() == "llamac"
    assert len(page.problems) >= len(attempts)
    page.problems.clear()
