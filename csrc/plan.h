// SPDX-License-Identifier: MIT
// plan.h - the graph as a list of steps, so that a device can compute what forward.c computes without its own
// description of each model family.
//
// Steps run one after another on the rows of a chunk. They read and write buffers. The comment on each step names the
// kernels (kernels.h) that define its order of operations; an executor that keeps this order produces the same bits as
// forward.c. It may fuse steps. Errors and threads: as in llamac.h.
#ifndef LLAMAC_PLAN_H
#define LLAMAC_PLAN_H
#include "llamac.h"

// Buffers of floats. In parentheses: the shape of one row. Rows are contiguous: the width of a layer's q is its own
// n_heads * head_dim, even if other layers have more.
enum llamac_buffer {
    LLAMAC_BUFFER_NONE,

    // one row per row of the chunk
    LLAMAC_BUFFER_X,             // (dim): the residual stream
    LLAMAC_BUFFER_BRANCH,        // (dim): a branch that a later step adds to x
    LLAMAC_BUFFER_NORMED,        // (dim): the normed residual stream
    LLAMAC_BUFFER_Q,             // (n_heads, head_dim)
    LLAMAC_BUFFER_K,             // (n_kv_heads, head_dim)
    LLAMAC_BUFFER_V,             // (n_kv_heads, value_dim)
    LLAMAC_BUFFER_ATTN_GATE,     // (n_heads, head_dim): the gate of the result of attention, before the sigmoid
    LLAMAC_BUFFER_Q_LATENT,      // (q_lora_rank): the latent from which q is computed
    LLAMAC_BUFFER_LATENT_HEADS,  // (n_heads, any): q before attn_k_b; after attention, attn_v_b times mix
    LLAMAC_BUFFER_MIX,           // (n_heads, value_dim): the result of attention, or of what takes its place; before
                                 // latent attention, attn_k_b times q
    LLAMAC_BUFFER_CONV_IN,       // (channels): the inputs of a convolution; of a short one (3, channels): b, c and x
    LLAMAC_BUFFER_CONV_OUT,      // (2 key_heads, key_dim) and (heads, value_dim): q, k and v of a delta net; of Mamba 2
                                 // (heads, value_dim) and (2 key_heads, key_dim): x, B and C
    LLAMAC_BUFFER_STATE_Z,       // (heads, value_dim): the gate of its result
    LLAMAC_BUFFER_STATE_BETA,    // (heads): how much a position changes a head's state; of Mamba 2 its step
    LLAMAC_BUFFER_STATE_DECAY,   // (heads): how much of a head's state remains
    LLAMAC_BUFFER_GATE,          // (ffn_dim or shared_ffn_dim): of the dense network or the shared expert
    LLAMAC_BUFFER_UP,            // the same; the activation overwrites it
    LLAMAC_BUFFER_LAYER_INPUTS,  // (n_layers, layer_embedding_dim): what each layer reads of the token's embeddings
    LLAMAC_BUFFER_SHARED_OUT,    // (dim): the output of a shared expert that has a norm of its own
    LLAMAC_BUFFER_ROUTER,        // (n_experts): the router's logits
    LLAMAC_BUFFER_SHARED_GATE,   // (1): the gate of the shared expert, before the sigmoid
    LLAMAC_BUFFER_EXPERT_ROWS,   // (expert_dim): what experts read, if it is not the rows themselves
    LLAMAC_BUFFER_EXPERT_SUMS,   // (expert_dim): the sums of a row's experts then
    LLAMAC_BUFFER_PROJECTED,     // (rank): a x of an adapter
    LLAMAC_BUFFER_STATES,        // the inputs of a chunk, which are there before the first step: of an MTP layer (dim),
                                 // of an assistant (trunk_dim), of a head (3 trunk_dim) or after a draft (dim)
    LLAMAC_BUFFER_STATE_INPUTS,  // (2 dim or 2 trunk_dim): the embedding, then the hidden state; of an MTP layer
                                 // normed. Of a head, the inputs of its first layer

