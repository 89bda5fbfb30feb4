"""The tests of other projects' suites that do not pass, and why. docs/clients.md has this table."""

from __future__ import annotations

WEAK = "SmolLM2-135M does not choose a tool by itself; forced calls pass"
SHORT = "SmolLM2-135M does not end its JSON object within the limit of tokens"
TEXT_ONLY = "the models read only text: the server refuses images"
NO_MODEL = "`model` is optional: without it, the server uses its own model"
STATE = "the server keeps no answers and no models of its clients: it lists, changes and deletes none"
COMPACT = "the server does not have the path `/v1/responses/compact`"
RAW = "the library asks for base64 by itself; raw responses and its strict mode read it before it is decoded"
STREAM = "prism checks a stream of events as if it were one object"
BASE64 = "the library asks for base64; OpenAI's document describes lists of numbers only"
OTHER_NAMES = "the tests name models that this server does not serve"


def without(file: str, reason: str, *methods: str) -> dict[str, str]:
    """All tests of some methods of openai-python, but for `test_path_params_*`, which ask no server."""
    return {f"{file}::*_{kind}_{method}*": reason for method in methods for kind in ("method", "response")}


# Patterns of `fnmatch` for the end of a test's name. Each stands for at least one test, and none of its tests passes.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "langchain": {"test_agent_loop*": WEAK, "test_json_mode": SHORT},
    "llm-comply": {
        "[[]openai-chat-chat-image-input]": TEXT_ONLY,
        "[[]open-responses-image-input]": TEXT_ONLY,
        "[[]anthropic-anth-image-input]": TEXT_ONLY,
        "[[]openai-chat-chat-error-handling]": NO_MODEL,
        "[[]open-responses-error-handling]": NO_MODEL,
    },
    "openai-python": {
        **without("chat/test_completions.py", STATE, "retrieve", "update", "delete", "list"),
        **without("test_models.py", STATE, "delete"),
        **without("test_responses.py", STATE, "retrieve", "delete", "cancel"),
        **without("test_responses.py", COMPACT, "compact"),
        "test_embeddings.py::*_create[[]strict]": RAW,
        "test_embeddings.py::*_create[[]aiohttp]": RAW,
    },
    "openai-document": {
        "/api_resources/chat/test_completions.py::*_create*_overload_2*": STREAM,
        "/api_resources/test_completions.py::*_create*_overload_2*": STREAM,
        "test_responses.py::*_create*_overload_2*": STREAM,
        "test_embeddings.py::*_create[[]*": BASE64,
    },
    "anthropic-sdk-python": {
        "/api_resources/test_messages.py::*_deprecated_model_warning*": OTHER_NAMES,
        "/api_resources/test_models.py::*_method_list_with_all_params*": OTHER_NAMES,
        "/beta/test_models.py::*_method_list_with_all_params*": OTHER_NAMES,
    },
}
