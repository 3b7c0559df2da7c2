// Products in float32: keys and values of any stored type are widened on the way in.
#pragma once
#include "stream.h"

namespace JATTN_ISA {

template <Dtype T>
struct Float32 {
    static constexpr Dtype kType = T;
    static constexpr bool kPairs = false;  // a 32-bit word of the matrix products holds one number
    static constexpr int64_t padded(int64_t dim) { return round_up(dim, N); }
    static int64_t words(int64_t dim) { return padded(dim); }

    static void load_query(const Problem& p, const char* row, uint32_t* to) {
        to_floats(p.q_type, row, p.dim, reinterpret_cast<float*>(to));
    }

    // 4 rows of q against NT keys -> [key][row].
    INL vf dots(const uint32_t* q_words, int64_t stride, const char* const* k, int dim, Stream* ahead) {
        const float* q = reinterpret_cast<const float*>(q_words);
        vf a[NT][4];
#pragma GCC unroll 4
        for (int t = 0; t < NT; t++)
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) a[t][g] = zero();
        auto step = [&](int c, int n) __attribute__((always_inline)) {
            vf x[NT];
            if (ahead) ahead->fetch(NT * N * bytes_of(T));
#pragma GCC unroll 4
            for (int t = 0; t < NT; t++) x[t] = loadf<T>(k[t], c, n);
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vf y = load(q + g * stride + c);
#pragma GCC unroll 4
                for (int t = 0; t < NT; t++) a[t][g] = fma(x[t], y, a[t][g]);
            }
        };
        int c = 0;
        for (; c + N <= dim; c += N) step(c, N);
        if (c < dim) step(c, dim - c);
        return reduce(a);
    }

    static const uint32_t* weights(const float* p, int, uint32_t*) { return reinterpret_cast<const uint32_t*>(p); }

    // acc[4][stride] += p[n][4] * v[n][columns], one vector group of columns at a time.
    static void accumulate(float* acc, int64_t stride, const uint32_t* weights, const int64_t* idx, int n,
                           const char* v, int64_t row_bytes, int vdim, Stream* ahead) {
        const float* p = reinterpret_cast<const float*>(weights);
        int c = 0;
        for (; c + kPanel * N <= vdim; c += kPanel * N)
            columns<kPanel>(acc, stride, p, idx, n, v, row_bytes, c, N, ahead);
        for (; c < vdim; c += N)
            columns<1>(acc, stride, p, idx, n, v, row_bytes, c, vdim - c < N ? vdim - c : N, ahead);
    }

    INL vw key_words(const char* row, int c, int dim) {  // words c .. c+N-1 of a key, zeros past its end
        return as_words(loadf<T>(row, c, dim - c < N ? dim - c : N));
    }

    // Values of keys [0, n) as words [n][vdim]; returns the depth of the product.
    static int pack_values(const char* v, const int64_t* idx, int n, int64_t row_bytes, int vdim, uint32_t* to,
                           int64_t stride) {
        for (int t = 0; t < n; t++)
            for (int c = 0; c < vdim; c += N)
                store_words(to + t * stride + c, key_words(v + idx[t] * row_bytes, c, vdim));
        return n;
    }
    INL void pack_weights(const vf* x, int vectors, uint32_t* to) {
        for (int i = 0; i < vectors; i++) store_words(to + i * N, as_words(x[i]));
    }
    INL vf multiply(vf c, const uint32_t* a, vw b) { return fma(as_floats(set1_word(a)), as_floats(b), c); }
    static void unpermute(float*, int64_t) {}

   private:
    template <int NV>
    INL void columns(float* acc, int64_t stride, const float* p, const int64_t* idx, int n, const char* v,
                     int64_t row_bytes, int c, int last, Stream* ahead) {
        vf a[4][NV];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) a[g][i] = load(acc + g * stride + c + i * N);
        for (int t = 0; t < n; t++) {
            const char* row = v + idx[t] * row_bytes;
            if (ahead) ahead->fetch(NV * N * bytes_of(T));
            vf x[NV];
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) x[i] = NV == 1 ? loadf<T>(row, c, last) : loadf<T>(row, c + i * N);
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
