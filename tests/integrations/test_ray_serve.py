"""The application of `llamac serve` under Ray Serve, on a cluster of several nodes of which one dies."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from builders import checkpoint, llama_config, write_model
from llamac.errors import ArgumentError
from llamac.integrations.ray_serve import Arguments, arguments_of, session_of
from llamac.server.settings import MAX_BODY_BYTES

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'llamac[ray]'")
pytest.importorskip("ray.serve")
pytestmark = pytest.mark.filterwarnings("default")  # other libraries issue warnings of their own

from ray_clusters import cluster, kill_node_of  # noqa: E402

PATIENCE = 300.0  # seconds; only a hang takes so long
LONG = 8_000  # tokens of an answer that is not complete when a node is killed
REPLICA = "x-llamac-replica"
ENDLESS = {"max_tokens": 10**6, "ignore_eos": True, "context_overflow": "shift"}


def test_arguments_of_serve_run_are_texts() -> None:
    found = arguments_of({"threads": "2", "page": "false", "timeout": "1.5", "kv_dtype": "q8", "numerics": "fast"})
    assert found == Arguments(threads=2, page=False, timeout=1.5, kv_dtype="q8", numerics="fast")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"thread": 1}, "build_app has no argument 'thread'; did you mean 'threads'?"),
        ({"threads": "many"}, r"arguments of build_app: Expected `int \| null`.*threads"),
        ({"threads": 0}, "threads is 0, expected more than 0"),
        ({"num_replicas": 3, "max_replicas": 2}, "max_replicas is 2, expected at least num_replicas, 3"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        arguments_of(given)


def test_serve_run_makes_the_application_before_it_connects_to_a_cluster() -> None:
    from ray import serve

    from llamac.integrations import ray_serve

    assert isinstance(ray_serve.app, serve.Application)
    assert not ray.is_initialized()


def chat(*texts: str, **more: Any) -> bytes:
    """A conversation: the first text is the system's, then user and assistant alternate."""
    roles = ("system", *("user", "assistant") * len(texts))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return json.dumps({"messages": messages, **more}).encode()


def test_a_conversation_keeps_its_session_while_it_grows() -> None:
    begun = session_of(chat("Be brief.", "Hello!"))
    assert begun
    assert session_of(chat("Be brief.", "Hello!", "Hi.", "Who are you?", temperature=0)) == begun
    assert session_of(chat("Be brief.", "Hello?")) != begun
    assert session_of(chat("Be long.", "Hello!")) != begun
    long = "a document " * 100
    assert session_of(chat("", long + "one question")) == session_of(chat("", long + "another"))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": []}', b"\xff", b'{"prompt": ""}'])
def test_a_body_without_a_beginning_has_no_session(body: bytes) -> None:
    assert session_of(body) == ""


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_prompts_have_sessions(name: str) -> None:
    texts = ("one", ["one", "two"], [1, 2, 3], "two")
    assert len({session_of(json.dumps({name: text}).encode()) for text in texts}) == len(texts)


# ---- a cluster


class Served:
    """An application that runs on a cluster."""

    def __init__(self, started: Any, path: Path, url: str) -> None:
        self.cluster = started
        self.path = path
        self.client = httpx.Client(base_url=url, timeout=PATIENCE)

    def complete(self, prompt: str, **more: Any) -> httpx.Response:
        """Continue a prompt."""
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **more})

    def details(self, deployment: str) -> dict[str, Any]:
        """What Ray Serve says about a deployment."""
        from ray.serve.context import _get_global_client

        found: dict[str, Any] = _get_global_client().get_serve_details()["applications"]["default"]["deployments"]
        return found[deployment]  # type: ignore[no-any-return]

    def nodes(self, deployment: str) -> dict[str, str]:
        """The node of each replica of a deployment."""
        return {each["replica_id"]: each["node_id"] for each in self.details(deployment)["replicas"]}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from ray import serve

    from llamac.integrations.ray_serve import build_app

    path = write_model(tmp_path_factory.mktemp("ray") / "tiny.bin", checkpoint(llama_config()))
    port = free_port()
    with cluster(2) as started:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        arguments = {"model": str(path), "num_replicas": "2", "threads": "1", "max_sequences": "4"}
        serve.run(build_app(arguments), route_prefix="/")
        found = Served(started, path, f"http://127.0.0.1:{port}")
        try:
            yield found
        finally:
            found.client.close()
            serve.shutdown()


