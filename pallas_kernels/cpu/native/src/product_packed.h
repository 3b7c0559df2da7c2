// y = x w for few rows and weights in 4 or 8 bits with scales: each packed byte is read once, in the order of memory.
//
// A register block is a few rows times a tile of 4 N columns. The inputs are visited in chunks of at most 64, within one
// group of weights that share their scales: the codes' numbers times x are summed in registers, and the sum times the
// scale is added to the sums in scratch memory. The chunks depend on the weights only, so an element of y is always the
// same chain of operations: its bits depend neither on the other rows nor on how the work is divided.
#pragma once
#include <utility>

#include "product.h"

namespace JATTN_ISA {

constexpr int kPackedVectors = 4;
constexpr int kPackedColumns = kPackedVectors * N;
constexpr int kPackedRows = N == 8 ? 2 : 6;  // AVX2 has 16 registers, the others 32

// What code_in_place multiplies a code by. It shifts a code at place 7 down, whose highest bit would be a sign.
constexpr float code_power(int place) { return place == 7 ? 1.0f : (float)(1 << 4 * place); }

// Weights of one format. A load is what a column's elements of kRows rows of `w`, `stride` bytes apart, hold: kInputs
// inputs, of which each word of x holds kStep. kUnit: what a number must be multiplied by. Up to kDecodings blocks of rows
// decode the weights themselves; of more blocks, the first one keeps a copy for the others.
template <Dtype T>
struct Packed8 {
    static constexpr int kInputs = 1, kStep = 1, kBytes = 1, kRows = 1;
    static constexpr bool kIsDeinterleaved = is_float8(T);
    static constexpr int kDecodings = N == 8 || is_float8(T) ? 1 : 2;
    static constexpr float kUnit = raw_unit(T);
    using Raw = vf;
    using Weights = vf;
    struct Numbers {};
    INL Numbers numbers() { return {}; }
    INL void load(const char* w, int64_t, vf (&raw)[kPackedVectors]) {
        if constexpr (is_float8(T)) {
            const Fp8Halves halves = load_fp8_halves<T>(w, 0);
            raw[0] = widen<0>(halves), raw[1] = widen<1>(halves), raw[2] = widen<2>(halves), raw[3] = widen<3>(halves);
        } else {
#pragma GCC unroll 4
            for (int v = 0; v < kPackedVectors; v++) raw[v] = load_raw<T>(w, v * N);
        }
    }
    template <int>
    INL vf decode(vf raw, Numbers) { return raw; }
    INL vf load_copy(const uint32_t* p) { return as_floats(load_words(p)); }
    INL void store_copy(uint32_t* p, vf w) { store_words(p, as_words(w)); }
    INL vf multiply_add(vf w, const uint32_t* x, vf sum) { return fma(w, as_floats(set1_word(x)), sum); }
};

// Eight inputs in a word, four bits each: those of even inputs in its lower half, of odd ones in its upper half.
//
// With kIsInPlace a code stays where it is in its word, which makes input i's number place_power(i) times as large; x is
// divided by it. Powers of two change no bit of a product, unless x / 2^24 is subnormal (x below 2e-31).
template <class Format>
struct Packed4 {
    static constexpr int kInputs = 8, kStep = 1, kBytes = 4, kRows = 1, kDecodings = N == 8 ? 1 : 2;
    static constexpr bool kIsDeinterleaved = false, kIsInPlace = kCodesInPlace && Format::kIsLinear;
    static constexpr float kUnit = Format::kUnit;
    using Raw = vw;
    using Weights = vf;
    using Numbers = Table16;
    static constexpr int place(int input) { return input / 2 + input % 2 * 4; }
    static constexpr float place_power(int input) { return code_power(place(input)); }
    INL Table16 numbers() { return load_table(Format::kNumbers); }
    INL void load(const char* w, int64_t, vw (&raw)[kPackedVectors]) {
#pragma GCC unroll 4
        for (int v = 0; v < kPackedVectors; v++) raw[v] = load_words(reinterpret_cast<const uint32_t*>(w) + v * N);
    }
    template <int kInput>
    INL vf decode(vw raw, const Table16& numbers) {
        if constexpr (kIsInPlace)
            return sub(code_in_place<place(kInput)>(raw), set1(-Format::kNumbers[0] * place_power(kInput)));
        else
            return look_up<4 * place(kInput)>(numbers, raw);
    }
    INL vf load_copy(const uint32_t* p) { return as_floats(load_words(p)); }
    INL void store_copy(uint32_t* p, vf w) { store_words(p, as_words(w)); }
    INL vf multiply_add(vf w, const uint32_t* x, vf sum) { return fma(w, as_floats(set1_word(x)), sum); }
};

struct Int4 {
    static constexpr int8_t kNumbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    static constexpr float kUnit = 1.0f;
    static constexpr bool kIsLinear = true;  // a code's number is the code plus that of code 0
};
struct Fp4 {  // twice the number
    static constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static constexpr float kUnit = 0.5f;
    static constexpr bool kIsLinear = false;
};

// Where a register block finds its weights and those to prefetch, and what its sums are multiplied by.
struct PackedTile {
    const char* w;
    int64_t stride;
    const char* next;
    int64_t next_stride;
    uint32_t* copy;  // of the decoded weights
    vf scale[kPackedVectors], zero_point[kPackedVectors];
    bool has_zero_points;
};

// What a block of rows multiplies: the packed weights, with or without keeping a copy of the decoded ones; the copy.
enum class Source { packed, kept, copy };

// Adds to the sums of R rows, [R][kPackedColumns], those of `loads` more loads. x_sums [R]: of the rows' inputs. The
// blocks that read packed weights prefetch the next ones.
template <class W, int R, Source kSource>
static void multiply_packed_block(const PackedTile& tile, int64_t loads, const uint32_t* x, const float* x_sums,
                                  float* sums, bool is_first) {
    vf acc[R][kPackedVectors];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kPackedVectors; v++) acc[r][v] = zero();
    const auto multiply = [&](const typename W::Weights(&w)[kPackedVectors]) __attribute__((always_inline)) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < kPackedVectors; v++) acc[r][v] = W::multiply_add(w[v], x + r, acc[r][v]);
        x += R;
    };
    constexpr int kWords = W::kInputs / W::kStep;
    uint32_t* copy = tile.copy;
    if constexpr (kSource == Source::copy) {
        for (int64_t i = 0; i < loads * kWords; i++, copy += kPackedColumns) {
            typename W::Weights w[kPackedVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kPackedVectors; v++) w[v] = W::load_copy(copy + v * N);
            multiply(w);
        }
    } else {
        const auto numbers = W::numbers();
        const char *w = tile.w, *next = tile.next;
        for (int64_t i = 0; i < loads; i++, w += W::kRows * tile.stride) {
            typename W::Raw raw[kPackedVectors];
            W::load(w, tile.stride, raw);
            constexpr int kTileBytes = kPackedColumns * W::kBytes;
#pragma GCC unroll 2
            for (int row = 0; row < W::kRows; row++, next += tile.next_stride)
#pragma GCC unroll 4
                for (int c = 0; c < kTileBytes; c += 64) prefetch_far(next + c);
            const auto step = [&](auto word) __attribute__((always_inline)) {
                typename W::Weights weights[kPackedVectors];
#pragma GCC unroll 4
                for (int v = 0; v < kPackedVectors; v++) weights[v] = W::template decode<word>(raw[v], numbers);
                if constexpr (kSource == Source::kept) {
#pragma GCC unroll 4
                    for (int v = 0; v < kPackedVectors; v++) W::store_copy(copy + v * N, weights[v]);
                    copy += kPackedColumns;
                }
                multiply(weights);
            };
            if constexpr (kWords == 1)
                step(std::integral_constant<int, 0>{});
            else if constexpr (kWords == 4)
                step(std::integral_constant<int, 0>{}), step(std::integral_constant<int, 1>{}),
                    step(std::integral_constant<int, 2>{}), step(std::integral_constant<int, 3>{});
            else
                step(std::integral_constant<int, 0>{}), step(std::integral_constant<int, 1>{}),
                    step(std::integral_constant<int, 2>{}), step(std::integral_constant<int, 3>{}),
                    step(std::integral_constant<int, 4>{}), step(std::integral_constant<int, 5>{}),
                    step(std::integral_constant<int, 6>{}), step(std::integral_constant<int, 7>{});
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kPackedVectors; v++) {
            float* const y = sums + r * kPackedColumns + v * N;
            vf sum = acc[r][v];
            if (tile.has_zero_points) sum = sub(sum, mul(tile.zero_point[v], set1(x_sums[r])));
            store(y, fma(sum, tile.scale[v], is_first ? zero() : ::JATTN_ISA::load(y)));
        }
}

