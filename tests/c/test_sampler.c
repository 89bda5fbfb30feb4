// SPDX-License-Identifier: MIT
// test_sampler.c - the sampler's settings against their definitions.
#include <math.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "common.h"
#include "filters.h"
#include "log_positive.h"
#include "sampler.h"
#include "test.h"

static llamac_error err;

static int sample(const float *logits, int n, llamac_sampling settings, uint64_t position) {
    static uint64_t scratch[1000];
    return llamac_sample(logits, n, &settings, position, NULL, scratch, &err);
}

static const float LOGITS[6] = { 1, 3, 3, -2, 0.5f, -INFINITY };

static void temperature_0_takes_the_lowest_id_among_equals(void) {
    CHECK(sample(LOGITS, 6, (llamac_sampling){ .top_p = 1 }, 0) == 1, "greedy");
}

static void tokens_are_drawn_with_their_probabilities(void) {
    const llamac_sampling settings = { .temperature = 0.7f, .top_p = 1, .seed = 5 };
    const int draws = 40000;
    double p[6], sum = 0;
    int counts[6] = { 0 };
    for (int i = 0; i < 6; i++) sum += p[i] = exp((double)LOGITS[i] / 0.7);
    for (int i = 0; i < draws; i++) counts[sample(LOGITS, 6, settings, (uint64_t)i)]++;
    for (int i = 0; i < 6; i++) {
        const double expected = draws * p[i] / sum;
        CHECK(fabs(counts[i] - expected) < 5 * sqrt(expected + 1), "token %d drawn %d times, expected %.0f", i,
              counts[i], expected);
    }
    CHECK(counts[5] == 0, "a token with logit -inf was drawn");
}

static void draws_repeat_and_depend_on_seed_and_position(void) {
    const llamac_sampling settings = { .temperature = 2, .top_p = 1, .seed = 3 };
    llamac_sampling other_seed = settings;
    other_seed.seed = 4;
    int by_seed = 0, by_position = 0;
    for (uint64_t at = 0; at < 500; at++) {
        const int token = sample(LOGITS, 6, settings, at);
        CHECK(token == sample(LOGITS, 6, settings, at), "position %d: a second draw differs", (int)at);
        by_seed += token != sample(LOGITS, 6, other_seed, at);
        by_position += token != sample(LOGITS, 6, settings, at + 1);
    }
    CHECK(by_seed > 100, "another seed changes %d of 500 draws", by_seed);
    CHECK(by_position > 100, "another position changes %d of 500 draws", by_position);
}

static void each_setting_removes_the_unlikely_tokens(void) {
    // A bit per token that may be drawn.
    const struct { llamac_sampling settings; unsigned allowed; const char *name; } cases[] = {
        { { .temperature = 1, .top_p = 1, .seed = 1, .top_k = 1 }, 1 << 1, "top-k 1" },
        { { .temperature = 9, .top_p = 1, .seed = 1, .top_k = 3 }, 1 << 0 | 1 << 1 | 1 << 2, "top-k 3" },
        { { .temperature = 1, .top_p = 0.5f, .seed = 1 }, 1 << 1 | 1 << 2, "top-p" },
        { { .temperature = 1, .top_p = 1, .seed = 1, .min_p = 0.2f }, 1 << 1 | 1 << 2, "min-p" },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        unsigned drawn = 0;
        for (uint64_t at = 0; at < 500; at++) drawn |= 1u << sample(LOGITS, 6, cases[i].settings, at);
        CHECK(drawn == cases[i].allowed, "%s: tokens %x, expected %x", cases[i].name, drawn, cases[i].allowed);
    }
}

