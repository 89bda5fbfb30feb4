// SPDX-License-Identifier: MIT
// llamac.h - the public interface of the C core: language models and encoders over borrowed memory.
//
// examples/c/generate.c is a whole program. docs/c.md says how to build and link the library.
//
// Errors. Unless its comment says otherwise, a function that returns int and takes `err` returns 0 on success. On
// failure it returns a negative number and fills `err`, which may be NULL. The message says what is wrong, where, and
// what was expected. Comments list the codes that a function can set. On success `err` is not written.
//
// Ownership. A caller closes what it opened: sessions before their model. Closing a model that still has sessions, or
// using anything after it was closed, is undefined. An argument is read or written during the call only, unless the
// comment says that it is borrowed for longer. Returned strings and the table of llamac_fields are never freed.
//
// Threads. A model that has sessions is immutable: any number of sessions and threads may use it at once. Adapt it
// before. A session is mutable: one thread at a time may use it, and any thread may be that one. Functions without a
// model and a session may be called by several threads at once if these write to different buffers. The library's own
// threads are started by the first eval that uses several and live until the process ends, so the shared library is
// never unloaded. A process that was forked while no eval ran can continue to use its sessions and models.
//
// The core does not print, open files, end the process or read the environment.
#ifndef LLAMAC_H
#define LLAMAC_H
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef LLAMAC_EXPORTS   // while libllamac is built: nothing but this header is visible outside
#pragma GCC visibility push(default)
#endif

// ---- versions (docs/c.md says what a change of each means)

#define LLAMAC_VERSION_MAJOR 0
#define LLAMAC_VERSION_MINOR 1
#define LLAMAC_VERSION_PATCH 0
#define LLAMAC_VERSION (10000 * LLAMAC_VERSION_MAJOR + 100 * LLAMAC_VERSION_MINOR + LLAMAC_VERSION_PATCH)
// The order of all floating-point operations of the forward pass. Libraries with the same number compute the same bits.
#define LLAMAC_NUMERICS 1

// Return LLAMAC_VERSION and LLAMAC_NUMERICS of the library, which can be another one than the header's.
int llamac_version(void);
int llamac_numerics(void);

typedef struct llamac_model llamac_model;
typedef struct llamac_session llamac_session;

enum llamac_code {
    LLAMAC_OK,
    LLAMAC_NO_MEMORY,
    LLAMAC_BAD_ARGUMENT,
    LLAMAC_BAD_MODEL,
    LLAMAC_CONTEXT_FULL,
    LLAMAC_CANCELLED,
    LLAMAC_UNSUPPORTED,    // by this build, this machine or this version
    LLAMAC_DEVICE_FAILED   // the message is the device's (device.h)
};

typedef struct {
    int code;              // enum llamac_code
    char message[400];     // zero-terminated
} llamac_error;

// ---- dtypes: how the file and the KV cache store numbers

enum llamac_dtype {
    LLAMAC_F32 = 1,
    LLAMAC_F16,
    LLAMAC_BF16,
    LLAMAC_Q8,             // 8-bit codes, a scale per 32 columns
    LLAMAC_Q4,             // 4-bit codes, a scale per 16 columns
    LLAMAC_Q4S,            // 4-bit codes, a scale per 32 columns
    // GGUF types of the same names and with the same values, rearranged into strips
    LLAMAC_Q4_0, LLAMAC_Q4_1, LLAMAC_Q5_0, LLAMAC_Q5_1, LLAMAC_Q8_0, LLAMAC_Q4_K, LLAMAC_Q5_K, LLAMAC_Q6_K,
    LLAMAC_IQ4_NL, LLAMAC_IQ4_XS, LLAMAC_MXFP4,
    LLAMAC_Q6,             // 6-bit codes, a scale per 32 columns
    LLAMAC_Q3, LLAMAC_Q2, LLAMAC_T2,   // 3 and 2 bits, a scale per 16 columns; ternary in 2 bits, a scale per row
    LLAMAC_N_DTYPES
};

// Returns "f32", "f16", ..., or NULL if `dtype` is not an enum llamac_dtype.
const char *llamac_dtype_name(int dtype);

