// SPDX-License-Identifier: MIT
// session.c - creation, growth and truncation of sessions. See session.h.
#include "session.h"

#include <string.h>
#include "common.h"
#include "error.h"
#include "mem.h"

// ---- scratch: one allocation, cut into pieces

// Gives out pieces of a block; with memory NULL it only counts the bytes.
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

static struct routes cut_routes(struct arena *a, size_t n) {
    return (struct routes){ arena_ints(a, n), arena_floats(a, n) };
}

// The most words that the inputs of one row take together, experts' or others'.
static size_t widest_input(const struct llamac_model *m, int kind, int q_dim) {
    const int dim = (int)m->config->dim, used = m->max_experts_used;
    const size_t together = input_words(kind, max_int(max_int(dim, q_dim), m->max_ffn_dim)),
        apart = input_words(kind, max_int(dim, m->max_expert_dim));
    return used ? max_size(together, (size_t)used * apart) : together;
}

// What adapters make of the inputs of all readers.
static size_t lora_floats(const struct llamac_model *m,
    size_t rows) { return MAX_READERS * rows * (size_t)(max_int(m->max_experts_used, 1) * m->max_rank); }

static void cut_scratch(const struct llamac_session *s, struct scratch *x, struct arena *a) {
    const struct config *c = s->model->config;
    const size_t rows = (size_t)x->rows, dim = c->dim, q_dim = (size_t)c->n_heads * c->head_dim,
        kv_dim = (size_t)c->n_kv_heads * c->head_dim;
    const size_t ffn = s->model->max_hidden, experts = (size_t)s->model->max_experts,
        pairs = rows * (size_t)s->model->max_experts_used, width = (size_t)padded_head_dim((int)c->head_dim);
    const size_t rank = (size_t)s->model->max_rank;
    unsigned inputs = 0;
    for (int dtype = 1; dtype < LLAMAC_N_DTYPES;
        dtype++) if (s->model->dtypes & 1u << dtype) inputs |= 1u << input_type_of(dtype);
    x->x = arena_floats(a, rows * dim);
    x->other = arena_floats(a, s->model->has_post_norms ? rows * dim : 0);
    x->branch = arena_floats(a, s->model->has_post_norms || experts ? rows * dim : 0);
    x->scales = arena_floats(a, c->residual_scale == 1 ? 0 : rows);
    x->kept = arena_floats(a, experts ? rows * dim : 0);
    x->router = arena_floats(a, rows * experts);
    x->routes = cut_routes(a, pairs);
    for (int kind = 0; kind < N_INPUT_TYPES; kind++) x->panels[kind] = arena_floats(a,
        inputs & 1u << kind ? rows * widest_input(s->model, kind, (int)q_dim) : 0);
    x->lora = arena_floats(a, lora_floats(s->model, rows));
    x->q = arena_floats(a, rows * q_dim);
    x->k = arena_floats(a, rows * kv_dim);
    x->v = arena_floats(a, rows * kv_dim);
    x->mix = arena_floats(a, rows * q_dim);
    x->gate = arena_floats(a, rows * ffn);
    x->up = arena_floats(a, rows * ffn);
    x->angles = arena_floats(a, c->n_rope * rows * c->head_dim);
    for (int t = 0; t < x->n_threads; t++) {
        struct thread_scratch local = {
            .row = arena_floats(a, dim),
            .kept = arena_floats(a, experts ? REDUNDANT_ROWS * dim : 0),
            .probabilities = arena_floats(a, experts),
            .routes = cut_routes(a, REDUNDANT_ROWS * (size_t)s->model->max_experts_used),
            .pairs = { arena_ints(a, experts ? experts + 1 : 0), arena_ints(a, pairs), arena_floats(a, pairs) },
            .gemm = arena_floats(a, gemm_scratch_bytes(x->rows) / sizeof(float)),
            .lora_panel = arena_floats(a, rank ? PANEL_ROWS * widest_input(s->model, INPUT_F32, (int)q_dim) : 0),
            .lora_rows = arena_floats(a, PANEL_ROWS * rank),
            .lora = arena_floats(a, lora_floats(s->model, REDUNDANT_ROWS)),
            .attention = arena_floats(a,
                attend_scratch_floats((int)c->head_dim) + ATTENTION_QUERIES * (c->head_dim + width)),
        };
        for (int kind = 0; kind < N_INPUT_TYPES; kind++) local.panels[kind] = arena_floats(a,
            inputs & 1u << kind ? REDUNDANT_ROWS * widest_input(s->model, kind, (int)q_dim) : 0);
        if (a->memory) x->threads[t] = local;
    }
}

