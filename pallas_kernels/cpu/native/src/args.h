// The arguments of the two calls, attention and cache write, as plain structs, and how they address the key/value pool.
#pragma once
#include <cstdint>

#include "mutants.h"

namespace jattn {

enum class Dtype : int32_t { f32 = 0, f16 = 1, bf16 = 2, e4m3 = 3, e5m2 = 4, i8 = 5 };  // as in ops.py
constexpr int kNumDtypes = 6;
constexpr const char* kDtypeNames[kNumDtypes] = {"float32",       "float16",     "bfloat16",
                                                 "float8_e4m3fn", "float8_e5m2", "int8"};
constexpr int kMaxHeadDim = 512;  // of keys and of values; of each part of a latent key

constexpr int64_t bytes_of(Dtype t) { return t == Dtype::f32 ? 4 : t == Dtype::f16 || t == Dtype::bf16 ? 2 : 1; }
constexpr bool is_float8(Dtype t) { return t == Dtype::e4m3 || t == Dtype::e5m2; }
inline int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

// Attention of a ragged batch. Keys and values are in pages (`paged`) or packed. Optional arrays are nullptr if absent.
// T tokens, R requests, H query heads, K kv heads, D head_dim, V v_head_dim, B table_width.
struct AttentionArgs {
    const char *q, *k, *v;                       // q [T H D]; k, v: rows of D and V elements, see pool_row
    const float *k_token_scale, *v_token_scale;  // one per pool row
    const int32_t* query_start_loc;              // [R+1]
    const int32_t* seq_lens;                     // [R]: query i of n is at position seq_len - n + i
    const int32_t* kv_lens;                      // [R]: number of keys; not seq_lens where an encoder wrote them
    const int32_t *block_table, *kv_start;       // [R B] if paged, else [R]: the first packed key
    const int32_t* causal;                       // [R]
    const float *alibi_slopes, *sinks, *q_scale, *k_scale, *v_scale;  // [H] [H] [H] [K] [K]
    char* out;                                                        // [T H V]
    float* lse;                                                       // [T H]
    bool stream_out;  // write `out` with non-temporal stores; needs can_stream_out
    bool paged;
    int64_t num_tokens, num_reqs, table_width, num_blocks, num_packed_keys;
    int32_t block_size, num_heads, num_kv_heads, group_size, head_dim, v_head_dim;  // group_size: H / K
    int64_t block_stride, head_stride, slot_stride;                                 // in pool rows
    // Elements from one pool row to the next: D and V; for latent rows in two pools D - V and V, in one pool D and D.
    int64_t k_row, v_row;
    int32_t latent_dim;  // 0, or V: a key is its value (the latent), followed by D - V numbers of k
    Dtype q_dtype, kv_dtype, out_dtype;
    float scale, soft_cap;                          // soft_cap 0: off
    int32_t window_left, window_right, chunk_size;  // off: -1, -1, 0
};

// The numbers of a key that are in k.
inline int32_t k_dim(const AttentionArgs& args) { return args.head_dim - args.latent_dim; }

// New keys and values to be written into the pool, in place.
struct WriteArgs {
    const char *k, *v;  // [T K D], [T K V]
    char *k_pool, *v_pool;
    float *k_token_scale, *v_token_scale;  // nullptr unless every token and head has its own scale
    const int32_t* slot_mapping;           // [T]; a slot outside the pool: the token is not written
    const float *k_scale, *v_scale;        // [K] or nullptr
    int64_t num_blocks;
    int32_t block_size, num_kv_heads, head_dim, v_head_dim;
    int64_t block_stride, head_stride, slot_stride;
    Dtype input_dtype, kv_dtype;
};

// Non-temporal stores need rows of whole, aligned cache lines.
inline bool can_stream_out(const AttentionArgs& args) {
    return args.v_head_dim * bytes_of(args.out_dtype) % 64 == 0 && reinterpret_cast<uintptr_t>(args.out) % 64 == 0;
}

// Keys begin .. end - 1 of a request.
struct KeyRange {
    int64_t begin, end;
};

// The keys that the query at `position` sees. Every mask that these kernels support is one range of keys.
inline KeyRange visible_keys(const AttentionArgs& args, int request, int64_t position) {
    int64_t begin = 0, end = args.kv_lens[request];
    const int64_t causal_end = position + JATTN_MUTANT(causal_off_by_one, 2, 1);
    if (args.causal && args.causal[request] && causal_end < end) end = causal_end;
    const int64_t window_begin = position - args.window_left - JATTN_MUTANT(window_off_by_one, 1, 0);
    if (args.window_left >= 0 && window_begin > begin) begin = window_begin;
    if (args.window_right >= 0 && position + args.window_right + 1 < end) end = position + args.window_right + 1;
    if (args.chunk_size > 0) {
        const int64_t size = args.chunk_size;
        int64_t first = position / size * size - (position % size < 0 ? size : 0);  // rounded down, also below 0
        first += JATTN_MUTANT(chunk_off_by_one, 1, 0);
        if (first > begin) begin = first;
        if (first + size < end) end = first + size;
    }
    if (end < 0) end = 0;
    return {begin < end ? begin : end, end};
}

// The pool row of key `key` of a request. An invalid page number is clamped, so that no access leaves the pool.
inline int64_t pool_row(const AttentionArgs& args, int request, int head, int64_t key) {
    if (!args.paged)  // ClampedLengths keeps kv_start and kv_lens within the packed keys
        return (args.kv_start[request] + key) * args.slot_stride + head * args.head_stride;
    int64_t block = args.block_table[(int64_t)request * args.table_width + key / args.block_size];
    block = block < 0 ? 0 : block >= args.num_blocks ? args.num_blocks - 1 : block;
    return block * args.block_stride + head * args.head_stride + key % args.block_size * args.slot_stride;
}

}  // namespace jattn