// Returns the bytes of a matrix (rows, columns) in strips of 16 rows, or 0 if there is no such dtype or they overflow.
size_t llamac_matrix_bytes(int dtype, uint64_t rows, uint64_t columns);

// Quantizes a matrix to strips of q8, q6, q4, q4s, q3, q2 or t2. The bytes of a strip depend on its own 16 rows only:
// threads may quantize parts of a matrix at the same time if each part starts at a multiple of 16 rows.
//     w            (rows, columns): finite, magnitudes below 2^120
//     importance   (columns): the weight of each column's squared error, >= 0; NULL: 1 for all
//     feedback     (columns, columns): column j > i compensates the error of column i times feedback[i][j] (GPTQ);
//                  NULL: no compensation; q8, q6 and t2 require NULL
//     isa          the kernel set; NULL: the best of this processor. It does not change the bytes.
//     out          receives llamac_matrix_bytes(dtype, rows, columns) bytes
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_NO_MEMORY, LLAMAC_UNSUPPORTED.
int llamac_quantize(int dtype, const float *w, size_t rows, size_t columns, const float *importance,
                    const float *feedback, const char *isa, void *out, llamac_error *err);

// ---- GGUF's blocks

// Returns the bytes of a row of GGUF blocks, or 0 if `dtype` is not a GGUF type (LLAMAC_Q4_0 to LLAMAC_MXFP4) or
// `columns` is not a multiple of the block size.
size_t llamac_gguf_row_bytes(int dtype, uint64_t columns);

// Regroups rows of GGUF blocks into strips of the dtype with the same name. Values do not change. Threads may regroup
// parts of a matrix at the same time if each part starts at a multiple of 16 rows.
//     blocks    (rows, llamac_gguf_row_bytes(dtype, columns)) bytes of any alignment; blocks_size: their number
//     strips    receives llamac_matrix_bytes(dtype, rows, columns) bytes; strips_size: their number
// Returns 1, or 0 if a scale or a minimum, and so a weight, is not finite. Error: LLAMAC_BAD_ARGUMENT.
int llamac_regroup(int dtype, const void *blocks, size_t blocks_size, size_t rows, size_t columns, void *strips,
                   size_t strips_size, llamac_error *err);

// The inverse: restores every bit of the blocks. Error: LLAMAC_BAD_ARGUMENT.
int llamac_ungroup(int dtype, const void *strips, size_t strips_size, size_t rows, size_t columns, void *blocks,
                   size_t blocks_size, llamac_error *err);

// ---- the file format, described for readers and writers

enum llamac_type {
    LLAMAC_TYPE_U32,
    LLAMAC_TYPE_I32,
    LLAMAC_TYPE_F32,
    LLAMAC_TYPE_U64,
    LLAMAC_TYPE_BYTES,
    LLAMAC_TYPE_TEXT       // zero-padded ASCII
};

// A field of one of the file's records.
typedef struct {
    const char *record;    // "header", "section", "config", "layer" or "tensor"
    const char *name;
    int type;              // enum llamac_type
    uint32_t offset;       // bytes from the start of the record
    uint32_t count;        // elements
    double min, max;       // range of each element, if the elements are numbers
    const char *names;     // enumerations: names of the values min, min + 1, ..., separated by commas; otherwise NULL
} llamac_field;

// Returns the table of all fields. *n receives its length.
const llamac_field *llamac_fields(size_t *n);
// Returns the bytes of a record (the header without its section table), or 0 if there is no such record.
size_t llamac_record_bytes(const char *record);
// Returns the names of the file's sections in order: "config", ..., "data"; NULL past the end.
const char *llamac_section_at(size_t index);

// A tensor that a config requires or allows.
typedef struct {
    char name[64];
    int required;          // 0: optional
    int is_matrix;         // 1: strips of any dtype; 0: a vector of f32
    uint64_t rows, columns;   // a vector has 1 row
} llamac_slot;

// Iterates over the slots of a config. Initialize .config and .layers. The other members belong to llamac_slot_next.
typedef struct {
    const void *config;    // one config record
    const void *layers;    // n_layers + mtp_layers layer records
    uint32_t group, index, layer, expert, next;   // index: of the RoPE table or pooled layer
} llamac_slot_iterator;

