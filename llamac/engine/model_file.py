"""An opened model file: its configuration, tokenizer and chat template."""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llamac.arguments import wrong_type
from llamac.engine.closeable import Closeable
from llamac.engine.prompts.prompt_ids import NO_TEMPLATE, render_runs, template_arguments, tokenize_runs
from llamac.engine.rows import as_ids
from llamac.engine.sampling.params import SamplingParams, recommended_params
from llamac.engine.work import multiply_adds
from llamac.errors import ArgumentError, UnsupportedError, warn
from llamac.format.flatfile import FlatFile
from llamac.text.special_tokens import SpecialTokens
from llamac.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llamac.text.chat import ChatTemplate
    from llamac.tools.formats import Format
    from llamac.tools.message import Message


def _frozen(value: Any) -> Any:
    """Return an immutable copy: mappings become read-only, lists become tuples."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _strings(value: object) -> dict[str, str]:
    """Return the entries of a metadata object that are strings. Other programs can write anything there."""
    entries = value.items() if isinstance(value, dict) else ()
    return {name: text for name, text in entries if isinstance(name, str) and isinstance(text, str)}


class ModelFile(Closeable):
    """A model file that is open for reading: the model's properties, and the conversion between text and tokens.

    `Model` adds the calls that compute.
    """

    def __init__(
        self,
        file: FlatFile,
        *,
        tokenizer: Tokenizer | None,
        opened_tokenizer: Tokenizer | None,
        on_warning: Callable[[str], object] = warn,
    ) -> None:
        """Read the file's records.

        Args:
            file: The file.
            tokenizer: Replaces the file's tokenizer.
            opened_tokenizer: The file's tokenizer, if it has been opened already.
            on_warning: Called with a message for each recommended setting that cannot be used.
        """
        if not isinstance(file, FlatFile):
            raise wrong_type("file", file, "an opened FlatFile: open models with llamac.load(path)")
        self._file = file
        self._core = file.core
        self._config: Mapping[str, Any] = _frozen({k: v for k, v in file.config.items() if k != "reserved"})
        self._sampling_defaults = recommended_params(file.metadata, lambda text: on_warning(f"{file.path}: {text}"))
        self._special = SpecialTokens.from_file(file)
        self._n_token_ids: int = self._config["n_token_ids"]
        self._tokenizer = tokenizer or opened_tokenizer
        self._has_own_tokenizer = tokenizer is None
        self._template: str | None = None
        self._lock = threading.Lock()
        if tokenizer is not None:
            self._replace_tokenizer(tokenizer)

    def _replace_tokenizer(self, tokenizer: Tokenizer) -> None:
        size = self._config["vocab_size"]
        if tokenizer.n_ids > size:
            raise ArgumentError(
                f"the tokenizer has {tokenizer.n_ids} ids, but the model's vocabulary has {size}: they do not belong "
                "together"
            )
        self._n_token_ids = tokenizer.n_ids
        # keep the model's stop tokens, which it was trained to emit
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
        """The number of parameters in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self._file.tensors)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self._file.sections["data"].bytes

    @property
    def n_token_ids(self) -> int:
        """The number of ids that have a token. The vocabulary can be padded beyond them; padding is never sampled."""
        return self._n_token_ids

    @property
    def special(self) -> SpecialTokens:
        """The rules for special tokens, from the file or from the `tokenizer` of `load`."""
        return self._special

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a tokenizer or `load` got one."""
        return self._tokenizer is not None or self._file.sections["tokenizer"].bytes > 0

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read on first use.

        Raises:
            ArgumentError: If the model has no tokenizer.
            UnsupportedError: If it is a drafter, which has none.
            TokenizerError: If the tokenizer is damaged.
        """
        if not self.has_tokenizer and self._config["drafter"] != "none":
            raise UnsupportedError(
                "the model is a drafter, which cannot run alone: open the model that it drafts for, with this one"
                " as its draft_model (--draft)"
            )
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

    def _adapt(self, sampling: SamplingParams, template: str | None) -> None:
        """Override the file's recommendations before the model is used.

        Args:
            sampling: Parameters that override the file's where they are set.
            template: A chat template, or None for the file's.
        """
        set_ones = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
        self._sampling_defaults = self._sampling_defaults.updated(set_ones)
        self._template = template

    @functools.cached_property
    def _multiply_adds(self) -> int:
        """Multiply-adds of a row with all matrices, including the embeddings."""
        return multiply_adds(self._file.tensors)

    @property
    def closed(self) -> bool:
        """Whether the model has been closed."""
        return self._core.closed

    def __repr__(self) -> str:
        metadata = self._file.metadata
        facts = [str(metadata[name]) for name in ("architecture", "dtype") if name in metadata]
        facts.insert(1, f"{_short(self.n_parameters)} parameters")
        return f"<llamac.Model {str(self._file.path)!r}: {', '.join(facts)}{', closed' if self.closed else ''}>"

    # ---- text and tokens

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Convert a prompt to token ids.

        Args:
            text: The prompt.
            add_special: Add BOS if the model expects it and the text does not begin with it. EOS is never added.
            parse_special: Turn the names of special tokens in the text into those tokens, as chat formats require.

        Raises:
            ArgumentError: If the model has no tokenizer.
            TokenizerError: If the tokenizer cannot encode the text.
        """
        self._check_open()
        ids = self.tokenizer.encode(text, parse_special=parse_special)
        bos = self._special.bos_id
        if add_special and self._special.add_bos and bos is not None and ids[:1] != [bos]:
            ids[:0] = self._special.front
        return ids

    def detokenize(self, ids: Iterable[int]) -> str:
        """Convert token ids to text, without special tokens.

        Raises:
            ArgumentError: If an id does not exist, or the model has no tokenizer.
        """
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
        if self._template is not None:
            texts = {DEFAULT: self._template}
        elif self._file.sections["template"].bytes:
            texts[DEFAULT] = self._file.text("template")
        if not texts:
            return None
        for name, token in (("bos_token", self._special.bos_id), ("eos_token", self._special.eos_id)):
            if self.has_tokenizer and token is not None and (name not in tokens or not self._has_own_tokenizer):
                tokens[name] = self.tokenizer.token_bytes(token).decode("utf-8", "replace")
        return ChatTemplate(texts, tokens)

    @functools.cached_property
    def response_format(self) -> Format | None:
        """The format of answers that the checkpoint specifies (`response_template`), or None."""
        from llamac.tools.response_template import read_response_template

        spec = self._file.metadata.get("response_template")
        if spec is None:
            return None
        try:
            return read_response_template(spec)
        except UnsupportedError as error:
            warn(f"{self._file.path}: {error}; the format of answers is guessed from the chat template")
            return None

    @property
    def tool_format(self) -> str | None:
        """The name of the format of tool calls; None if unknown."""
        from llamac.tools.formats import detect

        template = self.chat_template
        if template is None:
            return None
        found = self.response_format or detect("\n".join(template.templates.values()))
        return None if found is None else found.name

    def chat_prompt(self, messages: Sequence[Mapping[str, Any] | Message], **options: Any) -> str:
        """Render messages to a prompt with the model's chat template.

        `generate` accepts this text and does not add a second BOS. It also turns the names of special tokens in
        messages into those tokens: use `chat` or `chat_ids` for messages that you did not write.

        Args:
            messages: The conversation.
            options: Keyword arguments of `ChatTemplate.render`.

        Raises:
            ArgumentError: If the model has no chat template, or a message has an unknown role.
            ChatTemplateError: If the template fails or refuses the messages.
        """
        if self.chat_template is None:
            raise ArgumentError(NO_TEMPLATE)
        chat, given = template_arguments(self, messages, options)
        return self.chat_template.render(chat, **given)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any] | Message], *, parse_special: bool = False, **options: Any
    ) -> list[int]:
        """Convert a conversation to token ids. BOS and EOS are only where the template wrote them.

        Args:
            messages: The conversation.
            parse_special: Also turn the names of special tokens in messages, tools and documents into those tokens.
                By default they are ordinary text, so a message cannot end itself or impersonate another role.
            options: Keyword arguments of `ChatTemplate.render`.

        Raises:
            ArgumentError: If the model has no chat template, or a message has an unknown role.
            ChatTemplateError: If the template fails or refuses the messages.
        """
        if parse_special:
            return self.tokenize(self.chat_prompt(messages, **options), add_special=False)
        return tokenize_runs(self, render_runs(self, messages, options))

    def prepare_guides(self) -> None:
        """Build the tables for guides now instead of at the first guided request.

        llguidance holds the GIL during this call, for about a second with 262,000 tokens, and no other Python thread
        runs. A program that serves requests should call this at startup.

        Raises:
            ArgumentError: If the model has no tokenizer.
            UnsupportedError: If llguidance is not installed, or the tokenizer does not work with guides.
        """
        from llamac.guided.vocabulary import vocabulary_of

        vocabulary_of(self.tokenizer)


def _short(number: int) -> str:
    """Format a count with three digits: 2.61M."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)
