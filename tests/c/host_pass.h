// SPDX-License-Identifier: MIT
// host_pass.h - the memory of host_device.h, and a pass: what its steps share. The memory is the host's, but at
// addresses that the host does not have, so that whoever mixes them up crashes.
#ifndef LLAMAC_HOST_PASS_H
#define LLAMAC_HOST_PASS_H
#include "device.h"
#include "eval.h"
#include "plan.h"
#include "test.h"

enum { MOST_BLOCKS = 256, MOST_ROWS = 700 };   // rows: of a chunk; an encoder's has a whole text
struct host_block { uint64_t address; size_t bytes; uint8_t *memory; };
struct host_device {
    llamac_device callbacks;
    llamac_plan plan, mtp_plan;   // mtp_plan: of the MTP layer, if the model has one
    llamac_plan drafter_plans[2];   // of a drafter (host_device_add_drafter); of an EAGLE-3 head also after a draft
    llamac_plan trunk_plan;       // of the model with the states that an EAGLE-3 head reads
    struct host_block blocks[MOST_BLOCKS];
    int n_blocks;
    uint64_t next_address;
    long calls, fail_at;      // of all callbacks but `free`; the call that fails, or 0
    int cancels;              // whether `forward` gives up
    int copies, reads, writes, forwards;
};

static inline int host_fails(struct host_device *d, llamac_error *e) {
    if (++d->calls != d->fail_at) return 0;
    *e = (llamac_error){ LLAMAC_DEVICE_FAILED, "the device is lost" };
    return 1;
}

static inline uint64_t host_alloc(void *context, size_t bytes, llamac_error *e) {
    struct host_device *d = context;
    if (host_fails(d, e)) return 0;
    if (d->n_blocks == MOST_BLOCKS) { printf("too many blocks\n"); exit(1); }
    const struct host_block block = { (UINT64_C(1) << 60) + d->next_address, bytes, take(bytes) };
    memset(block.memory, 0xff, bytes);   // NaNs
    d->next_address += (bytes + 1023) / 256 * 256;
    d->blocks[d->n_blocks++] = block;
    return block.address;
}

static inline void host_free(void *context, uint64_t address) {
    struct host_device *d = context;
    int i = 0;
    while (i < d->n_blocks && d->blocks[i].address != address) i++;
    CHECK(i < d->n_blocks, "free of an unknown address");
    if (i == d->n_blocks) return;
    free(d->blocks[i].memory);
    d->blocks[i] = d->blocks[--d->n_blocks];
}

// The memory of a range, which must be inside one block.
static inline uint8_t *host_memory(const struct host_device *d, uint64_t address, size_t bytes) {
    for (int i = 0; i < d->n_blocks; i++) {
        const struct host_block *b = &d->blocks[i];
        if (address >= b->address && address - b->address <= b->bytes && bytes <= b->bytes - (address - b->address))
            return b->memory + (address - b->address);
    }
    printf("%zu bytes at %#llx are not the device's\n", bytes, (unsigned long long)address);
    exit(1);
}

static inline int host_copy(void *context, uint64_t to, uint64_t from, size_t bytes, llamac_error *e) {
    struct host_device *d = context;
    d->copies++;
    if (host_fails(d, e)) return -1;
    memcpy(host_memory(d, to, bytes), host_memory(d, from, bytes), bytes);
    return 0;
}
static inline int host_read(void *context, void *to, uint64_t from, size_t bytes, llamac_error *e) {
    struct host_device *d = context;
    d->reads++;
    if (host_fails(d, e)) return -1;
    memcpy(to, host_memory(d, from, bytes), bytes);
    return 0;
}
static inline int host_write(void *context, uint64_t to, const void *from, size_t bytes, llamac_error *e) {
    struct host_device *d = context;
    d->writes++;
    if (host_fails(d, e)) return -1;
    memcpy(host_memory(d, to, bytes), from, bytes);
    return 0;
}

// ---- a chunk

struct pass {
    const struct host_device *device;
    const llamac_plan *plan;
    const llamac_chunk *chunk;
    llamac_session_info info;
    int wanted[MOST_ROWS];                  // rows that want logits
    int32_t table_of[MOST_ROWS], last_table_of[MOST_ROWS], sequences[MOST_ROWS], ends[MOST_ROWS], viewpoints[MOST_ROWS];
    float *buffers[LLAMAC_N_BUFFERS];
    float *angles[FORMAT_MAX_ROPE];       // (rows, dim)
    int n_pairs, n_used;                  // pairs of rows and experts, by expert, then by row
    int *experts;                         // (rows, n_used), ascending
    float *weights, *shared_weights;      // (rows, n_used), (rows)
    int *pair_rows, *pair_experts;        // (n_pairs)
    llamac_segment segments[MOST_ROWS];
    int n_segments;
    struct cancel cancel;
};

static inline const float *floats_of(const llamac_operand *o) { return o->data; }

static inline int rows_of(const struct pass *p, int buffer) {
    if (buffer >= LLAMAC_BUFFER_OUTPUT_NORMED) return p->chunk->n_wanted;
    if (buffer >= LLAMAC_BUFFER_HIDDEN_NORMED) return p->chunk->n_hidden;
    return buffer >= LLAMAC_BUFFER_EXPERT_GATE ? p->n_pairs : p->chunk->n_rows;
}

// Copies rows of `width` numbers from row indices[i] of x; NULL: row i.
static inline float *picked_rows(const float *x, const int *indices, int n, int width) {
    float *rows = take_floats(n, width);
    for (int i = 0; i < n; i++)
        memcpy(rows + i * width, x + (indices ? indices[i] : i) * width, sizeof(float) * (size_t)width);
    return rows;
}
#endif
