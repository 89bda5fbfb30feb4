"""Memory accounting: the plan before a model is used, the limit for its sessions, and the current use.

The plan is an upper bound. A session reserves memory for its largest pass when it is opened, and the rest of the limit
becomes the budget of the KV caches. No later call exceeds the limit: it raises an error instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llamac import _core
from llamac.arguments import AUTO, KV_DTYPES, KV_NUMBERS, KVDtype
from llamac.engine.hardware import machine
from llamac.engine.speculation.draft_model import sequences_per_text
from llamac.engine.speculation.head import default_draft_model, head_bytes, is_drafter
from llamac.errors import OutOfMemoryError
from llamac.sizes import size_text

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.session import Session
    from llamac.gpu.device_model import DeviceMemory

OPTIONAL = ("adapters", "drafts")  # parts that a plan lists only if they exist
MIN_CONTEXT = 256  # positions that must fit if the caller does not set a context
SESSION_BYTES = 4 + 16  # per token of the vocabulary: a session's logits, and the scratch of sampling from them
ENGINE_BYTES = 4 + 16  # the same per request of an engine
# Python objects of a tokenizer per token, if the core encodes. `Tokenizer.memory` is the measured size, if larger.
TOKEN_BYTES = 64
KV_PAGE = 64  # positions of a page: KV_PAGE of csrc/kv_layout.h


# ---- results


@dataclass(frozen=True)
class MemoryPlan:
    """The maximum memory that a model needs with given settings, in bytes.

    Attributes:
        limit: The limit, or None.
        weights: The model file, which is mapped and shared with other processes.
        adapters: LoRA adapters.
        tokenizer: The tokenizer, and the tables for guides and banned strings.
        activations: Activations of the largest pass.
        logits: Logits, and the scratch memory for sampling.
        draft: All parts of the draft model, or what the model's MTP layer needs to draft. Excludes parts on a GPU, and
            an assistant or EAGLE-3 head that does not fit on the GPU.
        kv: The KV caches of all sequences, filled completely; 0 if the model computes on a GPU.
        device_kv: The KV caches on the GPU, which are not in the total. With "auto", both count.
        kv_per_token: The KV cache of one position.
        context: Positions per sequence.
        sequences: Number of sequences.
        kv_dtype: Number format of the KV cache.
    """

    limit: int | None
    weights: int
    adapters: int
    tokenizer: int
    activations: int
    logits: int
    draft: int
    kv: int
    kv_per_token: int
    context: int
    sequences: int
    kv_dtype: KVDtype
    device_kv: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        fixed = self.weights + self.adapters + self.tokenizer + self.draft
        return fixed + self.activations + self.logits + self.kv

    @property
    def fits(self) -> bool:
        """Whether the total is within the limit."""
        return self.limit is None or self.total <= self.limit

    def summary(self) -> str:
        """Format the plan as one line."""
        names = ("weights", "adapters", "tokenizer", "activations", "logits", "draft", "kv")
        parts = [f"{'KV' if name == 'kv' else name} {size_text(getattr(self, name))}" for name in names]
        used = ", ".join(part for part, name in zip(parts, names, strict=True) if getattr(self, name))
        sequences = f"{self.sequences} sequences of " if self.sequences > 1 else ""
        return f"{size_text(self.total)} with {sequences}{self.context} positions in {self.kv_dtype}: {used}"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON, with the total."""
        return {**asdict(self), "total": self.total}

    def lines(self) -> list[str]:
        """Format the plan as lines of text."""
        sequences = f"{self.sequences} sequences of " if self.sequences > 1 else ""
        cache = f"{sequences}{self.context} positions in {self.kv_dtype}, {size_text(self.kv_per_token)} each"
        parts = [
            ("weights", self.weights, "mapped; processes share them"),
            ("adapters", self.adapters, "LoRA"),
            ("tokenizer", self.tokenizer, ""),
            ("activations", self.activations, "of the largest pass"),
            ("logits", self.logits, "and sampling"),
            ("drafts", self.draft, "all of the draft model, or of the MTP layer beside its weights"),
            ("KV cache", self.kv, "" if self.device_kv and not self.kv else cache),
            ("total", self.total, "" if self.limit is None else f"limit {size_text(self.limit)}"),
        ]
        if self.device_kv:
            parts.append(("on the GPU", self.device_kv, f"KV cache: {cache}"))
        shown = [(name, size, note) for name, size, note in parts if size or name not in OPTIONAL]
        return [f"{name:<12}{size_text(size):>9}{'  ' + note if note else ''}" for name, size, note in shown]


