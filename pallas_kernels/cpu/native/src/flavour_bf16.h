// Products of bfloat16 pairs with float32 sums (vdpbf16ps). Stored bf16 is used as it is; fp8 and int8 become bf16
// exactly (their numbers have at most 8 significant bits), by a table of 128 magnitudes or by conversion.
#pragma once
#include "common.h"

namespace JATTN_ISA {

using vb = __m512bh;  // 32 bf16

constexpr uint16_t magnitude_bits(Dtype t, int code) {  // bf16 bits of the number with this 7-bit code
    int mantissa_bits = t == Dtype::e4m3 ? 3 : 2, bias = t == Dtype::e4m3 ? 7 : 15;
    int e = code >> mantissa_bits, m = code & ((1 << mantissa_bits) - 1);
    if (t == Dtype::e4m3 && code == 0x7f) return 0x7fc0;
    if (t == Dtype::e5m2 && e == 31) return m ? 0x7fc0 : 0x7f80;
    if (code == 0) return 0;
    int exponent = e ? e - bias : 1 - bias;
    if (e) m |= 1 << mantissa_bits;
    while (!(m >> mantissa_bits)) m <<= 1, exponent--;
    return (uint16_t)(((exponent + 127) << 7) | ((m & ((1 << mantissa_bits) - 1)) << (7 - mantissa_bits)));
}

template <Dtype T>
struct Magnitudes {
    uint16_t bits[128];
    constexpr Magnitudes() : bits() {
        for (int i = 0; i < 128; i++) bits[i] = magnitude_bits(T, i);
    }
};
template <Dtype T>
alignas(64) static constexpr Magnitudes<T> kMagnitudes{};

INL __mmask32 first32(int n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }

// 32 stored numbers from element i on, as bf16; of the last n when fewer are left, zeros behind them.
template <Dtype T>
INL __m512i load32(const char* p, int64_t i, int n = 32) {
    const __mmask32 m = first32(n);
    if constexpr (T == Dtype::bf16) {
        return _mm512_maskz_loadu_epi16(m, p + 2 * i);
    } else if constexpr (T == Dtype::i8) {
        __m256i x = _mm256_maskz_loadu_epi8(m, p + i);
        vf lo = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
        vf hi = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
    } else {
        const uint16_t* table = kMagnitudes<T>.bits;
        __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(m, p + i));
        __m512i lo = _mm512_permutex2var_epi16(_mm512_load_si512(table), x, _mm512_load_si512(table + 32));
        __m512i hi = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), x, _mm512_load_si512(table + 96));
        __m512i y = _mm512_mask_mov_epi16(lo, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), hi);
        return _mm512_ternarylogic_epi32(y, _mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000), 0xf8);
    }
}

template <Dtype T>
struct Bfloat16 {
    static constexpr Dtype kType = T;
    static constexpr bool kPairs = true;
    static constexpr int64_t padded(int64_t dim) { return round_up(dim, 32); }
    static int64_t words(int64_t dim) { return padded(dim) / 2; }

    static void load_query(const Problem& p, const char* row, uint32_t* to) {
        for (int c = 0; c < p.dim; c += 32) {
            int n = p.dim - c;
            __m512i x = zero_words();
            switch (p.q_type) {
                case Dtype::e4m3: x = load32<Dtype::e4m3>(row, c, n); break;
                case Dtype::e5m2: x = load32<Dtype::e5m2>(row, c, n); break;
                case Dtype::i8: x = load32<Dtype::i8>(row, c, n); break;
                default: x = load32<Dtype::bf16>(row, c, n); break;  // other queries take Float32
            }
            store_words(to + c / 2, x);
        }
    }

