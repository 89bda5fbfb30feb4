"""What a server answers whatever the endpoint: keys, limits, errors, ids, metrics and its state."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from recurrent_models import states_alone

from builders import write_model
from http_server import ENDLESS, PATIENCE, Running, running
from llamac import Engine, Request
from llamac.errors import ArgumentError
from llamac.guided import vocabulary
from llamac.server.keys import Keys, read_keys
from llamac.server.logs import JsonLines, Lines
from llamac.server.metrics import Counter, Histogram
from llamac.server.serving import listen
from llamac.server.settings import Settings
from waiting import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("stories", Settings(max_body_bytes=4096, body_seconds=0.2), names=("tales",)) as served:
        yield served


def error_of(response: httpx.Response) -> tuple[int, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return response.status_code, body["error"]["code"]


# ---- state


def test_a_server_is_healthy_and_ready(server: Running) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert server.client.head("/health").content == b""


def test_a_server_is_not_ready_before_the_model_has_computed(server: Running) -> None:
    server.service.is_warm = False
    try:
        response = server.client.get("/ready")
        assert error_of(response) == (503, "loading")
        assert response.headers["retry-after"] == "1"
        assert server.client.get("/health").status_code == 200
    finally:
        server.service.is_warm = True


def test_a_ready_server_has_read_the_vocabulary_for_guides(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance stops the whole process meanwhile, so no request may do it."""
    pytest.importorskip("llguidance")

    def build(*arguments: object) -> None:
        raise AssertionError("a request reads the vocabulary")

    monkeypatch.setattr(vocabulary.Vocabulary, "__init__", build)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7]}}}
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 9, "response_format": form})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "7")


def test_models_are_listed_under_all_their_names(server: Running) -> None:
    body = server.client.get("/v1/models").json()
    assert [(model["id"], model["object"]) for model in body["data"]] == [("tales", "model"), ("stories", "model")]
    assert body["data"][0]["max_model_len"] == server.engine.context
    assert server.client.get("/v1/models/stories").json()["id"] == "stories"
    assert error_of(server.client.get("/v1/models/other/name")) == (404, "model_not_found")


def test_models_are_listed_as_in_anthropics_api_in_pages(server: Running) -> None:
    def page(**query: str | int) -> tuple[list[str], bool, object, object]:
        body = server.client.get("/v1/models", params=query).json()
        return [model["id"] for model in body["data"]], body["has_more"], body["first_id"], body["last_id"]

    [model] = server.client.get("/v1/models", params={"limit": 1}).json()["data"]
    assert (model["type"], model["display_name"]) == ("model", "tales")
    assert datetime.fromisoformat(model["created_at"].replace("Z", "+00:00")).timestamp() == model["created"]
    assert page() == (["tales", "stories"], False, "tales", "stories")
    assert page(limit=1) == (["tales"], True, "tales", "tales")
    assert page(limit=1, after_id="tales") == (["stories"], False, "stories", "stories")
    assert page(limit=5, before_id="stories") == (["tales"], False, "tales", "tales")
    assert page(after_id="stories") == ([], False, None, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        *[(f"limit={text}", "limit") for text in ("0", "1001", "ten", "", "٣", "9" * 5000, "000000001" + "0" * 4400)],
        *[(f"limit={text}", "limit") for text in ("0000000019999", "0000000001")],
        *[("after_id=other", "after_id"), ("before_id=", "before_id")],
    ],
)
def test_a_wrong_page_of_models_is_refused(server: Running, query: str, param: str) -> None:
    response = server.client.get(f"/v1/models?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_metrics_count_requests_and_tokens(server: Running) -> None:
    def numbers() -> dict[str, float]:
        response = server.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    before = numbers()
    body = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 5, "seed": 1}).json()
    wait_until(lambda: numbers()["llamac_requests_running"] == 0)  # after the step that ended it
    after = numbers()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["llamac_prompt_tokens_total"] == body["usage"]["prompt_tokens"]
    assert grown["llamac_generated_tokens_total"] == 5
    assert grown['llamac_requests_total{path="/v1/completions",status="200"}'] == 1
    assert grown["llamac_first_token_seconds_count"] == grown["llamac_token_seconds_count"] == 1


