// SPDX-License-Identifier: MIT
// format.c - checks a file: everything except tensor shapes, tensor data and texts.
//
// Checks run in this order: header (magic, version, hash, fields), sections (fields, place, padding, hash), config,
// layers, tensors. Every message names the section or record, the field, the value found and the value expected.
#include "format.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "common.h"
#include "error.h"
#include "format_demands.h"
#include "mem.h"
#include "sha256.h"

enum { MAX_STATE = 1 << 28 };   // numbers of a layer's state: plans and devices count them in an int

static const char *const section_names[N_SECTIONS] = {
    "config", "layers", "tensors", "metadata", "tokenizer", "spm", "template", "probes", "data",
};
const char *llamac_section_at(size_t index) { return index < N_SECTIONS ? section_names[index] : NULL; }

static void hash_of(const void *data, size_t bytes, uint8_t digest[HASH_BYTES]) {
    struct sha256 h;
    sha256_start(&h);
    sha256_add(&h, data, bytes);
    sha256_finish(&h, digest);
}

// ---- header and sections

// llama2.c's version 0 has no magic. It starts with seven int32: dim, hidden_dim, layers, heads, KV heads, vocabulary
// (negative: untied output), context.
static int looks_like_llama2c(const uint8_t *data, size_t bytes) {
    int32_t v[7];
    if (bytes < sizeof v) return 0;
    memcpy(v, data, sizeof v);
    return v[0] > 0 && v[0] <= FORMAT_MAX_DIM && v[1] > 0 && v[1] <= FORMAT_MAX_DIM && v[2] > 0 && v[2] <= 4096 &&
           v[3] > 0 && v[4] > 0 && v[4] <= v[3] && v[0] % v[3] == 0 && v[5] != 0 && v[6] > 0 &&
           v[6] <= FORMAT_MAX_CONTEXT;
}

// Recognizes other file types, so that the message can say what to do.
static int refuse_foreign(const uint8_t *data, size_t bytes, llamac_error *err) {
    static const struct { const char *magic; size_t bytes, at; const char *kind; } foreign[] = {
        { "GGUF", 4, 0, "a GGUF file" },
        { "lmgg", 4, 0, "an old GGML file" },
        { "tjgg", 4, 0, "an old GGML file" },
        { "PK\3\4", 4, 0, "a ZIP archive (a PyTorch checkpoint?)" },
        { "24ka", 4, 0, "a llama2.c checkpoint" },
        { "\200\2", 2, 0, "a Python pickle (an old PyTorch checkpoint?)" },
        { "{\"", 2, 8, "a safetensors file" },
    };
    for (size_t i = 0; i < ARRAY_LEN(foreign); i++)
        if (bytes >= foreign[i].at + foreign[i].bytes &&
            !memcmp(data + foreign[i].at, foreign[i].magic, foreign[i].bytes))
            return bad_model(err, "this is %s: run `llamac export` on it first", foreign[i].kind);
    if (looks_like_llama2c(data, bytes))
        return bad_model(err, "this looks like a llama2.c checkpoint: run `llamac export` on it first");
    return bad_model(err, "this is not a llamac file: it does not begin with the magic \"\\x89llamac\\n\"");
}

static int check_header(const struct header *h, size_t bytes, llamac_error *err) {
    if (h->version != FORMAT_VERSION)
        return bad_model(err, "header: version is %u, this library reads version %d: the file %s", h->version,
                         FORMAT_VERSION,
                         h->version > FORMAT_VERSION && h->version < 1000 ? "needs a newer llamac" : "is damaged");
    struct header copy = *h;
    uint8_t digest[HASH_BYTES];
    memset(copy.sha256, 0, sizeof copy.sha256);
    hash_of(&copy, sizeof copy, digest);
    if (memcmp(digest, h->sha256, HASH_BYTES))
        return bad_model(err, "header: its SHA-256 does not match: the first %zu bytes of the file are damaged",
                         sizeof copy);
    if (h->incompatible)
        return err_set(err, LLAMAC_UNSUPPORTED,
                       "header: incompatible has feature bits 0x%" PRIx64 " that this library does not know: "
                       "the file needs a newer llamac", h->incompatible);
    if (h->numerics != FORMAT_NUMERICS)
        return err_set(err, LLAMAC_UNSUPPORTED,
                       "header: numerics is %u, this library computes by numerics %d: %s llamac wrote the file, and "
                       "results would differ; use that version, or export the model again",
                       h->numerics, FORMAT_NUMERICS, h->numerics > FORMAT_NUMERICS ? "a newer" : "an older");
    if (format_check_record("header", "header", (const uint8_t *)h, err)) return -1;
    if (h->file_bytes != bytes)
        return bad_model(err, "header: file_bytes is %" PRIu64 " but the file has %zu bytes: it is %s", h->file_bytes,
                         bytes, bytes < h->file_bytes ? "truncated" : "too long");
    return 0;
}

