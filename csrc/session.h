// SPDX-License-Identifier: MIT
// session.h - a session: its sequences with their KV pages, and the scratch memory of an eval.
#ifndef LLAMAC_SESSION_H
#define LLAMAC_SESSION_H
#include "balance.h"
#include "kernels.h"
#include "kv_pages.h"
#include "model.h"
#include "pool.h"
#include "profile.h"

enum {
    MAX_CONSUMERS = 7,        // matrices multiplied by the same inputs: q, its gate, k, v, beside xbc, z, dt; or
                              // gate, up, router, shared gate, experts_in
    CHUNK_ROWS = 256,         // rows of a chunk; longer evals are cut into chunks (chunk_rows)
    EXPERTS_CHUNK_ROWS = 512, // the same of models with experts, on the CPU
    KV_REWIND = 256,          // positions that truncating can always discard from layers with a window
    SHORT_ROWS = 16,          // longer evals execute queued evals of up to this many rows at their pauses
    MAX_KEPT = 16,            // kept states of a sequence (states.c)
    STATE_ALIGNMENT = 64,     // bytes of a recurrent layer's part of a state
    SESSION_MAX_SEQUENCES = 65536,   // of a session
    REDUNDANT_ROWS = 4,       // up to this many rows, each thread computes all norms instead of meeting at a barrier
};

// The kinds of runs, by their rows: at most REDUNDANT_ROWS, which are bound by memory bandwidth, or more.
enum run_kind { RUN_FEW_ROWS, RUN_MANY_ROWS, N_RUN_KINDS };

// The experts of each row in ascending order, and their weights: (rows, n_experts_used). The weight of a shared expert
// with a gate: (rows).
struct routes { int *experts; float *weights, *shared_weights; };
// The same (expert, row) pairs sorted by expert, then by row. Those of expert e are [starts[e], starts[e + 1]).
struct pairs { int *starts, *rows; float *weights; };

// Where the parts of a thread's attention memory begin, in floats, after the panels of ATTENTION_QUERIES queries: their
// outputs, then the scratch of `attend`. `end`: floats of all parts.
struct tile_layout { size_t out, scratch, end; };
static inline struct tile_layout tile_layout(int kv_dtype, int head_dim) {
    struct tile_layout l = { .out = ATTENTION_QUERIES * kv_query_words(kv_dtype, head_dim) };
    l.scratch = l.out + ATTENTION_QUERIES * (size_t)padded_head_dim(head_dim);
    l.end = l.scratch + attend_layout(head_dim).end;
    return l;
}

// One thread's scratch memory. Panels are described in kernels.h.
struct thread_scratch {
    void *panels[N_INPUT_TYPES];   // inputs of products, for REDUNDANT_ROWS rows
    float *row;               // (dim): a normalized row; or (n_layers * layer_embedding_dim); or as wide as the input
                              // of any product, with sub-norms
    float *rounded;           // the same width, with rounded inputs
    float *normed;            // (REDUNDANT_ROWS, dim): normalized rows, for experts
    float *router;            // of router_select
    struct routes routes;     // of REDUNDANT_ROWS rows
    struct pairs pairs;
    void *gemm;               // of the gemm kernels
    float *lora_panel;        // a panel of PANEL_ROWS inputs of adapters
    float *lora_projected_rows;   // (PANEL_ROWS, rank): an adapter's a x
    float *lora_projected;    // the same as panels, for REDUNDANT_ROWS rows and all consumers
    float *attention;         // the parts of tile_layout
    struct pace paces[N_RUN_KINDS];   // in runs of each kind
    uint64_t bytes_read;      // since the last step, if the session measures (profile.h)
    int64_t step_began;       // of the first thread
    uint8_t *memory;          // the part of scratch.memory that contains these buffers
    size_t bytes;
};

