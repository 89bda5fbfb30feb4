// SPDX-License-Identifier: MIT
// fuzz_saving.c - for libFuzzer: saves, restores, forks, cuts and shifts sequences in any order, with any numbers, and
// with pages of any bits. tests/fuzz/README.md shows how to build and run it.
#include "common.h"
#include "saving.h"
#include "session.h"
#include "tiny_model.h"

enum { N_SESSIONS = 2, N_SEQUENCES = 2, CONTEXT = 600, MOST_PAGES = 24, MOST_GROUPS = 4, MOST_STEPS = 200 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

struct input { const uint8_t *data; size_t bytes; };   // what is left of it

// What a call does, and to what: `numbers` are small, or any bits.
enum action { EXTEND, CUT, FORK, SHIFT, HOLD, TAKE, DROP, COPY, RESTORE, RESTORE_HELD, BUDGET, N_ACTIONS };
struct call { uint8_t action, session, sequence, group; int32_t numbers[3]; };

// The pages that the caller holds, of any group.
struct pages { llamac_page *list[MOST_PAGES]; size_t n; };

static const struct tiny_shape whole = {
    .dim = 8, .n_layers = 1, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .ffn_dim = 12, .vocab = 11,
    .context = CONTEXT, .dtype = LLAMAC_F32,
};
static const struct tiny_shape windowed = {
    .dim = 8, .n_layers = 2, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .ffn_dim = 12, .vocab = 11,
    .context = CONTEXT, .dtype = LLAMAC_F32, .window = 40,
};

static const struct tiny_shape recurrent = {
    .dim = 8, .n_layers = 3, .n_heads = 2, .n_kv_heads = 1, .head_dim = 4, .ffn_dim = 12, .vocab = 11,
    .context = CONTEXT, .dtype = LLAMAC_F32, .recurrent = 1,
};

static int next_byte(struct input *in) {
    if (!in->bytes) return 0;
    in->bytes--;
    return *in->data++;
}

// A byte says how wide a number is: a byte of its own, which stays within ranges, or all bits.
static int32_t next_number(struct input *in) {
    uint32_t number = 0;
    const int kind = next_byte(in);
    if (kind < 0xF0) return kind * 3 - 20;
    for (int i = 0; i < 4; i++) number = number << 8 | (uint32_t)next_byte(in);
    return (int32_t)number;
}

static struct call next_call(struct input *in) {
    struct call call = { .action = (uint8_t)(next_byte(in) % N_ACTIONS) };
    const int where = next_byte(in);
    call.session = where & 1, call.sequence = where >> 1 & 1, call.group = where >> 2 & 3;
    for (int i = 0; i < 3; i++) call.numbers[i] = next_number(in);
    return call;
}

// An error has a message; success has none of the caller's to check.
static int checked(int failed) {
    if (failed && !err.message[0]) __builtin_trap();
    err.message[0] = 0;
    return failed;
}

static int n_groups(const llamac_session *s) {
    llamac_group info;
    int n = 0;
    while (llamac_group_at(s, n, &info)) n++;
    return n;
}

static void extend(llamac_session *s, int sequence, int n) {
    llamac_row rows[128];
    float logits[11];
    const int start = llamac_length(s, sequence), count = n < 1 ? 1 : n > 128 ? 128 : n;
    for (int i = 0; i < count; i++)
        rows[i] = (llamac_row){ (start + i) % 11, sequence, start + i, i == count - 1 };
    if (checked(llamac_eval(s, rows, count, logits, NULL, &err))) {
        if (llamac_length(s, sequence) != start) __builtin_trap();
    } else if (llamac_length(s, sequence) != start + count) {
        __builtin_trap();
    }
}

static void keep(struct pages *pages, llamac_page *page) {
    checked(page == NULL);
    if (page) pages->list[pages->n++] = page;
}

static void drop(struct pages *pages, int which) {
    if (!pages->n) return;
    const size_t i = (uint32_t)which % pages->n;
    llamac_drop_page(pages->list[i]);
    pages->list[i] = pages->list[--pages->n];
}

// A new page holds the rest of the input, over and over.
static void take_page(llamac_session *s, const struct call *call, struct input *in, struct pages *pages) {
    if (pages->n == MOST_PAGES) return;
    llamac_page *page = llamac_take_page(s, call->group, &err);
    keep(pages, page);
    if (!page) return;
    size_t bytes;
    uint8_t *content = llamac_page_data(page, &bytes);
    for (size_t i = 0; i < bytes; i++) content[i] = in->bytes ? in->data[i % in->bytes] : 0;
}

static void copy_page(llamac_session *s, const struct call *call, const struct pages *pages) {
    if (!pages->n) return;
    size_t bytes;
    llamac_page *page = pages->list[(uint32_t)call->numbers[0] % pages->n];
    (void)llamac_page_data(page, &bytes);
    uint8_t *copy = take(bytes);
    checked(llamac_copy_page(s, call->group, page, call->numbers[1], call->numbers[2], copy, &err));
    free(copy);
}

// Restores any of the pages, which the session mostly refuses. Then nothing changes.
static void restore_any(llamac_session *s, const struct call *call, struct input *in, const struct pages *pages) {
    int32_t first[MOST_GROUPS];
    for (int i = 0; i < MOST_GROUPS; i++) first[i] = next_number(in);
    const int length = call->numbers[0], before = llamac_length(s, call->sequence);
    const size_t n = pages->n ? (uint32_t)call->numbers[1] % (pages->n + 1) : 0;
    int32_t lengths[MOST_PAGES];
    const size_t n_states = (uint32_t)call->numbers[2] % (pages->n - n + 1);
    for (size_t i = 0; i < n_states; i++) lengths[i] = next_number(in);
    const int refused = checked(llamac_check_restore(s, call->sequence, length, first, pages->list, n, lengths,
                                                     n_states, &err));
    const int failed = checked(llamac_restore(s, call->sequence, length, first, pages->list, n, &err));
    if (llamac_length(s, call->sequence) != (failed ? before : length)) __builtin_trap();
    const int no_states = checked(llamac_restore_states(s, call->sequence, lengths, pages->list + n, n_states, &err));
    if (!refused && (failed || no_states)) __builtin_trap();
}

// Returns the page after the last one of a group that a sequence has.
static int end_of_pages(llamac_session *s, int sequence, int group) {
    llamac_group info;
    const int length = llamac_length(s, sequence);
    (void)llamac_group_at(s, group, &info);
    return info.n_kv_heads ? ceil_div(length, KV_PAGE) : length > 0;
}

// Gives a sequence that was just restored some of the earlier states of another one.
static void restore_states(llamac_session *from, int sequence, llamac_session *to, int to_sequence) {
    int32_t lengths[MAX_KEPT];
    llamac_page *held[MAX_KEPT];
    int n = 0, failed = 0;
    for (int i = 1; llamac_state_length(from, sequence, i) > 0; i++, n++) {
        lengths[n] = llamac_state_length(from, sequence, i);
        held[n] = llamac_hold_page(from, sequence, n_groups(from) - 1, i, &err);
        if (!held[n]) __builtin_trap();
    }
    failed = llamac_restore_states(to, to_sequence, lengths, held, (size_t)n, &err);
    if (failed || (n && llamac_cut_length(to, to_sequence, lengths[0]) != lengths[0])) __builtin_trap();
    for (int i = 0; i < n; i++) llamac_drop_page(held[i]);
}

// Gives a sequence of one session to a sequence of any session. The pages are new copies, or shared.
static void restore_held(llamac_session *from, llamac_session *to, const struct call *call) {
    int32_t first[MOST_GROUPS];
    llamac_page *held[MOST_PAGES];
    const int sequence = call->numbers[0] & 1, length = llamac_length(from, sequence), copies = call->numbers[1] & 1;
    int n = 0, failed = 0;
    for (int g = 0; g < n_groups(from); g++) {
        first[g] = llamac_first_position(from, sequence, g);
        for (int p = first[g] / KV_PAGE; p < end_of_pages(from, sequence, g) && !failed; p++) {
            llamac_page *page = llamac_hold_page(from, sequence, g, p, &err);
            if (!page) __builtin_trap();
            llamac_page *copy = copies ? llamac_take_page(to, g, &err) : page;
            size_t bytes;
            if (copies && copy) {
                const int start = max_int(0, first[g] - p * KV_PAGE), end = min_int(KV_PAGE, length - p * KV_PAGE);
                checked(llamac_copy_page(from, g, page, start, end, llamac_page_data(copy, &bytes), &err));
            }
            if (copies) llamac_drop_page(page);
            if (copy) held[n++] = copy;
            failed = !copy;   // the budget is used up
        }
    }
    err.message[0] = 0;
    if (!failed) {
        if (llamac_restore(to, call->sequence, length, first, held, (size_t)n, &err)) __builtin_trap();
        if (llamac_length(to, call->sequence) != length) __builtin_trap();
        for (int g = 0; g < n_groups(to); g++)
            if (llamac_first_position(to, call->sequence, g) != first[g]) __builtin_trap();
        if (from != to || sequence != call->sequence) restore_states(from, sequence, to, call->sequence);
    }
    for (int i = 0; i < n; i++) llamac_drop_page(held[i]);
}

// Any length, or one to which the sequence can be cut.
static int cut_to(const llamac_session *s, const struct call *call) {
    const int cut = call->numbers[1] & 1 ? llamac_cut_length(s, call->sequence, call->numbers[0]) : -1;
    return cut < 0 ? call->numbers[0] : cut;
}

static void step(llamac_model *model, llamac_session *sessions[N_SESSIONS], struct input *in, struct pages *pages) {
    const struct call call = next_call(in);
    llamac_session *s = sessions[call.session], *other = sessions[call.numbers[2] & 1];
    switch ((enum action)call.action) {
    case EXTEND: extend(s, call.sequence, call.numbers[0]); break;
    case CUT: checked(llamac_truncate(s, call.sequence, cut_to(s, &call), &err)); break;
    case FORK: checked(llamac_fork(s, call.sequence, other, call.numbers[0], call.numbers[1], &err)); break;
    case SHIFT: checked(llamac_shift(s, call.sequence, call.numbers[0], call.numbers[1], &err)); break;
    case HOLD:
        if (pages->n < MOST_PAGES)
            keep(pages, llamac_hold_page(s, call.sequence, call.group, call.numbers[0], &err));
        break;
    case TAKE: take_page(s, &call, in, pages); break;
    case DROP: drop(pages, call.numbers[0]); break;
    case COPY: copy_page(s, &call, pages); break;
    case RESTORE: restore_any(s, &call, in, pages); break;
    case RESTORE_HELD: restore_held(other, s, &call); break;
    case BUDGET: llamac_set_kv_budget(model, call.numbers[0] > 0 ? (size_t)call.numbers[0] << 10 : 0); break;
    case N_ACTIONS: break;
    }
    if (llamac_held_bytes(s) > llamac_kv_bytes(model)) __builtin_trap();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct input in = { data, bytes };
    const int kind = next_byte(&in);
    const struct tiny_file file = tiny_model(kind >= 0xC0 ? &recurrent : kind & 1 ? &windowed : &whole);
    llamac_model *model = open_model(file);
    llamac_session *sessions[N_SESSIONS];
    static const int dtypes[] = { LLAMAC_F32, LLAMAC_F16, LLAMAC_Q8 };
    for (int i = 0; i < N_SESSIONS; i++)
        sessions[i] = open_session(model, N_SEQUENCES, dtypes[(kind >> 1) % ARRAY_LEN(dtypes)], 1, "scalar");
    struct pages pages = { .n = 0 };
    for (int i = 0; i < MOST_STEPS && in.bytes; i++) step(model, sessions, &in, &pages);
    while (pages.n) drop(&pages, 0);
    for (int i = 0; i < N_SESSIONS; i++) llamac_session_close(&sessions[i]);
    if (llamac_kv_bytes(model) != 0) __builtin_trap();
    llamac_model_close(&model);
    free(file.data);
    if (llamac_live_objects() != 0) __builtin_trap();
    return 0;
}
