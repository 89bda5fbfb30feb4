"""API keys: their file, their limits, and that nothing shows them."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

import httpx

from http_server import ENDLESS, PATIENCE, Running, running, serving
from llamac import models as built_in
from llamac.errors import ArgumentError, CancelledError
from llamac.server.exchange import HttpError
from llamac.server.keys import MAX_FILE_BYTES, Allowance, Key, Keys, Limits, read_keys
from llamac.server.models import Models
from llamac.server.service import Service
from llamac.server.settings import Settings
from waiting import wait_until

ASK = {"prompt": "Once", "max_tokens": 4, "temperature": 0}


def keys(**limits: Any) -> Settings:
    """Settings with the key "limited", and "free" without limits."""
    return Settings(keys=Keys([Key("limited", "alice", Limits(**limits)), Key("free", "bob")]))


def ask(server: Running, key: str = "limited", body: Any = None, **more: Any) -> Any:
    return server.post("/v1/completions", {**ASK, **(body or {}), **more}, headers={"authorization": f"Bearer {key}"})


# ---- the file


def test_a_line_has_a_key_and_its_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "plain\n"
        "sk-1=x name=alice max_requests=2 requests_per_minute=60 tokens_per_minute=1000 max_prompt_tokens=50 "
        "max_body=1KiB timeout=1.5 models=tales,fables\n"
    )
    found = read_keys(file, {"LLAMAC_API_KEY": "other"})
    plain, alice, other = found.find("plain"), found.find("sk-1=x"), found.find("other")
    assert plain is not None
    assert alice is not None
    assert other is not None
    assert (plain.name, plain.limits) == ("line 1", Limits())
    assert (alice.name, other.name) == ("alice", "LLAMAC_API_KEY")
    assert alice.limits == Limits(
        max_requests=2,
        requests_per_minute=60,
        tokens_per_minute=1000,
        max_prompt_tokens=50,
        max_body=1024,
        timeout=1.5,
        models=frozenset(("tales", "fables")),
    )
    assert "sk-1" not in repr(alice) + repr(found) + str(vars(alice))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("secret max_request=2", "line 1: there is no limit 'max_request'; did you mean 'max_requests'?"),
        ("secret max_requests=0", "line 1: max_requests is '0', expected an integer greater than 0"),
        ("secret max_requests=1.5", "line 1: max_requests is '1.5', expected an integer"),
        ("secret timeout=inf", "line 1: timeout is 'inf', expected a number greater than 0"),
        ("secret timeout=nan", "line 1: timeout is 'nan', expected a number greater than 0"),
        ("secret max_body=much", "line 1: max_body is 'much'"),
        ("secret timeout=1 timeout=2", "line 1: timeout is given twice"),
        ("secret alice", "line 1: after the key, expected NAME=VALUE with name, max_requests"),
        ("secret name=", "line 1: the name of a key has printable characters"),
        ("# keys\n\nsecret name=a\nsecret name=b", "two API keys have the same key: 'a' and 'b'"),
        ("secret name=a\nsecret2 name=a", "two API keys have the same name: 'a' and 'a'"),
        ("#" * (MAX_FILE_BYTES + 1), f"keys has more than {MAX_FILE_BYTES} bytes: expected API keys, one per line"),
        ("sécret", "line 1: the key has white space or characters beyond ASCII"),
    ],
)
def test_mistakes_in_the_file_are_errors_without_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_keys(file, {})
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_models_of_keys_must_exist() -> None:
    found = Keys([Key("a", "alice", Limits(models=frozenset(("tails",))))])
    with pytest.raises(ArgumentError, match="the key 'alice': models: no model has the name 'tails'; did you mean 'ta"):
        found.check_models(["tales"])
    found.check_models(["tails"])


# ---- limits


def test_an_allowance_comes_back_evenly() -> None:
    now = [0.0]
    allowance = Allowance(60, lambda: now[0])
    allowance.use(60)
    assert allowance.wait() == pytest.approx(1.0)
    now[0] = 0.5
    assert allowance.wait() == pytest.approx(0.5)
    now[0] = -100.0  # a clock that goes back gives nothing
    assert allowance.wait() == pytest.approx(0.5)
    now[0] = 1000.0
    assert allowance.wait(60) == 0
    assert allowance.wait(61) > 0  # never more than the allowance of a minute
    allowance.use(90)
    assert allowance.wait() == pytest.approx(31.0)


def test_requests_per_minute_are_limited() -> None:
    with running("stories", keys(requests_per_minute=2)) as server:
        assert [ask(server).status_code for _ in range(3)] == [200, 200, 429]
        refused = ask(server)
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["message"].startswith("the key 'alice' may use 2 requests per minute: try again in ")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert ask(server, "free").status_code == 200
        messages = server.post("/v1/messages", {}, headers={"x-api-key": "limited"})
        assert (messages.status_code, messages.json()["error"]["type"]) == (429, "rate_limit_error")
        for path in ("/v1/models", "/health", "/metrics"):  # what computes nothing is not counted
            assert server.client.get(path, headers={"x-api-key": "limited"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "computes"),
    [
        ("/v1/embeddings", {"input": "Once upon a time"}, "vectors"),
        ("/v1/rerank", {"query": "Once", "documents": ["upon", "a time"]}, "rank"),
    ],
)
def test_texts_of_clients_that_leave_or_wait_too_long_count(
    monkeypatch: pytest.MonkeyPatch, path: str, body: Any, computes: str
) -> None:
    begun, release = threading.Event(), threading.Event()

    def compute(*arguments: Any) -> Any:
        begun.set()
        assert release.wait(PATIENCE)
        raise CancelledError("the computation was cancelled")

    monkeypatch.setattr(f"llamac.server.embedding.{computes}", compute)
    headers = {"authorization": "Bearer limited"}
    for limits, status in (({}, None), ({"timeout": 0.3}, 408)):
        begun.clear()
        release.clear()
        with running("helper", keys(tokens_per_minute=4, **limits)) as server:
            try:
                if status is None:
                    with pytest.raises(httpx.TimeoutException):
                        server.post(path, body, headers=headers, timeout=0.3)
                else:
                    answer = server.post(path, body, headers=headers, timeout=PATIENCE / 2)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (status, "timeout")
                assert begun.is_set()
                key = server.service.settings.keys.find("limited")
                assert key is not None
                while key._running:
                    time.sleep(0.001)
                assert server.post(path, body, headers=headers, timeout=PATIENCE / 2).status_code == 429
            finally:
                release.set()


def test_tokens_per_minute_are_limited_after_they_were_used() -> None:
    with running("stories", keys(tokens_per_minute=6)) as server:
        used = ask(server).json()["usage"]["total_tokens"]
        assert used >= 6
        refused = ask(server)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 10
        assert (
            f'llamac_key_tokens_total{{key="alice"}} {used}\n'
            in server.client.get("/metrics", headers={"x-api-key": "free"}).text
        )


def test_tokens_of_a_client_that_goes_away_count() -> None:
    with running("stories", keys(tokens_per_minute=8)) as server:
        headers = {"x-api-key": "limited"}
        body = {**ASK, "stream": True, **ENDLESS}
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            lines = stream.iter_lines()
            for _ in range(40):
                next(lines)
        server.wait_until_idle()
        wait_until(lambda: ask(server, max_tokens=1).status_code == 429)


def test_requests_at_a_time_are_limited() -> None:
    with running("stories", keys(max_requests=1)) as server:
        headers = {"x-api-key": "limited"}
        body = {**ASK, "stream": True, **ENDLESS}
        with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = ask(server)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "1 request at a time: try again in 1 second" in refused.json()["error"]["message"]
            assert ask(server, "free").status_code == 200
        wait_until(lambda: ask(server).status_code != 429)


def test_prompts_bodies_and_time_are_limited() -> None:
    with running("stories", keys(max_prompt_tokens=8, max_body=2000, timeout=0.2)) as server:
        long = "Once upon a time there was a little girl who liked to sing"
        for path, body in (("/v1/completions", {"prompt": long}), ("/execute", {"prompt": long})):
            refused = server.post(path, body, headers={"x-api-key": "limited"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "more than the 8 that this server accepts" in refused.json()["error"]["message"]
        assert ask(server).status_code == 200
        assert ask(server, prompt="x" * 2000).status_code == 413
        assert ask(server, body=ENDLESS).status_code == 408
        assert ask(server, "free", prompt=long).status_code == 200
        server.wait_until_idle()


def test_a_key_has_only_its_models() -> None:
    import llamac
    from llamac.engine.batching.engine import Engine
    from llamac.server.models import Entry

    def entry(name: str) -> Entry:
        return Entry(
            [name], lambda limit: Engine(llamac.load(built_in.path(name))), lambda limit: pytest.fail("no limit")
        )

    models = Models([entry("stories"), entry("stories-gpt2")])
    with serving(Service(models, keys(models=frozenset(("stories-gpt2",))))) as server:
        limited, free = ({"x-api-key": key} for key in ("limited", "free"))
        assert ask(server, model="stories-gpt2").status_code == 200
        refused = ask(server, model="stories")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert refused.json()["error"]["message"] == "the model 'stories' is not served here, only 'stories-gpt2'"
        listed = server.client.get("/v1/models", headers=limited).json()["data"]
        assert [model["id"] for model in listed] == ["stories-gpt2"]
        described = server.client.get("/openapi.json", headers=limited).json()
        assert described["components"]["schemas"]["ModelName"] == {"enum": ["stories-gpt2"]}
        assert server.client.get("/v1/models/stories", headers=limited).status_code == 404
        assert server.client.get("/metrics", headers=limited).status_code == 403
        assert len(server.client.get("/v1/models", headers=free).json()["data"]) == 2


def test_a_prompt_limit_of_the_server_concerns_everyone() -> None:
    with running("stories", Settings(max_prompt_tokens=3)) as server:
        assert server.post("/v1/completions", {"prompt": "Once upon a time"}).status_code == 400
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 1}).status_code == 200
        assert server.post("/v1/embeddings", {"input": ["Once", "Once upon a time"]}).status_code == 400


def test_replaced_keys_keep_what_they_have_used() -> None:
    first = Key("one", "alice", Limits(requests_per_minute=1))
    found = Keys([first, Key("two", "bob")])
    first.begin()
    found.replace(Keys([Key("one", "alice", Limits(requests_per_minute=1)), Key("three", "carol")]))
    again = found.find("one")
    assert again is first
    with pytest.raises(HttpError, match="1 request per minute"):
        again.begin()
    assert found.find("two") is None
    assert found.find("three") is not None


# ---- the log


def test_the_log_has_names_and_not_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamac")
    with running("stories", keys(max_requests=9)) as server:
        answer = ask(server, prompt="My password is 1234")
        ask(server, "wrong-key")
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "request"]
    assert "wrong-key" not in str(fields)
    assert "limited" not in str(fields)
    assert "1234" not in str(fields)
    found, refused = fields
    usage = answer.json()["usage"]
    assert found["request_id"] == answer.headers["x-request-id"]
    assert (found["key"], found["model"], found["status"]) == ("alice", "stories", 200)
    assert (found["prompt_tokens"], found["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert found["finish_reason"] == "length"
    assert found["queued"] >= 0
    assert (refused["status"], "key" in refused) == (401, False)
    json.dumps(fields)


def test_prompts_are_logged_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamac")
    with running("stories", Settings(log_prompts=True)) as server:
        answer = server.post("/v1/completions", {**ASK, "prompt": "Tom has 12"}).json()
    texts = {
        record.message: record.__dict__["fields"]["text"] for record in caplog.records if record.message != "request"
    }
    assert texts["prompt"].endswith("Tom has 12")
    assert texts["answer"] == answer["choices"][0]["text"]


def test_keys_can_be_used_by_many_threads() -> None:
    with running("stories", keys(max_requests=2)) as server:
        statuses: list[int] = []
        threads = [threading.Thread(target=lambda: statuses.append(ask(server).status_code)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert set(statuses) <= {200, 429}
        assert 200 in statuses
        key = server.service.settings.keys.find("limited")
        assert key is not None
        wait_until(lambda: not key._running)
