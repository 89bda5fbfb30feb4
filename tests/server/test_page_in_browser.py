"""The web page in headless Chromium, against a server with models that write what the tests say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from browsers import Visit, chromium

from builders import byte_ids, script_checkpoint, write_model
from http_server import Running, running
from llamac.server.settings import Keys, Settings

STOP = 2  # a token
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> {{ tools }} #}"
ANSWER = "Some **bold** text and more of it."
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PHONE = {"width": 390, "height": 844}
Serve = Callable[..., Any]


def scripted(folder: Path, text: str, template: str = TEMPLATE) -> Path:
    """A model that answers "?" with a text. The second likeliest token is always "q"."""
    script = [*byte_ids("?" + text), STOP]
    made = script_checkpoint(script, context=max(128, len(script) + 64), stop_ids=[STOP], second=byte_ids("q")[0])
    made.chat_template = template
    return write_model(folder / "script.bin", made, generation={"temperature": 0})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(scripted(tmp_path_factory.mktemp("page"), ANSWER), names=("first", "second")) as served:
        yield served


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a server; at the end nothing may have gone wrong in it."""
    contexts, visits = [], []

    def opened(server: Running, settings: dict[str, Any] | None = None, **options: Any) -> Visit:
        context = browser.new_context(**options)
        contexts.append(context)
        if settings:
            kept = json.dumps(json.dumps(settings))
            context.add_init_script(
                f"localStorage.getItem('llamac.settings') ?? localStorage.setItem('llamac.settings', {kept})"
            )
        made = Visit(context.new_page())
        visits.append(made)
        made.open(f"http://127.0.0.1:{server.port}/")
        return made

    yield opened
    problems = [problem for each in visits for problem in each.problems]
    for context in contexts:
        context.close()
    assert problems == []


def press(visit: Visit, name: str) -> None:
    """Press the last button with a name."""
    visit.page.get_by_role("button", name=name, exact=True).last.click()


# ---- conversations


def test_markdown_becomes_elements(visit: Serve, tmp_path: Path) -> None:
    text = (
        "# T\n\n3. a\n4. b\n   - [x] c\n\n|l|r|\n|:--|--:|\n|1|2|\n\n```py\nx = 1 < 2\n```\n\n"
        "> q\n\n[l](https://example.invalid/a?b=1&c) ~~d~~ a\nb"
    )
    with running(scripted(tmp_path, text)) as server:
        page = visit(server)
        page.ask("?")
        body = page.page.locator(".assistant .body")
        assert body.locator("h1").inner_text() == "T"
        assert body.locator("ol").get_attribute("start") == "3"
        assert body.locator("ol > li > ul > li").inner_text() == "☑ c"
        assert body.locator("td").nth(1).get_attribute("align") == "right"
        assert body.locator("td").nth(1).evaluate("each => getComputedStyle(each).textAlign") == "right"
        assert body.locator(".block-bar span").inner_text() == "py"
        assert body.locator(".block code").text_content() == "x = 1 < 2"
        link = body.locator("a")
        assert link.get_attribute("href") == "https://example.invalid/a?b=1&c"
        assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noopener noreferrer nofollow")
        assert (body.locator("del").inner_text(), body.locator("blockquote").inner_text()) == ("d", "q")
        assert body.locator("p br").count() == 1


