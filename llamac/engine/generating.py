"""The generating methods of a session, which wrap the loop in generation/stream.py."""

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
    """A mixin with the methods of `Session` that generate text."""

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Unpack[SamplingOverrides]
    ) -> Completion:
        """Continue a prompt and return the whole result. Tokens that sequence 0 already holds are not recomputed.

        Args:
            prompt: The whole prompt, as for `Model.generate`. Sequence 0 is truncated to its common prefix with the
                prompt.
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
        """Like `generate`, but return an iterator over pieces of text. Invalid requests raise here.

        A stream raises ClosedError if the session is used for something else before the stream has ended.
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
        """Answer a whole conversation, like `Model.chat`. Tokens that sequence 0 already holds are not recomputed."""
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
        """Like `chat`, but return an iterator over pieces of text. Invalid requests raise here."""
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
