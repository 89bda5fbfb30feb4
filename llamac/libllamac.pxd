# The C core's public interface for Cython. csrc/llamac.h documents it; layouts and values come from that header.
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint32_t, uint64_t, uint8_t


cdef extern from "llamac.h" nogil:
    ctypedef struct llamac_model
    ctypedef struct llamac_session
    enum:
        LLAMAC_OK
        LLAMAC_NO_MEMORY
        LLAMAC_BAD_ARGUMENT
        LLAMAC_BAD_MODEL
        LLAMAC_CONTEXT_FULL
        LLAMAC_CANCELLED
        LLAMAC_UNSUPPORTED
        LLAMAC_DEVICE_FAILED
    ctypedef struct llamac_error:
        int code
        char message[400]

    # dtypes
    enum:
        LLAMAC_N_DTYPES
    const char *llamac_dtype_name(int dtype)
    size_t llamac_matrix_bytes(int dtype, uint64_t rows, uint64_t columns)
    int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance,
                        const float *feedback, const char *isa, void *out, llamac_error *err)

    # GGUF's blocks
    size_t llamac_gguf_row_bytes(int dtype, uint64_t columns)
    int llamac_regroup(int dtype, const void *blocks, size_t blocks_size, size_t rows, size_t columns, void *strips,
                       size_t strips_size, llamac_error *err)
    int llamac_ungroup(int dtype, const void *strips, size_t strips_size, size_t rows, size_t columns, void *blocks,
                       size_t blocks_size, llamac_error *err)

    # the file format
    ctypedef struct llamac_field:
        const char *record
        const char *name
        int type
        uint32_t offset, count
        double min, max
        const char *names
    const llamac_field *llamac_fields(size_t *n)
    size_t llamac_record_bytes(const char *record)
    const char *llamac_section_at(size_t index)
    ctypedef struct llamac_slot:
        char name[64]
        int required, is_matrix
        uint64_t rows, columns
    ctypedef struct llamac_slot_iterator:
        const void *config
        const void *layers
        uint32_t group, index, layer, expert, next
    int llamac_slot_next(llamac_slot_iterator *iterator, llamac_slot *slot)

    # models
    int llamac_model_open(llamac_model **model, const void *data, size_t bytes, llamac_error *err)
    void llamac_model_close(llamac_model **model)
    void llamac_set_kv_budget(llamac_model *model, size_t bytes)
    size_t llamac_kv_bytes(const llamac_model *model)
    const void *llamac_model_tables(const llamac_model *model, size_t *bytes)
    int llamac_model_adapt(llamac_model *model, const char *matrix, int rank, const void *a, size_t a_bytes,
                           const void *b, size_t b_bytes, const float *scales, size_t n_scales, llamac_error *err)
    int llamac_model_replace(llamac_model *model, const char *tensor, int dtype, const void *data, size_t bytes,
                             llamac_error *err)

    # this build and this machine
    const char *llamac_isa_at(size_t index, int *supported)
    int llamac_has_threads()
    int llamac_set_nodes(const int32_t *node_of_cpu, int n_cpus, llamac_error *err)

    # sessions
    ctypedef struct llamac_session_options:
        int n_sequences, context, kv_dtype, threads
        const char *isa
        int numerics, on_device, mtp
        const llamac_session *trunk
        const llamac_model *drafter
    int llamac_session_open(llamac_session **session, const llamac_model *model, const llamac_session_options *options,
                            llamac_error *err)
    void llamac_session_close(llamac_session **session)
    ctypedef struct llamac_session_info:
        int context, kv_dtype, threads
        const char *isa
        int numerics
        size_t scratch_bytes, kv_bytes, page_bytes
        int page_positions
    void llamac_session_describe(const llamac_session *session, llamac_session_info *info)
    int llamac_set_threads(llamac_session *session, int threads, llamac_error *err)
    int llamac_length(const llamac_session *session, int sequence)
    int llamac_shortest_length(const llamac_session *session, int sequence)
    int llamac_cut_length(const llamac_session *session, int sequence, int length)
    int llamac_truncate(llamac_session *session, int sequence, int length, llamac_error *err)
    int llamac_shift(llamac_session *session, int sequence, int begin, int end, llamac_error *err)
    int llamac_shift_check(const llamac_model *model, llamac_error *err)
    int llamac_longest_shift(const llamac_session *session, int sequence, int begin)
    int llamac_fork(llamac_session *to, int to_sequence, const llamac_session *source, int from_sequence, int length,
                    llamac_error *err)

    # evals
    ctypedef struct llamac_row:
        int32_t token, sequence, position, want_logits
    enum:
        LLAMAC_STAGE_OUTPUT_NORM
        LLAMAC_STAGE_LOGITS
        LLAMAC_N_STAGES
    const char *llamac_stage_name(int stage)
    size_t llamac_stage_width(const llamac_session *session, int stage, int *per_layer)
    ctypedef struct llamac_observation:
        int stage, layer
        float *out
    ctypedef struct llamac_eval_options:
        const llamac_observation *observations
        int n_observations
        const int32_t *cancel
        int *rows_done
        const float *inputs
        const float *states
        const int32_t *types
        float *hidden
        int n_hidden
    int llamac_eval(llamac_session *session, const llamac_row *rows, int n_rows, float *logits,
                    const llamac_eval_options *options, llamac_error *err)

    # trees of draft tokens
    ctypedef struct llamac_draft:
        int32_t token, sequence, parent, want_logits
    int llamac_eval_drafts(llamac_session *session, const llamac_draft *drafts, int n_drafts, float *logits,
                           const llamac_eval_options *options, llamac_error *err)
    int llamac_accept(llamac_session *session, int draft, llamac_error *err)

    # sampling
    ctypedef struct llamac_sampling:
        float temperature
        int top_k
        float top_p, min_p
        uint64_t seed
        uint32_t candidate
        float typical_p, xtc_probability, xtc_threshold, mirostat_tau, mirostat_eta
    enum:
        LLAMAC_SAMPLE_SCRATCH
    int llamac_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, double *mu,
                      void *scratch, llamac_error *err)
    ctypedef struct llamac_logprob:
        int32_t id
        double logprob
    int llamac_logprobs(const float *logits, int n, int32_t token, int top, llamac_logprob *out, void *scratch,
                        llamac_error *err)
    int llamac_sampling_check(const llamac_sampling *sampling, llamac_error *err)

    # adjusting logits
    ctypedef struct llamac_adjustments:
        const int32_t *bias_ids
        const float *bias
        int n_bias
        float repetition_penalty, presence_penalty, frequency_penalty
        float dry_multiplier, dry_base
        int dry_allowed_length
        const uint8_t *dry_breakers
    ctypedef struct llamac_history:
        const int32_t *ids
        int n_ids, n_prompt
        const int32_t *banned
        int n_banned
        const uint8_t *allowed
        int n_allowed
    void llamac_adjust_logits(float *logits, int n, const llamac_adjustments *adjustments,
                              const llamac_history *history, void *scratch)

    ctypedef struct llamac_draw:
        const float *logits
        const llamac_sampling *sampling
        const llamac_adjustments *adjustments
        const llamac_history *history
        double *mu
        uint64_t position
        int token
        llamac_error err
    enum:
        LLAMAC_DRAW_SCRATCH
    int llamac_draw_threads(int rows, int n, int threads)
    void llamac_draw_rows(llamac_draw *draws, int rows, int n, int threads, void *scratch) nogil
    int llamac_adjustments_check(const llamac_adjustments *adjustments, llamac_error *err)

    # measuring the machine
    int llamac_measure_read(const float *block, size_t floats, int times, int threads, int streams, const char *isa,
                            uint64_t *bytes, llamac_error *err)
    int llamac_measure_multiply(int dtype, int numerics, int passes, int threads, const char *isa, uint64_t *count,
                                llamac_error *err)

    # self-test
    enum:
        LLAMAC_SHA256_DIGITS
    ctypedef struct llamac_selftest_case:
        const char *name
        const char *sha256
    int llamac_selftest_at(size_t index, llamac_selftest_case *test)
    ctypedef struct llamac_selftest_options:
        const char *isa
        int threads, chunk, sequences
    int llamac_selftest(size_t index, const llamac_selftest_options *options, char *sha256, llamac_error *err)