@dataclass(frozen=True)
class MemoryUse:
    """The memory that a model uses now, in bytes.

    Attributes:
        weights: The model file, which is mapped.
        weights_resident: The part of the file in this process's memory; None if the system does not report it.
        adapters: LoRA adapters.
        tokenizer: The tokenizer, and the tables for guides and banned strings.
        activations: Activations of all sessions.
        logits: Logits of all sessions and of the engine, and the scratch memory for sampling.
        draft: All parts of the draft model of `load` and of those that draft for sessions, and what MTP layers need to
            draft.
        kv: The KV caches of all sessions on the CPU. Shared pages count once.
        prefix_cache: The part of all KV caches in the engine's prefix cache, which other sequences can share.
        device: The model's weights, pages and activations on its device, and the device's free and total memory. No
            other part includes them. None if the model is on the CPU, or the device has failed.
    """

    weights: int
    weights_resident: int | None
    adapters: int
    tokenizer: int
    activations: int
    logits: int
    draft: int
    kv: int
    prefix_cache: int = 0
    device: DeviceMemory | None = None

    @property
    def total(self) -> int:
        """The sum of all parts, including the whole file."""
        fixed = self.weights + self.adapters + self.tokenizer + self.draft
        return fixed + self.activations + self.logits + self.kv


class MemoryLimit:
    """The memory limit of a model and its sessions, and the resulting budget of KV pages.

    The limit is for the process's memory. KV pages on a device have a budget of their own.

    Attributes:
        limit: The limit in bytes, or None.
        kv_budget: The budget of KV pages that the caller set, or None.
        engine_logits: Bytes of the logits of the model's engines.
        budget: Maximum bytes of KV pages where sessions compute by default: the smaller of `kv_budget` and the
            remainder of the limit, or on a device of `kv_budget` and the memory that was free after the weights.
    """

    def __init__(self, model: Model, limit: int | None) -> None:
        self._model = model
        self.limit = limit
        self.kv_budget: int | None = None
        self.engine_logits = 0
        self.budget: int | None = None
        # what engines have set, in this order: who set it, the attribute, and its value before
        self._set: list[tuple[object, str, int | None]] = []

    def set(self, owner: object, name: str, value: int | None) -> None:
        """Set `limit` or `kv_budget` until `unset`, for an engine."""
        self._set.append((owner, name, getattr(self, name)))
        setattr(self, name, value)

    def unset(self, owner: object) -> None:
        """Undo what an engine has set. What later ones have set stays until they undo it, whatever the order."""
        for entry in [entry for entry in self._set if entry[0] is owner]:
            at = self._set.index(entry)
            _, name, before = self._set.pop(at)
            later = next((i for i in range(at, len(self._set)) if self._set[i][1] == name), None)
            if later is None:
                setattr(self, name, before)
            else:
                self._set[later] = (self._set[later][0], name, before)

    def apply(self) -> None:
        """Recompute the budget after something that it depends on has changed."""
        if self._model.closed:
            return
        device = self._model._working_device
        host_budget = _least(self.kv_budget, self._left())
        device_budget = _least(self.kv_budget, None if device is None else device.kv_room)
        self.budget = host_budget if device is None or self._model._session_defaults.device == "cpu" else device_budget
        self._model._core.set_kv_budget(host_budget or 0, device_budget or 0)

    def admit(self, session: Session, least: int = MIN_CONTEXT) -> None:
        """Account for a new session, or close it if it does not fit.

        An MTP layer drafts only if its memory leaves room for the session's whole context. So it takes nothing from
        results. A draft model drafts for texts that both KV caches have room for. If there are none, a session whose
        caller has passed the draft model warns.

        Args:
            session: The session.
            least: Positions for which a draft model leaves room in any case.

        Raises:
            OutOfMemoryError: If the limit leaves no page for a sequence, or less than the KV caches already use.
        """
        if session._head is not None and session._head.file is None and (left := self._left()) is not None:
            pages = 0 if _stays_on_device(session) else _core.memory_limits(session._core, session.context)[1]
            if left < pages * session._n_sequences:
                session._head = None
        try:
            self._limit_drafts(session, min(least, session.context))
            if session._computes:  # the engine's plan includes its prefix cache
                self._check(session)
        except BaseException:
            session.close()
            raise
        self.apply()

    def _limit_drafts(self, session: Session, least: int) -> None:
        """Set the longest text for which a session's draft model drafts; 0: it drafts for none."""
        if session._draft_model is None or self.limit is None or not session._draft_context:
            return
        left = self.limit - host_kv_bytes(self._model)

        def fits(context: int) -> bool:
            session._draft_context = context
            pages = 0 if _stays_on_device(session) else _core.memory_limits(session._core, max(context, least))[1]
            return self.fixed() + pages <= left

        session._draft_context = _largest(fits, session.context)
        if not session._draft_context and session._draft_model is not self._model._session_defaults.draft_model:
            self._model._on_warning(
                f"the draft model makes no drafts: max_memory is {size_text(self.limit)}, which leaves no room for it"
            )

    def _check(self, session: Session) -> None:
        left = self._left()
        held_kv = host_kv_bytes(self._model)
        page_bytes = 0 if kv_is_on_device(self._model) else session._core.page_size()[1]
        if left is not None and left < max(held_kv, page_bytes):
            plan = plan_of(self._model, session._core, self.limit, min(MIN_CONTEXT, session.context), 1)
            others = sum(session_bytes(other) for other in self._model._sessions if other is not session)
            used = others + self.engine_logits + held_kv
            raise refusal(plan, f"; other sessions use or reserve {size_text(used)} of it" if used else "")

    def _left(self) -> int | None:
        """Return the bytes that the limit leaves for KV pages."""
        return None if self.limit is None else self.limit - self.fixed()

    def fixed(self) -> int:
        """Return the maximum bytes that the model and its sessions use besides KV pages."""
        sessions = sum(session_bytes(session) for session in self._model._sessions)
        return sum(fixed_bytes(self._model)) + sessions + self.engine_logits + self._idle_draft_model()

    def _idle_draft_model(self) -> int:
        """Return the bytes of the draft model of `load`, unless a session that drafts with it accounts for them."""
        draft_model = default_draft_model(self._model)
        if draft_model is None or any(draft_model in _drafting(session) for session in self._model._sessions):
            return 0
        return sum(fixed_bytes(draft_model))


