from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, final

from typing_extensions import Buffer

from llamac.errors import LlamacError

_Object = TypeVar("_Object")
_Result = TypeVar("_Result")
_Memory = Buffer | None
_States = Buffer | tuple[int, int] | None
_Isa = str | None
_Prepare = Callable[[int, int], bool] | None
_Trio = tuple[int, int, int] | None
_Held = tuple[bytes, int, list[int], list[list[Page]], list[int]]  # what `snapshot` returns for a sequence
_Content = tuple[int, Buffer, Buffer, list[Page], int, list[int]]  # what `restore` gives a sequence

def fields() -> list[tuple[str, str, int, int, int, float, float, str | None]]: ...
def record_bytes(record: str) -> int: ...
def section_names() -> tuple[str, ...]: ...
def slots(config: Buffer, layers: Buffer) -> list[tuple[str, bool, bool, int, int]]: ...
def matrix_bytes(dtype: int, rows: int, columns: int) -> int: ...
def quantize(
    dtype: int, rows: Buffer, out: Buffer, importance: _Memory = None, feedback: _Memory = None, isa: _Isa = None
) -> None: ...
def dtype_name(dtype: int) -> str | None: ...
def dtypes() -> list[tuple[str, int]]: ...
def isas() -> list[tuple[str, bool]]: ...
def has_threads() -> bool: ...
def set_nodes(node_of_cpu: Buffer) -> None: ...
def stages() -> tuple[str, ...]: ...
def live_objects() -> int: ...
def fail_allocation(n: int) -> int: ...
def gguf_row_bytes(dtype: int, columns: int) -> int: ...
def regroup(dtype: int, blocks: Buffer, columns: int, strips: Buffer) -> bool: ...
def ungroup(dtype: int, strips: Buffer, columns: int, blocks: Buffer) -> None: ...
def measure_read(block: Buffer, times: int, *, threads: int = 1, streams: int = 1, isa: str | None = None) -> int: ...
def measure_multiply(dtype: int, passes: int, *, threads: int = 1, isa: str | None = None) -> int: ...
def selftest_cases() -> list[tuple[str, str]]: ...
def selftest(index: int, *, isa: str | None = None, threads: int = 1, chunk: int = 290, sequences: int = 1) -> str: ...
def sample(
    logits: Buffer, sampling: Sampling, position: int, history: History | None = None, *, adjusted: bool = False
) -> int: ...
def adjust_logits(logits: Buffer, sampling: Sampling, history: History) -> None: ...
def logprobs(logits: Buffer, n: int, token: int, top: int) -> list[tuple[int, float]]: ...
def sample_rows(
    logits: Buffer,
    n: int,
    samplings: list[Sampling],
    positions: list[int],
    histories: list[History | None] | None = None,
    threads: int = 1,
    rows: list[int] | None = None,
) -> list[int | LlamacError]: ...
def op_norm(
    is_rms: bool, x: Buffer, weight: Buffer, bias: Buffer | None, eps: float, y: Buffer, isa: str | None = None
) -> None: ...
def op_softmax(x: Buffer, y: Buffer, isa: str | None = None) -> None: ...
def op_activate(activation: int, x: Buffer, y: Buffer, isa: str | None = None) -> None: ...
def op_rope(x: Buffer, positions: Buffer, inv_freq: Buffer, factor: float, isa: str | None = None) -> None: ...
def op_gather(dtype: int, strips: Buffer, n_rows: int, rows: Buffer, y: Buffer, isa: str | None = None) -> None: ...
def op_quantize(
    dtype: int, rows: Buffer, importance: Buffer | None, out: Buffer, isa: str | None = None, threads: int = 1
) -> None: ...
def op_matmul(
    dtype: int, strips: Buffer, x: Buffer, bias: _Memory, numerics: int, y: Buffer, isa: _Isa = None, threads: int = 1
) -> None: ...
def op_attend(
    q: Buffer,
    k: Buffer,
    v: Buffer,
    begin: Buffer,
    end: Buffer,
    kv_dtype: int,
    scale: float,
    soft_cap: float,
    sinks: Buffer | None,
    out: Buffer,
    isa: str | None = None,
    threads: int = 1,
) -> None: ...
def op_sample(logits: Buffer, sampling: Sampling, position: int, isa: str | None = None) -> int: ...
def string_tables(texts: list[str]) -> tuple[bytes, bytes]: ...
def read_strings(data: bytes, at: int, count: int) -> tuple[list[str], int, str | None]: ...