// Checks the section table, the padding between sections, and the model's id.
static int check_section_table(const struct header *h, const uint8_t *data, size_t bytes, llamac_error *err) {
    uint64_t end = sizeof(struct header);
    struct sha256 id;
    sha256_start(&id);
    for (int s = 0; s < N_SECTIONS; s++) {
        const struct section_record *r = &h->sections[s];
        char where[40];
        snprintf(where, sizeof where, "section table, %s", section_names[s]);
        if (format_check_record("section", where, (const uint8_t *)r, err)) return -1;
        if (strcmp(r->name, section_names[s])) return bad_model(err, "%s: name is \"%s\"", where, r->name);
        const uint64_t start = round_up(end, FORMAT_ALIGNMENT);
        if (r->offset != start)
            return bad_model(err, "%s: offset is %" PRIu64 ", expected %" PRIu64, where, r->offset, start);
        if (start > bytes || r->bytes > bytes - start)
            return bad_model(err, "%s: bytes is %" PRIu64 ", which at %" PRIu64 " ends after the file (%zu bytes)",
                             where, r->bytes, start, bytes);
        if (!format_all_zero(data + end, start - end))
            return bad_model(err, "%s: the padding before it is not zero", where);
        end = start + r->bytes;
        sha256_add(&id, r->sha256, HASH_BYTES);
    }
    if (end != bytes)
        return bad_model(err, "header: the sections end at %" PRIu64 " but the file has %zu bytes", end, bytes);
    uint8_t digest[HASH_BYTES];
    sha256_finish(&id, digest);
    if (memcmp(digest, h->id, HASH_BYTES))
        return bad_model(err, "header: id is not the hash of the sections' hashes");
    return 0;
}

static int check_section_hash(const struct flat_file *file, enum section s, llamac_error *err) {
    const struct section_record *r = &file->header->sections[s];
    uint8_t digest[HASH_BYTES];
    hash_of(file->tables + r->offset, (size_t)r->bytes, digest);
    if (memcmp(digest, r->sha256, HASH_BYTES))
        return bad_model(err, "section %s: its SHA-256 does not match: the section is damaged", section_names[s]);
    return 0;
}

// ---- layers, tensors