    // one row per (row, expert) pair, sorted by expert, then by row
    LLAMAC_BUFFER_EXPERT_GATE,   // (ffn_dim)
    LLAMAC_BUFFER_EXPERT_UP,     // (ffn_dim); the activation overwrites it
    LLAMAC_BUFFER_EXPERT_OUT,    // (dim or expert_dim)
    LLAMAC_BUFFER_EXPERT_PROJECTED,   // (rank): a x of an adapter
    LLAMAC_BUFFER_EXPERT_ADDED,  // (dim or expert_dim): b (a x) of the adapter of a down matrix; undefined for experts
                                 // without one

    // one row per row whose hidden state is wanted: the last n_hidden rows of the chunk
    LLAMAC_BUFFER_HIDDEN_NORMED, // (dim): of an assistant
    LLAMAC_BUFFER_HIDDEN_PROJECTED,   // (rank): a x of an adapter
    LLAMAC_BUFFER_HIDDEN,        // (dim), of an assistant (trunk_dim), of the trunk of a head (3, dim)

    // one row per row that wants logits, in the order of the rows
    LLAMAC_BUFFER_OUTPUT_NORMED, // (dim)
    LLAMAC_BUFFER_OUTPUT_PROJECTED,   // (rank): a x of the output matrix's adapter
    LLAMAC_BUFFER_CLUSTER_SCORES,     // (n_clusters)
    LLAMAC_BUFFER_IN_CLUSTERS,        // (clusters_used, tokens of a cluster): logits
    LLAMAC_BUFFER_HEAD_LOGITS,        // (eagle_vocab_size): of the tokens that a head drafts
    LLAMAC_BUFFER_LOGITS,        // (vocab_size)
    LLAMAC_N_BUFFERS
};

// Returns "x", "branch", ..., "none" for LLAMAC_BUFFER_NONE, or NULL if `buffer` is not an enum llamac_buffer.
const char *llamac_buffer_name(int buffer);

// Constant data of the model. `data` is NULL if the model does not have this operand.
typedef struct {
    const void *data;
    size_t bytes;
    int64_t offset;        // of the data in the model's file; -1: the data is elsewhere (llamac_model_replace)
} llamac_operand;

// An affine map: y = scales * (W x) + bias. The weights are strips. With rounds_inputs, rows of inputs are rounded like
// round_row before they are packed; inputs of int8 are then packed like pack_rounded.
typedef struct {
    llamac_operand weights, bias;   // bias.data: NULL without a bias
    llamac_operand scales;          // (rows), of an adapter (llamac_model_adapt); data: NULL for 1
    int dtype, rows, columns, rounds_inputs;
    size_t strip_bytes;
} llamac_linear;

// y = rms_norm(x) or layer_norm(x), over the whole row.
typedef struct {
    int is_rms;            // otherwise layer_norm
    float eps;
    llamac_operand weight, bias;
} llamac_norm;

enum llamac_op {
    LLAMAC_OP_ROPE, LLAMAC_OP_EMBED, LLAMAC_OP_NORM, LLAMAC_OP_PRODUCT, LLAMAC_OP_HEADS, LLAMAC_OP_ATTEND,
    LLAMAC_OP_ACTIVATE, LLAMAC_OP_ROUTE, LLAMAC_OP_EXPERT_PRODUCT, LLAMAC_OP_COMBINE, LLAMAC_OP_ADD, LLAMAC_OP_SCALE,
    LLAMAC_OP_GATE, LLAMAC_OP_LAYER_INPUTS, LLAMAC_OP_CONVOLVE, LLAMAC_OP_DELTA_RULE, LLAMAC_OP_SCAN,
    LLAMAC_OP_HEAD_PRODUCT, LLAMAC_OP_COPY, LLAMAC_OP_CLUSTER_LOGITS,
    LLAMAC_OP_SPREAD_LOGITS, LLAMAC_OP_OBSERVE
};

