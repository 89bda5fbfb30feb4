# The plan of a model: the graph as a list of steps (csrc/plan.h, which says what each step computes). Part of _core.pyx.

from collections import namedtuple


def _record(name, fields):
    return namedtuple(name, fields, module="llamac._core")


Operand = _record("Operand", "address bytes offset")
Linear = _record("Linear", "weights bias scales dtype rows columns strip_bytes")
NormWeights = _record("NormWeights", "is_rms eps weight bias")
Rope = _record("Rope", "layer table inv_freq inv_freq_long original_context dim factor")
EmbeddingAdapter = _record("EmbeddingAdapter", "a b")
Embed = _record("Embed", "layer tokens positions tokens_adapter positions_adapter scale")
Norm = _record("Norm", "layer input output width norm")
Product = _record("Product", "layer linear input output accumulate scale by_shared_weight stage"
                             " accumulate_stage")
Heads = _record("Heads", "layer n_heads n_kv_heads head_dim is_source norms norm_is_rms norm_per_head norm_after_rope eps"
                         " q_norm k_norm rope rope_dim")
Attend = _record("Attend", "layer n_heads n_kv_heads head_dim kv_source window scale query_beta query_context soft_cap"
                           " sinks")
Activate = _record("Activate", "layer activation gate up width is_clamped limit up_offset")
Route = _record("Route", "layer n_experts n_used normalized has_shared_gate")
ExpertProduct = _record("ExpertProduct", "layer linears input output accumulate")
Combine = _record("Combine", "layer n_used width accumulate is_adapted")
Add = _record("Add", "layer width scale norm")
Scale = _record("Scale", "layer buffer width scale cap")
Observe = _record("Observe", "layer stage buffer width shared_width")
Step = (Rope | Embed | Norm | Product | Heads | Attend | Activate | Route | ExpertProduct | Combine | Add | Scale
        | Observe)
Plan = _record("Plan", "steps widths max_experts_used")


cdef object _operand(const llamac_operand *o):
    """An Operand, or None if the model does not have it."""
    return Operand(<size_t>o.data, o.bytes, None if o.offset < 0 else o.offset) if o.data is not NULL else None


cdef object _linear(const llamac_linear *l):
    weights = _operand(&l.weights)
    return weights and Linear(weights, _operand(&l.bias), _operand(&l.scales), l.dtype, l.rows, l.columns,
                              l.strip_bytes)


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
        return Embed(l, _linear(&s.embed.tokens), _linear(&s.embed.positions),
                     _embedding_adapter(&s.embed.tokens_adapter), _embedding_adapter(&s.embed.positions_adapter),
                     s.embed.scale)
    if op == LLAMAC_OP_NORM:
        return Norm(l, _buffer(s.norm.input), _buffer(s.norm.output), s.norm.width, _norm_weights(&s.norm.norm))
    if op == LLAMAC_OP_PRODUCT:
        return Product(l, _linear(&s.product.linear), _buffer(s.product.input), _buffer(s.product.output),
                       bool(s.product.accumulate), s.product.scale, bool(s.product.by_shared_weight), s.product.stage,
                       bool(s.product.accumulate_stage))
    if op == LLAMAC_OP_HEADS:
        return Heads(l, s.heads.n_heads, s.heads.n_kv_heads, s.heads.head_dim, bool(s.heads.is_source),
                     bool(s.heads.norms), bool(s.heads.norm_is_rms), bool(s.heads.norm_per_head),
                     bool(s.heads.norm_after_rope), s.heads.eps, _operand(&s.heads.q_norm), _operand(&s.heads.k_norm),
                     s.heads.rope, s.heads.rope_dim)
    if op == LLAMAC_OP_ATTEND:
        return Attend(l, s.attend.n_heads, s.attend.n_kv_heads, s.attend.head_dim, s.attend.kv_source, s.attend.window,
                      s.attend.scale, s.attend.query_beta, s.attend.query_context, s.attend.soft_cap,
                      _operand(&s.attend.sinks))
    if op == LLAMAC_OP_ACTIVATE:
        return Activate(l, s.activate.activation, _buffer(s.activate.gate), _buffer(s.activate.up), s.activate.width,
                        bool(s.activate.is_clamped), s.activate.limit, s.activate.up_offset)
    if op == LLAMAC_OP_ROUTE:
        return Route(l, s.route.n_experts, s.route.n_used, bool(s.route.normalized), bool(s.route.has_shared_gate))
    if op == LLAMAC_OP_EXPERT_PRODUCT:
        return ExpertProduct(l, tuple([_linear(&s.expert_product.linears[i])
                                       for i in range(s.expert_product.n_experts)]),
                             _buffer(s.expert_product.input), _buffer(s.expert_product.output),
                             bool(s.expert_product.accumulate))
    if op == LLAMAC_OP_COMBINE:
        return Combine(l, s.combine.n_used, s.combine.width, bool(s.combine.accumulate),
                       bool(s.combine.is_adapted))
    if op == LLAMAC_OP_ADD:
        return Add(l, s.add.width, s.add.scale, _norm_weights(&s.add.norm))
    if op == LLAMAC_OP_SCALE:
        return Scale(l, _buffer(s.scale.buffer), s.scale.width, s.scale.scale, s.scale.cap)
    return Observe(l, s.observe.stage, _buffer(s.observe.buffer), s.observe.width, s.observe.shared_width)


def plan(Model model not None):
    """Return the plan of a model (llamac_plan_open)."""
    cdef llamac_plan p
    cdef llamac_error err
    cdef int i
    if model._ptr is NULL:
        raise ClosedError("the model is closed")
    check(llamac_plan_open(&p, model._ptr, &err), &err)
    try:
        steps = [_step(&p.steps[i]) for i in range(p.n_steps)]
        widths = {_buffer(i): p.widths[i] for i in range(1, LLAMAC_N_BUFFERS) if p.widths[i]}
        return Plan(steps, widths, p.max_experts_used)
    finally:
        llamac_plan_close(&p)