def _least(*budgets: int | None) -> int | None:
    """Return the smallest budget, at least 1 and at most what the core can count; None if there is none."""
    found = [budget for budget in budgets if budget is not None]
    return max(1, min(*found, sys.maxsize)) if found else None


def kv_is_on_device(model: Model) -> bool:
    """Return whether sessions by default have their KV caches on a device. Those for "auto" can return to the CPU."""
    return model._session_defaults.device not in ("cpu", AUTO)


def _stays_on_device(session: Session) -> bool:
    """Return whether a session has its KV cache on a device, and cannot return to the CPU."""
    return session.device != "cpu" and not session._falls_back


def _drafting(session: Session) -> set[Model]:
    """Return the files that draft for a session: its draft model, if there is room for it, or its drafter."""
    if session.closed:
        return set()
    draft_model = session._draft_model if session._draft_context else None
    head = None if session._head is None else session._head.file
    return {file for file in (draft_model, head) if file is not None}


def host_kv_bytes(model: Model) -> int:
    """Return the bytes of the KV caches of all sessions on the CPU."""
    return model._core.kv_bytes() - model._core.device_kv_bytes()


def session_bytes(session: Session) -> int:
    """Return the maximum bytes that a session uses besides KV pages."""
    if session.closed:
        return 0
    core, head = session._core, 0
    if session._head is not None:
        file = session._head.file
        if file is not None and file.closed:  # it no longer drafts
            head = _head_now(session)
        else:
            on_device = _stays_on_device(session)
            head = _head_of(session.model, core, session._n_drafted, file, pages_on_device=on_device)
    if not session._computes:
        return session.memory()["activations"]
    drafts = _draft_of(session._draft_model, session._draft_context, session._n_drafted)
    return _core.memory_limits(core, 1)[0] + SESSION_BYTES * core.vocab_size + drafts + head