// Writes the next slot, in the order of the file. The config and the layers need not be valid. Returns 1 if there was
// one, 0 at the end, and -1 if there are more RoPE tables, pooled layers or experts than the format allows.
int llamac_slot_next(llamac_slot_iterator *iterator, llamac_slot *slot);

// ---- models

// Opens a model over a flat file in memory, aligned to 64 bytes. Borrows the memory until llamac_model_close.
//
// Checks the whole structure of the file but reads neither tensor data nor texts. The core copies the structure, then
// checks and uses the copy. The memory may therefore be a shared mapping of a file that others can write to: if they
// change tensor data, results are wrong; other changes have no effect. The file must not shrink: reading a page past
// the end of a truncated file raises SIGBUS.
//
// On failure *model is NULL. Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_BAD_MODEL, LLAMAC_UNSUPPORTED, LLAMAC_NO_MEMORY.
int llamac_model_open(llamac_model **model, const void *data, size_t bytes, llamac_error *err);

// Closes a model whose sessions are closed and sets *model to NULL. Accepts NULL in *model.
void llamac_model_close(llamac_model **model);

enum { LLAMAC_MAX_STOP_IDS = 16 };

typedef struct {
    int context;           // positions that the model was trained for
    int n_layers;
    int vocab_size;        // logits of a row
    int n_token_ids;       // the first logits, those of tokens; the others are padding and must not be drawn
    int bos_id;            // the token that begins a text; -1: none
    int add_bos;           // 1: the tokenizer puts bos_id before a text
    int n_stop_ids;
    int32_t stop_ids[LLAMAC_MAX_STOP_IDS];   // (n_stop_ids): a text ends at any of these
    int has_mtp;           // 1: there is an MTP layer (llamac_session_options)
    int is_drafter;        // 1: the file only drafts, in a session beside another model's (llamac_session_options)
} llamac_model_info;

// Fills *info with what a caller needs to know of a model.
void llamac_model_describe(const llamac_model *model, llamac_model_info *info);

// Returns the checked copy of the file's first bytes: header, section table, config, layers and tensor table, at their
// offsets in the file. *bytes receives its size. The copy belongs to the model. Unlike the file, it cannot change.
const void *llamac_model_tables(const llamac_model *model, size_t *bytes);

// Limit (0: do not), and return, the bytes of KV pages of all sessions of a model except those of its MTP layer. The
// limit applies separately to host memory and a device, whose sum is returned. A shared page counts once. An eval that
// needs more fails with LLAMAC_NO_MEMORY. Any thread may call these functions at any time.
void llamac_set_kv_budget(llamac_model *model, size_t bytes);
size_t llamac_kv_bytes(const llamac_model *model);

enum { LLAMAC_MAX_RANK = 4096 };

// Adds a low-rank adapter to a matrix W (rows, columns): its products become scales * (W x) + b (a x). For an
// embedding, row r becomes W[r] + b[r] a. Call this before the model's first session, at most once per matrix. All
// buffers are borrowed until llamac_model_close.
//     matrix   name of a tensor. "output.weight" also names the output matrix of a model with tied output
//     a        (rank, columns), f32 in strips; for an embedding (columns, rank)
//     b        (rows, rank), f32 in strips
//     scales   (rows), or NULL for 1; an embedding requires NULL
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_NO_MEMORY.
int llamac_model_adapt(llamac_model *model, const char *matrix, int rank, const void *a, size_t a_bytes, const void *b,
                       size_t b_bytes, const float *scales, size_t n_scales, llamac_error *err);

// Replaces a tensor's data in the file with `data`, or adds an optional tensor that the file does not have: strips of
// any dtype for a matrix, f32 for a vector. A tied output matrix does not change with the embedding: call this also for
// "output.weight" to replace it. Call this before the model's first session. `data` is borrowed until
// llamac_model_close. Error: LLAMAC_BAD_ARGUMENT.
int llamac_model_replace(llamac_model *model, const char *tensor, int dtype, const void *data, size_t bytes,
                         llamac_error *err);

// ---- this build and this machine

// Returns the name of a kernel set of this build, best first: "avx2", ..., "scalar"; NULL past the end. *supported
// receives whether this machine can run the set.
const char *llamac_isa_at(size_t index, int *supported);

