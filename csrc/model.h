// SPDX-License-Identifier: MIT
// model.h - a validated model: the file's structures and a view of every tensor. Immutable once it has sessions.
// Borrows the file's memory.
#ifndef LLAMAC_MODEL_H
#define LLAMAC_MODEL_H
#include "format.h"
#include "kv_pages.h"

// The low-rank adapter of a matrix (rows, columns), as llamac_model_adapt describes it: f32 in strips.
struct lora {
    int rank;
    const uint8_t *a;           // (rank, columns); of an embedding (columns, rank)
    const uint8_t *b;           // (rows, rank)
    struct lora *next;          // in the model's list, which has no order
};

// A weight matrix in strips (dtype.h). `data` is NULL if the model does not have the matrix.
struct matrix {
    const uint8_t *data;        // ceil(rows / 16) strips
    int dtype, rows, columns;
    size_t strip_bytes;
    const struct lora *lora;    // or NULL
    const float *scales;        // (rows), the outputs' factors (llamac_model_adapt); or NULL
    int rounds_inputs;          // inputs are rounded before they are packed (round_row)
};

// A feed-forward network: of a dense layer, or of one expert. `gate` exists only if gated.
struct ffn_weights {
    struct matrix gate, up;     // (ffn_dim, dim)
    struct matrix down;         // (dim, ffn_dim)
    const float *gate_bias, *up_bias, *down_bias;
    const float *alpha_p, *alpha_n;   // (1), before the softplus; only with xIELU
};

// Vectors that the model does not have are NULL.
struct layer {
    const float *attn_norm, *attn_norm_bias;                  // (dim)
    struct matrix attn_q;                                     // (n_heads * head_dim, dim); latent: (query_width, dim),
                                                              // or (query_width, q_lora_rank)
    struct matrix attn_k, attn_v;                             // (n_kv_heads * head_dim, dim)
    // The output matrix of the layer's mixer: attention, delta net or short convolution. Layers with both attention and
    // Mamba 2 need a second one, state_out.
    struct matrix attn_out;                                   // (dim, n_heads * head_dim), (dim, mix_width), or
                                                              // (dim, recurrent_width)
    const float *attn_q_bias, *attn_k_bias, *attn_v_bias, *attn_out_bias;
    const float *attn_q_norm, *attn_k_norm;                   // (head_dim), or (heads * head_dim)
    const float *attn_post_norm, *attn_post_norm_bias;        // (dim)
    const float *ffn_norm, *ffn_norm_bias;                    // (dim)
    struct ffn_weights ffn;                                   // the dense network or the shared expert; empty in a
                                                              // layer with experts but no shared one
    const float *ffn_post_norm, *ffn_post_norm_bias;          // (dim)
    const float *attn_sub_norm, *ffn_sub_norm;                // (n_heads * head_dim), (ffn_dim): of the inputs of
                                                              // attn_out and ffn.down
    struct matrix ffn_router;                                 // (n_experts, dim)
    const float *ffn_router_bias;                             // (n_experts)
    const float *ffn_router_choice_bias;                      // (n_experts)
    struct matrix shared_gate;                                // (1, dim)
    struct ffn_weights *experts;                              // (n_experts)
    struct matrix experts_in, experts_out;                    // (expert_dim, dim), (dim, expert_dim): around experts
    const float *experts_in_bias, *experts_out_bias;          // (expert_dim), (dim)
    const float *expert_factors;                              // (n_experts)
    const float *ffn_router_norm, *experts_norm;              // (dim): before the router and the experts
    const float *experts_post_norm, *shared_ffn_post_norm;    // (dim): after the experts and the shared expert
    const float *attn_sinks;                                  // (n_heads)
    struct matrix attn_gate;                                  // (n_heads * head_dim, or n_heads; dim)
    const float *attn_gate_bias;
    // Of recurrent layers:     Gated DeltaNet            Mamba 2
    //     state_qkv            q, k, v                   x, B, C
    //     state_z              the gate of the output    the gate of the output
    //     state_beta           beta                      none
    //     state_a              a, from which the decay   dt, from which the step and the decay
    //     state_out            none: attn_out            the output matrix
    //     state_dt_bias        is added to a             is added to dt
    //     state_decay          the rate of the decay     the rate of the decay
    //     state_skip           none                      the factor of x in the output
    struct matrix state_qkv;                                  // (2 key_heads * key_dim + heads * value_dim, dim)
    struct matrix state_z;                                    // (heads * value_dim, dim)
    struct matrix state_beta, state_a;                        // (heads, dim)
    struct matrix state_out;                                  // (dim, heads * value_dim)
    const float *state_qkv_bias, *state_z_bias, *state_a_bias, *state_out_bias;
    const float *state_decay, *state_dt_bias;                 // (heads)
    const float *state_skip;                                  // (heads)
    const float *state_norm;                                  // (value_dim); Mamba 2: (heads * value_dim)
    struct matrix conv_in;                                    // (3 dim, dim), of a short convolution
    const float *conv_in_bias;
    const float *conv_taps, *conv_bias;                       // (conv_width, conv_channels): the oldest tap first;
                                                              // (conv_channels)
    struct matrix attn_q_a;                                   // (q_lora_rank, dim)
    struct matrix attn_kv_a;                                  // (head_dim, dim): rotated part of the key, latent
    struct matrix attn_k_b;                                   // (n_heads * kv_lora_rank, qk_nope_head_dim)
    struct matrix attn_v_b;                                   // (n_heads * v_head_dim, kv_lora_rank)
    const float *attn_q_a_bias, *attn_kv_a_bias;
    const float *attn_q_a_norm, *attn_kv_a_norm;              // (q_lora_rank), (kv_lora_rank)
    struct matrix layer_embedding_gate;                       // (layer_embedding_dim, dim)
    struct matrix layer_embedding_out;                        // (dim, layer_embedding_dim)
    const float *layer_embedding_post_norm;                   // (dim)
    struct heads heads;                                       // the shape of attention in this layer
    const struct layer_record *record;
    int kv_source;                                            // the layer whose keys and values it reads: this layer,
                                                              // or an earlier one; -1: it has no attention, or reads
                                                              // those of a session's trunk
};