cdef extern from "mem.h" nogil:
    long llamac_test_fail_allocation(long n)
    long llamac_live_objects()
    void *mem_alloc(size_t count, size_t size, const char *purpose, llamac_error *err)
    void *mem_alloc_huge(size_t bytes, const char *purpose, llamac_error *err)
    void mem_free(void *memory)


cdef extern from "saving.h" nogil:
    ctypedef struct llamac_page
    ctypedef struct llamac_group:
        int window, n_kv_heads, head_dim
        size_t page_bytes
    int llamac_group_at(const llamac_session *session, int group, llamac_group *info)
    int llamac_first_position(const llamac_session *session, int sequence, int group)
    int llamac_state_length(const llamac_session *session, int sequence, int index)
    llamac_page *llamac_hold_page(llamac_session *session, int sequence, int group, int index, llamac_error *err)
    llamac_page *llamac_take_page(const llamac_session *session, int group, llamac_error *err)
    void *llamac_page_data(llamac_page *page, size_t *bytes)
    int llamac_read_page(llamac_page *page, void *out, llamac_error *err)
    int llamac_write_page(llamac_page *page, const void *data, llamac_error *err)
    int llamac_copy_page(const llamac_session *session, int group, llamac_page *page, int first, int last, void *out,
                         llamac_error *err)
    void llamac_drop_page(llamac_page *page)
    int llamac_restore(llamac_session *session, int sequence, int length, const int32_t *first_positions,
                       llamac_page **pages, size_t n_pages, llamac_error *err)
    int llamac_restore_states(llamac_session *session, int sequence, const int32_t *lengths, llamac_page **pages,
                              size_t n, llamac_error *err)
    int llamac_check_restore(const llamac_session *session, int sequence, int length, const int32_t *first_positions,
                             llamac_page **pages, size_t n_pages, const int32_t *lengths, size_t n_states,
                             llamac_error *err)
    size_t llamac_held_bytes(const llamac_session *session)


