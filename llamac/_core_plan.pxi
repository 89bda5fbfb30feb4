# The plan of a model as records. csrc/plan.h says what each step computes. Part of _core.pyx.

_records = None   # llamac.plan_records, which only devices need; the first plan imports it


cdef object _operand(const llamac_operand *o):
    """An Operand, or None if the model does not have it."""
    if o.data is NULL:
        return None
    return _records.Operand(<size_t>o.data, o.bytes, None if o.offset < 0 else o.offset)


cdef object _linear(const llamac_linear *l):
    weights = _operand(&l.weights)
    return weights and _records.Linear(weights, _operand(&l.bias), _operand(&l.scales), l.dtype, l.rows, l.columns,
                                       bool(l.rounds_inputs), l.strip_bytes)


cdef object _embedding_adapter(const llamac_embedding_adapter *e):
    a = _linear(&e.a)
    return a and _records.EmbeddingAdapter(a, _linear(&e.b))


cdef object _norm_weights(const llamac_norm *n):
    weight = _operand(&n.weight)
    return weight and _records.NormWeights(bool(n.is_rms), n.eps, weight, _operand(&n.bias))


cdef str _buffer(int buffer):
    return llamac_buffer_name(buffer).decode()


cdef object _step(const llamac_step *s):
    cdef int op = s.op, l = s.layer, i
    if op == LLAMAC_OP_ROPE:
        return _records.Rope(l, s.rope.table, _operand(&s.rope.inv_freq), _operand(&s.rope.inv_freq_long),
                             s.rope.original_context, s.rope.dim, s.rope.factor)
    if op == LLAMAC_OP_EMBED:
        return _records.Embed(l, _linear(&s.embed.tokens), _linear(&s.embed.types), _linear(&s.embed.positions),
                              _embedding_adapter(&s.embed.tokens_adapter), _embedding_adapter(&s.embed.types_adapter),
                              _embedding_adapter(&s.embed.positions_adapter), s.embed.scale)
    if op == LLAMAC_OP_NORM:
        return _records.Norm(l, _buffer(s.norm.input), _buffer(s.norm.output), s.norm.width, s.norm.parts,
                             s.norm.first, s.norm.stride, s.norm.to_first, s.norm.to_stride,
                             _norm_weights(&s.norm.norm))
    if op == LLAMAC_OP_PRODUCT:
        return _records.Product(l, _linear(&s.product.linear), _buffer(s.product.input), _buffer(s.product.output),
                                bool(s.product.accumulate), s.product.scale, bool(s.product.by_shared_weight),
                                s.product.stage, bool(s.product.accumulate_stage))
    if op == LLAMAC_OP_HEADS:
        return _records.Heads(l, s.heads.n_heads, s.heads.n_kv_heads, s.heads.head_dim, s.heads.value_dim,
                              s.heads.latent_stride, bool(s.heads.is_source), bool(s.heads.norms),
                              bool(s.heads.norm_is_rms), bool(s.heads.norm_per_head), bool(s.heads.norm_after_rope),
                              s.heads.eps, _operand(&s.heads.q_norm), _operand(&s.heads.k_norm), s.heads.rope,
                              s.heads.rope_dim, bool(s.heads.v_is_k), bool(s.heads.v_norm), s.heads.v_eps,
                              s.heads.v_factor)
    if op == LLAMAC_OP_ATTEND:
        return _records.Attend(l, s.attend.n_heads, s.attend.n_kv_heads, s.attend.head_dim, s.attend.value_dim,
                               s.attend.kv_source, s.attend.window, bool(s.attend.two_sided), s.attend.scale,
                               s.attend.query_beta, s.attend.query_context, s.attend.query_offset, s.attend.soft_cap,
                               _operand(&s.attend.sinks), _operand(&s.attend.biases), s.attend.bias_distance)
    if op == LLAMAC_OP_ACTIVATE:
        return _records.Activate(l, s.activate.activation, _operand(&s.activate.alpha_p),
                                 _operand(&s.activate.alpha_n), _buffer(s.activate.gate), _buffer(s.activate.up),
                                 _buffer(s.activate.output), s.activate.width, s.activate.first, s.activate.stride,
                                 bool(s.activate.by_weight), bool(s.activate.is_clamped), s.activate.limit,
                                 s.activate.up_offset)
    if op == LLAMAC_OP_ROUTE:
        return _records.Route(l, s.route.n_experts, s.route.n_used, bool(s.route.is_sigmoid), s.route.n_groups,
                              s.route.n_groups_used, bool(s.route.normalized), s.route.eps, s.route.scale,
                              _operand(&s.route.choice_bias), _operand(&s.route.factors),
                              bool(s.route.has_shared_gate))
    if op == LLAMAC_OP_EXPERT_PRODUCT:
        linears = tuple([_linear(&s.expert_product.linears[i]) for i in range(s.expert_product.n_experts)])
        return _records.ExpertProduct(l, linears, _buffer(s.expert_product.input), _buffer(s.expert_product.output),
                                      bool(s.expert_product.accumulate))
    if op == LLAMAC_OP_COMBINE:
        return _records.Combine(l, _buffer(s.combine.output), s.combine.n_used, s.combine.width,
                                bool(s.combine.accumulate), bool(s.combine.by_weight), bool(s.combine.is_adapted))
    if op == LLAMAC_OP_ADD:
        return _records.Add(l, _buffer(s.add.to), _buffer(s.add.from_), s.add.width, s.add.scale,
                            _norm_weights(&s.add.norm))
    if op == LLAMAC_OP_SCALE:
        return _records.Scale(l, _buffer(s.scale.buffer), s.scale.width, s.scale.scale, s.scale.cap)
    if op == LLAMAC_OP_GATE:
        return _records.Gate(l, _buffer(s.gate.buffer), _buffer(s.gate.gate), s.gate.width, s.gate.group)
    if op == LLAMAC_OP_LAYER_INPUTS:
        return _records.LayerInputs(l, _linear(&s.layer_inputs.table), _embedding_adapter(&s.layer_inputs.adapter),
                                    s.layer_inputs.dim, s.layer_inputs.input_scale, s.layer_inputs.own_scale,
                                    s.layer_inputs.scale, _norm_weights(&s.layer_inputs.norm))
    if op == LLAMAC_OP_CONVOLVE:
        return _records.Convolve(l, _buffer(s.convolve.input), _buffer(s.convolve.output), s.convolve.channels,
                                 s.convolve.width, bool(s.convolve.is_gated), bool(s.convolve.is_silu),
                                 s.convolve.state_floats, _operand(&s.convolve.taps), _operand(&s.convolve.bias))
    if op == LLAMAC_OP_DELTA_RULE:
        return _records.DeltaRule(l, s.delta_rule.key_heads, s.delta_rule.heads, s.delta_rule.key_dim,
                                  s.delta_rule.value_dim, s.delta_rule.unit_eps, s.delta_rule.q_factor,
                                  s.delta_rule.beta_factor, s.delta_rule.norm_eps, _operand(&s.delta_rule.decay),
                                  _operand(&s.delta_rule.dt_bias), _operand(&s.delta_rule.norm))
    if op == LLAMAC_OP_SCAN:
        return _records.Scan(l, s.scan.key_heads, s.scan.heads, s.scan.key_dim, s.scan.value_dim, s.scan.step_min,
                             s.scan.step_max, _operand(&s.scan.decay), _operand(&s.scan.dt_bias),
                             _operand(&s.scan.skip))
    if op == LLAMAC_OP_HEAD_PRODUCT:
        return _records.HeadProduct(l, _linear(&s.head_product.linear), s.head_product.heads,
                                    _buffer(s.head_product.input), _buffer(s.head_product.output),
                                    s.head_product.first, s.head_product.stride)
    if op == LLAMAC_OP_COPY:
        return _records.Copy(l, _buffer(s.copy.input), _buffer(s.copy.output), s.copy.width, s.copy.first,
                             s.copy.stride)
    if op == LLAMAC_OP_CLUSTER_LOGITS:
        return _records.ClusterLogits(l, "logits", _linear(&s.cluster_logits.linear), s.cluster_logits.n_clusters,
                                      s.cluster_logits.n_used, s.cluster_logits.vocab_size,
                                      _operand(&s.cluster_logits.ids))
    if op == LLAMAC_OP_SPREAD_LOGITS:
        return _records.SpreadLogits(l, "logits", s.spread_logits.n, s.spread_logits.vocab_size,
                                     _operand(&s.spread_logits.ids))
    return _records.Observe(l, s.observe.stage, _buffer(s.observe.buffer), s.observe.width, s.observe.shared_width,
                            s.observe.first)


