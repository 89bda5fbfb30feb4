// SPDX-License-Identifier: MIT
// format.h - the records of the flat file, version 1, as C structures, and the view of a checked file. docs/format.md
// is the specification.
//
// Records are little-endian and naturally aligned, without implicit padding. The table of fields in format_fields.c
// gives each member's name, type and range again. The checks here and the Python reader and writer use that table.
#ifndef LLAMAC_FORMAT_H
#define LLAMAC_FORMAT_H
#include <stddef.h>
#include <stdint.h>
#include "format_enums.h"
#include "llamac.h"

enum {
    FORMAT_VERSION = 1,
    FORMAT_NUMERICS = LLAMAC_NUMERICS,
    FORMAT_ALIGNMENT = 64,          // of sections and tensors: a cache line, and a line of a strip
    FORMAT_MAX_ROPE = 4,
    FORMAT_MAX_EXPERTS = 4096,
    FORMAT_MAX_CONV_WIDTH = 16,
    FORMAT_MAX_TYPES = 256,
    FORMAT_MAX_POOLED = 4,
    FORMAT_MAX_BIAS_DISTANCE = 1 << 17,
    FORMAT_MAX_BIASES = 1 << 28,
    FORMAT_MAX_CLUSTERS = 1 << 16,
    FORMAT_EAGLE_STATES = 3,
    STATE_DIM_MULTIPLE = 16,        // of a recurrent layer's head widths: the lanes of the kernels
    LATENT_DIM_MULTIPLE = 16,       // of kv_lora_rank and v_head_dim: each head has whole strips of its matrices
    CLUSTER_MULTIPLE = 16,          // cluster sizes are multiples of this: whole strips of the output matrix
    FORMAT_MAX_DIM = 1 << 20,
    FORMAT_MAX_CONTEXT = 1 << 24,   // f32 represents positions exactly
    FORMAT_MAX_TENSORS = 1 << 20,   // limits the copy of the tensor table to 160 MiB
    FORMAT_MAX_STOP_IDS = LLAMAC_MAX_STOP_IDS,
    FORMAT_MAX_DIMS = 4,
    FORMAT_NAME_BYTES = 64,
    HASH_BYTES = 32,                // SHA-256
};

// The sections in their order. Each starts at the next multiple of FORMAT_ALIGNMENT after the one before it. Padding is
// zero. Empty sections have 0 bytes.
enum section {
    SECTION_CONFIG,      // struct config
    SECTION_LAYERS,      // struct layer_record[n_layers + mtp_layers]
    SECTION_TENSORS,     // struct tensor_record[]
    SECTION_METADATA,    // JSON: name, provenance
    SECTION_TOKENIZER,   // canonical tokenizer.json
    SECTION_SPM,         // the original SentencePiece model, or empty
    SECTION_TEMPLATE,    // chat template (Jinja), or empty
    SECTION_PROBES,      // safetensors: token ids of prompts, reference logits, hashes; or empty
    SECTION_DATA,        // the tensors
    N_SECTIONS
};

struct section_record {
    char name[16];                 // zero padded
    uint64_t offset, bytes;        // from the start of the file
    uint8_t sha256[HASH_BYTES];    // of the section's bytes; for the data section, of its tensors' hashes in order
};

struct header {
    char magic[8];                 // FORMAT_MAGIC
    uint32_t version;              // FORMAT_VERSION
    uint32_t numerics;             // FORMAT_NUMERICS
    uint64_t compatible;           // feature bits that a reader may ignore
    uint64_t incompatible;         // feature bits that a reader must know
    uint64_t file_bytes;           // size of the whole file
    uint32_t alignment;            // FORMAT_ALIGNMENT
    uint32_t n_sections;           // N_SECTIONS
    uint8_t id[HASH_BYTES];        // the model's id: SHA-256 of the sections' hashes in order
    uint8_t sha256[HASH_BYTES];    // of header and section table, computed with this field zero
    uint8_t reserved[16];          // zero
    struct section_record sections[N_SECTIONS];
};