cdef extern from "profile.h" nogil:
    enum:
        LLAMAC_N_STEPS
    const char *llamac_step_name(int step)
    ctypedef struct llamac_step_cost:
        uint64_t ns, bytes
    int llamac_profile(llamac_session *session, llamac_step_cost *costs, size_t n_costs, llamac_error *err)
    llamac_step_cost *llamac_costs_of(const llamac_session *session)


cdef extern from "device.h" nogil:
    ctypedef struct llamac_chunk:
        const llamac_session *session
        const llamac_row *rows
        int n_rows, n_wanted
        const int32_t *types
        float *logits
        int is_mtp
        const llamac_model *drafter
        int after_draft
        const int *state_layers
        int input_width, hidden_width
        const float *inputs
        float *hidden
        int n_hidden
        int states_on_device
        int n_observations
        const int32_t *cancel
    ctypedef struct llamac_device:
        void *context
        int most_rows
        size_t mtp_kv_budget
        uint64_t (*alloc)(void *context, size_t n, llamac_error *err) noexcept
        void (*free)(void *context, uint64_t address) noexcept
        int (*copy)(void *context, uint64_t to, uint64_t source, size_t n, llamac_error *err) noexcept
        int (*read)(void *context, void *to, uint64_t source, size_t n, llamac_error *err) noexcept
        int (*write)(void *context, uint64_t to, const void *source, size_t n, llamac_error *err) noexcept
        int (*forward)(void *context, const llamac_chunk *chunk, llamac_error *err) noexcept
    int llamac_model_use_device(llamac_model *model, const llamac_device *device, llamac_error *err)
    size_t llamac_device_kv_bytes(const llamac_model *model)
    void llamac_set_device_kv_budget(llamac_model *model, size_t bytes)
    void llamac_set_head_kv_budget(llamac_model *model, size_t bytes)
    int llamac_states_on_device(llamac_session *session, int are_there, llamac_error *err)
    float *llamac_chunk_observer(const llamac_chunk *chunk, int stage, int layer)
    int llamac_chunk_tables(
        const llamac_chunk *chunk, int32_t *table_of, int32_t *last_table_of, int32_t *sequences
    )
    void llamac_chunk_ends(const llamac_chunk *chunk, int32_t *ends)
    void llamac_chunk_viewpoints(const llamac_chunk *chunk, int32_t *viewpoints)
    ctypedef struct llamac_segment:
        pass
    int llamac_chunk_segments(const llamac_chunk *chunk, llamac_segment *segments)
    void llamac_page_addresses(const llamac_session *session, int sequence, int group, int n_pages,
                               uint64_t *addresses)
    int llamac_layer_count(const llamac_session *session)
    ctypedef struct llamac_kv_place:
        int group
        size_t offset, head_bytes, value_offset, state_offset
    llamac_kv_place llamac_kv_place_of(const llamac_session *session, int layer)