def plan(Model model not None, *, bint mtp=False, Model trunk=None, bint after_draft=False, state_layers=None):
    """Return the plan of a model, of its MTP layer, or of a drafter that drafts for a trunk (plan.h).

    With `state_layers`, three numbers of layers, the model's hidden states are those that an EAGLE-3 head reads. With
    `after_draft`, a head continues from its own states. Raises ArgumentError for more than one of `mtp`, `trunk` and
    `state_layers`: a plan is of one of them.
    """
    cdef llamac_plan p
    cdef llamac_error err
    cdef int i
    cdef int[3] layers
    global _records
    if _records is None:
        from . import plan_records as _records
    if mtp + (trunk is not None) + (state_layers is not None) > 1:
        raise ArgumentError("more than one of mtp, trunk and state_layers is given: an MTP layer has no trunk, a "
                            "drafter has no MTP layer, and no head reads the states of either")
    if after_draft and trunk is None:
        raise ArgumentError("after_draft is True, but there is no trunk: it is for EAGLE-3 heads")
    if state_layers is not None:
        layers = state_layers
    if model._ptr is NULL or (trunk is not None and trunk._ptr is NULL):
        raise ClosedError("the model is closed")
    if trunk is not None:
        check(llamac_plan_open_drafter(&p, model._ptr, trunk._ptr, after_draft, &err), &err)
    elif state_layers is not None:
        check(llamac_plan_open_trunk(&p, model._ptr, layers, &err), &err)
    else:
        check(llamac_plan_open(&p, model._ptr, mtp, &err), &err)
    try:
        steps = [_step(&p.steps[i]) for i in range(p.n_steps)]
        widths = {_buffer(i): p.widths[i] for i in range(1, LLAMAC_N_BUFFERS) if p.widths[i]}
        return _records.Plan(steps, widths, p.max_experts_used)
    finally:
        llamac_plan_close(&p)