@final
class Vocabulary:
    def __init__(self, data: bytes, at: int, n_tokens: int, n_merges: int, text_bytes: int) -> None: ...
    def __len__(self) -> int: ...
    @property
    def n_strings(self) -> int: ...
    @property
    def n_merges(self) -> int: ...
    @property
    def longest(self) -> int: ...
    def text(self, token: int) -> str | None: ...
    def texts(self) -> list[str | None]: ...
    def merges(self) -> list[list[str]]: ...
    def find(self, text: str) -> int | None: ...
    def index(self) -> None: ...
    def rank(self, left: str, right: str) -> int | None: ...
    def roles(self, token: int) -> tuple[bool, bool]: ...
    def rank_merges(
        self, scores: Buffer, forms: Buffer, max_rivals: int, part: int = 0, n_parts: int = 1
    ) -> tuple[bytes, list[tuple[int, int, int]]]: ...
    def parse_merges(self, lines: list[str]) -> bytes | None: ...

@final
class Bpe:
    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        byte_level: bool,
        byte_fallback: bool,
        ignore_merges: bool,
        fuse_unknown: bool,
        unknown: int | None = None,
        hidden: bytes | None = None,
    ) -> None: ...
    def encode(self, words: list[str]) -> list[int]: ...

@final
class AddedTokens:
    def __init__(self, names: list[bytes], flags: bytes) -> None: ...
    def split(self, text: str, skip_special: bool) -> list[tuple[str, int, int, int]]: ...

@final
class Model:
    def __init__(self, data: Buffer) -> None: ...
    def adapt(self, matrix: str, rank: int, a: Buffer, b: Buffer, scales: Buffer | None = None) -> None: ...
    def replace(self, tensor: str, dtype: int, data: Buffer) -> None: ...
    def use_device(self, device: _Device) -> None: ...
    def set_kv_budget(self, budget: int, device_budget: int) -> None: ...
    def set_head_kv_budget(self, budget: int) -> None: ...
    def kv_bytes(self) -> int: ...
    def device_kv_bytes(self) -> int: ...
    def check_shift(self) -> None: ...
    def tables(self) -> bytes: ...
    def close(self) -> None: ...
    @property
    def borrowed(self) -> list[tuple[Any, ...]]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def released(self) -> bool: ...
    @property
    def device(self) -> _Device | None: ...

class _Device(Protocol):
    """What Model.use_device takes, until the model, which it must not refer to, is closed. Threads may share it."""

    @property
    def most_rows(self) -> int: ...  # of a chunk
    def alloc(self, size: int, /) -> int: ...
    def free(self, address: int, /) -> None: ...  # only its exceptions do not reach the session's caller
    def copy(self, to: int, source: int, size: int, /) -> None: ...
    def upload(self, address: int, source: memoryview, /) -> None: ...
    def download(self, address: int, to: memoryview, /) -> None: ...
    def forward(self, chunk: Chunk, /) -> None: ...

@final
class Chunk:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_wanted(self) -> int: ...
    def rows(self) -> memoryview: ...
    def types(self) -> memoryview | None: ...
    def logits(self) -> memoryview | None: ...
    def inputs(self) -> memoryview | tuple[int, int] | None: ...
    def hidden(self) -> memoryview | tuple[int, int] | None: ...
    def is_further(self) -> bool: ...
    def state_layers(self) -> _Trio: ...
    @property
    def is_observed(self) -> bool: ...
    def observer(self, stage: int, layer: int) -> memoryview | None: ...
    @property
    def cancelled(self) -> bool: ...
    def session(self) -> tuple[int, int, int, bool]: ...
    def is_of_drafter(self, drafter: Model | None = None) -> bool: ...
    def is_of(self, session: Session) -> bool: ...
    def costs(self) -> memoryview | None: ...
    def places(self) -> list[tuple[int, int, int, int, int]]: ...
    def runs(self, runs: Buffer, last_runs: Buffer, sequences: Buffer) -> int: ...
    def ends(self, ends: Buffer) -> None: ...
    def viewpoints(self, viewpoints: Buffer) -> None: ...
    def segments(self, segments: Buffer) -> int: ...
    def page_addresses(self, sequence: int, group: int, addresses: Buffer) -> None: ...

@final
class Sampling:
    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        *,
        candidate: int = 0,
        typical_p: float = 0.0,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.0,
        mirostat_tau: float = 0.0,
        mirostat_eta: float = 0.0,
    ) -> None: ...
    def adjust(
        self,
        *,
        bias_ids: Buffer | None = None,
        bias: Buffer | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.0,
        dry_allowed_length: int = 1,
        dry_breakers: bytes | None = None,
    ) -> None: ...

