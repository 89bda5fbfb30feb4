"""Runs the steps of a model's plan (csrc/plan.h) with the kernels: a method for each kind of step.

Nothing here depends on a family: the plan says what to compute; launches.py, layer_launches.py and
recurrent_launches.py say how.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from llamac import plan_records
from llamac.gpu import drafter_launches, launches, layer_launches, recurrent_launches
from llamac.gpu.buffers import HIDDEN_BUFFERS, OUTPUT_BUFFERS, PAIR_BUFFERS, Buffers, packed_name
from llamac.gpu.drafter_launches import ClusterMemory
from llamac.gpu.launches import Epilogue, Form, Part
from llamac.gpu.layer_launches import (
    NO_EXPERT_ADAPTERS,
    NO_HEAD_NORMS,
    AttentionInputs,
    Cache,
    ExpertAdapters,
    HeadNorm,
    HeadNorms,
    Latents,
    Packed,
    Router,
    Rows,
)
from llamac.gpu.passes import CacheLayout, RowMemory, Shape
from llamac.gpu.recurrent_launches import Convolution, DeltaNet, Mamba2, States
from llamac.gpu.steps import AddAndNorm, Products, attention_kind, head_shape, packed_forms

if TYPE_CHECKING:
    from llamac.gpu.attention_tiles import AttentionTiles
    from llamac.gpu.driver import Driver
    from llamac.gpu.measuring import Measuring
    from llamac.gpu.observing import Observing
    from llamac.gpu.operands import Operands


class StepRunner:
    """Launches the kernels of steps, one pass after another.

    Args:
        driver: The device.
        plan: The model's plan.
        operands: Its operands on the device.
        cache: The sessions' pages.
        long_ropes: The RoPE tables of which the sessions use the long form.
        fast: Whether numerics are fast.
        memory: The rows, buffers and tiles of passes, which have room for the shape that runs.
    """

    def __init__(
        self,
        driver: Driver,
        plan: plan_records.Plan,
        operands: Operands,
        cache: CacheLayout,
        memory: tuple[RowMemory, Buffers, AttentionTiles],
        *,
        long_ropes: Collection[int],
        fast: bool,
    ) -> None:
        self._driver = driver
        self._operands = operands
        self._cache = cache
        self._rows, self._buffers, self._tiles = memory
        self._long_ropes = long_ropes
        self._fast = fast
        self._forms = packed_forms(plan.steps, fast=fast)
        # the pass that runs
        self._shape = Shape(0, 0, 0, False, 0, 0, (), 0)
        self._observing: Observing | None = None
        self._packed: dict[str, str] = {}  # by place of packed inputs: the buffer that they come from
        self._used = self._n_experts = 0  # of the last ROUTE step
        self._run_step: dict[type, Callable[[Any], None]] = {
            plan_records.Rope: self._rope,
            plan_records.Embed: self._embed,
            plan_records.Norm: self._norm,
            Products: self._products,
            plan_records.HeadProduct: self._head_product,
            plan_records.Heads: self._heads,
            plan_records.Attend: self._attend,
            plan_records.Activate: self._activate,
            plan_records.Route: self._route,
            plan_records.Combine: self._combine,
            plan_records.Add: self._add,
            AddAndNorm: self._add_and_norm,
            plan_records.Scale: self._scale,
            plan_records.Gate: self._gate,
            plan_records.LayerInputs: self._layer_inputs,
            plan_records.Convolve: self._convolve,
            plan_records.DeltaRule: self._delta_rule,
            plan_records.Scan: self._scan,
            plan_records.Copy: self._copy,
            plan_records.ClusterLogits: self._cluster_logits,
            plan_records.SpreadLogits: self._spread_logits,
            plan_records.Observe: self._observe,
        }

    def run(
        self,
        steps: Sequence[Any],
        shape: Shape,
        observing: Observing | None = None,
        measuring: Measuring | None = None,
    ) -> None:
        """Launch the kernels of the steps that a pass of this shape needs. measuring: measures the same steps."""
        self._shape, self._observing = shape, observing
        self._packed.clear()
        for number, step in enumerate(steps):
            if measuring:
                measuring.before(number)
            if self._is_wanted(step):
                self._run_step[type(step)](step)
        if measuring:
            measuring.end()

    def _is_wanted(self, step: Any) -> bool:
        """Whether the pass needs a step. It may want no hidden states, no norm or no logits."""
        written = getattr(step, "output", getattr(step, "buffer", ""))
        if written == "output_normed" or written in HIDDEN_BUFFERS:
            return self._count(written) > 0
        return self._shape.logits or written not in OUTPUT_BUFFERS

    @property
    def _pass_rows(self) -> Rows:
        rows = self._rows
        return Rows(self._shape.rows, rows.positions, rows.table_of, rows.last_table_of, rows.ends)

    def _layer_cache(self, layer: int) -> Cache:
        place = self._cache.layers[layer]
        tables = self._rows.tables(place.group, self._shape)
        return Cache(self._cache.dtype, tables, self._shape.pages, place.offset, place.head_bytes, place.value_offset)

    def _count(self, buffer: str) -> int:
        """The rows of a buffer in this pass."""
        if buffer in HIDDEN_BUFFERS:
            return self._shape.hidden
        return self._shape.wanted if buffer in OUTPUT_BUFFERS else self._shape.rows

    def _packed_with(self, step: Any, buffer: str) -> list[Packed]:
        """Where a step packs the buffer that it writes, for the products that read it first."""
        return [Packed(form, self._buffers[packed_name(buffer, form)]) for form in self._forms.get(id(step), ())]

    def _written(self, buffer: str, packed: Sequence[Packed] = ()) -> None:
        """Forget packed inputs of a buffer that has been written, but for those that were packed along with it."""
        for place in [place for place, source in self._packed.items() if source == buffer]:
            del self._packed[place]
        for each in packed:
            self._packed[packed_name(buffer, each.form)] = buffer

    def _inputs(self, buffer: str, form: Form, columns: int, rows: int, *, rounds: bool = False) -> int:
        """The address of a buffer's rows as inputs of products. They are packed once; rounds: rounded before that."""
        if form is Form.F32 and not rounds:
            return self._buffers[buffer]
        place = packed_name(buffer, form)
        if self._packed.get(place) != buffer:
            pack = launches.round_and_pack if rounds else launches.pack
            pack(self._driver, form, self._buffers[buffer], rows, columns, self._buffers[place])
            self._packed[place] = buffer
        return self._buffers[place]

    def _rope(self, step: plan_records.Rope) -> None:
        is_long = step.table in self._long_ropes
        inv_freq = self._operands.address(step.inv_freq_long if is_long else step.inv_freq)
        angles = self._buffers[f"angles {step.table}"]
        layer_launches.rope_angles(self._driver, self._pass_rows, inv_freq, step.dim // 2, step.factor, angles)

    def _embed(self, step: plan_records.Embed) -> None:
        launches.embed(
            self._driver,
            self._operands.embedding(step.tokens, step.tokens_adapter),
            self._operands.embedding(step.types, step.types_adapter) if step.types else None,
            self._operands.embedding(step.positions, step.positions_adapter) if step.positions else None,
            self._shape.rows,
            self._rows.tokens,
            self._rows.types,
            self._rows.positions,
            step.scale,
            self._buffers["x"],
        )
        self._written("x")

    def _norm(self, step: plan_records.Norm) -> None:
        weights = self._operands.norm(step.norm)
        assert weights is not None
        x, y = self._buffers[step.input] + 4 * step.first, self._buffers[step.output] + 4 * step.to_first
        indices = self._rows.wanted if step.output == "output_normed" else 0
        packed = self._packed_with(step, step.output)
        rows, strides = self._count(step.output), (step.stride, step.to_stride)
        if step.output in HIDDEN_BUFFERS:  # of the last rows
            x += 4 * step.stride * (self._shape.rows - rows)
        layer_launches.norm(self._driver, rows, step.width, weights, x, y, indices, packed, step.parts, strides)
        self._written(step.output, packed)

    def _products(self, products: Products) -> None:
        steps = products.steps
        step = steps[0]
        if isinstance(step, plan_records.ExpertProduct):
            self._expert_products(steps)
            return
        rows, by_dtype = self._count(step.input), products.by_dtype
        if len(by_dtype) > 1:
            if rows == 1:
                self._mixed_products(products)
            else:
                for each in by_dtype:
                    self._products(Products(each, products.layer))
            return
        form = launches.form_of(step.linear.dtype, fast=self._fast)
        inputs = self._inputs(step.input, form, step.linear.columns, rows, rounds=step.linear.rounds_inputs)
        weights = self._buffers["shared_weights"] if step.by_shared_weight else 0
        if step.scale != 1:
            assert not weights  # the plan scales a branch of experts when it is added
            weights = self._operands.factors(step.scale, rows)
        copy = self._observing.copy(step.stage, step.layer) if self._observing and step.stage >= 0 else 0
        epilogue = Epilogue(copy, weights, step.accumulate, step.accumulate_stage)
        launches.products(self._driver, self._parts_of(steps), inputs, rows, form, epilogue)
        for each in steps:
            self._written(each.output)

    def _parts_of(self, steps: Sequence[plan_records.Product]) -> list[Part]:
        of, to = self._operands, self._buffers
        return [Part(of.matrix(step.linear), to[step.output], of.address(step.linear.bias)) for step in steps]

    def _mixed_products(self, products: Products) -> None:
        first, second = (
            self._inputs(step.input, launches.form_of(step.linear.dtype, fast=self._fast), step.linear.columns, 1)
            for step, *_ in products.by_dtype
        )
        launches.mixed_products(self._driver, self._parts_of(products.steps), (first, second))
        for each in products.steps:
            self._written(each.output)

    def _head_product(self, step: plan_records.HeadProduct) -> None:
        matrices, rows, to = self._operands.heads[id(step)], self._shape.rows, self._buffers[step.output]
        form = launches.form_of(matrices.dtype, fast=self._fast)
        inputs = self._buffers[step.input] + 4 * step.first
        if form is not Form.F32 or step.stride != matrices.columns:
            place = packed_name(step.input, form)
            layout = step.heads, step.stride
            launches.pack(self._driver, form, inputs, rows, matrices.columns, self._buffers[place], *layout)
            self._packed.pop(place, None)
            inputs = self._buffers[place]
        launches.head_products(self._driver, matrices, step.heads, inputs, rows, form, to)
        self._written(step.output)

    def _heads(self, step: plan_records.Heads) -> None:
        norms = NO_HEAD_NORMS
        if step.norms:
            norms = HeadNorms(
                HeadNorm.RMS if step.norm_is_rms else HeadNorm.LAYER,
                step.norm_per_head,
                step.norm_after_rope,
                step.eps,
                self._operands.address(step.q_norm),
                self._operands.address(step.k_norm),
            )
        if step.v_norm:
            norms = norms._replace(v_eps=step.v_eps, v_factor=step.v_factor)
        k, v = (self._buffers["k"], self._buffers["v"]) if step.is_source else (0, 0)
        latents = None
        if step.latent_stride:
            latents = Latents(self._buffers["latent_heads"], step.latent_stride, self._buffers["mix"])
        layer_launches.heads(
            self._driver,
            self._pass_rows,
            head_shape(step),
            norms,
            self._buffers["q"],
            k,
            v,
            self._buffers[f"angles {step.rope}"] if step.rope >= 0 else 0,
            step.rope_dim,
            self._layer_cache(step.layer),
            is_source=step.is_source,
            v_is_k=step.v_is_k,
            latents=latents,
        )

    def _attention_inputs(self, step: plan_records.Attend) -> AttentionInputs:
        scales = 0
        if step.query_beta:
            scales = self._buffers["query_scales"]
            tuning = step.scale, step.query_beta, step.query_context, step.query_offset
            layer_launches.query_scales(self._driver, self._pass_rows, *tuning, scales)
        of_distances = self._operands.address(step.biases), step.bias_distance
        return AttentionInputs(self._buffers["q"], step.scale, scales, step.window, step.soft_cap, *of_distances)

    def _attend(self, step: plan_records.Attend) -> None:
        kind = attention_kind(step)
        division = self._tiles.division(self._shape, kind)
        inputs, cache = self._attention_inputs(step), self._layer_cache(step.kv_source)
        rows = self._pass_rows._replace(positions=self._rows.viewpoints)
        packed = self._packed_with(step, "mix")
        layer_launches.attend(
            self._driver,
            rows,
            kind,
            inputs,
            cache,
            division.tiles,
            division.entries,
            self._operands.address(step.sinks),
            self._buffers["mix"],
            self._tiles.partials,
            *packed,
        )
        self._written("mix", packed)
        if self._observing:
            self._observing.attention(rows, kind.heads, inputs, cache, step.layer)

    def _activate(self, step: plan_records.Activate) -> None:
        rows = self._pairs if step.output == "expert_up" else self._shape.rows
        packed = self._packed_with(step, step.output)
        layer_launches.activate(
            self._driver,
            rows,
            step.width,
            step.activation,
            0 if step.gate == "none" else self._buffers[step.gate],
            self._buffers[step.up] + 4 * step.first,
            limit=step.limit,
            up_offset=step.up_offset,
            is_clamped=step.is_clamped,
            stride=step.stride,
            output=self._buffers[step.output],
            alphas=(self._operands.address(step.alpha_p), self._operands.address(step.alpha_n)),
            row_weights=self._buffers["pair_weights"] if step.by_weight else 0,
            packed=packed[0] if packed else None,
        )
        self._written(step.output, packed)

    def _route(self, step: plan_records.Route) -> None:
        buffers = self._buffers
        self._used, self._n_experts = step.n_used, step.n_experts
        layer_launches.choose_experts(
            self._driver,
            self._shape.rows,
            Router(
                n_experts=step.n_experts,
                n_used=step.n_used,
                normalized=step.normalized,
                is_sigmoid=step.is_sigmoid,
                n_groups=step.n_groups,
                n_groups_used=step.n_groups_used,
                eps=step.eps,
                scale=step.scale,
                choice_bias=self._operands.address(step.choice_bias),
                factors=self._operands.address(step.factors),
            ),
            buffers["router"],
            buffers["experts"],
            buffers["weights"],
            shared_gate=buffers["shared_gate"] if step.has_shared_gate else 0,
            shared_weights=buffers["shared_weights"],
        )
        layer_launches.sort_pairs(
            self._driver,
            self._shape.rows,
            step.n_experts,
            step.n_used,
            buffers["experts"],
            buffers["weights"],
            scratch=buffers["masks"],
            starts=buffers["starts"],
            pair_rows=buffers["pair_rows"],
            pair_of=buffers["pair_of"],
            pair_weights=buffers["pair_weights"],
        )
        launches.tile_pairs(self._driver, buffers["starts"], step.n_experts, self._pairs, buffers["tiles"])

    @property
    def _pairs(self) -> int:
        return self._shape.rows * self._used

    def _expert_products(self, steps: Sequence[plan_records.ExpertProduct]) -> None:
        source, buffers = steps[0].input, self._buffers
        by_pair = source in PAIR_BUFFERS
        rows = self._pairs if by_pair else self._shape.rows
        for tables in zip(*(self._operands.experts[id(step)] for step in steps), strict=True):
            form = launches.form_of(tables[0].dtype, fast=self._fast)
            launches.expert_products(
                self._driver,
                [(experts, buffers[step.output]) for experts, step in zip(tables, steps, strict=True)],
                self._inputs(source, form, tables[0].columns, rows),
                0 if by_pair else buffers["pair_rows"],
                self._n_experts,
                self._pairs,
                buffers["tiles"],
                form,
                accumulate=steps[0].accumulate,
            )
        for step in steps:
            self._written(step.output)

    def _combine(self, step: plan_records.Combine) -> None:
        buffers, adapters = self._buffers, NO_EXPERT_ADAPTERS
        if step.is_adapted:
            is_adapted = self._operands.adapted_experts[step.layer]
            adapters = ExpertAdapters(buffers["expert_added"], buffers["experts"], is_adapted)
        layer_launches.combine_experts(
            self._driver,
            self._shape.rows,
            step.n_used,
            step.width,
            buffers["expert_out"],
            buffers["pair_of"],
            buffers["weights"] if step.by_weight else 0,
            buffers[step.output],
            accumulate=step.accumulate,
            adapters=adapters,
        )
        self._written(step.output)

    def _add(self, step: plan_records.Add) -> None:
        to, source, norm = self._buffers[step.to], self._buffers[step.source], self._operands.norm(step.norm)
        layer_launches.add(self._driver, self._shape.rows, step.width, to, source, step.scale, norm, to)
        self._written(step.to)

    def _add_and_norm(self, step: AddAndNorm) -> None:
        x, add, norm = self._buffers["x"], step.add, step.norm
        packed = self._packed_with(norm, norm.output)
        layer_launches.add_and_norm(
            self._driver,
            self._shape.rows,
            add.width,
            x,
            branch=self._buffers["branch"],
            scale=add.scale,
            branch_norm=self._operands.norm(add.norm),
            total=x,
            weights=self._operands.norm(norm.norm),
            y=self._buffers[norm.output],
            packed=packed,
        )
        self._written("x")
        self._written(norm.output, packed)

    def _scale(self, step: plan_records.Scale) -> None:
        n = self._count(step.buffer) * step.width
        layer_launches.scale(self._driver, n, self._buffers[step.buffer], step.scale, step.cap)
        self._written(step.buffer)

    def _gate(self, step: plan_records.Gate) -> None:
        n = self._shape.rows * step.width
        layer_launches.gate(self._driver, n, self._buffers[step.buffer], self._buffers[step.gate], step.group)
        self._written(step.buffer)

    def _states(self, layer: int) -> States:
        rows = self._rows
        return States(rows.segments, rows.starts, self._shape.chains, self._cache.layers[layer].state_offset)

    def _convolve(self, step: plan_records.Convolve) -> None:
        sizes = step.channels, step.width, step.is_gated, step.is_silu
        weights = self._operands.address(step.taps), self._operands.address(step.bias)
        recurrent_launches.convolve(
            self._driver,
            self._shape.rows,
            Convolution(*sizes, *weights, step.state_floats),
            self._buffers[step.input],
            self._rows.positions,
            self._states(step.layer),
            self._buffers[step.output],
        )
        self._written(step.output)

    def _delta_rule(self, step: plan_records.DeltaRule) -> None:
        sizes = step.key_heads, step.heads, step.key_dim, step.value_dim
        weights = (self._operands.address(each) for each in (step.decay, step.dt_bias, step.norm))
        recurrent_launches.delta_rule(
            self._driver,
            self._shape.rows,
            DeltaNet(*sizes, step.unit_eps, step.q_factor, step.beta_factor, step.norm_eps, *weights),
            self._buffers["conv_out"],
            self._buffers["state_decay"],
            self._buffers["state_beta"],
            self._buffers["state_z"],
            self._states(step.layer),
            self._buffers["mix"],
        )
        self._written("mix")

    def _scan(self, step: plan_records.Scan) -> None:
        sizes = step.key_heads, step.heads, step.key_dim, step.value_dim
        weights = (self._operands.address(each) for each in (step.decay, step.dt_bias, step.skip))
        buffers = self._buffers
        recurrent_launches.scan(
            self._driver,
            self._shape.rows,
            Mamba2(*sizes, step.step_min, step.step_max, *weights),
            xbc=buffers["conv_out"],
            decay=buffers["state_decay"],
            step=buffers["state_beta"],
            states=self._states(step.layer),
            mix=buffers["mix"],
        )
        self._written("mix")

    def _layer_inputs(self, step: plan_records.LayerInputs) -> None:
        norm = self._operands.norm(step.norm)
        assert norm is not None
        launches.layer_inputs(
            self._driver,
            self._operands.embedding(step.table, step.adapter),
            self._shape.rows,
            self._rows.tokens,
            step.dim,
            (step.input_scale, step.own_scale, step.scale),
            norm,
            self._buffers["layer_inputs"],
        )
        self._written("layer_inputs")

    def _copy(self, step: plan_records.Copy) -> None:
        rows = self._count(step.output)
        x = self._buffers[step.input] + 4 * step.width * (self._shape.rows - rows)  # hidden states are of the last rows
        y = self._buffers[step.output] + 4 * step.first
        drafter_launches.copy_rows(self._driver, rows, step.width, x, y, step.stride)
        self._written(step.output)

    def _cluster_logits(self, step: plan_records.ClusterLogits) -> None:
        buffers, linear, rows = self._buffers, step.linear, self._shape.wanted
        form = launches.form_of(linear.dtype, fast=self._fast)
        drafter_launches.cluster_logits(
            self._driver,
            rows,
            self._operands.clusters[id(step)],
            buffers["cluster_scores"],
            self._inputs("output_normed", form, linear.columns, rows, rounds=linear.rounds_inputs),
            form,
            ClusterMemory(buffers["cluster_tiles"], buffers["cluster_rows"], buffers["in_clusters"]),
            buffers[step.output],
        )
        self._written(step.output)

    def _spread_logits(self, step: plan_records.SpreadLogits) -> None:
        x, y, ids = self._buffers["head_logits"], self._buffers[step.output], self._operands.address(step.ids)
        drafter_launches.spread_logits(self._driver, self._shape.wanted, step.n, step.vocab_size, x, ids, y)
        self._written(step.output)

    def _observe(self, step: plan_records.Observe) -> None:
        assert self._observing is not None
        if step.buffer == "expert_up":
            self._observing.experts(step, self._buffers, self._used)
        else:
            address = 0 if step.buffer == "none" else self._buffers[step.buffer]
            self._observing.buffer(step, address, self._count(step.buffer))
