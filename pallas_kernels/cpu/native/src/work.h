// Units of work: which rows meet which keys, how much memory that takes, and the table of kernels that run them.
//
// A row is one query of one query head. Rows of the same kv head share their keys, so a unit has queries x heads rows.
// Units with few rows run the decode kernel, which reads keys and values where they are; units with many rows run the
// prefill kernel, which copies tiles of keys and values into a layout for matrix products.
#pragma once
#include <atomic>
#include <cstdint>

#include "args.h"
#include "memory.h"
#include "product_args.h"
#include "sampling_args.h"

namespace jattn {

constexpr int kDecodeMaxRows = 16;      // requests with more rows per kv head run the prefill kernel
constexpr int kPrefillMaxRows = 480;    // of a unit: a multiple of every kBlockRows
constexpr int kDecodeSplitKeys = 2048;  // keys of a split: constants, so that results never depend on the batch
constexpr int kPrefillSplitKeys = 4096;
constexpr int kDecodeTileKeys = 512;  // keys between two updates of the running maximum
constexpr int kPrefillTileKeys = 128;

// Rows of one request against a range of its keys. A unit stands for num_kv_heads items, one per kv head.
struct WorkUnit {
    int32_t request, first_query, num_queries;
    int32_t first_head, num_heads;  // query heads, counted within the group of a kv head
    int32_t key_begin, key_end;
    int32_t split, num_splits;               // the keys of these rows are divided into num_splits units
    int64_t partial_offset, counter_offset;  // of kv head 0: its partial results in floats, its counter
    bool is_decode;
    double cost;
    int num_rows() const { return num_queries * num_heads; }
};

// Items in the order in which threads take them: item i is unit i / num_kv_heads, kv head i % num_kv_heads.
struct WorkQueue {
    const WorkUnit* units;
    int64_t num_items;
    const std::atomic<int64_t>& next_item;
};

// The kernels of one ISA. attend[t] is nullptr where another ISA serves that dtype (see dispatch.h).
struct IsaKernels {
    const char* name;
    void (*attend[kNumDtypes])(const AttentionArgs&, const WorkQueue&, int64_t item, float* partials, int32_t* counters,
                               Arena scratch);
    int latent_decode_rows;  // latent caches of 2 or 4 bytes a number: with more rows of q, the prefill kernel runs
    void (*write)(const WriteArgs&, int64_t token_begin, int64_t token_end);
    void (*draw)(const DrawArgs&, int64_t row, const DrawScratch&);
    const ProductKernel* product[kNumFloats];  // of this dtype of x and w; nullptr where another ISA serves it
    const ProductKernel* packed[kNumFormats][kNumFloats];            // of this format of w and dtype of x
    const ProductKernel* packed_transposed[kNumTransposedFormats];  // of any dtype of x
};

// Floats of the partial result of one split: accumulators of every row, then its maximum and its sum.
inline int64_t padded_v_dim(const AttentionArgs& args) { return round_up(args.v_head_dim, 32); }
inline int64_t partial_floats(const AttentionArgs& args, int rows) {
    return round_up(rows, 8) * (padded_v_dim(args) + 2);
}

// Upper bound of the scratch memory of one item.
inline int64_t scratch_bytes(const AttentionArgs& args) {
    int64_t dim = round_up(args.latent_dim, 32) + round_up(k_dim(args), 32);
    int64_t v_dim = padded_v_dim(args), rows = kPrefillMaxRows + 8;
    int64_t floats = rows * (dim + v_dim + 2 * kPrefillTileKeys + 20) + kPrefillTileKeys * (dim + v_dim + 16);
    return 4 * floats + 8 * (kDecodeSplitKeys + 128) + 4 * kDecodeTileKeys * 16 + 16384;
}

}  // namespace jattn