static void invalid_settings_are_rejected(void) {
    const llamac_sampling cases[] = {
        { .temperature = -1, .top_p = 1 },
        { .temperature = NAN, .top_p = 1 },
        { .top_k = -1, .top_p = 1 },
        { .top_p = 0 },
        { .top_p = 1.5f },
        { .top_p = 1, .min_p = 2 },
        { .top_p = 1, .typical_p = -0.5f },
        { .top_p = 1, .xtc_probability = NAN },
        { .top_p = 1, .xtc_threshold = 2 },
        { .top_p = 1, .mirostat_tau = -1 },
        { .top_p = 1, .mirostat_eta = 2 },
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        CHECK(sample(LOGITS, 6, cases[i], 0) < 0 && err.code == LLAMAC_BAD_ARGUMENT, "case %zu", i);
}

static void logits_that_are_not_finite_are_rejected_or_never_drawn(void) {
    const llamac_sampling greedy = { .top_p = 1 }, random = { .temperature = 1, .top_p = 1 };
    const float none[2] = { NAN, -INFINITY }, infinite[2] = { 1, INFINITY }, one[3] = { NAN, 2, NAN };
    CHECK(sample(none, 2, greedy, 0) < 0, "no finite logit");
    CHECK(sample(infinite, 2, random, 0) < 0, "+inf");
    for (int n = -1; n <= 0; n++) CHECK(sample(one, n, random, 0) < 0 && err.code == LLAMAC_BAD_ARGUMENT, "n is %d", n);
    CHECK(sample(one, 3, greedy, 0) == 1, "NaN, greedy");
    CHECK(sample(one, 3, random, 0) == 1, "NaN, random");
}

// Which of n distinct logits remain after top-k and top-p: of the k greatest, the first whose probabilities add up to
// top_p.
static void expected_tokens(const float *logits, int n, int top_k, float top_p, int remains[]) {
    const int k = top_k && top_k < n ? top_k : n;
    double total = 0, before = 0;
    for (int pass = 0; pass < 2; pass++) {
        int last = -1;
        for (int i = 0; i < k; i++) {
            int next = -1;   // the greatest logit below the last one
            for (int t = 0; t < n; t++)
                if ((last < 0 || logits[t] < logits[last]) && (next < 0 || logits[t] > logits[next])) next = t;
            const double weight = exp((double)logits[next]);
            if (pass == 0) total += weight;
            else remains[next] = before < (double)top_p * total, before += weight;
            last = next;
        }
    }
}

static void top_p_applies_to_what_top_k_leaves(void) {
    enum { TOKENS = 9 };
    const float logits[TOKENS] = { -1.5f, 0.25f, 1, -0.5f, 2, 0.5f, -1, 1.5f, 0 };   // the least first
    const int top_ks[] = { 0, 1, TOKENS - 1, TOKENS, TOKENS + 1 };
    for (size_t i = 0; i < ARRAY_LEN(top_ks); i++) {
        for (int tenths = 3; tenths <= 9; tenths += 3) {
            const llamac_sampling settings = {
                .temperature = 1, .top_k = top_ks[i], .top_p = 0.1f * (float)tenths, .seed = 2,
            };
            int expected[TOKENS] = { 0 }, drawn[TOKENS] = { 0 };
            expected_tokens(logits, TOKENS, settings.top_k, settings.top_p, expected);
            for (uint64_t at = 0; at < 2000; at++) drawn[sample(logits, TOKENS, settings, at)]++;
            for (int t = 0; t < TOKENS; t++)
                CHECK((drawn[t] > 0) == expected[t], "top-k %d, top-p %g: token %d drawn %d times", settings.top_k,
                      (double)settings.top_p, t, drawn[t]);
        }
    }
}

// A caller that treats denormal numbers as 0 gets the same token.
static void draws_do_not_depend_on_the_callers_floating_point_settings(void) {
#if defined(__x86_64__)
    const float logits[3] = { 0, 0x1p-140f, 0x1p-135f };
    const unsigned settings = _mm_getcsr() | 0x8040;   // flush to zero, denormals are zero
    _mm_setcsr(settings);
    const int greedy = sample(logits, 3, (llamac_sampling){ .top_p = 1 }, 0);
    const int top_1 = sample(logits, 3, (llamac_sampling){ .temperature = 1, .top_k = 1, .top_p = 1 }, 0);
    const int denormal = sample(logits, 3, (llamac_sampling){ .temperature = 0x1p-142f, .top_p = 1, .min_p = 0.1f }, 0);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(0x1f80);   // the default
    CHECK(greedy == 2 && top_1 == 2 && denormal == 2, "tokens %d, %d, %d", greedy, top_1, denormal);
    CHECK((after & 0xffc0) == (settings & 0xffc0), "MXCSR is %x, was %x", after, settings);
#endif
}

// Kernel sets add up in orders of their own; the exponentials and the tokens are the same.
static void the_logarithm_is_accurate(void) {
    for (int i = -1000; i <= 1000; i++) {
        const double x = ldexp(1 + (double)((i + 1000) % 97) / 97, i), expected = log(x);
        CHECK(fabs(log_positive(x) - expected) <= 4e-16 * (fabs(expected) + 1), "log of %a is %a", x, log_positive(x));
    }
    CHECK(log_positive(1) == 0, "log of 1");
}

static void each_candidate_has_draws_of_its_own(void) {
    llamac_sampling first = { .temperature = 2, .top_p = 1, .seed = 3 }, second = first;
    second.candidate = 1;
    int differ = 0;
    for (uint64_t at = 0; at < 500; at++) differ += sample(LOGITS, 6, first, at) != sample(LOGITS, 6, second, at);
    CHECK(differ > 100, "another candidate changes %d of 500 draws", differ);
}

// The expected surprise of the first four is 0.83 nats; those of the tokens are 0.22, 1.61, 3.91, 3.91.
static void typical_p_xtc_and_mirostat_remove_their_tokens(void) {
    const float logits[5] = { logf(0.8f), logf(0.16f), logf(0.02f), logf(0.02f), -INFINITY };
    const struct { llamac_sampling settings; unsigned allowed; const char *name; } cases[] = {
        { { .temperature = 1, .top_p = 1, .typical_p = 0.7f }, 1 << 0, "typical-p 0.7" },
        { { .temperature = 1, .top_p = 1, .typical_p = 0.9f }, 1 << 0 | 1 << 1, "typical-p 0.9" },
        { { .temperature = 1, .top_p = 1, .typical_p = 0.97f }, 1 << 0 | 1 << 1 | 1 << 2, "typical-p 0.97" },
        { { .temperature = 1, .top_p = 1, .xtc_probability = 1, .xtc_threshold = 0.1f }, 1 << 1 | 1 << 2 | 1 << 3,
          "XTC" },
        { { .temperature = 1, .top_p = 1, .xtc_probability = 1, .xtc_threshold = 0.5f }, 0xf, "XTC with one choice" },
        { { .temperature = 1, .top_p = 1, .mirostat_tau = 1 }, 1 << 0, "mirostat" },
    };
    uint64_t scratch[5 * LLAMAC_SAMPLE_SCRATCH / 8];
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        unsigned drawn = 0;
        for (uint64_t at = 0; at < 1000; at++) {
            double mu = 2;   // bits; the surprise of the second token is 2.6
            drawn |= 1u << llamac_sample(logits, 5, &cases[i].settings, at, &mu, scratch, &err);
        }
        CHECK(drawn == cases[i].allowed, "%s: tokens %x, expected %x", cases[i].name, drawn, cases[i].allowed);
    }
    double mu = 2;
    const llamac_sampling mirostat = { .temperature = 1, .top_p = 1, .mirostat_tau = 1, .mirostat_eta = 0.5f };
    llamac_sample(logits, 5, &mirostat, 0, &mu, scratch, &err);
    CHECK(fabs(mu - 2.5) < 1e-9, "mu is %g after a draw without surprise, expected 2.5", mu);
}

