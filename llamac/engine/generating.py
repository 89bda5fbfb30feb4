"""The methods of a session that generate text (generation/stream.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids
from llamac.engine.sampling.params import SamplingOverrides, SamplingParams, request_params

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamac.engine.generation.output import Completion
    from llamac.engine.generation.stream import Stream
    from llamac.engine.prompts.prompt_ids import ConversationIds, ToolChoice
    from llamac.engine.session import Session
    from llamac.tools.functions import Tool
    from llamac.tools.message import Message


class Generating:
    """What `Session` inherits to generate text."""

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Unpack[SamplingOverrides]
    ) -> Completion:
        """Continue a prompt, computing only what sequence 0 does not hold yet; return the whole result.

        Args:
            prompt: The whole prompt, as for `Model.generate`. Sequence 0 is truncated to the prefix that it shares with
                the prompt.
            params: Sampling parameters.
            overrides: Values that replace those of `params`.

        Raises:
            ContextFullError: If the prompt does not fit the session's context.
            ArgumentError: If an argument is out of range.
            BusyError: If another thread uses the session.
        """
        from llamac.engine.generation.stream import complete_from_session

        return complete_from_session(cast("Session", self), prompt, request_params(params, overrides))

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Unpack[SamplingOverrides]
    ) -> Stream:
        """Like `generate`, as an iterator over pieces of text. This call raises the errors of the request.

        A stream ends with ClosedError if the session is used for something else before it has ended.
        """
        from llamac.engine.generation.stream import Stream, continued

        return Stream(*continued(cast("Session", self), prompt, request_params(params, overrides)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        tool_format: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion:
        """Answer a whole conversation, as `Model.chat` does, computing only what sequence 0 does not hold yet."""
        given = ToolOptions(tools, tool_choice, parallel_tool_calls, tool_format)
        ids, request = _conversation(self, messages, given, template_options, request_params(params, overrides))
        return self.generate(ids, request)

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any] | Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        tool_format: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Stream:
        """Like `chat`, as an iterator over pieces of text. This call raises the errors of the request."""
        given = ToolOptions(tools, tool_choice, parallel_tool_calls, tool_format)
        ids, request = _conversation(self, messages, given, template_options, request_params(params, overrides))
        return self.stream(ids, request)


def _conversation(
    generating: Generating,
    messages: Sequence[Mapping[str, Any] | Message],
    given: ToolOptions,
    template_options: Mapping[str, Any] | None,
    request: SamplingParams,
) -> tuple[ConversationIds, SamplingParams]:
    """The prompt and the parameters of a conversation."""
    session = cast("Session", generating)
    return conversation_ids(session.model, messages, given, template_options, request, session.context)