static int check_attention(const struct config *c, const struct layer_record *layers, uint32_t l, const char *where,
                           llamac_error *err) {
    const struct layer_record *layer = &layers[l];
    const struct heads heads = layer_heads(c, layer);
    const struct { const char *name; uint32_t stated, largest; } sizes[] = {
        { "n_heads", layer->n_heads, c->n_heads }, { "n_kv_heads", layer->n_kv_heads, c->n_kv_heads },
        { "head_dim", layer->head_dim, c->head_dim },
    };
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++)
        if (sizes[i].stated > sizes[i].largest)
            return bad_model(err, "%s: %s is %u, expected at most the config's %u", where, sizes[i].name,
                             sizes[i].stated, sizes[i].largest);
    if (heads.n % heads.n_kv)
        return bad_model(err, "%s: n_heads is %d, expected a multiple of n_kv_heads %d", where, heads.n, heads.n_kv);
    if (layer->rope >= (int32_t)c->n_rope)
        return bad_model(err, "%s: rope is %d, but n_rope is %u", where, layer->rope, c->n_rope);
    if (layer->rope >= 0 && c->rope_dim[layer->rope] > (uint32_t)heads.dim)
        return bad_model(err, "%s: rope is %d, but rope_dim[%d] %u exceeds head_dim %d", where, layer->rope,
                         layer->rope, c->rope_dim[layer->rope], heads.dim);
    if ((layer->query_beta > 0) != (layer->query_context > 0))
        return bad_model(err, "%s: query_beta is %.9g with query_context %u, expected both or neither to be 0", where,
                         (double)layer->query_beta, layer->query_context);
    if (layer->query_offset && !layer->query_context)
        return bad_model(err, "%s: query_offset is 1, expected 0 with query_context 0", where);
    if (layer->window_chunks && (!layer->window || c->two_sided))
        return bad_model(err, "%s: window_chunks is 1, expected 0 with window %u and two_sided %u", where,
                         layer->window, c->two_sided);
    if (layer->v_is_k && c->qk_norm == QK_NORM_WHOLE)
        return bad_model(err, "%s: v_is_k is 1, expected 0 with qk_norm whole", where);
    if (layer->kv_source < 0) return 0;
    if (layer->v_is_k || layer->v_norm != V_NORM_NONE)
        return bad_model(err, "%s: v_is_k is %u and v_norm is %u, expected 0 with kv_source %d", where, layer->v_is_k,
                         layer->v_norm, layer->kv_source);
    if (layer->kv_source >= (int32_t)l)
        return bad_model(err, "%s: kv_source is %d, expected an earlier layer, or -1", where, layer->kv_source);
    const struct layer_record *source = &layers[layer->kv_source];
    const struct heads of_source = layer_heads(c, source);
    if (!has_attention(source) || source->kv_source >= 0 || of_source.n_kv != heads.n_kv ||
        of_source.dim != heads.dim || source->kv_lora_rank)
        return bad_model(err, "%s: kv_source is %d, expected a layer of attention with its own %d KV heads of %d",
                         where, layer->kv_source, heads.n_kv, heads.dim);
    return 0;
}

// Checks the fields of latent attention, and that other layers have none of them.
static int check_latent(const struct config *c, const struct layer_record *layer, const char *where,
                        llamac_error *err) {
    const struct heads heads = layer_heads(c, layer);
    const uint32_t rank = layer->kv_lora_rank;
    char reason[FORMAT_REASON_BYTES];
    snprintf(reason, sizeof reason, "with kv_lora_rank %u", rank);
    const struct demand of_others[] = {
        { "q_lora_rank", layer->q_lora_rank, 0 }, { "qk_nope_head_dim", layer->qk_nope_head_dim, 0 },
        { "v_head_dim", layer->v_head_dim, 0 }, { "latent_norm_eps", (double)layer->latent_norm_eps, 0 },
    }, of_latent[] = {
        { "mixer", layer->mixer, MIXER_ATTENTION }, { "qk_norm", c->qk_norm, QK_NORM_NONE },
        { "two_sided", c->two_sided, 0 },
        { "n_kv_heads", heads.n_kv, 1 }, { "kv_source", layer->kv_source, -1 }, { "v_is_k", layer->v_is_k, 0 },
        { "v_norm", layer->v_norm, V_NORM_NONE }, { "output_gate", layer->output_gate, OUTPUT_GATE_NONE },
    };
    if (!rank) return format_check_demands(where, of_others, ARRAY_LEN(of_others), reason, err);
    if (format_check_demands(where, of_latent, ARRAY_LEN(of_latent), reason, err)) return -1;
    if (rank % LATENT_DIM_MULTIPLE || layer->v_head_dim % LATENT_DIM_MULTIPLE || !layer->v_head_dim)
        return bad_model(err, "%s: kv_lora_rank is %u and v_head_dim is %u, expected multiples of %d", where, rank,
                         layer->v_head_dim, LATENT_DIM_MULTIPLE);
    if (!layer->qk_nope_head_dim)
        return bad_model(err, "%s: qk_nope_head_dim is 0, expected at least 1 with kv_lora_rank %u", where, rank);
    const uint32_t rotated = layer->rope < 0 ? 0 : c->rope_dim[layer->rope];
    if ((uint64_t)rank + rotated > (uint64_t)heads.dim)
        return bad_model(err, "%s: head_dim is %d, expected at least kv_lora_rank %u plus the %u numbers that RoPE "
                         "rotates", where, heads.dim, rank, rotated);
    if (query_width(c, layer) > FORMAT_MAX_DIM || mix_width(c, layer) > FORMAT_MAX_DIM)
        return bad_model(err, "%s: the heads of q have %" PRIu64 " numbers and those of v %" PRIu64
                         ", expected at most %d", where, query_width(c, layer), mix_width(c, layer), FORMAT_MAX_DIM);
    return 0;
}