def test_requests_of_clients_that_leave_are_in_all_totals() -> None:
    with running("stories") as server:
        server.post("/v1/completions", {"prompt": "Once", "max_tokens": 5, "n": 3, "best_of": 4})
        server.post("/v1/embeddings", {"input": "Once"})
        body = {"prompt": "Once", "stream": True, "n": 2, **ENDLESS}
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            for _ in range(20):
                next(lines)
        wait_until(lambda: 'status="499"' in server.client.get("/metrics").text)
        text = server.client.get("/metrics").text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for kind in ("prompt", "generated"):
        assert found[f"llamac_{kind}_tokens_total"] == found[f'llamac_model_{kind}_tokens_total{{model="stories"}}']
    assert found['llamac_generations_total{reason="cancelled"}'] == "2"


def test_a_model_with_states_alone_has_metrics(tmp_path: Path) -> None:
    """All of its layers are recurrent, so its pages of keys and values have no bytes."""
    with running(write_model(tmp_path / "m.bin", states_alone())) as server:
        assert server.post("/v1/completions", {"prompt": "he", "max_tokens": 2, "seed": 1}).status_code == 200
        found = server.client.get("/metrics").text
    assert "\nllamac_kv_pages 0\n" in found


def test_health_answers_while_the_engine_computes(server: Running) -> None:
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **ENDLESS}) as stream:
        lines = stream.iter_lines()  # while it is referenced, the connection is open
        next(lines)
        for _ in range(10):
            assert httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=PATIENCE).status_code == 200
        assert server.engine.stats().running == 1
    server.wait_until_idle()


# ---- text and tokens


def test_tokens_and_text_are_converted(server: Running) -> None:
    model = server.engine.model
    found = server.post("/tokenize", {"prompt": "Once upon", "return_token_strs": True}).json()
    assert found["tokens"] == model.tokenize("Once upon")
    assert (found["count"], len(found["token_strs"])) == (len(found["tokens"]), len(found["tokens"]))
    plain = server.post("/tokenize", {"prompt": "Once upon", "add_special_tokens": False}).json()["tokens"]
    assert plain == model.tokenize("Once upon", add_special=False)
    assert server.post("/detokenize", {"tokens": plain}).json() == {"prompt": "Once upon"}


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/tokenize", {}, "missing_required_parameter"),
        ("/tokenize", {"prompt": 3}, "invalid_type"),
        ("/tokenize", {"prompt": "a", "parse_special": 1}, "invalid_type"),
        ("/tokenize", {"prompt": "a", "x": 1}, "unknown_parameter"),
        ("/detokenize", {"tokens": "a"}, "invalid_type"),
        ("/detokenize", {"tokens": ["a"]}, "invalid_type"),
        ("/detokenize", {"tokens": [True]}, "invalid_type"),
        ("/detokenize", {"tokens": [10**9]}, "invalid_value"),
        ("/detokenize", {"tokens": [10**30]}, "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value"),
        ("/apply-template", {"messages": [{"role": "user", "content": "a"}]}, "invalid_value"),
        ("/apply-template", {}, "missing_required_parameter"),
    ],
)
def test_wrong_conversions_are_refused(server: Running, path: str, body: Any, code: str) -> None:
    assert error_of(server.post(path, body)) == (400, code)


# ---- bodies


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"null", b'{"prompt": "a"} x', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"a": NaN}'),
        *(b'{"a": 1, "a": 2}', b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"prompt": ' + b"9" * 3000 + b"}"),
    ],
)
def test_bodies_that_are_not_json_objects_are_refused(server: Running, data: bytes) -> None:
    response = server.client.post("/v1/completions", content=data)
    assert response.status_code == 400
    assert error_of(response)[1] in ("invalid_json", "invalid_type")


