// SPDX-License-Identifier: MIT
// llamac.h - the public interface of the C core: forward passes of LLaMA-family and GPT-2 models over borrowed memory.
//
//     llamac_model *model;  llamac_session *session;  llamac_error err;  float logits[vocab_size];
//     if (llamac_model_open(&model, file, file_bytes, &err)) return fail(err.message);
//     llamac_session_options options = { .n_sequences = 1, .threads = 2 };
//     if (llamac_session_open(&session, model, &options, &err)) return fail(err.message);
//     llamac_row row = { .token = 1, .sequence = 0, .position = 0, .want_logits = 1 };
//     if (llamac_eval(session, &row, 1, logits, NULL, &err)) return fail(err.message);
//     llamac_session_close(&session);  llamac_model_close(&model);
//
// The core prints nothing, opens nothing, ends nothing and reads no environment. A function that can fail returns 0 or a
// negative number and fills `err` with what was wrong, where, and what was expected. A model with sessions is immutable and may be used by many
// sessions and threads at once; a session is used by one thread at a time.
#ifndef LLAMAC_H
#define LLAMAC_H
#include <stddef.h>
#include <stdint.h>

typedef struct llamac_model llamac_model;
typedef struct llamac_session llamac_session;

enum llamac_code {
    LLAMAC_OK, LLAMAC_NO_MEMORY, LLAMAC_BAD_ARGUMENT, LLAMAC_BAD_MODEL, LLAMAC_CONTEXT_FULL, LLAMAC_CANCELLED, LLAMAC_UNSUPPORTED
};
typedef struct { int code; char message[400]; } llamac_error;

// ---- numbers in memory

// How numbers are stored: tensors of the file and the KV cache.
enum llamac_dtype { LLAMAC_F32 = 1, LLAMAC_F16, LLAMAC_BF16, LLAMAC_Q8, LLAMAC_Q4, LLAMAC_Q4S, LLAMAC_N_DTYPES };

// "f32" ... ; NULL for a number that is no dtype.
const char *llamac_dtype_name(int dtype);
// Bytes of a matrix of rows x columns in strips of 16 rows (docs/format.md); 0 if the number is no dtype or the size overflows.
size_t llamac_matrix_bytes(int dtype, uint64_t rows, uint64_t columns);

// Quantizes `rows` rows of `columns` finite numbers, |number| < 2^120, to strips of q8, q4 or q4s: llamac_matrix_bytes(dtype, rows, columns)
// bytes. A strip's bytes follow from its own 16 rows: a matrix may be handed over in parts of whole strips, by several threads.
//     importance  (columns): of a column's error, not negative; NULL: all alike
//     feedback    (columns, columns) or NULL; q4 and q4s: row i, column j > i: how much of the error of column i column j takes over
int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance, const float *feedback, void *out, llamac_error *err);

// ---- the file's structures, described for readers and writers

enum llamac_type { LLAMAC_TYPE_U32, LLAMAC_TYPE_I32, LLAMAC_TYPE_F32, LLAMAC_TYPE_U64, LLAMAC_TYPE_BYTES, LLAMAC_TYPE_TEXT };
typedef struct {
    const char *record;       // "header", "section", "config", "layer" or "tensor"
    const char *name;
    int type;                 // enum llamac_type
    uint32_t offset, count;   // bytes from the start of the record; elements
    double min, max;          // of each element that is a number
    const char *names;        // enumerations: the names of the values min, min + 1, ... separated by commas; else NULL
} llamac_field;
const llamac_field *llamac_fields(size_t *n);
size_t llamac_record_bytes(const char *record);   // 0: no such record; the header's is without its section table
// The file's sections in order: "config", ..., "data"; NULL past the end.
const char *llamac_section_at(size_t index);

// The tensors that a model of this config must or may have, in the file's order, one per call. `walk` begins as { config, layers }, with
// n_layers layer records; fields may be anything. Returns 0 past the end, and -1 if a config or layer has more RoPE tables or experts than
// the format knows.
typedef struct { const void *config, *layers; uint32_t group, table, layer, expert, taken; } llamac_walk;
typedef struct {
    char name[64];
    int required;             // 0: optional (a bias)
    int is_matrix;            // 1: strips of any dtype; 0: a vector of f32
    uint64_t rows, columns;   // a vector has 1 row
} llamac_slot;
int llamac_slot_next(llamac_walk *walk, llamac_slot *slot);

