// Vectors of 8 floats (AVX2, FMA, F16C). simd_avx512.h explains the names.
#pragma once
#include <immintrin.h>

#include "args.h"

#define INL static inline __attribute__((always_inline))

namespace JATTN_ISA {
using namespace jattn;

constexpr int N = 8;
constexpr int kKeysPerVector = N / 4;
constexpr int kBlockVectors = 2;
using vf = __m256;
using vw = __m256i;

INL vf zero() { return _mm256_setzero_ps(); }
INL vf set1(float x) { return _mm256_set1_ps(x); }
INL vf load(const float* p) { return _mm256_loadu_ps(p); }
INL void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
INL vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
INL vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INL vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INL vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
INL vf approx_div(vf a, vf b) { return div(a, b); }
INL vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INL vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b if one of them is NaN
INL vf min(vf a, vf b) { return _mm256_min_ps(a, b); }

INL vf select_in_range(vf x, vf key, vf begin, vf end, vf other) {
    vf m = _mm256_and_ps(_mm256_cmp_ps(key, begin, _CMP_GE_OQ), _mm256_cmp_ps(key, end, _CMP_LT_OQ));
    return _mm256_blendv_ps(other, x, m);
}
INL vf where_equal(vf x, vf y, vf then, vf otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, y, _CMP_EQ_OQ));
}
INL bool any_differs(vf x, vf y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_NEQ_UQ)) != 0; }
INL float hmax(vf x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
INL float hsum(vf x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

// exp(x) for x <= 0 with a relative error of about 1e-7; 0 for x < -87, NaN for NaN.
INL vf vexp(vf x) {
    vf nonzero = _mm256_cmp_ps(x, set1(-87.0f), _CMP_NLT_UQ);
    x = max(set1(-87.0f), x);
    vf n = _mm256_round_ps(mul(x, set1(1.44269504f)), 8);
    vf r = _mm256_fmsub_ps(x, set1(1.44269504f), n);
    vf p = fma(set1(1.535336188e-4f), r, set1(1.339887440e-3f));
    p = fma(p, r, set1(9.618437357e-3f));
    p = fma(p, r, set1(5.550332471e-2f));
    p = fma(p, r, set1(2.402264791e-1f));
    p = fma(p, r, set1(6.931472028e-1f));
    p = fma(p, r, set1(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(mul(p, _mm256_castsi256_ps(power)), nonzero);
}

INL vf lane_numbers() { return _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0); }
INL vf broadcast_rows(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
INL vf broadcast_keys(const float* p) { return _mm256_set_m128(_mm_set1_ps(p[1]), _mm_set1_ps(p[0])); }
INL vf max_over_keys(vf x) { return max(x, _mm256_permute2f128_ps(x, x, 1)); }
INL vf sum_over_keys(vf x) { return add(x, _mm256_permute2f128_ps(x, x, 1)); }
INL vf sum4(vf a, vf b, vf c, vf d) { return _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)); }
INL vf sum_lanes(vf (&a)[kKeysPerVector][4]) {
    vf x = sum4(a[0][0], a[0][1], a[0][2], a[0][3]), y = sum4(a[1][0], a[1][1], a[1][2], a[1][3]);
    return add(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

// N elements, kBytes in all. If n < N, n elements of `size` bytes each, copied through the stack: AVX2 has no masked
// loads of bytes.
template <int kBytes>
INL __m128i load_bytes(const char* p, int n, int size) {
    if (n >= N) {
        if constexpr (kBytes == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    }
    alignas(16) char tail[16] = {};
    for (int i = 0; i < n * size; i++) tail[i] = p[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(tail));
}
INL __m256i lane_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

template <Dtype T>
INL vf load_raw(const char* p, int64_t i, int n = N) {
    if constexpr (T == Dtype::f32) {
        const float* f = reinterpret_cast<const float*>(p) + i;
        return n >= N ? load(f) : _mm256_maskload_ps(f, lane_mask(n));
    } else if constexpr (T == Dtype::f16) {
        return _mm256_cvtph_ps(load_bytes<16>(p + 2 * i, n, 2));
    } else if constexpr (T == Dtype::bf16) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bytes<16>(p + 2 * i, n, 2)), 16));
    } else if constexpr (T == Dtype::i8) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes<8>(p + i, n, 1)));
    } else if constexpr (T == Dtype::e5m2) {
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_bytes<8>(p + i, n, 1)), 8));
    } else {
        __m128i x = _mm_cvtepu8_epi16(load_bytes<8>(p + i, n, 1)), low = _mm_and_si128(x, _mm_set1_epi16(0x7f));
        __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
        __m128i half = _mm_or_si128(sign, _mm_slli_epi16(low, 7));
        half = _mm_or_si128(half, _mm_and_si128(_mm_cmpeq_epi16(low, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00)));
        return _mm256_cvtph_ps(half);
    }
}