struct config {
    uint32_t dim, n_layers;
    uint32_t n_heads, n_kv_heads, head_dim;        // the largest of all layers
    uint32_t vocab_size;                           // rows of the embedding and of the logits, with the padding
    uint32_t n_token_ids;                          // ids that the sampler draws from, <= vocab_size
    uint32_t context;                              // positions that the model was trained for
    uint32_t norm, position, activation;           // format_enums.h
    uint32_t tied_output;                          // 1: the embedding is also the output matrix
    float norm_eps, attention_scale, embedding_scale, residual_scale, logit_scale;
    float attention_soft_cap, logit_soft_cap;      // 0: none
    uint32_t n_rope;                               // RoPE tables in use
    uint32_t rope_dim[FORMAT_MAX_ROPE];            // dimensions of a head that are rotated
    uint32_t rope_original_context[FORMAT_MAX_ROPE];   // > 0: longer contexts use inv_freq_long
    float rope_attention_factor[FORMAT_MAX_ROPE];  // multiplies cos and sin
    int32_t bos_id, eos_id;                        // -1: none
    uint32_t add_bos, add_eos;                     // 1: encoding adds them
    uint32_t n_stop_ids;
    int32_t stop_ids[FORMAT_MAX_STOP_IDS];         // generation ends at any of these
    uint32_t qk_norm;                              // enum qk_norm
    uint32_t qk_norm_after_rope;                   // 1: q and k are normed after RoPE
    uint32_t two_sided;                            // 1: an encoder, whose rows also see later positions
    uint32_t n_types;                              // rows of the type embedding; 0: there is none
    uint32_t scores_pairs;                         // 1: the pooled layers give scores of pairs of texts
    uint32_t n_pooled;                             // dense layers that the pooled outputs go through
    uint32_t pooled_dim[FORMAT_MAX_POOLED];        // their widths
    uint32_t pooled_activation[FORMAT_MAX_POOLED]; // enum pooled_activation
    uint32_t state_norm;                           // enum state_norm, of layers with Mamba 2
    float state_step_min, state_step_max;          // limits of their steps; 0: no upper limit
    uint32_t mtp_layers;                           // 1: an MTP layer follows the others; 0: none
    uint32_t rounds_inputs;                        // 1: inputs of the layers' matrices have 8 bits, one scale per row
    uint32_t bias_distance;                        // scores have a bias for each distance up to this; 0: none
    uint32_t pooled_norm[FORMAT_MAX_POOLED];       // 1: a norm follows the activation of the dense layer
    uint32_t drafter;                              // enum drafter: the file only drafts, beside the model (its trunk)
                                                   // whose hidden states it reads
    uint32_t trunk_dim;                            // width of these states; 0 in other files
    uint32_t n_clusters, clusters_used;            // the logits of a row are those of the tokens in its best clusters;
                                                   // 0: of all tokens
    uint32_t eagle_layers[FORMAT_EAGLE_STATES];    // numbers of layers after which an EAGLE-3 head reads the trunk's
                                                   // residual stream; all 0: 2, half of them, and all but 3
    uint32_t eagle_vocab_size;                     // tokens that it drafts: the rows of its output matrix
    uint32_t eagle_normed;                         // 1: its residual stream begins with the normed states
    uint32_t eagle_in_norm;                        // enum eagle_in_norm
    uint32_t eagle_out_normed;                     // 1: its next draft reads its normed output; 0: its residual stream
    float state_norm_eps;                          // of the norms of delta nets; 0: norm_eps
    uint32_t state_beta_doubled;                   // 1: beta of delta nets is twice a sigmoid
    uint32_t expert_dim;                           // width of what experts read and return, which two matrices of the
                                                   // layer map; 0: dim
    uint32_t embedding_norm;                       // 1: the embedding of a row is normed
    uint8_t reserved[144];                         // zero
};

struct layer_record {
    uint32_t mixer;                // enum mixer: what mixes positions
    uint32_t placement;            // enum placement: where the norms are
    float layer_scale;             // multiplies the layer's output; normally 1

    uint32_t window;               // positions a row attends to, itself included; 0: all
    int32_t rope;                  // index of the RoPE table, -1: none
    uint32_t n_heads, n_kv_heads, head_dim;   // 0: the config's
    int32_t kv_source;             // an earlier layer whose keys and values this one reads; -1: its own
    uint32_t v_is_k;               // 1: the values are the product of attn_k, before norm and RoPE
    uint32_t v_norm;               // enum v_norm, without weight
    uint32_t output_gate;          // enum output_gate
    uint32_t sinks;                // 1: each head's softmax has one more logit, without a value
    float query_beta;              // > 0: q is multiplied by 1 + query_beta log(1 + floor(p / query_context)), p being
                                   // the position plus query_offset
    uint32_t query_context;        // 0 without query_beta