def test_half_characters_are_refused(server: Running) -> None:
    response = server.client.post("/v1/completions", content=b'{"prompt": "a\\ud800"}')
    assert response.status_code == 400
    error = response.json()["error"]
    assert ("lone surrogate" in error["message"], error["code"]) == (True, "invalid_json")
    whole = server.client.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00", "max_tokens": 1}')
    assert whole.status_code == 200


def test_large_bodies_are_refused(server: Running) -> None:
    body = b'{"prompt": "' + b"a" * 5000 + b'"}'
    assert error_of(server.client.post("/v1/completions", content=body)) == (413, "request_too_large")
    chunks = server.client.post("/v1/completions", content=(bytes([part]) * 1000 for part in body[:8]))
    assert error_of(chunks) == (413, "request_too_large")


def test_a_body_must_arrive_in_time(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


# ---- errors and ids


def test_unknown_paths_and_methods_have_errors_in_the_same_form(server: Running) -> None:
    assert error_of(server.client.get("/v1/nothing")) == (404, "not_found")
    wrong = server.client.get("/v1/completions")
    assert error_of(wrong) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]


def test_requests_keep_their_ids(server: Running) -> None:
    assert server.client.get("/health", headers={"X-Request-ID": "abc-1"}).headers["x-request-id"] == "abc-1"
    new = server.client.get("/health", headers={"X-Request-ID": "a b"}).headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-f]{24}", new)