// Checks the fields of recurrent layers, and that a layer without attention has none of its fields.
static int check_state(const struct config *c, const struct layer_record *layer, const char *where,
                       llamac_error *err) {
    const int has_state = layer->mixer == MIXER_DELTA_NET || has_mamba2(layer);
    char mixer[FORMAT_VALUE_BYTES], reason[FORMAT_REASON_BYTES];
    format_value_name("layer", "mixer", layer->mixer, mixer);
    snprintf(reason, sizeof reason, "with mixer %s", mixer);
    const struct field { const char *name; uint32_t found; } widths[] = {
        { "state_key_dim", layer->state_key_dim }, { "state_value_dim", layer->state_value_dim },
    }, of_state[] = {
        { "state_key_heads", layer->state_key_heads }, { "state_heads", layer->state_heads }, widths[0], widths[1],
    };
    const struct demand of_others[] = {
        { "window", layer->window, 0 }, { "rope", layer->rope, -1 }, { "n_heads", layer->n_heads, 0 },
        { "n_kv_heads", layer->n_kv_heads, 0 }, { "head_dim", layer->head_dim, 0 },
        { "kv_source", layer->kv_source, -1 }, { "v_is_k", layer->v_is_k, 0 }, { "v_norm", layer->v_norm, 0 },
        { "output_gate", layer->output_gate, 0 }, { "sinks", layer->sinks, 0 },
        { "query_beta", (double)layer->query_beta, 0 },
    };
    for (size_t i = 0; i < ARRAY_LEN(of_state); i++)
        if (has_state != (of_state[i].found > 0))
            return bad_model(err, "%s: %s is %u %s", where, of_state[i].name, of_state[i].found, reason);
    // one tap keeps no inputs, so a short convolution would have a state of no bytes
    const uint32_t least_taps = layer->mixer == MIXER_SHORT_CONV ? 2 : (uint32_t)is_recurrent_layer(layer);
    if (least_taps ? layer->conv_width < least_taps : layer->conv_width)
        return bad_model(err, "%s: conv_width is %u %s", where, layer->conv_width, reason);
    if (!has_attention(layer) && format_check_demands(where, of_others, ARRAY_LEN(of_others), reason, err)) return -1;
    if (!has_state) return 0;
    if (layer->state_heads % layer->state_key_heads)
        return bad_model(err, "%s: state_heads is %u, expected a multiple of state_key_heads %u", where,
                         layer->state_heads, layer->state_key_heads);
    for (size_t i = 0; i < ARRAY_LEN(widths); i++)
        if (widths[i].found % STATE_DIM_MULTIPLE)
            return bad_model(err, "%s: %s is %u, expected a multiple of %d", where, widths[i].name, widths[i].found,
                             STATE_DIM_MULTIPLE);
    if (conv_channels(c, layer) > FORMAT_MAX_DIM)
        return bad_model(err, "%s: q, k and v have %" PRIu64 " channels together, expected at most %d", where,
                         conv_channels(c, layer), FORMAT_MAX_DIM);
    const uint64_t state = state_values(layer) * layer->state_key_dim;
    if (state > MAX_STATE)
        return bad_model(err, "%s: the state has %" PRIu64 " numbers, expected at most %d", where, state, MAX_STATE);
    return 0;
}