struct Fp8Halves {
    __m256i even, odd;
};
template <int kPart>
INL vf widen(const Fp8Halves& x) {
    const __m256i half = kPart % 2 ? x.odd : x.even;
    return _mm256_cvtph_ps(kPart < 2 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1));
}
INL __m256i restore_nan(__m256i half) {
    const __m256i nan =
        _mm256_cmpeq_epi16(_mm256_or_si256(half, _mm256_set1_epi16((short)0x8000)), _mm256_set1_epi16((short)0xbf80));
    return _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
}
template <Dtype T>
INL Fp8Halves fp8_to_halves(__m256i x) {
    if constexpr (T == Dtype::e5m2)
        return {_mm256_slli_epi16(x, 8), _mm256_and_si256(x, _mm256_set1_epi16((short)0xff00))};
    const __m256i mask = _mm256_set1_epi16((short)0xbf80);
    Fp8Halves y{_mm256_and_si256(_mm256_maddubs_epi16(_mm256_set1_epi16(128), x), mask),
                _mm256_and_si256(_mm256_srai_epi16(x, 1), mask)};
    const __m256i magnitude = _mm256_or_si256(x, _mm256_set1_epi8(-128));
    if (__builtin_expect(_mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(-1))) != 0, 0))
        y = {restore_nan(y.even), restore_nan(y.odd)};
    return y;
}
template <Dtype T>
INL Fp8Halves load_fp8_halves(const char* p, int64_t i) {
    return fp8_to_halves<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i)));
}

template <Dtype T>
INL void load_two_vectors(const char* p, int64_t i, vf& a, vf& b) {
    if constexpr (T == Dtype::bf16) {
        __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 2 * i));
        a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
        b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000)));
    } else if constexpr (is_float8(T)) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
        const Fp8Halves halves = fp8_to_halves<T>(_mm256_zextsi128_si256(x));
        a = widen<0>(halves), b = widen<1>(halves);
    } else {
        a = load_raw<T>(p, i), b = load_raw<T>(p, i + N);
    }
}

INL void deinterleave(vf& a, vf& b) {
    const __m256i order = _mm256_set_epi32(7, 6, 3, 2, 5, 4, 1, 0);
    const vf even = _mm256_shuffle_ps(a, b, 0x88), odd = _mm256_shuffle_ps(a, b, 0xdd);
    a = _mm256_permutevar8x32_ps(even, order);
    b = _mm256_permutevar8x32_ps(odd, order);
}
INL void interleave(vf& a, vf& b) {
    const vf low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    a = _mm256_permute2f128_ps(low, high, 0x20);
    b = _mm256_permute2f128_ps(low, high, 0x31);
}

INL void store_as(Dtype t, char* p, int64_t i, vf x, int n = N) {
    if (t == Dtype::f32) {
        float* f = reinterpret_cast<float*>(p) + i;
        if (n >= N) return store(f, x);
        return _mm256_maskstore_ps(f, lane_mask(n), x);
    }
    __m128i y;
    if (t == Dtype::f16) {
        y = _mm256_cvtps_ph(x, 8);
    } else {
        __m256i u = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
        __m256i b = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        b = _mm256_blendv_epi8(b, _mm256_set1_epi32(0x7fc0), nan);
        y = _mm_packus_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    }
    if (n >= N) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 2 * i), y);
    alignas(16) char tail[16];
    _mm_store_si128(reinterpret_cast<__m128i*>(tail), y);
    for (int b = 0; b < 2 * n; b++) p[2 * i + b] = tail[b];
}

INL void stream_as(Dtype t, char* p, int64_t i, vf x) { store_as(t, p, i, x); }
INL void stream_fence() {}

INL vw as_words(vf x) { return _mm256_castps_si256(x); }
INL vf as_floats(vw x) { return _mm256_castsi256_ps(x); }
INL vw load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INL void store_words(uint32_t* p, vw x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
INL vw set1_word(const uint32_t* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
}
INL vw zero_words() { return _mm256_setzero_si256(); }

// Stores the columns of an 8 x 8 block of words as rows at d, d + stride, ...
INL void transpose(vw (&r)[N], uint32_t* d, int64_t stride) {
    vw t[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        store_words(d + i * stride, _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
        store_words(d + (i + 4) * stride, _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
    }
}

struct Table16 {
    vf low, high;
};
INL Table16 load_table(const int8_t* numbers) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
template <int kShift>
INL vf look_up(const Table16& table, vw words) {
    const vw code = _mm256_srli_epi32(words, kShift), is_high = _mm256_slli_epi32(words, 28 - kShift);
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code), _mm256_permutevar8x32_ps(table.high, code),
                            _mm256_castsi256_ps(is_high));
}

// A code of four bits at place 0 .. 7 of its word, as a float times code_power(kPlace): a look-up takes twice as long.
constexpr bool kCodesInPlace = true;
template <int kPlace>
INL vf code_in_place(vw words) {
    if constexpr (kPlace == 7) return _mm256_cvtepi32_ps(_mm256_srli_epi32(words, 28));  // the sign's place
    return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15 << 4 * kPlace)));
}

INL void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
INL void prefetch_far(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace JATTN_ISA
