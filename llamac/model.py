"""A model: an opened flat file, and what can be done with it."""

from __future__ import annotations

import functools
import math
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llamac.arguments import Adapter, file_path
from llamac.errors import ArgumentError, ClosedError, UnsupportedError
from llamac.flatfile import FlatFile
from llamac.interrupt import in_main_thread, interruptible
from llamac.progress import Progress, silent
from llamac.session import Session, as_ids
from llamac.sources import open_adapted
from llamac.tokenizer import LONG_TEXT, SpecialTokens, Tokenizer

if TYPE_CHECKING:
    from llamac.chat import ChatTemplate
    from llamac.generation import Completion, Stream
    from llamac.session import Logits


def load(
    path: str | Path | None = None,
    *,
    device: str = "cpu",
    context: int | None = None,
    kv: str | None = None,
    threads: int | None = None,
    isa: str | None = None,
    tokenizer: str | Path | None = None,
    lora: Adapter | Iterable[Adapter] = (),
    memory: str = "map",
    dtype: str | None = None,
    cache: bool | str | Path = True,
    progress: Progress | None = None,
) -> Model:
    """Opens a model; without a path the built-in one. Reads its file's header and tables and maps the rest.

    path: a flat file, the name of a built-in model (`llamac.models.NAMES`) where there is no file of that name, or
    anything else that `llamac.export.export` reads: a Hugging Face directory, a GGUF file, a llama2.c file, or
    "hf:org/name". What is no flat file is converted once; the result is kept in a cache and mapped from then on.

    context, kv, threads and isa are what the model's sessions use unless they are told otherwise:
    context: positions per sequence (default: what a request can reach, for `session` the model's). kv: number format of
    the KV cache, "f32" or "f16" (default: f32 for f32 files, else f16). threads: default from affinity, cgroup quota
    and physical cores, see `llamac inspect`. isa: a kernel set that `llamac inspect` lists (default: the environment
    variable LLAMAC_ISA, else the best of this machine).
    tokenizer: a tokenizer file or directory to use instead of the file's own, of any kind that `llamac export` reads.
    lora: adapters that are added to the weights' products: PEFT directories, or pairs of one and its strength.
    memory: "map" reads weights when they are first needed; "populate" reads them all now; "huge" does so and asks the
    kernel for huge pages. Processes share one copy in each case.
    dtype: of the matrices of what is converted, as `export` has it (default: what keeps the source's quality); a flat
    file of another dtype is converted, too. cache: False converts to a temporary file that is gone when the model is
    closed; a folder is used instead of the usual one. progress: is told of the way of a download and a conversion, as
    `export`'s. What the user should know of a conversion is a Python warning.

    Raises FileNotFoundError, or ModelError if the file is damaged or no llamac file (the message says what to do).
    """
    if device != "cpu":
        raise UnsupportedError(f"device is {device!r}: this version computes on 'cpu' only")
    told: list[str] = []
    model = load_with(
        tokenizer,
        {"context": context, "kv": kv, "threads": threads, "isa": isa},
        source=path,
        lora=lora,
        memory=memory,
        dtype=dtype,
        cache=cache,
        progress=progress or silent,
        warn=told.append,
    )
    for text in told:
        warnings.warn(text, stacklevel=2)
    return model


def load_with(tokenizer: str | Path | None, settings: dict[str, Any], **options: Any) -> Model:
    """A model of any source. tokenizer: another one than its own, if any. settings: the sessions', as `load` has them.
    options: `open_adapted`'s."""
    other = Tokenizer.from_file(file_path(tokenizer, "tokenizer")) if tokenizer is not None else None
    file = open_adapted(other_tokenizer=other is not None, **options)
    try:
        return Model(file, tokenizer=other, **settings)
    except BaseException:
        file.close()
        raise


def _texts(value: object) -> dict[str, str]:
    """The texts by name that an entry of the metadata holds; other programs may write something else there."""
    entries = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)}