// ---- model

// Checks the whole structure of a file in memory (64-byte aligned) and binds its tensors. The memory is borrowed until llamac_model_close.
// The structure is copied first, and the copy is what is checked and used. The memory may therefore be a shared mapping of a file that others
// can write to: a change of tensor data makes wrong numbers, any other change has no effect. The mapping must not shrink: reading a page past the
// end of a truncated file raises SIGBUS. Tensor data and texts are not read here.
int llamac_model_open(llamac_model **model, const void *data, size_t bytes, llamac_error *err);
void llamac_model_close(llamac_model **model);
// The file's first `bytes` bytes as they were checked: header, section table, config, layers and tensor table, at their offsets in the file.
// They belong to the model. Whoever reads them rather than the file cannot be misled by a later change of the file.
const void *llamac_model_tables(const llamac_model *model, size_t *bytes);

// Adds a low-rank adapter to a matrix, by the name of its tensor: its products become scales (W x) + b (a x), an embedding's rows W + b a. a (rank,
// columns) and b (rows, rank) are f32 in strips, borrowed as the file is; of an embedding a is (columns, rank). scales (rows) are f32, or NULL for 1,
// as of an embedding. Sizes are checked. "output.weight" is the output matrix also where the embedding serves for it. A matrix has one adapter.
// What changes a model comes before its first session.
enum { LLAMAC_MAX_RANK = 4096 };
int llamac_model_adapt(llamac_model *model, const char *matrix, int rank, const void *a, size_t a_bytes, const void *b, size_t b_bytes, const float *scales,
                       size_t n_scales, llamac_error *err);
// Lets other data stand in place of a tensor, borrowed as the file is: a matrix in strips of any dtype, or a vector of f32, also an optional one
// that is not there.
int llamac_model_replace(llamac_model *model, const char *tensor, int dtype, const void *data, size_t bytes, llamac_error *err);

// ---- instruction sets

// The kernel sets of this build, best first: "avx2", ..., "scalar"; NULL past the end. `supported`: whether this machine runs it.
const char *llamac_isa_at(size_t index, int *supported);
// Whether this build can use more than one thread (OpenMP).
int llamac_has_threads(void);

// ---- session: sequences of tokens with their KV cache, and the memory to compute with

typedef struct {
    int n_sequences;      // independent sequences, at least 1
    int context;          // positions per sequence; 0: the model's
    int kv_dtype;         // LLAMAC_F32 or LLAMAC_F16; 0: f32 for a model whose matrices are all f32, else f16
    int threads;          // at most so many compute an eval; at least 1
    const char *isa;      // NULL: the best of this machine
} llamac_session_options;

int llamac_session_open(llamac_session **session, const llamac_model *model, const llamac_session_options *options, llamac_error *err);
void llamac_session_close(llamac_session **session);

typedef struct {
    int context, kv_dtype, threads;
    const char *isa;
    size_t scratch_bytes, kv_bytes;   // held now
} llamac_session_info;
void llamac_session_describe(const llamac_session *session, llamac_session_info *info);

// Changes the number of threads of the evals to come.
int llamac_set_threads(llamac_session *session, int threads, llamac_error *err);
// Positions held by a sequence; -1 if there is no such sequence.
int llamac_length(const llamac_session *session, int sequence);
// Forgets the positions from `length` on.
int llamac_truncate(llamac_session *session, int sequence, int length, llamac_error *err);

// ---- eval

// One token to compute: positions of a sequence come in order, starting at its length.
typedef struct { int32_t token, sequence, position, want_logits; } llamac_row;

