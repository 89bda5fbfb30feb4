"""A session: sequences of tokens with their KV cache, and the passes over them.

A pass that may take long is made interruptible (interrupt.py): the core looks at the cancel flag every few ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from llamac import _core
from llamac.arguments import whole_number, wrong_type
from llamac.errors import ArgumentError, ArgumentTypeError, ClosedError, ContextFullError
from llamac.interrupt import in_main_thread, interruptible

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.model import Model

    Logits = NDArray[np.float32]

# Work from which an eval may take longer than some 10 ms, in bytes that are read in that time: the weights once,
# MULTIPLY_ADD for every multiply-add of the rows after the first, `_attention_work` per row and position before it.
LONG_WORK = 100_000_000
LONG_WORK_SCALAR = 2_000_000
MULTIPLY_ADD = 2
EXP_WORK = 16  # an exponential takes as long as so many multiply-adds

KV_DTYPES = {None: 0, "f32": 1, "f16": 2}
assert all(name is None or _core.dtype_name(number) == name for name, number in KV_DTYPES.items())


def as_ids(ids: Iterable[int]) -> array[int]:
    """Token ids as 32-bit integers. Accepts any iterable of whole numbers, a one-dimensional NumPy array too."""
    if isinstance(ids, str | bytes | bytearray):
        raise ArgumentTypeError("expected token ids, got text: use model.tokenize(text) first")
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    try:
        ids = list(ids)
        # which an array would take for 0 and 1; NumPy's own kind has one of these names
        if not {"bool", "bool_"}.isdisjoint(kind.__name__ for kind in set(map(type, ids))):
            raise TypeError("'bool' object cannot be interpreted as an integer")
        return array("i", ids)
    except TypeError as error:
        raise ArgumentTypeError(f"token ids must be whole numbers of 32 bits: {error}") from None
    except OverflowError as error:
        raise ArgumentError(f"token ids must be whole numbers of 32 bits: {error}") from None


class Session:
    """Made by `Model.session()`. Used by one thread at a time: another one gets BusyError.

    `cancel` may come from anywhere. A context manager: leaving it frees the memory.
    """

    def __init__(
        self, model: Model, *, context: int | None, sequences: int, kv: str | None, threads: int | None, isa: str | None
    ) -> None:
        for name, value in (("kv", kv), ("isa", isa)):
            if not isinstance(value, str | None):
                raise wrong_type(name, value, "a text")
        if kv not in KV_DTYPES:
            raise ArgumentError(f"kv is {kv!r}, expected 'f32', 'f16' or None")
        if context is not None and whole_number(context, "context") < 1:
            raise ArgumentError(f"context is {context}, expected 1 to {model.config['context']}")
        from llamac import machine

        # only a number that nobody gave follows the machine
        self._following: machine.DefaultThreads | None = None
        if threads is None:
            self._following = machine.DefaultThreads(model.weight_bytes)
            threads = self._following.now()
        self._threads = threads
        self._model = model
        self._core = _core.Session(
            model._core,
            n_sequences=sequences,
            context=context or 0,
            kv_dtype=KV_DTYPES[kv],
            threads=threads,
            isa=machine.choose_isa(isa),
        )
        self._long_work = LONG_WORK_SCALAR if self.isa == "scalar" else LONG_WORK
        config = model.config
        per_head: int = 2 * config["head_dim"] + EXP_WORK
        self._attention_work: int = MULTIPLY_ADD * config["n_layers"] * config["n_heads"] * per_head

    # ---- facts

    @property
    def model(self) -> Model:
        """The model this session computes with."""
        return self._model

    @property
    def context(self) -> int:
        """Positions that a sequence can hold."""
        return self._core.describe()[0]

    @property
    def kv(self) -> str:
        """Number format of the KV cache: "f32" or "f16"."""
        return self._core.describe()[1]

    @property
    def threads(self) -> int:
        """Threads an eval may use now."""
        _, _, threads, *_ = self._core.describe()
        return threads if self._following is None else self._following.now()

    @property
    def isa(self) -> str:
        """Kernel set in use."""
        return self._core.describe()[3]

    def memory(self) -> dict[str, int]:
        """Bytes held now: "activations" and "kv"."""
        *_, activations, kv = self._core.describe()
        return {"activations": activations, "kv": kv}

    def length(self, sequence: int = 0) -> int:
        """Positions that a sequence holds."""
        return self._core.length(sequence)

    @property
    def closed(self) -> bool:
        """Whether the session has been closed."""
        return self._core.closed

    # ---- computing

    def eval(
        self, ids: Iterable[int], *, sequence: int = 0, logits: Literal["last", "all"] | None = "last"
    ) -> Logits | None:
        """Appends tokens to a sequence.

        logits: "last" returns those of the last token, shape (vocab_size); "all" those of every token, shape
        (n, vocab_size); None computes none and returns None. Raises ContextFullError if the tokens do not fit, before
        anything is computed, and CancelledError (with `done`, the tokens that were kept) after `cancel`.
        """
        tokens = as_ids(ids)
        if logits not in ("last", "all", None):
            raise ArgumentError(f"logits is {logits!r}, expected 'last', 'all' or None")
        rows = self._rows(tokens, sequence, logits)
        if logits is None:
            self._run(rows, None, ())
            return None
        import numpy as np

        count = len(tokens) if logits == "all" else 1
        out = np.empty((count, self._core.vocab_size), np.float32)
        self._run(rows, out.reshape(-1), ())
        return out if logits == "all" else out[0]

    def eval_rows(self, rows: Sequence[tuple[int, int, int, bool]]) -> Logits:
        """Computes rows of several sequences in one pass: (token, sequence, position, are its logits wanted) each.

        Rows of a sequence come in order and continue it. Returns the wanted logits in order, (n_wanted, vocab_size).
        """
        import numpy as np

        if not isinstance(rows, Sequence):
            raise wrong_type("rows", rows, "a list of rows")
        if not rows:
            raise ArgumentError("there are no rows to eval")
        packed = array("i")
        wanted = 0
        for row in rows:
            if not isinstance(row, Sequence) or len(row) != 4:
                raise wrong_type("a row", row, "(token, sequence, position, are its logits wanted)")
            token, sequence, position, want = row
            packed.extend(as_ids((token, sequence, position, int(bool(want)))))
            wanted += bool(want)
        out = np.empty((wanted, self._core.vocab_size), np.float32)
        self._run(packed, out.reshape(-1), ())
        return out

    def observe(
        self, ids: Iterable[int], stages: Iterable[str | tuple[str, int]], *, sequence: int = 0
    ) -> dict[tuple[str, int], Logits]:
        """Appends tokens like `eval` and returns what named stages of the graph held. No bit of the logits changes.

        stages: names of `llamac.STAGES`, for all layers, or (name, layer). The result maps (name, layer) to an array of
        shape (n, width) (layer is 0 for stages outside the layers); "scores" has shape (n, n_heads, context).
        """
        import numpy as np

        tokens = as_ids(ids)
        rows = self._rows(tokens, sequence, "all")
        found: dict[tuple[str, int], Logits] = {}
        for name, layer in self._stages(stages):
            width, _ = self._core.stage_width(_core.stages().index(name))
            found[name, layer] = np.empty((len(tokens), width), np.float32)
        wishes = [(_core.stages().index(name), layer, out.reshape(-1)) for (name, layer), out in found.items()]
        logits = np.empty(len(tokens) * self._core.vocab_size, np.float32)
        self._run(rows, logits, wishes)
        for (name, _), out in found.items():
            if name == "scores":
                out.shape = (len(tokens), self._model.config["n_heads"], self.context)
        return found

    def rewind(self, length: int, *, sequence: int = 0) -> None:
        """Forgets the positions from `length` on; an eval continues there."""
        self._core.rewind(length, sequence)

    def cancel(self) -> None:
        """Stops the eval that is running in another thread, within 50 ms; there it raises CancelledError."""
        self._check_open()
        self._core.cancel()

    def close(self) -> None:
        """Frees the session's memory. Closing twice is fine; BusyError while another thread computes with it."""
        self._core.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the session is closed")

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- for generation: logits stay in the core

    def prefill(self, ids: Iterable[int]) -> None:
        """Appends tokens to sequence 0 and keeps the last one's logits for `sample`."""
        self._run(self._rows(as_ids(ids), 0, "last"), None, ())

    def step(self, token: int, *, sequence: int = 0) -> None:
        """Appends one token to a sequence and keeps its logits for `sample`."""
        self._follow_machine()
        if self._is_long(1, self._core.length(sequence)):
            interruptible(lambda: self._core.step(token, sequence), self._core.cancel)
        else:
            self._core.step(token, sequence)

    def sample(self, sampling: _core.Sampling, n: int) -> int:
        """Draws the token that follows sequence 0 from its first n logits."""
        return self._core.sample(sampling, n, self._core.length())

    # ---- how

    def _follow_machine(self) -> None:
        """The default number of threads may have changed since the last pass."""
        if self._following is not None and (threads := self._following.now()) != self._threads:
            self._core.set_threads(threads)
            self._threads = threads

    def _rows(self, tokens: array[int], sequence: int, logits: str | None) -> array[int]:
        """Rows that append tokens to a sequence, flat: token, sequence, position, are its logits wanted; and so on.

        What does not fit is told here, before memory is taken for it."""
        if not tokens:
            raise ArgumentError("there are no tokens to eval")
        start = self._core.length(sequence)
        if start + len(tokens) > self.context:
            raise ContextFullError(
                f"{len(tokens)} tokens do not fit: {start} of the context's {self.context} positions are taken"
            )
        rows = array("i", bytes(16 * len(tokens)))
        rows[0::4] = tokens
        rows[1::4] = array("i", [sequence]) * len(tokens)
        rows[2::4] = array("i", range(start, start + len(tokens)))
        if logits == "all":
            rows[3::4] = array("i", [1]) * len(tokens)
        elif logits == "last":
            rows[-1] = 1
        return rows

    def _stages(self, stages: Iterable[str | tuple[str, int]]) -> list[tuple[str, int]]:
        found = []
        expected = "a list of names of stages, or of pairs (name, layer)"
        if isinstance(stages, str) or not isinstance(stages, Iterable):
            raise wrong_type("stages", stages, expected)
        for stage in stages:
            match stage:
                case str() as name:
                    layer = None
                case (str() as name, layer):
                    layer = whole_number(layer, "a stage's layer")
                case _:
                    raise ArgumentTypeError(f"stages holds {stage!r}, expected {expected}")
            if name not in _core.stages():
                raise ArgumentError(f"there is no stage {name!r}; the stages are {', '.join(_core.stages())}")
            per_layer = self._core.stage_width(_core.stages().index(name))[1]
            n_layers = self._model.config["n_layers"] if per_layer else 1
            if layer is not None and not 0 <= layer < n_layers:
                raise ArgumentError(f"stage {name!r} has no layer {layer}, expected 0 to {n_layers - 1}")
            found += [(name, layer)] if layer is not None else [(name, i) for i in range(n_layers)]
        return found

    def _run(self, packed: array[int], logits: Any, observations: Sequence[tuple[int, int, Any]]) -> None:
        """Computes rows as `_rows` makes them."""
        self._follow_machine()
        count = len(packed) // 4
        rows = memoryview(packed).cast("B").cast("i", (count, 4))
        if self._is_long(count, sum(packed[2::4])):
            interruptible(lambda: self._core.eval_rows(rows, logits, observations), self._core.cancel)
        else:
            self._core.eval_rows(rows, logits, observations)

    def _is_long(self, rows: int, seen: int) -> bool:
        """Whether so many rows may take so long that Ctrl-C has to be able to come between. seen: the positions before
        each of them, together."""
        work = self._model.weight_bytes + self._attention_work * seen
        if rows > 1:
            work += MULTIPLY_ADD * (rows - 1) * self._model._multiply_adds
        return work >= self._long_work and in_main_thread()