static int check_ffn(const struct config *c, const struct layer_record *layer, const char *where, llamac_error *err) {
    const uint32_t n = layer->n_experts, used = layer->n_experts_used;
    const int experts = layer->ffn == FFN_EXPERTS;
    char ffn[FORMAT_VALUE_BYTES], reason[FORMAT_REASON_BYTES];
    format_value_name("layer", "ffn", layer->ffn, ffn);
    snprintf(reason, sizeof reason, "with ffn %s", ffn);
    if ((layer->ffn_dim == 0) != (layer->ffn == FFN_NONE))
        return bad_model(err, "%s: ffn_dim is %u %s", where, layer->ffn_dim, reason);
    if (experts ? n == 0 || used == 0 || used > n : n || used)
        return bad_model(err, "%s: n_experts is %u and n_experts_used is %u, which does not go with ffn %s", where, n,
                         used, ffn);
    const struct demand of_others[] = {
        { "router", layer->router, ROUTER_SOFTMAX },
        { "router_choice_bias", layer->router_choice_bias, 0 },
        { "n_expert_groups", layer->n_expert_groups, 0 },
        { "n_expert_groups_used", layer->n_expert_groups_used, 0 },
        { "expert_weights", layer->expert_weights, 0 },
        { "expert_scale", (double)layer->expert_scale, 1 },
        { "shared_ffn_dim", layer->shared_ffn_dim, 0 },
        { "expert_weights_eps", (double)layer->expert_weights_eps, 0 },
        { "expert_norms", layer->expert_norms, 0 },
        { "expert_factors", layer->expert_factors, 0 },
        { "plain_experts", layer->plain_experts, 0 },
        { "expert_weights_first", layer->expert_weights_first, 0 },
    }, of_plain[] = {
        { "activation_limit", (double)layer->activation_limit, 0 },
        { "up_offset", (double)layer->up_offset, 0 },
    };
    if (!experts && format_check_demands(where, of_others, ARRAY_LEN(of_others), reason, err)) return -1;
    const int is_gated = layer->ffn == FFN_GATED || (experts && !layer->plain_experts);
    if (!is_gated && format_check_demands(where, of_plain, ARRAY_LEN(of_plain),
                                          experts ? "with plain_experts 1" : reason, err))
        return -1;
    const uint32_t groups = layer->n_expert_groups, groups_used = layer->n_expert_groups_used;
    if (groups ? n % groups || groups_used == 0 || groups_used > groups : groups_used)
        return bad_model(err, "%s: n_expert_groups is %u and n_expert_groups_used is %u with n_experts %u", where,
                         groups, groups_used, n);
    if (groups && used > n / groups * groups_used)
        return bad_model(err, "%s: n_experts_used is %u, expected at most %u, the experts of n_expert_groups_used %u",
                         where, used, n / groups * groups_used, groups_used);
    if (layer->expert_weights_eps > 0 && (layer->router != ROUTER_SIGMOID || !layer->expert_weights))
        return bad_model(err,
                         "%s: expert_weights_eps is %.9g, expected 0 unless router is sigmoid and expert_weights 1",
                         where, (double)layer->expert_weights_eps);
    if (layer->shared_gate && !layer->shared_ffn_dim)
        return bad_model(err, "%s: shared_gate is 1, expected 0 with shared_ffn_dim 0", where);
    const int norms_branches = layer->placement == PLACEMENT_POST || layer->placement == PLACEMENT_SANDWICH;
    if (layer->expert_norms && (!layer->shared_ffn_dim || layer->shared_gate || !norms_branches))
        return bad_model(err, "%s: expert_norms is 1, expected 0 without a shared expert, or with shared_gate, or "
                         "without norms of branches", where);
    if (layer->expert_norms && c->expert_dim)
        return bad_model(err, "%s: expert_norms is 1, expected 0 with expert_dim %u", where, c->expert_dim);
    return 0;
}

// Checks a layer that only mixes positions, or only has a feed-forward network.
static int check_parts(const struct layer_record *layer, const char *where, llamac_error *err) {
    const int mixes = layer->mixer != MIXER_NONE, has_ffn = layer->ffn != FFN_NONE;
    if (!mixes && !has_ffn)
        return bad_model(err, "%s: mixer and ffn are none, expected at most one of them to be none", where);
    if ((mixes && has_ffn) || layer->placement == PLACEMENT_PRE) return 0;
    return bad_model(err, "%s: placement is %u, expected %d (pre) with %s none", where, layer->placement,
                     PLACEMENT_PRE, mixes ? "ffn" : "mixer");
}

