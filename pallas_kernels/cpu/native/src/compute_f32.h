// Arithmetic in float32: stored keys and values of any dtype are widened when they are loaded.
#pragma once
#include "prefetch.h"

namespace JATTN_ISA {

template <Dtype T>
struct ComputeF32 {
    static constexpr Dtype kDtype = T;
    static constexpr bool kBf16Pairs = false;  // a 32-bit word of the matrix products holds one number
    static constexpr float kRawUnit = raw_unit(T);
    static constexpr int kItemBytes = (int)bytes_of(T);
    static constexpr int64_t padded(int64_t dim) { return round_up(dim, N); }
    static int64_t row_words(int64_t dim) { return padded(dim); }

    // A row of q, in the column order in which load_two_vectors returns keys.
    static void load_query(Dtype dtype, const char* row, int dim, uint32_t* to) {
        float* q = reinterpret_cast<float*>(to);
        to_floats(dtype, row, dim, q);
        reorder<deinterleave>(q, dim);
    }

    // Adds the products of kKeysPerVector keys with 4 rows of q, lane by lane. next_rows: rows to prefetch, or nullptr.
    INL void add_products(vf (&a)[kKeysPerVector][4], const uint32_t* q_words, int64_t stride, const char* const* k,
                          int dim, const char* const* next_rows) {
        const float* q = reinterpret_cast<const float*>(q_words);
        auto multiply_by = [&](const vf(&x)[kKeysPerVector], int c) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vf y = load(q + g * stride + c);
#pragma GCC unroll 4
                for (int t = 0; t < kKeysPerVector; t++) a[t][g] = fma(x[t], y, a[t][g]);
            }
        };
        int c = 0;
        if constexpr (is_float8(T))
            for (; c + 4 * N <= dim; c += 4 * N) {
                Fp8Halves halves[kKeysPerVector];
#pragma GCC unroll 4
                for (int t = 0; t < kKeysPerVector; t++) {
                    halves[t] = load_fp8_halves<T>(k[t], c);
                    if (next_rows) prefetch_part<4 * N * kItemBytes>(next_rows[t], c * kItemBytes);
                }
                vf x[kKeysPerVector];
                widen_all<0>(halves, x), multiply_by(x, c);
                widen_all<1>(halves, x), multiply_by(x, c + N);
                widen_all<2>(halves, x), multiply_by(x, c + 2 * N);
                widen_all<3>(halves, x), multiply_by(x, c + 3 * N);
            }
        for (; c + 2 * N <= dim; c += 2 * N) {
            vf x[kKeysPerVector], y[kKeysPerVector];
#pragma GCC unroll 4
            for (int t = 0; t < kKeysPerVector; t++) {
                load_two_vectors<T>(k[t], c, x[t], y[t]);
                if (next_rows) prefetch_part<2 * N * kItemBytes>(next_rows[t], c * kItemBytes);
            }
            multiply_by(x, c);
            multiply_by(y, c + N);
        }
        for (; c < dim; c += N) {
            vf x[kKeysPerVector];
#pragma GCC unroll 4
            for (int t = 0; t < kKeysPerVector; t++) {
                x[t] = load_raw<T>(k[t], c, dim - c);
                if (next_rows) prefetch_part<N * kItemBytes>(next_rows[t], c * kItemBytes);
            }
            multiply_by(x, c);
        }
    }

    static const uint32_t* pack_decode_weights(const float* p, int, uint32_t*) {
        return reinterpret_cast<const uint32_t*>(p);
    }

    // acc[4 rows][column] += weights[n values][4 rows] * v[n values][column], one group of columns after the other.
    static void add_values(float* acc, int64_t stride, const uint32_t* weights, const int64_t* pool_rows, int n,
                           const char* v, int64_t row_bytes, int v_dim, const char* const* next_rows) {
        const float* p = reinterpret_cast<const float*>(weights);
        int c = 0;
        for (; c + kBlockVectors * N <= v_dim; c += kBlockVectors * N)
            add_columns<kBlockVectors>(acc, stride, p, pool_rows, n, v, row_bytes, c, N, next_rows);
        if constexpr (kBlockVectors > 2)
            for (; c + 2 * N <= v_dim; c += 2 * N)
                add_columns<2>(acc, stride, p, pool_rows, n, v, row_bytes, c, N, next_rows);
        for (; c < v_dim; c += N) add_columns<1>(acc, stride, p, pool_rows, n, v, row_bytes, c, v_dim - c, next_rows);
    }

    // Words c .. c + N - 1 of a key; zeros behind its end.
    INL vw load_key_words(const char* row, int c, int dim) {
        if (const int pair = c / (2 * N) * 2 * N; loads_deinterleaved(T) && pair + 2 * N <= dim) {
            vf x, y;
            load_two_vectors<T>(row, pair, x, y);
            return as_words(c == pair ? x : y);
        }
        return as_words(load_raw<T>(row, c, dim - c));
    }

    // n values as words [n][v_dim]; returns n, the depth of the product.
    static int pack_values(const char* v, const int64_t* pool_rows, int n, int64_t row_bytes, int v_dim, uint32_t* to,
                           int64_t stride) {
        for (int t = 0; t < n; t++)
            for (int c = 0; c < v_dim; c += N)
                store_words(to + t * stride + c, load_key_words(v + pool_rows[t] * row_bytes, c, v_dim));
        return n;
    }
    INL void pack_prefill_weights(const vf* x, int vectors, uint32_t* to) {
        for (int i = 0; i < vectors; i++) store_words(to + i * N, as_words(x[i]));
    }
    INL vf multiply_add(vf c, const uint32_t* a, vw b) { return fma(as_floats(set1_word(a)), as_floats(b), c); }
    static void restore_column_order(float* acc, int64_t v_dim) { reorder<interleave>(acc, v_dim); }

   private:
    // One quarter of the numbers of each key: see Fp8Halves.
    template <int kPart>
    INL void widen_all(const Fp8Halves (&halves)[kKeysPerVector], vf (&x)[kKeysPerVector]) {
#pragma GCC unroll 4
        for (int t = 0; t < kKeysPerVector; t++) x[t] = widen<kPart>(halves[t]);
    }

    // Converts to the column order of load_two_vectors (kHow: deinterleave), or back (interleave). Columns behind the
    // last two whole vectors keep their places.
    template <void (*kHow)(vf&, vf&)>
    INL void reorder(float* x, int64_t n) {
        if (!loads_deinterleaved(T)) return;
        for (int64_t c = 0; c + 2 * N <= n; c += 2 * N) {
            vf a = load(x + c), b = load(x + c + N);
            kHow(a, b);
            store(x + c, a);
            store(x + c + N, b);
        }
    }

    template <int NV>
    INL void add_columns(float* acc, int64_t stride, const float* p, const int64_t* pool_rows, int n, const char* v,
                         int64_t row_bytes, int c, int last, const char* const* next_rows) {
        vf a[4][NV];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) a[g][i] = load(acc + g * stride + c + i * N);
        for (int t = 0; t < n; t++) {
            const char* row = v + pool_rows[t] * row_bytes;
            if (next_rows) prefetch_part<NV * N * kItemBytes>(next_rows[t], c * kItemBytes);
            vf x[NV];
            if constexpr (NV == 1) {
                x[0] = load_raw<T>(row, c, last);
            } else if constexpr (NV == 4 && is_float8(T)) {
                const Fp8Halves halves = load_fp8_halves<T>(row, c);
                x[0] = widen<0>(halves), x[1] = widen<1>(halves), x[2] = widen<2>(halves), x[3] = widen<3>(halves);
            } else {
#pragma GCC unroll 4
                for (int i = 0; i + 1 < NV; i += 2) load_two_vectors<T>(row, c + i * N, x[i], x[i + 1]);
            }
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vf w = set1(p[t * 4 + g]);
#pragma GCC unroll 4
                for (int i = 0; i < NV; i++) a[g][i] = fma(w, x[i], a[g][i]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) store(acc + g * stride + c + i * N, a[g][i]);
    }
};

}  // namespace JATTN_ISA