// Returns whether this build can use more than one thread (OpenMP).
int llamac_has_threads(void);

// Sets the NUMA node of each CPU, on machines with several nodes: node_of_cpu[i] for CPU i. The core's threads then
// stay on their nodes and are divided among them in proportion to the CPUs; threads that call this library are not
// moved. Call this at most once, before the first eval and while no other thread uses it. Error: LLAMAC_BAD_ARGUMENT.
int llamac_set_nodes(const int32_t *node_of_cpu, int n_cpus, llamac_error *err);

// ---- sessions: sequences of tokens with their KV cache, and the scratch memory of evals

// How products round their inputs. The two settings give different logits, each with the same bits on every machine.
enum {
    LLAMAC_EXACT,          // products with q8, q6 and GGUF types use 15-bit inputs and round only inputs and sums
    LLAMAC_FAST            // 8-bit inputs for these, bf16 inputs for products with bf16 (docs/determinism.md)
};

typedef struct {
    int n_sequences;       // independent sequences, 1 to 65536
    int context;           // positions per sequence, at most the model's; 0: the model's
    int kv_dtype;          // LLAMAC_F32, LLAMAC_F16 or LLAMAC_Q8: an int8 per number, an f16 scale per 32 numbers of a
                           // key and one per value (docs/quantization.md);
                           // 0: f32 if all matrices are f32, or for encoders and rerankers; otherwise f16
    int threads;           // maximum number of threads of an eval, 1 to 1024
    const char *isa;       // kernel set; NULL: the best that this machine can run
    int numerics;          // LLAMAC_EXACT or LLAMAC_FAST
    int on_device;         // 1: on the device of llamac_model_use_device (device.h)
    int mtp;               // 1: of the model's MTP layer: evals need `inputs`, pages on the CPU have no budget
    const llamac_session *trunk;   // for a drafter: the session that it drafts for, whose device it uses; otherwise
                           // NULL. An assistant reads the trunk's keys and values, and has the trunk's context and
                           // kv_dtype. Its rows are at the position after the last one of the trunk's sequence; they
                           // are not appended
    const llamac_model *drafter;   // or NULL: an EAGLE-3 head that drafts for this session, which gives it `hidden`
} llamac_session_options;

// Opens a session. The model must stay open longer than the session. So must a trunk, which must not compute during the
// session's evals. On failure *session is NULL.
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED, LLAMAC_NO_MEMORY.
int llamac_session_open(llamac_session **session, const llamac_model *model, const llamac_session_options *options,
                        llamac_error *err);

// Closes a session and sets *session to NULL. Accepts NULL in *session.
void llamac_session_close(llamac_session **session);

typedef struct {
    int context;           // positions per sequence
    int kv_dtype;          // LLAMAC_F32, LLAMAC_F16 or LLAMAC_Q8
    int threads;
    const char *isa;       // kernel set
    int numerics;          // LLAMAC_EXACT or LLAMAC_FAST
    size_t scratch_bytes;  // allocated for activations
    size_t kv_bytes;       // of the KV pages of sequences and drafts; a page that n of them share counts n times
    int page_positions;    // positions per KV page
    size_t page_bytes;     // of the KV pages of all layers for the same positions
} llamac_session_info;

// Fills *info with the options in effect and the memory in use.
void llamac_session_describe(const llamac_session *session, llamac_session_info *info);

// Sets the number of threads for later evals. Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED.
int llamac_set_threads(llamac_session *session, int threads, llamac_error *err);

// Returns the length of a sequence in positions, or -1 if there is no such sequence.
int llamac_length(const llamac_session *session, int sequence);

// Returns the length from which on a sequence can be truncated to any length; -1 if there is no such sequence. Layers
// with a window keep the positions in their window and, unless llamac_shift removed them, at least the 256 before them.
// So it is 0 without windows, and at most the length - 256 without shifts; with recurrent layers it is the length.
int llamac_shortest_length(const llamac_session *session, int sequence);

// Returns the largest length, up to `length`, that a sequence can be truncated to: `length` from llamac_shortest_length
// on, a length after which the recurrent layers' state is kept, or 0. Returns -1 if there is no such position.
int llamac_cut_length(const llamac_session *session, int sequence, int length);

