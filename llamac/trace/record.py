"""The record of a trace: what a page shows of each token, reduced from the stages of the graph."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamac import __version__, ops
from llamac.arguments import checked_inputs
from llamac.engine.inspection.profile import Profile
from llamac.engine.rows import STAGES
from llamac.errors import ArgumentError, UnsupportedError
from llamac.export.equations import chosen_experts, expert_weights
from llamac.format.flatfile import without_logits
from llamac.progress import Progress, silent
from llamac.trace.attention import Attention
from llamac.trace.dump import open_dump
from llamac.trace.lens import Lens, lens_layers
from llamac.trace.predictions import Predictions, predictions
from llamac.trace.watching import checked_ids, heads_of_layers, stage_shapes, watch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamac.engine.inspection.profile import Costs
    from llamac.engine.model import Model
    from llamac.engine.session import Session
    from llamac.trace.watching import Part

    Floats = NDArray[np.float32]

LEAST_TOKENS, MAX_TOKENS = 4096, 16384  # tokens in a trace of any model, and in one of a model with few heads
LINKED_TOKENS = MAX_TOKENS * 1024  # tokens times the heads of all layers: one link of each takes 64 MB
ALTERNATIVES, LENS_ALTERNATIVES = 10, 3
ATTENTION_BYTES = 6 << 20  # of the links, and of the maps
PASSES = 3
PHASE = "tracing"
SEEN = ("embedding", "scores", "attn_out", "ffn_router", "ffn", "block", "logits")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        layer: The layer.
        total: The number of its experts.
        chosen: The experts of each token, those with the largest weights first: (n, used), u16.
        weights: Their weights: (n, used).
    """

    layer: int
    total: int
    chosen: NDArray[np.uint16]
    weights: Floats


@dataclass(frozen=True)
class Trace:
    """What is known about a text of n tokens.

    Attributes:
        about: Facts for the reader: the model, its shape, the settings.
        ids: The text; -1 for tokens that are not known.
        predictions: The model's predictions at each position.
        lens: The predictions of the logit lens, by layer. The last layer has those of the model.
        stream: The norms of the residual stream: of the embedding, then after each layer: (n_layers + 1, n).
        branches: The norms of what attention and the feed-forward network computed, before norms that follow:
            (2, n_layers, n).
        attention: The weights of attention.
        experts: The layers with experts.
        costs: The time of each layer and step in a pass without observers; None on a device that cannot measure.
        seconds: The time of that pass; 0 without costs.
    """

    about: dict[str, Any]
    ids: array[int]
    predictions: Predictions
    lens: dict[int, Predictions]
    stream: Floats
    branches: Floats
    attention: Attention
    experts: list[Experts]
    costs: Costs | None = None
    seconds: float = 0.0


