// y = x w for few rows: every weight is read once, in the order of memory.
//
// A register block is a few rows times a tile of 2 N columns. The inputs are visited in groups: one group meets all
// columns of the item before the next does, so that the reads are a few long streams. Between groups the sums are in
// scratch memory. If there are more than two blocks of rows, they share a copy of the tile, converted once.
// An element of y is one chain of sums over the inputs in ascending order, so its bits depend neither on the other rows
// nor on how the work is divided.
#pragma once
#include <algorithm>
#include <cstring>

#include "common.h"
#include "product_args.h"

namespace JATTN_ISA {

constexpr int kTileColumns = 2 * N;
constexpr int kProductRows = N == 8 ? 6 : 12;  // AVX2 has 16 registers, the others 32

// Products in float32. A word is one input of a row.
template <Dtype T>
struct ProductF32 {
    static constexpr Dtype kDtype = T;
    static constexpr int kStep = 1;  // inputs of one word
    using Weights = vf;
    INL void load_weights(const char* w, int64_t, vf& a, vf& b) { load_two_vectors<T>(w, 0, a, b); }
    INL vf load_copy(const uint32_t* p) { return as_floats(load_words(p)); }
    INL void store_copy(uint32_t* p, vf w) { store_words(p, as_words(w)); }
    INL vf multiply_add(vf w, const uint32_t* x, vf sum) { return fma(w, as_floats(set1_word(x)), sum); }
    INL void restore_order(float* sums) {
        if constexpr (loads_deinterleaved(T)) {
            vf a = load(sums), b = load(sums + N);
            interleave(a, b);
            store(sums, a), store(sums + N, b);
        }
    }
    static void pack_row(const char* row, int64_t inputs, uint32_t* to, int stride) {
        float part[N];
        for (int64_t k = 0; k < inputs; k += N) {
            const int n = (int)(inputs - k < N ? inputs - k : N);
            store(part, load_float<T>(row, k, n));
            for (int i = 0; i < n; i++) std::memcpy(to + (k + i) * stride, part + i, 4);
        }
    }