// The named stages of the graph, in the order in which they are computed. Width: floats per row.
enum llamac_stage {
    LLAMAC_STAGE_EMBEDDING,       // (dim)               token (and position) embedding
    LLAMAC_STAGE_ATTN_NORM,       // (dim)               per layer from here: what q, k, v are computed from, normed or not
    LLAMAC_STAGE_Q,               // (n_heads, head_dim)      after norm and RoPE
    LLAMAC_STAGE_K,               // (n_kv_heads, head_dim)   after norm and RoPE
    LLAMAC_STAGE_V,               // (n_kv_heads, head_dim)
    LLAMAC_STAGE_CACHE_K,         // (n_kv_heads, head_dim)   what the cache holds of this row
    LLAMAC_STAGE_CACHE_V,         // (n_kv_heads, head_dim)
    LLAMAC_STAGE_SCORES,          // (n_heads, context)       scaled and capped products of q and k; -inf where the row does not look
    LLAMAC_STAGE_ATTN_MIX,        // (n_heads, head_dim)      the heads' weighted values
    LLAMAC_STAGE_ATTN_OUT,        // (dim)                    after the output projection, before its norm
    LLAMAC_STAGE_FFN_NORM,        // (dim)                    what the feed-forward network is computed from
    LLAMAC_STAGE_FFN_ROUTER,      // (largest n_experts)      the router's products, zeros behind a smaller layer's
    LLAMAC_STAGE_FFN_HIDDEN,      // (largest ffn_dim)        after the activation, zeros behind a narrower layer's; of each expert in use, ascending
    LLAMAC_STAGE_FFN,             // (dim)                    output of the feed-forward network
    LLAMAC_STAGE_BLOCK,           // (dim)               ... to here: the residual stream after the layer
    LLAMAC_STAGE_OUTPUT_NORM,     // (dim)               rows that want logits only, in order
    LLAMAC_STAGE_LOGITS,          // (vocab_size)        likewise; scaled and capped
    LLAMAC_N_STAGES
};
// "embedding", "attn_norm", ...; NULL for a number that is no stage.
const char *llamac_stage_name(int stage);
// Floats per row of a stage in this session; `per_layer` tells whether it exists once per layer. 0: there is no
// such stage, or nothing to see in this model.
size_t llamac_stage_width(const llamac_session *session, int stage, int *per_layer);

// A wish to see one stage of one layer: eval writes rows * width floats to `out`. A stage of a layer can be wished for once per eval;
// of stages that are in no layer, `layer` does not matter.
typedef struct { int stage, layer; float *out; } llamac_observation;

typedef struct {
    const llamac_observation *observations;   // (n_observations), or NULL
    int n_observations;
    const int32_t *cancel;                    // becomes non-zero when the eval shall stop, or NULL; looked at within milliseconds
    int *rows_done;                           // receives the rows that were finished and kept, or NULL
} llamac_eval_options;

// Computes `n_rows` rows and appends them to their sequences. `logits` receives vocab_size floats for each row that wants them,
// in order. Bits do not depend on how rows are grouped into calls, on threads or on the instruction set.
// On an error in the arguments nothing has changed; on LLAMAC_CANCELLED the rows told by rows_done are kept.
int llamac_eval(llamac_session *session, const llamac_row *rows, int n_rows, float *logits,
                const llamac_eval_options *options, llamac_error *err);

// ---- sampling

typedef struct {
    float temperature;    // 0: the most probable token (the lowest id among equals)
    int top_k;            // 0: off
    float top_p, min_p;   // 1 and 0: off
    uint64_t seed;
} llamac_sampling;
// Draws a token from n logits: temperature, then top-k, top-p, min-p. The draw depends on seed and position alone. `scratch` holds
// n * LLAMAC_SAMPLE_SCRATCH bytes. NaNs and -inf are never drawn. Returns the token, or a negative number if a setting is out of its
// range, if no logit is a finite number, or if any is +inf.
enum { LLAMAC_SAMPLE_SCRATCH = 8 };
int llamac_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, void *scratch, llamac_error *err);
int llamac_sampling_check(const llamac_sampling *sampling, llamac_error *err);

// ---- the machine's limits: loops to be timed by the caller (`llamac bench` does)

// Reads a block `times` times, without software prefetch. Each thread reads its own part, as `streams` (1, 2 or 4) runs side by side.
// `bytes` receives how much was read; what does not divide evenly is left out. The numbers should be neither tiny nor huge.
int llamac_measure_read(const float *block, size_t floats, int times, int threads, int streams, const char *isa, uint64_t *bytes, llamac_error *err);
// The multiply-adds that products with weights of this dtype are made of, with nothing around them: independent sums in registers,
// operands in the first cache, in the instructions of the kernel set (NULL: the best). `count` receives their number, of all threads.
enum { LLAMAC_MEASURE_PASSES = 1 << 20 };
int llamac_measure_multiply(int dtype, int passes, int threads, const char *isa, uint64_t *count, llamac_error *err);

// ---- memory, for tests

// Lets the n-th allocation from now on (in this thread) fail once; 0: none. Returns the number of allocations since the last call.
long llamac_test_fail_allocation(long n);
// Models and sessions that are open in this process.
long llamac_live_objects(void);
#endif
