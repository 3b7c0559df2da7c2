// Arithmetic with bfloat16 products and float32 sums. A 32-bit word holds two bfloat16: bf16_<isa>.h has the
// instructions.
#pragma once
#include "prefetch.h"

namespace JATTN_ISA {

template <Dtype T>
struct ComputeBf16 {
    static constexpr Dtype kDtype = T;
    static constexpr bool kBf16Pairs = true;
    static constexpr float kRawUnit = 1.0f;
    static constexpr int kItemBytes = (int)bytes_of(T);
    static constexpr int kStep = 2 * N;  // numbers of one vector
    static constexpr int64_t padded(int64_t dim) { return round_up(dim, 32); }
    static int64_t row_words(int64_t dim) { return padded(dim) / 2; }

    static void load_query(Dtype dtype, const char* row, int dim, uint32_t* to) {
        for (int c = 0; c < padded(dim); c += kStep) {
            int n = dim - c;
            vw x = zero_words();
            if (n > 0) switch (dtype) {
                    case Dtype::e4m3: x = load_bf16<Dtype::e4m3>(row, c, n); break;
                    case Dtype::e5m2: x = load_bf16<Dtype::e5m2>(row, c, n); break;
                    case Dtype::i8: x = load_bf16<Dtype::i8>(row, c, n); break;
                    default:
                        x = load_bf16<Dtype::bf16>(row, c, n);
                        break;  // dispatch.h sends float32 and float16 queries to ComputeF32
                }
            store_words(to + c / 2, x);
        }
    }

    INL void add_products(vf (&a)[kKeysPerVector][4], const uint32_t* q, int64_t stride, const char* const* k, int dim,
                          const char* const* next_rows) {
        auto step = [&](int c, int n) __attribute__((always_inline)) {
            vw x[kKeysPerVector];
#pragma GCC unroll 4
            for (int t = 0; t < kKeysPerVector; t++) {
                x[t] = load_bf16<T>(k[t], c, n);
                if (next_rows) prefetch_part<kStep * kItemBytes>(next_rows[t], c * kItemBytes);
            }
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vw y = load_words(q + g * stride + c / 2);
#pragma GCC unroll 4
                for (int t = 0; t < kKeysPerVector; t++) a[t][g] = dot_bf16(a[t][g], x[t], y);
            }
        };
        int c = 0;
        for (; c + kStep <= dim; c += kStep) step(c, kStep);
        if (c < dim) step(c, dim - c);
    }

    // Weights [key][4 rows] as floats -> [pair of keys][4 rows] as words; zeros behind key n, up to whole vectors.
    static const uint32_t* pack_decode_weights(const float* p, int n, uint32_t* to) {
        for (int i = 0; i < n; i += 2 * kKeysPerVector)
            store_words(to + i * 2, pack_key_pairs(load(p + i * 4), load(p + i * 4 + N)));
        return to;
    }

    static void add_values(float* acc, int64_t stride, const uint32_t* weights, const int64_t* pool_rows, int n,
                           const char* v, int64_t row_bytes, int v_dim, const char* const* next_rows) {
        int c = 0;
        for (; c + 2 * kStep <= v_dim; c += 2 * kStep)
            add_columns<2>(acc, stride, weights, pool_rows, n, v, row_bytes, c, kStep, next_rows);
        for (; c < v_dim; c += kStep) {
            int last = v_dim - c < kStep ? v_dim - c : kStep;
            add_columns<1>(acc, stride, weights, pool_rows, n, v, row_bytes, c, last, next_rows);
        }
    }

    INL vw load_key_words(const char* row, int c, int dim) { return load_bf16<T>(row, 2 * c, dim - 2 * c); }

    static int pack_values(const char* v, const int64_t* pool_rows, int n, int64_t row_bytes, int v_dim, uint32_t* to,
                           int64_t stride) {
        for (int t = 0; t < n; t += 2)
            for (int c = 0; c < v_dim; c += kStep) {
                vw x = load_bf16<T>(v + pool_rows[t] * row_bytes, c, v_dim - c);
                vw y = t + 1 < n ? load_bf16<T>(v + pool_rows[t + 1] * row_bytes, c, v_dim - c) : zero_words();
                uint32_t* d = to + t / 2 * stride + c;
                store_words(d, zip_low(x, y));
                store_words(d + N, zip_high(x, y));
            }
        return (n + 1) / 2;
    }
    INL void pack_prefill_weights(const vf* x, int vectors, uint32_t* to) {  // vectors is even
        for (int i = 0; i < vectors; i += 2) store_words(to + i * N / 2, to_bf16_pairs(x[i], x[i + 1]));
    }
    INL vf multiply_add(vf c, const uint32_t* a, vw b) { return dot_bf16(c, set1_word(a), b); }

    static void restore_column_order(float* acc, int64_t v_dim) { unzip_columns(acc, v_dim); }

   private:
    template <int NU>  // units of kStep columns
    INL void add_columns(float* acc, int64_t stride, const uint32_t* p, const int64_t* pool_rows, int n, const char* v,
                         int64_t row_bytes, int c, int last, const char* const* next_rows) {
        vf a[4][2 * NU];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NU; i++) a[g][i] = load(acc + g * stride + c + i * N);
        for (int t = 0; t < n; t += 2) {
            const char *r = v + pool_rows[t] * row_bytes, *s = v + pool_rows[t + 1] * row_bytes;
            if (next_rows) prefetch_part<NU * kStep * kItemBytes>(next_rows[t], c * kItemBytes);
            if (next_rows) prefetch_part<NU * kStep * kItemBytes>(next_rows[t + 1], c * kItemBytes);
            vw x[2 * NU];
#pragma GCC unroll 2
            for (int u = 0; u < NU; u++) {
                vw even = load_bf16<T>(r, c + kStep * u, NU == 1 ? last : kStep);
                vw odd = load_bf16<T>(s, c + kStep * u, NU == 1 ? last : kStep);
                x[2 * u] = zip_low(even, odd);
                x[2 * u + 1] = zip_high(even, odd);
            }
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vw w = set1_word(p + t * 2 + g);
#pragma GCC unroll 4
                for (int i = 0; i < 2 * NU; i++) a[g][i] = dot_bf16(a[g][i], w, x[i]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NU; i++) store(acc + g * stride + c + i * N, a[g][i]);
    }
};

}  // namespace JATTN_ISA
