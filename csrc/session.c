// SPDX-License-Identifier: MIT
// session.c - opens, describes and closes sessions; their scratch memory. See session.h.
#include "session.h"

#include <string.h>
#include "common.h"
#include "error.h"
#include "mem.h"
#include "router.h"

// ---- scratch: one allocation, cut into pieces

// Cuts pieces off a block. With memory NULL it only counts their bytes.
struct arena { uint8_t *memory; size_t used; };

static float *arena_floats(struct arena *a, size_t count) {
    float *piece = a->memory ? (float *)(void *)(a->memory + a->used) : NULL;
    a->used += round_up(count * sizeof(float), 64);
    return piece;
}

static int *arena_ints(struct arena *a, size_t count) {
    _Static_assert(sizeof(int) == sizeof(float), "pieces are counted in floats");
    return (int *)(void *)arena_floats(a, count);
}

static struct routes arena_routes(struct arena *a, const struct llamac_model *m, size_t rows) {
    const size_t pairs = rows * (size_t)m->max_experts_used;
    return (struct routes){ .experts = arena_ints(a, pairs), .weights = arena_floats(a, pairs),
                            .shared_weights = arena_floats(a, pairs ? rows : 0) };
}

// The most words that the inputs of one row can take: of a dense product, or of all heads or experts of the row
// together.
static size_t max_input_words(const struct llamac_model *m, int input, int mix) {
    const int states = is_eagle(m) ? max_int(2 * (int)m->config->dim, m->drafter.in.columns) : 2 * states_dim(m);
    const int dim = max_int(max_int((int)m->config->dim, states), (int)m->max_q_rank);
    const int hidden = max_int(max_int(m->max_ffn_dim, m->layer_embedding_dim), (int)m->config->expert_dim);
    const size_t heads = m->config->n_heads * input_words(input, m->max_head_inputs);
    const size_t dense = max_size(heads, input_words(input, max_int(max_int(dim, mix), hidden)));
    const size_t expert = input_words(input, max_int(max_int(dim, (int)m->config->expert_dim), m->max_expert_dim));
    return m->max_experts_used ? max_size(dense, (size_t)m->max_experts_used * expert) : dense;
}

// The floats of the products a x of `rows` rows with the adapters of all consumers.
static size_t lora_projected_floats(const struct llamac_model *m, size_t rows) {
    return MAX_CONSUMERS * rows * (size_t)(max_int(m->max_experts_used, 1) * m->max_rank);
}

// The input types of the model's matrices: bit 1 << type.
static unsigned input_types(const struct llamac_model *m) {
    unsigned inputs = 0;
    for (int dtype = 1; dtype < LLAMAC_N_DTYPES; dtype++)
        if (m->dtypes & 1u << dtype) inputs |= 1u << input_type_of(dtype);
    return inputs;
}

static void cut_panels(struct arena *a, const struct llamac_model *m, size_t rows, int mix,
                       void *panels[N_INPUT_TYPES]) {
    const unsigned inputs = input_types(m);
    for (int input = 0; input < N_INPUT_TYPES; input++)
        panels[input] = arena_floats(a, inputs & 1u << input ? rows * max_input_words(m, input, mix) : 0);
}

static void cut_stream_panels(struct arena *a, const struct llamac_model *m, size_t rows,
                              void *panels[N_INPUT_TYPES]) {
    const unsigned inputs = input_types(m);
    const int width = (is_eagle(m) ? 2 : 1) * (int)m->config->dim;
    for (int input = 0; input < N_INPUT_TYPES; input++)
        panels[input] = arena_floats(a, inputs & 1u << input ? rows * input_words(input, width) : 0);
}

// The floats per row of `draft_inputs`. In an EAGLE-3 head, it holds the normed states and, later, two vectors.
static size_t draft_inputs_width(const struct llamac_model *m) {
    const size_t states = m->drafter.in_norm ? (size_t)m->drafter.in.columns : 0;
    return is_eagle(m) ? max_size(2 * (size_t)m->config->dim, states) : 2 * (size_t)states_dim(m);
}