// Computes the angles of a RoPE table for the rows' positions, like rope_angles (rope.h): dim / 2 cosines, then
// dim / 2 sines per row. HEADS steps read them.
typedef struct {
    int table;
    llamac_operand inv_freq, inv_freq_long;   // (dim / 2)
    int original_context;                     // > 0: sessions with a longer context use inv_freq_long
    int dim;
    float factor;
} llamac_rope_step;

// The adapter of an embedding: the product of the matrix `a` with row r of b is added to the gathered row r, like
// lora_gather (lora.h). a.weights.data: NULL without an adapter.
typedef struct { llamac_linear a, b; } llamac_embedding_adapter;

// x = gather(tokens, token) * scale + gather(types, type) + gather(positions, position), added from left to right.
// Operations with a scale of 1 or without a table of types or positions are skipped. Adapters are added to the rows as
// they are gathered.
typedef struct {
    llamac_linear tokens, types, positions;   // without biases and scales
    llamac_embedding_adapter tokens_adapter, types_adapter, positions_adapter;
    float scale;
} llamac_embed_step;

// output = norm(input). For OUTPUT_NORMED, the input is the rows of x that want logits; for HIDDEN, those whose hidden
// state is wanted. A row has `parts` parts of `width` numbers side by side, each of which is normed by itself.
typedef struct {
    int input, output, width;                 // may be the same buffer
    int parts;
    int first, stride;                        // of the input: a row begins at `first`; rows are `stride` apart
    int to_first, to_stride;                  // of the output, likewise
    llamac_norm norm;                         // weights: (parts, width)
} llamac_norm_step;

// y = (the linear's map of x) * scale * w, then output = y, or output += y if `accumulate`. With by_shared_weight, w is
// the row's weight of the shared expert (ROUTE), otherwise 1. Factors of 1 are skipped. Like gemm with row_weights. The
// observed stage is the linear's map, or with accumulate_stage it is added to the stage.
//
// For a matrix with an adapter, two PRODUCT steps follow the products of the same inputs: PROJECTED = a x, then
// output += b PROJECTED, with the factors and the stage of the matrix's own.
typedef struct {
    llamac_linear linear;
    int input, output;
    int accumulate;
    float scale;
    int by_shared_weight;
    int stage;                                // enum llamac_stage; -1: none
    int accumulate_stage;
} llamac_product_step;

// output (heads, rows / heads): for each head, the product of its own rows of the linear and its own inputs. The linear
// has no bias and no scales. Like multiply_heads (latent.c).
typedef struct {
    llamac_linear linear;                     // the rows of one head after the other's, in whole strips
    int heads, input, output;
    int first, stride;                        // of the input: a head's numbers begin at `first`; heads are `stride`
                                              // apart
} llamac_head_product_step;

// Makes the values, normalizes and rotates the heads of q and, if the layer has its own keys, of k, each head
// separately. Then stores k and v in the cache at the rows' positions; a draft's are stored in all of its branches.
// Like rotate_and_store (attention.c).
//
// With v_is_k, v = k before its norm and RoPE. With v_norm, then unit_norm(v, head_dim, v_eps, v_factor).
//
// With latent_stride > 0, q and k are assembled before all that (latent.c): a head of q is the first head_dim -
// value_dim numbers of a head of latent_heads (n_heads, latent_stride), then a head of mix (n_heads, value_dim); the
// last value_dim numbers of k are v.
typedef struct {
    int n_heads, n_kv_heads, head_dim, value_dim;   // value_dim: numbers of a value
    int latent_stride;                        // 0: no latent attention
    int is_source;                            // 1: the layer has its own keys and values; 0: only q
    int norms, norm_is_rms, norm_per_head;    // norms: 0: no norms; norm_per_head: each head has its own weights
    int norm_after_rope;                      // otherwise before
    float eps;
    llamac_operand q_norm, k_norm;            // (head_dim), or with norm_per_head (heads, head_dim)
    int rope, rope_dim;                       // table, or -1; the first rope_dim numbers of a head are rotated
    int v_is_k, v_norm;
    float v_eps, v_factor;
} llamac_heads_step;