@final
class History:
    mu: float
    def __init__(self, prompt: Buffer) -> None: ...
    def copy(self) -> History: ...
    def append(self, token: int) -> None: ...
    def ban(self, banned: Buffer) -> None: ...
    def allow(self, mask: Buffer | None) -> None: ...

@final
class CancelScope:
    def __init__(self, session: Session) -> None: ...
    def run(self, function: Callable[[], _Result]) -> _Result: ...
    def cancel(self) -> None: ...
    @property
    def cancelled(self) -> bool: ...

def scoped(method: Callable[[_Object], _Result]) -> Callable[[_Object], _Result]: ...

@final
class Session:
    vocab_size: int
    n_sequences: int
    changes: int
    lost: tuple[int, list[int], int] | None
    def __init__(
        self,
        model: Model,
        *,
        sequences: int = 1,
        context: int = 0,
        kv_dtype: int = 0,
        threads: int = 1,
        isa: str | None = None,
        numerics: int = 0,
        on_device: bool = False,
        mtp: bool = False,
        trunk: Session | None = None,
        drafter: Model | None = None,
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def describe(self) -> tuple[int, str, int, str, int, int]: ...
    def page_size(self) -> tuple[int, int]: ...
    def set_threads(self, threads: int) -> None: ...
    def length(self, sequence: int = 0) -> int: ...
    def tokens(self, sequence: int = 0) -> list[int]: ...
    def common_prefix(self, ids: Buffer, sequence: int = 0) -> int: ...
    def cut_length(self, sequence: int, length: int) -> int: ...
    def truncate(self, length: int, sequence: int = 0) -> None: ...
    def shift(self, begin: int, end: int, sequence: int = 0) -> None: ...
    def longest_shift(self, begin: int, sequence: int = 0) -> int: ...
    def shortest_length(self, sequence: int = 0) -> int: ...
    def fork_from(self, source: Session, length: int, sequence: int = 0, target: int = 0) -> None: ...
    def cancel(self) -> None: ...
    def follow(self, leader: Session) -> None: ...
    def stage_width(self, stage: int) -> tuple[int, bool]: ...
    def eval_rows(
        self,
        rows: Buffer,
        logits: Buffer | None = None,
        observations: Sequence[tuple[int, int, Buffer]] = (),
        prepare: _Prepare = None,
        inputs: _States = None,
        types: Buffer | None = None,
        hidden: _States = None,
        states: _States = None,
    ) -> None: ...
    def eval_drafts(
        self, drafts: Buffer, logits: _Memory = None, prepare: _Prepare = None, hidden: _States = None
    ) -> None: ...
    def accept(self, draft: int) -> None: ...
    def exchange(self, other: Session) -> None: ...
    def discard_drafts(self) -> None: ...
    def sample(self, sampling: Sampling, n: int, position: int, history: History | None = None) -> int: ...
    def logprobs(self, n: int, token: int, top: int) -> list[tuple[int, float]]: ...
    def copy_logits(self, n: int) -> bytes: ...

@final
class Page:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def view(self) -> memoryview: ...

def steps() -> tuple[str, ...]: ...
def profile(session: Session, costs: Buffer) -> None: ...
def kv_groups(session: Session) -> list[tuple[int, int, int, int]]: ...
def hold_page(session: Session, sequence: int, group: int, index: int) -> Page: ...
def take_page(session: Session, group: int) -> Page: ...
def copy_page(session: Session, group: int, page: Page, first: int, last: int, out: Buffer) -> None: ...
def first_positions(session: Session, sequence: int) -> list[int]: ...
def state_lengths(session: Session, sequence: int) -> list[int]: ...
def snapshot(session: Session) -> tuple[list[_Held], bytes | None]: ...
def restore(session: Session, contents: list[_Content], logits: Buffer | None = None) -> None: ...
def held_bytes(session: Session) -> int: ...
def memory_limits(session: Session, length: int) -> tuple[int, int]: ...

# The plan of a model (csrc/plan.h). `layer` is -1 before and after the layers. The buffer "none" is no buffer.

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

_Step = Rope | Embed | Norm | Product | Heads | Attend | Activate | Route | ExpertProduct | Combine | Add | Scale | Gate
Step = _Step | LayerInputs | Convolve | DeltaRule | Scan | HeadProduct | Copy | ClusterLogits | SpreadLogits | Observe

class Plan(NamedTuple):
    steps: list[Step]
    widths: dict[str, int]  # the largest width of the rows of each buffer that the model uses
    max_experts_used: int

def plan(
    model: Model, *, mtp: bool = False, trunk: Model | None = None, is_further: bool = False, state_layers: _Trio = None
) -> Plan: ...
