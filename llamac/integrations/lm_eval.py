"""A model class of lm-evaluation-harness: `python -m llamac.integrations.lm_eval --model llamac ...`.

Results equal those of the harness's own `hf` model on the same checkpoint, up to rounding.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from llamac.arguments import DEFAULT_SEQUENCES, unexpected_argument
from llamac.engine.batching.engine import MAX_SEQUENCES, Engine
from llamac.engine.scoring.scores import Span, score_spans
from llamac.errors import ArgumentError
from llamac.progress import bars, silent
from llamac.sources.loading import load

MAX_GENERATED = 256  # tokens of a generation that does not say how many, as of the model `hf`
ARGUMENTS = ("path", "max_length", "add_bos_token", "batch_size", "threads", "kv_dtype", "numerics", "device")


@register_model("llamac")
class LlamacLM(TemplateLM):  # type: ignore[misc]  # the harness is not typed
    """A llamac model for `lm_eval.simple_evaluate(model=LlamacLM("model.bin"), tasks=[...])`."""

    def __init__(
        self,
        path: str,
        *,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str = 16,
        threads: int | None = None,
        kv_dtype: Any = None,
        numerics: Any = "exact",
        device: str | None = None,
        max_batch_size: object = None,
        trust_remote_code: object = None,
        **unknown: object,
    ) -> None:
        """Open a model.

        Args:
            path: Whatever `llamac.load` opens.
            max_length: Positions of the context. Default: the model's.
            add_bos_token: Whether prompts begin with BOS. Default: the model's own rule.
            batch_size: Generations that are computed at a time. "auto" is 16, more than 256 are 256.
            threads: As for `llamac.load`.
            kv_dtype: As for `llamac.load`.
            numerics: As for `llamac.load`.
            device: As for `llamac.load`. It is the harness's --device.
            max_batch_size: The harness passes it; it means nothing here.
            trust_remote_code: The harness passes it; it means nothing here.
            unknown: Other arguments are refused.

        Raises:
            ArgumentError: If `batch_size` is wrong.
            ArgumentTypeError: If there is no such argument.
        """
        if unknown:
            raise unexpected_argument(next(iter(unknown)), ARGUMENTS)
        super().__init__()
        self._batch_size = sequences_of(batch_size)
        self._model = load(path, threads=threads, kv_dtype=kv_dtype, numerics=numerics, device=device or "cpu")
        self._path = path
        self._max_length: int = self._model._context_limit(max_length)
        self._add_bos = self._model.special.add_bos if add_bos_token is None else bool(add_bos_token)

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    # ---- tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        eos = self._model.special.eos_id
        if eos is None:
            raise ValueError("the model has no EOS token")
        return eos

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has nothing before it."""
        bos = self._model.special.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Positions of the context."""
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's caches of chat prompts."""
        return self._path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Convert text to ids. BOS is added if the model's rule requires it, and never twice."""
        ids = self._model.tokenizer.encode(string, parse_special=True)
        bos = self._model.special.bos_id
        add_bos = self._add_bos if add_special_tokens is None else add_special_tokens and self._model.special.add_bos
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids[:0] = self._model.special.front
        return ids

    # ---- probabilities

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        spans = []
        for _, context, continuation in requests:
            if len(continuation) > self._max_length:
                raise ArgumentError(
                    f"a continuation has {len(continuation)} tokens, but the context holds {self._max_length} "
                    "(max_length): enlarge max_length if the model allows it, or leave out the request"
                )
            ids = array("i", (context + continuation)[-(self._max_length + 1) :])
            spans.append(Span(ids, len(ids) - len(continuation)))
        with silent_or_bars(disable_tqdm) as report:
            scored = score_spans(self._model, spans, report=report)
        results = [(float(found.logprobs.sum()), bool(found.is_best.all())) for found in scored]
        for request, result in zip(requests, results, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows of the context."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for i, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            )
            for window in rolling:
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # ---- generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate for each (prompt, settings), up to a stop string."""
        texts: list[str] = []
        with Engine(
            self._model, max_sequences=self._batch_size, context=self._max_length, max_queue=max(1, len(requests))
        ) as engine:
            waiting = []
            for request in requests:
                prompt, given = request.args
                settings = normalize_gen_kwargs(dict(given), MAX_GENERATED)
                stop = [text for text in settings.pop("until", None) or () if text]
                most = settings.pop("max_gen_toks")
                if most >= self._max_length:
                    raise ArgumentError(
                        f"a request asks for {most} new tokens (max_gen_toks), but prompt and text share a context of "
                        f"{self._max_length} (max_length): ask for at most {self._max_length - 1}, or enlarge "
                        "max_length if the model allows it"
                    )
                ids = self.tok_encode(prompt)[-(self._max_length - most) :]
                waiting.append(engine.submit(ids, max_tokens=most, stop=stop, **sampling(settings)))
            with silent_or_bars(disable_tqdm) as report:
                for request, running in zip(requests, waiting, strict=True):
                    result = running.result()
                    # the harness wants bytes of an incomplete last character as U+FFFD
                    is_cut = result.finish_reason != "stop"
                    texts.append(self._model.detokenize(result.tokens) if is_cut else result.text)
                    report("generating", len(texts), len(requests))
                    self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages with the model's chat template."""
        options = {"add_generation_prompt": add_generation_prompt}
        if not add_generation_prompt:
            options["continue_final_message"] = True
        return self._model.chat_prompt(chat_history, **options)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that `apply_chat_template` renders; the harness stores its hash."""
        return self._model.file.text("template") if chat_template else None


def sequences_of(batch_size: int | str) -> int:
    """How many generations are computed at a time. The number does not change the results."""
    text = str(batch_size)
    if text.startswith("auto"):
        return DEFAULT_SEQUENCES
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"batch_size is {batch_size!r}, expected at least 1, or 'auto'")
    return min(int(text), MAX_SEQUENCES)


def silent_or_bars(is_silent: bool) -> Any:
    """A context with a callback for progress."""
    return contextlib.nullcontext(silent) if is_silent else bars()


def sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's settings of a generation as ours. Without `do_sample` it is greedy."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    chosen = {name: settings[name] for name in names if settings.get(name) is not None}
    if not settings.get("do_sample"):
        chosen["temperature"] = 0
    return chosen


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
