# The plan of a model: the graph as a list of steps. csrc/plan.h says what each step computes. Part of _core.pyx.

from collections import namedtuple


def _record(name, fields):
    return namedtuple(name, fields, module="llamac._core")


Operand = _record("Operand", "address bytes offset")
Linear = _record("Linear", "weights bias scales dtype rows columns rounds_inputs strip_bytes")
NormWeights = _record("NormWeights", "is_rms eps weight bias")
Rope = _record("Rope", "layer table inv_freq inv_freq_long original_context dim factor")
EmbeddingAdapter = _record("EmbeddingAdapter", "a b")
Embed = _record("Embed", "layer tokens types positions tokens_adapter types_adapter positions_adapter scale")
Norm = _record("Norm", "layer input output width parts first stride to_first to_stride norm")
Product = _record("Product", "layer linear input output accumulate scale by_shared_weight stage accumulate_stage")
Heads = _record("Heads", "layer n_heads n_kv_heads head_dim value_dim latent_stride is_source norms norm_is_rms"
                         " norm_per_head norm_after_rope eps q_norm k_norm rope rope_dim v_is_k v_norm v_eps v_factor")
Attend = _record("Attend", "layer n_heads n_kv_heads head_dim value_dim kv_source window two_sided scale query_beta"
                           " query_context query_offset soft_cap sinks biases bias_distance")
Activate = _record("Activate", "layer activation alpha_p alpha_n gate up output width first stride by_weight is_clamped"
                               " limit up_offset")
Route = _record("Route", "layer n_experts n_used is_sigmoid n_groups n_groups_used normalized eps scale choice_bias"
                         " factors has_shared_gate")
ExpertProduct = _record("ExpertProduct", "layer linears input output accumulate")
Combine = _record("Combine", "layer output n_used width accumulate by_weight is_adapted")
Add = _record("Add", "layer to source width scale norm")
Scale = _record("Scale", "layer buffer width scale cap")
Gate = _record("Gate", "layer buffer gate width group")
LayerInputs = _record("LayerInputs", "layer table adapter dim input_scale own_scale scale norm")
Convolve = _record("Convolve", "layer input output channels width is_gated is_silu state_floats taps bias")
DeltaRule = _record("DeltaRule", "layer key_heads heads key_dim value_dim unit_eps q_factor beta_factor norm_eps decay"
                                 " dt_bias norm")
Scan = _record("Scan", "layer key_heads heads key_dim value_dim step_min step_max decay dt_bias skip")
HeadProduct = _record("HeadProduct", "layer linear heads input output first stride")
Copy = _record("Copy", "layer input output width first stride")
ClusterLogits = _record("ClusterLogits", "layer output linear n_clusters n_used vocab_size ids")
SpreadLogits = _record("SpreadLogits", "layer output n vocab_size ids")
Observe = _record("Observe", "layer stage buffer width shared_width first")
Step = (Rope | Embed | Norm | Product | Heads | Attend | Activate | Route | ExpertProduct | Combine | Add | Scale
        | Gate | LayerInputs | Convolve | DeltaRule | Scan | HeadProduct | Copy | ClusterLogits | SpreadLogits
        | Observe)
Plan = _record("Plan", "steps widths max_experts_used")


cdef object _operand(const llamac_operand *o):
    """An Operand, or None if the model does not have it."""
    return Operand(<size_t>o.data, o.bytes, None if o.offset < 0 else o.offset) if o.data is not NULL else None


cdef object _linear(const llamac_linear *l):
    weights = _operand(&l.weights)
    return weights and Linear(weights, _operand(&l.bias), _operand(&l.scales), l.dtype, l.rows, l.columns,
                              bool(l.rounds_inputs), l.strip_bytes)


cdef object _embedding_adapter(const llamac_embedding_adapter *e):
    a = _linear(&e.a)
    return a and EmbeddingAdapter(a, _linear(&e.b))


cdef object _norm_weights(const llamac_norm *n):
    weight = _operand(&n.weight)
    return weight and NormWeights(bool(n.is_rms), n.eps, weight, _operand(&n.bias))


cdef str _buffer(int buffer):
    return llamac_buffer_name(buffer).decode()