// Discards the positions of a sequence from `length` on, which llamac_cut_length permits. Error: LLAMAC_BAD_ARGUMENT.
int llamac_truncate(llamac_session *session, int sequence, int length, llamac_error *err);

// Makes a sequence equal to the first `length` positions of another one, of the same session or of another session of
// the same model with the same kv_dtype. The target's previous content is discarded. Nothing is copied: both share the
// same pages, and a page is copied on the first write. Later results have the same bits as if the prefix had been
// computed again. Both sessions must be on a device, or neither. The caller must be the only user of both sessions
// during the call. length: as for llamac_truncate. Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_CONTEXT_FULL.
int llamac_fork(llamac_session *to, int to_sequence, const llamac_session *from, int from_sequence, int length,
                llamac_error *err);

// Removes the positions [begin, end) of a sequence and moves the later ones down by end - begin, so that generation can
// continue when the context is full. Stored keys are rotated from their old positions to the new ones and stored again;
// values are copied. The keys and values of the moved tokens still depend on the removed ones, so results differ from
// recomputing the remaining tokens. Each shift rounds keys once more to the cache's dtype. Shared pages are copied
// first; if that fails, the sequence is unchanged. Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED, LLAMAC_NO_MEMORY,
// and device errors. If the device fails while positions are moved, the sequence becomes empty.
int llamac_shift(llamac_session *session, int sequence, int begin, int end, llamac_error *err);

// Checks whether sequences of a model can be shifted. Models with learned positions or recurrent layers cannot, nor can
// models with a norm after RoPE that does not commute with it. Error: LLAMAC_UNSUPPORTED.
int llamac_shift_check(const llamac_model *model, llamac_error *err);

// Returns the most positions that llamac_shift can remove from position `begin` on, other than all; -1 if there is no
// such position. After removing more, the next token would see positions that layers with a window have dropped.
int llamac_longest_shift(const llamac_session *session, int sequence, int begin);

// ---- evals

// A token to compute.
typedef struct {
    int32_t token;         // id, below vocab_size
    int32_t sequence;      // index, below n_sequences
    int32_t position;      // the sequence's length, plus the number of its rows earlier in the same call
    int32_t want_logits;   // 0 or 1
} llamac_row;

// The stages of the graph, in the order in which they are computed. In parentheses: the shape of one row.
enum llamac_stage {
    LLAMAC_STAGE_EMBEDDING,     // (dim): the token's embedding, plus the position's embedding if positions are learned

    // once per layer
    LLAMAC_STAGE_ATTN_NORM,     // (dim): the input of q, k and v, normed or not
    LLAMAC_STAGE_Q,             // (n_heads, head_dim): after norm and RoPE
    LLAMAC_STAGE_K,             // (n_kv_heads, head_dim): after norm and RoPE
    LLAMAC_STAGE_V,             // (n_kv_heads, head_dim)
    LLAMAC_STAGE_CACHE_K,       // (n_kv_heads, head_dim): the row's keys as the cache stores them
    LLAMAC_STAGE_CACHE_V,       // (n_kv_heads, head_dim): the row's values as the cache stores them
    LLAMAC_STAGE_SCORES,        // (n_heads, context): scaled and capped q k; -inf at positions the row does not see
    LLAMAC_STAGE_ATTN_MIX,      // (n_heads, head_dim): each head's weighted sum of values, times its gate. In recurrent
                                // layers (state_heads, state_value_dim); padded with zeros, like the six stages before
    LLAMAC_STAGE_ATTN_OUT,      // (dim): after the output projection, before its norm
    LLAMAC_STAGE_FFN_NORM,      // (dim): the input of the feed-forward network
    LLAMAC_STAGE_FFN_ROUTER,    // (largest n_experts): the router's logits, padded with zeros
    LLAMAC_STAGE_FFN_HIDDEN,    // (largest hidden size): after the activation, padded with zeros; with experts, ffn_dim
                                // values for each of the row's experts, in ascending order
    LLAMAC_STAGE_FFN,           // (dim): the output of the feed-forward network
    LLAMAC_STAGE_BLOCK,         // (dim): the residual stream after the layer