// `rows` rounded up to a size of a register block. The rows that are added are zeros.
constexpr int padded_packed_rows(int rows) { return kPackedRows == 2 || rows <= 4 ? rows : 6; }

static int packed_block_rows(int64_t rows) {
    const int64_t blocks = (rows + kPackedRows - 1) / kPackedRows;
    return blocks ? padded_packed_rows((int)((rows + blocks - 1) / blocks)) : kPackedRows;
}

template <class W, Source kSource, class... Rest>
INL void multiply_packed_rows(int rows, const Rest&... rest) {
    switch (rows) {
        case 1: return multiply_packed_block<W, 1, kSource>(rest...);
        case 2: return multiply_packed_block<W, 2, kSource>(rest...);
        default:
            if constexpr (kPackedRows > 2) {
                if (rows == 3) return multiply_packed_block<W, 3, kSource>(rest...);
                if (rows == 4) return multiply_packed_block<W, 4, kSource>(rest...);
                return multiply_packed_block<W, 6, kSource>(rest...);
            }
    }
}

// A row as words of float32.
static void pack_floats(Dtype t, const char* row, int64_t inputs, uint32_t* to, int stride) {
    switch (t) {
        case Dtype::f32: return ProductF32<Dtype::f32>::pack_row(row, inputs, to, stride);
        case Dtype::f16: return ProductF32<Dtype::f16>::pack_row(row, inputs, to, stride);
        default: return ProductF32<Dtype::bf16>::pack_row(row, inputs, to, stride);
    }
}

