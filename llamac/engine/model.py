"""The model class: calls that compute with an opened model file, and the device that has its weights.

model_file.py has what needs no computation, evaluating.py the methods that embed, rank and score texts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llamac.arguments import AUTO, KVDtype, Numerics, to_int
from llamac.engine.evaluating import Evaluating
from llamac.engine.memory import MIN_CONTEXT, MemoryLimit, MemoryPlan, MemoryUse, check_limit, memory_use, plan_memory
from llamac.engine.model_file import ModelFile
from llamac.engine.prompts.prompt_ids import ToolOptions, conversation_ids
from llamac.engine.rows import as_ids
from llamac.engine.sampling.params import SamplingOverrides, SamplingParams, request_params
from llamac.engine.session import Session
from llamac.engine.session_defaults import SessionDefaults
from llamac.engine.shared_set import SharedWeakSet
from llamac.engine.speculation.head import defaults_on_device
from llamac.errors import ArgumentError, DeviceError, ModelError, OutOfMemoryError, UnsupportedError, warn
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress, silent
from llamac.sizes import size_text
from llamac.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamac.engine.generation.output import Completion
    from llamac.engine.generation.stream import Stream
    from llamac.engine.inspection.explain import Explanation
    from llamac.engine.prompts.prompt_ids import ToolChoice
    from llamac.engine.session import Logits
    from llamac.gpu.device_model import DeviceModel
    from llamac.tools.functions import Tool
    from llamac.tools.message import Message


MAX_SEQUENCES = 65536  # of a session: SESSION_MAX_SEQUENCES of csrc/session.h


class Origin(NamedTuple):
    """The arguments with which a model was opened. Pickling stores them, and unpickling opens the model again."""

    load: Callable[..., Model]
    path: str
    options: dict[str, Any]


def _reopen(origin: Origin, file_id: str) -> Model:
    """Unpickle a model."""
    model = origin.load(origin.path, **origin.options)
    if model.file.id != file_id:
        model.close()
        raise ModelError(f"{origin.path} has changed since the model was pickled: load it again instead")
    return model


class Model(ModelFile, Evaluating):
    """An opened model. `llamac.load` makes one.

    A model is immutable, and any number of threads can use it. It is a context manager that closes the model. Pickling
    stores the arguments of `load`; unpickling, for example in a spawned process, opens the model again.
    """

    def __init__(
        self,
        file: FlatFile,
        session_defaults: SessionDefaults = SessionDefaults(),  # noqa: B008  immutable
        *,
        tokenizer: Tokenizer | None = None,
        opened_tokenizer: Tokenizer | None = None,
        owned_draft_model: Model | None = None,
        origin: Origin | None = None,
        max_memory: int | None = None,
        on_warning: Callable[[str], object] = warn,
        progress: Progress = silent,
    ) -> None:
        super().__init__(file, tokenizer=tokenizer, opened_tokenizer=opened_tokenizer, on_warning=on_warning)
        self._origin, self._on_warning = origin, on_warning
        self._owned_draft_model = owned_draft_model  # closed with this model
        self._session_defaults = session_defaults
        self._sessions: SharedWeakSet[Session] = SharedWeakSet()
        self._left_out: weakref.WeakSet[Model] = weakref.WeakSet()  # drafters that its device could not have
        self._memory = MemoryLimit(self, max_memory)
        self._device: DeviceModel | None = None
        if self._config["drafter"] != "none":  # it only computes in sessions of another model
            self._session_defaults = session_defaults._replace(device="cpu")
            return
        context = session_defaults.context
        if max_memory is not None:
            check_limit(self, max_memory, context)
            context = context or min(MIN_CONTEXT, self._config["context"])
        try:
            self.session(context=context, device="cpu").close()  # report unusable settings here, not at the first use
            self._session_defaults = defaults_on_device(self, session_defaults, progress)
        except BaseException:
            self._close_device()
            raise

    # ---- generating

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion:
        """Continue a prompt and return the whole result.

        Args:
            prompt: A str, which gets BOS if the model expects it; or token ids, which are used unchanged. An empty
                prompt stands for BOS.
            params: Sampling parameters.
            context: Positions for this generation. Default: as many as it can reach.
            overrides: Values that replace those of `params`: `generate(prompt, max_tokens=64, temperature=0)`.

        Raises:
            ContextFullError: If the prompt does not fit the context.
            ArgumentError: If an argument is out of range; `ArgumentTypeError` if its type is wrong.
        """
        from llamac.engine.generation.stream import complete_from_model

        return complete_from_model(self, prompt, request_params(params, overrides), context)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Stream:
        """Like `generate`, but return an iterator over pieces of text. Invalid requests raise here."""
        from llamac.engine.generation.stream import Stream, opened

        return Stream(*opened(self, prompt, request_params(params, overrides), context))

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
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion:
        """Answer a conversation with the model's chat template.

        The names of special tokens in messages and tools are ordinary text, so a message cannot end itself or
        impersonate another role.

        Args:
            messages: Dicts with `role`, `content` and any other keys that the template reads; or `Message` objects of
                earlier answers.
            params: Sampling parameters.
            tools: Tools that the model may call: Python functions, or dicts with JSON schemas in OpenAI's format.
            tool_choice: "auto": the model decides; "none": it gets no tools; "required": it must call at least one; a
                tool's name: it must call this tool. A guide forces required calls and makes arguments match schemas.
            parallel_tool_calls: Whether an answer can have several calls.
            tool_format: The format of tool calls (docs/tools.md). Default: derived from the model's chat template.
            template_options: Further keyword arguments of `ChatTemplate.render`, such as `{"enable_thinking": False}`.
            context: Positions for this generation. Default: as many as it can reach.
            overrides: Values that replace those of `params`.

        Raises:
            ChatTemplateError: If the template fails or refuses the messages.
            ContextFullError: If the conversation does not fit the context.
            ArgumentError: If an argument is out of range, a message has an unknown role, or the model has no chat
                template.
        """
        request, limit = request_params(params, overrides), self._context_limit(context)
        given = ToolOptions(tools, tool_choice, parallel_tool_calls, tool_format)
        ids, request = conversation_ids(self, messages, given, template_options, request, limit)
        return self.generate(ids, request, context=context)

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
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Stream:
        """Like `chat`, but return an iterator over pieces of text. Invalid requests raise here."""
        request, limit = request_params(params, overrides), self._context_limit(context)
        given = ToolOptions(tools, tool_choice, parallel_tool_calls, tool_format)
        ids, request = conversation_ids(self, messages, given, template_options, request, limit)
        return self.stream(ids, request, context=context)

    def explain(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        context: int | None = None,
        session: Session | None = None,
        generate: bool = True,
        **overrides: Unpack[SamplingOverrides],
    ) -> Explanation:
        """Explain a request: its tokens, why BOS was or was not added, which tokens are cached or cut, why it ended.

        Args:
            prompt: A str or token ids, as for `generate`; or messages, as for `chat`.
            params: Sampling parameters.
            tools: As for `chat`.
            template_options: As for `chat`.
            context: Positions. Default: those that `generate` would use.
            session: Run the request on sequence 0 of this session, and report the tokens that it already holds.
            generate: Whether to also generate the answer.
            overrides: Values that replace those of `params`.

        Raises:
            ChatTemplateError: If the template fails or refuses the messages.
            ArgumentError: If an argument is out of range. A prompt that does not fit is not an error here.
        """
        from llamac.engine.inspection.explain import explain

        return explain(
            self,
            prompt,
            request_params(params, overrides),
            tools=tools,
            template_options=template_options,
            context=context,
            session=session,
            generate=generate,
        )

    # ---- computing

    def session(
        self,
        *,
        context: int | None = None,
        sequences: int = 1,
        kv_dtype: KVDtype | None = None,
        threads: int | None = None,
        isa: str | None = None,
        draft_model: Model | None = None,
        numerics: Numerics | None = None,
        device: str | None = None,
    ) -> Session:
        """Open a session: sequences of tokens with their KV cache.

        Args:
            context: Positions per sequence. For all settings, the default is the argument of `load`, or the model's
                own value.
            sequences: Number of independent sequences.
            kv_dtype: Number format of the KV cache.
            threads: Threads per eval.
            isa: Kernel set.
            draft_model: A smaller model with the same vocabulary, for speculation: it makes generation faster and
                never changes its tokens. It must stay open as long as the session.
            numerics: How products round their inputs.
            device: The device to compute on, as for `load`. The first session on a device copies the weights there.

        Raises:
            ArgumentError: If a setting is out of range, or the draft model has another vocabulary.
            DeviceError: If the device does not exist or fails.
            OutOfMemoryError: If there is not enough memory.
        """
        return Session(
            self,
            context=context,
            sequences=sequences,
            kv_dtype=kv_dtype,
            threads=threads,
            isa=isa,
            draft_model=draft_model,
            numerics=numerics,
            device=device,
        )

    def _on_device(self, device: str, progress: Progress = silent) -> str:
        """Copy the weights to a device, once; return its name: for "auto" a device's or "cpu". Raises as `session`."""
        if device == "cpu":
            return device
        from llamac.gpu.device_model import DeviceModel
        from llamac.gpu.device_names import check_name

        name = check_name(device)
        least_kv = self._least_kv() if self._device is None else 0
        with self._lock:
            if self._device is None:
                try:
                    self._device = DeviceModel(self._file, "cuda:0" if name == AUTO else name, least_kv, progress)
                except (DeviceError, UnsupportedError, OutOfMemoryError) as error:
                    if name != AUTO:
                        raise
                    self._on_warning(f"computing on the CPU: {error}")
                    return "cpu"
            elif name not in (AUTO, self._device.name):
                raise ArgumentError(f"the model is on {self._device.name}: load it again for {name}")
            elif self._device.lost is not None:
                if name != AUTO:
                    raise self._device.lost_error()
                return "cpu"
            return self._device.name

    def _least_kv(self) -> int:
        """Bytes of the KV cache of one sequence: of the context of `load`, or of `MIN_CONTEXT` positions."""
        least = min(MIN_CONTEXT, self._config["context"])
        plan = plan_memory(self, None, least if self._session_defaults.context is None else self._context_limit(None))
        return max(plan.kv, plan.device_kv)

    @property
    def _working_device(self) -> DeviceModel | None:
        """The device, unless it has failed."""
        return self._device if self._lost is None else None

    @property
    def _lost(self) -> DeviceError | None:
        """Why the device can no longer be used; None if it can, or there is none."""
        return None if self._device is None else self._device.lost

    def _leave_device(self, failure: DeviceError) -> None:
        """Stop using the device, which has failed. Sessions for "auto" are on the CPU from now on."""
        assert self._device is not None
        kv = size_text(self._device.kv_bytes)
        if self._device.abandon(failure):
            self._on_warning(
                f"{self._device.name} has failed; computing on the CPU from now on. KV caches of {kv} are lost: "
                f"sessions recompute their tokens when they continue. {failure}"
            )

    def _close_device(self) -> None:
        if self._device is not None:
            self._device.close()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV caches of all sessions except those of MTP layers. Shared pages count once."""
        return self._core.kv_bytes()

    @property
    def kv_budget(self) -> int | None:
        """Maximum of `kv_bytes` in host memory, and of those on a device; None: no limit. Can be set at any time.

        An eval that needs more raises OutOfMemoryError and changes nothing.
        """
        return self._memory.budget

    @kv_budget.setter
    def kv_budget(self, budget: int | None) -> None:
        if budget is not None and to_int(budget, "kv_budget") < 1:
            raise ArgumentError(f"kv_budget is {budget}, expected at least 1 byte, or None for no limit")
        self._memory.kv_budget = budget
        self._memory.apply()

    @property
    def max_memory(self) -> int | None:
        """The `max_memory` of `load` in bytes, or None."""
        return self._memory.limit

    def plan_memory(
        self, *, context: int | None = None, sequences: int = 1, kv_dtype: KVDtype | None = None
    ) -> MemoryPlan:
        """Compute the maximum memory that sessions with these settings need, without allocating it.

        Args:
            context: Positions per sequence. Default: the argument of `load`, or the model's own value.
            sequences: Number of sequences.
            kv_dtype: Number format of the KV cache. Default: the argument of `load`, or llamac's default.

        Raises:
            ArgumentError: If a setting is out of range.
        """
        if not 1 <= to_int(sequences, "sequences") <= MAX_SEQUENCES:
            raise ArgumentError(f"sequences is {sequences}, expected 1 to {MAX_SEQUENCES}")
        return plan_memory(self, self.max_memory, self._context_limit(context), sequences, kv_dtype)

    def memory(self) -> MemoryUse:
        """Return the memory that the model and its sessions use now."""
        self._check_open()
        return memory_use(self)

    def _context_limit(self, context: int | None) -> int:
        """Return the context of a session: the argument, that of `load`, or the model's."""
        limit: int = self._config["context"]
        chosen = self._session_defaults.context if context is None else context
        if chosen is None:
            return limit
        if not 1 <= to_int(chosen, "context") <= limit:
            raise ArgumentError(f"context is {chosen}, expected 1 to {limit}")
        return to_int(chosen, "context")

    def _session_for(self, positions: int, context: int | None = None) -> Session:
        """Open a session for a request that can reach `positions` positions.

        An explicit context, here or in `load`, takes precedence. Otherwise the number of positions selects the RoPE
        table of a model that has two, as in transformers.
        """
        if context is None and self._session_defaults.context is None:
            context = min(max(1, positions), self._config["context"])
        return self.session(context=context)

    def logits(self, ids: Iterable[int]) -> Logits:
        """Compute the logits of every position of a sequence. BOS is not added.

        Args:
            ids: Token ids.

        Returns:
            Logits of shape (n, vocab_size), float32.

        Raises:
            ContextFullError: If the ids do not fit the context.
            ArgumentError: If an id is out of range.
        """
        tokens = as_ids(ids)
        with self._session_for(len(tokens)) as session:
            return session.eval(tokens, logits="all")

    # ---- life

    def __reduce__(self) -> tuple[Callable[[Origin, str], Model], tuple[Origin, str]]:
        self._check_open()
        if self._origin is None:
            raise TypeError("only models that llamac.load opened can be pickled")
        return _reopen, (self._origin, self._file.id)

    def close(self) -> None:
        """Close the model, its sessions and the file.

        Afterwards, methods raise ClosedError. Objects obtained before, such as `config` or a tokenizer, remain usable.

        Raises:
            BusyError: While another thread computes with a session or verifies the file.
        """
        self._file.check_idle()
        for session in self._sessions:
            session.close()
        self._close_device()
        if self._owned_draft_model is not None:
            self._owned_draft_model.close()
        self._file.close()