// The memory of an eval: shared buffers for a chunk of `rows` rows, and the threads' own.
struct scratch {
    int rows, n_threads;
    void *memory;             // one allocation for all buffers
    size_t shared_bytes;      // of the shared buffers, which come first
    int is_cleared;
    float *x, *spare_x;       // (rows, dim): the residual stream; a second buffer for it if the model has post-norms
                              // or norms the stream itself
    float *branch;            // (rows, dim): a branch with a post-norm, or the sum of experts
    float *shared_out;        // (rows, dim): of the shared expert, where it has a norm of its own
    float *scales;            // (rows): residual_scale in each
    float *normed;            // (rows, dim): normalized rows, for experts
    float *expert_rows, *expert_sums;   // (rows, expert_dim): what experts read, and their sums, if experts_in and
                              // experts_out are around them
    float *router;            // (rows, n_experts): the router's logits
    float *shared_gate;       // (rows): the gate of the shared expert, before the sigmoid
    struct routes routes;
    void *stream_panels[N_INPUT_TYPES];   // inputs of products that come from the residual stream: (rows, dim)
    void *panels[N_INPUT_TYPES];   // other inputs of products
    float *lora_projected;    // (consumers, rows or pairs, rank): an adapter's a x, as panels
    // The buffers of a layer's mixer, up to state_beta and state_decay. They share memory with gate and up, unless a
    // layer of the model computes both in parallel.
    float *q, *k, *v;         // (rows, heads * head_dim)
    float *attn_gate;         // (rows, n_heads * head_dim, or n_heads)
    float *mix;               // (rows, n_heads * head_dim), or the width of v: the mixer's result
    float *q_latent;          // (rows, q_lora_rank)
    float *latent_heads;      // (rows, query_width or mix_width): q before attn_k_b, later what attn_v_b gives
    float *conv_in, *conv_out;        // (rows, channels): before and after the convolution
    float *state_z;                   // (rows, width of v), or the products of a short convolution
    float *state_beta, *state_decay;  // (rows, state_heads): of the delta rule beta, and its a that becomes the decay;
                                      // of Mamba 2 the step, and dt that becomes the decay

    float *draft_inputs;      // (rows, 2 states_dim): embeddings and hidden states; of an EAGLE-3 head (rows, 2 dim),
                              // and before that (rows, 3 trunk_dim), if it norms its states
    float *cluster_scores, *in_clusters;   // (n_clusters), (vocab_size): scores of clusters, logits in their order
    int *clusters;            // (clusters_used): the best ones
    float *layer_inputs;              // (rows, n_layers * layer_embedding_dim)
    float *gate, *up;         // (rows, ffn_dim); with experts (pairs, ffn_dim), then (rows, shared_ffn_dim). The
                              // activation overwrites `up`
    int blocks;               // capacity of `partials`: blocks of positions per sequence
    float *partials;          // (queries of up to REDUNDANT_ROWS rows, blocks, partial_floats(head_dim))
    int *finished;            // (queries of up to REDUNDANT_ROWS rows): computed blocks of a tile; atomic
    float *angles;            // (RoPE tables, rows, head_dim): rope_dim / 2 cosines, then as many sines
    struct thread_scratch *threads;   // (n_threads)
};

// Layers with the same shape of keys and values and the same lifetime of positions: full attention, or windows of one
// size. A page of the group holds KV_PAGE positions of all its layers. The recurrent layers are a group of another
// kind: each of its pages is a state of all of them.
struct kv_group { int window, n_kv_heads, head_dim, value_dim; size_t page_bytes; };

// Where pages store a layer's keys and values. A layer that reads those of an earlier layer has the same values here.
struct kv_layer {
    int group;
    size_t offset;            // of the layer's first KV head in a page
    size_t head_bytes;        // of a KV head: its keys, then its values
    size_t value_offset;      // of the values within a head
    size_t state_offset;      // of a recurrent layer: where its state begins in a page of states
};

// A sequence's pages of one group: pages[first] to pages[end - 1]. Page p holds positions from p * KV_PAGE on. Windowed
// groups drop the first pages. Sequences, also of other sessions, may share pages: before a sequence writes to a shared
// partial last page, it copies the page.
struct kv_table {
    uint8_t **pages;          // room for ceil(context / KV_PAGE)
    int first, end;
    int start;                // the first stored position, which is in page `first`
    int wanted;               // the value of `end` that the current eval needs
};