// The sum of the inputs of each chunk of a row, `stride` apart.
static void sum_chunks(const ProductArgs& args, const char* row, float* to, int stride) {
    for (int64_t first = 0; first < args.inputs; first += args.chunk(), to += stride) {
        const int64_t end = std::min(args.inputs, first + args.chunk());
        vf sum = zero();
        for (int64_t k = first; k < end; k += N) {
            const int n = (int)std::min<int64_t>(N, end - k);
            sum = add(sum, args.dtype == Dtype::f32   ? load_float<Dtype::f32>(row, k, n)
                           : args.dtype == Dtype::f16 ? load_float<Dtype::f16>(row, k, n)
                                                      : load_float<Dtype::bf16>(row, k, n));
        }
        *to = hsum(sum);
    }
}

// Words [words][padded rows] of a block of rows and, if there are zero points, the sums [chunks][padded rows].
template <class W>
static void pack_packed_rows(const ProductArgs& args, int64_t first, uint32_t* to) {
    const int rows = (int)std::min<int64_t>(packed_block_rows(args.rows), args.rows - first);
    const int stride = padded_packed_rows(rows);
    const int64_t words = args.inputs / W::kStep, row_bytes = args.inputs * bytes_of(args.dtype);
    std::memset(to, 0, 4 * stride * (words + args.num_sums()));
    for (int r = 0; r < rows; r++) {
        const char* const row = args.x + (first + r) * row_bytes;
        W::pack_row(args.dtype, row, args.inputs, to + r, stride);
        if (args.has_zero_points) sum_chunks(args, row, reinterpret_cast<float*>(to + words * stride) + r, stride);
    }
}

// The first `columns` of kPackedColumns numbers from element i on, times `unit`; zeros after them.
template <Dtype T>
INL void load_columns(const char* p, int64_t i, int columns, float unit, vf (&to)[kPackedVectors]) {
    if (columns == kPackedColumns) {
#pragma GCC unroll 4
        for (int v = 0; v < kPackedVectors; v++) to[v] = mul(load_float<T>(p, i + v * N), set1(unit));
    } else {
        for (int v = 0; v < kPackedVectors; v++) {
            const int n = std::min(N, columns - v * N);
            to[v] = n > 0 ? mul(load_float<T>(p, i + v * N, n), set1(unit)) : zero();
        }
    }
}