cdef extern from "plan.h" nogil:
    enum:
        LLAMAC_N_BUFFERS
    const char *llamac_buffer_name(int buffer)
    ctypedef struct llamac_operand:
        const void *data
        size_t bytes
        long long offset
    ctypedef struct llamac_linear:
        llamac_operand weights, bias, scales
        int dtype, rows, columns, rounds_inputs
        size_t strip_bytes
    ctypedef struct llamac_norm:
        int is_rms
        float eps
        llamac_operand weight, bias
    enum:
        LLAMAC_OP_ROPE
        LLAMAC_OP_EMBED
        LLAMAC_OP_NORM
        LLAMAC_OP_PRODUCT
        LLAMAC_OP_HEADS
        LLAMAC_OP_ATTEND
        LLAMAC_OP_ACTIVATE
        LLAMAC_OP_ROUTE
        LLAMAC_OP_EXPERT_PRODUCT
        LLAMAC_OP_COMBINE
        LLAMAC_OP_ADD
        LLAMAC_OP_SCALE
        LLAMAC_OP_GATE
        LLAMAC_OP_LAYER_INPUTS
        LLAMAC_OP_CONVOLVE
        LLAMAC_OP_DELTA_RULE
        LLAMAC_OP_SCAN
        LLAMAC_OP_HEAD_PRODUCT
        LLAMAC_OP_COPY
        LLAMAC_OP_CLUSTER_LOGITS
        LLAMAC_OP_SPREAD_LOGITS
        LLAMAC_OP_OBSERVE
    ctypedef struct llamac_rope_step:
        int table
        llamac_operand inv_freq, inv_freq_long
        int original_context, dim
        float factor
    ctypedef struct llamac_embedding_adapter:
        llamac_linear a, b
    ctypedef struct llamac_embed_step:
        llamac_linear tokens, types, positions
        llamac_embedding_adapter tokens_adapter, types_adapter, positions_adapter
        float scale
    ctypedef struct llamac_norm_step:
        int input, output, width, parts, first, stride, to_first, to_stride
        llamac_norm norm
    ctypedef struct llamac_product_step:
        llamac_linear linear
        int input, output, accumulate
        float scale
        int by_shared_weight, stage, accumulate_stage
    ctypedef struct llamac_heads_step:
        int n_heads, n_kv_heads, head_dim, value_dim, latent_stride, is_source
        int norms, norm_is_rms, norm_per_head, norm_after_rope
        float eps
        llamac_operand q_norm, k_norm
        int rope, rope_dim, v_is_k, v_norm
        float v_eps, v_factor
    ctypedef struct llamac_attend_step:
        int n_heads, n_kv_heads, head_dim, value_dim, kv_source, window, two_sided
        float scale, query_beta, soft_cap
        int query_context, query_offset
        llamac_operand sinks, biases
        int bias_distance
    ctypedef struct llamac_activate_step:
        int activation
        llamac_operand alpha_p, alpha_n
        int gate, up, output, width, first, stride, by_weight, is_clamped
        float limit, up_offset
    ctypedef struct llamac_route_step:
        int n_experts, n_used, is_sigmoid, n_groups, n_groups_used, normalized
        float eps, scale
        llamac_operand choice_bias, factors
        int has_shared_gate
    ctypedef struct llamac_expert_product_step:
        const llamac_linear *linears
        int n_experts, input, output, accumulate
    ctypedef struct llamac_combine_step:
        int output
        int n_used, width, accumulate, by_weight, is_adapted
    ctypedef struct llamac_add_step:
        int to "to", from_ "from", width
        float scale
        llamac_norm norm
    ctypedef struct llamac_scale_step:
        int buffer, width
        float scale, cap
    ctypedef struct llamac_gate_step:
        int buffer, gate, width, group
    ctypedef struct llamac_layer_inputs_step:
        llamac_linear table
        llamac_embedding_adapter adapter
        int dim
        float input_scale, own_scale, scale
        llamac_norm norm
    ctypedef struct llamac_convolve_step:
        int input, output, channels, width, is_gated, is_silu, state_floats
        llamac_operand taps, bias
    ctypedef struct llamac_delta_rule_step:
        int key_heads, heads, key_dim, value_dim
        float unit_eps, q_factor, beta_factor, norm_eps
        llamac_operand decay, dt_bias, norm
    ctypedef struct llamac_scan_step:
        int key_heads, heads, key_dim, value_dim
        float step_min, step_max
        llamac_operand decay, dt_bias, skip
    ctypedef struct llamac_head_product_step:
        llamac_linear linear
        int heads, input, output, first, stride
    ctypedef struct llamac_copy_step:
        int input, output, width, first, stride
    ctypedef struct llamac_cluster_logits_step:
        llamac_linear linear
        int n_clusters, n_used, vocab_size
        llamac_operand ids
    ctypedef struct llamac_spread_logits_step:
        int n, vocab_size
        llamac_operand ids
    ctypedef struct llamac_observe_step:
        int stage, buffer, width, shared_width, first
    ctypedef struct llamac_step:
        int op, layer
        llamac_rope_step rope
        llamac_embed_step embed
        llamac_norm_step norm
        llamac_product_step product
        llamac_heads_step heads
        llamac_attend_step attend
        llamac_activate_step activate
        llamac_route_step route
        llamac_expert_product_step expert_product
        llamac_combine_step combine
        llamac_add_step add
        llamac_scale_step scale
        llamac_gate_step gate
        llamac_layer_inputs_step layer_inputs
        llamac_convolve_step convolve
        llamac_delta_rule_step delta_rule
        llamac_scan_step scan
        llamac_head_product_step head_product
        llamac_copy_step copy
        llamac_cluster_logits_step cluster_logits
        llamac_spread_logits_step spread_logits
        llamac_observe_step observe
    ctypedef struct llamac_plan:
        const llamac_step *steps
        int n_steps
        int *widths
        int max_experts_used
    int llamac_plan_open(llamac_plan *plan, const llamac_model *model, int mtp, llamac_error *err)
    int llamac_plan_open_trunk(llamac_plan *plan, const llamac_model *model, const int *state_layers,
                               llamac_error *err)
    int llamac_plan_open_drafter(llamac_plan *plan, const llamac_model *drafter, const llamac_model *trunk,
                                 int after_draft, llamac_error *err)
    void llamac_plan_close(llamac_plan *plan)


