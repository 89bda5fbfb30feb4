// SPDX-License-Identifier: MIT
// test_tiles.c - models computed by the AMX kernels, with emulated tiles, have the bits of the scalar kernels. The list
// of kernel sets below replaces that of kernels.c, so that sessions can choose the emulated set.
#include "kernels.h"
#include "tiny_model.h"

#if defined(TEST_TABLES)
extern const struct kernels kernels_amx_emulated;
static int has_emulated(void) { return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl"); }
static const struct kernels *emulated_set(void) { return &kernels_amx_emulated; }
#else
static int has_emulated(void) { return 0; }
static const struct kernels *emulated_set(void) { return &kernels_scalar; }
#endif

const struct kernels *kernels_best(void) { return &kernels_scalar; }
const struct kernels *kernels_select(const char *name, llamac_error *e) {
    (void)e;
    return name && !strcmp(name, "amx_emulated") ? emulated_set() : &kernels_scalar;
}
const char *llamac_isa_at(size_t index, int *supported) {
    *supported = 1;
    return index == 0 ? "scalar" : NULL;
}

enum { N = 75 };   // five panels of tiles

// Chunks of 7 to 40 rows have panels of different heights; smaller ones do not use tiles.
static void check_model(const struct tiny_shape *shape, int kv_dtype, int numerics) {
    static const int chunks[] = { 7, 17, 1, 6, 33, 11 };   // N in all
    struct tiny_file file = tiny_model(shape);
    llamac_model *model = open_model(file);
    const int vocab = shape->vocab;
    const size_t bytes = sizeof(float) * (size_t)(vocab * N);
    float *expected = take(bytes), *logits = take(bytes);
    llamac_session_options options = { .n_sequences = 1, .kv_dtype = kv_dtype, .threads = 1, .isa = "scalar",
                                       .numerics = numerics };
    llamac_session *s = open_session_with(model, options);
    prefill(s, 0, N, vocab, expected);
    llamac_session_close(&s);
    for (int threads = 1; threads <= up_to_threads(3); threads++) {
        options.threads = threads, options.isa = "amx_emulated";
        s = open_session_with(model, options);
        prefill(s, 0, N, vocab, logits);
        CHECK(!memcmp(logits, expected, bytes), "%d threads, one prefill", threads);
        CHECK(!llamac_truncate(s, 0, 0, &err), "%s", err.message);
        memset(logits, 0, bytes);
        for (size_t i = 0, start = 0; i < ARRAY_LEN(chunks); start += (size_t)chunks[i++]) {
            llamac_row rows[N];
            for (int r = 0; r < chunks[i]; r++)
                rows[r] = (llamac_row){ token_at(0, (int)start + r, vocab), 0, (int)start + r, 1 };
            CHECK(!llamac_eval(s, rows, chunks[i], logits + start * (size_t)vocab, NULL, &err), "%s", err.message);
        }
        CHECK(!memcmp(logits, expected, bytes), "%d threads, in chunks", threads);
        llamac_session_close(&s);
    }
    free(logits), free(expected);
    llamac_model_close(&model);
    free(file.data);
}

static void models_have_the_same_bits(void) {
    struct tiny_shape experts = tiny_experts;
    experts.dtype = LLAMAC_Q4_K, experts.dim = 288;
    check_model(&tiny_mixed, 0, LLAMAC_EXACT);
    check_model(&tiny_exact, LLAMAC_Q8, LLAMAC_EXACT);
    check_model(&experts, 0, LLAMAC_EXACT), check_model(&experts, 0, LLAMAC_FAST);
}

int main(void) {
    if (!has_emulated()) {
        printf("test_tiles: skipped, needs emulated AMX (build.py --cc clang) and AVX-512 VNNI\n");
        return 0;
    }
    RUN(models_have_the_same_bits);
    return finish_tests("test_tiles");
}
