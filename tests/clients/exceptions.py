"""The tests of foreign suites that do not pass, and why. docs/clients.md has this table."""

from __future__ import annotations

WEAK = "SmolLM2-135M does not choose a tool by itself; calls that are forced pass"
SHORT = "SmolLM2-135M does not end its JSON object within the limit of tokens"
TEXT_ONLY = "the models read texts only: a picture is refused by name"
NO_MODEL = "`model` may be left out: it then means the server's own model"
STATE = "the server keeps no answers and no models of its clients: it lists, changes and deletes none"
COMPACT = "the server does not have the path `/v1/responses/compact`"
RAW = "the library asks for base64 by itself; raw responses and its strict mode read it before it is decoded"
OTHER_NAMES = "the tests name models that this server does not serve"

EXCEPTIONS: dict[str, dict[str, str]] = {
    "langchain": {"test_agent_loop*": WEAK, "test_json_mode*": SHORT},
    "llm-comply": {"*-image-input]": TEXT_ONLY, "*-error-handling]": NO_MODEL},
    "openai-python": {
        "chat/test_completions.py::*_retrieve*": STATE,
        "chat/test_completions.py::*_update*": STATE,
        "chat/test_completions.py::*_delete*": STATE,
        "chat/test_completions.py::*_list*": STATE,
        "test_models.py::*_delete*": STATE,
        "test_responses.py::*_retrieve*": STATE,
        "test_responses.py::*_delete*": STATE,
        "test_responses.py::*_cancel*": STATE,
        "test_responses.py::*_compact*": COMPACT,
        "test_embeddings.py::*_method_create[[]*": RAW,
        "test_embeddings.py::*raw_response*": RAW,
        "test_embeddings.py::*streaming_response*": RAW,
    },
    "anthropic-sdk-python": {
        "*test_deprecated_model_warning*": OTHER_NAMES,
        "*test_models.py::*_list_with_all_params*": OTHER_NAMES,
    },
}
