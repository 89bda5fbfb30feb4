"""`/v1/completions` and `/v1/chat/completions`: whole and streamed answers are the engine's, in the API's form."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model
from http_server import ENDLESS, PATIENCE, Running, running
from waiting import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
STOP = 2  # a token
HI = [{"role": "user", "content": "Hi"}]


def script(folder: Path, text: str, template: str = TEMPLATE) -> Path:
    """A model that continues a prompt of n tokens with the text, from its n-th byte on, and then stops."""
    ids = [*byte_ids(text), STOP]
    made = script_checkpoint(ids, context=max(64, len(ids) + 8), stop_ids=[STOP])
    made.chat_template = template
    return write_model(folder / "script.bin", made, generation={"temperature": 0})


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = script(tmp_path_factory.mktemp("alphabet"), "abcdefghijklmnopqrstuvwxyz")
    with running(path) as served:
        yield served


@pytest.fixture(scope="module")
def stories() -> Iterator[Running]:
    with running("stories") as served:
        yield served


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def reasons_of(events: list[Any]) -> dict[int, str]:
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}


# ---- whole answers


def test_an_answer_is_the_engines_in_the_form_of_the_api(stories: Running) -> None:
    body = {"prompt": "Once upon", "max_tokens": 12, "seed": 3, "model": "stories"}
    found = stories.post(COMPLETIONS, body).json()
    alone = stories.engine.model.generate("Once upon", max_tokens=12, seed=3)
    choice = {"index": 0, "text": alone.text, "logprobs": None, "finish_reason": "length"}
    assert found["choices"] == [choice]
    assert (found["object"], found["model"], found["seed"]) == ("text_completion", "stories", 3)
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (alone.usage.prompt_tokens, 12)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert stories.post(COMPLETIONS, body).json()["system_fingerprint"] == found["system_fingerprint"]


def test_a_chat_is_answered(alphabet: Running) -> None:
    found = alphabet.post(CHAT, {"messages": HI, "max_tokens": 3}).json()
    assert found["object"] == "chat.completion"
    message = {"role": "assistant", "content": "cde", "refusal": None}
    assert found["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]


def test_prompts_in_a_list_are_answered_in_order(stories: Running) -> None:
    prompts = ["Once", "One day", "The"]
    found = stories.post(COMPLETIONS, {"prompt": prompts, "max_tokens": 4, "seed": 1, "n": 2}).json()
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    model = stories.engine.model
    alone = [model.generate(prompt, max_tokens=4, seed=1, n=2) for prompt in prompts]
    assert [choice["text"] for choice in found["choices"]] == [c.text for each in alone for c in each.choices]
    assert found["usage"]["completion_tokens"] == 24
    ids = [model.tokenize(prompt) for prompt in prompts]
    again = stories.post(COMPLETIONS, {"prompt": ids, "max_tokens": 4, "seed": 1, "n": 2}).json()
    assert again["choices"] == found["choices"]


def test_an_echo_has_the_prompt_and_its_log_probabilities(stories: Running) -> None:
    body = {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 2, "temperature": 0}
    [choice] = stories.post(COMPLETIONS, body).json()["choices"]
    model = stories.engine.model
    ids = model.tokenize("Once upon a time")
    alone = model.generate(ids, max_tokens=2, temperature=0, logprobs=1, prompt_logprobs=1)
    assert alone.prompt_logprobs is not None
    assert alone.logprobs is not None
    assert choice["text"] == "Once upon a time" + alone.text
    expected = [entry.logprob for entry in (*alone.prompt_logprobs[1:], *alone.logprobs) if entry]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected)
    assert len(choice["logprobs"]["tokens"]) == len(expected) == len(ids) - 1 + 2
    only = stories.post(COMPLETIONS, {**body, "prompt": ids, "max_tokens": 0}).json()
    [choice] = only["choices"]
    assert choice["text"] == "Once upon a time"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected[:-2])
    assert only["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("prompt", ["Once upon", " Once", "   Once"])
def test_the_tokens_of_an_echo_are_where_their_offsets_say(stories: Running, prompt: str) -> None:
    """Its tokenizer adds a space before a text, and the text does not have it."""
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0}
    [choice] = stories.post(COMPLETIONS, body).json()["choices"]
    logprobs = choice["logprobs"]
    places = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(choice["text"].startswith(token, offset) for offset, token in places)
    assert "".join(logprobs["tokens"]) == choice["text"]
    parts = [event["choices"][0]["logprobs"] for event in stories.events(COMPLETIONS, body)[:-1]]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts if part for value in part[name]] == logprobs[name]


def test_parameters_without_effect_are_named_in_a_header(stories: Running) -> None:
    body = {"prompt": "a", "max_tokens": 1, "store": True, "user": "me"}
    assert stories.post(COMPLETIONS, body).headers["x-llamac-no-effect"] == "store, user"
    assert "x-llamac-no-effect" not in stories.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).headers


def test_what_the_template_does_not_read_is_named_too(alphabet: Running, tmp_path: Path) -> None:
    variables = {"tone": "warm", "s": 1}
    body = {"messages": HI, "max_tokens": 1, "reasoning_effort": "low", "chat_template_kwargs": variables}
    named = alphabet.post(CHAT, body).headers["x-llamac-no-effect"]
    assert named == "reasoning_effort, chat_template_kwargs.tone, chat_template_kwargs.s"
    template = "{{ tone }}{% if enable_thinking %}x{% endif %}" + TEMPLATE
    with running(script(tmp_path, "abcdefghijklmnopqrstuvwxyz", template)) as served:
        answer = served.post(CHAT, body)
        assert answer.headers["x-llamac-no-effect"] == "chat_template_kwargs.s"
        off = served.post(CHAT, {**body, "reasoning_effort": "none"})
        tokens = [found.json()["usage"]["prompt_tokens"] for found in (answer, off)]
        assert tokens[0] == tokens[1] + 1


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, None, "model_not_found"),
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, 400, "temprature", "unknown_parameter"),
        (COMPLETIONS, {"prompt": "a", "n": 10**9}, 400, "n", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "best_of": 10**9}, 400, "best_of", "invalid_value"),
        (COMPLETIONS, {"prompt": [10**9]}, 400, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": [2**70]}, 400, "prompt", "invalid_value"),
        (COMPLETIONS, {"prompt": "a " * 3000}, 400, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"99999999": 1}}, 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_value"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "best_of": 2}, 400, "best_of", "invalid_value"),
        (CHAT, {"messages": HI}, 400, "messages", "invalid_value"),
        (CHAT, {"messages": HI, "modalities": ["audio"]}, 400, "modalities", "unsupported_parameter"),
    ],
)
def test_errors_have_the_status_and_the_parameter(
    stories: Running, path: str, body: Any, status: int, param: str | None, code: str
) -> None:
    response = stories.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error
    assert stories.post(path, {**body, "stream": True}).status_code == status


# ---- streams


def test_a_stream_has_the_text_the_end_and_the_usage(stories: Running) -> None:
    body = {"prompt": "One day", "max_tokens": 30, "seed": 5}
    whole = stories.post(COMPLETIONS, body).json()
    events = stories.events(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert text_of(events) == whole["choices"][0]["text"]
    assert reasons_of(events) == {0: "length"}
    *chunks, last = events[:-1]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert {**last["usage"], "prompt_tokens_details": 0} == {**whole["usage"], "prompt_tokens_details": 0}
    assert len({chunk["id"] for chunk in events[:-1]}) == 1
    assert "usage" not in stories.events(COMPLETIONS, body)[0]


def test_every_choice_is_streamed(stories: Running) -> None:
    body = {"prompt": ["Once", "One day"], "max_tokens": 9, "seed": 2, "n": 2, "logprobs": 1}
    whole = stories.post(COMPLETIONS, body).json()["choices"]
    events = stories.events(COMPLETIONS, body)
    assert [text_of(events, i) for i in range(4)] == [choice["text"] for choice in whole]
    assert reasons_of(events) == dict.fromkeys(range(4), "length")
    for i in range(4):
        parts = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["index"] == i and c["logprobs"]]
        joined = {name: [value for part in parts for value in part[name]] for name in whole[i]["logprobs"]}
        assert joined == whole[i]["logprobs"]


def test_a_streamed_echo_comes_first(stories: Running) -> None:
    for extra in ({}, {"logprobs": 1}, {"logprobs": 1, "n": 2}, {"max_tokens": 0}, {"max_tokens": 0, "logprobs": 0}):
        body = {"prompt": ["Once upon", "One"], "max_tokens": 4, "seed": 1, "echo": True, **extra}
        whole = stories.post(COMPLETIONS, body).json()["choices"]
        events = stories.events(COMPLETIONS, body)
        for i, choice in enumerate(whole):
            assert text_of(events, i) == choice["text"]
            parts = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["index"] == i and c["logprobs"]]
            for name in choice["logprobs"] or ():
                assert [value for part in parts for value in part[name]] == choice["logprobs"][name]


def test_a_streamed_message_begins_with_its_role(alphabet: Running) -> None:
    events = alphabet.events(CHAT, {"messages": HI, "max_tokens": 3, "logprobs": True})
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "cde"
    assert choices[-1]["delta"] == {}
    assert choices[-1]["finish_reason"] == "length"
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == ["c", "d", "e"]


def test_stop_strings_do_not_leak_into_a_stream(alphabet: Running) -> None:
    events = alphabet.events(COMPLETIONS, {"prompt": "x", "max_tokens": 20, "stop": ["fgX", "hij"]})
    assert text_of(events) == "cdefg"
    assert reasons_of(events) == {0: "stop"}


def test_characters_are_never_split_between_events(tmp_path: Path) -> None:
    text = "aé😀日本語z"
    with running(script(tmp_path, text)) as served:
        events = served.events(COMPLETIONS, {"prompt": [10], "max_tokens": len(text.encode())})
        assert text_of(events) == text
        assert all("\ufffd" not in choice["text"] for event in events[:-1] for choice in event["choices"])
        messages = served.events(CHAT, {"messages": HI, "max_tokens": len(text.encode()) - 2})
        deltas = [event["choices"][0]["delta"].get("content") or "" for event in messages[:-1]]
        assert "".join(deltas).endswith(text[2:])


def test_tool_calls_are_streamed_as_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    with running(script(tmp_path, "?" + call, SCRIPT_TEMPLATE)) as served:
        body = {"messages": [{"role": "user", "content": "?"}], "tools": [tool], "seed": 1}
        whole = served.post(CHAT, body).json()["choices"][0]
        assert whole["finish_reason"] == "tool_calls", whole
        [expected] = whole["message"]["tool_calls"]
        assert json.loads(expected["function"]["arguments"]) == {"a": 1, "b": "x"}
        batch = served.engine._batch
        step = batch.step

        def step_after_reading() -> None:  # the server reads each token before the next one
            wait_until(lambda: not any(request._pieces for request in batch.running))
            step()

        monkeypatch.setattr(batch, "step", step_after_reading)
        deltas = [event["choices"][0] for event in served.events(CHAT, body)[:-1]]
    pieces = [piece for choice in deltas for piece in choice["delta"].get("tool_calls", ())]
    assert (pieces[0]["id"], pieces[0]["type"], pieces[0]["function"]["name"]) == (expected["id"], "function", "add")
    assert {piece["index"] for piece in pieces} == {0}
    joined = "".join(piece["function"]["arguments"] for piece in pieces)
    assert joined == expected["function"]["arguments"]
    assert len(pieces) > 5
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_reasoning_is_apart(tmp_path: Path) -> None:
    answer = "<think>two</think>three"
    with running(script(tmp_path, "?" + answer)) as served:
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": len(answer)}
        message = served.post(CHAT, body).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("two", "three")
        deltas = [event["choices"][0]["delta"] for event in served.events(CHAT, body)[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "two"
    assert "".join(delta.get("content") or "" for delta in deltas) == "three"


def test_a_schema_is_followed(stories: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    body = {"prompt": "x", "response_format": form, "max_tokens": 60}
    events = stories.events(COMPLETIONS, body)
    assert set(json.loads(text_of(events))) == {"a"}
    assert reasons_of(events) == {0: "stop"}


# ---- many clients, and clients that go away


def test_many_clients_get_what_each_would_get_alone(stories: Running) -> None:
    bodies: list[dict[str, Any]] = [{"prompt": f"On {i}", "max_tokens": i % 7 + 2, "seed": i} for i in range(24)]

    def answer(body: dict[str, Any]) -> str:
        if body["seed"] % 2:
            return text_of(stories.events(COMPLETIONS, body))
        text: str = stories.post(COMPLETIONS, body).json()["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(answer, bodies))
    model = stories.engine.model
    alone = [model.generate(b["prompt"], max_tokens=b["max_tokens"], seed=b["seed"]).text for b in bodies]
    assert texts == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_sequence(stories: Running, stream: bool) -> None:
    data = json.dumps({"prompt": "x", "stream": stream, "n": 2, **ENDLESS}).encode()

    def gone() -> int:
        pattern = r'^llamac_requests_total\{path="/v1/completions",status="499"} (\d+)'
        found = re.search(pattern, stories.client.get("/metrics").text, re.M)
        return int(found[1]) if found else 0

    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", stories.port), timeout=PATIENCE)
    connection.sendall(head + data)
    if stream:
        assert connection.recv(100)
    wait_until(lambda: stories.engine.stats().running == 2)
    before = gone()
    connection.close()
    stories.wait_until_idle()
    wait_until(lambda: gone() == before + 1)


def test_clients_can_split_a_stream_at_every_kind_of_line_end(stories: Running) -> None:
    """Also those that JSON leaves as they are, at which `str.splitlines` and clients built on it divide a text."""
    ends = "\v \f \x1c \x1d \x1e \x85 \u2028 \u2029 \r\n"
    body = {"prompt": f"{ends} {ends}", "echo": True, "max_tokens": 1, "stream": True}
    with stories.client.stream("POST", COMPLETIONS, json=body) as response:
        text = response.read().decode()
    first, *_ = [line for line in text.splitlines() if line]
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == f"{ends} {ends}"


def test_streams_can_end_at_any_event(stories: Running) -> None:
    for count in range(6):
        body = {"prompt": "x", "stream": True, **ENDLESS}
        with stories.client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            for _ in range(count):
                next(lines)
    stories.wait_until_idle()
    assert stories.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_engine_that_stops_ends_streams_with_an_error() -> None:
    with running("stories") as served:
        found: list[Any] = []
        body = {"prompt": "x", **ENDLESS}
        reader = threading.Thread(target=lambda: found.extend(served.events(COMPLETIONS, body)))
        reader.start()
        wait_until(lambda: served.engine.stats().running)

        def fail() -> None:
            raise RuntimeError("broken")

        served.engine._batch.step = fail
        reader.join(PATIENCE)
        assert "error" in found[-1], found[-1]
        assert found[-1]["error"]["type"] == "server_error"
        assert served.client.get("/health").status_code == 503
        assert served.post(COMPLETIONS, {"prompt": "x"}).status_code == 500
