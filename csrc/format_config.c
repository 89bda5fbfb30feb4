// SPDX-License-Identifier: MIT
// format_config.c - the checks of the config record: single fields, and fields that are valid only together.
#include <stdio.h>
#include "common.h"
#include "error.h"
#include "format.h"
#include "format_demands.h"

static int check_rope(const struct config *c, llamac_error *err) {
    if ((c->position == POSITION_ROPE) != (c->n_rope > 0)) {
        char position[FORMAT_VALUE_BYTES];
        format_value_name("config", "position", c->position, position);
        return bad_model(err, "config: n_rope is %u with position %s", c->n_rope, position);
    }
    for (uint32_t i = 0; i < FORMAT_MAX_ROPE; i++) {
        const uint32_t dim = c->rope_dim[i];
        const float factor = c->rope_attention_factor[i];
        const int used = i < c->n_rope;
        if (used ? dim == 0 || dim % 2 || dim > c->head_dim : dim != 0)
            return bad_model(err, "config: rope_dim[%u] is %u, expected %s (n_rope is %u)", i, dim,
                             used ? "an even number up to head_dim" : "0", c->n_rope);
        if (used ? !(factor > 0) : factor != 0)
            return bad_model(err, "config: rope_attention_factor[%u] is %.9g, expected %s", i, (double)factor,
                             used ? "more than 0" : "0 (unused)");
        if (!used && c->rope_original_context[i])
            return bad_model(err, "config: rope_original_context[%u] is %u, expected 0 (unused)", i,
                             c->rope_original_context[i]);
    }
    return 0;
}

const char *format_kind_without_logits(const struct config *c) {
    return c->two_sided ? "an encoder" : c->scores_pairs ? "a reranker" : NULL;
}

// Checks the fields of encoders and rerankers.
static int check_encoder(const struct config *c, llamac_error *err) {
    const struct demand of_encoders[] = { { "n_types", c->n_types, 0 } };
    if (!c->two_sided &&
        format_check_demands("config", of_encoders, ARRAY_LEN(of_encoders), "with two_sided 0", err))
        return -1;
    if (!has_logits(c) && !c->tied_output)
        return bad_model(err, "config: tied_output is 0, expected 1 with %s 1",
                         c->two_sided ? "two_sided" : "scores_pairs");
    for (uint32_t i = 0; i < FORMAT_MAX_POOLED; i++)
        if (i < c->n_pooled ? !c->pooled_dim[i] : c->pooled_dim[i] || c->pooled_activation[i] || c->pooled_norm[i])
            return bad_model(err, "config: pooled_dim[%u] is %u, pooled_activation[%u] is %u and pooled_norm[%u] is %u "
                             "with n_pooled %u", i, c->pooled_dim[i], i, c->pooled_activation[i], i, c->pooled_norm[i],
                             c->n_pooled);
    if (c->scores_pairs && (!c->n_pooled || c->pooled_dim[c->n_pooled - 1] != 1 || c->pooled_norm[c->n_pooled - 1]))
        return bad_model(err, "config: scores_pairs is 1, but the last of n_pooled %u layers does not have width 1, or "
                         "has pooled_norm 1", c->n_pooled);
    return 0;
}

// Checks the fields that exclude drafters and MTP layers.
static int check_lone(const struct config *c, llamac_error *err) {
    const struct demand of_lone[] = {
        { "bias_distance", c->bias_distance, 0 }, { "embedding_norm", c->embedding_norm, 0 },
    };
    if (!c->drafter && !c->mtp_layers) return 0;
    const char *const reason = c->drafter ? "with a drafter" : "with mtp_layers 1";
    return format_check_demands("config", of_lone, ARRAY_LEN(of_lone), reason, err);
}

// Checks the fields of drafters.
static int check_drafter(const struct config *c, llamac_error *err) {
    char kind[FORMAT_VALUE_BYTES], reason[FORMAT_REASON_BYTES];
    format_value_name("config", "drafter", c->drafter, kind);
    snprintf(reason, sizeof reason, "with drafter %s", kind);
    if ((c->trunk_dim > 0) != (c->drafter != DRAFTER_NONE))
        return bad_model(err, "config: trunk_dim is %u, expected %s %s", c->trunk_dim, c->drafter ? "a width" : "0",
                         reason);
    const struct demand of_drafters[] = {
        { "norm", c->norm, NORM_RMS }, { "position", c->position, POSITION_ROPE }, { "two_sided", c->two_sided, 0 },
        { "tied_output", c->tied_output, 0 }, { "mtp_layers", c->mtp_layers, 0 },
    };
    if (c->drafter && format_check_demands("config", of_drafters, ARRAY_LEN(of_drafters), reason, err)) return -1;
    const uint32_t n = c->n_clusters, used = c->clusters_used;
    if (n && (c->drafter != DRAFTER_ASSISTANT || c->vocab_size % n || c->vocab_size / n % CLUSTER_MULTIPLE))
        return bad_model(err, "config: n_clusters is %u, expected 0 unless drafter is assistant and each cluster has a "
                         "multiple of %d of vocab_size %u tokens", n, CLUSTER_MULTIPLE, c->vocab_size);
    if (n && (c->logit_scale != 1 || c->logit_soft_cap > 0))
        return bad_model(err, "config: logit_scale is %.9g and logit_soft_cap %.9g, expected 1 and 0 with "
                         "n_clusters %u", (double)c->logit_scale, (double)c->logit_soft_cap, n);
    if (n ? used < 1 || used > n : used)
        return bad_model(err, "config: clusters_used is %u with n_clusters %u", used, n);
    return 0;
}