// The state of the recurrent layers after `length` positions, and why it stays when the sequence grows.
enum kept { NOT_KEPT, KEPT_LATEST, KEPT, KEPT_PROMPT };   // KEPT_LATEST: until a later one is kept
struct state { int length, kept; uint8_t *page; };

// A model without recurrent layers has no states. Otherwise the last state is the one after `length` positions, unless
// that is 0.
struct sequence {
    int length;               // positions
    struct kv_table *kv;      // (n_groups)
    struct state states[MAX_KEPT + 1];   // (n_states), by ascending lengths
    int n_states;
    uint8_t *spares[2];       // (n_spares): pages for the next states
    int n_spares;
    int prompt_start, prompt_end;   // the positions that the last evals of a prompt have added
    int target, is_prompt;    // of the current eval: the length that it reaches; whether it is a prompt
};

// Rows [first, last) of a chunk, adjacent rows of a sequence: they continue from one state (NULL: zeros) and end with
// another, after `length` positions.
struct state_segment { int sequence, first, last, length, kept; uint8_t *from, *to; };

// A draft of the last llamac_eval_drafts. Accepting it makes its sequence equal to the first `length` positions of a
// branch. A branch is a path of drafts from a root to a leaf, as a sequence that starts as a fork. `state`: the page
// with the state of the recurrent layers after the draft, if there are any.
struct draft { int sequence, branch, parent, length; uint8_t *state; };

struct llamac_session {
    const struct llamac_model *model;
    const struct llamac_session *trunk;    // of a drafter: the session of the model that it drafts for; or NULL
    const struct llamac_session *keys_of;  // the session whose keys and values the layers read: this one, or the trunk
    int has_layer_states;         // 1: hidden states are the residual stream after eagle_layers, for an EAGLE-3 head
    int eagle_layers[FORMAT_EAGLE_STATES];
    const struct kernels *kernels;
    struct kv_pool *pages;        // the pool of its pages
    const llamac_device *device;  // stores the pages and computes the chunks; NULL: the CPU
    int states_on_device;         // 1: see llamac_states_on_device
    int context, kv_dtype, numerics, threads, n_sequences;
    int max_rank;                 // of the model's adapters, and of the trunk's
    int n_groups;
    struct kv_group *groups;
    struct kv_layer *kv_layers;   // (n_layers)
    struct kv_group state_group;  // of the recurrent layers; 0 bytes per page: there are none
    struct state_segment *segments;   // (n_segments), of the current chunk; room for chunk_rows
    int n_segments;
    size_t kv_bytes;          // of the pages of sequences and branches; a page that n of them share counts n times
    size_t scratch_bytes;     // of scratch.memory
    struct sequence *sequences;
    struct sequence *branches;    // (n_branches)
    struct draft *drafts;         // (n_drafts)
    int n_branches, n_drafts;
    uint8_t *free_states[LLAMAC_MAX_DRAFTS];   // (n_free_states): pages of discarded drafts, for those of this call
    int n_free_states;
    struct scratch scratch;
    struct contention contention[N_RUN_KINDS];
    struct balance balance[N_RUN_KINDS];
    llamac_step_cost *profile;    // (n_layers, LLAMAC_N_STEPS), the caller's; or NULL
};

// Returns the most rows of a chunk. On the CPU, an expert multiplies only a part of them, after unpacking its weights.
static inline int chunk_rows(const struct llamac_session *s) {
    if (s->device) return s->device->most_rows;
    return s->model->max_experts ? EXPERTS_CHUNK_ROWS : CHUNK_ROWS;
}

// Checks a caller's number of threads.
int session_check_threads(int threads, llamac_error *err);
int session_check_numerics(int numerics, llamac_error *err);

// Allocates scratch for chunks of `rows` rows with the session's number of threads and sequences of up to `length`
// positions. The next run clears it.
int session_reserve_rows(struct llamac_session *s, int rows, int length, llamac_error *err);

// Returns the bytes of scratch that any eval can need with the session's number of threads.
size_t session_scratch_limit(const struct llamac_session *s);

// Clears newly allocated scratch. All members of a run call it first. With several NUMA nodes, a page of memory is
// placed on the node of the thread that first writes to it: members clear their own memory and interleaved parts of
// the shared buffers.
void session_clear_scratch(struct llamac_session *s, const struct member *member);

