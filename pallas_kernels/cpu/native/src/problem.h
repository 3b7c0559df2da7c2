// What is computed, as plain data: shared by the dispatcher and by every ISA's kernels.
#pragma once
#include <atomic>
#include <cstdint>

#include "memory.h"
#include "mutants.h"

namespace jattn {

enum class Dtype : int32_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4, i8 = 5 };
constexpr int kDtypes = 6;

constexpr int kShortRows = 16;       // requests with at most this many rows (queries x heads of a group) stream the keys
constexpr int kLongRows = 480;       // otherwise tiles of at most this many rows, a multiple of every register block
constexpr int kShortChunk = 2048;    // keys of one piece of a split request: fixed, so bits never depend on the batch
constexpr int kLongChunk = 4096;
constexpr int kTileKeys = 128;       // keys of a tile of the long kernel
constexpr int kBlockKeys = 512;      // keys between two updates of the running maximum in the short kernel

constexpr int64_t bytes_of(Dtype t) { return t == Dtype::f32 ? 4 : t == Dtype::f16 || t == Dtype::bf16 ? 2 : 1; }
constexpr bool is_float8(Dtype t) { return t == Dtype::e4m3 || t == Dtype::e5m2; }
inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A ragged batch over pages, or over packed keys. Absent arrays are nullptr.
struct Problem {
    const char *q, *k, *v;                          // q [T H D]; pools of rows, see row_index
    const float *k_token_scale, *v_token_scale;     // one a row of the pool
    const int32_t *query_start, *seq_len, *kv_len;  // [R+1], [R], [R]
    const int32_t *table, *kv_start;                // [R B] pages, or [R] first packed key
    const int32_t* causal;                          // [R]
    const float *slopes, *sinks, *q_scale, *k_scale, *v_scale;  // [H] [H] [H] [K] [K]
    char* out;                                      // [T H V]
    float* lse;                                     // [T H]
    bool stream_out;  // a large output of whole cache lines: written past the caches
    bool paged;
    int64_t tokens, requests, table_width, blocks, packed_keys;
    int32_t block_size, heads, kv_heads, group, dim, vdim;
    int64_t block_stride, head_stride, slot_stride;  // of a row, in rows
    Dtype q_type, kv_type, out_type;
    float scale, soft_cap;                           // soft_cap 0: off
    int32_t left, right, chunk;                      // -1, -1, 0: off
};

// Rows of one request's queries against a stretch of its keys, for one kv head (chosen by the caller of a kernel).
struct Work {
    int32_t req, q0, nq;        // queries q0 .. q0+nq-1 of the request
    int32_t g0, ng;             // heads of the group
    int32_t begin, end;         // keys
    int32_t split, splits;      // which piece of how many
    int64_t partial, counter;   // where the pieces of kv head 0 begin: floats, and counters
    bool is_short;
    double cost;
    int rows() const { return nq * ng; }
};

// True where rows of the output are whole cache lines: they may be written past the caches.
inline bool may_stream(const Problem& p) {
    return p.vdim * bytes_of(p.out_type) % 64 == 0 && reinterpret_cast<uintptr_t>(p.out) % 64 == 0;
}

// Keys [lo, hi) that the query at `position` sees: every mask of the library is such a range.
struct Range {
    int64_t lo, hi;
};

inline Range visible(const Problem& p, int req, int64_t position) {
    int64_t lo = 0, hi = p.kv_len[req];
    const int64_t after = position + JATTN_MUTANT(causal_off_by_one, 2, 1);
    if (p.causal && p.causal[req] && after < hi) hi = after;
    const int64_t before = position - p.left - JATTN_MUTANT(window_off_by_one, 1, 0);
    if (p.left >= 0 && before > lo) lo = before;
    if (p.right >= 0 && position + p.right + 1 < hi) hi = position + p.right + 1;
    if (p.chunk > 0) {
        int64_t first = position / p.chunk * p.chunk - (position % p.chunk < 0 ? p.chunk : 0);
        first += JATTN_MUTANT(chunk_off_by_one, 1, 0);
        if (first > lo) lo = first;
        if (first + p.chunk < hi) hi = first + p.chunk;
    }
    if (hi < 0) hi = 0;
    return {lo < hi ? lo : hi, hi};
}

// Row of key `j` of a request in the pool; a page outside the pool is clamped, so nothing outside is ever touched.
inline int64_t row_index(const Problem& p, int req, int head, int64_t j) {
    if (!p.paged) return (p.kv_start[req] + j) * p.slot_stride + head * p.head_stride;  // see lengths.h
    int64_t block = p.table[(int64_t)req * p.table_width + j / p.block_size];
    block = block < 0 ? 0 : block >= p.blocks ? p.blocks - 1 : block;
    return block * p.block_stride + head * p.head_stride + j % p.block_size * p.slot_stride;
}

// New rows into the pool, in place.
struct Write {
    const char *k, *v;             // [T K D], [T K V]
    char *k_pool, *v_pool;
    float *k_token_scale, *v_token_scale;  // nullptr unless scales are per token and head
    const int32_t* slots;
    const float *k_scale, *v_scale;  // [K] or nullptr
    int64_t blocks;
    int32_t block_size, kv_heads, dim, vdim;
    int64_t block_stride, head_stride, slot_stride;
    Dtype from, to;
};

// Items of a batch: work i / kv_heads for head i % kv_heads. Threads claim them in order: `claimed` comes next.
struct Queue {
    const Work* works;
    int64_t items;
    const std::atomic<int64_t>& claimed;
};

// What one ISA offers. attend[t] is nullptr where another ISA's serves (see dispatch.h).
struct Kernels {
    const char* name;
    void (*attend[kDtypes])(const Problem&, const Queue&, int64_t item, float* partials, int32_t* counters,
                            Arena scratch);
    void (*write)(const Write&, int64_t begin, int64_t end);
    int64_t lanes;  // padding of rows in memory, in floats
};

// Floats of one piece's partial result: accumulators, then running maximum and sum of every row.
inline int64_t padded_vdim(const Problem& p) { return round_up(p.vdim, 32); }
inline int64_t partial_floats(const Problem& p, int rows) { return round_up(rows, 8) * (padded_vdim(p) + 2); }

// Upper bound of the scratch memory of one thread.
inline int64_t scratch_bytes(const Problem& p) {
    int64_t dim = round_up(p.dim, 32), vdim = padded_vdim(p), rows = kLongRows + 8;
    int64_t floats = rows * (dim + vdim + 2 * kTileKeys + 20) + kTileKeys * (dim + vdim + 16);
    return 4 * floats + 8 * (kShortChunk + 128) + 4 * kBlockKeys * 16 + 16384;
}

}  // namespace jattn