// Cuts the buffers of one thread.
static struct thread_scratch cut_thread_scratch(const struct llamac_session *s, const struct scratch *scratch,
                                                struct arena *a, size_t widest) {
    const struct llamac_model *m = s->model;
    const struct config *c = m->config;
    const size_t dim = c->dim, experts = (size_t)m->max_experts, rank = (size_t)s->max_rank, mix = mix_row_width(m),
                 normed = max_size(dim, (size_t)m->layer_embedding_in.rows),
                 pairs = (size_t)scratch->rows * (size_t)m->max_experts_used, start = a->used;
    struct thread_scratch local = {
        .row = arena_floats(a, m->has_sub_norms ? max_size(normed, widest) : normed),
        .rounded = arena_floats(a, c->rounds_inputs ? widest : 0),
        .normed = arena_floats(a, experts ? REDUNDANT_ROWS * dim : 0),
        .router = arena_floats(a, router_scratch_floats(experts)),
        .routes = arena_routes(a, m, REDUNDANT_ROWS),
        .pairs = { arena_ints(a, experts ? experts + 1 : 0), arena_ints(a, pairs), arena_floats(a, pairs) },
        .gemm = arena_floats(a, gemm_scratch_bytes(scratch->rows) / sizeof(float)),
        .lora_panel = arena_floats(a, rank ? PANEL_ROWS * max_input_words(m, INPUT_F32, (int)mix) : 0),
        .lora_projected_rows = arena_floats(a, PANEL_ROWS * rank),
        .lora_projected = arena_floats(a, lora_projected_floats(m, REDUNDANT_ROWS)),
        .attention = arena_floats(a, tile_layout(s->kv_dtype, (int)c->head_dim).end),
    };
    cut_panels(a, m, REDUNDANT_ROWS, (int)mix, local.panels);
    if (a->memory) local.memory = a->memory + start;
    local.bytes = a->used - start;
    return local;
}

// Cuts all buffers of the scratch, for its rows and threads.
static void cut_scratch(const struct llamac_session *s, struct scratch *scratch, struct arena *a) {
    const struct llamac_model *m = s->model;
    const struct config *c = m->config;
    const size_t rows = (size_t)scratch->rows, dim = c->dim, head_dim = c->head_dim, channels = m->max_channels,
                 state_heads = m->max_state_heads, mix = mix_row_width(m),
                 q_dim = c->n_heads * head_dim, kv_dim = c->n_kv_heads * head_dim,
                 ffn = max_size(m->max_hidden, (size_t)m->layer_embedding_dim),
                 layer_inputs = (size_t)m->layer_embedding_in.rows, experts = (size_t)m->max_experts;
    scratch->x = arena_floats(a, rows * dim);
    scratch->spare_x = arena_floats(a, m->has_post_norms || m->has_normed_stream ? rows * dim : 0);
    scratch->branch = arena_floats(a, m->has_post_norms || experts ? rows * dim : 0);
    scratch->shared_out = arena_floats(a, m->has_expert_norms ? rows * dim : 0);
    scratch->scales = arena_floats(a, c->residual_scale == 1 ? 0 : rows);
    scratch->normed = arena_floats(a, experts ? rows * dim : 0);
    scratch->expert_rows = arena_floats(a, experts ? rows * c->expert_dim : 0);
    scratch->expert_sums = arena_floats(a, experts ? rows * c->expert_dim : 0);
    scratch->router = arena_floats(a, rows * experts);
    scratch->shared_gate = arena_floats(a, experts ? rows : 0);
    scratch->routes = arena_routes(a, m, rows);
    scratch->layer_inputs = arena_floats(a, rows * layer_inputs);
    scratch->draft_inputs = arena_floats(a, rows * draft_inputs_width(m));
    scratch->cluster_scores = arena_floats(a, c->n_clusters);
    scratch->in_clusters = arena_floats(a, c->n_clusters ? c->vocab_size : 0);
    scratch->clusters = arena_ints(a, c->clusters_used);
    cut_stream_panels(a, m, rows > REDUNDANT_ROWS ? rows : 0, scratch->stream_panels);
    cut_panels(a, m, rows, (int)mix, scratch->panels);
    scratch->lora_projected = arena_floats(a, lora_projected_floats(m, rows));
    // a layer is done with the buffers of its mixer before it computes gate and up, unless it computes both in parallel
    const size_t mixer_start = a->used;
    scratch->q = arena_floats(a, rows * q_dim);
    scratch->k = arena_floats(a, rows * kv_dim);
    scratch->v = arena_floats(a, rows * kv_dim);
    scratch->attn_gate = arena_floats(a, m->has_output_gates ? rows * q_dim : 0);
    scratch->mix = arena_floats(a, rows * mix);
    scratch->q_latent = arena_floats(a, rows * m->max_q_rank);
    scratch->latent_heads = arena_floats(a, rows * m->max_latent_heads);
    scratch->conv_in = arena_floats(a, rows * channels);
    scratch->conv_out = arena_floats(a, rows * channels);
    scratch->state_z = arena_floats(a, rows * m->max_state_z);
    scratch->state_beta = arena_floats(a, rows * state_heads);
    scratch->state_decay = arena_floats(a, rows * state_heads);
    const size_t mixer_end = a->used;
    if (!m->has_parallel_layer) a->used = mixer_start;
    scratch->gate = arena_floats(a, rows * ffn);
    scratch->up = arena_floats(a, rows * ffn);
    a->used = max_size(a->used, mixer_end);
    const size_t queries = scratch->blocks ? (size_t)min_int(scratch->rows, REDUNDANT_ROWS) * c->n_heads : 0;
    scratch->partials = arena_floats(a, queries * (size_t)scratch->blocks * partial_floats((int)head_dim));
    scratch->finished = arena_ints(a, queries);
    scratch->angles = arena_floats(a, c->n_rope * rows * head_dim);
    scratch->shared_bytes = a->used;
    const size_t widest = max_size(max_size(dim, mix), ffn);
    for (int t = 0; t < scratch->n_threads; t++) {
        const struct thread_scratch local = cut_thread_scratch(s, scratch, a, widest);
        if (a->memory) scratch->threads[t] = local;
    }
}