static void every_kernel_set_draws_the_same_tokens(void) {
    enum { TOKENS = 1013 };
    static float logits[TOKENS], expected[TOKENS], p[TOKENS];
    static char scratch[TOKENS * LLAMAC_SAMPLE_SCRATCH];
    int supported;
    uint32_t random = 1;
    for (int round = 0; round < 8; round++) {
        for (int i = 0; i < TOKENS; i++)
            logits[i] = (float)((random = random * 1664525 + 1013904223) >> 8) * (0x1p-24f * (float)(1 << round));
        logits[round] = NAN, logits[round + 8] = -INFINITY, logits[round + 20] = -3e38f;
        for (size_t k = 0; llamac_isa_at(k, &supported); k++) {
            if (!supported) continue;
            const struct kernels *kernels = kernels_select(llamac_isa_at(k, &supported), &err);
            kernels_scalar.exponentials(logits, TOKENS, 200, 1.3f, expected);
            kernels->exponentials(logits, TOKENS, 200, 1.3f, p);
            for (int i = 0; i < TOKENS; i++)
                CHECK(p[i] == expected[i], "%s: exp of %g is %a", kernels->name, (double)logits[i], (double)p[i]);
            for (uint64_t at = 0; at < 40; at++) {
                const llamac_sampling s = {
                    .temperature = 0.3f * (float)(at % 8), .top_p = at % 3 ? 0.9f : 1,
                    .top_k = at % 5 ? 0 : (int)at * 10, .min_p = at % 2 ? 0 : 0.01f,
                    .typical_p = at % 4 ? 0 : 0.9f, .xtc_probability = at % 7 ? 0 : 1, .xtc_threshold = 0.01f,
                    .mirostat_tau = at % 11 ? 0 : 4, .mirostat_eta = 0.1f,
                };
                double mu = 8, first_mu = 8;
                const int first = sample_with(&kernels_scalar, logits, TOKENS, &s, at, &first_mu, scratch, &err);
                const int token = sample_with(kernels, logits, TOKENS, &s, at, &mu, scratch, &err);
                CHECK(first >= 0 && token == first, "%s: token %d, expected %d", kernels->name, token, first);
                CHECK(memcmp(&mu, &first_mu, sizeof mu) == 0, "%s: mu %a, expected %a", kernels->name, mu, first_mu);
            }
        }
    }
}

