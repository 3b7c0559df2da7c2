// Products in float32: keys and values of any stored type are widened on the way in.
#pragma once
#include "stream.h"

namespace JATTN_ISA {

template <Dtype T>
struct Float32 {
    static constexpr Dtype kType = T;
    static constexpr bool kPairs = false;  // a 32-bit word of the matrix products holds one number
    static constexpr float kUnit = raw_unit(T);
    static constexpr int kBytes = (int)bytes_of(T);
    static constexpr int64_t padded(int64_t dim) { return round_up(dim, N); }
    static int64_t words(int64_t dim) { return padded(dim); }

    static void load_query(const Problem& p, const char* row, uint32_t* to) {
        float* q = reinterpret_cast<float*>(to);
        to_floats(p.q_type, row, p.dim, q);
        reorder<split>(q, p.dim);
    }

    // 4 rows of q against NT keys -> [key][row].
    INL vf dots(const uint32_t* q_words, int64_t stride, const char* const* k, int dim, const char* const* ahead) {
        const float* q = reinterpret_cast<const float*>(q_words);
        vf a[NT][4];
#pragma GCC unroll 4
        for (int t = 0; t < NT; t++)
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) a[t][g] = zero();
        auto multiply_by = [&](const vf(&x)[NT], int c) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vf y = load(q + g * stride + c);
#pragma GCC unroll 4
                for (int t = 0; t < NT; t++) a[t][g] = fma(x[t], y, a[t][g]);
            }
        };
        int c = 0;
        if constexpr (is_float8(T))
            for (; c + 4 * N <= dim; c += 4 * N) {
                Quad quad[NT];
#pragma GCC unroll 4
                for (int t = 0; t < NT; t++) {
                    quad[t] = load_quad<T>(k[t], c);
                    if (ahead) ask<4 * N * kBytes>(ahead[t], c * kBytes);
                }
                vf x[NT];
                parts<0>(quad, x), multiply_by(x, c);
                parts<1>(quad, x), multiply_by(x, c + N);
                parts<2>(quad, x), multiply_by(x, c + 2 * N);
                parts<3>(quad, x), multiply_by(x, c + 3 * N);
            }
        for (; c + 2 * N <= dim; c += 2 * N) {
            vf x[NT], y[NT];
#pragma GCC unroll 4
            for (int t = 0; t < NT; t++) {
                load_two<T>(k[t], c, x[t], y[t]);
                if (ahead) ask<2 * N * kBytes>(ahead[t], c * kBytes);
            }
            multiply_by(x, c);
            multiply_by(y, c + N);
        }
        for (; c < dim; c += N) {
            vf x[NT];
#pragma GCC unroll 4
            for (int t = 0; t < NT; t++) {
                x[t] = load_raw<T>(k[t], c, dim - c);
                if (ahead) ask<N * kBytes>(ahead[t], c * kBytes);
            }
            multiply_by(x, c);
        }
        return reduce(a);
    }

    static const uint32_t* weights(const float* p, int, uint32_t*) { return reinterpret_cast<const uint32_t*>(p); }

    // acc[4][stride] += p[n][4] * v[n][columns], one vector group of columns at a time.
    static void accumulate(float* acc, int64_t stride, const uint32_t* weights, const int64_t* idx, int n,
                           const char* v, int64_t row_bytes, int vdim, const char* const* ahead) {
        const float* p = reinterpret_cast<const float*>(weights);
        int c = 0;
        for (; c + kPanel * N <= vdim; c += kPanel * N) columns<kPanel>(acc, stride, p, idx, n, v, row_bytes, c, N, ahead);
        if constexpr (kPanel > 2)
            for (; c + 2 * N <= vdim; c += 2 * N) columns<2>(acc, stride, p, idx, n, v, row_bytes, c, N, ahead);
        for (; c < vdim; c += N) columns<1>(acc, stride, p, idx, n, v, row_bytes, c, vdim - c, ahead);
    }

    INL vw key_words(const char* row, int c, int dim) {  // words c .. c+N-1 of a key, zeros past its end
        if (const int two = c / (2 * N) * 2 * N; is_split(T) && two + 2 * N <= dim) {
            vf x, y;
            load_two<T>(row, two, x, y);
            return as_words(c == two ? x : y);
        }
        return as_words(load_raw<T>(row, c, dim - c));
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
    static void unpermute(float* acc, int64_t vdim) { reorder<join>(acc, vdim); }

   private:
    template <int kPart>
    INL void parts(const Quad (&quad)[NT], vf (&x)[NT]) {
#pragma GCC unroll 4
        for (int t = 0; t < NT; t++) x[t] = part<kPart>(quad[t]);
    }

    // To the order of load_two, or back from it: numbers behind the last whole pair of vectors stay.
    template <void (*kHow)(vf&, vf&)>
    INL void reorder(float* x, int64_t n) {
        if (!is_split(T)) return;
        for (int64_t c = 0; c + 2 * N <= n; c += 2 * N) {
            vf a = load(x + c), b = load(x + c + N);
            kHow(a, b);
            store(x + c, a);
            store(x + c + N, b);
        }
    }

    template <int NV>
    INL void columns(float* acc, int64_t stride, const float* p, const int64_t* idx, int n, const char* v,
                     int64_t row_bytes, int c, int last, const char* const* ahead) {
        vf a[4][NV];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < NV; i++) a[g][i] = load(acc + g * stride + c + i * N);
        for (int t = 0; t < n; t++) {
            const char* row = v + idx[t] * row_bytes;
            if (ahead) ask<NV * N * kBytes>(ahead[t], c * kBytes);
            vf x[NV];
            if constexpr (NV == 1) {
                x[0] = load_raw<T>(row, c, last);
            } else if constexpr (NV == 4 && is_float8(T)) {
                const Quad quad = load_quad<T>(row, c);
                x[0] = part<0>(quad), x[1] = part<1>(quad), x[2] = part<2>(quad), x[3] = part<3>(quad);
            } else {
#pragma GCC unroll 4
                for (int i = 0; i + 1 < NV; i += 2) load_two<T>(row, c + i * N, x[i], x[i + 1]);
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