// Other threads may read sizes during an eval.
static void set_size(size_t *size, size_t value) { __atomic_store_n(size, value, __ATOMIC_RELAXED); }
static size_t get_size(const size_t *size) { return __atomic_load_n(size, __ATOMIC_RELAXED); }

int session_reserve_rows(struct llamac_session *s, int rows, int length, llamac_error *err) {
    const struct scratch *now = &s->scratch;
    const int blocks = s->threads > 1 ? ceil_div(length, ATTENTION_BLOCK) : 0;   // one thread does not split attention
    if (rows <= now->rows && s->threads <= now->n_threads && blocks <= now->blocks) return 0;
    struct scratch larger = {
        .rows = max_int(rows, now->rows), .n_threads = max_int(s->threads, now->n_threads),
        .blocks = blocks <= now->blocks ? now->blocks : min_int(2 * blocks, ceil_div(s->context, ATTENTION_BLOCK)),
    };
    struct arena count = { 0 };
    cut_scratch(s, &larger, &count);
    larger.threads = mem_alloc((size_t)larger.n_threads, sizeof *larger.threads, "the threads' scratch", err);
    larger.memory = larger.threads ? mem_alloc_huge(count.used, "activations", err) : NULL;
    if (!larger.memory) {
        mem_free(larger.threads);
        return -1;
    }
    struct arena cut = { .memory = larger.memory };
    cut_scratch(s, &larger, &cut);
    mem_free(s->scratch.threads);
    mem_free(s->scratch.memory);
    s->scratch = larger;
    set_size(&s->scratch_bytes, count.used);
    return 0;
}

size_t session_scratch_limit(const struct llamac_session *s) {
    struct scratch largest = {
        .rows = s->device ? 1 : chunk_rows(s), .n_threads = max_int(s->threads, s->scratch.n_threads),
        .blocks = s->threads > 1 || s->scratch.blocks ? ceil_div(s->context, ATTENTION_BLOCK) : 0,
    };
    struct arena count = { 0 };
    cut_scratch(s, &largest, &count);
    // eval_by_layer keeps the residual stream of all rows
    const size_t rows = s->model->config->two_sided && !s->device ? (size_t)s->context * (size_t)s->n_sequences : 0;
    const size_t stream = rows * s->model->config->dim * sizeof(float);
    return count.used + stream + (size_t)largest.n_threads * sizeof *largest.threads;
}

enum { CLEARED_AT_ONCE = 64 << 10 };

void session_clear_scratch(struct llamac_session *s, const struct member *m) {
    struct scratch *scratch = &s->scratch;
    if (scratch->is_cleared) return;
    const size_t step = (size_t)m->count * CLEARED_AT_ONCE;
    for (int t = m->index; t < scratch->n_threads; t += m->count)
        memset(scratch->threads[t].memory, 0, scratch->threads[t].bytes);
    for (size_t at = (size_t)m->index * CLEARED_AT_ONCE; at < scratch->shared_bytes; at += step) {
        const size_t rest = scratch->shared_bytes - at;
        memset((uint8_t *)scratch->memory + at, 0, rest < CLEARED_AT_ONCE ? rest : CLEARED_AT_ONCE);
    }
    pool_barrier(m);
    if (m->index) return;
    const float residual_scale = s->model->config->residual_scale;
    for (int r = 0; r < scratch->rows && residual_scale != 1; r++) scratch->scales[r] = residual_scale;
    scratch->is_cleared = 1;
}

// ---- opening and closing

int session_check_threads(int threads, llamac_error *err) {
    if (threads < 1 || threads > POOL_MAX)
        return bad_argument(err, "threads is %d, expected 1 to %d", threads, POOL_MAX);
    if (threads > 1 && !llamac_has_threads())
        return err_set(err, LLAMAC_UNSUPPORTED, "threads is %d, but this build has no OpenMP: only 1 is possible",
                       threads);
    return 0;
}

int session_check_numerics(int numerics, llamac_error *err) {
    if (numerics != LLAMAC_EXACT && numerics != LLAMAC_FAST)
        return bad_argument(err, "numerics is %d, expected %d or %d", numerics, LLAMAC_EXACT, LLAMAC_FAST);
    return 0;
}