def trace(
    model: Model,
    ids: Iterable[int] | None,
    *,
    inputs: Floats | None = None,
    context: int | None = None,
    lens: int | None = None,
    dump: Path | None = None,
    stages: Sequence[str] = STAGES,
    progress: Progress = silent,
) -> Trace:
    """Compute a text and record what the model does.

    Args:
        model: The model. Its defaults for sessions apply.
        ids: Token ids, at most `most_held`. None: those of `inputs` are not known, and no layer reads them.
        inputs: The numbers in place of the stage "embedding", only on the CPU: (n, dim), float32. None: those of `ids`.
        context: Positions of the session. Default: that of `llamac.load`, otherwise one for each token.
        lens: The number of layers for the logit lens; None: all. 0 leaves the lens out.
        dump: A file for the stages (safetensors), or None.
        stages: The stages of that file.
        progress: Called with the phase `PHASE` and the number of traced tokens.

    Raises:
        ArgumentError: If there are no ids, too many, or one is out of range; or a stage does not exist, or the model
            has none of the stages; or the layers read ids that are not given.
        ContextFullError: If the ids do not fit the context.
        DiskFullError: If the disk has no space for the dump.
        UnsupportedError: If the model predicts no tokens.
    """
    if kind := without_logits(model.config):
        raise UnsupportedError(
            f"the model is {kind}: a trace is about a model that predicts tokens; `Session.observe` returns its stages"
        )
    if ids is None and any(layer["layer_embedding_dim"] for layer in model.file.layers):
        raise ArgumentError("the layers of this model read the token ids, too: give `ids` beside the embeddings")
    # a row needs an id, although its inputs replace the embedding
    given = ids if ids is not None else array("i", [0]) * len(inputs if inputs is not None else ())
    found = checked_ids(model, given, context)
    inputs = checked_inputs(inputs, len(found), model.config["dim"])
    if len(found) > (most := most_held(model)):
        why = "" if most == MAX_TOKENS else ", because the links of its heads take memory"
        raise ArgumentError(
            f"the text has {len(found)} tokens, but a trace of this model holds at most {most}{why}: shorten the text"
        )
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        raise ArgumentError(f"there is no stage {unknown[0]!r}; the stages are {', '.join(STAGES)}")
    if lens is not None and lens < 0:
        raise ArgumentError(f"lens is {lens}, expected 0 or more layers")
    with model._session_for(len(found), context) as session:
        about = _about(model, session, found)
        known = found if ids is not None else array("i", [-1]) * len(found)
        recorder = _Recorder(model, session, known, lens)
        wanted = [name for name in STAGES if name in SEEN or (dump is not None and name in stages)]
        shapes = stage_shapes(session, stages, len(found))
        if dump is not None and not shapes:
            raise ArgumentError(f"the model has no stage {' or '.join(map(repr, stages))}")
        texts = {name: str(about[name]) for name in ("model", "version", "kv_dtype", "numerics")}
        with nullcontext() if dump is None else open_dump(dump, known, shapes, texts) as file:
            progress(PHASE, 0, len(found))
            for part in watch(session, found, wanted, inputs):
                if file is not None:
                    file.add(part)
                recorder.add(part)
                progress(PHASE, part.start + len(part.stages["logits", 0]), len(found))
    costs, seconds = _measure(model, found, context, inputs)
    return replace(recorder.finish(about), costs=costs, seconds=seconds)