class Model:
    """An opened model; immutable, may be used by many threads at once. A context manager.

    config: the file's config record as a dict (docs/format.md). file: the flat file itself. special: the rules for
    special tokens, n_token_ids: the ids that have a token; both are the file's, or of the tokenizer given to `load`.
    """

    def __init__(
        self,
        file: FlatFile,
        *,
        context: int | None = None,
        kv: str | None = None,
        threads: int | None = None,
        isa: str | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.file = file
        self.config: dict[str, Any] = file.config
        self.weight_bytes: int = file.sections["data"].bytes
        self._defaults = {"context": context, "kv": kv, "threads": threads, "isa": isa}
        self._core = file.core
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self.special = SpecialTokens.from_config(self.config)
        self.n_token_ids: int = self.config["n_token_ids"]
        self._tokenizer = tokenizer
        self._tokenizer_given = tokenizer is not None
        self._lock = threading.Lock()
        if tokenizer is not None:
            self._use_other_tokenizer(tokenizer)
        # a session is made and thrown away, so that unusable settings are reported here and not at the first use
        self.session().close()

    def _use_other_tokenizer(self, tokenizer: Tokenizer) -> None:
        size = self.config["vocab_size"]
        if tokenizer.n_ids > size:
            raise ArgumentError(
                f"the tokenizer has {tokenizer.n_ids} ids, but the model's vocabulary has {size}: "
                "they do not belong together"
            )
        self.n_token_ids = tokenizer.n_ids
        # where the model was trained to stop stays true
        stop_ids = {*self.special.stop_ids, *tokenizer.special.stop_ids}
        self.special = replace(tokenizer.special, stop_ids=tuple(sorted(stop_ids)))

    # ---- facts

    @property
    def name(self) -> str:
        """The model's name as its exporter wrote it."""
        return str(self.metadata.get("name", ""))

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's JSON metadata: name, architecture, where it came from."""
        return self.file.metadata

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer: the file's own, or the one given to `load`."""
        return self._tokenizer is not None or self.file.sections["tokenizer"].bytes > 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read at the first use. ArgumentError if the file has none."""
        if not self.has_tokenizer:
            raise ArgumentError(
                "this model has no tokenizer: give token ids, or another tokenizer (`run -z`, tokenizer= of `load`)"
            )
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = Tokenizer.from_json(self.file.section("tokenizer"), self.special)
            return self._tokenizer

    @functools.cached_property
    def _multiply_adds(self) -> int:
        """Multiply-adds of a row with all matrices, those that are only looked up in included."""
        return sum(math.prod(tensor.shape) for tensor in self.file.tensors if len(tensor.shape) == 2)

    @property
    def closed(self) -> bool:
        """Whether the model has been closed."""
        return self._core.closed

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<llamac.Model {str(self.file.path)!r}, {self.weight_bytes / 1e6:.1f} MB{state}>"

    # ---- text and tokens

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a prompt.

        add_special: with BOS (and never EOS) by the model's rule, exactly once. parse_special: names of special tokens
        in it become those tokens, as prompts that follow a chat format need it.
        """
        self._check_open()
        tokenizer = self.tokenizer
        if isinstance(text, str) and len(text) >= LONG_TEXT and in_main_thread():
            ids = interruptible(lambda: tokenizer.encode(text, parse_special=parse_special), None)
        else:
            ids = tokenizer.encode(text, parse_special=parse_special)
        bos = self.special.bos_id
        if add_special and self.special.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        self._check_open()
        return self.tokenizer.decode(as_ids(ids))

    # ---- chat

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat templates, or None if it has none."""
        from llamac.chat import DEFAULT, ChatTemplate

        self._check_open()
        texts, tokens = _texts(self.metadata.get("chat_templates")), _texts(self.metadata.get("special_tokens"))
        if self.file.sections["template"].bytes:
            texts[DEFAULT] = self.file.text("template")
        if not texts:
            return None
        for name, token in (("bos_token", self.special.bos_id), ("eos_token", self.special.eos_id)):
            if self.has_tokenizer and token is not None and (name not in tokens or self._tokenizer_given):
                tokens[name] = self.tokenizer.token_bytes(token).decode("utf-8", "replace")
        return ChatTemplate(texts, tokens)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt that the model's chat template makes of messages; options are those of `ChatTemplate.render`.

        ArgumentError if the model has no chat template. `generate` and `stream` take the text as it is: a BOS that the
        template wrote is not doubled.
        """
        if self.chat_template is None:
            raise ArgumentError("this model has no chat template: give a prompt in the form that it was trained on")
        return self.chat_template.render(messages, **options)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False, **options: Any
    ) -> list[int]:
        """Token ids of `chat_prompt`: BOS and EOS are there where the template wrote them, and nowhere else.

        parse_special: names of special tokens in messages, tools and documents become those tokens, too; otherwise
        they are text, and nobody can end a message by what it says.
        """
        if parse_special:
            return self.tokenize(self.chat_prompt(messages, **options), add_special=False)
        from llamac.chat import plain_inputs
        from llamac.chat_marks import Marks

        given = plain_inputs({"messages": messages, **options})
        marks = Marks(self.tokenizer.special_names)
        marked = {name: marks.put(value) for name, value in given.items()}
        text = self.chat_prompt(**{"messages": messages, **options, **marked})
        runs = [
            self.tokenize(run, add_special=False, parse_special=special) for run, special in marks.runs(text) if run
        ]
        return [token for run in runs for token in run]

    # ---- computing

    def session(
        self,
        *,
        context: int | None = None,
        sequences: int = 1,
        kv: str | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> Session:
        """A session with `sequences` sequences of up to `context` positions. Settings left out are those of `load`."""
        asked = {"context": context, "kv": kv, "threads": threads, "isa": isa}
        settings = {name: self._defaults[name] if value is None else value for name, value in asked.items()}
        session = Session(self, sequences=sequences, **settings)  # type: ignore[arg-type]  # a dict of mixed types
        self._sessions.add(session)
        return session

    def _session_for(self, positions: int, context: int | None = None) -> Session:
        """A session for a request that can reach so many positions, as far as the model has them: a model with two RoPE
        tables then takes the one that transformers would take. A context that was given, here or to `load`, decides."""
        if context is None and self._defaults["context"] is None:
            context = min(max(1, positions), self.config["context"])
        return self.session(context=context)

    def logits(self, ids: Iterable[int]) -> Logits:
        """Logits of every position of a sequence of token ids, shape (n, vocab_size), float32. No BOS is added."""
        tokens = as_ids(ids)
        with self._session_for(len(tokens)) as session:
            logits = session.eval(tokens, logits="all")
        assert logits is not None
        return logits

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        context: int | None = None,
    ) -> Completion:
        """Continues a prompt (text, or token ids as they are) and returns the whole result.

        max_tokens: new tokens at most (default: until a stop or the end of the context). temperature: 0 takes the most
        probable token; otherwise logits are divided by it, then top_k (0: off) keeps the k most probable tokens, top_p
        (1: off) the fewest that together reach that probability, min_p (0: off) those at least so probable relative to
        the best, in this order. seed: the draw at a position depends on it and on the position only; None takes a
        random one, told in the result. stop: texts that end the generation and are not part of it. Raises
        ContextFullError if the prompt does not fit.
        """
        stream = self.stream(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop,
            context=context,
        )
        with stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        context: int | None = None,
    ) -> Stream:
        """Like `generate`, but an iterator over pieces of text; its `completion` holds the result when it has ended."""
        from llamac.generation import Settings, start

        return start(self, prompt, Settings(max_tokens, temperature, top_k, top_p, min_p, seed, stop), context)

    # ---- life

    def close(self) -> None:
        """Closes the model, its sessions and the file. BusyError while a session computes in another thread.

        Its methods then raise ClosedError. What was read before is a value and stays: `config`, `special`, a tokenizer.
        """
        for session in list(self._sessions):
            session.close()
        self.file.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the model is closed")

    def __enter__(self) -> Model:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
