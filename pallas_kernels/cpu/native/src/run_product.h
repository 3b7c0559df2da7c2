// Divides products into items and runs them on the threads of a pool.
#pragma once
#include <algorithm>
#include <vector>

#include "parallel_for.h"
#include "product_args.h"

namespace jattn {

constexpr int64_t kProductThreadWeights = 1 << 15;     // weights of a thread at least: waking one takes as long
constexpr int64_t kProductParallelPack = 1 << 17;      // from so many words on, all threads pack the rows

// An item is at most 1 / kProductItemsOfThread of a thread's share of what is left, so that the threads end together.
constexpr int64_t kProductItemsOfThread = 3;

// The tiles of the narrowest item. Narrow ones read slower, so none has fewer than four unless threads would be idle.
inline int64_t least_tiles(int64_t all_tiles, int64_t threads) {
    return std::min<int64_t>(4, std::max<int64_t>(1, all_tiles / threads));
}

// The items of all matrices. They become narrower towards the end, so that the threads end together.
inline std::vector<ProductItem, Allocator<ProductItem>> product_items(const ProductArgs& args,
                                                                      const ProductKernel& kernel, int64_t threads) {
    int64_t left = 0;  // columns
    for (int64_t m = 0; m < args.num_results(); m++) left += args.matrices[m].columns;
    const int64_t least = least_tiles(left / kernel.tile_columns, threads);
    std::vector<ProductItem, Allocator<ProductItem>> items;
    for (int64_t m = 0; m < args.num_results(); m++)
        for (int64_t begin = 0, end; begin < args.matrices[m].columns; left -= end - begin, begin = end) {
            const int64_t tiles = std::max(least, left / (kProductItemsOfThread * threads * kernel.tile_columns));
            end = std::min(args.matrices[m].columns,
                           begin + kernel.tile_columns * std::min(tiles, product_max_tiles(args.rows)));
            for (int64_t row = 0; row < args.rows; row += kProductMaxRows)
                items.push_back({m, begin, end, row, std::min<int64_t>(args.rows, row + kProductMaxRows)});
        }
    return items;
}

template <class Pool>
void run_product(Pool& pool, const ProductArgs& args, const ProductKernel& kernel, int64_t threads) {
    int64_t weights = 0;
    for (int64_t m = 0; m < args.num_matrices; m++) weights += args.matrices[m].columns * args.inputs;
    if (threads <= 0)
        threads = std::min<int64_t>(pool.num_threads(), std::max<int64_t>(1, weights / kProductThreadWeights));
    const auto items = product_items(args, kernel, threads);
    const int64_t words = args.transposed ? 0 : kernel.packed_words(args);
    const CallMemory memory(4 * words);
    uint32_t* const packed = reinterpret_cast<uint32_t*>(memory.data);
    const int64_t block_rows = kernel.block_rows(args.rows);
    if (words && !items.empty())
        parallel_for(pool, (args.rows + block_rows - 1) / block_rows,
                     words < kProductParallelPack ? 1 : threads, [&](int64_t block, auto&) {
                         const int64_t row = block * block_rows;
                         kernel.pack(args, row, packed + row * kernel.row_words(args));
                     });
    const int64_t scratch = args.transposed ? 0 : product_scratch_bytes(kernel);
    const auto run = args.transposed ? kernel.run_transposed : kernel.run;
    parallel_for(pool, (int64_t)items.size(), threads, [&](int64_t i, const std::atomic<int64_t>& next_item) {
        static thread_local Buffer buffer;
        const int64_t next = std::min<int64_t>(next_item.load(std::memory_order_relaxed), items.size() - 1);
        run(args, items[i], items[next], packed, Arena(scratch ? buffer.get(scratch) : nullptr, scratch));
    });
}

// Args: HeadProductArgs or ExpertProductArgs. An item is some columns of one head or expert; its thread packs the rows
// itself, at most kProductMaxRows at a time.
template <class Pool, class Args>
void run_grouped_products(Pool& pool, const Args& args, const ProductKernel& kernel, int64_t threads) {
    if (threads <= 0) {
        const int64_t useful = args.groups() * args.inputs * args.columns / kProductThreadWeights;
        threads = std::min<int64_t>(pool.num_threads(), std::max<int64_t>(1, useful));
    }
    const int64_t all_tiles = args.groups() * ((args.columns + kernel.tile_columns - 1) / kernel.tile_columns);
    const int64_t least = least_tiles(all_tiles, threads);
    const int64_t wanted = std::max(least, all_tiles / (kProductItemsOfThread * threads));
    const int64_t tiles = std::min(wanted, product_max_tiles(args.most_rows()));
    const int64_t width = kernel.tile_columns * tiles;
    const int64_t parts = (args.columns + width - 1) / width, items = args.groups() * parts;
    parallel_for(pool, items, threads, [&](int64_t i, const std::atomic<int64_t>& next_item) {
        static thread_local Buffer buffer;
        const int64_t next = std::min<int64_t>(next_item.load(std::memory_order_relaxed), items - 1);
        const int64_t begin = i % parts * width, end = std::min(args.columns, begin + width);
        const int64_t all_rows = args.rows_of(i / parts);
        for (int64_t row = 0; row < all_rows; row += kProductMaxRows) {
            const ProductMatrix matrices[] = {args.matrix(i / parts, row), args.matrix(next / parts, 0)};
            const ProductArgs rows =
                args.of_rows(i / parts, row, std::min<int64_t>(all_rows, row + kProductMaxRows), matrices);
            const int64_t words = kernel.packed_words(rows), block_rows = kernel.block_rows(rows.rows);
            const int64_t scratch = product_scratch_bytes(kernel) + round_up(4 * words, 64);
            Arena arena(buffer.get(scratch), scratch);
            uint32_t* const packed = arena.take<uint32_t>(words);
            for (int64_t first = 0; first < rows.rows; first += block_rows)
                kernel.pack(rows, first, packed + first * kernel.row_words(rows));
            kernel.run(rows, {0, begin, end, 0, rows.rows}, {1, next % parts * width, 0, 0, 0}, packed, arena);
        }
    });
}

}  // namespace jattn
