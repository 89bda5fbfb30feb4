"""The OpenAPI document: it has every path and every parameter, and real bodies and answers conform to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("jsonschema")

import jsonschema

from builders import SCRIPT_TEMPLATE, byte_ids, script_checkpoint, write_model
from http_server import Running, running
from llamac.engine.sampling.params import CHECKS, SamplingParams
from llamac.engine.sampling.schemas import NOT_JSON
from llamac.openai import schemas
from llamac.openai.errors import InvalidRequestError
from llamac.openai.forms import Ignored
from llamac.openai.parameters import PARAMETERS, parameters_of
from llamac.server import messages_request, responses_request
from llamac.server import openapi_answers as answers
from llamac.server.app import ENDPOINTS
from llamac.server.execution import SAMPLING, read_sampling
from llamac.server.keys import Keys
from llamac.server.openapi import OPERATIONS, document
from llamac.server.settings import Settings

STOP = 2  # a token
ANSWER = '?<think>two</think>three\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ASK = [{"role": "user", "content": "?"}]
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
TOOLS = [{"name": "add", "input_schema": FUNCTION["parameters"]}]
ASK_CLAUDE = {"model": "tiny", "messages": ASK}
DOCUMENT = document(["tiny"], has_keys=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = script_checkpoint([*byte_ids(ANSWER), STOP], context=256, stop_ids=[STOP])
    made.chat_template = SCRIPT_TEMPLATE
    path = write_model(tmp_path_factory.mktemp("openapi") / "script.bin", made, generation={"temperature": 0})
    with running(path) as served:
        yield served


def validate(value: Any, schema: Any) -> None:
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


def operation(path: str, method: str = "post") -> Any:
    return DOCUMENT["paths"][path][method]


def body_schema(path: str) -> Any:
    return operation(path)["requestBody"]["content"]["application/json"]["schema"]


def names_of(schema: Any) -> set[str]:
    return {name for part in schema.get("anyOf", [schema]) for name in part["properties"]}


# ---- whole


def test_the_document_follows_its_own_specification() -> None:
    assert DOCUMENT["openapi"].startswith("3.1")
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema, name
    ids = [found["operationId"] for path in DOCUMENT["paths"].values() for found in path.values()]
    assert len(set(ids)) == len(ids)
    own = (schemas.COMPONENTS, messages_request.COMPONENTS, responses_request.COMPONENTS)
    assert not {name for each in own for name in each} & vars(answers).keys()
    references = set(json.dumps(DOCUMENT).split("#/components/schemas/")[1:])
    assert {text.partition('"')[0] for text in references} <= set(DOCUMENT["components"]["schemas"])


def test_the_document_has_every_path_with_a_summary() -> None:
    paths = {path.replace(":path}", "}"): method.lower() for path, (method, _) in ENDPOINTS.items()}
    assert {path: next(iter(found)) for path, found in DOCUMENT["paths"].items()} == paths
    assert all(found["summary"] for path in DOCUMENT["paths"].values() for found in path.values())
    assert OPERATIONS.keys() == paths.keys(), "llamac/server/openapi.py describes the answers of every path"


@pytest.mark.parametrize(("path", "endpoint"), [("/v1/chat/completions", "chat"), ("/v1/completions", "completions")])
def test_the_document_has_every_parameter_of_the_table(path: str, endpoint: Any) -> None:
    schema = body_schema(path)
    assert names_of(schema) == parameters_of(endpoint).keys()
    for parameter in parameters_of(endpoint).values():
        described = schema["properties"][parameter.name]
        assert parameter.text in json.dumps(described, ensure_ascii=False)
        if parameter.effect == "honored":
            assert described.keys() - {"description"}, f"{parameter.name} has no schema"
        if parameter.effect == "refused":
            assert described["anyOf"][0]["enum"] == list(parameter.neutral)
    assert {parameter.name for parameter in PARAMETERS} >= names_of(schema)


def test_the_document_has_every_sampling_parameter() -> None:
    sampling = body_schema("/execute")["anyOf"][0]["properties"]["sampling"]["anyOf"][0]
    assert sampling["properties"].keys() == SamplingParams.__dataclass_fields__.keys() - set(NOT_JSON)


def test_schemas_and_checks_of_sampling_parameters_agree() -> None:
    numbers = [0, 1, -1, 2, 256, 257, 0.5, 1.5, 10**6, 2 * 10**6, 2**31, 2**64, 1e-300]
    values: list[Any] = [*numbers, True, "", "x", "never", "shift", ["x"], [""], [3], [-1], {}, []]
    values += [{token: 1} for token in ("5", "-5", "x", "", "5.0", "٣", "9" * 9, "9" * 10)]
    biases: list[Any] = [-100, 1.5, 1e39, "1", True, []]
    values += [{"5": bias} for bias in biases]
    values += [[[5, 1], [6, -2.5]], [["5", 1]], [[5]], [[5, 1, 2]], [[-5, 1]], [[5, "1"]], [[2**31, 1]], [[True, 1]]]
    schema = SAMPLING.schemas
    assert schema.keys() == CHECKS.keys() - set(NOT_JSON)
    for name in schema:
        validator = jsonschema.Draft202012Validator(schema[name])
        for value in values:
            try:
                read_sampling({name: value}, Ignored())
                is_accepted = True
            except InvalidRequestError:
                is_accepted = False
            assert validator.is_valid(value) == is_accepted, (name, value)


def test_the_server_sends_its_document(server: Running) -> None:
    assert server.client.get("/openapi.json").json() == DOCUMENT
    assert "securitySchemes" not in DOCUMENT["components"]


def test_the_document_of_a_server_with_keys_says_where_they_are_needed() -> None:
    with running("stories", Settings(keys=Keys(["k"]))) as served:
        assert served.client.get("/openapi.json").status_code == 401
        found = served.client.get("/openapi.json", headers={"x-api-key": "k"}).json()
    assert found["components"]["securitySchemes"].keys() == {"bearer", "key"}
    without = {path for path, methods in found["paths"].items() for each in methods.values() if "security" not in each}
    assert without == {"/health", "/ready"}


# ---- requests and answers

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": ASK, "tools": CHAT_TOOLS, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": ASK, "tools": CHAT_TOOLS, "tool_choice": "required", "max_tokens": 200}),
    ("/v1/chat/completions", {"messages": ASK, "max_tokens": 3, "stop": ["x"], "response_format": {"type": "text"}}),
    ("/v1/completions", {"prompt": ["a", [5]], "echo": True, "logprobs": 2, "max_tokens": 3, "user": {"a": 1}}),
    ("/v1/responses", {"input": ASK, "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "low"}}),
    ("/v1/responses", {"input": "?", "max_output_tokens": 3, "text": {"format": {"type": "text"}}, "model": "tiny"}),
    ("/v1/messages", {**ASK_CLAUDE, "tools": TOOLS, "max_tokens": 200, "system": "a"}),
    ("/v1/messages", {**ASK_CLAUDE, "max_tokens": 3, "stop_sequences": ["o"]}),
    ("/v1/messages/count_tokens", {**ASK_CLAUDE, "tools": TOOLS}),
    ("/v1/embeddings", {"input": ["a", "b"], "user": "me"}),
    ("/v1/embeddings", {"input": [[5, 6], "a"]}),
    ("/v1/embeddings", {"input": "a", "encoding_format": "base64", "dimensions": 4}),
    ("/execute", {"prompt": "a", "sampling": {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1, "n": 2}}),
    ("/execute", {"messages": ASK, "sampling": {"max_tokens": 4, "receipt": True}, "priority": -1}),
    ("/tokenize", {"prompt": "ab", "return_token_strs": True}),
    ("/tokenize", {"messages": ASK, "prompt": None}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/apply-template", {"messages": ASK, "tools": None}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_bodies_and_answers_are_as_the_document_says(server: Running, path: str, body: dict[str, Any]) -> None:
    validate(body, body_schema(path))
    found = server.post(path, body)
    assert found.status_code == 200, found.text
    validate(found.json(), operation(path)["responses"]["200"]["content"]["application/json"]["schema"])


@pytest.mark.parametrize(("path", "body"), [entry for entry in BODIES if OPERATIONS[entry[0]].chunks])
def test_events_are_as_the_document_says(server: Running, path: str, body: dict[str, Any]) -> None:
    if body.get("sampling", {}).get("n"):
        body = {**body, "sampling": {"max_tokens": 4}}
    content = operation(path)["responses"]["200"]["content"]
    data = content["text/event-stream"]["schema"]["properties"]["data"]
    schema = data.get("anyOf", [data])[-1]["contentSchema"]
    events = server.events(path, body)
    assert ("[DONE]" in events) == ("anyOf" in data)
    for event in events:
        if event != "[DONE]":
            validate(event, schema)


@pytest.mark.parametrize("path", [path for path, found in OPERATIONS.items() if found.body is None])
def test_answers_without_a_body_are_as_the_document_says(server: Running, path: str) -> None:
    found = server.client.get(path.replace("{name}", "tiny"))
    content = operation(path, "get")["responses"]["200"]["content"]
    [kind] = content
    assert (found.status_code, found.headers["content-type"].partition(";")[0]) == (200, kind)
    if kind == "application/json":
        validate(found.json(), content[kind]["schema"])


@pytest.mark.parametrize("path", [path for path, found in OPERATIONS.items() if found.body is not None])
def test_errors_are_as_the_document_says(server: Running, path: str) -> None:
    bodies: tuple[Any, ...] = ({}, {"nothing": 1}, {"model": "other"}, [])
    for body in bodies:
        assert not jsonschema.Draft202012Validator(
            {**body_schema(path), "components": DOCUMENT["components"]}
        ).is_valid(body)
        found = server.post(path, body)
        status = found.status_code
        assert status == 400 or (status == 404 and "model" in body)
        validate(found.json(), operation(path)["responses"][str(status)]["content"]["application/json"]["schema"])
    validate(server.client.get("/v1/models/other").json(), {"$ref": "#/components/schemas/Error"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "tools": [{"type": "other", "function": FUNCTION}]}),
        ("/v1/messages", {**ASK_CLAUDE, "max_tokens": 1, "tool_choice": {"type": []}}),
        (
            "/v1/messages",
            {**ASK_CLAUDE, "max_tokens": 1, "tool_choice": {"type": "none", "disable_parallel_tool_use": "x"}},
        ),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": []}]}),
        ("/v1/responses", {"input": "a", "top_logprobs": False}),
        ("/v1/responses", {"input": "a", "reasoning": {"depth": 1}}),
        ("/apply-template", {"messages": ASK, "tools": [{"nothing": 1}]}),
    ],
)
def test_what_the_document_excludes_is_refused(server: Running, path: str, body: dict[str, Any]) -> None:
    whole = {**body_schema(path), "components": DOCUMENT["components"]}
    assert not jsonschema.Draft202012Validator(whole).is_valid(body)
    assert server.post(path, body).status_code == 400


def test_a_summary_of_the_reasoning_is_named_as_without_effect(server: Running) -> None:
    body = {"input": "?", "max_output_tokens": 1, "reasoning": {"summary": "auto", "effort": "low"}}
    found = server.post("/v1/responses", body)
    assert found.headers["x-llamac-no-effect"] == "reasoning.summary, reasoning.effort"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a", "add_special_tokens": None}),
        ("/tokenize", {"prompt": None, "messages": ASK}),
        ("/apply-template", {"messages": ASK, "tools": None, "nothing": None}),
    ],
)
def test_null_means_not_set(server: Running, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body).status_code == 200


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/execute", {"prompt": "a"})])
def test_paths_without_a_user_refuse_one(server: Running, path: str, body: dict[str, Any]) -> None:
    found = server.post(path, {**body, "user": "me"})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "unknown_parameter")
