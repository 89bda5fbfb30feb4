// SPDX-License-Identifier: MIT
// eval.h - the state that the threads of an eval share: the chunk of rows being computed, and the observations.
#ifndef LLAMAC_EVAL_H
#define LLAMAC_EVAL_H
#include "pool.h"
#include "session.h"

// The matrices that multiply the same inputs. The `data` of matrices that the model does not have is NULL.
struct consumers { const struct matrix *matrices[MAX_CONSUMERS]; int n; };

// Inputs of products: m rows as panels of each input type that the consumers need, and for each consumer with an
// adapter its a x as f32 panels (lora.h).
struct panels { void *by_input[N_INPUT_TYPES]; float *lora_projected[MAX_CONSUMERS]; int m; };

// What a run computes of its layers. An encoder's rows see later positions of their sequence. If an eval has more than
// one chunk, the keys and values of all rows are therefore stored before the attention of any row.
enum part { PART_ALL, PART_KEYS, PART_QUERIES };   // keys: only keys and values; queries: all but keys and values

// An eval, and the chunk of it that is being computed: the fields from `rows` to `logits`.
struct eval {
    struct llamac_session *session;

    const llamac_row *rows;               // (n_rows)
    // (n_rows): the keys and values of a draft are stored in all branches that contain it, from its row's sequence to
    // this one. NULL: the rows are not drafts.
    const int *last_branches;
    int n_rows;
    int first_row, first_wanted;          // number of rows before this chunk, and of those that want logits
    int n_wanted;                         // number of rows of this chunk that want logits
    float *logits;                        // (n_wanted, vocab_size)

    const llamac_observation *observations;
    int n_observations;
    const float *inputs;                  // (rows of all chunks, dim), or NULL: embeddings; for drafters and MTP
                                          // layers: hidden states, (rows of all chunks, states_dim)
    const float *states;                  // for an EAGLE-3 head: (rows of all chunks, 3 trunk_dim); NULL: inputs
    const int32_t *types;                 // (rows of all chunks), or NULL: 0
    float *hidden;                        // receives the hidden states of the rows from first_hidden on; or NULL
    int first_hidden;                     // among the rows of all chunks
    int first_layer, end_layer;           // the layers that a run computes
    enum part part;                       // of these layers
    float *stream;                        // (rows of all chunks, dim): the residual stream between runs; NULL: a run
                                          // computes all layers
    struct cancel cancel;
};

// Which kind of run a chunk is.
static inline enum run_kind run_kind(const struct eval *e) {
    return e->n_rows > REDUNDANT_ROWS ? RUN_MANY_ROWS : RUN_FEW_ROWS;
}

static inline int computes_queries(const struct eval *e) { return e->part != PART_KEYS; }
// Returns whether the run computes keys and values of a layer. A layer that shares another's never does.
static inline int computes_keys(const struct eval *e, int layer) {
    return e->part != PART_QUERIES && e->session->model->layers[layer].kv_source == layer;
}

// One thread's view of an eval.
struct worker {
    struct eval *eval;
    const struct member *member;
    struct thread_scratch *local;
};

// Returns whether each thread's share of a layer consists of whole KV heads. Each thread then computes attention from
// its own results, and no barrier is needed in between.
static inline int has_whole_heads(const struct worker *w, int n_kv_heads) {
    return n_kv_heads % w->member->count == 0 && pool_shares_are_equal(w->member);
}

// ---- eval.c

// Checks a call's arguments, except the rows' tokens, sequences and positions.
int eval_check(const struct llamac_session *s, const llamac_row *rows, int n, const float *logits,
               const llamac_eval_options *options, llamac_error *err);
// Returns an eval of n rows that has no chunk yet.
struct eval eval_of(struct llamac_session *s, int n, const llamac_eval_options *options);
// Sets the eval's chunk to its next rows. The n rows have been checked, and memory has been reserved. Returns the job.
struct pool_job eval_chunk(struct eval *e, const llamac_row *rows, int n, float *logits);
// Computes the chunk on the session's device. Returns -1 if the device failed. A chunk that the device abandoned counts
// as cancelled.
int eval_on_device(struct eval *e, llamac_error *err);
// Sets the error of an eval whose chunk was cancelled. Returns -1.
int eval_cancelled(const struct eval *e, int n, llamac_error *err);

// ---- forward.c