def most_held(model: Model) -> int:
    """The most tokens that a trace of a model holds: 16384; with more than 1024 heads fewer, but at least 4096."""
    return min(MAX_TOKENS, max(LEAST_TOKENS, LINKED_TOKENS // max(sum(heads_of_layers(model)), 1)))


def most_tokens(model: Model, context: int | None) -> int:
    """The most tokens that a trace can have. context: as for `trace`."""
    return min(most_held(model), model._context_limit(context))


def _measure(model: Model, ids: array[int], context: int | None, inputs: Floats | None) -> tuple[Costs | None, float]:
    """The costs of a pass without observers, the fastest of a few if they are short, and its seconds."""
    with model._session_for(len(ids), context) as session:
        try:
            profile = Profile(session)
        except UnsupportedError:
            return None, 0.0
        passes: list[tuple[Costs, float]] = []
        while len(passes) < PASSES and sum(seconds for _, seconds in passes) < 1:
            session.truncate(0)
            before, started = profile.costs(), time.perf_counter()
            session._run(session._rows(ids), None, (), inputs)
            seconds = time.perf_counter() - started
            passes.append((profile.costs() - before, seconds))
        return min(passes, key=lambda each: each[1])


def _about(model: Model, session: Session, ids: array[int]) -> dict[str, Any]:
    config = model.config
    return {
        "model": (model.name or model.file.path.name).encode(errors="replace").decode(),  # as UTF-8, for files
        "version": __version__,
        "tokens": len(ids),
        "n_layers": config["n_layers"],
        "dim": config["dim"],
        "vocab_size": config["vocab_size"],
        "kv_dtype": session.kv_dtype,
        "numerics": session.numerics,
        "device": session.device,
    }


def _weights(scores: Floats, sinks: Floats | None) -> Floats:
    """The softmax of scores (n, heads, positions). A sink is one more logit of its head."""
    import numpy as np

    if sinks is None:
        return ops.softmax(np.ascontiguousarray(scores))
    logits = np.empty((*scores.shape[:2], scores.shape[2] + 1), np.float32)
    logits[:, :, :-1], logits[:, :, -1] = scores, sinks
    return ops.softmax(logits)[:, :, :-1]


class _Recorder:
    """Reduces the parts of a text."""

    def __init__(self, model: Model, session: Session, ids: array[int], lens: int | None) -> None:
        import numpy as np

        self._model, self._ids, n = model, ids, len(ids)
        self._following = np.append(np.array(ids[1:], np.int32), np.int32(-1))
        self._layers: Sequence[Any] = model.file.layers
        n_layers = len(self._layers)
        self._lens_layers = (
            [layer for layer in lens_layers(n_layers, lens) if layer < n_layers - 1] if lens != 0 else []
        )
        self._has_lens = lens != 0
        if self._lens_layers:
            _, _, threads, isa, *_ = session._core.describe()
            self._lens = Lens(model, session.numerics, isa, threads)
        self._attention = Attention(n, heads_of_layers(model), ATTENTION_BYTES)
        self._sinks = [
            model.file.tensor(f"layers.{i}.attn_sinks.weight") if layer["sinks"] else None
            for i, layer in enumerate(self._layers)
        ]
        self._choice_biases = [
            model.file.tensor(f"layers.{i}.ffn_router_choice.bias") if layer["router_choice_bias"] else None
            for i, layer in enumerate(self._layers)
        ]
        self._predictions: dict[int, list[Predictions]] = {}
        self._stream = np.empty((n_layers + 1, n), np.float32)
        self._branches = np.empty((2, n_layers, n), np.float32)
        self._experts = {
            i: Experts(
                i,
                layer["n_experts"],
                np.empty((n, layer["n_experts_used"]), np.uint16),
                np.empty((n, layer["n_experts_used"]), np.float32),
            )
            for i, layer in enumerate(self._layers)
            if layer["ffn"] == "experts"
        }

    def add(self, part: Part) -> None:
        """Reduce the stages of a part."""
        import numpy as np

        stages, start = part.stages, part.start
        end = start + len(stages["logits", 0])
        following, last = self._following[start:end], len(self._layers) - 1
        self._keep(last, predictions(stages["logits", 0], following, ALTERNATIVES))  # the lens has them, too
        for layer in self._lens_layers:
            self._keep(layer, predictions(self._lens.logits(stages["block", layer]), following, LENS_ALTERNATIVES))
        self._stream[0, start:end] = np.linalg.norm(stages["embedding", 0], axis=1)
        for layer, heads in enumerate(self._attention.heads):
            self._stream[layer + 1, start:end] = np.linalg.norm(stages["block", layer], axis=1)
            for i, name in enumerate(("attn_out", "ffn")):
                self._branches[i, layer, start:end] = np.linalg.norm(stages[name, layer], axis=1)
            if heads:
                scores = stages["scores", layer][:, :heads, :end]
                self._attention.add(layer, start, _weights(scores, self._sinks[layer]))
            if layer in self._experts:
                self._choose(layer, start, stages["ffn_router", layer])

    def _keep(self, layer: int, found: Predictions) -> None:
        self._predictions.setdefault(layer, []).append(found)

    def _choose(self, layer: int, start: int, router: Floats) -> None:
        """Note the experts that a layer's router chose."""
        import numpy as np

        record, to = self._layers[layer], self._experts[layer]
        logits, used = router[:, : to.total].astype(np.float64), record["n_experts_used"]
        choice: dict[str, Any] = {
            "router": record["router"],
            "choice_bias": self._choice_biases[layer],
            "groups": (record["n_expert_groups"], record["n_expert_groups_used"]),
        }
        is_normalized, eps = bool(record["expert_weights"]), record["expert_weights_eps"]
        weights = expert_weights(logits, used, is_normalized, eps=eps, **choice)
        ranks = np.where(chosen_experts(logits, used, **choice), weights, -1.0)
        best = np.argsort(-ranks, axis=1, kind="stable")[:, :used]
        to.chosen[start : start + len(router)] = best
        to.weights[start : start + len(router)] = np.take_along_axis(weights, best, axis=1)

    def finish(self, about: dict[str, Any]) -> Trace:
        """The record of all parts."""
        import numpy as np

        joined = {
            layer: Predictions(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
            for layer, parts in sorted(self._predictions.items())
        }
        own = joined[len(self._layers) - 1]
        return Trace(
            about,
            self._ids,
            own,
            joined if self._has_lens else {},
            self._stream,
            self._branches,
            self._attention,
            list(self._experts.values()),
        )
