"""Samples the tokens of generations; shared by sessions, streams and the batches of an engine.

The core adjusts logits, filters and draws. This module keeps the state of a generation: it determines the banned tokens
at each position, and calls the logits processors of a request.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from llamac import _core
from llamac.engine.sampling.device_draws import device_draw
from llamac.engine.sampling.params import LIBRARY_DEFAULTS, ResolvedParams
from llamac.engine.sampling.reasoning_budget import ReasoningBudget
from llamac.errors import ArgumentError, ArgumentTypeError, LlamacError, wrapped
from llamac.text.token_index import BannedStrings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.model import Model
    from llamac.gpu.draws import Draw
    from llamac.guided.constraint import Constraint

MASKED = 1 << 63  # added to the position of a draw that follows one without the guide's mask


class Sampler:
    """Samples the tokens of one generation. `accept` updates its state.

    Attributes:
        params: The request's parameters.
        settings: The core's sampling settings.
        history: The tokens and bans that the core applies to a draw; None if nothing adjusts the logits.
        stop_ids: Tokens that end the generation.
    """

    def __init__(self, model: Model, params: ResolvedParams, prompt: Sequence[int]) -> None:
        """Start a generation.

        Args:
            model: The model.
            params: The request's parameters.
            prompt: Ids of the prompt.
        """
        self.params = params
        self.settings = params.core()
        self.history: _core.History | None = None
        self.stop_ids = frozenset(params.stop_token_ids if params.ignore_eos else _all_stop_ids(model, params))
        self._n_ids = model.n_token_ids
        self._accepted = 0
        self._banned_strings: BannedStrings | None = None
        self._banned: frozenset[int] = frozenset()  # tokens that must not occur
        self._banned_next: frozenset[int] = frozenset()  # further ones that must not come next
        self._constraint: Constraint | None = None
        self._mask: Any = None
        self._budget: ReasoningBudget | None = None
        if params.reasoning_budget is not None:
            self._budget = ReasoningBudget(model, params.reasoning_budget, prompt)
        check_token_ids(params, self._n_ids)
        if params.banned_strings:
            self._banned_strings = BannedStrings(params.banned_strings, model.tokenizer._token_index)
        self._is_adjusting = self._needs_adjusting()  # whether the core applies the history
        if self._is_adjusting:
            self._adjust(model)
        if self._is_adjusting or params.mirostat_tau:
            self.history = _core.History(array("i", prompt))
            self.history.mu = 2 * params.mirostat_tau
            self._set_bans([])
        if params.guide is not None:
            from llamac.guided.constraint import Constraint

            may_force = not self._forbids_tokens() and not params.logits_processors
            self._constraint = Constraint(
                params.guide,
                model.tokenizer,
                self.stop_ids,
                prompt,
                may_force=may_force,
                may_reason=params.reasoning_budget != 0,
                banned=self._banned,
            )

    def fork(self) -> Sampler:
        """Return a copy of this sampler in the same state, without a reasoning budget."""
        other = copy.copy(self)
        other.history = None if self.history is None else self.history.copy()
        other._banned_strings = copy.copy(self._banned_strings)
        other._constraint = None if self._constraint is None else self._constraint.fork()
        other._budget = None
        return other

    def accept(self, token: int) -> None:
        """Record a token of the generation.

        Raises:
            LlamacError: If the token does not match the guide.
        """
        self._accepted += 1
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._budget is not None:
            self._budget.accept(token)
        if self.history is None:
            return
        self.history.append(token)
        if self._banned_strings is not None:
            self._set_bans(self._banned_strings.push(token))
        elif self._accepted == self.params.min_tokens:
            self._set_bans([])

    def allow(self, mask: Any) -> None:
        """Restrict the next tokens until the next call. The restriction applies just before the logits processors.

        Args:
            mask: A buffer of bytes with a bit per token, least significant bit first; None allows all tokens.
        """
        if self.history is None:
            if mask is None:
                return
            self.history = _core.History(array("i"))
        if not self._is_adjusting:
            self.settings.adjust()
            self._is_adjusting = True
        self.history.allow(mask)
        self._mask = mask

    def _needs_adjusting(self) -> bool:
        """Whether anything other than logits processors changes logits before the filters."""
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "logit_bias")
        changed = any(getattr(self.params, name) != LIBRARY_DEFAULTS[name] for name in (*names, "banned_tokens"))
        return changed or self._banned_strings is not None or self.params.min_tokens > 0

    def _forbids_tokens(self) -> bool:
        """Whether tokens of a text must not occur, if only at its beginning."""
        params = self.params
        return bool(self._banned or params.banned_strings or (params.min_tokens and params.stop_token_ids))

    def _adjust(self, model: Model) -> None:
        params = self.params
        bias = {token: value for token, value in params.logit_bias if value != 0}
        bias.update(dict.fromkeys(params.banned_tokens, -math.inf))
        if self._banned_strings is not None:
            bias.update(dict.fromkeys(self._banned_strings.always, -math.inf))
        self._banned = frozenset(token for token, value in bias.items() if value == -math.inf)
        breakers = None
        if params.dry_multiplier and params.dry_sequence_breakers:
            breakers = _bits(model.tokenizer._token_index.containing(map(str.encode, params.dry_sequence_breakers)))
        self.settings.adjust(
            bias_ids=array("i", bias),
            bias=array("f", bias.values()),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            dry_multiplier=params.dry_multiplier,
            dry_base=params.dry_base,
            dry_allowed_length=params.dry_allowed_length,
            dry_breakers=None if breakers is None else breakers.ljust(self._n_ids // 8 + 1, b"\0"),
        )

    def _set_bans(self, banned: list[int]) -> None:
        assert self.history is not None
        early = self.stop_ids if self._accepted < self.params.min_tokens else ()
        self._banned_next = frozenset((*banned, *early))
        self.history.ban(array("i", [*banned, *early]))

    # ---- the guide

    @property
    def is_complete(self) -> bool:
        """Whether the text matches the guide and nothing can follow."""
        return self._constraint is not None and self._constraint.is_complete

    @property
    def is_accepting(self) -> bool:
        """Whether the text matches the guide."""
        return self._constraint is not None and self._constraint.is_accepting

    def is_ready(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the guide. Return whether the next token can be drawn without waiting."""
        return self._constraint is None or self._constraint.is_ready(timeout)

    def forced(self) -> int | None:
        """Return the next token if the reasoning budget or the guide leaves no choice, otherwise None."""
        if self._budget is not None and self._budget.forced:
            return self._budget.forced[0]
        return None if self._constraint is None else self._constraint.forced()

    def within(self, token: int, left: int) -> int:
        """Return the drawn token, or another one if the text could not be completed in `left` tokens with it."""
        instead = token if self._constraint is None else self._constraint.within(token, left)
        return token if instead in self._banned_next else instead

    def _prepare(self) -> int | None:
        """Restrict the next draw to the tokens that the guide allows. Returns the token if only one is possible."""
        forced = self.forced()
        if forced is None and self._constraint is not None:
            self.allow(self._constraint.mask())
        return forced

    # ---- drawing

    @property
    def in_python(self) -> bool:
        """Whether Python handles the logits before the core draws: for functions, or where reasoning can begin."""
        return bool(self.params.logits_processors or self._openings)

    @property
    def _openings(self) -> list[int]:
        """Tokens that begin reasoning, where the guide leaves it to the model whether it reasons."""
        return [] if self._constraint is None else self._constraint.openings

    def draw(self, core: _core.Session, position: int, ids: Iterable[int] | None = None) -> int:
        """Draw from the logits of the last eval of a session.

        Args:
            core: The session.
            position: The position of the draw.
            ids: The prompt and the tokens so far. Default: sequence 0 of the session.
        """
        if (forced := self._prepare()) is not None:
            return forced
        if not self.in_python:
            return core.sample(self.settings, self._n_ids, position, self.history)
        return self.draw_from(core.copy_logits(self._n_ids), core.tokens(0) if ids is None else ids, position)

    def device_draw(self, position: int) -> Draw | None:
        """Return the next draw if a device can compute it: only filters that the device supports apply."""
        if self.history is not None or self.in_python or self._constraint is not None or self._budget is not None:
            return None
        return device_draw(self.params, position)

    def draw_in_python(self, logits: Any, ids: Iterable[int], position: int) -> int | LlamacError | None:
        """Draw from one row of logits (1, width) if this requires Python. Returns the error if no token can be drawn.

        Returns None if the core can draw: the mask of the guide is in the history.
        """
        try:
            forced = self._prepare()
            return self.draw_from(logits, ids, position) if forced is None and self.in_python else forced
        except BaseException as failure:  # raised by a logits processor, or a panic in the guide's library
            return wrapped(failure, "drawing a token")

    @property
    def changes_rows(self) -> bool:
        """Whether anything changes logits before the filters."""
        return self.history is not None or self.in_python or self._constraint is not None

    def change(self, row: NDArray[np.float32], ids: Iterable[int]) -> None:
        """Apply everything before the filters to a row of logits, or of log probabilities, in place.

        Args:
            row: A number for each id, without padding.
            ids: The prompt and the tokens so far.
        """
        own = None  # the row without the guide's mask
        if openings := self._openings:
            own = row.copy()
            self.allow(None)
            self._change(own, ids)
        if self._constraint is not None:
            self.allow(self._constraint.mask())
        self._change(row, ids)
        if own is not None and own.argmax() in openings:
            row[openings] = own[openings]

    def _change(self, row: NDArray[np.float32], ids: Iterable[int]) -> None:
        import numpy as np

        if self.history is not None:
            _core.adjust_logits(row.data, self.settings, self.history)
        if not self.params.logits_processors:
            return
        given = np.array(list(ids), np.int32)
        for process in self.params.logits_processors:
            _process(process, given, row)
        self._exclude(row)

    def _exclude(self, row: NDArray[np.float32]) -> None:
        """Apply the guide's mask to a row of logits, in place."""
        import numpy as np

        if self._mask is not None:
            allowed = np.unpackbits(np.frombuffer(self._mask, np.uint8), count=len(row), bitorder="little")
            row[allowed == 0] = -np.inf

    def draw_from(self, logits: Any, ids: Iterable[int], position: int) -> int:
        """Draw from a row of logits after the logits processors. The guide's mask also applies to their result.

        Where reasoning can begin, a draw without the mask decides whether it does. If not, a second draw with the mask
        begins with the same logits, but has a random number of its own: the first draw has excluded the numbers that
        lead to the tag.

        Args:
            logits: A buffer of float32, of which the first `n_ids` are used. It is not modified.
            ids: The prompt and the tokens so far.
            position: The position of the draw.
        """
        import numpy as np

        row = np.frombuffer(logits, np.float32)[: self._n_ids].copy()
        if openings := self._openings:
            own, ids, mask = row.copy(), list(ids), self._mask
            self.allow(None)
            self._change(own, ids)
            assert self.history is not None
            mu = self.history.mu
            if (token := self._sample(own, position)) in openings:
                return token
            self.history.mu = mu
            self.allow(mask)
            position += MASKED
        self._change(row, ids)
        return self._sample(row, position)

    def _sample(self, row: NDArray[np.float32], position: int) -> int:
        """Draw from a row of logits that has been changed."""
        try:
            return _core.sample(row.data, self.settings, position, self.history, adjusted=True)
        except LlamacError as failure:
            what = "logits processors" if self.params.logits_processors else "bias, penalties and bans of the request"
            raise ArgumentError(f"{failure}, after the {what}") from failure