// Scales and zero points of the tile's columns in a group.
template <class W>
INL void load_scales(const ProductArgs& args, const ProductMatrix& matrix, int64_t group, int64_t column, int columns,
                     PackedTile& tile) {
    const int64_t at = group * matrix.columns + column;
    switch (args.scale_dtype) {
        case Dtype::f32: load_columns<Dtype::f32>(matrix.scales, at, columns, W::kUnit, tile.scale); break;
        case Dtype::f16: load_columns<Dtype::f16>(matrix.scales, at, columns, W::kUnit, tile.scale); break;
        case Dtype::e4m3: load_columns<Dtype::e4m3>(matrix.scales, at, columns, W::kUnit, tile.scale); break;
        default: load_columns<Dtype::bf16>(matrix.scales, at, columns, W::kUnit, tile.scale);
    }
    if (args.has_zero_points)
        load_columns<Dtype::i8>(matrix.zero_points, at, columns, 1.0f / W::kUnit, tile.zero_point);
    if constexpr (W::kIsDeinterleaved)
        for (int v = 0; v < kPackedVectors; v += 2) {
            deinterleave(tile.scale[v], tile.scale[v + 1]);
            if (args.has_zero_points) deinterleave(tile.zero_point[v], tile.zero_point[v + 1]);
        }
}

template <class W>
static void multiply_packed_item(const ProductArgs& args, const ProductItem& item, const ProductItem& next_item,
                                 const uint32_t* packed, Arena scratch) {
    const ProductMatrix& matrix = args.matrices[item.matrix];
    const int64_t stride = matrix.columns * W::kBytes, words = args.inputs / W::kStep, chunk = args.chunk();
    const int64_t num_rows = item.row_end - item.row_begin, num_columns = item.column_end - item.column_begin;
    const int64_t tiles = (num_columns + kPackedColumns - 1) / kPackedColumns, block = packed_block_rows(args.rows);
    const int64_t of_tile = (num_rows + kPackedRows) * kPackedColumns;
    float* const sums = scratch.take<float>(of_tile * tiles);
    char* const padded = scratch.take<char>(kPackedChunk * kPackedColumns);
    uint32_t* const copy = scratch.take<uint32_t>(kPackedChunk * kPackedColumns);
    const bool keeps = num_rows > W::kDecodings * block;
    if (!args.inputs) std::memset(sums, 0, 4 * of_tile * tiles);

    for (int64_t first = 0; first < args.inputs; first += chunk) {
        const int64_t loads = std::min(chunk, args.inputs - first) / W::kInputs;
        const int64_t group = JATTN_MUTANT(packed_scales_of_first_group, 0, first / args.group_size);
        for (int64_t c = 0; c < num_columns; c += kPackedColumns) {
            const int columns = (int)std::min<int64_t>(kPackedColumns, num_columns - c);
            const int64_t rows_of_w = loads * W::kRows;
            const char* const w =
                matrix.w + first / W::kInputs * W::kRows * stride + (item.column_begin + c) * W::kBytes;
            const bool has_zero_points = JATTN_MUTANT(packed_zero_points_ignored, false, args.has_zero_points);
            PackedTile tile;
            tile.w = w, tile.stride = stride, tile.next = w + rows_of_w * stride, tile.next_stride = stride;
            tile.copy = copy, tile.has_zero_points = has_zero_points;
            if (first + chunk >= args.inputs) {
                const ProductMatrix& next = args.matrices[next_item.matrix];
                tile.next = next.w + (next_item.column_begin + c) * W::kBytes;
                tile.next_stride = next.columns * W::kBytes;
            }
            load_scales<W>(args, matrix, group, item.column_begin + c, columns, tile);
            if (columns < kPackedColumns) {
                constexpr int64_t kRowBytes = kPackedColumns * W::kBytes;
                std::memset(padded, 0, rows_of_w * kRowBytes);
                for (int64_t i = 0; i < rows_of_w; i++)
                    std::memcpy(padded + i * kRowBytes, w + i * stride, columns * W::kBytes);
                tile.w = padded, tile.stride = kRowBytes;
            }
            for (int64_t row = 0; row < num_rows; row += block) {
                const int rows = padded_packed_rows((int)std::min(block, num_rows - row));
                const uint32_t* const of_block = packed + (item.row_begin + row) * (words + args.num_sums());
                const uint32_t* const x = of_block + first / W::kStep * rows;
                const float* const x_sums =
                    reinterpret_cast<const float*>(of_block + words * rows) + first / chunk * rows;
                float* const y = sums + c / kPackedColumns * of_tile + row * kPackedColumns;
                if (row && keeps)
                    multiply_packed_rows<W, Source::copy>(rows, tile, loads, x, x_sums, y, first == 0);
                else if (keeps)
                    multiply_packed_rows<W, Source::kept>(rows, tile, loads, x, x_sums, y, first == 0);
                else
                    multiply_packed_rows<W, Source::packed>(rows, tile, loads, x, x_sums, y, first == 0);
            }
        }
    }

    for (int64_t c = 0; c < num_columns; c += kPackedColumns)
        for (int64_t row = 0; row < num_rows; row++) {
            float* const y = sums + c / kPackedColumns * of_tile + row * kPackedColumns;
            const int64_t at = (item.row_begin + row) * matrix.columns + item.column_begin + c;
            for (int v = 0; v < kPackedVectors; v += 2) {
                vf a = load(y + v * N), b = load(y + (v + 1) * N);
                if constexpr (W::kIsDeinterleaved) interleave(a, b);
                const int64_t n = num_columns - c - v * N;
                const int of_a = (int)std::min<int64_t>(n, N), of_b = (int)std::min<int64_t>(n - N, N);
                if (JATTN_MUTANT(packed_factor_ignored, false, matrix.factor != nullptr)) {
                    const char* const factor = reinterpret_cast<const char*>(matrix.factor + item.column_begin + c);
                    if (of_a > 0) a = mul(a, load_float<Dtype::f32>(factor, v * N, of_a));
                    if (of_b > 0) b = mul(b, load_float<Dtype::f32>(factor, (v + 1) * N, of_b));
                }
                if (of_a > 0) store_as(args.out_dtype, matrix.y, at + v * N, a, of_a);
                if (of_b > 0) store_as(args.out_dtype, matrix.y, at + (v + 1) * N, b, of_b);
            }
        }
}

