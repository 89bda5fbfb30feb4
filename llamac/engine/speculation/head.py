"""Sessions of the drafters that read a session's hidden states: the model's MTP layer, or a drafter's file.

Each of these drafters has its own session in the core. The session of a drafter's file belongs to the session that it
drafts for, its trunk. An assistant reads the trunk's embeddings, keys and values; an EAGLE-3 head has its own keys and
values.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast

from llamac import _core
from llamac.arguments import AUTO, KV_NUMBERS, NUMERICS
from llamac.engine.speculation.assistant import AssistantDrafter
from llamac.engine.speculation.mtp import CONTEXT, ROOM, MtpDrafter
from llamac.engine.work import mtp_work_of, work_of
from llamac.errors import DeviceError, LlamacError, OutOfMemoryError, UnsupportedError

if TYPE_CHECKING:
    from llamac.arguments import KVDtype
    from llamac.engine.model import Model
    from llamac.engine.rows import Rows
    from llamac.engine.session import Session
    from llamac.engine.session_defaults import SessionDefaults
    from llamac.engine.speculation.drafter import Drafter
    from llamac.engine.speculation.states import Place
    from llamac.progress import Progress


def is_drafter(model: Model | None) -> bool:
    """Whether a model is a file that only drafts, beside another model."""
    return model is not None and model.config["drafter"] != "none"


def is_eagle(file: Model | None) -> bool:
    """Whether a drafter's file is an EAGLE-3 head, which has keys and values of its own, as an MTP layer does."""
    return file is not None and file.config["drafter"] == "eagle3"


def reader_of(draft_model: Model | None) -> _core.Model | None:
    """Return the EAGLE-3 head for which a session must return states of its layers; None: there is none."""
    return draft_model._core if draft_model is not None and is_eagle(draft_model) else None


def beside(model: Model, device: str, draft_model: Model | None, *, is_auto: bool) -> Model | None:
    """Copy a drafter to the model's device. Return the session's draft model; None: the device cannot have it.

    Args:
        model: The model.
        device: The device of the session.
        draft_model: The draft model that was asked for.
        is_auto: Whether a session does without a drafter that the device has no room for or does not compute. The first
            one of a model warns.

    Raises:
        ArgumentError: If the drafter does not belong to the model.
        DeviceError: If the device fails.
        OutOfMemoryError: If the device has too little memory.
        UnsupportedError: If the drafter has an adapter of clusters, which its device does not compute.
    """
    if device == "cpu" or draft_model is None or not is_drafter(draft_model):
        return draft_model
    assert model._device is not None
    try:
        model._device.add_drafter(draft_model.file, model.file)
    except LlamacError as error:
        with suppress(LlamacError):  # the first failure is the one to report
            model._memory.apply()  # the room for KV pages can have changed
        if not is_auto or not isinstance(error, DeviceError | OutOfMemoryError | UnsupportedError):
            raise
        if draft_model not in model._left_out:
            name = "EAGLE-3 head" if is_eagle(draft_model) else "assistant"
            model._on_warning(f"the {name} makes no drafts: {error}")
        model._left_out.add(draft_model)
        return None
    model._memory.apply()  # the room for KV pages has changed
    model._left_out.discard(draft_model)
    return draft_model


def defaults_on_device(model: Model, defaults: SessionDefaults, progress: Progress) -> SessionDefaults:
    """Copy a model and its drafter to the device of its sessions. Return their defaults: "auto" can become "cpu".

    A drafter that the device cannot have remains a default, because sessions can also be on the CPU, and because the
    device can have more memory later.

    Raises as `Model.session`.
    """
    found = model._on_device(defaults.device, progress)
    beside(model, found, defaults.draft_model, is_auto=defaults.device == AUTO)
    return defaults._replace(device="cpu" if found == "cpu" else defaults.device)


def default_draft_model(model: Model) -> Model | None:
    """Return what drafts in sessions by default; None: nothing, or it is closed, or their device could not have it."""
    draft_model = model._session_defaults.draft_model
    on_device = model._session_defaults.device != "cpu" and model._lost is None
    if draft_model is None or draft_model.closed or (on_device and draft_model in model._left_out):
        return None
    return draft_model


def head_of(session: Session, draft_model: Model | None) -> Head | None:
    """Return what drafts from a session's hidden states; None: nothing, or a whole draft model drafts.

    Raises:
        ArgumentError: If the drafter does not belong to the model.
    """
    file = draft_model if is_drafter(draft_model) else None
    if file is None:
        return Head(session) if session.model.config["mtp_layers"] and draft_model is None else None
    head = Head(session, file)
    if not is_eagle(file):  # with a head, the session itself has checked that the two match
        head.core()
    return head


