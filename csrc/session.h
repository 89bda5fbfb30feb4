// SPDX-License-Identifier: MIT
// session.h - the mutable side: sequences with their KV pages, and the memory that an eval computes in.
#ifndef LLAMAC_SESSION_H
#define LLAMAC_SESSION_H
#include "kernels.h"
#include "kv_pages.h"
#include "model.h"
#include "pool.h"

enum {
    MAX_READERS = 3,          // matrices that share inputs: q, k, v; gate, up; or one
    MAX_ROWS = 256,           // rows that go through the layers together at most; more are cut into chunks
    MIN_ROWS = 32,            // a chunk's size is a multiple of this
    MAX_SCRATCH = 26 << 20,   // bytes of scratch that a chunk's size keeps to, unless it is MIN_ROWS
    // up to so many rows every thread computes norms for itself instead of meeting at a barrier
    REDUNDANT_ROWS = 4,
};

// The experts of each row, ascending, and their weights: (rows, n_experts_used).
struct routes { int *experts; float *weights; };
// The same by expert: those of expert e are [starts[e], starts[e + 1]), rows ascending.
struct pairs { int *starts, *rows; float *weights; };

// What one thread needs for itself.
struct thread_scratch {
    void *panels[N_INPUT_TYPES];   // inputs of REDUNDANT_ROWS rows of its own
    float *row;               // (dim): a normed row
    float *kept;              // (REDUNDANT_ROWS, dim): normed rows for experts
    float *probabilities;     // (n_experts)
    struct routes routes;     // of REDUNDANT_ROWS rows
    struct pairs pairs;
    void *gemm;               // gemm's
    float *lora_panel;        // PANEL_ROWS inputs of adapters
    float *lora_rows;         // (PANEL_ROWS, rank): an adapter's a x
    float *lora;              // the same as inputs, of REDUNDANT_ROWS rows
    float *attention;         // attend's, then the panels and the output of ATTENTION_QUERIES queries
};

// Buffers for `rows` rows: (rows, width); panels as kernels.h says, wide enough for any product.
struct scratch {
    int rows, n_threads;
    void *memory;
    size_t bytes;
    float *x, *other;         // (rows, dim): the residual stream; the other where branches are normed
    float *branch;            // (rows, dim): what is normed before it is added, and the sum of experts
    float *scales;            // (rows): residual_scale in each
    float *kept;              // (rows, dim): normed rows for experts
    float *router;            // (rows, n_experts)
    struct routes routes;
    void *panels[N_INPUT_TYPES];   // the inputs of the products in work
    float *lora;              // (readers, rows or pairs, rank): what adapters make of them
    float *q, *k, *v;         // (rows, heads * head_dim)
    float *mix;               // (rows, n_heads * head_dim): attention's result
    float *gate, *up;         // (rows, ffn_dim), with experts (pairs, ffn_dim); up becomes the hidden layer
    float *angles;            // (rope tables, rows, 2, rope_dim / 2): cosines, then sines
    struct thread_scratch *threads;   // (n_threads)
};

struct sequence {
    int length;
    int n_pages;
    uint8_t **pages;          // (ceil(context / KV_PAGE)): each holds KV_PAGE positions of all layers
};

struct llamac_session {
    const struct llamac_model *model;
    const struct kernels *kernels;
    int context, kv_dtype, threads, n_sequences;
    int max_rows;             // of a chunk
    size_t head_bytes, value_offset;   // of one head in a page; of the values in that
    struct kv_pages pages;
    size_t kv_bytes;          // of pages in use
    struct sequence *sequences;
    struct scratch scratch;
    struct contention contention[2];   // of runs with up to REDUNDANT_ROWS rows, and with more
};

// Whether a run may be asked for with so many threads.
int session_check_threads(int threads, llamac_error *err);

// Makes sure that `rows` rows can be computed together, and that the sequence has pages for `length` positions.
int session_reserve_rows(struct llamac_session *s, int rows, llamac_error *err);
int session_reserve_pages(struct llamac_session *s, int sequence, int length, llamac_error *err);
// Gives back the pages behind the sequence's length.
void session_trim_pages(struct llamac_session *s, int sequence);

// Where one layer's KV head lies in each of a sequence's pages.
static inline struct kv_view session_kv(const struct llamac_session *s, int sequence, int layer, int head) {
    const size_t key_offset = ((size_t)layer * s->model->config->n_kv_heads + (size_t)head) * s->head_bytes;
    return (struct kv_view){ (const uint8_t *const *)s->sequences[sequence].pages, key_offset,
        key_offset + s->value_offset };
}
#endif