// R rows of float32 times kDotColumns rows of a transposed matrix of one scale each, into y[r][0 .. kDotColumns - 1].
template <Dtype T, int R>
static void dot_packed_block(const float* const (&x)[kDotRows], const char* const (&w)[kDotColumns], int64_t inputs,
                             int64_t ahead, float (&y)[kDotRows][N]) {
    vf sums[R][kDotColumns];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) sums[r][c] = zero();
    const auto add_part = [&](int64_t k, int n) __attribute__((always_inline)) {
        vf columns[kDotColumns];
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) columns[c] = load_raw<T>(w[c], k, n);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const vf row = load_float<Dtype::f32>(reinterpret_cast<const char*>(x[r]), k, n);
#pragma GCC unroll 4
            for (int c = 0; c < kDotColumns; c++) sums[r][c] = fma(row, columns[c], sums[r][c]);
        }
    };
    int64_t k = 0;
    for (; k + 64 <= inputs; k += 64) {
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) prefetch_far(w[c] + ahead + k);
#pragma GCC unroll 16
        for (int i = 0; i < 64; i += N) add_part(k + i, N);
    }
    for (; k < inputs; k += N) add_part(k, (int)std::min<int64_t>(N, inputs - k));
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < kDotColumns; c++) y[r][c] = hsum(sums[r][c]);
}

// Rows of float32, in blocks of which each has one row.
template <Dtype>
static void pack_transposed_rows(const ProductArgs& args, int64_t row, uint32_t* to) {
    pack_floats(args.dtype, args.x + row * args.inputs * bytes_of(args.dtype), args.inputs, to, 1);
}

