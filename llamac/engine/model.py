"""A model: an opened flat file with its tokenizer and chat template, and the calls that run it."""

from __future__ import annotations

import copy
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from llamac.arguments import KVDtype, whole_number, wrong_type
from llamac.engine.closeable import Closeable
from llamac.engine.prompts import NO_TEMPLATE, conversation_ids, render_runs, tokenize_runs
from llamac.engine.rows import as_ids
from llamac.engine.sampling import SamplingOverrides, SamplingParams, recommended_params, request_params
from llamac.engine.session import Session
from llamac.errors import ArgumentError, ModelError, warn
from llamac.format.flatfile import FlatFile
from llamac.progress import Progress, shown
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamac.engine.embedding import Pooling
    from llamac.engine.generation import Stream
    from llamac.engine.output import Completion
    from llamac.engine.ranking import Ranked
    from llamac.engine.scoring import Score
    from llamac.engine.session import Logits
    from llamac.text.chat import ChatTemplate


class SessionDefaults(NamedTuple):
    """Settings of a model's sessions that do not choose their own, as for `Model.session`. None: llamac's default."""

    context: int | None = None
    kv_dtype: KVDtype | None = None
    threads: int | None = None
    isa: str | None = None


class Origin(NamedTuple):
    """The call that opened a model. Pickling stores it, unpickling repeats it."""

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