    INL vf dots(const uint32_t* q, int64_t stride, const char* const* k, int dim) {
        vf a[NT][4];
#pragma GCC unroll 4
        for (int t = 0; t < NT; t++)
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) a[t][g] = zero();
        auto step = [&](int c, int n) __attribute__((always_inline)) {
            vb x[NT];
#pragma GCC unroll 4
            for (int t = 0; t < NT; t++) x[t] = (vb)load32<T>(k[t], c, n);
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vb y = (vb)load_words(q + g * stride + c / 2);
#pragma GCC unroll 4
                for (int t = 0; t < NT; t++) a[t][g] = _mm512_dpbf16_ps(a[t][g], x[t], y);
            }
        };
        int c = 0;
        for (; c + 32 <= dim; c += 32) step(c, 32);
        if (c < dim) step(c, dim - c);
        return reduce(a);
    }

    // [key][4] floats -> [key pair][4] words of two bf16; n rounded up to 8 keys, zeros behind the last.
    static const uint32_t* weights(const float* p, int n, uint32_t* to) {
        const __m512i order = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16,  //
                                               15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
        for (int i = 0; i < n; i += 8) {
            __m512i x = (__m512i)_mm512_cvtne2ps_pbh(load(p + i * 4 + 16), load(p + i * 4));
            store_words(to + i * 2, _mm512_permutexvar_epi16(order, x));
        }
        return to;
    }

    static void accumulate(float* acc, int64_t stride, const uint32_t* weights, const int64_t* idx, int n,
                           const char* v, int64_t row_bytes, int vdim, const char* ahead, const int64_t* ahead_idx) {
        int c = 0;
        for (; c + 64 <= vdim; c += 64) columns<2>(acc, stride, weights, idx, n, v, row_bytes, c, 32, ahead, ahead_idx);
        for (; c < vdim; c += 32)
            columns<1>(acc, stride, weights, idx, n, v, row_bytes, c, vdim - c < 32 ? vdim - c : 32, ahead, ahead_idx);
    }

    INL vw key_words(const char* row, int c, int dim) { return load32<T>(row, 2 * c, dim - 2 * c); }

    static int pack_values(const char* v, const int64_t* idx, int n, int64_t row_bytes, int vdim, uint32_t* to,
                           int64_t stride) {
        for (int t = 0; t < n; t += 2)
            for (int c = 0; c < vdim; c += 32) {
                __m512i x = load32<T>(v + idx[t] * row_bytes, c, vdim - c);
                __m512i y = t + 1 < n ? load32<T>(v + idx[t + 1] * row_bytes, c, vdim - c) : zero_words();
                uint32_t* d = to + t / 2 * stride + c;
                store_words(d, _mm512_unpacklo_epi16(x, y));
                store_words(d + 16, _mm512_unpackhi_epi16(x, y));
            }
        return (n + 1) / 2;
    }
    INL void pack_weights(const vf* x, int vectors, uint32_t* to) {  // vectors is even
        for (int i = 0; i < vectors; i += 2) store_words(to + i * 8, (__m512i)_mm512_cvtne2ps_pbh(x[i + 1], x[i]));
    }
    INL vf multiply(vf c, const uint32_t* a, vw b) { return _mm512_dpbf16_ps(c, (vb)set1_word(a), (vb)b); }

    // Accumulators lie in the order of unpacklo | unpackhi within each 32 columns: put them back.
    static void unpermute(float* acc, int64_t vdim) {
        const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
        for (int64_t c = 0; c < vdim; c += 32) {
            vf lo = load(acc + c), hi = load(acc + c + 16);
            store(acc + c, _mm512_permutex2var_ps(lo, first, hi));
            store(acc + c + 16, _mm512_permutex2var_ps(lo, second, hi));
        }
    }

   private:
    template <int NU>  // units of 32 columns
    INL void columns(float* acc, int64_t stride, const uint32_t* p, const int64_t* idx, int n, const char* v,
                     int64_t row_bytes, int c, int last, const char* ahead, const int64_t* ahead_idx) {
        vf a[4][2 * NU];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NU; i++) a[g][i] = load(acc + g * stride + c + i * 16);
        for (int t = 0; t < n; t += 2) {
            const char *r = v + idx[t] * row_bytes, *s = v + idx[t + 1] * row_bytes;
            if (ahead) {
                const char* x = ahead + ahead_idx[t] * row_bytes + c * bytes_of(T);
                const char* y = ahead + ahead_idx[t + 1] * row_bytes + c * bytes_of(T);
                for (int b = 0; b < NU * 32 * bytes_of(T); b += 64) prefetch(x + b), prefetch(y + b);
            }
            vb x[2 * NU];
#pragma GCC unroll 2
            for (int u = 0; u < NU; u++) {
                __m512i even = load32<T>(r, c + 32 * u, NU == 1 ? last : 32);
                __m512i odd = load32<T>(s, c + 32 * u, NU == 1 ? last : 32);
                x[2 * u] = (vb)_mm512_unpacklo_epi16(even, odd);
                x[2 * u + 1] = (vb)_mm512_unpackhi_epi16(even, odd);
            }
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++) {
                vb w = (vb)set1_word(p + t * 2 + g);
#pragma GCC unroll 4
                for (int i = 0; i < 2 * NU; i++) a[g][i] = _mm512_dpbf16_ps(a[g][i], w, x[i]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 2 * NU; i++) store(acc + g * stride + c + i * 16, a[g][i]);
    }
};

}  // namespace JATTN_ISA