    // only for rows that want logits
    LLAMAC_STAGE_OUTPUT_NORM,   // (dim)
    LLAMAC_STAGE_LOGITS,        // (vocab_size): scaled and capped
    LLAMAC_N_STAGES
};

// Returns "embedding", "attn_norm", ..., or NULL if `stage` is not an enum llamac_stage.
const char *llamac_stage_name(int stage);

// Returns the floats per row of a stage in this session; 0 if there is no such stage or this model does not have it.
// *per_layer receives whether the stage exists once per layer; it is not written if there is no such stage.
size_t llamac_stage_width(const llamac_session *session, int stage, int *per_layer);

// A request to copy one stage of one layer. An eval can have one observation per stage and layer.
typedef struct {
    int stage;             // enum llamac_stage
    int layer;             // ignored for stages that do not exist per layer
    float *out;            // (rows, llamac_stage_width): of all rows, or of those that want logits
} llamac_observation;

typedef struct {
    const llamac_observation *observations;   // (n_observations), or NULL if there are none
    int n_observations;
    const int32_t *cancel; // or NULL; another thread atomically sets it to nonzero to cancel the eval in milliseconds
    int *rows_done;        // receives the number of computed rows; or NULL
    const float *inputs;   // (n_rows, dim): in place of LLAMAC_STAGE_EMBEDDING, only on the CPU; or NULL. For the MTP
                           // layer, also on a device: the hidden state before each row's token; for a drafter likewise,
                           // (n_rows, trunk_dim); for an EAGLE-3 head (n_rows, dim), its own after a draft, or NULL
    const float *states;   // for an EAGLE-3 head (n_rows, 3 trunk_dim): the `hidden` of its trunk's eval; or NULL
    const int32_t *types;  // (n_rows): the rows of the type embedding, if the model has one; or NULL: 0
    float *hidden;         // (n_hidden, dim): receives the hidden states of the last n_hidden rows, the output of the
                           // final norm, whether or not they want logits; or NULL. Not for encoders and
                           // rerankers.
                           // For a drafter (n_hidden, trunk_dim): the states that replace them in the next draft; for
                           // an EAGLE-3 head (n_hidden, dim), and for a trunk with one (n_hidden, 3, dim)
    int n_hidden;          // at most n_rows
} llamac_eval_options;

// Computes rows and appends them to their sequences. The bits of the results do not depend on how rows are grouped
// into calls, on the number of threads or on the kernel set.
//     logits    (rows that want logits, vocab_size), in the order of the rows. NULL if no row wants them, or if the
//               caller only observes output_norm; the output matrix is then not read
//     options   NULL: no observations, no cancellation
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED, LLAMAC_CONTEXT_FULL, LLAMAC_NO_MEMORY: no sequence has changed.
// LLAMAC_CANCELLED and device errors: the first *rows_done rows have been computed and appended.
int llamac_eval(llamac_session *session, const llamac_row *rows, int n_rows, float *logits,
                const llamac_eval_options *options, llamac_error *err);

// ---- trees of draft tokens, for speculative decoding

// A draft: a token that may follow a sequence. Computing it does not append it.
typedef struct {
    int32_t token;         // id, below vocab_size
    int32_t sequence;      // index, below n_sequences
    int32_t parent;        // index of the draft that it follows; -1: it follows the sequence's last position
    int32_t want_logits;   // 0 or 1
} llamac_draft;

enum { LLAMAC_MAX_DRAFTS = 256 };   // in one call

// Computes drafts in one pass. A draft is at the position after its parent's. It sees its sequence, its ancestors and
// itself. Its results have the same bits as if its ancestors had been appended to the sequence. The drafts are in
// depth-first order: the parent of each is the previous draft, one of that draft's ancestors, or -1. No sequence
// changes. Each path needs a copy of the sequence's partial last page, each draft of a recurrent model a state's page.
//     logits    (drafts that want logits, vocab_size), in the order of the drafts; NULL if none wants them
//     options   as for llamac_eval; *rows_done receives n_drafts or 0
// Errors: those of llamac_eval; LLAMAC_UNSUPPORTED also for an assistant. On failure there are no drafts.
int llamac_eval_drafts(llamac_session *session, const llamac_draft *drafts, int n_drafts, float *logits,
                       const llamac_eval_options *options, llamac_error *err);