def _frozen(value: Any) -> Any:
    """A copy that cannot be changed: mappings become read-only, lists become tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _strings(value: object) -> dict[str, str]:
    """The entries of a metadata object that are strings. Other programs can write anything there."""
    entries = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)}


class Model(Closeable):
    """An opened model. `llamac.load` makes one.

    A model is immutable, and any number of threads can use it. As a context manager it closes itself. Pickling
    stores how it was opened; unpickling, in a spawned process for example, opens it again.
    """

    def __init__(
        self,
        file: FlatFile,
        session_defaults: SessionDefaults = SessionDefaults(),  # noqa: B008  immutable
        *,
        tokenizer: Tokenizer | None = None,
        opened_tokenizer: Tokenizer | None = None,
        origin: Origin | None = None,
        on_warning: Callable[[str], object] = warn,
    ) -> None:
        if not isinstance(file, FlatFile):
            raise wrong_type("file", file, "an opened FlatFile: open models with llamac.load(path)")
        self._file = file
        self._core = file.core
        self._config: Mapping[str, Any] = _frozen({k: v for k, v in file.config.items() if k != "reserved"})
        self._sampling_defaults = recommended_params(file.metadata, lambda text: on_warning(f"{file.path}: {text}"))
        self._origin = origin
        self._session_defaults = session_defaults
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._kv_budget: int | None = None
        self._special = SpecialTokens.from_config(self._config)
        self._n_token_ids: int = self._config["n_token_ids"]
        self._tokenizer = tokenizer or opened_tokenizer
        self._has_own_tokenizer = tokenizer is None
        self._lock = threading.Lock()
        if tokenizer is not None:
            self._replace_tokenizer(tokenizer)
        self.session().close()  # report unusable settings here, not at the first use

    def _replace_tokenizer(self, tokenizer: Tokenizer) -> None:
        size = self._config["vocab_size"]
        if tokenizer.n_ids > size:
            raise ArgumentError(
                f"the tokenizer has {tokenizer.n_ids} ids, but the model's vocabulary has {size}: they do not belong "
                "together"
            )
        self._n_token_ids = tokenizer.n_ids
        # the model still stops where it was trained to
        stop_ids = {*self._special.stop_ids, *tokenizer.special.stop_ids}
        self._special = replace(tokenizer.special, stop_ids=tuple(sorted(stop_ids)))

    # ---- facts

    @property
    def name(self) -> str:
        """The model's name, as its exporter wrote it."""
        return str(self._file.metadata.get("name", ""))

    @property
    def config(self) -> Mapping[str, Any]:
        """The file's config record (docs/format.md), read-only."""
        return self._config

    @property
    def metadata(self) -> dict[str, Any]:
        """A copy of the file's JSON metadata: name, architecture, dtype, source, ..."""
        return copy.deepcopy(self._file.metadata)

    @property
    def file(self) -> FlatFile:
        """The opened flat file."""
        return self._file

    @property
    def n_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self._file.sections["data"].bytes

    @property
    def n_token_ids(self) -> int:
        """Ids that have a token. The vocabulary can be padded beyond them; padding is never sampled."""
        return self._n_token_ids

    @property
    def special(self) -> SpecialTokens:
        """The rules for special tokens: the file's, or those of the tokenizer given to `load`."""
        return self._special

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a tokenizer, or `load` was given one."""
        return self._tokenizer is not None or self._file.sections["tokenizer"].bytes > 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read on first use.

        Raises:
            ArgumentError: If the model has none.
            TokenizerError: If it is damaged.
        """
        if not self.has_tokenizer:
            raise ArgumentError(
                "this model has no tokenizer: give token ids, or a tokenizer (`tokenizer=` of `load`, `llamac run -z`)"
            )
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_json(self._file.section("tokenizer"), self._special)
            return self._tokenizer

    @property
    def sampling_defaults(self) -> SamplingParams:
        """The sampling parameters that the model recommends, from its generation_config. Most models set only some."""
        return self._sampling_defaults

    @functools.cached_property
    def _multiply_adds(self) -> int:
        """Multiply-adds of a row with all matrices, including the embeddings, which are only looked up."""
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors if len(tensor.shape) == 2)

    @property
    def closed(self) -> bool:
        """Whether the model has been closed."""
        return self._core.closed

    def __repr__(self) -> str:
        metadata = self._file.metadata
        facts = [str(metadata[name]) for name in ("architecture", "dtype") if name in metadata]
        facts.insert(1, f"{_short(self.n_parameters)} parameters")
        return f"<llamac.Model {str(self._file.path)!r}: {', '.join(facts)}{', closed' if self.closed else ''}>"

    def __reduce__(self) -> tuple[Callable[[Origin, str], Model], tuple[Origin, str]]:
        self._check_open()
        if self._origin is None:
            raise TypeError("only models that llamac.load opened can be pickled")
        return _reopen, (self._origin, self._file.id)

    # ---- text and tokens

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Convert a prompt to token ids.

        Args:
            text: The prompt.
            add_special: Put BOS in front if the model wants it and the text does not begin with it. EOS is never added.
            parse_special: Turn the names of special tokens in the text into those tokens, as chat formats require.
        """
        self._check_open()
        ids = self.tokenizer.encode(text, parse_special=parse_special)
        bos = self._special.bos_id
        if add_special and self._special.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        """Convert token ids to text, without special tokens."""
        self._check_open()
        return self.tokenizer.decode(as_ids(ids))

    # ---- chat prompts

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat templates, or None."""
        from llamac.text.chat import ChatTemplate
        from llamac.text.template_files import DEFAULT

        self._check_open()
        metadata = self._file.metadata
        texts, tokens = _strings(metadata.get("chat_templates")), _strings(metadata.get("special_tokens"))
        if self._file.sections["template"].bytes:
            texts[DEFAULT] = self._file.text("template")
        if not texts:
            return None
        for name, token in (("bos_token", self._special.bos_id), ("eos_token", self._special.eos_id)):
            if self.has_tokenizer and token is not None and (name not in tokens or not self._has_own_tokenizer):
                tokens[name] = self.tokenizer.token_bytes(token).decode("utf-8", "replace")
        return ChatTemplate(texts, tokens)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Render messages to a prompt with the model's chat template.

        `generate` accepts it and does not double a BOS that the template wrote. It also turns the names of special
        tokens in messages into those tokens: use `chat` or `chat_ids` for messages that you did not write.

        Args:
            messages: The conversation.
            options: Keyword arguments of `ChatTemplate.render`.

        Raises:
            ArgumentError: If the model has no chat template.
            ChatTemplateError: If the template fails or refuses the messages.
        """
        if self.chat_template is None:
            raise ArgumentError(NO_TEMPLATE)
        return self.chat_template.render(messages, **options)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False, **options: Any
    ) -> list[int]:
        """Convert a conversation to token ids. BOS and EOS are only where the template wrote them.

        Args:
            messages: The conversation.
            parse_special: Also turn the names of special tokens in messages, tools and documents into those tokens.
                By default they are ordinary text, and a message cannot end itself or pose as another's.
            options: Keyword arguments of `ChatTemplate.render`.

        Raises:
            ArgumentError: If the model has no chat template.
            ChatTemplateError: If the template fails or refuses the messages.
        """
        if parse_special:
            return self.tokenize(self.chat_prompt(messages, **options), add_special=False)
        return tokenize_runs(self, render_runs(self, messages, options))

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
            prompt: A str, which gets BOS if the model wants it; or token ids, which are used unchanged. An empty prompt
                is BOS.
            params: Sampling parameters.
            context: Positions for this generation. Default: as many as it can reach.
            overrides: Values that replace those of `params`: `generate(prompt, max_tokens=64, temperature=0)`.

        Raises:
            ContextFullError: If the prompt does not fit the context.
            ArgumentError: If an argument is out of range; `ArgumentTypeError` if its type is wrong.
        """
        from llamac.engine.generation import run

        return run(self.stream(prompt, params, context=context, **overrides))

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Stream:
        """Like `generate`, as an iterator over pieces of text. Errors in the request are raised here."""
        from llamac.engine.generation import stream_from_model

        return stream_from_model(self, prompt, request_params(params, overrides), context)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Completion:
        """Answer a conversation with the model's chat template.

        The names of special tokens in messages and tools are ordinary text: a message cannot end itself or pose as
        another's.

        Args:
            messages: Dicts with `role` and `content`, and whatever else the template reads.
            params: Sampling parameters.
            tools: JSON schemas of functions.
            template_options: Further keyword arguments of `ChatTemplate.render`, such as `{"enable_thinking": False}`.
            context: Positions for this generation. Default: as many as it can reach.
            overrides: Values that replace those of `params`.

        Raises:
            ChatTemplateError: If the template fails or refuses the messages.
            ContextFullError: If the conversation does not fit the context.
            ArgumentError: If an argument is out of range, or the model has no chat template.
        """
        from llamac.engine.generation import run

        stream = self.chat_stream(
            messages, params, tools=tools, template_options=template_options, context=context, **overrides
        )
        return run(stream)

    def chat_stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        context: int | None = None,
        **overrides: Unpack[SamplingOverrides],
    ) -> Stream:
        """Like `chat`, as an iterator over pieces of text."""
        ids = conversation_ids(self, messages, tools, template_options, self._context_limit(context))
        return self.stream(ids, params, context=context, **overrides)

    # ---- computing

    def session(
        self,
        *,
        context: int | None = None,
        sequences: int = 1,
        kv_dtype: KVDtype | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> Session:
        """Open a session, which holds sequences of tokens with their KV cache.

        Args:
            context: Positions per sequence. For all settings, the default is the argument of `load`, else the model's
                own value.
            sequences: Number of independent sequences.
            kv_dtype: Number format of the KV cache.
            threads: Threads per eval.
            isa: Kernel set.

        Raises:
            ArgumentError: If a setting is out of range.
            OutOfMemoryError: If there is not enough memory.
        """
        return Session(self, context=context, sequences=sequences, kv_dtype=kv_dtype, threads=threads, isa=isa)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV caches of all sessions hold. Pages that sequences share count once."""
        return self._core.kv_bytes()

    @property
    def kv_budget(self) -> int | None:
        """Most bytes that the KV caches of all sessions may hold together; None: no limit. Can be set at any time.

        An eval that needs more raises OutOfMemoryError and changes nothing.
        """
        return self._kv_budget

    @kv_budget.setter
    def kv_budget(self, budget: int | None) -> None:
        if budget is not None and whole_number(budget, "kv_budget") < 1:
            raise ArgumentError(f"kv_budget is {budget}, expected at least 1 byte, or None for no limit")
        self._core.set_kv_budget(budget or 0)
        self._kv_budget = budget

    def _context_limit(self, context: int | None) -> int:
        """The context of a session: the argument, else that of `load`, else the model's."""
        limit: int = self._config["context"]
        chosen = self._session_defaults.context if context is None else context
        if chosen is None:
            return limit
        if not 1 <= whole_number(chosen, "context") <= limit:
            raise ArgumentError(f"context is {chosen}, expected 1 to {limit}")
        return whole_number(chosen, "context")

    def _session_for(self, positions: int, context: int | None = None) -> Session:
        """A session for a request that can reach `positions` positions.

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

    # ---- vectors and probabilities of texts

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        parse_special: bool = False,
        progress: bool | Progress = False,
    ) -> Logits:
        """Compute an embedding of each text: the output norm of its tokens, pooled. The texts are computed together.

        Args:
            texts: A text, or a list of texts. BOS and EOS are added where the model's rules put them.
            pooling: "last": the last token; "mean": the mean over all tokens. Default: what the file says, else "last".
            normalize: Whether to scale each embedding to length 1.
            dimensions: Keep only so many leading numbers, before the scaling: for models trained for that.
            parse_special: As for `tokenize`.
            progress: True shows a bar on standard error. A callback is called as `llamac.progress.Progress` says.

        Returns:
            Shape (dimensions,) for one text, (n, dimensions) for a list; float32. The bits do not depend on the other
            texts.

        Raises:
            ContextFullError: If a text does not fit the context.
            ArgumentError: If an argument is out of range, or the model has no tokenizer.
        """
        from llamac.engine.embedding import embed

        with shown(progress) as report:
            return embed(self, texts, pooling, normalize, dimensions, parse_special, report)

    def rerank(
        self, query: str, documents: Sequence[str], *, task: str | None = None, progress: bool | Progress = False
    ) -> list[Ranked]:
        """Rank documents by their relevance to a query, with a model trained for it such as Qwen3-Reranker.

        The chat template renders the query and a document, and the model answers "yes" or "no". What the documents'
        prompts share is computed once.

        Args:
            query: The query.
            documents: The documents.
            task: What the query asks for. Default: that of a web search, in Qwen3-Reranker's words.
            progress: As for `embed`.

        Returns:
            The documents with their scores, the best first.

        Raises:
            ContextFullError: If a document does not fit the context with the query.
            UnsupportedError: If the vocabulary lacks "yes" or "no".
            ArgumentError: If the model has no chat template or no tokenizer.
        """
        from llamac.engine.ranking import rerank

        with shown(progress) as report:
            return rerank(self, query, documents, task, report)

    def score(self, prompt: str | Sequence[int], continuations: Sequence[str | Sequence[int]]) -> list[Score]:
        """Compute the probabilities of continuations of a prompt, which is computed once.

        Args:
            prompt: A str, which gets BOS if the model wants it; or token ids, which are used unchanged. White space at
                the end of a str counts as the start of the continuations.
            continuations: Texts if the prompt is one, else token ids.

        Raises:
            ContextFullError: If a continuation does not fit the context with the prompt.
            ArgumentError: If a continuation has no tokens.
        """
        from llamac.engine.scoring import score

        return score(self, prompt, continuations)

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        stride: int | None = None,
        context: int | None = None,
        progress: bool | Progress = False,
    ) -> float:
        """Compute the perplexity of a text: exp of the mean negative log-probability of its tokens.

        A text longer than the context is covered by windows. Each token is scored once, by the first window that
        contains it; the first token of the text is not scored.

        Args:
            text: A str, which gets BOS if the model wants it; or at least two token ids.
            stride: Tokens from the start of one window to that of the next. Smaller values give each token more
                context and take longer. Default: the context, so that windows do not overlap.
            context: Tokens of a window. Default: that of `load`, else the model's.
            progress: As for `embed`.

        Raises:
            ArgumentError: If an argument is out of range.
        """
        from llamac.engine.scoring import perplexity

        ids = as_ids(self.tokenize(text) if isinstance(text, str) else text)
        with shown(progress) as report:
            return perplexity(self, ids, stride=stride, context=context, report=report)

    # ---- life

    def close(self) -> None:
        """Close the model, its sessions and the file.

        Methods raise ClosedError from then on. Values that were read before remain usable: `config`, `special`, a
        tokenizer.

        Raises:
            BusyError: While another thread computes with a session or verifies the file.
        """
        self._file.check_idle()
        for session in list(self._sessions):
            session.close()
        self._file.close()


def _short(number: int) -> str:
    """A count with three digits: 2.61M."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