// ---- sequences.c

// Assigns the layers to groups and allocates the sequences, without pages.
int session_open_sequences(struct llamac_session *s, llamac_error *err);
// Accepts a session whose opening failed.
void session_close_sequences(struct llamac_session *s);
// Allocates a sequence without positions; frees one. Closing accepts a sequence whose opening failed.
int session_open_sequence(const struct llamac_session *s, struct sequence *q, llamac_error *err);
void session_close_sequence(struct llamac_session *s, struct sequence *q);
// Sequence n_sequences + i is branch i.
static inline struct sequence *session_sequence(const struct llamac_session *s, int sequence) {
    return sequence < s->n_sequences ? &s->sequences[sequence] : &s->branches[sequence - s->n_sequences];
}
// Makes a sequence equal to the first `length` positions of another. The caller has checked that this is possible.
void session_share_prefix(struct llamac_session *to, int to_sequence, const struct llamac_session *from,
                          int from_sequence, int length);
// Sets a sequence's length and its pages, adding a reference to each page. A group's pages begin at
// first_positions[group].
void session_set_pages(struct llamac_session *s, int sequence, int length, const int32_t *first_positions,
                       uint8_t *const *pages);
// Sets the length of a sequence, which other threads may read.
void session_set_length(struct sequence *q, int length);
// Reserves the pages of keys and values that a sequence needs to grow to `length` positions; none of them is shared. If
// it fails, the caller must return the reserved pages with session_trim_pages.
int session_reserve_pages(struct llamac_session *s, int sequence, int length, llamac_error *err);
// Returns the bytes of the pages that this allocates, without the copy of a partial page that other sequences share:
// the last one that writes to such a page needs none.
size_t session_missing_bytes(const struct llamac_session *s, int sequence, int length);
// Returns the maximum bytes of pages of a sequence while it grows to `length` positions.
size_t session_pages_limit(const struct llamac_session *s, int length);
// Returns the pages past the sequence's length.
void session_trim_pages(struct llamac_session *s, int sequence);
// Allocate a page of a group of layers, with any content, if need be in place of kept states; release one.
uint8_t *session_take_page(struct llamac_session *s, const struct kv_group *g, llamac_error *err);
void session_release_page(struct llamac_session *s, const struct kv_group *g, uint8_t *page);
// Counts a page that a sequence has received in another way.
void session_count_page(struct llamac_session *s, const struct kv_group *g);
// Drops the pages that have left the windows of a sequence that has grown. Never fails.
void session_slide(struct llamac_session *s, int sequence);

// ---- states.c

// Returns the maximum number of kept states of a sequence.
int session_max_kept(const struct llamac_session *s);
// Returns the maximum number of states and spare pages of a sequence.
int session_max_states(const struct llamac_session *s);
// Reserves memory for a sequence's next states, as session_reserve_pages does for pages. n_rows: of all sequences.
int session_reserve_state(struct llamac_session *s, struct sequence *q, int length, int n_rows, llamac_error *err);
// Removes the states after more than `length` positions. A sequence without positions has none, nor spare pages.
void session_cut_states(struct llamac_session *s, struct sequence *q, int length);
// Returns the largest length up to `length` at which a sequence has a state, or to which a sequence without states can
// be cut.
int session_cut_length(const struct llamac_session *s, const struct sequence *q, int length);
// Removes the kept state whose loss is the smallest, of those whose memory only this session uses. Returns whether
// there was any.
int session_drop_state(struct llamac_session *s);
// Checks that the pages and states of an eval fit into the budget, if need be in place of kept states, so that an eval
// that fails for this reason drops none of them. lengths: those that the eval gives the sequences; n_rows: of the eval.
int session_check_room(const struct llamac_session *s, const int *lengths, int n_rows, llamac_error *err);
// Give a sequence without states those of another after at most `length` positions, or one state.
void session_share_states(struct llamac_session *to, struct sequence *q, const struct sequence *source, int length);
void session_set_state(struct llamac_session *s, struct sequence *q, int length, uint8_t *page);
// Adds n earlier states, the latest first, to the one that session_set_state has given to a sequence.
void session_add_states(struct llamac_session *s, struct sequence *q, const int32_t *lengths, uint8_t *const *pages,
                        int n);