// Checks that inputs are rounded only in layers of attention and a dense network.
static int check_rounding(const struct config *c, const struct layer_record *layer, const char *where,
                          llamac_error *err) {
    const struct demand demands[] = {
        { "mixer", layer->mixer, MIXER_ATTENTION }, { "kv_lora_rank", layer->kv_lora_rank, 0 },
        { "n_experts", layer->n_experts, 0 }, { "layer_embedding_dim", layer->layer_embedding_dim, 0 },
        { "mtp_layers", c->mtp_layers, 0 },
    };
    return c->rounds_inputs ? format_check_demands(where, demands, ARRAY_LEN(demands), "with rounds_inputs 1", err) : 0;
}

// Checks that a layer with sub-norms has the two matrices whose inputs they norm.
static int check_sub_norms(const struct config *c, const struct layer_record *layer, const char *where,
                           llamac_error *err) {
    const struct demand demands[] = {
        { "mixer", layer->mixer, MIXER_ATTENTION }, { "kv_lora_rank", layer->kv_lora_rank, 0 },
        { "norm", c->norm, NORM_RMS }, { "n_experts", layer->n_experts, 0 },
    };
    if (!layer->sub_norms) return 0;
    if (format_check_demands(where, demands, ARRAY_LEN(demands), "with sub_norms 1", err)) return -1;
    if (layer->placement == PLACEMENT_PARALLEL || layer->ffn == FFN_NONE)
        return bad_model(err, "%s: sub_norms is 1, expected 0 with placement parallel or ffn none", where);
    return 0;
}

// Checks a layer that reads the keys and values of another model.
static int check_assistant(const struct config *c, const struct layer_record *layer, const char *where,
                           llamac_error *err) {
    const struct demand demands[] = {
        { "mixer", layer->mixer, MIXER_ATTENTION }, { "kv_source", layer->kv_source, -1 },
        { "kv_lora_rank", layer->kv_lora_rank, 0 }, { "v_is_k", layer->v_is_k, 0 }, { "v_norm", layer->v_norm, 0 },
        { "window_chunks", layer->window_chunks, 0 }, { "layer_embedding_dim", layer->layer_embedding_dim, 0 },
    };
    return reads_trunk_keys(c)
               ? format_check_demands(where, demands, ARRAY_LEN(demands), "with drafter assistant", err) : 0;
}

static int check_layer(const struct config *c, const struct layer_record *layers, uint32_t l, llamac_error *err) {
    char where[32];
    snprintf(where, sizeof where, "layer %u", l);
    if (format_check_record("layer", where, (const uint8_t *)&layers[l], err)) return -1;
    if (layers[l].layer_embedding_dim != layers[0].layer_embedding_dim)
        return bad_model(err, "%s: layer_embedding_dim is %u, expected that of layer 0, %u", where,
                         layers[l].layer_embedding_dim, layers[0].layer_embedding_dim);
    if (c->two_sided && layers[l].mixer != MIXER_ATTENTION)
        return bad_model(err, "%s: mixer is %u, expected %d (attention) with two_sided 1", where, layers[l].mixer,
                         MIXER_ATTENTION);
    if ((c->two_sided || c->embedding_norm) && layers[l].layer_embedding_dim)
        return bad_model(err, "%s: layer_embedding_dim is %u, expected 0 with %s 1", where,
                         layers[l].layer_embedding_dim, c->two_sided ? "two_sided" : "embedding_norm");
    if (c->activation == ACTIVATION_XIELU && (layers[l].ffn == FFN_GATED || layers[l].ffn == FFN_EXPERTS))
        return bad_model(err, "%s: ffn is %u, expected %d (plain) or %d (none) with activation xielu", where,
                         layers[l].ffn, FFN_PLAIN, FFN_NONE);
    if (c->activation == ACTIVATION_XIELU && layers[l].layer_embedding_dim)
        return bad_model(err, "%s: layer_embedding_dim is %u, expected 0 with activation xielu", where,
                         layers[l].layer_embedding_dim);
    const int is_mtp = l == c->n_layers;
    if (is_mtp && (layers[l].mixer != MIXER_ATTENTION || layers[l].kv_source >= 0 || layers[l].layer_embedding_dim))
        return bad_model(err, "%s: the MTP layer has mixer %u, kv_source %d and layer_embedding_dim %u, expected %d "
                         "(attention), -1 and 0", where, layers[l].mixer, layers[l].kv_source,
                         layers[l].layer_embedding_dim, MIXER_ATTENTION);
    const int failed = check_attention(c, layers, l, where, err) || check_latent(c, &layers[l], where, err) ||
                       check_state(c, &layers[l], where, err) || check_ffn(c, &layers[l], where, err) ||
                       check_parts(&layers[l], where, err) || check_sub_norms(c, &layers[l], where, err) ||
                       check_rounding(c, &layers[l], where, err) || check_assistant(c, &layers[l], where, err);
    return failed ? -1 : 0;
}