    uint32_t ffn;                  // enum ffn
    uint32_t ffn_dim;              // width of the FFN, or of one expert
    float activation_limit;        // > 0: the gate is at most this, the up branch between plus and minus this
    float up_offset;               // added to the up branch of gated networks
    uint32_t n_experts, n_experts_used;
    uint32_t router;               // enum router: the experts' scores
    uint32_t router_choice_bias;   // 1: a bias is added to the scores for the choice, not for the weights
    uint32_t n_expert_groups, n_expert_groups_used;   // 0: no groups
    uint32_t expert_weights;       // 1: the weights of the experts in use are divided by their sum
    float expert_scale;            // multiplies the weights; 1 without experts
    uint32_t shared_ffn_dim;       // width of an expert that all rows use; 0: none
    uint32_t shared_gate;          // 1: the shared expert's output is multiplied by a sigmoid
    uint32_t layer_embedding_dim;  // width of the layer's own token embedding; 0: none
    uint32_t state_key_heads;      // of a recurrent layer: heads of q and k (Mamba 2: C and B); 0: none
    uint32_t state_heads;          // heads of v (Mamba 2: x) and of the state
    uint32_t state_key_dim;        // width of a head of q and k
    uint32_t state_value_dim;      // width of a head of v
    uint32_t conv_width;           // taps of the convolution over positions
    uint32_t q_lora_rank;          // of latent attention: width of the latent of q; 0: none, q is a product of h
    uint32_t kv_lora_rank;         // width of the latent of k and v; 0: no latent attention
    uint32_t qk_nope_head_dim;     // width of the part of a head of q and k that RoPE leaves alone
    uint32_t v_head_dim;           // width of a head of v
    float latent_norm_eps;         // of the norms of the latents
    float expert_weights_eps;      // added to the sum that divides the weights of the experts in use
    uint32_t expert_norms;         // 1: the shared expert, the other experts and the router have norms of their own
    uint32_t expert_factors;       // 1: the weight of each expert is multiplied by a number of its own
    uint32_t plain_experts;        // 1: the experts, also the shared one, have no gate
    uint32_t sub_norms;            // 1: the inputs of the output projection and of the down projection are normed
    uint32_t window_chunks;        // 1: a row attends to its own chunk of `window` positions, up to its own position
    uint32_t query_offset;         // added to the position that query_context divides
    uint32_t expert_weights_first; // 1: the experts' weights multiply their gate and up branches, not their results
};

// The shape of a layer's attention: its own where it states one, otherwise the config's. Keys have `dim` numbers, and
// so do values, except in latent attention.
struct heads { int n, n_kv, dim, value_dim; };
static inline struct heads layer_heads(const struct config *c, const struct layer_record *layer) {
    const int dim = (int)(layer->head_dim ? layer->head_dim : c->head_dim);
    return (struct heads){ .n = (int)(layer->n_heads ? layer->n_heads : c->n_heads),
                           .n_kv = (int)(layer->n_kv_heads ? layer->n_kv_heads : c->n_kv_heads),
                           .dim = dim, .value_dim = layer->kv_lora_rank ? (int)layer->kv_lora_rank : dim };
}

// The rows of attn_q, and the columns of attn_out. In latent attention, a head of q has a rotated part, as wide as that
// of the cached key, and the other part, which attn_k_b maps to the width of the latent.
static inline uint64_t query_width(const struct config *c, const struct layer_record *layer) {
    const struct heads heads = layer_heads(c, layer);
    const uint32_t rank = layer->kv_lora_rank, dim = (uint32_t)heads.dim;
    return (uint64_t)heads.n * (rank ? dim - rank + layer->qk_nope_head_dim : dim);
}
static inline uint64_t mix_width(const struct config *c, const struct layer_record *layer) {
    const struct heads heads = layer_heads(c, layer);
    return (uint64_t)heads.n * (layer->kv_lora_rank ? layer->v_head_dim : (uint32_t)heads.dim);
}

