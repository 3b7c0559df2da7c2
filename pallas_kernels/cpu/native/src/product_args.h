// Products of few rows and weight matrices, y = x w: their arguments as plain structs, and the kernels of one ISA.
#pragma once
#include <algorithm>
#include <vector>

#include "args.h"
#include "memory.h"
#include "mutants.h"

namespace jattn {

constexpr int kNumFloats = 3;  // the dtypes of a product are the first of Dtype: f32, f16, bf16

// One matrix and its result.
struct ProductMatrix {
    const char* w;  // [inputs columns], or [columns inputs] if transposed
    char* y;        // [rows columns]
    int64_t columns;
    const char* scales = nullptr;       // of weights in 4 or 8 bits: [groups columns], or [columns 1] if transposed
    const char* zero_points = nullptr;  // int8, as the scales; nullptr: none
    const float* factor = nullptr;      // [columns], of the results besides the scales; nullptr: 1
};

enum class Format : int32_t { int8 = 0, fp8 = 1, int4 = 2, fp4 = 3 };  // of packed weights, as in ops.py
constexpr int kNumFormats = 4, kNumTransposedFormats = 2;              // of 8 bits

constexpr int64_t kPackedChunk = 64;  // inputs of packed weights that are summed before the sum is scaled

// The same x times each matrix. silu: the matrices are gate and up, equally wide and not transposed; the only result,
// y of gate, is silu(x gate) * (x up), both products rounded to out_dtype before. Arrays are aligned as their elements.
struct ProductArgs {
    const char* x;  // [rows inputs]
    const ProductMatrix* matrices;
    int64_t rows, inputs, num_matrices;
    Dtype dtype, out_dtype;  // of x and w; of y
    bool transposed, silu;
    Dtype scale_dtype;     // of packed weights: f32, f16, bf16 or e4m3
    bool has_zero_points;
    int64_t group_size;    // inputs that share scales
    // Inputs of a chunk: they are in one group.
    int64_t chunk() const {
        if (group_size >= inputs || group_size % kPackedChunk == 0) return kPackedChunk;
        return group_size < kPackedChunk ? group_size : kPackedChunk / 2;
    }
    // Are the inputs of each chunk whole words of so many?
    bool divides(int step) const { return inputs % step == 0 && chunk() % step == 0; }
    // Words of a packed row beside the inputs: the sum of the inputs of each chunk.
    int64_t num_sums() const { return has_zero_points ? (inputs + chunk() - 1) / chunk() : 0; }
    int64_t num_results() const { return silu ? 1 : num_matrices; }
};

// Products of several heads: y[h] = x[h] w[h]. The arrays are x [heads rows inputs], w [heads inputs columns] and
// y [heads rows columns].
struct HeadProductArgs {
    const char *x, *w;
    char* y;
    int64_t heads, rows, inputs, columns;
    Dtype dtype, out_dtype;  // of x and w; of y
    int64_t groups() const { return heads; }
    int64_t rows_of(int64_t) const { return rows; }
    int64_t most_rows() const { return rows; }
    // Rows row_begin .. row_end - 1 of a head, and its matrix.
    ProductMatrix matrix(int64_t head, int64_t row_begin) const {
        return {w + head * inputs * columns * bytes_of(dtype),
                y + (head * rows + row_begin) * columns * bytes_of(out_dtype), columns};
    }
    ProductArgs of_rows(int64_t head, int64_t row_begin, int64_t row_end, const ProductMatrix* matrices) const {
        return {x + (head * rows + row_begin) * inputs * bytes_of(dtype), matrices, row_end - row_begin, inputs, 1,
                dtype, out_dtype, false, false};
    }
};

constexpr int kProductMaxRows = 192;    // of an item: a multiple of all block_rows
constexpr int kProductMaxInputs = 256;  // of a group of inputs

// Rows that are in the order of their experts, times the weights of these, packed or not: y[row] = x[row] w[expert of
// the row]. A group is some rows of one expert.
struct ExpertProductArgs {
    struct Group {
        int64_t expert, row_begin, rows;
    };
    ProductArgs form;       // of each group; but x and rows are those of all rows
    ProductMatrix first;    // of expert 0, and the first row of y
    int64_t w_bytes, scale_bytes, zero_point_bytes;  // of an expert
    std::vector<Group, Allocator<Group>> active;     // each of at most kProductMaxRows rows
    int64_t inputs, columns;
    // sizes [experts]: rows of each. They come from a traced computation and are not trusted: a negative one is 0, and
    // rows beyond those of x are cut.
    void set_sizes(const int32_t* sizes, int64_t experts) {
        for (int64_t e = 0, begin = 0; e < experts; e++) {
            const int64_t end = begin + std::min<int64_t>(std::max(0, sizes[e]), form.rows - begin);
            for (; begin < end; begin += kProductMaxRows)
                active.push_back({e, begin, std::min<int64_t>(kProductMaxRows, end - begin)});
            begin = end;
        }
    }
    int64_t groups() const { return (int64_t)active.size(); }
    int64_t rows_of(int64_t i) const { return active[i].rows; }
    int64_t most_rows() const {
        int64_t most = 0;
        for (const Group& group : active) most = std::max(most, group.rows);
        return most;
    }
    ProductMatrix matrix(int64_t i, int64_t row_begin) const {
        const Group& group = active[i];
        const int64_t expert = JATTN_MUTANT(empty_experts_not_counted, i, group.expert);
        ProductMatrix matrix = first;
        matrix.w += expert * w_bytes;
        if (matrix.scales) matrix.scales += expert * scale_bytes;
        if (form.has_zero_points) matrix.zero_points += expert * zero_point_bytes;
        if (matrix.factor) matrix.factor += expert * columns;
        matrix.y += (group.row_begin + row_begin) * columns * bytes_of(form.out_dtype);
        return matrix;
    }
    ProductArgs of_rows(int64_t i, int64_t row_begin, int64_t row_end, const ProductMatrix* matrices) const {
        ProductArgs args = form;
        const int64_t first_row = JATTN_MUTANT(expert_rows_not_skipped, row_begin, active[i].row_begin + row_begin);
        args.x += first_row * inputs * bytes_of(form.dtype);
        args.rows = row_end - row_begin, args.matrices = matrices, args.num_matrices = 1;
        return args;
    }
};

// What a thread computes at a time: some rows times some columns of a matrix. row_begin is a multiple of block_rows.
struct ProductItem {
    int64_t matrix, column_begin, column_end, row_begin, row_end;
};

// The kernel of one ISA and dtype. `run` reads the rows as words, which `pack` writes; `run_transposed` reads x itself.
struct ProductKernel {
    int max_block_rows;               // the most rows of a register block
    int (*block_rows)(int64_t rows);  // rows of each block of so many rows; `pack` writes one block
    int tile_columns;                 // an item's columns begin at a multiple
    int step;                         // inputs of a word
    void (*pack)(const ProductArgs&, int64_t first_row, uint32_t* to);
    // next: an item whose first weights are prefetched.
    void (*run)(const ProductArgs&, const ProductItem&, const ProductItem& next, const uint32_t* packed, Arena scratch);
    void (*run_transposed)(const ProductArgs&, const ProductItem&, const ProductItem& next, const uint32_t*, Arena);
    int64_t row_words(const ProductArgs& args) const { return (args.inputs + step - 1) / step + args.num_sums(); }
    int64_t packed_words(const ProductArgs& args) const {
        return round_up(args.rows, block_rows(args.rows)) * row_words(args);
    }
};

// The tiles of an item's columns: the sums of all its rows stay in the second cache level.
inline int64_t product_max_tiles(int64_t rows) { return rows > kProductMaxRows / 2 ? 8 : 16; }

// The inputs of a group. With more rows there are more sums to load and store for each group, so groups are longer.
// With fewer rows they are short, so that the group before, which prefetches this one, is sooner done.
inline int64_t product_group(int64_t rows) {
    return rows == 1 ? 16 : rows <= 4 ? 32 : rows <= 8 ? 64 : 128;
}

// The most inputs of a group if the weights of one input and the next are `stride` bytes apart. With a stride of 2^k
// bytes, a second cache level of 2^20 bytes keeps the same columns of only 2^20 / 2^k inputs (at least 8): what is
// prefetched beyond that is read from memory twice. A stride of 2^k times an odd number is alike. Groups below 16 cost
// more than they save.
inline int64_t product_group_of_stride(int64_t stride) {
    const int64_t power = std::max<int64_t>(1, stride & -stride);
    return std::max<int64_t>(16, (1 << 20) / power);
}

// Upper bound of the scratch memory of one item: sums of one or two matrices, a padded tile, a copied tile.
inline int64_t product_scratch_bytes(const ProductKernel& kernel) {
    const int64_t sums = 16 * (kProductMaxRows / 2 + kernel.max_block_rows);
    return 4 * kernel.tile_columns * (2 * sums + 2 * kProductMaxInputs) + 256;
}

}  // namespace jattn