cdef extern from "vocab.h" nogil:
    enum:
        VOCAB_NONE
        VOCAB_FORMED
        VOCAB_JOINED
    struct vocab:
        uint32_t n_tokens, n_merges, longest
        const uint32_t *merges
        uint32_t *pairs
        unsigned char *roles
    int vocab_open(vocab *v, const uint32_t *ends, size_t n_tokens, const uint32_t *merges, size_t n_merges,
                   const unsigned char *text, size_t text_bytes, llamac_error *err)
    int vocab_index(vocab *v, llamac_error *err)
    void vocab_close(vocab *v)
    const unsigned char *vocab_text(const vocab *v, uint32_t token, uint32_t *bytes)
    uint32_t vocab_find(const vocab *v, const unsigned char *text, size_t bytes)
    uint32_t vocab_rank(const vocab *v, uint32_t left, uint32_t right)
    uint32_t utf8_bytes(unsigned char first)
    struct bpe:
        const vocab *vocab
        int byte_level, byte_fallback, ignore_merges, fuse_unknown
        uint32_t unknown
        const unsigned char *hidden
    int bpe_open(bpe *b, llamac_error *err)
    int bpe_encode(const bpe *b, const unsigned char *text, const size_t *ends, size_t n_words, uint32_t *out,
                   size_t *n_out, llamac_error *err)
    struct added_tokens:
        size_t n
        const uint32_t *ends
        const unsigned char *flags
        const unsigned char *text
    struct added_match:
        size_t start, end
        uint32_t index
    struct added_search:
        size_t at, done, spaces_start, spaces_end
    int added_open(added_tokens *a, llamac_error *err)
    void added_close(added_tokens *a)
    int added_next(const added_tokens *a, const unsigned char *text, size_t bytes, int skip_special,
                   added_search *search, added_match *match)
    struct merge_rival:
        uint32_t x, y, z
    long merge_ranks(const vocab *v, const float *scores, const unsigned char *forms, uint32_t part,
                     uint32_t n_parts, uint32_t *merges, merge_rival *rivals, size_t max_rivals, size_t *n_rivals,
                     llamac_error *err)

