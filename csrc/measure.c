// SPDX-License-Identifier: MIT
// measure.c - runs a kernel table's measuring loops on the team of threads. Whoever calls keeps the time.
#include "error.h"
#include "session.h"

struct reading { const struct kernels *kernels; const float *block; size_t floats; int times, streams; uint64_t bytes; };

static void read_share(void *argument, const struct member *member) {
    struct reading *r = argument;
    const size_t step = (size_t)r->streams * READ_STEP, part = r->floats / (size_t)member->count / step * step;
    volatile float result;   // so that the reads are not left out
    for (int i = 0; i < r->times; i++) result = r->kernels->read_block(r->block + part * (size_t)member->index, part, r->streams);
    (void)result;
    __atomic_add_fetch(&r->bytes, (uint64_t)r->times * part * sizeof(float), __ATOMIC_RELAXED);
}

struct multiplying { const struct kernels *kernels; int input, passes; uint64_t count; };

static void multiply_share(void *argument, const struct member *member) {
    (void)member;
    struct multiplying *m = argument;
    float result;
    const double count = m->kernels->peak[m->input](m->passes, &result);
    volatile float kept = result;
    (void)kept;
    __atomic_add_fetch(&m->count, (uint64_t)count, __ATOMIC_RELAXED);
}

int llamac_measure_read(const float *block, size_t floats, int times, int threads, int streams, const char *isa, uint64_t *bytes, llamac_error *err) {
    if (session_check_threads(threads, err)) return -1;
    if (times < 0 || (streams != 1 && streams != 2 && streams != 4))
        return err_set(err, LLAMAC_BAD_ARGUMENT, "times is %d, streams %d; expected at least 0, and 1, 2 or 4", times, streams);
    struct reading r = { kernels_select(isa, err), block, floats, times, streams, 0 };
    if (!r.kernels) return -1;
    struct pace fresh = { 0 };
    pool_run(threads, &fresh, NULL, read_share, &r);
    *bytes = r.bytes;
    return 0;
}

int llamac_measure_multiply(int dtype, int passes, int threads, const char *isa, uint64_t *count, llamac_error *err) {
    if (session_check_threads(threads, err)) return -1;
    if (passes < 0 || passes > LLAMAC_MEASURE_PASSES || !llamac_dtype_name(dtype))
        return err_set(err, LLAMAC_BAD_ARGUMENT, "dtype is %d, passes %d; expected a dtype, and 0 to %d", dtype, passes, LLAMAC_MEASURE_PASSES);
    struct multiplying m = { kernels_select(isa, err), input_of(dtype), passes, 0 };
    if (!m.kernels) return -1;
    struct pace fresh = { 0 };
    pool_run(threads, &fresh, NULL, multiply_share, &m);
    *count = m.count;
    return 0;
}
