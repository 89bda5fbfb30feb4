"""Memory: what a model needs, planned before it is used; a limit that its sessions keep; and what it holds now.

The plan is an upper bound. Sessions reserve what their largest pass can need when they are opened, and the KV caches
get the rest of the limit as their budget. So a limit is exceeded by no later call: it fails and says so.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llamac import _core
from llamac.arguments import KV_DTYPES, KVDtype
from llamac.engine.hardware import machine
from llamac.errors import OutOfMemoryError
from llamac.sizes import size_text

if TYPE_CHECKING:
    from llamac.engine.model import Model
    from llamac.engine.session import Session
    from llamac.gpu.device_model import DeviceMemory

OPTIONAL = ("adapters", "draft model")  # parts that a plan shows only if there are any
LEAST_CONTEXT = 256  # positions that must fit if no context is asked for
SESSION_BYTES = 4 + 16  # per token of the vocabulary: a session's logits, and the scratch of sampling from them
ENGINE_BYTES = 4 + 16  # the same per request of an engine
# Python's objects of a tokenizer per token, where the core encodes. `Tokenizer.memory` is what it took, if more.
TOKEN_BYTES = 64


# ---- results


@dataclass(frozen=True)
class MemoryPlan:
    """The most memory that a model needs with some settings, in bytes.

    Attributes:
        limit: What it may need, or None.
        weights: The model file, which is mapped. Other processes share it.
        adapters: LoRA adapters.
        tokenizer: The tokenizer, and tables made from it for guides and banned strings.
        activations: Of the largest pass.
        logits: Logits, and the scratch of sampling from them.
        draft: The draft model, if there is one: all of its parts.
        kv: The KV caches of all sequences, with all positions.
        kv_per_token: The KV cache of one position.
        context: Positions per sequence.
        sequences: Sequences.
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

    @property
    def total(self) -> int:
        """All bytes."""
        fixed = self.weights + self.adapters + self.tokenizer + self.draft
        return fixed + self.activations + self.logits + self.kv

    @property
    def fits(self) -> bool:
        """Whether the limit is kept."""
        return self.limit is None or self.total <= self.limit

    def summary(self) -> str:
        """The plan in one line."""
        names = ("weights", "adapters", "tokenizer", "activations", "logits", "draft", "kv")
        parts = [f"{'KV' if name == 'kv' else name} {size_text(getattr(self, name))}" for name in names]
        used = ", ".join(part for part, name in zip(parts, names, strict=True) if getattr(self, name))
        sequences = f"{self.sequences} sequences of " if self.sequences > 1 else ""
        return f"{size_text(self.total)} with {sequences}{self.context} positions in {self.kv_dtype}: {used}"

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON's types, with the total."""
        return {**asdict(self), "total": self.total}

    def lines(self) -> list[str]:
        """The plan for people."""
        sequences = f"{self.sequences} sequences of " if self.sequences > 1 else ""
        cache = f"{sequences}{self.context} positions in {self.kv_dtype}, {size_text(self.kv_per_token)} each"
        parts = [
            ("weights", self.weights, "mapped; processes share them"),
            ("adapters", self.adapters, "LoRA"),
            ("tokenizer", self.tokenizer, ""),
            ("activations", self.activations, "of the largest pass"),
            ("logits", self.logits, "and sampling"),
            ("draft model", self.draft, "all of it"),
            ("KV cache", self.kv, cache),
            ("total", self.total, "" if self.limit is None else f"limit {size_text(self.limit)}"),
        ]
        shown = [(name, size, note) for name, size, note in parts if size or name not in OPTIONAL]
        return [f"{name:<12}{size_text(size):>9}{'  ' + note if note else ''}" for name, size, note in shown]


