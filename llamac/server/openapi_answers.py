"""The schemas of responses for the OpenAPI document. A field with a default is optional."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llamac.engine.generation.logprobs import TokenLogprobs
from llamac.engine.generation.output import Timings, Usage

MISSING: Any = None  # the default of an optional field

# ---- errors


@dataclass
class ErrorDetails:
    """What is wrong, as in OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


@dataclass
class Error:
    """The body of an error, as in OpenAI's API."""

    error: ErrorDetails


@dataclass
class MessagesErrorDetails:
    """What is wrong, as in Anthropic's API."""

    type: str
    message: str


@dataclass
class MessagesError:
    """The body of an error, as in Anthropic's API."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str


# ---- chats and completions


@dataclass
class CachedTokens:
    """Tokens that were already in the cache."""

    cached_tokens: int


@dataclass
class CompletionUsage:
    """The tokens of a chat or completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    truncated_tokens: int = MISSING
    shifted_tokens: int = MISSING


@dataclass
class CalledFunction:
    """A function and its arguments as JSON text."""

    arguments: str
    name: str = MISSING


@dataclass
class ChatToolCall:
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


@dataclass
class ChatToolCallDelta:
    """A piece of a call of a tool."""

    index: int
    function: CalledFunction
    id: str = MISSING
    type: Literal["function"] = MISSING


@dataclass
class ChatAnswer:
    """The message that answers a chat."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = MISSING
    tool_calls: list[ChatToolCall] = MISSING
    refusal: None = MISSING


@dataclass
class ChatDelta:
    """A piece of the message that answers a chat."""

    role: Literal["assistant"] = MISSING
    content: str = MISSING
    reasoning_content: str = MISSING
    tool_calls: list[ChatToolCallDelta] = MISSING


@dataclass
class ChatTokenLogprob:
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


@dataclass
class ChatTokenLogprobs:
    """A token of a chat's answer, its log probability, and the most probable tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTokenLogprob]


@dataclass
class ChatLogprobs:
    """The log probabilities of a chat's answer."""

    content: list[ChatTokenLogprobs]
    refusal: None


@dataclass
class CompletionLogprobs:
    """The log probabilities of a text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass
class ChatChoice:
    """An answer to a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


@dataclass
class ChatChunkChoice:
    """A piece of an answer to a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


@dataclass
class TextChoice:
    """A text that continues a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


@dataclass
class TextChunkChoice:
    """A piece of a text that continues a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


@dataclass
class ChatCompletion:
    """The answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    system_fingerprint: str
    seed: int


@dataclass
class ChatCompletionChunk:
    """An event of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: CompletionUsage | None = MISSING


@dataclass
class TextCompletion:
    """The texts that continue prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage
    system_fingerprint: str
    seed: int


@dataclass
class TextCompletionChunk:
    """An event of a completion's stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: str
    usage: CompletionUsage | None = MISSING


# ---- responses


@dataclass
class InputTokensDetails:
    """Tokens that were already in the cache. Caching is not charged."""

    cached_tokens: int
    cache_write_tokens: int


@dataclass
class ReasoningTokens:
    """Tokens of the reasoning."""

    reasoning_tokens: int


@dataclass
class ResponseUsage:
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


@dataclass
class IncompleteDetails:
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


@dataclass
class ResponseErrorDetails:
    """The error that ended a response."""

    code: str
    message: str


@dataclass
class ResponsePart:
    """A part of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = MISSING
    logprobs: list[Any] = MISSING


@dataclass
class ResponseOutputItem:
    """An item of a response: a message, a thought or a call."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = MISSING
    content: list[ResponsePart] = MISSING
    summary: list[Any] = MISSING
    call_id: str = MISSING
    name: str = MISSING
    arguments: str = MISSING


@dataclass
class Response:
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: ResponseErrorDetails | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: Any
    metadata: Any
    prompt_cache_key: Any
    safety_identifier: Any
    frequency_penalty: float
    presence_penalty: float
    top_logprobs: int
    output: list[ResponseOutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    background: Literal[False]
    service_tier: str
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: Any = MISSING


# ---- messages


@dataclass
class MessagesUsage:
    """The tokens of a message, as in Anthropic's API."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: None
    inference_geo: None
    output_tokens_details: None
    server_tool_use: None
    service_tier: None


@dataclass
class MessageBlock:
    """A block of a message: a text, a thought or a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = MISSING
    thinking: str = MISSING
    signature: str = MISSING
    id: str = MISSING
    name: str = MISSING
    input: dict[str, Any] = MISSING
    citations: None = MISSING
    caller: dict[str, Any] = MISSING


@dataclass
class AnsweredMessage:
    """The message that answers a conversation, as in Anthropic's API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessagesUsage


@dataclass
class CountedTokens:
    """The number of tokens of a conversation."""

    input_tokens: int


# ---- vectors and rankings


@dataclass
class Embedding:
    """The vector of a text: numbers, or base64 of little-endian floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


@dataclass
class EmbeddingUsage:
    """The tokens of texts."""

    prompt_tokens: int
    total_tokens: int


@dataclass
class Embeddings:
    """The vectors of texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass
class RankedText:
    """A document."""

    text: str


@dataclass
class RankedDocument:
    """A document's position in a ranking."""

    index: int
    relevance_score: float
    document: RankedText = MISSING


@dataclass
class Ranking:
    """Documents, the most relevant one first."""

    object: Literal["list"]
    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


# ---- llamac's own API


@dataclass
class Execution:
    """A result with all details."""

    text: str
    tokens: list[int]
    finish_reason: Literal["stop", "length", "context", "cancelled"]
    stopped_by: int | str | None
    seed: int
    candidate: int
    score: float | None
    usage: Usage
    timings: Timings
    request_id: str = MISSING
    logprobs: list[TokenLogprobs] = MISSING
    prompt_logprobs: list[TokenLogprobs | None] = MISSING
    message: ChatAnswer = MISSING
    receipt: dict[str, Any] = MISSING
    others: list[Execution] = MISSING


@dataclass
class Piece:
    """A piece of a text."""

    text: str


@dataclass
class Tokens:
    """The tokens of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] = MISSING


@dataclass
class PromptText:
    """A text."""

    prompt: str


@dataclass
class Model:
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    loaded: bool
    root: str = MISSING
    max_model_len: int = MISSING
    max_input_tokens: int = MISSING


@dataclass
class Models:
    """The models that are served."""

    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass
class Status:
    """The state of the server."""

    status: Literal["ok", "ready"]