// Whether the norms of a placement replace the residual stream: both norms, or the one before attention.
static inline int norms_stream(uint32_t placement) {
    return placement == PLACEMENT_NORMED || placement == PLACEMENT_NORMED_ATTN;
}

struct rope_table { const float *inv_freq, *inv_freq_long; };   // (rope_dim / 2)
struct pooled_layer { struct matrix matrix; const float *bias, *norm; };

// Around the MTP layer, which predicts the token after the next one: its input is `in` times the normed embedding of
// the next token and the normed hidden state, and its output is normed before the model's output matrix.
struct mtp_weights {
    const float *embedding_norm, *hidden_norm, *output_norm;   // (dim)
    struct matrix in;                                          // (dim, 2 dim)
};

// What surrounds the layers of a drafter. In an assistant, their input is `in` times the trunk's embedding of the token
// and a hidden state; `out` times their normed output is the next hidden state. In an EAGLE-3 head, the residual stream
// begins as `in` times three hidden states, possibly normed, and the first layer's attention reads the normed embedding
// and the normed stream. Row r of the output matrix belongs to token output_ids[r].
struct drafter_weights {
    struct matrix in;                                          // (dim, 2 trunk_dim); of a head (dim, 3 trunk_dim)
    struct matrix out;                                         // (trunk_dim, dim)
    struct matrix clusters;                                    // (n_clusters, dim)
    const float *embedding_norm;                               // (dim), of a head
    const float *in_norm;                                      // (3 trunk_dim), or NULL: of a head
    const float *output_ids;                                   // (vocab_size), or (eagle_vocab_size); any numbers, if
                                                               // the file is damaged
};