@dataclass(frozen=True)
class MemoryUse:
    """What a model holds now, in bytes.

    Attributes:
        weights: The model file, which is mapped.
        weights_resident: What of it lies in this process's memory; None if the system does not say.
        adapters: LoRA adapters.
        tokenizer: The tokenizer, and tables made from it for guides and banned strings.
        activations: Of all sessions.
        logits: Of all sessions and of the engine, and the scratch of sampling from them.
        draft: The draft models of `load` and of the sessions: all of their parts.
        kv: The KV caches of all sessions. Pages that sequences share count once.
        prefix_cache: What of them the engine's prefix cache holds; other sequences can share it.
        device: Of the model's device: its weights, pages and activations there, and what of the device's memory is free
            and in total. None: the model is on the CPU.
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
        """All bytes, with the whole file."""
        fixed = self.weights + self.adapters + self.tokenizer + self.draft
        return fixed + self.activations + self.logits + self.kv


class MemoryLimit:
    """The limit of a model and its sessions, and the budget of KV pages that follows from it.

    Attributes:
        limit: The limit in bytes, or None.
        kv_budget: The budget of KV pages that the caller set, or None.
        engine_logits: Bytes of the logits of the model's engines.
        budget: Most bytes of KV pages: what the caller set, or what the limit leaves if that is less.
    """

    def __init__(self, model: Model, limit: int | None) -> None:
        self._model = model
        self.limit = limit
        self.kv_budget: int | None = None
        self.engine_logits = 0
        self.budget: int | None = None

    def apply(self) -> None:
        """Compute the budget again, after anything that it depends on has changed."""
        if self._model.closed:
            return
        found = [budget for budget in (self.kv_budget, self._left()) if budget is not None]
        self.budget = max(1, min(found)) if found else None
        self._model._core.set_kv_budget(self.budget or 0)

    def admit(self, session: Session) -> None:
        """Make room for a new session, or close it.

        Raises:
            OutOfMemoryError: If the limit leaves no page for a sequence, or less than the KV caches hold already.
        """
        try:
            self._check(session)
        except BaseException:
            session.close()
            raise
        self.apply()

    def _check(self, session: Session) -> None:
        left = self._left()
        if left is not None and left < max(self._model.kv_bytes, session._core.page_size()[1]):
            plan = plan_of(self._model, session._core, self.limit, min(LEAST_CONTEXT, session.context), 1)
            others = sum(held_by(other) for other in list(self._model._sessions) if other is not session)
            held = others + self.engine_logits + self._model.kv_bytes
            raise refusal(plan, f"; other sessions hold or may need {size_text(held)} of it" if held else "")

    def _left(self) -> int | None:
        """Bytes that the limit leaves for KV pages."""
        return None if self.limit is None else self.limit - self.fixed()

    def fixed(self) -> int:
        """Bytes that the model and its sessions can need besides KV pages."""
        sessions = sum(held_by(session) for session in list(self._model._sessions))
        return sum(fixed_bytes(self._model)) + sessions + self.engine_logits


def held_by(session: Session) -> int:
    """Bytes besides KV pages that a session can hold."""
    if session.closed:
        return 0
    core = session._core
    activations = _core.memory_limits(core, 1)[0] if session._computes else session.memory()["activations"]
    return (
        activations
        + SESSION_BYTES * core.vocab_size
        + _draft_of(session._draft_model, session.context, session._n_drafted)
    )


def fixed_bytes(model: Model) -> tuple[int, int, int]:
    """Bytes of the mapped file, of the adapters, and of the tokenizer, also if it has not been opened yet."""
    buffers = [buffer for _, *parts in model._core.borrowed for buffer in parts if buffer is not None]
    adapters = sum(memoryview(buffer).nbytes for buffer in buffers)
    tokenizer = 0
    if model.has_tokenizer:
        tokenizer = max(TOKEN_BYTES * model.n_token_ids, _tokenizer_now(model))
    return model.file.header["file_bytes"], adapters, tokenizer


def _draft_of(model: Model | None, context: int, sequences: int = 1) -> int:
    """The most bytes of a draft model and of its session that drafts for some sequences."""
    return 0 if model is None else plan_memory(model, None, min(context, model.config["context"]), sequences).total


def _tokenizer_now(model: Model) -> int:
    """Bytes by which opening the tokenizer, and making tables from it, has grown the process."""
    tokenizer = model._tokenizer
    return 0 if tokenizer is None else tokenizer.memory + tokenizer.table_bytes


# ---- plans


def plan_of(
    model: Model, core: _core.Session, limit: int | None, context: int, sequences: int, engine_requests: int = 0
) -> MemoryPlan:
    """The plan of a session, for sequences of `context` positions."""
    activations, kv = _core.memory_limits(core, context)
    positions, page_bytes = core.page_size()
    weights, adapters, tokenizer = fixed_bytes(model)
    name = core.describe()[1]
    return MemoryPlan(
        limit=limit,
        weights=weights,
        adapters=adapters,
        tokenizer=tokenizer,
        activations=activations,
        logits=(SESSION_BYTES + ENGINE_BYTES * engine_requests) * core.vocab_size,
        draft=_draft_of(model._session_defaults.draft_model, context),
        kv=kv * sequences,
        kv_per_token=-(-page_bytes // positions),
        context=context,
        sequences=sequences,
        kv_dtype=next(dtype for dtype in KV_DTYPES if dtype == name),
    )


def plan_memory(
    model: Model, limit: int | None, context: int, sequences: int = 1, kv_dtype: KVDtype | None = None
) -> MemoryPlan:
    """The plan of a session with the model's defaults, which is not opened for long and computes nothing."""
    from llamac.engine.session import KV_NUMBERS

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
    """Check, before a model is used, that its limit can be kept.

    Args:
        model: The model.
        limit: The limit.
        context: Positions that one sequence must have. None: `LEAST_CONTEXT`, or the model's if that is less.

    Raises:
        OutOfMemoryError: If it cannot. The message has the plan, and what would fit.
    """
    if model.has_tokenizer:
        _ = model.tokenizer.n_ids  # opens it: tokenizers that the core does not encode take much memory
    wanted = min(LEAST_CONTEXT, model.config["context"]) if context is None else context
    plan = plan_memory(model, limit, wanted)
    if not plan.fits:
        raise refusal(plan, _what_fits(model, plan))