template <Dtype T>
static void multiply_packed_transposed_item(const ProductArgs& args, const ProductItem& item, const ProductItem&,
                                            const uint32_t* packed, Arena) {
    const ProductMatrix& matrix = args.matrices[item.matrix];
    const int64_t inputs = args.inputs, ahead = kDotColumns * inputs;
    alignas(64) float y[kDotRows][N] = {};
    for (int64_t column = item.column_begin; column < item.column_end; column += kDotColumns) {
        const int columns = (int)std::min<int64_t>(kDotColumns, item.column_end - column);
        const char* w[kDotColumns];  // beyond the last one, the last one again
        const float* x[kDotRows];
        for (int c = 0; c < kDotColumns; c++) w[c] = matrix.w + (column + std::min(c, columns - 1)) * inputs;
        float scales[kDotColumns] = {};
        for (int c = 0; c < columns; c++) {
            const vf scale = args.scale_dtype == Dtype::f32    ? load_float<Dtype::f32>(matrix.scales, column + c, 1)
                             : args.scale_dtype == Dtype::bf16 ? load_float<Dtype::bf16>(matrix.scales, column + c, 1)
                             : args.scale_dtype == Dtype::f16  ? load_float<Dtype::f16>(matrix.scales, column + c, 1)
                                                               : load_float<Dtype::e4m3>(matrix.scales, column + c, 1);
            scales[c] = hsum(scale) * raw_unit(T) * (matrix.factor ? matrix.factor[column + c] : 1.0f);
        }
        for (int64_t row = item.row_begin; row < item.row_end; row += kDotRows) {
            const int rows = (int)std::min<int64_t>(kDotRows, item.row_end - row);
            for (int r = 0; r < kDotRows; r++)
                x[r] = reinterpret_cast<const float*>(packed) + (row + std::min(r, rows - 1)) * inputs;
            if (rows == 1)
                dot_packed_block<T, 1>(x, w, inputs, ahead, y);
            else if (rows == 2)
                dot_packed_block<T, 2>(x, w, inputs, ahead, y);
            else if constexpr (kDotRows > 2)
                dot_packed_block<T, kDotRows>(x, w, inputs, ahead, y);
            for (int r = 0; r < rows; r++) {
                for (int c = 0; c < columns; c++) y[r][c] *= scales[c];
                store_as(args.out_dtype, matrix.y, (row + r) * matrix.columns + column, load(y[r]), columns);
            }
        }
    }
}

// Weights that are multiplied by rows of float32.
template <class W>
struct WithFloatRows : W {
    static void pack_row(Dtype t, const char* row, int64_t inputs, uint32_t* to, int stride) {
        pack_floats(t, row, inputs, to, stride);
    }
};

template <class Format>
struct WithFloatRows<Packed4<Format>> : Packed4<Format> {
    using W = Packed4<Format>;
    static void pack_row(Dtype t, const char* row, int64_t inputs, uint32_t* to, int stride) {
        pack_floats(t, row, inputs, to, stride);
        if constexpr (W::kIsInPlace) {
            float factors[W::kInputs];
            for (int i = 0; i < W::kInputs; i++) factors[i] = 1.0f / W::place_power(i);
            float* const x = reinterpret_cast<float*>(to);
            for (int64_t i = 0; i < inputs; i++) x[i * stride] *= factors[i % W::kInputs];
        }
    }
};

template <class W>
constexpr ProductKernel packed_kernel = {kPackedRows,         packed_block_rows,       kPackedColumns, W::kStep,
                                         pack_packed_rows<W>, multiply_packed_item<W>, nullptr};
inline int one_row(int64_t) { return 1; }
template <Dtype T>
constexpr ProductKernel packed_transposed_kernel = {
    kDotRows, one_row, kPackedColumns, 1, pack_transposed_rows<T>, multiply_packed_transposed_item<T>, nullptr};

constexpr const ProductKernel* packed_int8 = &packed_kernel<WithFloatRows<Packed8<Dtype::i8>>>;
constexpr const ProductKernel* packed_fp8 = &packed_kernel<WithFloatRows<Packed8<Dtype::e4m3>>>;
constexpr const ProductKernel* packed_int4 = &packed_kernel<WithFloatRows<Packed4<Int4>>>;
constexpr const ProductKernel* packed_fp4 = &packed_kernel<WithFloatRows<Packed4<Fp4>>>;

}  // namespace JATTN_ISA