cdef object _step(const llamac_step *s):
    cdef int op = s.op, l = s.layer, i
    if op == LLAMAC_OP_ROPE:
        return Rope(l, s.rope.table, _operand(&s.rope.inv_freq), _operand(&s.rope.inv_freq_long),
                    s.rope.original_context, s.rope.dim, s.rope.factor)
    if op == LLAMAC_OP_EMBED:
        return Embed(l, _linear(&s.embed.tokens), _linear(&s.embed.types), _linear(&s.embed.positions),
                     _embedding_adapter(&s.embed.tokens_adapter), _embedding_adapter(&s.embed.types_adapter),
                     _embedding_adapter(&s.embed.positions_adapter), s.embed.scale)
    if op == LLAMAC_OP_NORM:
        return Norm(l, _buffer(s.norm.input), _buffer(s.norm.output), s.norm.width, s.norm.parts,
                    s.norm.first, s.norm.stride, s.norm.to_first, s.norm.to_stride, _norm_weights(&s.norm.norm))
    if op == LLAMAC_OP_PRODUCT:
        return Product(l, _linear(&s.product.linear), _buffer(s.product.input), _buffer(s.product.output),
                       bool(s.product.accumulate), s.product.scale, bool(s.product.by_shared_weight), s.product.stage,
                       bool(s.product.accumulate_stage))
    if op == LLAMAC_OP_HEADS:
        return Heads(l, s.heads.n_heads, s.heads.n_kv_heads, s.heads.head_dim, s.heads.value_dim,
                     s.heads.latent_stride, bool(s.heads.is_source), bool(s.heads.norms), bool(s.heads.norm_is_rms),
                     bool(s.heads.norm_per_head), bool(s.heads.norm_after_rope), s.heads.eps, _operand(&s.heads.q_norm),
                     _operand(&s.heads.k_norm), s.heads.rope, s.heads.rope_dim, bool(s.heads.v_is_k),
                     bool(s.heads.v_norm), s.heads.v_eps, s.heads.v_factor)
    if op == LLAMAC_OP_ATTEND:
        return Attend(l, s.attend.n_heads, s.attend.n_kv_heads, s.attend.head_dim, s.attend.value_dim,
                      s.attend.kv_source, s.attend.window, bool(s.attend.two_sided), s.attend.scale,
                      s.attend.query_beta, s.attend.query_context, s.attend.query_offset, s.attend.soft_cap,
                      _operand(&s.attend.sinks), _operand(&s.attend.biases), s.attend.bias_distance)
    if op == LLAMAC_OP_ACTIVATE:
        return Activate(l, s.activate.activation, _operand(&s.activate.alpha_p), _operand(&s.activate.alpha_n),
                        _buffer(s.activate.gate), _buffer(s.activate.up),
                        _buffer(s.activate.output), s.activate.width, s.activate.first, s.activate.stride,
                        bool(s.activate.by_weight), bool(s.activate.is_clamped), s.activate.limit,
                        s.activate.up_offset)
    if op == LLAMAC_OP_ROUTE:
        return Route(l, s.route.n_experts, s.route.n_used, bool(s.route.is_sigmoid), s.route.n_groups,
                     s.route.n_groups_used, bool(s.route.normalized), s.route.eps, s.route.scale,
                     _operand(&s.route.choice_bias), _operand(&s.route.factors), bool(s.route.has_shared_gate))
    if op == LLAMAC_OP_EXPERT_PRODUCT:
        return ExpertProduct(l, tuple([_linear(&s.expert_product.linears[i])
                                       for i in range(s.expert_product.n_experts)]),
                             _buffer(s.expert_product.input), _buffer(s.expert_product.output),
                             bool(s.expert_product.accumulate))
    if op == LLAMAC_OP_COMBINE:
        return Combine(l, _buffer(s.combine.output), s.combine.n_used, s.combine.width, bool(s.combine.accumulate),
                       bool(s.combine.by_weight), bool(s.combine.is_adapted))
    if op == LLAMAC_OP_ADD:
        return Add(l, _buffer(s.add.to), _buffer(s.add.from_), s.add.width, s.add.scale, _norm_weights(&s.add.norm))
    if op == LLAMAC_OP_SCALE:
        return Scale(l, _buffer(s.scale.buffer), s.scale.width, s.scale.scale, s.scale.cap)
    if op == LLAMAC_OP_GATE:
        return Gate(l, _buffer(s.gate.buffer), _buffer(s.gate.gate), s.gate.width, s.gate.group)
    if op == LLAMAC_OP_LAYER_INPUTS:
        return LayerInputs(l, _linear(&s.layer_inputs.table), _embedding_adapter(&s.layer_inputs.adapter),
                           s.layer_inputs.dim, s.layer_inputs.input_scale, s.layer_inputs.own_scale,
                           s.layer_inputs.scale, _norm_weights(&s.layer_inputs.norm))
    if op == LLAMAC_OP_CONVOLVE:
        return Convolve(l, _buffer(s.convolve.input), _buffer(s.convolve.output), s.convolve.channels,
                        s.convolve.width, bool(s.convolve.is_gated), bool(s.convolve.is_silu),
                        s.convolve.state_floats, _operand(&s.convolve.taps), _operand(&s.convolve.bias))
    if op == LLAMAC_OP_DELTA_RULE:
        return DeltaRule(l, s.delta_rule.key_heads, s.delta_rule.heads, s.delta_rule.key_dim, s.delta_rule.value_dim,
                         s.delta_rule.unit_eps, s.delta_rule.q_factor, s.delta_rule.beta_factor, s.delta_rule.norm_eps,
                         _operand(&s.delta_rule.decay), _operand(&s.delta_rule.dt_bias), _operand(&s.delta_rule.norm))
    if op == LLAMAC_OP_SCAN:
        return Scan(l, s.scan.key_heads, s.scan.heads, s.scan.key_dim, s.scan.value_dim, s.scan.step_min,
                    s.scan.step_max, _operand(&s.scan.decay), _operand(&s.scan.dt_bias), _operand(&s.scan.skip))
    if op == LLAMAC_OP_HEAD_PRODUCT:
        return HeadProduct(l, _linear(&s.head_product.linear), s.head_product.heads, _buffer(s.head_product.input),
                           _buffer(s.head_product.output), s.head_product.first, s.head_product.stride)
    if op == LLAMAC_OP_COPY:
        return Copy(l, _buffer(s.copy.input), _buffer(s.copy.output), s.copy.width, s.copy.first, s.copy.stride)
    if op == LLAMAC_OP_CLUSTER_LOGITS:
        return ClusterLogits(l, "logits", _linear(&s.cluster_logits.linear), s.cluster_logits.n_clusters,
                             s.cluster_logits.n_used, s.cluster_logits.vocab_size, _operand(&s.cluster_logits.ids))
    if op == LLAMAC_OP_SPREAD_LOGITS:
        return SpreadLogits(l, "logits", s.spread_logits.n, s.spread_logits.vocab_size, _operand(&s.spread_logits.ids))
    return Observe(l, s.observe.stage, _buffer(s.observe.buffer), s.observe.width, s.observe.shared_width,
                   s.observe.first)