// mix = softmax(q K) V with the keys and values of layer kv_source, for each query head; query head h reads KV head h /
// (n_heads / n_kv_heads). A row with the viewpoint p (llamac_chunk_viewpoints) attends to positions max(0, p + 1 -
// window) to p; window 0: 0 to p; window -n: p - p % n to p. With two_sided, it attends to positions up to its end
// (llamac_chunk_ends) instead and, if there is a window, to none after p + window - 1. An encoder's row thus sees later
// positions; an assistant's row, which reads the trunk's keys and values, does not see its own. Before queries are
// packed, they are multiplied by `scale`, and with query_beta by scale * rope_query_scale(position + query_offset,
// query_beta, query_context) with the row's position. Otherwise as in struct attend.
typedef struct {
    int n_heads, n_kv_heads, head_dim, value_dim, kv_source, window, two_sided;
    float scale, query_beta, soft_cap;        // query_beta, soft_cap: 0: off
    int query_context, query_offset;
    llamac_operand sinks;                     // (n_heads)
    llamac_operand biases;                    // (n_heads, 2 bias_distance + 1): of distances from -bias_distance up
    int bias_distance;
} llamac_attend_step;

// output = activation(gate) * up; with gate LLAMAC_BUFFER_NONE output = activation(up). Before that, with by_weight,
// gate and up are multiplied by the pair's weight (ROUTE), and then, if is_clamped: clamp(gate, -inf, limit, 0) and
// clamp(up, -limit, limit, up_offset). xIELU, which has no gate, is the kernel `xielu` with the softplus (gates.h) of
// its learned numbers.
typedef struct {
    int activation;                           // as in the config (docs/format.md)
    llamac_operand alpha_p, alpha_n;          // (1), of xIELU: before the softplus
    int gate, up, output, width;              // output may be up
    int first, stride;                        // of up: a row's numbers begin at `first`; rows are `stride` apart
    int by_weight, is_clamped;
    float limit, up_offset;                   // limit: may be infinite
} llamac_activate_step;

// Selects each row's experts and their weights from the router's logits, like router_select (router.c), which says what
// scores, ranks and groups are. Then multiplies the weights by the experts' factors, if there are any. Sorts the (row,
// expert) pairs by expert, then by row. With has_shared_gate, also computes the weight of the shared expert: the first
// element of softmax(shared_gate, 0).
typedef struct {
    int n_experts, n_used;
    int is_sigmoid;                           // scores are the sigmoids of logits, otherwise their softmax
    int n_groups, n_groups_used;              // 0: no groups
    int normalized;                           // the weights of the experts in use are divided by their sum + eps
    float eps, scale;
    llamac_operand choice_bias, factors;      // (n_experts)
    int has_shared_gate;
} llamac_route_step;

// For each pair whose expert has a linear: output = the linear's map of x, or output += it if `accumulate`. The input
// buffer has one row per row of the chunk or one per pair. Experts may differ in dtype, but not in shape. The adapters
// of a matrix have two steps like this for each rank that occurs, with linears of the experts whose adapter has it.
typedef struct {
    const llamac_linear *linears;             // (n_experts); weights.data: NULL without one
    int n_experts;
    int input, output;
    int accumulate;
} llamac_expert_product_step;

// output = 0, unless `accumulate`. Then, for the experts of a row in ascending order: output += expert_out * weight;
// the weight is 1 without by_weight. With is_adapted, output += expert_added * weight follows for each expert whose
// EXPERT_ADDED a step of the layer writes. Each product is rounded before it is added.
typedef struct { int output, n_used, width, accumulate, by_weight, is_adapted; } llamac_combine_step;

