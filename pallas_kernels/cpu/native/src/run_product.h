// Divides products into items and runs them on the threads of a pool.
#pragma once
#include <algorithm>
#include <vector>

#include "parallel_for.h"
#include "product_args.h"

namespace jattn {

constexpr int64_t kProductOneThreadWeights = 1 << 16;  // fewer: waking a second thread costs more
constexpr int64_t kProductParallelPack = 1 << 17;      // words from which the rows are packed by all threads

// The items of all matrices: four for each thread where the matrices are large enough, so that a thread that starts late
// takes fewer.
inline std::vector<ProductItem, Allocator<ProductItem>> product_items(const ProductArgs& args,
                                                                      const ProductKernel& kernel, int64_t threads) {
    int64_t columns = 0;
    for (int64_t m = 0; m < args.num_matrices; m++) columns += args.matrices[m].columns;
    const int64_t share = round_up(columns / (4 * threads) + 1, kernel.tile_columns);
    const int64_t width =
        std::min<int64_t>(std::max<int64_t>(share, 4 * kernel.tile_columns), kProductMaxTiles * kernel.tile_columns);
    std::vector<ProductItem, Allocator<ProductItem>> items;
    for (int64_t m = 0; m < args.num_matrices; m++)
        for (int64_t c = 0; c < args.matrices[m].columns; c += width)
            for (int64_t row = 0; row < args.rows; row += kProductMaxRows)
                items.push_back({m, c, std::min(args.matrices[m].columns, c + width), row,
                                 std::min<int64_t>(args.rows, row + kProductMaxRows)});
    return items;
}

template <class Pool>
void run_product(Pool& pool, const ProductArgs& args, const ProductKernel& kernel, int64_t threads) {
    int64_t weights = 0;
    for (int64_t m = 0; m < args.num_matrices; m++) weights += args.matrices[m].columns * args.inputs;
    if (threads <= 0) threads = weights < kProductOneThreadWeights ? 1 : pool.num_threads();
    const auto items = product_items(args, kernel, threads);
    const int64_t words = args.transposed ? 0 : kernel.packed_words(args);
    const CallMemory memory(4 * words);
    uint32_t* const packed = reinterpret_cast<uint32_t*>(memory.data);
    if (words && !items.empty())
        parallel_for(pool, (args.rows + kernel.block_rows - 1) / kernel.block_rows,
                     words < kProductParallelPack ? 1 : threads, [&](int64_t block, auto&) {
                         const int64_t row = block * kernel.block_rows;
                         kernel.pack(args, row, packed + row * ((args.inputs + kernel.step - 1) / kernel.step));
                     });
    const int64_t scratch = args.transposed ? 0 : product_scratch_bytes(kernel);
    const auto run = args.transposed ? kernel.run_transposed : kernel.run;
    parallel_for(pool, (int64_t)items.size(), threads, [&](int64_t i, const std::atomic<int64_t>& next_item) {
        static thread_local Buffer buffer;
        const int64_t next = std::min<int64_t>(next_item.load(std::memory_order_relaxed), items.size() - 1);
        run(args, items[i], items[next], packed, Arena(scratch ? buffer.get(scratch) : nullptr, scratch));
    });
}

}  // namespace jattn