// Accepts a draft of the last llamac_eval_drafts, given by its index: appends the draft's ancestors and the draft to
// the sequence as it was at that call. Nothing is computed. Drafts can be accepted until the next eval of any kind,
// truncation, shift, or fork into the session discards them. Error: LLAMAC_BAD_ARGUMENT.
int llamac_accept(llamac_session *session, int draft, llamac_error *err);

// ---- sampling

typedef struct {
    float temperature;     // 0: the most probable token; ties go to the lowest id
    int top_k;             // 0: off
    float top_p;           // above 0; 1: off
    float min_p;           // 0 to 1; 0: off
    uint64_t seed;
    uint32_t candidate;      // selects one of several independent draws with the same seed
    float typical_p;         // 0 or 1: off
    float xtc_probability;   // 0: off
    float xtc_threshold;     // 0 to 1
    float mirostat_tau;      // target surprise in bits; 0: off
    float mirostat_eta;      // 0 to 1
} llamac_sampling;

enum { LLAMAC_SAMPLE_SCRATCH = 16 };   // bytes of scratch per logit

// Draws a token: temperature, then top-k, top-p, min-p, typical-p and XTC; or temperature, then mirostat v2. The draw
// depends only on the logits, the settings, `position`, and with mirostat *mu. Tokens whose logit is NaN or -inf are
// never drawn.
//     logits    (n)
//     mu        mirostat's surprise limit in bits, updated by each draw; initially 2 * mirostat_tau. NULL: no mirostat
//     scratch   n * LLAMAC_SAMPLE_SCRATCH bytes, aligned for floats
// Returns the token, or a negative number. Errors: LLAMAC_BAD_ARGUMENT if n or a setting is out of range;
// LLAMAC_BAD_MODEL if a logit is +inf, or all are NaN or -inf.
int llamac_sample(const float *logits, int n, const llamac_sampling *sampling, uint64_t position, double *mu,
                  void *scratch, llamac_error *err);

typedef struct {
    int32_t id;
    double logprob;   // natural logarithm; -inf for a token that is never drawn
} llamac_logprob;

// Writes the log probability of a token, then those of the `top` most probable tokens, best first. Probabilities are
// the softmax of the logits, without temperature and filters.
//     logits    (n)
//     out       (1 + top)
//     scratch   n * LLAMAC_SAMPLE_SCRATCH bytes, aligned for floats
// Returns the number of most probable tokens written: `top`, or fewer if fewer tokens can be drawn; on failure a
// negative number. Errors: LLAMAC_BAD_ARGUMENT if n, a token or `top` is out of range; those of llamac_sample.
int llamac_logprobs(const float *logits, int n, int32_t token, int top, llamac_logprob *out, void *scratch,
                    llamac_error *err);

// Checks the settings. Error: LLAMAC_BAD_ARGUMENT.
int llamac_sampling_check(const llamac_sampling *sampling, llamac_error *err);

// ---- adjusting logits before they are sampled

typedef struct {
    const int32_t *bias_ids;        // (n_bias)
    const float *bias;              // (n_bias): finite, or -inf to ban the token
    int n_bias;
    float repetition_penalty;       // above 0; 1: off
    float presence_penalty;         // 0: off
    float frequency_penalty;        // 0: off
    float dry_multiplier;           // 0: off
    float dry_base;                 // at least 1
    int dry_allowed_length;         // at least 1
    const uint8_t *dry_breakers;    // a bit per token, the lowest of a byte first; NULL: none
} llamac_adjustments;

// The context of a draw: the tokens before it, and the tokens that may come next.
typedef struct {
    const int32_t *ids;        // (n_ids): the prompt, then the generated tokens
    int n_ids, n_prompt;
    const int32_t *banned;     // (n_banned): tokens that must not come next
    int n_banned;
    const uint8_t *allowed;    // a bit per token that may come next, the lowest of a byte first; NULL: all
    int n_allowed;             // bits; tokens without one are not allowed
} llamac_history;

