// SPDX-License-Identifier: MIT
// kernels_sample.h - the passes over all logits that sampling needs. Part of kernels_template.h.

// maxima[b] = the maximum of block b of n floats, -inf if all are NaN. `block` is a multiple of 16. Returns the
// maximum.
static float block_maxima(const float *x, int n, int block, float *maxima) {
    const v16 minus_infinity = v16_set1(-__builtin_inff());
    v16 all = minus_infinity;
    for (int start = 0; start < n; start += block) {
        const int length = min_int(block, n - start);
        v16 top = minus_infinity;   // the second operand, so that a NaN of x does not replace it
        FOR_VECTORS(length, top = v16_max(KEEP(LOAD(x + start + i), minus_infinity), top));
        *maxima++ = v16_reduce_max(top);
        all = v16_max(top, all);
    }
    return v16_reduce_max(all);
}

// Vectors of the compiler: the SIMD layer has no doubles.
#if defined(__AVX512F__)
enum { SAMPLE_LANES = 8 };
#else
enum { SAMPLE_LANES = 4 };
#endif
typedef float sample_f32 __attribute__((vector_size(4 * SAMPLE_LANES)));
typedef double sample_f64 __attribute__((vector_size(8 * SAMPLE_LANES)));
typedef int64_t sample_i64 __attribute__((vector_size(8 * SAMPLE_LANES)));

// a * b + c, rounded once or twice: used only where the last bits do not matter.
#if defined(__AVX512F__)
#define SAMPLE_FMA(a, b, c) (sample_f64)_mm512_fmadd_pd((__m512d)(a), (__m512d)(b), (__m512d)(c))
#elif defined(__FMA__)
#define SAMPLE_FMA(a, b, c) (sample_f64)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c))
#else
#define SAMPLE_FMA(a, b, c) ((a) * (b) + (c))
#endif
#define SAMPLE_SET1(x) ((sample_f64){ 0 } + (x))

enum { SAMPLE_CHUNK = 64 };   // floats between two checks whether a rounding was certain

// y[i] = (float)exp_negative(x') for SAMPLE_CHUNK floats, x' = (x - largest) / temperature, by a polynomial of degree
// 11 and without divisions. As a double, the result differs from exp_negative's by less than 1 part in 2^44. Returns 0
// if that could change the rounding to float.
INLINE int exponentials_certain(const float *x, float largest, double temperature, float *y) {
    static const double coefficients[] = { 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                           1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0 };
    const sample_f64 lowest = SAMPLE_SET1(-110.0), inverse = SAMPLE_SET1(1 / temperature);
    int64_t doubts[SAMPLE_LANES];
    sample_i64 doubt = { 0 };
    for (int i = 0; i < SAMPLE_CHUNK; i += SAMPLE_LANES) {
        sample_f32 v;
        memcpy(&v, x + i, sizeof v);
        // exp(-110) rounds to the float 0, and that is the result for smaller numbers and NaN
        const sample_f64 quotient = __builtin_convertvector(v - largest, sample_f64) * inverse;
        const sample_i64 inside = quotient > lowest;
        const sample_f64 q = (sample_f64)(((sample_i64)quotient & inside) | ((sample_i64)lowest & ~inside));
        const sample_f64 shifted = SAMPLE_FMA(q, SAMPLE_SET1(EXP_LOG2_E), SAMPLE_SET1(EXP_SHIFT));
        const sample_f64 n = shifted - EXP_SHIFT;
        const sample_f64 r =
            SAMPLE_FMA(n, SAMPLE_SET1(-EXP_LN2_LOW), SAMPLE_FMA(n, SAMPLE_SET1(-EXP_LN2_HIGH), q));
        sample_f64 p = SAMPLE_SET1(1.0 / 39916800);
        UNROLL for (int c = 0; c < (int)ARRAY_LEN(coefficients); c++)
            p = SAMPLE_FMA(p, r, SAMPLE_SET1(coefficients[c]));
        p = p * (sample_f64)(((sample_i64)shifted + 1023) << 52);
        const sample_f32 least = __builtin_convertvector(p * (1.0 - 0x1p-44), sample_f32);
        const sample_f32 most = __builtin_convertvector(p * (1.0 + 0x1p-44), sample_f32);
        doubt |= __builtin_convertvector(least != most, sample_i64);
        memcpy(y + i, &most, sizeof most);
    }
    memcpy(doubts, &doubt, sizeof doubts);
    for (int i = 1; i < SAMPLE_LANES; i++) doubts[0] |= doubts[i];
    return doubts[0] == 0;
}

// exponentials of SAMPLE_CHUNK floats; adds them to `sums`.
INLINE void exponentials_chunk(const float *x, float largest, float temperature, float *y, sample_f64 *sums) {
    if (!exponentials_certain(x, largest, (double)temperature, y))
        for (int i = 0; i < SAMPLE_CHUNK; i++)
            y[i] = (float)exp_negative((double)(x[i] - largest) / (double)temperature);
    for (int i = 0; i < SAMPLE_CHUNK; i += SAMPLE_LANES) {
        sample_f32 v;
        memcpy(&v, y + i, sizeof v);
        *sums += __builtin_convertvector(v, sample_f64);
    }
}

static double exponentials(const float *x, int n, float largest, float temperature, float *y) {
    sample_f64 sums = { 0 };
    double sum = 0;
    int done = 0;
    for (; done + SAMPLE_CHUNK <= n; done += SAMPLE_CHUNK)
        exponentials_chunk(x + done, largest, temperature, y + done, &sums);
    if (done < n) {
        float rest[SAMPLE_CHUNK], results[SAMPLE_CHUNK];
        for (int i = 0; i < SAMPLE_CHUNK; i++) rest[i] = done + i < n ? x[done + i] : -__builtin_inff();
        exponentials_chunk(rest, largest, temperature, results, &sums);
        memcpy(y + done, results, sizeof(float) * (size_t)(n - done));
    }
    for (int i = 0; i < SAMPLE_LANES; i++) sum += sums[i];
    return sum;
}
