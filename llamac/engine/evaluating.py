"""The methods of a model that compute vectors and probabilities of texts, which wrap the functions in scoring/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from llamac.progress import Progress, shown

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.scoring.cancellation import Cancellation
    from llamac.engine.scoring.embedding import Texts
    from llamac.engine.scoring.pooled import Pooling
    from llamac.engine.scoring.ranking import Ranked
    from llamac.engine.scoring.scores import Score
    from llamac.engine.session import Logits


class Evaluating:
    """A mixin with the methods of `Model` that embed, rank and score texts."""

    def embed(
        self,
        texts: Texts,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        parse_special: bool = False,
        progress: bool | Progress = False,
        cancel: Cancellation | None = None,
    ) -> Logits:
        """Compute an embedding of each text: the output norm of its tokens, pooled.

        Args:
            texts: A text, or a list of texts, which get BOS and EOS by the model's rules; or token ids, as they are.
            prompt_name: The model's prompt, such as "query", that precedes each text. Default: the files' default.
            prompt: A text that precedes each text instead; "" for none.
            pooling: "last", "mean", "cls", "max", "mean_sqrt_len" or "weightedmean". Default: the file's, or "last".
            normalize: Whether to scale each embedding to length 1. Default: unless the model's files compare lengths.
            dimensions: Keep this many leading dimensions, before scaling: for models trained for this.
            parse_special: As for `tokenize`.
            progress: True shows a bar on standard error. A callback is called as `llamac.progress.Progress` says.
            cancel: Ends the computation from another thread.

        Returns:
            (dimensions,) for one text, (n, dimensions) for a list; float32. The bits do not depend on the others.

        Raises:
            ContextFullError: If a text does not fit the context.
            ArgumentError: If an argument or a token id is out of range, or the model has no tokenizer or prompt.
            UnsupportedError: If the model scores pairs.
            CancelledError: After `cancel.cancel`.
        """
        from llamac.engine.scoring.embedding import embed

        model = cast("Model", self)
        prompts = prompt_name, prompt
        with shown(progress) as report:
            return embed(model, texts, prompts, pooling, normalize, dimensions, parse_special, report, cancel)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        task: str | None = None,
        parse_special: bool = False,
        progress: bool | Progress = False,
        cancel: Cancellation | None = None,
    ) -> list[Ranked]:
        """Rank documents by their relevance to a query, with a cross-encoder or a model such as Qwen3-Reranker.

        Args:
            query: The query.
            documents: The documents.
            task: The purpose of the query, only for models with a chat template. Default: the files', or a web search.
            parse_special: As for `tokenize`, only for cross-encoders without a chat template for pairs.
            progress, cancel: As for `embed`.

        Returns:
            The documents with their scores, best first.

        Raises:
            ContextFullError: If a document does not fit the context with the query.
            UnsupportedError: If the vocabulary lacks "yes" or "no", or the model is an encoder that only embeds.
            ArgumentError: If the model has no chat template or no tokenizer, or cannot use `task` or `parse_special`.
            ChatTemplateError: If the template fails, or leaves out a text.
            CancelledError: After `cancel.cancel`.
        """
        from llamac.engine.scoring.ranking import rerank

        model = cast("Model", self)
        with shown(progress) as report:
            return rerank(model, query, documents, task, parse_special, report, cancel)

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        cancel: Cancellation | None = None,
    ) -> list[Score]:
        """Compute the probabilities of continuations of a prompt, which is computed once.

        Args:
            prompt: A str, which gets BOS if the model expects it; or token ids, which are used unchanged. White space
                at the end of a str counts as the start of the continuations.
            continuations: Strings if the prompt is a string, otherwise token ids.
            cancel: As for `embed`.

        Returns:
            A score for each continuation, in their order.

        Raises:
            ContextFullError: If a continuation does not fit the context with the prompt.
            ArgumentError: If a continuation has no tokens.
            CancelledError: After `cancel.cancel`.
        """
        from llamac.engine.scoring.scores import score

        model = cast("Model", self)
        return score(model, prompt, continuations, cancel)

    def perplexity(
        self,
        text: str | Sequence[int],
        *,
        stride: int | None = None,
        context: int | None = None,
        progress: bool | Progress = False,
        cancel: Cancellation | None = None,
    ) -> float:
        """Compute the perplexity of a text: exp of the mean negative log-probability of its tokens.

        A text longer than the context is covered by windows. Each token is scored once, by the first window that
        contains it; the first token of the text is not scored.

        Args:
            text: A str, which gets BOS if the model expects it; or at least two token ids.
            stride: Tokens from the start of one window to that of the next. Smaller values give each token more
                context and take longer. Default: the context, so that windows do not overlap.
            context: Tokens per window. Default: the argument of `load`, or the model's own value.
            progress: As for `embed`.
            cancel: As for `embed`.

        Raises:
            ArgumentError: If an argument is out of range.
            CancelledError: After `cancel.cancel`.
        """
        from llamac.engine.scoring.scores import perplexity

        model = cast("Model", self)
        with shown(progress) as report:
            return perplexity(model, text, stride=stride, context=context, report=report, cancel=cancel)