// Checks one tensor record. *end: the end of the tensor before it; receives the end of this one.
static int check_tensor(const struct tensor_record *t, size_t i, uint64_t *end, uint64_t data_end, llamac_error *err) {
    char where[96];
    snprintf(where, sizeof where, "tensor %zu", i);
    if (format_check_record("tensor", where, (const uint8_t *)t, err)) return -1;
    snprintf(where, sizeof where, "tensor %s", t->name);
    uint64_t matrices = 1;
    for (uint32_t d = 0; d < FORMAT_MAX_DIMS; d++) {
        if ((t->shape[d] > 0) != (d < t->n_dims))
            return bad_model(err, "%s: shape[%u] is %" PRIu64 " with n_dims %u", where, d, t->shape[d], t->n_dims);
        if (d + 2 < t->n_dims && mul_overflows(matrices, t->shape[d], &matrices))
            return bad_model(err, "%s: shape overflows", where);
    }
    uint64_t bytes;
    if (t->n_dims == 1) {
        if (t->dtype != LLAMAC_F32)
            return bad_model(err, "%s: dtype is %s, but a vector is f32", where, llamac_dtype_name((int)t->dtype));
        bytes = 4 * t->shape[0];
    } else {
        const size_t one = llamac_matrix_bytes((int)t->dtype, t->shape[t->n_dims - 2], t->shape[t->n_dims - 1]);
        if (!one) return bad_model(err, "%s: its size overflows", where);
        if (mul_overflows(one, matrices, &bytes)) return bad_model(err, "%s: shape overflows", where);
    }
    if (t->bytes != bytes)
        return bad_model(err, "%s: bytes is %" PRIu64 ", its shape and dtype need %" PRIu64, where, t->bytes, bytes);
    const uint64_t start = round_up(*end, FORMAT_ALIGNMENT);
    if (t->offset != start)
        return bad_model(err, "%s: offset is %" PRIu64 ", expected %" PRIu64, where, t->offset, start);
    if (start > data_end || bytes > data_end - start)
        return bad_model(err, "%s: its %" PRIu64 " bytes at %" PRIu64 " end after the data section", where, bytes,
                         start);
    *end = start + bytes;
    return 0;
}

static int check_tensors(const struct flat_file *file, llamac_error *err) {
    const struct section_record *data = &file->header->sections[SECTION_DATA];
    uint64_t end = data->offset;
    struct sha256 hashes;
    sha256_start(&hashes);
    for (size_t i = 0; i < file->n_tensors; i++) {
        if (check_tensor(&file->tensors[i], i, &end, data->offset + data->bytes, err)) return -1;
        sha256_add(&hashes, file->tensors[i].sha256, HASH_BYTES);
    }
    if (end != data->offset + data->bytes)
        return bad_model(err, "section data: bytes is %" PRIu64 ", its tensors need %" PRIu64, data->bytes,
                         end - data->offset);
    uint8_t digest[HASH_BYTES];
    sha256_finish(&hashes, digest);
    if (memcmp(digest, data->sha256, HASH_BYTES))
        return bad_model(err, "section data: its SHA-256 is not that of the tensors' hashes");
    return 0;
}