def test_it_is_the_application_of_llamac_serve(served: Served) -> None:
    body = {"prompt": "ab", "max_tokens": 4}
    answer = served.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers["x-request-id"] == "mine"
    assert served.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert served.client.get("/ready").json() == {"status": "ready"}
    assert served.client.get("/").headers["content-type"].startswith("text/html")
    wrong = served.complete("ab", temperature=-1)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
    large = served.client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 2))
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    assert served.client.get("/metrics").json()["error"]["code"] == "not_found"


def test_streams_come_in_pieces(served: Served) -> None:
    body = {"prompt": "ab", "stream": True, **ENDLESS}
    with served.client.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        assert len([line for line, _ in zip(lines, range(40), strict=False) if line.startswith("data: {")]) == 20
    # the client has gone, and with it the request: otherwise four of these would keep a replica busy forever
    for _ in range(8):
        with served.client.stream(
            "POST", "/v1/completions", json={"prompt": "ab", "stream": True, **ENDLESS}
        ) as stream:
            assert next(stream.iter_lines()).startswith("data: {")
    assert served.complete("ab").status_code == 200


def test_requests_with_the_same_beginning_reach_the_same_replica(served: Served) -> None:
    beginnings = [f"document {number} " + "abcdefgh" * 40 for number in range(8)]
    replicas: dict[str, str] = {}
    for question in ("", " one", " one two"):
        for beginning in beginnings:
            answer = served.complete(beginning + question)
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert replicas.setdefault(beginning, answer.headers[REPLICA]) == answer.headers[REPLICA]
            assert (cached > 300) == bool(question), cached
    number = len(beginnings)
    while len(set(replicas.values())) < 2:  # other beginnings reach the other replica
        number += 1
        assert number < 100
        replicas[str(number)] = served.complete(f"document {number}").headers[REPLICA]
    assert set(replicas.values()) == set(served.nodes("model"))


def test_a_node_dies_while_requests_run(served: Served) -> None:
    """What was streamed ends with an error; what was not is computed by the other replica; later requests succeed."""
    [front] = served.nodes("front").values()
    victim, node = next((name, node) for name, node in served.nodes("model").items() if node != front)
    begun = threading.Semaphore(0)
    ends: list[tuple[bool, str, str]] = []

    def run(number: int, is_stream: bool) -> None:
        body = {"prompt": f"{number} abc", "stream": is_stream, **ENDLESS, "max_tokens": LONG}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            if is_stream:
                begun.release()
            last = [line for line in (first, *lines) if line][-1]
            ends.append((is_stream, answer.headers[REPLICA], last))

    # each replica runs four streams at a time, so none of these has to wait; both replicas have some
    on_victim = [number for number in range(200) if served.complete(f"{number} abc").headers[REPLICA] == victim]
    threads = [threading.Thread(target=run, args=(number, True)) for number in on_victim[:2]]
    threads += [threading.Thread(target=run, args=(number, False)) for number in on_victim[2:4]]
    for thread in threads:
        thread.start()
    for _ in range(2):
        assert begun.acquire(timeout=PATIENCE)
    kill_node_of(served.cluster, node)
    for thread in threads:
        thread.join(PATIENCE)
    streamed = [(replica, json.loads(last.removeprefix("data: "))) for is_stream, replica, last in ends if is_stream]
    whole = [(replica, json.loads(last)) for is_stream, replica, last in ends if not is_stream]
    assert [(replica, last["error"]["code"]) for replica, last in streamed] == [(victim, "replica_died")] * 2
    assert all(replica != victim and last["usage"]["completion_tokens"] == LONG for replica, last in whole)
    assert len(whole) == 2
    for number in range(20):
        answer = served.complete(f"{number} later")
        assert answer.status_code == 200, answer.text
        assert answer.headers[REPLICA] != victim


def test_an_autoscaling_configuration_is_accepted(served: Served) -> None:
    from ray import serve

    from llamac.integrations.ray_serve import build_app

    serve.delete("default")
    arguments = {"model": str(served.path), "num_replicas": 1, "max_replicas": 2, "threads": 1}
    serve.run(build_app(arguments), route_prefix="/scaled")
    config = served.details("model")["deployment_config"]["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"], config["target_ongoing_requests"]) == (1, 2, 8)
    answer = served.client.post("/scaled/v1/completions", json={"prompt": "ab", "max_tokens": 4})
    assert answer.status_code == 200, answer.text
