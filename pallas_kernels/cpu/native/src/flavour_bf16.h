// Products of bfloat16 pairs with float32 sums, over the words of pairs_<isa>.h.
#pragma once
#include "stream.h"

namespace JATTN_ISA {

template <Dtype T>
struct Bfloat16 {
    static constexpr Dtype kType = T;
    static constexpr bool kPairs = true;
    static constexpr float kUnit = 1.0f;
    static constexpr int kBytes = (int)bytes_of(T);
    static constexpr int kStep = 2 * N;  // numbers of a vector of pairs
    static constexpr int64_t padded(int64_t dim) { return round_up(dim, 32); }
    static int64_t words(int64_t dim) { return padded(dim) / 2; }

    static void load_query(const Problem& p, const char* row, uint32_t* to) {
        for (int c = 0; c < padded(p.dim); c += kStep) {
            int n = p.dim - c;
            vw x = zero_words();
            if (n > 0) switch (p.q_type) {
                case Dtype::e4m3: x = load_pairs<Dtype::e4m3>(row, c, n); break;
                case Dtype::e5m2: x = load_pairs<Dtype::e5m2>(row, c, n); break;
                case Dtype::i8: x = load_pairs<Dtype::i8>(row, c, n); break;
                default: x = load_pairs<Dtype::bf16>(row, c, n); break;  // other queries take Float32
            }
            store_words(to + c / 2, x);
        }
    }

    INL vf dots(const uint32_t* q, int64_t stride, const char* const* k, int dim, const char* const* ahead) {
        vf a[NT][4];
#pragma GCC unroll 4
        for (int t = 0; t < NT; t++)
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) a[t][g] = zero();
        auto step = [&](int c, int n) __attribute__((always_inline)) {
            vw x[NT];
#pragma GCC unroll 4
            for (int t = 0; t < NT; t++) {
                x[t] = load_pairs<T>(k[t], c, n);
                if (ahead) ask<kStep * kBytes>(ahead[t], c * kBytes);
            }
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vw y = load_words(q + g * stride + c / 2);
#pragma GCC unroll 4
                for (int t = 0; t < NT; t++) a[t][g] = dot_pairs(a[t][g], x[t], y);
            }
        };
        int c = 0;
        for (; c + kStep <= dim; c += kStep) step(c, kStep);
        if (c < dim) step(c, dim - c);
        return reduce(a);
    }

    // [key][4] floats -> [key pair][4] words of two bf16; n rounded up to 2 NT keys, zeros behind the last.
    static const uint32_t* weights(const float* p, int n, uint32_t* to) {
        for (int i = 0; i < n; i += 2 * NT) store_words(to + i * 2, pair_keys(load(p + i * 4), load(p + i * 4 + N)));
        return to;
    }

    static void accumulate(float* acc, int64_t stride, const uint32_t* weights, const int64_t* idx, int n,
                           const char* v, int64_t row_bytes, int vdim, const char* const* ahead) {
        int c = 0;
        for (; c + 2 * kStep <= vdim; c += 2 * kStep)
            columns<2>(acc, stride, weights, idx, n, v, row_bytes, c, kStep, ahead);
        for (; c < vdim; c += kStep) {
            int last = vdim - c < kStep ? vdim - c : kStep;
            columns<1>(acc, stride, weights, idx, n, v, row_bytes, c, last, ahead);
        }
    }

    INL vw key_words(const char* row, int c, int dim) { return load_pairs<T>(row, 2 * c, dim - 2 * c); }

    static int pack_values(const char* v, const int64_t* idx, int n, int64_t row_bytes, int vdim, uint32_t* to,
                           int64_t stride) {
        for (int t = 0; t < n; t += 2)
            for (int c = 0; c < vdim; c += kStep) {
                vw x = load_pairs<T>(v + idx[t] * row_bytes, c, vdim - c);
                vw y = t + 1 < n ? load_pairs<T>(v + idx[t + 1] * row_bytes, c, vdim - c) : zero_words();
                uint32_t* d = to + t / 2 * stride + c;
                store_words(d, zip_first(x, y));
                store_words(d + N, zip_second(x, y));
            }
        return (n + 1) / 2;
    }
    INL void pack_weights(const vf* x, int vectors, uint32_t* to) {  // vectors is even
        for (int i = 0; i < vectors; i += 2) store_words(to + i * N / 2, narrow_pairs(x[i], x[i + 1]));
    }
    INL vf multiply(vf c, const uint32_t* a, vw b) { return dot_pairs(c, set1_word(a), b); }

    static void unpermute(float* acc, int64_t vdim) { unzip_columns(acc, vdim); }

   private:
    template <int NU>  // units of kStep columns
    INL void columns(float* acc, int64_t stride, const uint32_t* p, const int64_t* idx, int n, const char* v,
                     int64_t row_bytes, int c, int last, const char* const* ahead) {
        vf a[4][2 * NU];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NU; i++) a[g][i] = load(acc + g * stride + c + i * N);
        for (int t = 0; t < n; t += 2) {
            const char *r = v + idx[t] * row_bytes, *s = v + idx[t + 1] * row_bytes;
            if (ahead) ask<NU * kStep * kBytes>(ahead[t], c * kBytes);
            if (ahead) ask<NU * kStep * kBytes>(ahead[t + 1], c * kBytes);
            vw x[2 * NU];
#pragma GCC unroll 2
            for (int u = 0; u < NU; u++) {
                vw even = load_pairs<T>(r, c + kStep * u, NU == 1 ? last : kStep);
                vw odd = load_pairs<T>(s, c + kStep * u, NU == 1 ? last : kStep);
                x[2 * u] = zip_first(even, odd);
                x[2 * u + 1] = zip_second(even, odd);
            }
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vw w = set1_word(p + t * 2 + g);
#pragma GCC unroll 4
                for (int i = 0; i < 2 * NU; i++) a[g][i] = dot_pairs(a[g][i], w, x[i]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NU; i++) store(acc + g * stride + c + i * N, a[g][i]);
    }
};

}  // namespace JATTN_ISA