// Computes the whole graph for one chunk. Every member of the team calls it. eval: the struct eval.
void forward(void *eval, const struct member *member);
// Writes the embedding of a token, from the trunk's table if the session has a trunk. x: (dim), or (trunk_dim).
void token_embedding(const struct worker *w, int token, float *x);

// ---- drafter.c

// Computes the input of the first layer from embeddings and hidden states. x: (n_rows, dim). Ends without a barrier.
void states_in(const struct worker *w, float *x);
// Compute, from the residual stream x, the states that a drafter passes to its next draft in place of hidden states,
// and the logits of the best clusters. The caller must pass a barrier before, and before anything overwrites panels.
void states_out(const struct worker *w, const float *x);
void clustered_logits(const struct worker *w, const float *x);

// ---- attention.c

// Fills scratch.angles for the rows of the chunk. Called once, before the first layer.
void attention_prepare(const struct worker *w);
// Computes RoPE of one layer's q and k, and stores k and v in the cache. Ends without a barrier.
void attention_store(const struct worker *w, int layer);
// Computes RoPE, cache and attention of one layer, from q, k, v to mix. Ends without a barrier.
void attention(const struct worker *w, int layer);

// ---- latent.c

// Computes q, k and v of latent attention from the layer's first products. The caller must pass a barrier before. Ends
// at a barrier.
void latent_qkv(const struct worker *w, int layer);
// Computes the rows of latent_heads that the output projection reads, from mix. The caller must pass a barrier before.
// Ends at a barrier.
void latent_values(const struct worker *w, int layer);

// ---- delta_net.c, mamba2.c, short_conv.c

// Compute a recurrent layer from the products of the normalized rows to mix. The caller must pass a barrier before.
// They end without a barrier.
void delta_net(const struct worker *w, int layer);
void mamba2(const struct worker *w, int layer);
void short_conv(const struct worker *w, int layer);

// ---- layer_embedding.c

// Fills scratch.layer_inputs for the rows of the chunk from their embeddings, if the model has layer embeddings. The
// caller must pass a barrier before. Ends without a barrier.
void layer_inputs(const struct worker *w);
// Computes the branch of a layer's own token embeddings. inputs: the rows, packed for layer_embedding_gate. Ends
// without a barrier.
void layer_embedding(const struct worker *w, int layer, const struct panels *inputs, float *branch);

// ---- ffn.c

// The places of matrices among the consumers of a layer's normalized rows. The list of an expert has the first two.
enum { CONSUMER_GATE, CONSUMER_UP, CONSUMER_ROUTER, CONSUMER_SHARED_GATE, CONSUMER_EXPERTS_IN, N_FFN_CONSUMERS };
// Return the matrices of the dense network or the shared expert that read the normalized rows, those that choose
// experts, or both. Some of them may be missing in a layer; their places in the list are always the same.
enum ffn_part { FFN_NETWORK = 1, FFN_ROUTERS = 2 };
struct consumers ffn_consumers(const struct layer *layer, int parts);
// Computes a layer's dense network, or its shared expert if it has one, up to the hidden activations, each thread its
// own columns. inputs: the normalized rows, packed for its matrices. Ends without a barrier.
void ffn_hidden(const struct worker *w, int layer, const struct panels *inputs);
// Chooses the experts of a layer and computes their hidden activations. inputs: the normalized rows, packed for the
// router. prepare_inputs must have kept the rows that the experts read. Ends without a barrier.
void experts_hidden(const struct worker *w, int layer, const struct panels *inputs);
// Computes the down projection and adds it to x, or writes it to `branch` if that is not NULL. The caller must pass a
// barrier before. Ends without a barrier.
void ffn_down(const struct worker *w, int layer, float *x, float *branch);

// ---- observe.c, attention.c

// Copies a stage (n, width) to its observer, if it has one, to the columns from `first` on, with zeros after them. All
// members call it. Ends at a barrier if there is one.
void observe_columns(const struct worker *w, int stage, int layer, const float *numbers, int n, int width, int first);
void observe(const struct worker *w, int stage, int layer, const float *numbers, int n, int width);
void observe_cache(const struct worker *w, int layer);
void observe_scores(const struct worker *w, int layer);
// Returns the observer's buffer for a stage, from this chunk's first row on, or NULL.
float *observer_of(const struct eval *e, int stage, int layer);
#endif