def fixed_bytes(model: Model) -> tuple[int, int, int]:
    """Return the bytes of the mapped file, the adapters and the tokenizer, whether or not it has been opened yet."""
    buffers = [buffer for _, *parts in model._core.borrowed for buffer in parts if buffer is not None]
    adapters = sum(memoryview(buffer).nbytes for buffer in buffers)
    tokenizer = 0
    if model.has_tokenizer:
        tokenizer = max(TOKEN_BYTES * model.n_token_ids, _tokenizer_now(model))
    return model.file.header["file_bytes"], adapters, tokenizer


def _draft_of(model: Model | None, context: int, sequences: int = 1) -> int:
    """Return the maximum bytes of a draft model and of its session for this many sequences; 0 if it drafts nothing."""
    if model is None or model.closed or context == 0:
        return 0
    n = sequences * sequences_per_text(model)
    return plan_memory(model, None, min(context, model.config["context"]), n).total


def _head_of(model: Model, core: _core.Session, sequences: int, file: Model | None, *, pages_on_device: bool) -> int:
    """Return the maximum bytes of the head beside a session: of a model's MTP layer, or a drafter's file."""
    weights = 0 if file is None else sum(fixed_bytes(file))
    own = head_bytes(model, core, sequences, file, pages_on_device=pages_on_device)
    return weights + own + SESSION_BYTES * core.vocab_size


def _head_now(session: Session) -> int:
    """Return the bytes that a session's head uses, without weights."""
    used = 0 if session._head is None else session._head.memory()
    return used + SESSION_BYTES * session._core.vocab_size if used else 0


def _tokenizer_now(model: Model) -> int:
    """Return the bytes that the tokenizer and its tables have added to the process."""
    tokenizer = model._tokenizer
    return 0 if tokenizer is None else tokenizer.memory + tokenizer.table_bytes


# ---- plans


