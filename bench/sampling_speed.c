// SPDX-License-Identifier: MIT
// sampling_speed.c - times sample_with for bench/sampling.py. Arguments: entries, rounds, kernel set ("": the best).
// Prints a line per case, separated by tabs: kernel set, distribution, settings, best and median milliseconds.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "common.h"
#include "sampler.h"

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}
static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double uniform(void) { return (rand() + 0.5) / (RAND_MAX + 1.0); }
static double normal(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }

static void fill(float *x, int n, const char *distribution) {
    srand(1);
    for (int i = 0; i < n; i++) {
        const double z = normal();
        switch (distribution[0]) {
        case 't': x[i] = (float)(2 * z + (i % 400 == 7 ? 6 : 0) + (i == n / 2 ? 18 : 0)); break;
        case 'w': x[i] = (float)(1.5 * z); break;
        case 'f': x[i] = (float)(0.05 * z); break;
        default: x[i] = 0;
        }
    }
}

int main(int argc, char **argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 1000, rounds = argc > 2 ? atoi(argv[2]) : 3;
    const char *isa = argc > 3 && argv[3][0] ? argv[3] : NULL;
    llamac_error err;
    const struct kernels *kernels = kernels_select(isa, &err);
    const char *const distributions[] = { "text", "wide", "flat", "equal" };
    const llamac_sampling settings[] = {
        { .temperature = 0, .top_p = 1 },
        { .temperature = 1, .top_p = 1 },
        { .temperature = 1, .top_p = 0.9f },
        { .temperature = 1, .top_p = 1, .top_k = 40 },
        { .temperature = 1, .top_p = 1, .min_p = 0.05f },
        { .temperature = 1, .top_p = 0.9f, .top_k = 40, .min_p = 0.05f },
        { .temperature = 1, .top_p = 0.9f, .min_p = 0.05f },
        { .temperature = 1, .top_p = 0.9f, .top_k = n / 2 },
        { .temperature = 1, .top_p = 1, .typical_p = 0.9f },
        { .temperature = 1, .top_p = 0.95f, .typical_p = 0.9f },
        { .temperature = 1, .top_p = 1, .xtc_probability = 1, .xtc_threshold = 0.1f },
        { .temperature = 1, .top_p = 1, .mirostat_tau = 5, .mirostat_eta = 0.1f },
    };
    float *logits = malloc((size_t)n * sizeof *logits);
    double *times = malloc((size_t)rounds * sizeof *times);
    void *scratch = malloc((size_t)n * LLAMAC_SAMPLE_SCRATCH);
    if (!kernels || !logits || !times || !scratch || rounds < 1) return 1;
    for (size_t d = 0; d < ARRAY_LEN(distributions); d++) {
        fill(logits, n, distributions[d]);
        for (size_t s = 0; s < ARRAY_LEN(settings); s++) {
            for (int r = 0; r < rounds; r++) {
                const double start = now_ms();
                double mu = 10;
                if (sample_with(kernels, logits, n, &settings[s], (uint64_t)r, &mu, scratch, &err) < 0) return 1;
                times[r] = now_ms() - start;
            }
            qsort(times, (size_t)rounds, sizeof *times, compare);
            printf("%s\t%s\tt=%g top-k=%d top-p=%g min-p=%g", kernels->name, distributions[d],
                   (double)settings[s].temperature, settings[s].top_k, (double)settings[s].top_p,
                   (double)settings[s].min_p);
            if (settings[s].typical_p > 0) printf(" typical-p=%g", (double)settings[s].typical_p);
            if (settings[s].xtc_probability > 0) printf(" xtc");
            if (settings[s].mirostat_tau > 0) printf(" mirostat");
            printf("\t%.4f\t%.4f\n", times[0], times[rounds / 2]);
        }
    }
    free(scratch), free(times), free(logits);
    return 0;
}
