// SPDX-License-Identifier: MIT
// measure.c - runs the measuring loops of a kernel set on the thread team. The caller takes the time.
#include "error.h"
#include "session.h"

struct read_job {
    const struct kernels *kernels;
    const float *block;
    size_t floats;
    int times, streams;
    uint64_t bytes;   // read by all threads
};

static void read_share(void *argument, const struct member *member) {
    struct read_job *job = argument;
    const size_t step = (size_t)job->streams * READ_STEP, part = job->floats / (size_t)member->count / step * step;
    volatile float result = 0;   // keeps the reads from being optimized away
    for (int i = 0; i < job->times; i++)
        result = job->kernels->read_block(job->block + part * (size_t)member->index, part, job->streams);
    (void)result;
    __atomic_add_fetch(&job->bytes, (uint64_t)job->times * part * sizeof(float), __ATOMIC_RELAXED);
}

struct multiply_job {
    const struct kernels *kernels;
    int input, fast, passes;
    uint64_t count;   // multiply-adds of all threads
};

static void multiply_share(void *argument, const struct member *member) {
    (void)member;
    struct multiply_job *job = argument;
    float result;
    const double count = job->kernels->peak[job->input][job->fast](job->passes, &result);
    volatile float used = result;   // keeps the loop from being optimized away
    (void)used;
    __atomic_add_fetch(&job->count, (uint64_t)count, __ATOMIC_RELAXED);
}

int llamac_measure_read(const float *block, size_t floats, int times, int threads, int streams, const char *isa,
                        uint64_t *bytes, llamac_error *err) {
    if (session_check_threads(threads, err)) return -1;
    if (times < 0) return bad_argument(err, "times is %d, expected 0 or more", times);
    if (streams != 1 && streams != 2 && streams != 4)
        return bad_argument(err, "streams is %d, expected 1, 2 or 4", streams);
    struct read_job job = { .kernels = kernels_select(isa, err), .block = block, .floats = floats, .times = times,
                            .streams = streams };
    if (!job.kernels) return -1;
    struct contention contention = { 0 };
    pool_run(&(struct pool_job){ threads, 0, read_share, &job }, &contention, NULL);
    *bytes = job.bytes;
    return 0;
}

int llamac_measure_multiply(int dtype, int numerics, int passes, int threads, const char *isa, uint64_t *count,
                            llamac_error *err) {
    if (session_check_threads(threads, err) || session_check_numerics(numerics, err)) return -1;
    if (!llamac_dtype_name(dtype))
        return bad_argument(err, "dtype is %d, expected 1 to %d", dtype, LLAMAC_N_DTYPES - 1);
    if (passes < 0 || passes > LLAMAC_MAX_PASSES)
        return bad_argument(err, "passes is %d, expected 0 to %d", passes, LLAMAC_MAX_PASSES);
    struct multiply_job job = { .kernels = kernels_select(isa, err), .input = input_type_of(dtype),
                                .fast = numerics == LLAMAC_FAST, .passes = passes };
    if (!job.kernels) return -1;
    struct contention contention = { 0 };
    pool_run(&(struct pool_job){ threads, 0, multiply_share, &job }, &contention, NULL);
    *count = job.count;
    return 0;
}