// Wide models take smaller chunks: what a run needs beside weights and cache shall stay under 50 MB.
static int choose_max_rows(const struct llamac_session *s) {
    for (struct scratch x = { .rows = MAX_ROWS, .n_threads = s->threads };; x.rows -= MIN_ROWS) {
        struct arena count = { 0 };
        cut_scratch(s, &x, &count);
        if (count.used <= MAX_SCRATCH || x.rows == MIN_ROWS) return x.rows;
    }
}

int session_reserve_rows(struct llamac_session *s, int rows, llamac_error *err) {
    if (rows <= s->scratch.rows && s->threads <= s->scratch.n_threads) return 0;
    struct scratch bigger = { .rows = max_int(rows, s->scratch.rows),
        .n_threads = max_int(s->threads, s->scratch.n_threads) };
    struct arena count = { 0 };
    cut_scratch(s, &bigger, &count);
    bigger.threads = mem_alloc((size_t)bigger.n_threads, sizeof *bigger.threads, "the threads' scratch", err);
    bigger.memory = bigger.threads ? mem_alloc_huge(count.used, "activations", err) : NULL;
    if (!bigger.memory) {
        mem_free(bigger.threads);
        return -1;
    }
    memset(bigger.memory, 0, count.used);
    bigger.bytes = count.used;
    struct arena cut = { .memory = bigger.memory };
    cut_scratch(s, &bigger, &cut);
    for (int r = 0; r < bigger.rows && s->model->config->residual_scale != 1;
        r++) bigger.scales[r] = s->model->config->residual_scale;
    mem_free(s->scratch.threads);
    mem_free(s->scratch.memory);
    s->scratch = bigger;
    return 0;
}

int session_reserve_pages(struct llamac_session *s, int sequence, int length, llamac_error *err) {
    struct sequence *q = &s->sequences[sequence];
    while (q->n_pages * KV_PAGE < length) {
        uint8_t *page = kv_page_take(&s->pages, err);
        if (!page) return -1;
        q->pages[q->n_pages++] = page;
        s->kv_bytes += s->pages.page_bytes;
    }
    return 0;
}

void session_trim_pages(struct llamac_session *s, int sequence) {
    struct sequence *q = &s->sequences[sequence];
    while (q->n_pages > ceil_div(q->length, KV_PAGE)) {
        kv_page_give(&s->pages, q->pages[--q->n_pages]);
        s->kv_bytes -= s->pages.page_bytes;
    }
}

// ---- life

int session_check_threads(int threads, llamac_error *err) {
    if (threads < 1 || threads > POOL_MAX) return err_set(err, LLAMAC_BAD_ARGUMENT, "threads is %d, expected 1 to %d",
        threads, POOL_MAX);
    if (threads > 1 && !llamac_has_threads())
        return err_set(err, LLAMAC_UNSUPPORTED, "threads is %d, but this build has no OpenMP: only 1 is possible",
            threads);
    return 0;
}

static int check_options(const struct llamac_model *model, const llamac_session_options *o, llamac_error *err) {
    const int max_context = (int)model->config->context;
    if (o->n_sequences < 1 || o->n_sequences > 65536)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "sequences is %d, expected 1 to 65536", o->n_sequences);
    if (o->context < 0 || o->context > max_context)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "context is %d, expected 1 to %d, the model's", o->context,
            max_context);
    if (o->kv_dtype != 0 && o->kv_dtype != LLAMAC_F32 && o->kv_dtype != LLAMAC_F16)
        return err_set(err, LLAMAC_BAD_ARGUMENT, "kv_dtype is %d, expected f32 or f16", o->kv_dtype);
    return session_check_threads(o->threads, err);
}