struct llamac_model {
    struct flat_file file;
    const struct config *config;
    struct matrix token_embedding;                            // (vocab_size, dim)
    struct matrix position_embedding;                         // (context, dim)
    struct matrix type_embedding;                             // (n_types, dim)
    const float *distance_bias;                               // (n_heads, 2 bias_distance + 1): added to the scores
    const float *embedding_norm, *embedding_norm_bias;        // (dim), or NULL: of the sum of the embeddings
    struct matrix layer_embedding;                            // (vocab_size, n_layers * layer_embedding_dim)
    struct matrix layer_embedding_in;                         // (n_layers * layer_embedding_dim, dim)
    const float *layer_embedding_norm;                        // (layer_embedding_dim)
    int layer_embedding_dim;                                  // of every layer; 0: no layer embeddings
    struct rope_table rope[FORMAT_MAX_ROPE];
    struct layer *layers;                                     // (n_layers + mtp_layers)
    struct mtp_weights mtp;
    struct drafter_weights drafter;
    int is_mtp;                                               // 1: this is the mtp_model of another model
    // The MTP layer as a model of one layer, whose inputs are tokens and hidden states. It borrows all weights, and has
    // pools of pages of its own, without a budget. NULL: there is no such layer.
    struct llamac_model *mtp_model;
    struct ffn_weights *experts;                              // of all layers, or NULL
    const float *output_norm, *output_norm_bias;              // (dim)
    struct matrix output;                                     // (vocab_size, dim); if tied, a view of the embedding; of
                                                              // an EAGLE-3 head (eagle_vocab_size, dim)
    const float *output_bias;                                 // (vocab_size), or of a head (eagle_vocab_size)
    struct pooled_layer pooled[FORMAT_MAX_POOLED];            // (n_pooled): computed outside of the graph
    unsigned dtypes;                                          // of the matrices: bit 1 << dtype
    int max_ffn_dim, max_expert_dim;                          // widest dense network or shared expert; widest expert
    size_t max_hidden;                                        // largest hidden size of a row, summed over its experts
    int max_experts, max_experts_used;                        // 0: no experts
    struct lora *loras;                                       // all adapters
    int max_rank;                                             // of the adapters; 0: none
    size_t max_channels, max_recurrent_width, max_state_z, max_state_heads;   // of the recurrent layers; 0: none
    size_t max_q_rank, max_latent_heads;                      // of latent attention: widest latent of q; widest row of
                                                              // all heads of q or v
    int max_head_inputs;                                      // widest input of a head's own product
    int has_output_gates;                                     // whether any layer has attn_gate
    int has_expert_norms;                                     // whether any layer has experts_norm
    int has_post_norms;                                       // whether any layer norms branches before adding them
    int has_normed_stream;                                    // whether any layer norms the residual stream itself
    int has_parallel_layer;                                   // whether any layer computes both branches in parallel
    int has_sub_norms;                                        // whether any layer has attn_sub_norm and ffn_sub_norm
    struct kv_pool *kv;                                       // pages of sessions: not immutable, but thread-safe
    struct kv_pool *device_kv;                                // pages of sessions on a device; NULL: there is none
    struct kv_pool *head_kv;                                  // the same, of EAGLE-3 heads that draft for this model
};

// The window in an assistant's plan (llamac_attend_step). A row sees the position before its own and, before that one,
// as many positions as its layer's window has. The plan's window also counts the row's own position.
static inline int assistant_window(int window) { return window ? window + 2 : 0; }

static inline int is_eagle(const struct llamac_model *m) { return m->config->drafter == DRAFTER_EAGLE3; }
// The width of the hidden states that a model's rows have besides their tokens; 0: they have none.
static inline int states_dim(const struct llamac_model *m) {
    return (int)(m->is_mtp ? m->config->dim : m->config->trunk_dim);
}
#endif