// Returns the bytes of a recurrent layer's part of a state: the heads' matrices, then the last inputs of the
// convolution.
static inline size_t session_state_bytes(const struct llamac_model *m, const struct layer_record *r) {
    return sizeof(float) * (size_t)(state_values(r) * r->state_key_dim +
                                    (r->conv_width - 1) * conv_channels(m->config, r));
}
// Divide the rows of a chunk into segments; make the states that they end with those of the sequences, or drop them if
// the chunk was not computed. Memory has been reserved.
void session_begin_chunk(struct llamac_session *s, const llamac_row *rows, int n);
void session_end_chunk(struct llamac_session *s, int computed);
// Returns the states of all drafts to free_states; releases those.
void session_return_draft_states(struct llamac_session *s);
void session_drop_free_states(struct llamac_session *s);
// Reserves a page for the state after each draft; makes each draft a segment, which continues from its parent's state,
// until session_end_chunk; gives the states of an accepted draft and its ancestors to their sequence, which has just
// become equal to the first positions of their branch.
int session_reserve_draft_states(struct llamac_session *s, llamac_error *err);
void session_begin_drafts(struct llamac_session *s, const llamac_row *rows);
void session_accept_states(struct llamac_session *s, int draft);

// Returns the widest row that a mixer gives to its output projection.
static inline size_t mix_row_width(const struct llamac_model *m) {
    return max_size((size_t)m->config->n_heads * m->config->head_dim, max_size(m->max_recurrent_width,
                                                                               m->max_latent_heads));
}

// ---- drafter.c

// Checks that a drafter was made for a model of this shape.
int session_check_pair(const struct llamac_model *drafter, const struct llamac_model *trunk, llamac_error *err);
// Checks that a session can be the trunk of a drafter's session.
int session_check_trunk(const struct llamac_model *drafter, const struct llamac_session *trunk, llamac_error *err);
// Checks that an EAGLE-3 head can draft for a model. layers: receives how many layers precede each state that it reads.
int session_check_head(const struct llamac_model *head, const struct llamac_model *trunk,
                       int layers[FORMAT_EAGLE_STATES], llamac_error *err);
// Returns the trunk's layer whose keys and values a layer of an assistant reads: the last one that has its own and,
// like the assistant's layer, has a window or has none; -1: there is none.
int session_trunk_layer(const struct llamac_model *drafter, int layer, const struct llamac_model *trunk);

// ---- drafts.c

// Discards the drafts. Accepts a session without any.
void session_discard_drafts(struct llamac_session *s);

// Returns a view of one layer's KV head in a sequence's pages.
static inline struct kv_view session_kv(const struct llamac_session *s, int sequence, int layer, int head) {
    const struct kv_layer *kv = &s->kv_layers[layer];
    const size_t key_offset = kv->offset + (size_t)head * kv->head_bytes;
    const struct sequence *q = session_sequence(s->keys_of, sequence);
    return (struct kv_view){ .pages = (const uint8_t *const *)q->kv[kv->group].pages,
                             .key_offset = key_offset, .value_offset = key_offset + kv->value_offset };
}
// Returns the frequencies of a RoPE table: (rope_dim / 2). The session's context, not the current length, selects
// between the short and the long table, because results must not depend on how rows are grouped.
static inline int session_uses_long_rope(const struct llamac_session *s, uint32_t table) {
    const int original = (int)s->model->config->rope_original_context[table];
    return original && s->context > original;
}
static inline const float *session_inv_freq(const struct llamac_session *s, uint32_t table) {
    const struct rope_table *rope = &s->model->rope[table];
    return session_uses_long_rope(s, table) ? rope->inv_freq_long : rope->inv_freq;
}
// Returns the page of a layer that contains a position of a sequence.
static inline uint8_t *session_page(const struct llamac_session *s, int sequence, int layer, int position) {
    return session_sequence(s, sequence)->kv[s->kv_layers[layer].group].pages[position / KV_PAGE];
}
#endif