// Adjusts logits in this order:
//   1. adds the bias;
//   2. for tokens in the history, divides positive and multiplies negative logits by repetition_penalty;
//   3. for generated tokens, subtracts presence_penalty, and frequency_penalty for each occurrence;
//   4. for a token that would continue a repetition of the last `length` tokens (at most 50, without breakers),
//      subtracts dry_multiplier * dry_base^(length - dry_allowed_length) if length >= dry_allowed_length;
//   5. sets the logits of banned tokens, and of tokens that are not allowed, to -inf.
// Ids outside 0 to n - 1 are ignored.
//     logits    (n)
//     scratch   n * LLAMAC_SAMPLE_SCRATCH bytes, aligned for floats
void llamac_adjust_logits(float *logits, int n, const llamac_adjustments *adjustments, const llamac_history *history,
                          void *scratch);

// A draw from a row of logits, and its result.
typedef struct {
    const float *logits;                     // (n); not modified
    const llamac_sampling *sampling;
    const llamac_adjustments *adjustments;   // NULL: none
    const llamac_history *history;           // with adjustments
    double *mu;                              // as for llamac_sample
    uint64_t position;
    int token;                               // the result of llamac_sample
    llamac_error err;                        // its error if the token is negative
} llamac_draw;

enum { LLAMAC_DRAW_SCRATCH = LLAMAC_SAMPLE_SCRATCH + 4 };   // bytes of scratch per logit and thread

// Returns how many of `threads` threads llamac_draw_rows uses: fewer for little work.
int llamac_draw_threads(int rows, int n, int threads);

// Adjusts and draws each row's token, on several threads. The tokens are the same for every number of threads.
//     scratch   llamac_draw_threads(rows, n, threads) * n * LLAMAC_DRAW_SCRATCH bytes, aligned for floats
void llamac_draw_rows(llamac_draw *draws, int rows, int n, int threads, void *scratch);

// Checks the adjustments. Error: LLAMAC_BAD_ARGUMENT.
int llamac_adjustments_check(const llamac_adjustments *adjustments, llamac_error *err);

// ---- measuring the machine: the caller measures the time

// Reads a block `times` times without software prefetch. Each thread reads its own part as 1, 2 or 4 concurrent
// streams, with the kernel set `isa` (NULL: the best). *bytes receives the bytes that were read; a remainder that does
// not divide evenly is skipped. Sums of the values must neither overflow nor become subnormal, which is slow. Errors:
// LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED.
int llamac_measure_read(const float *block, size_t floats, int times, int threads, int streams, const char *isa,
                        uint64_t *bytes, llamac_error *err);

enum { LLAMAC_MAX_PASSES = 1 << 20 };
// Runs only the multiply-adds of products of many rows with weights of a dtype: independent sums in registers, operands
// in L1. numerics: LLAMAC_EXACT or LLAMAC_FAST. passes: 0 to LLAMAC_MAX_PASSES. *count receives the number of
// multiply-adds of all threads. Other arguments and errors: as for llamac_measure_read.
int llamac_measure_multiply(int dtype, int numerics, int passes, int threads, const char *isa, uint64_t *count,
                            llamac_error *err);

// ---- self-test: small models that the library builds itself, with their recorded logits

typedef struct {
    const char *name;      // what the model stores and how it computes: "q8", "f16, KV cache in q8", ...
    const char *sha256;    // of its logits on every machine: 64 hexadecimal digits
} llamac_selftest_case;

// Fills *test with a case. Returns 1, or 0 if there is no such case.
int llamac_selftest_at(size_t index, llamac_selftest_case *test);

// How to compute a case. It does not change the bits.
typedef struct {
    const char *isa;       // kernel set; NULL: the best that this machine can run
    int threads;           // 1 to 1024
    int chunk;             // positions per eval, at least 1
    int sequences;         // copies of the input that are computed side by side, 1 to 16
} llamac_selftest_options;

enum { LLAMAC_SHA256_DIGITS = 65 };   // with the terminating zero

// Computes a case. sha256 receives the digest of the logits: the recorded one, unless those of a sequence differ.
// Errors: LLAMAC_BAD_ARGUMENT, LLAMAC_UNSUPPORTED, LLAMAC_NO_MEMORY.
int llamac_selftest(size_t index, const llamac_selftest_options *options, char sha256[LLAMAC_SHA256_DIGITS],
                    llamac_error *err);

#ifdef LLAMAC_EXPORTS
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
#endif
