"""The core's scalar kernels of layers: the reference for kernels on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from gpu.reference import Bytes, Floats
from numpy.typing import NDArray

from llamac.gpu.layer_launches import Router

KV_DTYPES = {"f32": 1, "f16": 2, "q8": 4}  # enum llamac_dtype


class Query(NamedTuple):
    """A query of attention, and what it sees."""

    pages: NDArray[np.uint64]  # addresses
    offset: int  # of the KV head in them
    q: Floats  # scaled
    visible: range
    position: int
    biases: Floats | None  # of the distances from -n to n


class LayerReference:
    """The kernels of layers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._library.rope_query_scale.restype = ctypes.c_float

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function with arrays (None: NULL), ints and floats."""
        converted: list[Any] = []
        for argument in arguments:
            if argument is None or isinstance(argument, np.ndarray):
                converted.append(ctypes.c_void_p(None if argument is None else argument.ctypes.data))
            else:
                converted.append(ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument))
        return getattr(self._library, name)(*converted)

    def norm(self, x: Floats, weight: Floats, bias: Floats | None, eps: float, *, is_rms: bool) -> Floats:
        y = np.empty_like(x)
        self._call("reference_norm", is_rms, x, weight, bias, eps, x.size, y)
        return y

    def activate(self, activation: int, gate: Floats, up: Floats | None) -> Floats:
        y = np.empty_like(gate)
        self._call("reference_activate", activation, gate, up, gate.size, y)
        return y

    def xielu(self, y: Floats, alphas: Floats) -> Floats:
        y = y.copy()
        self._call("reference_learned", y, y.size, float(alphas[0]), float(alphas[1]))
        return y

    def clamp(self, y: Floats, least: float, most: float, offset: float) -> Floats:
        y = y.copy()
        self._call("reference_clamp", y, y.size, least, most, offset)
        return y

    def scale(self, y: Floats, factor: float, cap: float) -> Floats:
        y = y.copy()
        self._call("reference_scale", y, y.size, factor, cap)
        return y

    def angles(self, position: int, inv_freq: Floats, factor: float) -> Floats:
        """Cosines, then sines."""
        both = np.empty((2, inv_freq.size), np.float32)
        self._call("rope_angles", position, inv_freq, inv_freq.size, factor, both[0], both[1])
        return both.reshape(-1)

    def query_scale(self, position: int, beta: float, context: int) -> np.float32:
        scale: float = self._call("rope_query_scale", position, beta, context)
        return np.float32(scale)

    def rotate(self, x: Floats, angles: Floats) -> Floats:
        x, half = x.copy(), angles.size // 2
        self._call("reference_rotate", x, angles[:half].copy(), angles[half:].copy(), half)
        return x

    def gate(self, y: Floats, gate: Floats) -> Floats:
        y = y.copy()
        self._call("reference_gate", y, gate, y.size)
        return y

    def unit_norm(self, x: Floats, eps: float, factor: float) -> Floats:
        x = x.copy()
        self._call("reference_unit_norm", x, x.size, eps, factor)
        return x

    def select(self, router: Router, choice_bias: Floats | None, logits: Floats) -> tuple[list[int], Floats]:
        """A row's experts and their weights, without factors."""
        experts, weights = np.empty(router.n_used, np.int32), np.empty(router.n_used, np.float32)
        settings = np.array([
            *(router.n_experts, router.n_used, router.is_sigmoid),
            *(router.n_groups, router.n_groups_used, router.normalized),
        ], np.int32)  # fmt: skip
        self._call("reference_select", settings, router.eps, router.scale, choice_bias, logits, experts, weights)
        return experts.tolist(), weights

    def convolve(
        self, inputs: Floats, weights: Floats, bias: Floats | None, before_start: int, *, is_silu: bool
    ) -> Floats:
        """The convolution of the rows after the first width - 1, of which the first before_start do not exist."""
        (width, channels), rows = weights.shape, len(inputs) - len(weights) + 1
        out = np.empty((rows, channels), np.float32)
        self._call("reference_convolve", inputs, rows, channels, width, before_start, int(is_silu), weights, bias, out)
        return out

    def delta(self, state: Floats, qk: Floats, v: Floats, gates: Floats, rate: float, dt_bias: float) -> Floats:
        """The delta rule of one head, whose state is updated. qk: (2, rows, key_dim); gates: (2, rows)."""
        out = np.empty_like(v)
        sizes = len(v), qk.shape[2], v.shape[1]
        self._call("reference_delta", *sizes, float(rate), float(dt_bias), state, qk, v, gates.copy(), out)
        return out

    def scan(
        self, state: Floats, bc: Floats, x: Floats, dt: Floats, limits: Floats, weights: tuple[float, float, float]
    ) -> Floats:
        """Mamba 2 of one head, whose state is updated. bc: (2, rows, state_dim); weights: rate, dt_bias, skip."""
        out, gates = np.empty_like(x), np.stack([dt, dt])
        sizes = len(x), bc.shape[2], x.shape[1]
        self._call("reference_scan", *sizes, limits, *map(float, weights), state, bc, x, gates, out)
        return out

    def softmax(self, x: Floats) -> Floats:
        padded = np.zeros(-(-x.size // 16) * 16, np.float32)
        padded[: x.size] = x
        self._call("reference_softmax", padded, x.size)
        return padded[: x.size]

    def head_bytes(self, dtype: str, dim: int, value_dim: int) -> tuple[int, int]:
        """Bytes of a head's keys and values in a page, and the offset of the values in them."""
        offset = np.zeros(1, np.int32)
        return self._call("reference_head_bytes", KV_DTYPES[dtype], dim, value_dim, offset), int(offset[0])

    def store(self, dtype: str, head: Bytes, slot: int, k: Floats, v: Floats) -> None:
        """Store a key and a value. head: a view of a page."""
        self._call("reference_store", KV_DTYPES[dtype], head, slot, k.size, v.size, k, v)

    def load(self, dtype: str, head: Bytes, slot: int, dim: int, value_dim: int) -> tuple[Floats, Floats]:
        k, v = np.empty(dim, np.float32), np.empty(value_dim, np.float32)
        self._call("reference_load", KV_DTYPES[dtype], head, slot, dim, value_dim, k, v)
        return k, v

    def attend(self, dtype: str, query: Query, soft_cap: float, sink: Floats | None, value_dim: int) -> Floats:
        """Attention of a query."""
        out = np.empty(value_dim, np.float32)
        self._attend(dtype, query, soft_cap, sink, value_dim, out, None)
        return out

    def scores(self, dtype: str, query: Query, soft_cap: float) -> Floats:
        """The scores of a query: (visible.stop), undefined at positions that it does not see."""
        scores = np.zeros(-(-query.visible.stop // 256) * 256, np.float32)
        self._attend(dtype, query, soft_cap, None, query.q.size, None, scores)
        return scores[: query.visible.stop]

    def _attend(
        self,
        dtype: str,
        query: Query,
        soft_cap: float,
        sink: Floats | None,
        value_dim: int,
        out: Floats | None,
        scores: Floats | None,
    ) -> None:
        distance = 0 if query.biases is None else query.biases.size // 2
        shape = KV_DTYPES[dtype], query.pages, query.offset, query.q.size, value_dim, query.q
        seen = query.visible.start, query.visible.stop, soft_cap, sink, query.biases, distance, query.position
        self._call("reference_attend", *shape, *seen, out, scores)

    def merge(self, partials: Floats, dim: int) -> Floats:
        """What partial results (blocks, queries, floats) become together: (queries, dim)."""
        blocks, queries = partials.shape[:2]
        out = np.empty((queries, -(-dim // 16) * 16), np.float32)
        self._call("reference_merge", partials, blocks, queries, dim, out)
        return out[:, :dim].copy()