// Checks config, layers and tensors in the copy, and sets the pointers to them.
static int check_tables(struct flat_file *file, llamac_error *err) {
    const struct section_record *sections = file->header->sections;
    const uint64_t config_bytes = sections[SECTION_CONFIG].bytes, layer_bytes = sections[SECTION_LAYERS].bytes,
                   tensor_bytes = sections[SECTION_TENSORS].bytes;
    if (config_bytes != sizeof(struct config))
        return bad_model(err, "section config: bytes is %" PRIu64 ", expected %zu", config_bytes,
                         sizeof(struct config));
    file->config = (const struct config *)(const void *)(file->tables + sections[SECTION_CONFIG].offset);
    if (format_check_config(file->config, err)) return -1;

    const uint32_t mtp_layers = file->config->mtp_layers, n_layers = file->config->n_layers + mtp_layers;
    const uint64_t layers_needed = sizeof(struct layer_record) * (uint64_t)n_layers;
    if (layer_bytes != layers_needed)
        return bad_model(err, "section layers: bytes is %" PRIu64 ", n_layers %u and mtp_layers %u need %" PRIu64,
                         layer_bytes, n_layers - mtp_layers, mtp_layers, layers_needed);
    file->layers = (const struct layer_record *)(const void *)(file->tables + sections[SECTION_LAYERS].offset);
    for (uint32_t l = 0; l < n_layers; l++)
        if (check_layer(file->config, file->layers, l, err)) return -1;
    if (format_check_eagle(file->config, file->layers, err)) return -1;

    if (tensor_bytes % sizeof(struct tensor_record) || tensor_bytes == 0)
        return bad_model(err, "section tensors: bytes is %" PRIu64 ", expected a multiple of %zu", tensor_bytes,
                         sizeof(struct tensor_record));
    file->n_tensors = (size_t)(tensor_bytes / sizeof(struct tensor_record));
    file->tensors = (const struct tensor_record *)(const void *)(file->tables + sections[SECTION_TENSORS].offset);
    return check_tensors(file, err);
}

// Copies the tables. The checked header says how large they are. It is copied from `checked`, not read again.
static int copy_tables(struct flat_file *file, const struct header *checked, llamac_error *err) {
    const struct section_record *tensors = &checked->sections[SECTION_TENSORS];
    const size_t max_bytes = FORMAT_MAX_TENSORS * sizeof(struct tensor_record);
    if (tensors->bytes > max_bytes)
        return bad_model(err, "section tensors: bytes is %" PRIu64 ", expected at most %zu (%d tensors)",
                         tensors->bytes, max_bytes, FORMAT_MAX_TENSORS);
    file->table_bytes = (size_t)(tensors->offset + tensors->bytes);
    file->tables = mem_alloc(1, file->table_bytes, "the file's tables", err);
    if (!file->tables) return -1;
    memcpy(file->tables, checked, sizeof *checked);
    memcpy(file->tables + sizeof *checked, file->data + sizeof *checked, file->table_bytes - sizeof *checked);
    file->header = (const struct header *)(const void *)file->tables;
    return 0;
}

int format_open(struct flat_file *file, const void *data, size_t bytes, llamac_error *err) {
    const uint8_t *p = data;
    const size_t magic_bytes = sizeof FORMAT_MAGIC - 1;
    *file = (struct flat_file){ .data = p, .bytes = bytes };
    if ((uintptr_t)p % FORMAT_ALIGNMENT)
        return bad_argument(err, "the model's memory is not aligned to %d bytes", FORMAT_ALIGNMENT);
    if (bytes == 0) return bad_model(err, "the file is empty");
    if (memcmp(p, FORMAT_MAGIC, bytes < magic_bytes ? bytes : magic_bytes)) return refuse_foreign(p, bytes, err);
    struct header header;
    if (bytes < sizeof header)
        return bad_model(err, "header: the file is truncated: it has %zu bytes, the header alone %zu", bytes,
                         sizeof header);
    memcpy(&header, p, sizeof header);
    if (check_header(&header, bytes, err) || check_section_table(&header, p, bytes, err) ||
        copy_tables(file, &header, err))
        return -1;
    int failed = 0;
    for (int s = SECTION_CONFIG; s <= SECTION_TENSORS && !failed; s++)
        failed = check_section_hash(file, (enum section)s, err);
    if (!failed && !check_tables(file, err)) return 0;
    format_close(file);
    return -1;
}

void format_close(struct flat_file *file) {
    mem_free(file->tables);
    *file = (struct flat_file){ 0 };
}