def refusal(plan: MemoryPlan, advice: str) -> OutOfMemoryError:
    """The error for a plan that exceeds its limit."""
    assert plan.limit is not None
    head = f"max_memory is {size_text(plan.limit)}, but {size_text(plan.total)} are needed{advice}:"
    return OutOfMemoryError("\n  ".join([head, *plan.lines()]))


def _what_fits(model: Model, plan: MemoryPlan) -> str:
    """What would fit instead of a plan."""
    found = []
    for kind in KV_DTYPES[KV_DTYPES.index(plan.kv_dtype) :]:  # the largest first
        context = _largest_context(model, plan.limit, plan.context, kind)
        if context:
            smaller = "" if context == plan.context else f"a context of {context} with "
            found.append(f"{smaller}kv_dtype {kind}")
    if found:
        return f"; what fits is {' or '.join(found)}"
    least = plan_memory(model, None, 1, kv_dtype="q8").total
    return f"; the least for this model is {-(-least // (1 << 20))}MiB"


def _largest_context(model: Model, limit: int | None, most: int, kv_dtype: KVDtype) -> int:
    """The most positions of one sequence that fit, in whole pages if there are fewer than `most`; 0: none."""
    if plan_memory(model, limit, most, kv_dtype=kv_dtype).fits:
        return most
    low, high = 0, most // 64
    while low < high:
        middle = (low + high + 1) // 2
        if plan_memory(model, limit, middle * 64, kv_dtype=kv_dtype).fits:
            low = middle
        else:
            high = middle - 1
    return low * 64


# ---- now


def memory_use(model: Model, prefix_cache: int = 0) -> MemoryUse:
    """What a model holds now."""
    weights, adapters, _ = fixed_bytes(model)
    sessions = [session for session in list(model._sessions) if not session.closed]
    drafts = {model._session_defaults.draft_model, *(session._draft_model for session in sessions)} - {None}
    return MemoryUse(
        weights=weights,
        weights_resident=_resident(os.fspath(model.file.path)),
        adapters=adapters,
        tokenizer=_tokenizer_now(model),
        activations=sum(session.memory()["activations"] for session in sessions),
        logits=sum(SESSION_BYTES * session._core.vocab_size for session in sessions) + model._memory.engine_logits,
        draft=sum(memory_use(draft).total for draft in drafts if draft is not None and not draft.closed),
        kv=model.kv_bytes,
        prefix_cache=prefix_cache,
        device=None if model._device is None else model._device.memory(),
    )


def _resident(path: str) -> int | None:
    """Bytes of a mapped file that lie in this process's memory."""
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