cdef extern from "session.h" nogil:
    size_t session_scratch_limit(const llamac_session *s)
    size_t session_pages_limit(const llamac_session *s, int length)

cdef extern from "ops.h" nogil:
    int llamac_op_norm(int is_rms, const float *x, size_t n, int width, const float *weight, const float *bias,
                       float eps, const char *isa, float *y, llamac_error *err)
    int llamac_op_softmax(const float *x, size_t n, int width, const char *isa, float *y, llamac_error *err)
    int llamac_op_activate(int activation, const float *x, size_t n, int width, const char *isa, float *y,
                           llamac_error *err)
    int llamac_op_rope(float *x, size_t n, size_t n_heads, int head_dim, const int32_t *positions,
                       const float *inv_freq, int half, float factor, const char *isa, llamac_error *err)
    int llamac_op_gather(int dtype, const void *w, int columns, const int32_t *rows, size_t n, const char *isa,
                         float *y, llamac_error *err)
    int llamac_op_quantize(int dtype, const float *w, size_t rows, int columns, const float *importance,
                           const char *isa, int threads, void *out, llamac_error *err)
    ctypedef struct llamac_op_product:
        int dtype, rows, columns
        const void *w
        const float *x
        size_t n
        const float *bias
        int numerics
        float *y
    int llamac_op_matmul(const llamac_op_product *product, const char *isa, int threads, llamac_error *err)
    ctypedef struct llamac_op_attention:
        int n_heads, n_kv_heads, head_dim, kv_dtype
        const float *q
        int n_queries
        const float *k
        const float *v
        int n_positions
        const int32_t *begin
        const int32_t *end
        float scale, soft_cap
        const float *sinks
        float *out
    int llamac_op_attend(const llamac_op_attention *attention, const char *isa, int threads, llamac_error *err)
    int llamac_op_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position,
                         const char *isa, void *scratch, llamac_error *err)