// to += scale * norm(from), or to += scale * from if norm.weight.data is NULL. Each operation is rounded. A scale of 1
// is skipped.
typedef struct {
    int to, from, width;
    float scale;
    llamac_norm norm;
} llamac_add_step;

// Multiplies the buffer by `scale`, then caps it at `cap` unless that is 0, like the kernel `scale`.
typedef struct {
    int buffer, width;
    float scale, cap;
} llamac_scale_step;

// buffer /= 1 + exp(-gate), like the kernel `gate`. `group` neighbors share a gate.
typedef struct { int buffer, gate, width, group; } llamac_gate_step;

// Makes the inputs of all layers, of which layer_inputs (layers, dim) holds a product of x: layer_inputs = scale *
// (norm(input_scale * layer_inputs) + own_scale * gather(table, token)), each layer's part with its own norm. Each
// operation is rounded; an input_scale of 1 is skipped. Like finish_inputs (layer_embedding.c).
typedef struct {
    llamac_linear table;                      // (tokens, layers * dim)
    llamac_embedding_adapter adapter;
    int dim;
    float input_scale, own_scale, scale;
    llamac_norm norm;                         // (dim)
} llamac_layer_inputs_step;

// output = the convolution of a recurrent layer's inputs over positions, like convolve_channels (recurrent.c). It
// continues from the states before the chunk's segments (device.h) and stores the last inputs in the states after them.
// With is_gated, a row of the input is (b, c, x): the convolution's input is b * x, and output = c * its result, like
// short_conv (short_conv.c).
typedef struct {
    int input, output, channels, width, is_gated, is_silu;
    int state_floats;                         // of the layer's part of a state, before the last inputs
    llamac_operand taps, bias;                // (width, channels): the oldest tap first; (channels)
} llamac_convolve_step;

// mix = the gated delta rule of conv_out, like delta_net (delta_net.c) after its convolution: unit_norm of each head of
// q and k with unit_eps, and with the factor q_factor or 1; decays and betas, sigmoids times beta_factor (1 or 2), from
// their products; the delta rule on the states of the chunk's segments, which begin the layer's part of a state; then
// norm * silu(state_z) of each head.
typedef struct {
    int key_heads, heads, key_dim, value_dim;
    float unit_eps, q_factor, beta_factor, norm_eps;
    llamac_operand decay, dt_bias, norm;      // (heads), (heads), (value_dim)
} llamac_delta_rule_step;

// mix = Mamba 2's recurrence of conv_out: ssm_gates (kernels.h), which computes decays and steps from the products in
// state_decay; then ssm_scan on the states of the chunk's segments, which begin the layer's part of a state. Steps are
// at least step_min and at most step_max, unless that is 0.
typedef struct {
    int key_heads, heads, key_dim, value_dim;
    float step_min, step_max;
    llamac_operand decay, dt_bias, skip;      // (heads)
} llamac_scan_step;

// Copies the rows of the input (width) to parts of the output's rows, which are `stride` apart: from the number `first`
// on. For HIDDEN, the rows are those whose hidden state is wanted.
typedef struct { int input, output, width, first, stride; } llamac_copy_step;

// Computes logits for each row that wants them: those of the tokens in its best clusters; all others are equal, and
// less. The best clusters are the n_used whose CLUSTER_SCORES rank first (ranks_before of gates.h; of equals, the first
// ones). OUTPUT_NORMED is multiplied by the linear's rows of these clusters; those of cluster c begin at c * rows /
// n_clusters. The result, IN_CLUSTERS, may be in any order. Like clustered_logits (drafter.c).
typedef struct {
    llamac_linear linear;                     // (rows, dim): without scales; clusters are whole strips
    int n_clusters, n_used, vocab_size;
    llamac_operand ids;                       // (rows) floats: the token of each row; numbers of no token are skipped
} llamac_cluster_logits_step;

