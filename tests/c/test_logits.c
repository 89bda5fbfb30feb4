// SPDX-License-Identifier: MIT
// test_logits.c - the adjustments of logits on small examples.
#include <math.h>

#include "common.h"
#include "test.h"

enum { TOKENS = 6 };
static uint64_t scratch[TOKENS * LLAMAC_SAMPLE_SCRATCH / 8];
static const llamac_adjustments NONE = { .repetition_penalty = 1, .dry_base = 1, .dry_allowed_length = 1 };

static void expect(const char *name, llamac_adjustments a, llamac_history h, const float expected[TOKENS]) {
    float logits[TOKENS] = { 1, -2, 3, -4, 5, 0 };
    llamac_adjust_logits(logits, TOKENS, &a, &h, scratch);
    for (int i = 0; i < TOKENS; i++)
        CHECK(logits[i] == expected[i], "%s: logit %d is %g, expected %g", name, i, (double)logits[i],
              (double)expected[i]);
}

static void each_adjustment_changes_its_tokens(void) {
    const int32_t ids[] = { 0, 1, 99, -1, 1, 4, 4 };   // the first four are the prompt
    const int32_t biased[] = { 5, 0, 6 }, banned[] = { 2, 77 };
    const float bias[] = { 7, -INFINITY, 1 };
    const llamac_history h = { .ids = ids, .n_ids = 7, .n_prompt = 4 };
    llamac_adjustments a = NONE;
    expect("none", a, h, (const float[]){ 1, -2, 3, -4, 5, 0 });
    a.repetition_penalty = 2;
    expect("repetition", a, h, (const float[]){ 0.5f, -4, 3, -4, 2.5f, 0 });
    a = NONE, a.presence_penalty = 1, a.frequency_penalty = 0.25f;
    expect("presence and frequency", a, h, (const float[]){ 1, -3.25f, 3, -4, 3.5f, 0 });
    a = NONE, a.bias_ids = biased, a.bias = bias, a.n_bias = 3;
    expect("bias", a, h, (const float[]){ -INFINITY, -2, 3, -4, 5, 7 });
    llamac_history with_bans = h;
    with_bans.banned = banned, with_bans.n_banned = 2;
    expect("bans", NONE, with_bans, (const float[]){ 1, -2, -INFINITY, -4, 5, 0 });
    llamac_history with_mask = h;
    with_mask.allowed = (const uint8_t[]){ 0xff & ~(1 << 1) }, with_mask.n_allowed = 8;
    expect("a mask", NONE, with_mask, (const float[]){ 1, -INFINITY, 3, -4, 5, 0 });
    with_mask.n_allowed = 4;
    expect("a mask of four bits", NONE, with_mask, (const float[]){ 1, -INFINITY, 3, -4, -INFINITY, -INFINITY });
    a = NONE, a.repetition_penalty = 2, a.presence_penalty = 1, a.dry_multiplier = 1;
    expect("an empty history", a, (llamac_history){ 0 }, (const float[]){ 1, -2, 3, -4, 5, 0 });
}

static void dry_penalizes_the_continuation_of_a_repetition(void) {
    const int32_t ids[] = { 0, 1, 2, 3, 1, 2, 5, 0, 1, 2 };   // "0 1 2" was followed by 3, "1 2" by 5
    const uint8_t breakers[] = { 1 << 1 };
    const llamac_history h = { .ids = ids, .n_ids = 10, .n_prompt = 10 };
    llamac_adjustments a = NONE;
    a.dry_multiplier = 1, a.dry_base = 4, a.dry_allowed_length = 2;
    expect("two and three tokens", a, h, (const float[]){ 1, -2, 3, -8, 5, -1 });
    a.dry_allowed_length = 3;
    expect("three tokens", a, h, (const float[]){ 1, -2, 3, -5, 5, 0 });
    a.dry_allowed_length = 1, a.dry_breakers = breakers;
    expect("a breaker", a, h, (const float[]){ 1, -2, 3, -5, 5, -1 });
}

static void invalid_adjustments_are_rejected(void) {
    llamac_error err;
    const float infinite = INFINITY;
    const int32_t id = 0;
    llamac_adjustments cases[8] = { NONE, NONE, NONE, NONE, NONE, NONE, NONE, NONE };
    CHECK(llamac_adjustments_check(&NONE, &err) == 0, "no adjustment");
    cases[0].repetition_penalty = 0;
    cases[1].presence_penalty = NAN;
    cases[2].frequency_penalty = INFINITY;
    cases[3].dry_multiplier = -1;
    cases[4].dry_base = 0.5f;
    cases[5].dry_allowed_length = 0;
    cases[6].bias_ids = &id, cases[6].bias = &infinite, cases[6].n_bias = 1;
    cases[7].n_bias = -1;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        CHECK(llamac_adjustments_check(&cases[i], &err) < 0 && err.code == LLAMAC_BAD_ARGUMENT, "case %zu", i);
}

static void log_probabilities_are_those_of_the_softmax(void) {
    enum { N = 1000 };
    static float logits[N];
    static uint64_t memory[N * LLAMAC_SAMPLE_SCRATCH / 8];
    llamac_error err;
    llamac_logprob found[4];
    double total = 0;
    for (int i = 0; i < N; i++) logits[i] = (float)((i * 37 + 11) % N) * 0.01f;   // all different, in no order
    logits[5] = -INFINITY, logits[6] = NAN;
    for (int i = 0; i < N; i++) total += i == 5 || i == 6 ? 0 : exp((double)logits[i]);
    CHECK(llamac_logprobs(logits, N, 7, 3, found, memory, &err) == 3, "three of the best");
    CHECK(found[0].id == 7, "the token is %d", found[0].id);
    for (int i = 0; i < 4; i++) {
        const double expected = (double)logits[found[i].id] - log(total);
        CHECK(fabs(found[i].logprob - expected) < 1e-6, "%d: %g, expected %g", i, found[i].logprob, expected);
        CHECK(i < 2 || logits[found[i].id] < logits[found[i - 1].id], "%d is out of order", i);
    }
    for (int id = 5; id <= 6; id++) {
        llamac_logprobs(logits, N, id, 0, found, memory, &err);
        CHECK(found[0].logprob == (double)-INFINITY, "token %d: %g", id, found[0].logprob);
    }
    CHECK(llamac_logprobs(logits, N, N, 0, found, memory, &err) < 0 && err.code == LLAMAC_BAD_ARGUMENT, "no token");
    CHECK(llamac_logprobs(logits + 5, 2, 0, 0, found, memory, &err) < 0 && err.code == LLAMAC_BAD_MODEL, "no number");
    CHECK(llamac_logprobs(logits, 0, 0, 0, found, memory, &err) < 0 && strstr(err.message, "n is 0"), "%s",
          err.message);
}

int main(void) {
    RUN(each_adjustment_changes_its_tokens);
    RUN(dry_penalizes_the_continuation_of_a_repetition);
    RUN(invalid_adjustments_are_rejected);
    RUN(log_probabilities_are_those_of_the_softmax);
    return finish_tests("test_logits");
}
