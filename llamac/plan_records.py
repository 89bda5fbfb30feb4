"""A model's plan as records: the steps that a device executes, with their buffers and tensors.

csrc/plan.h says what each step computes. `_core.plan` makes the records.

In all steps, `layer` is -1 before and after the layers. Strings name buffers; "none" stands for no buffer.
"""

from typing import NamedTuple


class Operand(NamedTuple):
    address: int
    bytes: int
    offset: int | None  # in the model's file; None: the data is elsewhere


class Linear(NamedTuple):
    weights: Operand
    bias: Operand | None
    scales: Operand | None
    dtype: int
    rows: int
    columns: int
    rounds_inputs: bool
    strip_bytes: int


class NormWeights(NamedTuple):
    is_rms: bool
    eps: float
    weight: Operand
    bias: Operand | None


class Rope(NamedTuple):
    layer: int
    table: int
    inv_freq: Operand
    inv_freq_long: Operand | None
    original_context: int
    dim: int
    factor: float


class EmbeddingAdapter(NamedTuple):
    a: Linear
    b: Linear


class Embed(NamedTuple):
    layer: int
    tokens: Linear
    types: Linear | None
    positions: Linear | None
    tokens_adapter: EmbeddingAdapter | None
    types_adapter: EmbeddingAdapter | None
    positions_adapter: EmbeddingAdapter | None
    scale: float


class Norm(NamedTuple):
    layer: int
    input: str
    output: str
    width: int
    parts: int
    first: int
    stride: int
    to_first: int
    to_stride: int
    norm: NormWeights


class Product(NamedTuple):
    layer: int
    linear: Linear
    input: str
    output: str
    accumulate: bool
    scale: float
    by_shared_weight: bool
    stage: int
    accumulate_stage: bool


class Heads(NamedTuple):
    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    latent_stride: int
    is_source: bool
    norms: bool
    norm_is_rms: bool
    norm_per_head: bool
    norm_after_rope: bool
    eps: float
    q_norm: Operand | None
    k_norm: Operand | None
    rope: int
    rope_dim: int
    v_is_k: bool
    v_norm: bool
    v_eps: float
    v_factor: float


class Attend(NamedTuple):
    layer: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    kv_source: int
    window: int
    two_sided: bool
    scale: float
    query_beta: float
    query_context: int
    query_offset: int
    soft_cap: float
    sinks: Operand | None
    biases: Operand | None
    bias_distance: int


class Activate(NamedTuple):
    layer: int
    activation: int
    alpha_p: Operand | None
    alpha_n: Operand | None
    gate: str
    up: str
    output: str
    width: int
    first: int
    stride: int
    by_weight: bool
    is_clamped: bool
    limit: float
    up_offset: float


class Route(NamedTuple):
    layer: int
    n_experts: int
    n_used: int
    is_sigmoid: bool
    n_groups: int
    n_groups_used: int
    normalized: bool
    eps: float
    scale: float
    choice_bias: Operand | None
    factors: Operand | None
    has_shared_gate: bool


class ExpertProduct(NamedTuple):
    layer: int
    linears: tuple[Linear | None, ...]
    input: str
    output: str
    accumulate: bool


class Combine(NamedTuple):
    layer: int
    output: str
    n_used: int
    width: int
    accumulate: bool
    by_weight: bool
    is_adapted: bool


class Add(NamedTuple):
    layer: int
    to: str
    source: str
    width: int
    scale: float
    norm: NormWeights | None


class Scale(NamedTuple):
    layer: int
    buffer: str
    width: int
    scale: float
    cap: float


class Gate(NamedTuple):
    layer: int
    buffer: str
    gate: str
    width: int
    group: int


class LayerInputs(NamedTuple):
    layer: int
    table: Linear
    adapter: EmbeddingAdapter | None
    dim: int
    input_scale: float
    own_scale: float
    scale: float
    norm: NormWeights


class Convolve(NamedTuple):
    layer: int
    input: str
    output: str
    channels: int
    width: int
    is_gated: bool
    is_silu: bool
    state_floats: int
    taps: Operand
    bias: Operand | None


class DeltaRule(NamedTuple):
    layer: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    unit_eps: float
    q_factor: float
    beta_factor: float
    norm_eps: float
    decay: Operand
    dt_bias: Operand
    norm: Operand


class Scan(NamedTuple):
    layer: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    step_min: float
    step_max: float
    decay: Operand
    dt_bias: Operand
    skip: Operand


class HeadProduct(NamedTuple):
    layer: int
    linear: Linear
    heads: int
    input: str
    output: str
    first: int
    stride: int


class Copy(NamedTuple):
    layer: int
    input: str
    output: str
    width: int
    first: int
    stride: int


class ClusterLogits(NamedTuple):
    layer: int
    output: str
    linear: Linear
    n_clusters: int
    n_used: int
    vocab_size: int
    ids: Operand


class SpreadLogits(NamedTuple):
    layer: int
    output: str
    n: int
    vocab_size: int
    ids: Operand


class Observe(NamedTuple):
    layer: int
    stage: int
    buffer: str
    width: int
    shared_width: int
    first: int


Step = (
    Rope
    | Embed
    | Norm
    | Product
    | Heads
    | Attend
    | Activate
    | Route
    | ExpertProduct
    | Combine
    | Add
    | Scale
    | Gate
    | LayerInputs
    | Convolve
    | DeltaRule
    | Scan
    | HeadProduct
    | Copy
    | ClusterLogits
    | SpreadLogits
    | Observe
)


class Plan(NamedTuple):
    steps: list[Step]
    widths: dict[str, int]  # the largest width of the rows of each buffer that the model uses
    max_experts_used: int