def draw_rows(
    samplers: Sequence[Sampler],
    logits: Any,
    n: int,
    histories: Sequence[Iterable[int]],
    positions: list[int],
    threads: int = 1,
    known: Sequence[int | None] = (),
) -> list[int | LlamacError]:
    """Draw a token from each row of logits (rows, width). The result has an error where no token can be drawn.

    Python handles rows whose token is forced and rows with logits processors. The core draws all others in one call;
    the mask of a guide is part of the history.

    Args:
        samplers: The sampler of each row.
        logits: The rows.
        n: The number of logits to use; the rest is padding.
        histories: The prompt and the tokens so far, of each row.
        positions: The position of each draw.
        threads: Maximum number of threads. The tokens do not depend on it.
        known: The tokens that have already been drawn; None where the row decides. Empty: no row has one.
    """
    drawn = [
        sampler.draw_in_python(logits[i : i + 1], ids, position) if token is None else token
        for i, (sampler, ids, position, token) in enumerate(
            zip(samplers, histories, positions, known or [None] * len(samplers), strict=True)
        )
    ]
    if rows := [i for i, token in enumerate(drawn) if token is None]:
        settings = [samplers[i].settings for i in rows]
        states = [samplers[i].history for i in rows]
        in_core = _core.sample_rows(logits, n, settings, [positions[i] for i in rows], states, threads, rows)
        for i, token in zip(rows, in_core, strict=True):
            drawn[i] = token
    return cast("list[int | LlamacError]", drawn)


def check_token_ids(params: ResolvedParams, n: int) -> None:
    """Check that the token ids in parameters are in the vocabulary."""
    named = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "banned_tokens": params.banned_tokens,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if token >= n:
                raise ArgumentError(f"{name} has the token id {token}, expected 0 to {n - 1}")


def _all_stop_ids(model: Model, params: ResolvedParams) -> Iterable[int]:
    return (*model.special.stop_ids, *params.stop_token_ids)


def _bits(ids: Iterable[int]) -> bytes:
    """Return a bit mask of ids."""
    bits = bytearray()
    for token in ids:
        bits.extend(bytes(max(0, token // 8 + 1 - len(bits))))
        bits[token // 8] |= 1 << token % 8
    return bytes(bits)


def _process(process: Any, ids: NDArray[np.int32], row: NDArray[np.float32]) -> None:
    try:
        result = process(ids, row)
    except Exception as failure:
        raise ArgumentError(f"a logits processor failed: {type(failure).__name__}: {failure}") from failure
    if result is not None and result is not row:
        raise ArgumentTypeError(
            f"a logits processor must change the row of logits in place and return None, not {type(result).__name__}"
        )