def test_an_answer_is_shown_as_markdown_with_its_figures(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    assert page.text(".user .body") == "?"
    assert page.page.inner_html(".assistant .body").strip() == "<p>Some <strong>bold</strong> text and more of it.</p>"
    figures = page.text(".figures")
    assert figures.startswith(f"{len(ANSWER)} tokens · ")
    assert " · first after 0." in figures
    assert figures.endswith("2 prompt tokens") or "of 2 prompt tokens from the cache" in figures
    assert page.page.locator("#status").inner_text() == f"The answer: {ANSWER}"


def test_conversations_outlive_the_page(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    page.until("document.querySelector('#conversations .title')?.title === '?'")
    page.page.reload()
    page.page.wait_for_selector("html[data-ready]")
    assert page.page.locator(".message").count() == 0
    page.page.click("#conversations .title")
    assert page.text(".assistant .body") == "Some bold text and more of it."
    page.page.hover("#conversations li.open")
    press(page, "Rename “?”")
    page.page.keyboard.type("A title")
    page.page.keyboard.press("Enter")
    page.page.hover("#conversations li.open")
    press(page, "Delete “A title”")
    press(page, "Delete")
    page.page.reload()
    page.page.wait_for_selector("html[data-ready]")
    assert page.text("#conversations") == "No conversations yet"


def test_conversations_are_exported_and_imported(server: Running, visit: Serve, tmp_path: Path) -> None:
    page = visit(server)
    page.ask("?")
    with page.page.expect_download() as download:
        press(page, "Export all")
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    other = visit(server)
    other.page.set_input_files("#file", file)
    other.page.click("#conversations .title")
    assert other.text(".assistant .body") == "Some bold text and more of it."
    file.write_text('{"conversations": [{"id": "a", "settings": {}, "nodes": {"root": {"id": "root"}}}]}')
    other.page.set_input_files("#file", file)
    other.page.wait_for_selector("#notice:not([hidden])")
    assert "has no conversations" in other.text("#notice")


def test_messages_are_edited_and_answered_again(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    press(page, "Answer again")
    page.wait()
    assert page.text(".assistant .versions") == "2 / 2"
    press(page, "Previous version")
    assert page.text(".assistant .versions") == "1 / 2"
    page.page.hover(".user")
    page.page.locator(".user").get_by_role("button", name="Edit").click()
    page.page.fill(".editor textarea", "!")
    page.page.keyboard.press("Control+Enter")
    page.wait()
    assert page.text(".user .body") == "!"
    assert page.text(".user .versions") == "2 / 2"
    assert page.page.locator(".assistant .versions").count() == 0
    page.page.hover(".user")
    page.page.locator(".user").get_by_role("button", name="Previous version").click()
    assert page.text(".user .body") == "?"
    assert page.text(".assistant .versions") == "1 / 2"


def test_an_edited_answer_is_what_the_model_reads(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    page.page.locator(".assistant").get_by_role("button", name="Edit").click()
    page.page.fill(".editor textarea", "Other words")
    press(page, "Save")
    assert page.text(".assistant .body") == "Other words"
    page.ask("?")
    sent = page.bodies("/v1/chat/completions")[-1]["messages"]
    assert [message["content"] for message in sent] == ["?", "Other words", "?"]


def test_a_branch_is_a_conversation_of_its_own(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    page.ask("?")
    page.page.locator(".assistant").first.hover()
    page.page.locator(".assistant").first.get_by_role("button", name="Branch into a new conversation").click()
    assert page.page.locator(".message").count() == 2
    assert page.page.locator("#conversations .title").count() == 2


def test_an_answer_is_stopped_with_escape(visit: Serve) -> None:
    with running("stories") as server:
        page = visit(server, {"extra": '{"ignore_eos": true, "context_overflow": "shift", "max_tokens": 1000000}'})
        page.ask("Once upon a time", wait=False)
        page.until("document.querySelector('.assistant .body')?.innerText.length > 40")
        page.page.keyboard.press("Escape")
        page.wait()
        server.wait_until_idle()
        assert "Stopped." in page.text(".assistant .extras")
        page.forgive("status of 400")  # the model has no chat template


def test_a_model_without_a_template_continues_texts(visit: Serve) -> None:
    with running("stories") as server:
        page = visit(server, {"max_tokens": "8", "temperature": "0"})
        page.until("document.getElementById('hint').innerText.includes('continues your text')")
        page.ask("Once upon a time")
        first = server.engine.generate("Once upon a time", max_tokens=8, temperature=0).text
        assert page.page.locator(".assistant .body").inner_text().strip() == first.strip()
        press(page, "Continue this answer")
        page.wait()
        page.forgive("status of 400")  # the model has no chat template
        both = server.engine.generate("Once upon a time", max_tokens=16, temperature=0).text
        assert page.text(".assistant .body").strip() == both.strip()


# ---- settings


def test_settings_are_sent(server: Running, visit: Serve) -> None:
    page = visit(server)
    press(page, "Settings")
    for label, value in {"System prompt": "S", "Temperature": "0.5", "Seed": "7", "Stop texts": "x1\nx2"}.items():
        page.page.get_by_label(label, exact=True).fill(value)
    page.page.get_by_label("Further parameters").fill('{"user": "me"}')
    page.page.get_by_label("Effort").select_option("low")
    page.page.keyboard.press("Escape")
    page.page.get_by_label("Model", exact=True).select_option("second")
    page.ask("?")
    [sent] = page.bodies("/v1/chat/completions")
    assert sent["messages"][0] == {"role": "system", "content": "S"}
    wanted = {"model": "second", "temperature": 0.5, "seed": 7, "stop": ["x1", "x2"], "user": "me"}
    assert {name: sent[name] for name in wanted} == wanted
    assert (sent["reasoning_effort"], sent["logprobs"], sent["top_logprobs"]) == ("low", True, 5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra": "{"}, "Further parameters: this is not JSON"),
        ({"extra": "[]"}, "Further parameters: expected a JSON object"),
        ({"tools": "{}"}, "Tools: expected a JSON array"),
        ({"format": "json_schema"}, "JSON schema: a schema is missing"),
        ({"temperature": "-1"}, "temperature"),
        ({"extra": '{"no_such": 1}'}, "unknown parameter 'no_such'"),
    ],
)
def test_wrong_settings_are_explained(server: Running, visit: Serve, settings: Any, message: str) -> None:
    page = visit(server, settings)
    page.ask("?")
    assert message in page.text(".assistant .error")
    page.forgive("status of 400")


def test_an_answer_follows_a_schema(server: Running, visit: Serve) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    page = visit(server, {"format": "json_schema", "schema": json.dumps(schema)})
    page.ask("?")
    assert json.loads(page.text(".assistant .body")) == {"a": 1}
    press(page, "Token probabilities")
    page.page.locator(".token").nth(1).hover()
    page.page.wait_for_selector("#alternatives:not([hidden])")
    assert "The form of this answer is fixed" in page.text("#alternatives")
    assert page.page.locator("#alternatives button").count() == 0


# ---- reasoning, calls and tokens


def test_reasoning_and_calls_are_folded_and_results_are_sent(visit: Serve, tmp_path: Path) -> None:
    answer = '<think>two</think>three\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    with running(scripted(tmp_path, answer)) as server:
        page = visit(server, {"tools": json.dumps([TOOL])})
        page.ask("?")
        folds = page.page.locator(".assistant .fold")
        assert [fold.evaluate("each => each.open") for fold in folds.all()] == [False, False]
        thoughts, made = folds.all()
        assert str(thoughts.locator("summary").text_content()).startswith("Thought")
        assert made.locator("summary").text_content() == "Call of add"
        thoughts.locator("summary").click()
        made.locator("summary").click()
        assert thoughts.locator(".thought").inner_text() == "two"
        assert json.loads(made.locator("pre").inner_text()) == {"a": 1}
        assert page.text(".assistant .body") == "three"
        page.page.get_by_label("What add returns").fill("5")
        press(page, "Send the results")
        page.wait()
        _, assistant, tool = page.bodies("/v1/chat/completions")[-1]["messages"]
        assert assistant["reasoning_content"] == "two"
        [sent] = assistant["tool_calls"]
        assert (sent["function"]["name"], json.loads(sent["function"]["arguments"])) == ("add", {"a": 1})
        assert tool == {"role": "tool", "content": "5", "tool_call_id": sent["id"], "name": "add"}
        assert "Result of add" in page.text(".tool")


def test_another_token_is_chosen_and_the_answer_continues_from_it(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    press(page, "Token probabilities")
    token = page.page.locator(".token").nth(2)
    assert token.inner_text() == "m"
    token.hover()
    page.page.wait_for_selector("#alternatives:not([hidden])")
    assert page.page.locator("#alternatives .own").inner_text().startswith("m")
    assert page.page.locator("#alternatives button").first.inner_text().startswith("q")
    page.page.locator("#alternatives button").first.click()
    page.wait()
    prompt = page.bodies("/v1/completions")[-1]["prompt"]
    assert prompt == server.engine.model.tokenize("?Soq", add_special=False)
    assert page.text(".assistant .versions") == "2 / 2"
    assert "".join(token["text"] for token in page.page.evaluate(KEPT)) == ANSWER.replace("m", "q", 1)
    assert page.page.locator(".token").count() == 0
    assert page.page.locator(".assistant .body").inner_text() == "Soqe bold text and more of it."


# The tokens of the last message that the browser keeps.
KEPT = """() => new Promise((resolve) => {
  const opening = indexedDB.open("llamac");
  opening.onsuccess = () => {
    const reading = opening.result.transaction("conversations").objectStore("conversations").getAll();
    reading.onsuccess = () => {
      const nodes = Object.values(reading.result[0].nodes);
      resolve(nodes[nodes.length - 1].tokens);
    };
  };
})"""


def test_a_continued_answer_is_read_as_a_message_too(visit: Serve, tmp_path: Path) -> None:
    answer = '<think>two</think>three\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    with running(scripted(tmp_path, answer)) as server:
        page = visit(server, {"tools": json.dumps([TOOL])})
        page.ask("?")
        press(page, "Token probabilities")
        page.page.locator(".token").nth(answer.index("three")).hover()
        page.page.locator("#alternatives button").first.click()
        page.wait()
        assert page.page.locator(".thought").text_content() == "two"
        assert page.text(".assistant .body") == "qhree"
        assert page.page.locator(".assistant .fold summary").last.text_content() == "Call of add"
        page.page.get_by_label("What add returns").fill("5")
        press(page, "Send the results")
        page.wait()
        _, assistant, tool = page.bodies("/v1/chat/completions")[-1]["messages"]
        assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
        assert tool["tool_call_id"] == assistant["tool_calls"][0]["id"]


def test_characters_of_several_tokens_stay_whole(visit: Serve, tmp_path: Path) -> None:
    with running(scripted(tmp_path, "aé😀bc")) as server:  # "é" has two tokens, the next character four
        page = visit(server)

        def choose(index: int) -> None:
            page.page.locator(".token").nth(index).hover()
            page.page.locator("#alternatives button").first.click()

        page.ask("?")
        press(page, "Token probabilities")
        choose(2)  # within a character
        assert "a part of a character" in page.text("#notice")
        assert page.page.locator(".assistant .versions").count() == 0
        for index, text in ((0, "qé😀bc"), (8, "qé😀bq")):  # the second continues what was continued
            choose(index)
            page.wait()
            assert page.text(".assistant .body") == text
            press(page, "Token probabilities")


def test_what_has_no_effect_is_said(server: Running, visit: Serve) -> None:
    page = visit(server, {"effort": "low"})
    page.ask("?")
    assert "Without effect on this answer: reasoning_effort." in page.text(".assistant .extras")


# ---- the key


def test_the_key_is_asked_for_and_kept_in_the_tab(visit: Serve, tmp_path: Path) -> None:
    with running(scripted(tmp_path, ANSWER), Settings(keys=Keys(["secret"]))) as server:
        page = visit(server)
        page.page.fill("#key-input", "wrong")
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector("#key-error:not([hidden])")
        page.page.fill("#key-input", "secret")
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector("html[data-ready]")
        page.ask("?")
        assert page.text(".assistant .body") == "Some bold text and more of it."
        assert page.page.evaluate("sessionStorage.getItem('llamac.key')") == "secret"
        assert "secret" not in page.page.evaluate("JSON.stringify(localStorage)")
        page.forgive("status of 401")


# ---- what a model writes is text

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
        press(page, "Token probabilities")
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
        press(page, "Rename “?”")
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


# ---- looks, keys and screen readers


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_window(visit: Serve, tmp_path: Path, width: int) -> None:
    wide = f"{'x' * 300}\n\n{FENCE}\n{'y' * 300}\n{FENCE}\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'zzzzzz|' * 30}"
    with running(scripted(tmp_path, wide)) as server:
        page = visit(server, viewport={"width": width, "height": 700})
        page.ask("?")
        press(page, "Settings")
        size = page.page.evaluate(
            "[...document.querySelectorAll('body, #stage, #main, #thread, dialog')]"
            ".map((each) => each.scrollWidth - each.clientWidth)"
        )
        assert size == [0] * len(size)


def test_on_a_phone_the_list_is_a_drawer(server: Running, visit: Serve) -> None:
    page = visit(server, viewport=PHONE)
    assert not page.page.locator("#sidebar").is_visible()
    press(page, "Show the list of conversations")
    page.until("document.activeElement.id === 'close-sidebar'")
    assert page.page.evaluate("document.getElementById('stage').inert")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector("#sidebar", state="hidden")
    assert page.page.evaluate("document.activeElement.id") == "open-sidebar"


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(server: Running, visit: Serve, scheme: str) -> None:
    page = visit(server, color_scheme=scheme)
    page.ask("?")
    press(page, "Token probabilities")
    page.page.locator(".token").nth(3).hover()
    page.page.wait_for_selector("#alternatives:not([hidden])")
    count, found = page.page.evaluate(CONTRAST)
    assert count > len(ANSWER)
    assert found == {}
    press(page, "Settings")
    assert page.page.evaluate(CONTRAST)[1] == {}


def test_the_look_follows_the_system_or_the_user(server: Running, visit: Serve) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    page = visit(server, color_scheme="dark")
    dark = page.page.evaluate(ground)
    press(page, "Look: as the system")
    light = page.page.evaluate(ground)
    assert dark != light
    page.page.reload()
    assert page.page.evaluate(ground) == light
    press(page, "Look: light")
    assert page.page.evaluate(ground) == dark
    press(page, "Look: dark")
    page.page.emulate_media(color_scheme="light")
    assert page.page.evaluate(ground) == light


def test_everything_that_is_operated_has_a_name(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.ask("?")
    press(page, "Answer again")
    page.wait()
    press(page, "Token probabilities")
    for opened in (None, "Settings"):
        if opened:
            press(page, opened)
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