enum { MANY = 3000 };   // more than are sorted by comparing them

static int in_ranking_order(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    return x->p != y->p ? (x->p > y->p ? -1 : 1) : x->id - y->id;
}

// Candidates in the order of their ids, whose probabilities are exp(logit - 4), and the sorted ones.
static double make_candidates(int distinct, uint64_t *state, float *logits, struct candidate *c,
                              struct candidate *sorted) {
    double total = 0;
    for (int i = 0; i < MANY; i++) {
        logits[i] = i == MANY / 2 ? 4 : 4 * (float)random_below(state, distinct) / (float)distinct;
        total += (double)(c[i] = (struct candidate){ expf(logits[i] - 4), i }).p;
    }
    memcpy(sorted, c, sizeof *c * MANY);
    qsort(sorted, MANY, sizeof *sorted, in_ranking_order);
    return total;
}

static void filters_of_many_candidates_keep_what_a_full_sort_does(void) {
    static struct candidate c[MANY], sorted[MANY], scratch[MANY];
    static float logits[MANY], memory[2 * MANY];
    static struct ranking ranking;
    uint64_t state = 6;
    for (int round = 0; round < 6; round++) {
        const int distinct = round % 2 ? 40 : 1 << 20;   // many equal probabilities, or few
        double total = make_candidates(distinct, &state, logits, c, sorted), sum = 0;
        int expected = 0;
        const double enough = (double)(0.3f * (float)(round / 2 + 1)) * total;
        while (sum < enough) sum += (double)sorted[expected++].p;
        const int kept = filter_top_p(c, MANY, 0, 0.3f * (float)(round / 2 + 1), scratch, &total);
        CHECK(kept == expected && total == sum && !memcmp(c, sorted, sizeof *c * (size_t)kept),
              "top-p keeps %d, expected %d", kept, expected);

        make_candidates(distinct, &state, logits, c, sorted);
        const int k = round < 2 ? 1 : random_below(&state, MANY);
        filter_top_k(c, MANY, k);
        CHECK(!memcmp(c, sorted, sizeof *c * (size_t)k), "top-k %d", k);

        // typical-p, whose order is that of the distance from the expected surprise; 1 leaves rounding to decide
        const struct logits_source source = { logits, 4, 1 };
        const float typical_p = round < 2 ? 1 : 0.4f;
        total = make_candidates(distinct, &state, logits, c, sorted);
        double surprise = 0;
        for (int i = 0; i < MANY; i++) surprise += (double)c[i].p * (4 - (double)logits[i]) / total;
        for (int i = 0; i < MANY; i++)
            sorted[i] = (struct candidate){ -fabsf((float)(4 - (double)logits[i] - surprise)), i };
        qsort(sorted, MANY, sizeof *sorted, in_ranking_order);
        int is_kept[MANY] = { 0 }, found = 0, n_typical = 0;
        sum = 0;
        for (; n_typical < MANY && sum < (double)typical_p * total; n_typical++)
            sum += (double)c[sorted[n_typical].id].p, is_kept[sorted[n_typical].id] = 1;
        const int typical = filter_typical(c, MANY, &source, typical_p, &ranking, memory, &total);
        for (int i = 0; i < typical; i++) found += is_kept[c[i].id];
        CHECK(typical == n_typical && found == typical, "typical-p keeps %d and %d of the expected %d", typical, found,
              n_typical);
    }
}