int format_check_config(const struct config *c, llamac_error *err) {
    if (format_check_record("config", "config", (const uint8_t *)c, err)) return -1;
    if (c->state_step_max > 0 && c->state_step_max < c->state_step_min)
        return bad_model(err, "config: state_step_max is %.9g, expected 0 or at least state_step_min %.9g",
                         (double)c->state_step_max, (double)c->state_step_min);
    if (c->n_heads % c->n_kv_heads)
        return bad_model(err, "config: n_heads is %u, expected a multiple of n_kv_heads %u", c->n_heads,
                         c->n_kv_heads);
    if ((uint64_t)c->n_heads * c->head_dim > FORMAT_MAX_DIM)
        return bad_model(err, "config: n_heads %u times head_dim %u exceeds %d", c->n_heads, c->head_dim,
                         FORMAT_MAX_DIM);
    if (c->n_heads * (2 * (uint64_t)c->bias_distance + 1) > FORMAT_MAX_BIASES)
        return bad_model(err, "config: n_heads %u times the %u distances up to bias_distance exceeds %d", c->n_heads,
                         2 * c->bias_distance + 1, FORMAT_MAX_BIASES);
    if (c->qk_norm_after_rope && c->qk_norm != QK_NORM_HEAD && c->qk_norm != QK_NORM_ROTATED_HEAD)
        return bad_model(err, "config: qk_norm_after_rope is 1, expected 0 unless qk_norm is head or rotated_head");
    if (c->n_token_ids > c->vocab_size)
        return bad_model(err, "config: n_token_ids %u exceeds vocab_size %u", c->n_token_ids, c->vocab_size);
    if (c->bos_id >= (int64_t)c->vocab_size || c->eos_id >= (int64_t)c->vocab_size)
        return bad_model(err, "config: bos_id is %d and eos_id is %d, expected ids below vocab_size %u, or -1",
                         c->bos_id, c->eos_id, c->vocab_size);
    if ((c->add_bos && c->bos_id < 0) || (c->add_eos && c->eos_id < 0))
        return bad_model(err, "config: add_bos or add_eos is set, but bos_id is %d and eos_id is %d", c->bos_id,
                         c->eos_id);
    for (uint32_t i = 0; i < FORMAT_MAX_STOP_IDS; i++)
        if (i < c->n_stop_ids ? (uint32_t)c->stop_ids[i] >= c->vocab_size : c->stop_ids[i] != 0)
            return bad_model(err, "config: stop_ids[%u] is %d, expected %s", i, c->stop_ids[i],
                             i < c->n_stop_ids ? "an id below vocab_size" : "0 (unused)");
    if (c->mtp_layers && (c->norm != NORM_RMS || c->position == POSITION_LEARNED || !has_logits(c)))
        return bad_model(err, "config: mtp_layers is %u, expected 0 unless norm is rms, position is not learned, and "
                         "two_sided and scores_pairs are 0", c->mtp_layers);
    return check_rope(c, err) || check_encoder(c, err) || check_lone(c, err) || check_drafter(c, err) ? -1 : 0;
}

int format_check_eagle(const struct config *c, const struct layer_record *layers, llamac_error *err) {
    const int is_head = c->drafter == DRAFTER_EAGLE3;
    const struct demand of_heads[] = {
        { "eagle_layers[0]", c->eagle_layers[0], 0 }, { "eagle_layers[1]", c->eagle_layers[1], 0 },
        { "eagle_layers[2]", c->eagle_layers[2], 0 }, { "eagle_vocab_size", c->eagle_vocab_size, 0 },
        { "eagle_normed", c->eagle_normed, 0 }, { "eagle_in_norm", c->eagle_in_norm, 0 },
        { "eagle_out_normed", c->eagle_out_normed, 0 },
    }, of_others[] = {
        { "n_pooled", c->n_pooled, 0 }, { "rounds_inputs", c->rounds_inputs, 0 },
    };
    if (!is_head) return format_check_demands("config", of_heads, ARRAY_LEN(of_heads), "unless drafter is eagle3", err);
    if (format_check_demands("config", of_others, ARRAY_LEN(of_others), "with drafter eagle3", err)) return -1;
    for (uint32_t l = 0; l < c->n_layers; l++) {
        char where[32];
        snprintf(where, sizeof where, "layer %u", l);
        const struct demand of_layer[] = {
            { "mixer", layers[l].mixer, MIXER_ATTENTION }, { "placement", layers[l].placement, PLACEMENT_PRE },
            { "kv_lora_rank", layers[l].kv_lora_rank, 0 }, { "output_gate", layers[l].output_gate, OUTPUT_GATE_NONE },
            { "layer_embedding_dim", layers[l].layer_embedding_dim, 0 },
        };
        if (format_check_demands(where, of_layer, ARRAY_LEN(of_layer), "with drafter eagle3", err)) return -1;
    }
    if (c->eagle_vocab_size == 0 || c->eagle_vocab_size > c->vocab_size)
        return bad_model(err, "config: eagle_vocab_size is %u, expected 1 to vocab_size %u", c->eagle_vocab_size,
                         c->vocab_size);
    return 0;
}