    // Up to 2 N numbers of a row, in two vectors; the same order for every row.
    struct Part {
        vf a, b;
    };
    INL Part load_part(const char* row, int64_t k) {
        Part part;
        load_two_vectors<T>(row, k, part.a, part.b);
        return part;
    }
    INL Part load_tail(const char* row, int64_t k, int n) {
        return {load_float<T>(row, k, n), n > N ? load_float<T>(row, k + N, n - N) : zero()};
    }
    INL vf dot(Part x, Part y, vf sum) { return fma(x.b, y.b, fma(x.a, y.a, sum)); }
};

// Prefetches one input's weights of a tile into the second cache level; into the first, half as many bytes a second
// arrive.
template <class C>
INL void prefetch_tile(const char* w) {
    constexpr int kBytes = kTileColumns * (int)bytes_of(C::kDtype);
#pragma GCC unroll 2
    for (int c = 0; c < kBytes; c += 64) prefetch_far(w + c);
}

// The weights of a tile, `stride` bytes from input to input, and those of the same columns in the next group.
struct Tile {
    const char* w;
    int64_t stride;
    const char* next;  // of a copy: nullptr if they are not to be prefetched
    int64_t next_stride;
};

// The sums of R rows, [R][kTileColumns], after `steps` more words. kCopied: the weights are a copy. The next group is
// prefetched line by line: in one burst, its reads would not overlap with arithmetic. With a copy, one input a step.
template <class C, int R, bool kCopied>
static void multiply_block(Tile tile, int64_t steps, const uint32_t* x, float* sums, bool is_first) {
    vf a[R], b[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
        a[r] = is_first ? zero() : load(sums + r * kTileColumns);
        b[r] = is_first ? zero() : load(sums + r * kTileColumns + N);
    }
    for (int64_t s = 0; s < steps; s++, x += R) {
        typename C::Weights first, second;
        if constexpr (kCopied) {
            const uint32_t* copy = reinterpret_cast<const uint32_t*>(tile.w) + s * kTileColumns;
            first = C::load_copy(copy), second = C::load_copy(copy + N);
        } else {
            C::load_weights(tile.w, tile.stride, first, second);
            tile.w += C::kStep * tile.stride;
        }
        if (!kCopied || tile.next)
#pragma GCC unroll 2
            for (int i = 0; i < (kCopied ? 1 : C::kStep); i++, tile.next += tile.next_stride)
                prefetch_tile<C>(tile.next);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            a[r] = C::multiply_add(first, x + r, a[r]);
            b[r] = C::multiply_add(second, x + r, b[r]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) store(sums + r * kTileColumns, a[r]), store(sums + r * kTileColumns + N, b[r]);
}

// `rows` rounded up to a size that multiply_rows has. The rows that are added are zeros.
constexpr int padded_rows(int rows) {
    return rows <= 4 ? rows : rows <= 6 || kProductRows == 6 ? 6 : rows <= 8 ? 8 : 12;
}

// The rows of a block, if `rows` rows are divided into blocks of about equal size.
static int block_rows(int64_t rows) {
    const int64_t blocks = (rows + kProductRows - 1) / kProductRows;
    return blocks ? padded_rows((int)((rows + blocks - 1) / blocks)) : kProductRows;
}

template <class C, bool kCopied, class... Rest>
INL void multiply_rows(int rows, Rest... rest) {
    switch (rows) {
        case 1: return multiply_block<C, 1, kCopied>(rest...);
        case 2: return multiply_block<C, 2, kCopied>(rest...);
        case 3: return multiply_block<C, 3, kCopied>(rest...);
        case 4: return multiply_block<C, 4, kCopied>(rest...);
        case 6: return multiply_block<C, 6, kCopied>(rest...);
        default:
            if constexpr (kProductRows > 6) {
                if (rows == 8) return multiply_block<C, 8, kCopied>(rest...);
                return multiply_block<C, 12, kCopied>(rest...);
            }
    }
}

// Words [steps][padded_rows] of a block of rows.
template <class C>
static void pack_rows(const ProductArgs& args, int64_t first, uint32_t* to) {
    const int rows = (int)std::min<int64_t>(block_rows(args.rows), args.rows - first), stride = padded_rows(rows);
    const int64_t steps = (args.inputs + C::kStep - 1) / C::kStep, row_bytes = args.inputs * bytes_of(C::kDtype);
    for (int r = 0; r < rows; r++) C::pack_row(args.x + (first + r) * row_bytes, args.inputs, to + r, stride);
    for (int r = rows; r < stride; r++)
        for (int64_t s = 0; s < steps; s++) to[s * stride + r] = 0;
}

// `inputs` rows of `columns` weights -> rows of kTileColumns, zeros after the last column and the last input.
template <class C>
INL void pad_tile(const char* w, int64_t stride, int64_t inputs, int64_t columns, int64_t padded_inputs, char* to) {
    constexpr int64_t kRowBytes = kTileColumns * bytes_of(C::kDtype);
    std::memset(to, 0, padded_inputs * kRowBytes);
    for (int64_t k = JATTN_MUTANT(product_inputs_dropped, 1, 0); k < inputs; k++)
        std::memcpy(to + k * kRowBytes, w + k * stride, columns * bytes_of(C::kDtype));
}

// Replaces the tile by a copy in the form in which it is multiplied.
template <class C>
INL void copy_tile(Tile& tile, int64_t steps, uint32_t* copy) {
    for (int64_t s = 0; s < steps; s++) {
        typename C::Weights a, b;
        C::load_weights(tile.w + s * C::kStep * tile.stride, tile.stride, a, b);
        C::store_copy(copy + s * kTileColumns, a), C::store_copy(copy + s * kTileColumns + N, b);
    }
    tile.w = reinterpret_cast<const char*>(copy);
}

// Where the sums of an item are: [tile][padded row][kTileColumns].
struct Sums {
    float* data;
    int64_t of_tile;
    float* at(int64_t column, int64_t row) const {
        return data + column / kTileColumns * of_tile + row * kTileColumns;
    }
};

// The item's rows times its columns of one matrix. `next`: the weights to prefetch at the end.
template <class C>
static void multiply_columns(const ProductArgs& args, const ProductItem& item, const ProductMatrix& matrix, Tile next,
                             const uint32_t* packed, Sums sums, Arena scratch) {
    constexpr int64_t kBytes = bytes_of(C::kDtype);
    const int64_t stride = matrix.columns * kBytes, steps_of_row = (args.inputs + C::kStep - 1) / C::kStep;
    const int64_t num_rows = item.row_end - item.row_begin, num_columns = item.column_end - item.column_begin;
    const int64_t block = block_rows(args.rows);
    const bool copies = num_rows > 2 * block;  // reading the tile twice is faster than copying it
    const int64_t most = copies ? kProductMaxInputs : product_group(std::min(block, num_rows));
    const int64_t group = std::min(most, product_group_of_stride(stride));
    char* const padded = scratch.take<char>(kProductMaxInputs * kTileColumns * kBytes);
    uint32_t* const copy = scratch.take<uint32_t>(kProductMaxInputs * kTileColumns);
    if (!args.inputs) std::memset(sums.data, 0, 4 * sums.of_tile * ((num_columns + kTileColumns - 1) / kTileColumns));

    for (int64_t first = 0; first < args.inputs; first += group) {
        const int64_t inputs = std::min(group, args.inputs - first), steps = (inputs + C::kStep - 1) / C::kStep;
        for (int64_t c = 0; c < num_columns; c += kTileColumns) {
            const char* const w = matrix.w + first * stride + (item.column_begin + c) * kBytes;
            Tile tile{w, stride, w + group * stride, stride};
            if (first + group >= args.inputs) tile.next = next.w + c * kBytes, tile.next_stride = next.stride;
            const int64_t columns = std::min<int64_t>(kTileColumns, num_columns - c);
            if (columns < kTileColumns || inputs % C::kStep) {
                pad_tile<C>(w, stride, inputs, columns, steps * C::kStep, padded);
                tile.w = padded, tile.stride = kTileColumns * kBytes;
            }
            if (copies) copy_tile<C>(tile, steps, copy);
            const bool is_first = JATTN_MUTANT(product_groups_not_summed, true, first == 0);
            for (int64_t row = 0; row < num_rows; row += block) {
                const int rows = padded_rows((int)std::min(block, num_rows - row));
                const uint32_t* x = packed + (item.row_begin + row) * steps_of_row + first / C::kStep * rows;
                if (copies)
                    multiply_rows<C, true>(rows, tile, steps, x, sums.at(c, row), is_first);
                else
                    multiply_rows<C, false>(rows, tile, steps, x, sums.at(c, row), is_first);
                if (copies && tile.next) {  // the second block prefetches the other inputs
                    const bool has_more = row == 0 && C::kStep > 1;
                    tile.next = has_more ? tile.next + steps * tile.next_stride : nullptr;
                }
            }
        }
    }
}

// x rounded to this dtype.
INL vf rounded(Dtype t, vf x) {
    if (t == Dtype::f32) return x;
    alignas(64) char bits[4 * N];
    store_as(t, bits, 0, x);
    return t == Dtype::f16 ? load_raw<Dtype::f16>(bits, 0) : load_raw<Dtype::bf16>(bits, 0);
}

// x / (1 + exp(-x)), by the exponential of -|x|, which does not overflow.
INL vf silu(vf x) {
    const vf e = vexp(min(x, sub(zero(), x)));
    const vf numerator = select_in_range(mul(x, e), x, set1(-kInf), zero(), x);
    return div(numerator, add(set1(1.0f), e));
}

template <class C>
static void multiply_item(const ProductArgs& args, const ProductItem& item, const ProductItem& next_item,
                          const uint32_t* packed, Arena scratch) {
    const int64_t num_rows = item.row_end - item.row_begin, num_columns = item.column_end - item.column_begin;
    const int64_t tiles = (num_columns + kTileColumns - 1) / kTileColumns;
    const int64_t of_tile = (num_rows + kProductRows) * kTileColumns;
    const auto first_weights = [&](const ProductMatrix& matrix, int64_t column) {
        return Tile{matrix.w + column * bytes_of(C::kDtype), matrix.columns * bytes_of(C::kDtype), nullptr, 0};
    };
    const ProductMatrix& matrix = args.matrices[item.matrix];
    const Tile next = first_weights(args.matrices[next_item.matrix], next_item.column_begin);
    const Sums sums{scratch.take<float>(of_tile * tiles), of_tile};
    Sums gate = sums;
    if (args.silu) {
        gate.data = scratch.take<float>(of_tile * tiles);
        const ProductMatrix& up = args.matrices[1];
        multiply_columns<C>(args, item, matrix, first_weights(up, item.column_begin), packed, gate, scratch);
        multiply_columns<C>(args, item, up, next, packed, sums, scratch);
    } else {
        multiply_columns<C>(args, item, matrix, next, packed, sums, scratch);
    }

    for (int64_t c = 0; c < num_columns; c += kTileColumns)
        for (int64_t row = 0; row < num_rows; row++) {
            float* const y = sums.at(c, row);
            if (JATTN_MUTANT(product_columns_unordered, false, true)) C::restore_order(y);
            if (args.silu) {
                float* const g = gate.at(c, row);
                C::restore_order(g);
                for (int i = 0; i < kTileColumns; i += N) {
                    const vf of_gate = silu(rounded(args.out_dtype, load(g + i)));
                    store(y + i, mul(of_gate, rounded(args.out_dtype, load(y + i))));
                }
            }
            const int n = (int)std::min<int64_t>(kTileColumns, num_columns - c);
            const int64_t at = (item.row_begin + row) * matrix.columns + item.column_begin + c;
            store_as(args.out_dtype, matrix.y, at, load(y), n < N ? n : N);
            if (n > N) store_as(args.out_dtype, matrix.y, at + N, load(y + N), n - N);
        }
}

constexpr int kDotColumns = 4;                   // rows of a transposed matrix that are read side by side
constexpr int kDotRows = kProductRows == 6 ? 2 : 6;

// R rows times kDotColumns rows of a transposed matrix, into y[r][0 .. kDotColumns - 1].
template <class C, int R>
static void dot_block(const char* const (&x)[kDotRows], const char* const (&w)[kDotColumns], int64_t inputs,
                      int64_t ahead, float (&y)[kDotRows][N]) {
    vf sums[R][kDotColumns];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) sums[r][c] = zero();
    const auto add_part = [&](auto part) __attribute__((always_inline)) {
        typename C::Part columns[kDotColumns];
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) columns[c] = part(w[c]);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const typename C::Part row = part(x[r]);
#pragma GCC unroll 4
            for (int c = 0; c < kDotColumns; c++) sums[r][c] = C::dot(row, columns[c], sums[r][c]);
        }
    };
    int64_t k = 0;
    for (; k + kTileColumns <= inputs; k += kTileColumns) {
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) prefetch_tile<C>(w[c] + ahead + k * bytes_of(C::kDtype));
        add_part([k](const char* row) __attribute__((always_inline)) { return C::load_part(row, k); });
    }
    if (const int n = JATTN_MUTANT(product_tail_dropped, 0, (int)(inputs - k)))
        add_part([k, n](const char* row) __attribute__((always_inline)) { return C::load_tail(row, k, n); });
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) y[r][c] = hsum(sums[r][c]);
}