def plan(Model model not None, *, bint mtp=False, Model trunk=None, bint is_further=False, state_layers=None):
    """Return the plan of a model, of its MTP layer, or of a drafter that drafts for a trunk (plan.h).

    With `state_layers`, three numbers of layers, the model's hidden states are those that an EAGLE-3 head reads. With
    `is_further`, a head continues from its own states. Raises ArgumentError for more than one of `mtp`, `trunk` and
    `state_layers`: a plan is of one of them.
    """
    cdef llamac_plan p
    cdef llamac_error err
    cdef int i
    cdef int[3] layers
    if mtp + (trunk is not None) + (state_layers is not None) > 1:
        raise ArgumentError("more than one of mtp, trunk and state_layers is given: an MTP layer has no trunk, a "
                            "drafter has no MTP layer, and no head reads the states of either")
    if is_further and trunk is None:
        raise ArgumentError("is_further is True, but there is no trunk: it is for EAGLE-3 heads")
    if state_layers is not None:
        layers = state_layers
    if model._ptr is NULL or (trunk is not None and trunk._ptr is NULL):
        raise ClosedError("the model is closed")
    if trunk is not None:
        check(llamac_plan_open_drafter(&p, model._ptr, trunk._ptr, is_further, &err), &err)
    elif state_layers is not None:
        check(llamac_plan_open_trunk(&p, model._ptr, layers, &err), &err)
    else:
        check(llamac_plan_open(&p, model._ptr, mtp, &err), &err)
    try:
        steps = [_step(&p.steps[i]) for i in range(p.n_steps)]
        widths = {_buffer(i): p.widths[i] for i in range(1, LLAMAC_N_BUFFERS) if p.widths[i]}
        return Plan(steps, widths, p.max_experts_used)
    finally:
        llamac_plan_close(&p)