static int fill_session(struct llamac_session *s, llamac_error *err) {
    const struct config *c = s->model->config;
    const size_t page_entry = (size_t)ceil_div(s->context, KV_PAGE);
    s->value_offset = (size_t)(KV_PAGE / STRIP_ROWS) * float_strip_bytes(s->kv_dtype, (int)c->head_dim);
    s->head_bytes = s->value_offset + (size_t)(padded_head_dim((int)c->head_dim) / 16) * float_strip_bytes(s->kv_dtype,
        KV_PAGE);
    s->pages = kv_pages_of((size_t)c->n_layers * c->n_kv_heads * s->head_bytes, (size_t)s->n_sequences * page_entry);
    s->sequences = mem_alloc((size_t)s->n_sequences, sizeof *s->sequences, "the sequences", err);
    if (!s->sequences) return -1;
    for (int i = 0; i < s->n_sequences; i++) {
        s->sequences[i].pages = mem_alloc(page_entry, sizeof(uint8_t *), "a sequence's list of pages", err);
        if (!s->sequences[i].pages) return -1;
    }
    return session_reserve_rows(s, 1, err);
}

int llamac_session_open(llamac_session **session, const llamac_model *model, const llamac_session_options *options,
    llamac_error *err) {
    *session = NULL;
    const struct kernels *kernels = kernels_select(options->isa, err);
    if (!kernels || check_options(model, options, err)) return -1;
    llamac_session *s = mem_alloc(1, sizeof *s, "the session", err);
    if (!s) return -1;
    mem_count_object(1);
    s->model = model;
    s->kernels = kernels;
    s->context = options->context ? options->context : (int)model->config->context;
    s->kv_dtype = options->kv_dtype ? options->kv_dtype : model->dtypes == 1u << LLAMAC_F32 ? LLAMAC_F32 : LLAMAC_F16;
    s->threads = options->threads;
    s->n_sequences = options->n_sequences;
    s->max_rows = choose_max_rows(s);
    if (fill_session(s, err)) {
        llamac_session_close(&s);
        return -1;
    }
    *session = s;
    return 0;
}

void llamac_session_close(llamac_session **session) {
    llamac_session *s = *session;
    if (!s) return;
    for (int i = 0; s->sequences && i < s->n_sequences; i++) {
        for (int p = 0; p < s->sequences[i].n_pages; p++) kv_page_give(&s->pages, s->sequences[i].pages[p]);
        mem_free(s->sequences[i].pages);
    }
    mem_free(s->sequences);
    mem_free(s->scratch.threads);
    mem_free(s->scratch.memory);
    mem_free(s);
    mem_count_object(-1);
    *session = NULL;
}

// ---- small questions

void llamac_session_describe(const llamac_session *s, llamac_session_info *info) {
    *info = (llamac_session_info){ s->context, s->kv_dtype, s->threads, s->kernels->name, s->scratch.bytes,
        s->kv_bytes };
}

int llamac_length(const llamac_session *s, int sequence) {
    return sequence >= 0 && sequence < s->n_sequences ? s->sequences[sequence].length : -1;
}

int llamac_set_threads(llamac_session *s, int threads, llamac_error *err) {
    if (session_check_threads(threads, err)) return -1;
    s->threads = threads;   // the next eval reserves what more threads need
    return 0;
}

int llamac_truncate(llamac_session *s, int sequence, int length, llamac_error *err) {
    const int now = llamac_length(s, sequence);
    if (now < 0) return err_set(err, LLAMAC_BAD_ARGUMENT, "sequence is %d, expected 0 to %d", sequence,
        s->n_sequences - 1);
    if (length < 0 || length > now) return err_set(err, LLAMAC_BAD_ARGUMENT,
        "cannot truncate to length %d: expected 0 to %d, the sequence's length", length, now);
    s->sequences[sequence].length = length;
    session_trim_pages(s, sequence);
    return 0;
}