// Of equal probabilities, filters keep the lowest ids.
static void equal_probabilities_are_kept_by_id(void) {
    static float logits[MANY];
    static uint64_t scratch[MANY * LLAMAC_SAMPLE_SCRATCH / 8];
    const llamac_sampling settings[] = { { .temperature = 1, .top_p = 0.5f }, { .temperature = 1, .top_p = 0.25f },
                                         { .temperature = 1, .top_p = 0.5f, .top_k = MANY - 1 } };
    const int kept[] = { MANY / 2, MANY / 4, MANY / 2 };
    for (size_t i = 0; i < ARRAY_LEN(settings); i++) {
        int largest = 0, seen[MANY] = { 0 }, distinct = 0;
        for (uint64_t at = 0; at < (sparse ? 1500 : 4000); at++) {
            const int token = llamac_sample(logits, MANY, &settings[i], at, NULL, scratch, &err);
            CHECK(token >= 0 && token < kept[i], "case %zu: token %d, expected one below %d", i, token, kept[i]);
            largest = max_int(largest, token);
            distinct += !seen[token]++;
        }
        CHECK(largest > kept[i] * 99 / 100 && distinct > kept[i] / 2, "case %zu: %d distinct tokens up to %d", i,
              distinct, largest);
    }
}

int main(int argc, char **argv) {
    read_arguments(argc, argv);
    RUN(temperature_0_takes_the_lowest_id_among_equals);
    RUN(tokens_are_drawn_with_their_probabilities);
    RUN(draws_repeat_and_depend_on_seed_and_position);
    RUN(each_setting_removes_the_unlikely_tokens);
    RUN(invalid_settings_are_rejected);
    RUN(logits_that_are_not_finite_are_rejected_or_never_drawn);
    RUN(top_p_applies_to_what_top_k_leaves);
    RUN(the_logarithm_is_accurate);
    RUN(each_candidate_has_draws_of_its_own);
    RUN(typical_p_xtc_and_mirostat_remove_their_tokens);
    RUN(every_kernel_set_draws_the_same_tokens);
    RUN(filters_of_many_candidates_keep_what_a_full_sort_does);
    RUN(equal_probabilities_are_kept_by_id);
    RUN(draws_do_not_depend_on_the_callers_floating_point_settings);
    return finish_tests("test_sampler");
}
