"""The web page in headless Chromium: conversations, settings, tools, tokens and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from browsers import ANSWER, Serve, Visit, scripted
from http_server import Running, running
from llamac.server.keys import Keys
from llamac.server.settings import Settings

SAYS = "document.querySelector('#status').textContent.startsWith('{}')"  # to a screen reader
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


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
    page.until(SAYS.format("The answer: "))  # the browser has kept it
    page.page.reload()
    page.page.wait_for_selector("html[data-ready]")
    assert page.page.locator(".message").count() == 0
    page.page.click("#conversations .title")
    assert page.text(".assistant .body") == "Some bold text and more of it."
    page.page.hover("#conversations li.open")
    page.press("Rename “?”")
    page.page.keyboard.type("A title")
    page.page.keyboard.press("Enter")
    page.page.hover("#conversations li.open")
    page.press("Delete “A title”")
    page.press("Delete")
    page.until(SAYS.format("Deleted"))
    page.page.reload()
    page.page.wait_for_selector("html[data-ready]")
    assert page.text("#conversations") == "No conversations yet"


def asked_whether_to_delete(visit: Serve, server: Running) -> Visit:
    """The page with a conversation that has an answer without end. It asks whether to delete the conversation."""
    page: Visit = visit(server, {"extra": '{"ignore_eos": true, "context_overflow": "shift", "max_tokens": 1000000}'})
    page.ask("Once upon a time", wait=False)
    page.until("document.querySelector('.assistant .body')?.innerText.length > 40")
    page.page.hover("#conversations li.open")
    page.press("Delete “Once upon a time”")
    return page


def test_a_conversation_that_is_deleted_while_it_is_answered_does_not_come_back(visit: Serve) -> None:
    with running("stories") as server:
        page = asked_whether_to_delete(visit, server)
        page.press("Delete")
        page.page.wait_for_selector("#send", state="visible")
        server.wait_until_idle()
        assert page.text("#conversations") == "No conversations yet"
        page.page.reload()
        page.page.wait_for_selector("html[data-ready]")
        assert page.text("#conversations") == "No conversations yet"
        page.forgive("status of 400")  # the model has no chat template


def test_an_answer_that_ends_leaves_the_question_of_the_list_open(visit: Serve) -> None:
    with running("stories") as server:
        page = asked_whether_to_delete(visit, server)
        page.press("Stop")
        page.page.wait_for_selector("#send", state="visible")
        page.press("Delete")
        page.until(SAYS.format("Deleted"))
        page.forgive("status of 400")  # the model has no chat template


def test_conversations_are_exported_and_imported(server: Running, visit: Serve, tmp_path: Path) -> None:
    page = visit(server)
    page.ask("?")
    with page.page.expect_download() as download:
        page.press("Export all")
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
    page.press("Answer again")
    page.wait()
    assert page.text(".assistant .versions") == "2 / 2"
    page.press("Previous version")
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
    page.press("Save")
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
        page.press("Continue this answer")
        page.wait()
        page.forgive("status of 400")  # the model has no chat template
        both = server.engine.generate("Once upon a time", max_tokens=16, temperature=0).text
        assert page.text(".assistant .body").strip() == both.strip()


def test_a_model_is_opened_for_its_first_message_and_then_known(visit: Serve) -> None:
    with running("stories") as server:
        page = visit(server, {"max_tokens": "4"})
        page.forgive("status of 400")  # the model has no chat template
        closed = {"data": [{"id": "stories", "loaded": False}]}
        page.page.route("**/v1/models", lambda route: route.fulfill(json=closed))
        page.requests.clear()
        page.page.reload()
        page.page.wait_for_selector("html[data-ready]")
        assert page.bodies("/apply-template") == []
        page.ask("Once upon a time")
        page.until("document.getElementById('hint').innerText.includes('continues your text')")
        page.forgive("status of 400")


# ---- settings


def test_settings_are_sent(server: Running, visit: Serve) -> None:
    page = visit(server)
    page.press("Settings")
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
    page.press("Token probabilities")
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
        page.press("Send the results")
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
    page.press("Token probabilities")
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
    asked = page.bodies("/tokenize")[-1]
    assert ([message["content"] for message in asked["messages"]], asked["answer"]) == (["?"], "Soq")
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
        page.press("Token probabilities")
        page.page.locator(".token").nth(answer.index("three")).hover()
        page.page.locator("#alternatives button").first.click()
        page.wait()
        assert page.page.locator(".thought").text_content() == "two"
        assert page.text(".assistant .body") == "qhree"
        assert page.page.locator(".assistant .fold summary").last.text_content() == "Call of add"
        page.page.get_by_label("What add returns").fill("5")
        page.press("Send the results")
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
        page.press("Token probabilities")
        choose(2)  # within a character
        assert "a part of a character" in page.text("#notice")
        assert page.page.locator(".assistant .versions").count() == 0
        for index, text in ((0, "qé😀bc"), (8, "qé😀bq")):  # the second continues what was continued
            choose(index)
            page.wait()
            assert page.text(".assistant .body") == text
            page.press("Token probabilities")


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