static int check_options(const struct llamac_model *model, const llamac_session_options *o, llamac_error *err) {
    const int max_context = (int)model->config->context;
    if (o->n_sequences < 1 || o->n_sequences > SESSION_MAX_SEQUENCES)
        return bad_argument(err, "sequences is %d, expected 1 to %d", o->n_sequences, SESSION_MAX_SEQUENCES);
    if (o->context < 0 || o->context > max_context)
        return bad_argument(err, "context is %d, expected 1 to %d, the model's context", o->context, max_context);
    if (o->kv_dtype != 0 && o->kv_dtype != LLAMAC_F32 && o->kv_dtype != LLAMAC_F16 && o->kv_dtype != LLAMAC_Q8)
        return bad_argument(err, "kv_dtype is %d, expected f32, f16 or q8", o->kv_dtype);
    if (session_check_numerics(o->numerics, err)) return -1;
    if (o->on_device && !model->device_kv) return bad_argument(err, "the model has no device");
    return session_check_threads(o->threads, err);
}

int llamac_session_open(llamac_session **session, const llamac_model *model, const llamac_session_options *options,
                        llamac_error *err) {
    *session = NULL;
    if (options->mtp && !model->mtp_model)
        return bad_argument(err, "mtp is %d, but the model has no MTP layer", options->mtp);
    if (options->mtp) model = model->mtp_model;
    int layers[FORMAT_EAGLE_STATES];
    if (session_check_trunk(model, options->trunk, err) ||
        (options->drafter && session_check_head(options->drafter, model, layers, err)))
        return -1;
    if (options->trunk && options->on_device)
        return bad_argument(err, "on_device is 1, expected 0: a drafter is where its trunk is");
    if (reads_trunk_keys(model->config) && options->n_sequences > options->trunk->n_sequences)
        return bad_argument(err, "sequences is %d, expected at most the trunk's %d", options->n_sequences,
                            options->trunk->n_sequences);
    const struct kernels *kernels = kernels_select(options->isa, err);
    if (!kernels || check_options(model, options, err)) return -1;
    llamac_session *s = mem_alloc(1, sizeof *s, "the session", err);
    if (!s) return -1;
    mem_count_object(1);
    // encoders and rerankers keep no keys and values for later evals
    const int is_exact = !has_logits(model->config) || model->dtypes == 1u << LLAMAC_F32,
              default_kv_dtype = is_exact ? LLAMAC_F32 : LLAMAC_F16;
    s->model = model;
    s->trunk = options->trunk;
    s->keys_of = reads_trunk_keys(model->config) ? options->trunk : s;
    s->kernels = kernels;
    s->has_layer_states = options->drafter != NULL;
    for (int i = 0; i < FORMAT_EAGLE_STATES && s->has_layer_states; i++) s->eagle_layers[i] = layers[i];
    s->pages = options->on_device ? model->device_kv : model->kv;
    if (is_eagle(model) && s->trunk->device) s->pages = s->trunk->model->head_kv;   // a head is where its trunk is
    s->device = s->keys_of == s ? s->pages->device : s->trunk->device;
    s->context = options->context ? options->context : (int)model->config->context;
    s->kv_dtype = options->kv_dtype ? options->kv_dtype : default_kv_dtype;
    s->numerics = options->numerics;
    s->threads = options->threads;
    s->n_sequences = options->n_sequences;
    s->max_rank = max_int(model->max_rank, s->trunk ? s->trunk->model->max_rank : 0);
    if (s->keys_of != s) s->context = s->trunk->context, s->kv_dtype = s->trunk->kv_dtype;
    if (session_open_sequences(s, err) || session_reserve_rows(s, 1, 1, err)) {
        llamac_session_close(&s);
        return -1;
    }
    *session = s;
    return 0;
}

void llamac_session_close(llamac_session **session) {
    llamac_session *s = *session;
    if (!s) return;
    session_close_sequences(s);
    mem_free(s->scratch.threads);
    mem_free(s->scratch.memory);
    mem_free(s);
    mem_count_object(-1);
    *session = NULL;
}

// ---- accessors

void llamac_session_describe(const llamac_session *s, llamac_session_info *info) {
    *info = (llamac_session_info){
        .context = s->context, .kv_dtype = s->kv_dtype, .threads = s->threads, .isa = s->kernels->name,
        .numerics = s->numerics,
        .scratch_bytes = get_size(&s->scratch_bytes), .kv_bytes = get_size(&s->kv_bytes), .page_positions = KV_PAGE,
    };
    for (int g = 0; g < s->n_groups; g++) info->page_bytes += s->groups[g].page_bytes;
}

int llamac_set_threads(llamac_session *s, int threads, llamac_error *err) {
    if (session_check_threads(threads, err)) return -1;
    s->threads = threads;   // the next eval reserves scratch for them
    return 0;
}
