// SPDX-License-Identifier: MIT
// model.h - a checked model: the file's structures and a view of every tensor. Immutable once it has sessions; borrows
// the file's memory.
#ifndef LLAMAC_MODEL_H
#define LLAMAC_MODEL_H
#include "format.h"

// What an adapter adds to a matrix (llamac_model_adapt); f32 in strips.
struct lora {
    int rank;
    const uint8_t *a, *b;       // (rank, columns), of an embedding (columns, rank); (rows, rank)
    struct lora *next;          // of the model's, in no order
};

// A weight matrix in strips (dtype.h). Absent optional matrices have data NULL.
struct matrix {
    const uint8_t *data;        // (ceil(rows / 16)) strips
    int dtype, rows, columns;
    size_t strip_bytes;
    const struct lora *lora;    // or NULL
    const float *scales;        // (rows) or NULL: what the rows of its products are multiplied by (llamac_model_adapt)
};

// The feed-forward network of a layer, or one expert, which has no biases.
struct expert {
    // (ffn_dim, dim), (ffn_dim, dim), (dim, ffn_dim); gate only if gated
    struct matrix gate, up, down;
    const float *gate_bias, *up_bias, *down_bias;
};

struct layer {
    const float *attn_norm, *attn_norm_bias;                   // (dim)
    struct matrix attn_q, attn_k, attn_v, attn_out;            // (heads * head_dim, dim), ..., (dim, heads * head_dim)
    const float *attn_q_bias, *attn_k_bias, *attn_v_bias, *attn_out_bias;
    const float *attn_q_norm, *attn_k_norm;                    // (head_dim), or (heads * head_dim)
    const float *attn_post_norm, *attn_post_norm_bias;         // (dim)
    const float *ffn_norm, *ffn_norm_bias;                     // (dim)
    struct expert ffn;                                         // all NULL where there are experts
    const float *ffn_post_norm, *ffn_post_norm_bias;           // (dim)
    struct matrix ffn_router;                                  // (n_experts, dim)
    struct expert *experts;                                    // (n_experts)
    const struct layer_record *record;
};

struct rope_table { const float *inv_freq, *inv_freq_long; };  // (rope_dim / 2)

struct llamac_model {
    struct flat_file file;
    const struct config *config;
    struct matrix token_embedding, position_embedding;         // (vocab_size, dim), (context, dim)
    struct rope_table rope[FORMAT_MAX_ROPE];
    struct layer *layers;                                      // (n_layers)
    struct expert *experts;                                    // of all layers, or NULL
    const float *output_norm, *output_norm_bias;               // (dim)
    struct matrix output;                                      // (vocab_size, dim): the embedding itself when tied
    const float *output_bias;                                  // (vocab_size)
    unsigned dtypes;                                           // of the matrices, as bits
    int max_ffn_dim, max_expert_dim;                           // of layers without, and with experts
    size_t max_hidden;                                         // hidden numbers of one row, of all its experts together
    int max_experts, max_experts_used;                         // 0: there are none
    struct lora *loras;                                        // all adapters' parts
    int max_rank;                                              // of them, 0: there are none
    int has_post_norms;                                          // whether branches are normed before they are added
};
#endif