template <class C>
static void multiply_transposed_item(const ProductArgs& args, const ProductItem& item, const ProductItem&,
                                     const uint32_t*, Arena) {
    const ProductMatrix& matrix = args.matrices[item.matrix];
    const int64_t row_bytes = args.inputs * bytes_of(C::kDtype), ahead = kDotColumns * row_bytes;
    alignas(64) float y[kDotRows][N] = {};
    for (int64_t column = item.column_begin; column < item.column_end; column += kDotColumns) {
        const int columns = (int)std::min<int64_t>(kDotColumns, item.column_end - column);
        const char *w[kDotColumns], *x[kDotRows];  // beyond the last one, the last one again
        for (int c = 0; c < kDotColumns; c++) w[c] = matrix.w + (column + std::min(c, columns - 1)) * row_bytes;
        for (int64_t row = item.row_begin; row < item.row_end; row += kDotRows) {
            const int rows = (int)std::min<int64_t>(kDotRows, item.row_end - row);
            for (int r = 0; r < kDotRows; r++) x[r] = args.x + (row + std::min(r, rows - 1)) * row_bytes;
            if (rows == 1)
                dot_block<C, 1>(x, w, args.inputs, ahead, y);
            else if (rows == 2)
                dot_block<C, 2>(x, w, args.inputs, ahead, y);
            else if constexpr (kDotRows > 2) {
                if (rows <= 4)
                    dot_block<C, 4>(x, w, args.inputs, ahead, y);
                else
                    dot_block<C, 6>(x, w, args.inputs, ahead, y);
            }
            for (int r = 0; r < rows; r++)
                store_as(args.out_dtype, matrix.y, (row + r) * matrix.columns + column, load(y[r]), columns);
        }
    }
}

template <class C>
constexpr ProductKernel product_kernel = {
    kProductRows, block_rows, kTileColumns, C::kStep, pack_rows<C>, multiply_item<C>, multiply_transposed_item<C>};

}  // namespace JATTN_ISA