// LOGITS = HEAD_LOGITS at the ids that they belong to, and minus infinity at all others. Like eagle_spread (eagle.c).
typedef struct {
    int n, vocab_size;                        // n: numbers of a row of HEAD_LOGITS
    llamac_operand ids;                       // (n) floats, ascending. In a damaged file they are any numbers; logits
                                              // are then undefined
} llamac_spread_logits_step;

// Copies `width` floats of each row of the buffer to the stage's observer, if there is one: to its row from the number
// `first` on, with zeros after them. A later step of the layer may write what follows the numbers of an earlier one.
// With LLAMAC_BUFFER_NONE, CACHE_K and CACHE_V are read back from the cache (load_key, load_value; like observe_cache),
// SCORES are the scores of the layer's ATTEND step (like observe_scores), and other stages are zeros. FFN_HIDDEN of
// LLAMAC_BUFFER_EXPERT_UP has, for each row, `width` floats of each of its experts in ascending order, then
// shared_width floats of LLAMAC_BUFFER_UP.
typedef struct { int stage, buffer, width, shared_width, first; } llamac_observe_step;

typedef struct {
    int op;                // enum llamac_op
    int layer;             // -1: before or after the layers
    union {
        llamac_rope_step rope;
        llamac_embed_step embed;
        llamac_norm_step norm;
        llamac_product_step product;
        llamac_heads_step heads;
        llamac_attend_step attend;
        llamac_activate_step activate;
        llamac_route_step route;
        llamac_expert_product_step expert_product;
        llamac_combine_step combine;
        llamac_add_step add;
        llamac_scale_step scale;
        llamac_gate_step gate;
        llamac_layer_inputs_step layer_inputs;
        llamac_convolve_step convolve;
        llamac_delta_rule_step delta_rule;
        llamac_scan_step scan;
        llamac_head_product_step head_product;
        llamac_copy_step copy;
        llamac_cluster_logits_step cluster_logits;
        llamac_spread_logits_step spread_logits;
        llamac_observe_step observe;
    };
} llamac_step;

typedef struct {
    const llamac_step *steps;
    int n_steps;
    int widths[LLAMAC_N_BUFFERS];    // the largest row width of each buffer; 0: unused
    int max_experts_used;            // the maximum number of pairs per row
    llamac_linear *experts;          // storage for the `linears` of the EXPERT_PRODUCT steps
} llamac_plan;

// Makes the plan of a model or, with `mtp`, of its MTP layer as a model of one layer. The model must stay open and
// unchanged while the plan is in use. On failure the plan is empty. Errors: LLAMAC_NO_MEMORY, LLAMAC_UNSUPPORTED,
// LLAMAC_BAD_ARGUMENT.
int llamac_plan_open(llamac_plan *plan, const llamac_model *model, int mtp, llamac_error *err);

// Makes the plan of a model whose hidden states are what an EAGLE-3 head reads: the residual stream after three numbers
// of layers, each 0 to n_layers. state_layers: (3). Errors: as llamac_plan_open.
int llamac_plan_open_trunk(llamac_plan *plan, const llamac_model *model, const int *state_layers, llamac_error *err);

// Makes the plan of a drafter that drafts for `trunk`. after_draft: that of an EAGLE-3 head which continues from its
// own states. If the drafter has no embedding, the EMBED step reads the trunk's table, whose operand has no
// offset. Errors: as llamac_plan_open; LLAMAC_BAD_ARGUMENT if the two do not match.
int llamac_plan_open_drafter(llamac_plan *plan, const llamac_model *drafter, const llamac_model *trunk, int after_draft,
                             llamac_error *err);

// Frees a plan. Accepts an empty one.
void llamac_plan_close(llamac_plan *plan);
#endif