// The widths of a recurrent layer: of q, or of k; of v, 0 of a short convolution; of what its convolution reads; and of
// its result. Mamba 2 calls them C, B and x.
static inline uint64_t state_keys(const struct layer_record *layer) {
    return (uint64_t)layer->state_key_heads * layer->state_key_dim;
}
static inline uint64_t state_values(const struct layer_record *layer) {
    return (uint64_t)layer->state_heads * layer->state_value_dim;
}
static inline uint64_t conv_channels(const struct config *c, const struct layer_record *layer) {
    return layer->mixer == MIXER_SHORT_CONV ? c->dim : 2 * state_keys(layer) + state_values(layer);
}
static inline uint64_t recurrent_width(const struct config *c, const struct layer_record *layer) {
    return layer->mixer == MIXER_SHORT_CONV ? c->dim : state_values(layer);
}
static inline int has_attention(const struct layer_record *layer) {
    return layer->mixer == MIXER_ATTENTION || layer->mixer == MIXER_ATTENTION_MAMBA2;
}
// How delta nets norm q and k (as the reference implementation), use their beta and norm their results.
#define DELTA_UNIT_EPS 1e-6f
static inline float delta_beta_factor(const struct config *c) { return c->state_beta_doubled ? 2.0f : 1.0f; }
static inline float delta_norm_eps(const struct config *c) {
    return c->state_norm_eps > 0 ? c->state_norm_eps : c->norm_eps;
}
// Whether the layers have no keys and values, but read those of another model.
static inline int reads_trunk_keys(const struct config *c) { return c->drafter == DRAFTER_ASSISTANT; }
static inline int has_mamba2(const struct layer_record *layer) {
    return layer->mixer == MIXER_MAMBA2 || layer->mixer == MIXER_ATTENTION_MAMBA2;
}
static inline int is_recurrent_layer(const struct layer_record *layer) {
    return layer->mixer == MIXER_DELTA_NET || has_mamba2(layer) || layer->mixer == MIXER_SHORT_CONV;
}

struct tensor_record {
    char name[FORMAT_NAME_BYTES];  // zero padded
    uint32_t dtype;                // enum llamac_dtype
    uint32_t n_dims;
    uint64_t shape[FORMAT_MAX_DIMS];   // (n) or (rows, columns); unused dimensions are 0
    uint64_t offset, bytes;        // from the start of the file
    uint8_t sha256[HASH_BYTES];
    uint8_t reserved[8];           // zero
};

_Static_assert(sizeof(struct section_record) == 64, "section record");
_Static_assert(sizeof(struct header) == 128 + 64 * N_SECTIONS, "header");
_Static_assert(sizeof(struct config) == 512, "config");
_Static_assert(sizeof(struct layer_record) == 192, "layer record");
_Static_assert(sizeof(struct tensor_record) == 160, "tensor record");

#define FORMAT_MAGIC "\211llamac\n"

// A checked file. A mapped file can change at any time, so format_open copies the file's first bytes, header to tensor
// table, checks the copy, and uses only the copy. Later reads of the file itself get tensor data. binding.c checks
// the shapes of tensors.
struct flat_file {
    const uint8_t *data;                   // borrowed
    size_t bytes;
    uint8_t *tables;                       // owned: the copy, at the file's offsets
    size_t table_bytes;
    const struct header *header;           // this and the following point into the copy
    const struct config *config;
    const struct layer_record *layers;     // (n_layers + mtp_layers)
    const struct tensor_record *tensors;   // (n_tensors)
    size_t n_tensors;
};

// Writes the name of an enumeration's value, from the table of fields; "" if the value has no name.
enum { FORMAT_VALUE_BYTES = 24 };
void format_value_name(const char *record, const char *member, uint32_t value, char name[FORMAT_VALUE_BYTES]);
// Checks all fields of a record against the table. `where` names the record in messages.
int format_check_record(const char *record, const char *where, const uint8_t *data, llamac_error *err);
int format_all_zero(const uint8_t *p, size_t bytes);
// Check the config record, and the fields of an EAGLE-3 head against its layers.
int format_check_config(const struct config *c, llamac_error *err);
// What a model without a next token is, for messages: "an encoder" or "a reranker"; NULL: a language model.
const char *format_kind_without_logits(const struct config *c);
static inline int has_logits(const struct config *c) { return !format_kind_without_logits(c); }
int format_check_eagle(const struct config *c, const struct layer_record *layers, llamac_error *err);

// Copies and checks header, section table, config, layers and tensor table of a file in memory, aligned to 64 bytes.
int format_open(struct flat_file *file, const void *data, size_t bytes, llamac_error *err);
void format_close(struct flat_file *file);
#endif