def test_an_unexpected_error_is_logged_and_not_shown(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(type(server.service.metrics), "text", fail)
    response = server.client.get("/metrics")
    assert error_of(response) == (500, "internal_error")
    assert "a secret" not in response.text
    assert response.headers["x-request-id"] in response.text
    assert "a secret" in caplog.text


# ---- who may call


def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_head() -> None:
    """asyncio turns Nagle's algorithm off only for sockets that name their protocol."""

    async def accepted_without_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listen("127.0.0.1", 0) as opened:
            async with await asyncio.start_server(accept, sock=opened):
                _, writer = await asyncio.open_connection(*opened.getsockname())
                value = await asyncio.wait_for(found, PATIENCE)
                writer.close()
        return value

    assert asyncio.run(accepted_without_delay())


def test_without_a_key_only_health_is_open() -> None:
    keys = Keys(["first", "second"])
    with running("stories", Settings(keys=keys)) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first"}, {"x-api-key": ""}):
            response = served.client.get("/v1/models", headers=headers)
            assert error_of(response) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(served.client.get("/metrics")) == (401, "invalid_api_key")
        for headers in ({"Authorization": "Bearer second"}, {"x-api-key": "first"}):
            assert served.client.get("/v1/models", headers=headers).status_code == 200
        assert served.client.get("/health").status_code == served.client.get("/ready").status_code == 200


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \ntwo\n")
    keys = read_keys(file, {"LLAMAC_API_KEY": "three"})
    known = [keys.find(key) is not None for key in ("one", "two", "three", "# ours", "", "four")]
    assert known == [True] * 3 + [False] * 3
    assert "one" not in repr(keys)
    assert len(read_keys(None, {})) == 0
    file.write_text("\n")
    with pytest.raises(ArgumentError, match="has no API keys"):
        read_keys(file, {})
    file.write_text("two words\n")
    with pytest.raises(ArgumentError, match="line 1: after the key, expected NAME=VALUE"):
        read_keys(file, {})


def test_web_pages_of_other_origins_may_not_call() -> None:
    with running(
        "stories", Settings(hosts=("localhost", "127.0.0.1", "::1"), origins=("https://a.example",))
    ) as served:

        def call(**headers: str) -> httpx.Response:
            return served.client.get("/v1/models", headers=headers)  # type: ignore[no-any-return]

        assert error_of(call(origin="https://evil.example")) == (403, "foreign_origin")
        assert error_of(call(host="evil.example")) == (403, "unknown_host")
        assert call(origin=f"http://127.0.0.1:{served.port}").status_code == 200
        for origin in ("http://127.0.0.1:9", "http://127.0.0.1", f"https://localhost:{served.port}", "null"):
            assert error_of(call(origin=origin)) == (403, "foreign_origin")
        # proxies may leave out the port, or write the default one
        for origin, host in (
            ("https://localhost", "localhost"),
            ("https://localhost", "localhost:443"),
            ("http://[::1]:80", "[::1]"),
            ("http://[::1]:81", "[::1]:81"),
        ):
            assert call(origin=origin, host=host).status_code == 200
        allowed = call(origin="https://a.example")
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        asked = {"origin": "https://a.example", "access-control-request-headers": "authorization"}
        preflight = served.client.options("/v1/models", headers=asked)
        assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (204, "authorization")
        assert not {"content-length", "content-type", "transfer-encoding"} & preflight.headers.keys()
        assert "access-control-allow-origin" not in served.client.get("/health").headers


# ---- load


def test_a_full_queue_is_an_error_that_says_when_to_come_again() -> None:
    with running("stories", max_sequences=1, max_queue=1) as served:
        answers: list[int] = []
        body = {"prompt": "x", "stream": True, **ENDLESS}
        with served.client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # while it is referenced, the connection is open
            next(lines)
            waiting = threading.Thread(
                target=lambda: answers.append(served.post("/v1/completions", {"prompt": "y"}).status_code)
            )
            waiting.start()
            wait_until(lambda: served.engine.stats().waiting)
            refused = served.post("/v1/completions", {"prompt": "z"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["type"] == "rate_limit_error"
        waiting.join(PATIENCE)
        assert answers == [200]


@pytest.mark.parametrize("gap", [0.0, 0.05])
def test_an_answer_that_takes_too_long_is_an_error(gap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the time of one candidate is over a little earlier than that of the next."""
    make = Request.__init__

    def delayed(self: Request, engine: Engine, output: Any, level: int, deadline: float | None, order: int) -> None:
        make(self, engine, output, level, deadline and deadline + gap * order, order)

    monkeypatch.setattr(Request, "__init__", delayed)
    with running("stories", Settings(request_seconds=0.2)) as served:
        assert error_of(served.post("/v1/completions", {"prompt": "x", **ENDLESS})) == (408, "timeout")
        for body in ({}, {"n": 2}):
            *_, last = served.events("/v1/completions", {"prompt": "x", **ENDLESS, **body})
            assert last["error"]["code"] == "timeout"
        served.wait_until_idle()
        assert 'llamac_generations_total{reason="deadline"} 4\n' in served.client.get("/metrics").text


# ---- texts


def test_numbers_have_the_format_of_prometheus() -> None:
    counter = Counter("c_total", "Text.", "path")
    counter.add(2, 'a"b\\\n')
    assert list(counter.lines())[2] == 'c_total{path="a\\"b\\\\\\n"} 2'
    histogram = Histogram("h", "Text.", (0.5, 1.0))
    for seconds in (0.5, 0.7, 3.0):
        histogram.observe(seconds)
    assert list(histogram.lines())[2:] == [
        *('h_bucket{le="0.5"} 1', 'h_bucket{le="1.0"} 2', 'h_bucket{le="+Inf"} 3'),
        *("h_sum 4.200000", "h_count 3"),
    ]


def test_log_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("llamac", logging.INFO, "", 1, "request", (), None)
    record.fields = {"path": "/a\nerror b", "status": 200}
    line = Lines().format(record)
    assert "\n" not in line
    assert line.endswith('info request path="/a\\\\nerror b" status=200')
    try:
        raise ValueError("a\nb")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = JsonLines().format(record)
    assert "\n" not in text
    entry = json.loads(text)
    assert entry["traceback"].endswith("ValueError: a\nb")
    assert (entry["path"], entry["status"], entry["level"]) == ("/a\nerror b", 200, "info")