def open_head(
    model: Model, like: _core.Session, sequences: int, file: Model | None, numerics: int = 0, *, on_device: bool = False
) -> _core.Session:
    """Open a session of a model's MTP layer, or of a drafter's file, with the settings of a session of the model.

    on_device: Whether an MTP layer computes on the model's device. A drafter's file computes where the session does.
    """
    context, kv_dtype, threads, isa, *_ = like.describe()
    if file is not None and not is_eagle(file):
        return _core.Session(
            file._core, sequences=like.n_sequences, threads=threads, isa=isa, numerics=numerics, trunk=like
        )
    drafting = model if file is None else file
    return _core.Session(
        drafting._core,
        sequences=sequences,
        context=min(context, CONTEXT, drafting.config["context"]),
        kv_dtype=KV_NUMBERS[cast("KVDtype", kv_dtype)],
        threads=threads,
        isa=isa,
        numerics=numerics,
        on_device=on_device and file is None,
        mtp=file is None,
        trunk=None if file is None else like,
    )


def head_bytes(
    model: Model, like: _core.Session, sequences: int, file: Model | None, *, pages_on_device: bool = False
) -> int:
    """Return the maximum bytes of a head's session for this number of texts, without logits.

    pages_on_device: Whether its pages and states are on a device, and do not count.
    """
    core = open_head(model, like, sequences, file)
    try:
        activations, pages = _core.memory_limits(core, core.describe()[0])
    finally:
        core.close()
    states: int = 4 * (ROOM if file is None or is_eagle(file) else 1) * states_dim(model, file)
    return activations + (0 if pages_on_device else sequences * (pages + states))


def states_dim(model: Model, file: Model | None) -> int:
    """Return the width of the hidden states of a position that a head reads."""
    width: int = model.config["dim"]
    return len(file.config["eagle_layers"]) * width if file is not None and is_eagle(file) else width


class Head:
    """A session of a model's MTP layer, or of a drafter's file, with room for a few texts."""

    def __init__(self, session: Session, file: Model | None = None) -> None:
        """Prepare for a session of the model, whose settings and cancel flag the head shares.

        Args:
            session: The session.
            file: The drafter's file; None: the model's MTP layer.
        """
        self.session = session
        self.file = file
        self._work = mtp_work_of(session.model) if file is None else work_of(file)
        self._core: _core.Session | None = None

    def core(self) -> _core.Session:
        """Return the head's session, which is opened on first use. Raises LlamacError if there is no memory."""
        session = self.session
        if self._core is None:
            numerics = NUMERICS.index(session.numerics)
            on_device = session.device != "cpu"
            n = session._n_drafted
            self._core = open_head(session.model, session._core, n, self.file, numerics, on_device=on_device)
            self._core.follow(session._core)
        return self._core

    def drafter(self, sequence: int) -> Drafter:
        """Return a drafter for a text. sequence: its number among the texts for which the head drafts."""
        model, file = self.session.model, self.file
        if file is not None and not is_eagle(file):
            return AssistantDrafter(self, model)
        own: int = (file or model).config["dim"]
        return MtpDrafter(self, model.n_token_ids, (states_dim(model, file), own), sequence)

    def run(self, rows: Rows, inputs: Place, hidden: Place, *, is_first: bool = True) -> None:
        """Compute rows from hidden states, and receive those of the last row.

        Args:
            rows: The rows.
            inputs: The hidden states before the rows.
            hidden: Where those of the last row go.
            is_first: Whether `inputs` are the model's states; otherwise they are the head's, from the previous draft.
        """
        if is_eagle(self.file) and is_first:
            self.core().eval_rows(rows, prepare=self._prepare, states=inputs, hidden=hidden)
        else:
            self.core().eval_rows(rows, prepare=self._prepare, inputs=inputs, hidden=hidden)

    def _prepare(self, rows: int, positions: int) -> bool:
        """As `Session._prepare`, with the head's own work. The head follows the session's number of threads."""
        core, session = self.core(), self.session
        session._refresh()
        if core.describe()[2] != session._threads:
            core.set_threads(session._threads)
        return session._is_long(self._work.of(rows, positions))

    def memory(self) -> int:
        """Return the bytes in use, without logits and pages on a device.

        The pages of a drafter's file count as those of that model.
        """
        if self._core is None:
            return 0
        *_, activations, pages = self._core.describe()
        return int(activations + pages if self.file is None and self.session.device == "cpu" else activations)

    def close(self) -> None:
        """Free the session. The next use opens another one."""
        if self._core is not None:
            self._core.close()
            self._core = None
