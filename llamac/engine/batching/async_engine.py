"""The engine for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from llamac.engine.batching.engine import Engine, Prompt
from llamac.engine.batching.engine_stats import EngineStats
from llamac.engine.batching.request import Request
from llamac.engine.sampling.params import SamplingOverrides, SamplingParams
from llamac.engine.scoring.cancellation import Cancellation
from llamac.errors import QueueFullError
from llamac.text.tokenizer import LONG_TEXT

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from llamac.engine.generation.output import Completion
    from llamac.engine.model import Model
    from llamac.tools.message import Message

RETRY_S = 0.02  # between attempts to queue a request while the queue is full


class AsyncEngine:
    """An `Engine` for asyncio: `generate` is a coroutine, and the model never blocks the event loop.

        async with llamac.AsyncEngine(model, max_sequences=8) as engine:
            completion = await engine.generate("Once upon", max_tokens=64)
            async for piece in engine.submit("A long time", max_tokens=64):
                print(piece, end="", flush=True)

    Cancelling a task cancels its requests.
    """

    def __init__(self, model: Model, **settings: Any) -> None:
        """Open an engine. The settings are those of `Engine`."""
        self._engine = Engine(model, **settings)

    @property
    def engine(self) -> Engine:
        """The engine, for other threads."""
        return self._engine

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._engine.stats()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """Queue a request, for `async for` over its pieces. The arguments and errors are those of `Engine.submit`."""
        return self._engine.submit(prompt, params, **options)

    def chat(
        self, messages: Sequence[Mapping[str, Any] | Message], params: SamplingParams | None = None, **options: Any
    ) -> Request:
        """Queue the answer to a conversation. The arguments and errors are those of `Engine.chat`."""
        return self._engine.chat(messages, params, **options)

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a str is not meant as a sequence of prompts
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion | list[Completion]:
        """Continue prompts and return the results in order. The arguments and errors are those of `Engine.generate`."""
        requests: list[Request] = []
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        try:
            for prompt in listed:
                request = await self._submit(prompt, params, priority=priority, deadline=deadline, **overrides)
                requests.append(request)
            completions = [await request for request in requests]
        finally:
            for request in requests:
                request.cancel()
        return completions[0] if isinstance(prompts, str) else completions

    async def _submit(self, prompt: Prompt, params: SamplingParams | None, **options: Any) -> Request:
        submit = partial(self._engine.submit, prompt, params, **options)
        has_guide = options.get("guide") is not None or (params is not None and params.guide is not None)
        # the first use reads the vocabulary, which can take a second; tokenizing a long text takes milliseconds
        takes_long = has_guide or (isinstance(prompt, str) and len(prompt) >= LONG_TEXT)
        while True:
            try:
                return await _in_thread(submit) if takes_long else submit()
            except QueueFullError:
                await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Cancel all requests and free the memory."""
        await asyncio.get_running_loop().run_in_executor(None, self._engine.close)

    async def __aenter__(self) -> Self:
        self._engine._check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _in_thread(submit: Callable[[], Request]) -> Request:
    """Queue a request in a thread. If the task is cancelled, the thread is free again, and so is the request."""
    cancel = Cancellation()
    queued: list[Request] = []

    def checked() -> Request:
        request = submit()
        queued.append(request)
        if cancel.cancelled:
            request.cancel()
        return request

    try:
        convert = partial(cancel.convert, checked, LONG_TEXT)
        return await asyncio.get_running_loop().run_in_executor(None, convert)
    except asyncio.CancelledError:
        cancel.cancel()
        for request in queued:  # or `checked` cancels it, if it has not been queued yet
            request.cancel()
        raise