def plan_of(
    model: Model,
    core: _core.Session,
    limit: int | None,
    context: int,
    sequences: int,
    *,
    engine_requests: int = 0,
    engine_drafts: int = 1,
    prefix_cache: int = 0,
) -> MemoryPlan:
    """Return the plan of a session for sequences of `context` positions.

    Args:
        model: The model.
        core: The session.
        limit: The limit.
        context: Positions per sequence.
        sequences: Number of sequences.
        engine_requests: Number of requests that an engine computes at a time.
        engine_drafts: Number of requests for which its head drafts at a time.
        prefix_cache: Bytes of the session of its prefix cache.
    """
    activations, kv = _core.memory_limits(core, context)
    positions, page_bytes = core.page_size()
    weights, adapters, tokenizer = fixed_bytes(model)
    name = core.describe()[1]
    device = model._session_defaults.device
    draft_model = default_draft_model(model)
    file = draft_model if is_drafter(draft_model) else None
    draft = _draft_of(draft_model, context) if file is None else 0
    if file or (model.config["mtp_layers"] and not draft):
        draft = _head_of(model, core, engine_drafts, file, pages_on_device=kv_is_on_device(model))
    plan = MemoryPlan(
        limit=limit,
        weights=weights,
        adapters=adapters,
        tokenizer=tokenizer,
        activations=activations + prefix_cache,
        logits=(SESSION_BYTES + ENGINE_BYTES * engine_requests) * core.vocab_size,
        draft=draft,
        kv=0 if kv_is_on_device(model) else kv * sequences,
        kv_per_token=-(-page_bytes // positions),
        context=context,
        sequences=sequences,
        kv_dtype=next(dtype for dtype in KV_DTYPES if dtype == name),
        device_kv=0 if device == "cpu" else kv * sequences,
    )
    # an MTP layer drafts only where there is room (MemoryLimit.admit)
    return plan if plan.fits or draft_model is not None else replace(plan, draft=0)


def plan_memory(
    model: Model, limit: int | None, context: int, sequences: int = 1, kv_dtype: KVDtype | None = None
) -> MemoryPlan:
    """Return the plan of a session with the model's defaults. The session is opened briefly and computes nothing."""
    defaults = model._session_defaults
    core = _core.Session(
        model._core,
        sequences=1,
        context=context,
        kv_dtype=KV_NUMBERS[kv_dtype or defaults.kv_dtype],
        threads=defaults.threads or machine.DefaultThreads(model.weight_bytes).now(),
        isa=machine.choose_isa(defaults.isa),
    )
    try:
        return plan_of(model, core, limit, context, sequences)
    finally:
        core.close()


def check_limit(model: Model, limit: int, context: int | None) -> None:
    """Check, before a model is used, that it fits its limit.

    Args:
        model: The model.
        limit: The limit.
        context: Positions that one sequence must have. None: `MIN_CONTEXT`, or the model's if that is less.

    Raises:
        OutOfMemoryError: If it does not fit. The message has the plan and suggests settings that would fit.
    """
    if model.has_tokenizer:
        _ = model.tokenizer.n_ids  # opens the tokenizer, which takes much memory unless the core encodes
    wanted = min(MIN_CONTEXT, model.config["context"]) if context is None else context
    plan = plan_memory(model, limit, wanted)
    if not plan.fits:
        raise refusal(plan, _suggestion(model, plan))


def refusal(plan: MemoryPlan, advice: str) -> OutOfMemoryError:
    """Return the error for a plan that exceeds its limit."""
    assert plan.limit is not None
    head = f"max_memory is {size_text(plan.limit)}, but {size_text(plan.total)} are needed{advice}:"
    return OutOfMemoryError("\n  ".join([head, *plan.lines()]))


def _suggestion(model: Model, plan: MemoryPlan) -> str:
    """Suggest settings that would fit."""
    found = []
    for kind in KV_DTYPES[KV_DTYPES.index(plan.kv_dtype) :]:  # the largest first
        context = _largest(partial(_fits, model, plan.limit, kind), plan.context)
        if context:
            smaller = "" if context == plan.context else f"a context of {context} with "
            found.append(f"{smaller}kv_dtype {kind}")
    if found:
        return f"; these settings fit: {' or '.join(found)}"
    smallest = plan_memory(model, None, 1, kv_dtype="q8").total
    return f"; this model needs at least {-(-smallest // (1 << 20))}MiB"


def _fits(model: Model, limit: int | None, kv_dtype: KVDtype, context: int) -> bool:
    return plan_memory(model, limit, context, kv_dtype=kv_dtype).fits


def _largest(fits: Callable[[int], bool], maximum: int) -> int:
    """Return the largest context that fits, up to `maximum`, in whole pages if smaller; 0: none."""
    if fits(maximum):
        return maximum
    low, high = 0, maximum // KV_PAGE
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * KV_PAGE):
            low = middle
        else:
            high = middle - 1
    return low * KV_PAGE


# ---- now


def memory_use(model: Model, prefix_cache: int = 0) -> MemoryUse:
    """Return the memory that a model uses now."""
    weights, adapters, _ = fixed_bytes(model)
    sessions = [session for session in model._sessions if not session.closed]
    drafts = {model._session_defaults.draft_model}.union(*map(_drafting, sessions))
    return MemoryUse(
        weights=weights,
        weights_resident=_resident(os.fspath(model.file.path)),
        adapters=adapters,
        tokenizer=_tokenizer_now(model),
        activations=sum(session.memory()["activations"] for session in sessions),
        logits=sum(SESSION_BYTES * session._core.vocab_size for session in sessions if session._computes)
        + model._memory.engine_logits,
        draft=sum(memory_use(draft).total for draft in drafts if draft is not None and not draft.closed)
        + sum(map(_head_now, sessions)),
        kv=host_kv_bytes(model),
        prefix_cache=prefix_cache,
        device=None if model._device is None else model._device.memory(),
    )


def _resident(path: str) -> int | None:
    """Return the bytes of a mapped file that are resident in this process."""
    try:
        status = os.stat(path)
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        with open("/proc/self/smaps") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    total, inside = 0, False
    for line in lines:
        parts = line.split()
        if "-" in parts[0] and not parts[0].endswith(":"):
            inside = len(parts) > 4 and parts[3] == device and parts[4] == str(status.st_ino)
        elif inside and parts[0] == "Rss:":
            total += int(parts[1]) << 10
    return total
