// SPDX-License-Identifier: MIT
// test_sampler.c - the sampler's settings against their definitions.
#include <math.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "common.h"
#include "llamac.h"
#include "test.h"

static llamac_error err;

static int sample(const float *logits, int n, llamac_sampling s, uint64_t position) {
    static uint64_t scratch[1000];
    return llamac_sample(logits, n, &s, position, scratch, &err);
}

static void sampling_follows_its_definition(void) {
    float logits[6] = { 1, 3, 3, -2, 0.5f, -INFINITY };
    CHECK(sample(logits, 6, (llamac_sampling){ .top_p = 1 }, 0) == 1, "greedy takes the lowest id among equals");
    double p[6], sum = 0;
    for (int i = 0; i < 6; i++) sum += p[i] = exp((double)logits[i] / 0.7);
    int counts[6] = { 0 };
    const int draws = 40000;
    for (int i = 0; i < draws; i++) counts[sample(logits, 6,
        (llamac_sampling){ .temperature = 0.7f, .top_p = 1, .seed = 5 }, (uint64_t)i)]++;
    for (int i = 0; i < 6; i++) {
        const double expected = draws * p[i] / sum, spread = sqrt(expected + 1);
        CHECK(fabs(counts[i] - expected) < 5 * spread, "token %d drawn %d times, expected %.0f", i, counts[i],
            expected);
    }
    for (int i = 0; i < 500; i++) {
        const uint64_t at = (uint64_t)i;
        const int top1 = sample(logits, 6, (llamac_sampling){ .temperature = 1, .top_k = 1, .top_p = 1, .seed = 1 },
            at);
        const int top3 = sample(logits, 6, (llamac_sampling){ .temperature = 9, .top_k = 3, .top_p = 1, .seed = 1 },
            at);
        const int nucleus = sample(logits, 6, (llamac_sampling){ .temperature = 1, .top_p = 0.5f, .seed = 1 }, at);
        const int likely = sample(logits, 6, (llamac_sampling){ .temperature = 1, .top_p = 1, .min_p = 0.2f,
            .seed = 1 }, at);
        CHECK(top1 == 1, "top-k 1 is %d", top1);
        CHECK(top3 == 1 || top3 == 2 || top3 == 0, "top-k 3 is %d", top3);
        CHECK(nucleus == 1 || nucleus == 2, "top-p is %d", nucleus);
        CHECK(likely == 1 || likely == 2, "min-p is %d", likely);
        CHECK(sample(logits, 6, (llamac_sampling){ .temperature = 2, .top_p = 1, .seed = 3 }, at) == sample(logits, 6,
            (llamac_sampling){ .temperature = 2, .top_p = 1, .seed = 3 }, at), "repeats");
    }
    const llamac_sampling bad[] = { { .temperature = -1, .top_p = 1 }, { .temperature = NAN, .top_p = 1 },
        { .top_k = -1, .top_p = 1 }, { .top_p = 0 }, { .top_p = 1.5f }, { .top_p = 1, .min_p = 2 } };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) CHECK(sample(logits, 6, bad[i], 0) < 0
        && err.code == LLAMAC_BAD_ARGUMENT, "settings %zu", i);
    const float none[2] = { NAN, -INFINITY }, infinite[2] = { 1, INFINITY }, one[3] = { NAN, 2, NAN };
    CHECK(sample(none, 2, (llamac_sampling){ .top_p = 1 }, 0) < 0, "no numbers");
    CHECK(sample(infinite, 2, (llamac_sampling){ .temperature = 1, .top_p = 1 }, 0) < 0, "infinity");
    CHECK(sample(one, 3, (llamac_sampling){ .temperature = 1, .top_p = 1 }, 0) == 1, "NaNs are never drawn");
}

// Which tokens top-k, then top-p leave of n logits without equals: the k greatest, of them the first whose
// probabilities reach top-p.
static void leave(const float *logits, int n, int top_k, float top_p, int left[]) {
    double total = 0, before = 0;
    for (int pass = 0; pass < 2; pass++) {
        int last = -1;
        for (int i = 0; i < (top_k && top_k < n ? top_k : n); i++) {
            int next = -1;   // the greatest of those below the last
            for (int t = 0; t < n; t++)
                if ((last < 0 || logits[t] < logits[last]) && (next < 0 || logits[t] > logits[next])) next = t;
            if (pass == 0) total += exp((double)logits[next]);
            else {
                left[next] = before < (double)top_p * total;
                before += exp((double)logits[next]);
            }
            last = next;
        }
    }
}

static void top_p_cuts_the_least_probable_with_any_top_k(void) {
    enum { TOKENS = 9 };
    const float logits[TOKENS] = { -1.5f, 0.25f, 1, -0.5f, 2, 0.5f, -1, 1.5f, 0 };   // the least first
    const int top_ks[] = { 0, 1, TOKENS - 1, TOKENS, TOKENS + 1 };
    for (size_t k = 0; k < ARRAY_LEN(top_ks); k++) {
        for (int p = 1; p <= 3; p++) {
            const float top_p = 0.3f * (float)p;
            int expected[TOKENS] = { 0 }, drawn[TOKENS] = { 0 };
            leave(logits, TOKENS, top_ks[k], top_p, expected);
            for (uint64_t at = 0; at < 2000; at++) drawn[sample(logits, TOKENS,
                (llamac_sampling){ .temperature = 1, .top_k = top_ks[k], .top_p = top_p, .seed = 2 }, at)]++;
            for (int t = 0; t < TOKENS; t++) CHECK((drawn[t] > 0) == expected[t],
                "top-k %d, top-p %g: token %d drawn %d times", top_ks[k], (double)top_p, t, drawn[t]);
        }
    }
}

// A host that takes denormal numbers for 0 gets the same token.
static void draws_do_not_depend_on_the_hosts_control_word(void) {
#if defined(__x86_64__)
    const float logits[3] = { 0, 0x1p-140f, 0x1p-135f };
    const unsigned host = _mm_getcsr() | 0x8040;
    _mm_setcsr(host);
    const int greedy = sample(logits, 3, (llamac_sampling){ .top_p = 1 }, 0);
    const int first = sample(logits, 3, (llamac_sampling){ .temperature = 1, .top_k = 1, .top_p = 1 }, 0);
    const int denormal = sample(logits, 3, (llamac_sampling){ .temperature = 0x1p-142f, .top_p = 1, .min_p = 0.1f }, 0);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(0x1f80);
    CHECK(greedy == 2 && first == 2 && denormal == 2, "tokens %d, %d, %d", greedy, first, denormal);
    CHECK((after & 0xffc0) == (host & 0xffc0), "the host's control word is put back");
#endif
}

int main(void) {
    RUN(sampling_follows_its_definition);
    RUN(top_p_cuts_the_least_probable_with_any_top_k);
    RUN(draws_do_not_depend_on_the_hosts_control_word);
    return finish_tests("test_sampler");
}
