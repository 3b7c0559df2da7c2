// Vectors of 16 floats (AVX-512 F, BW, DQ, VL). simd_avx2.h and simd_neon.h define the same names; they are explained
// here.
#pragma once
#include <immintrin.h>

#include "args.h"

#define INL static inline __attribute__((always_inline))

namespace JATTN_ISA {
using namespace jattn;

constexpr int N = 16;                  // floats of a vector
constexpr int kKeysPerVector = N / 4;  // of a vector [key][4 rows]
constexpr int kBlockVectors = 4;       // columns of a register block of matmul.h, in vectors
using vf = __m512;                     // float32
using vw = __m512i;                    // 32-bit words

INL vf zero() { return _mm512_setzero_ps(); }
INL vf set1(float x) { return _mm512_set1_ps(x); }
INL vf load(const float* p) { return _mm512_loadu_ps(p); }
INL void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
INL vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
INL vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INL vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INL vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
// a / b with a relative error of about 1e-7; the exact division takes 16 cycles.
INL vf approx_div(vf a, vf b) {
    const vf y = _mm512_rcp14_ps(b);
    return mul(a, mul(y, _mm512_fnmadd_ps(b, y, set1(2.0f))));
}
INL vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INL vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if one of them is NaN
INL vf min(vf a, vf b) { return _mm512_min_ps(a, b); }

// x where begin <= key < end, else other.
INL vf select_in_range(vf x, vf key, vf begin, vf end, vf other) {
    __mmask16 m = _mm512_cmp_ps_mask(key, begin, _CMP_GE_OQ) & _mm512_cmp_ps_mask(key, end, _CMP_LT_OQ);
    return _mm512_mask_mov_ps(other, m, x);
}
INL vf where_equal(vf x, vf y, vf then, vf otherwise) {
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), then);
}
INL bool any_differs(vf x, vf y) { return _mm512_cmp_ps_mask(x, y, _CMP_NEQ_UQ) != 0; }
INL float hmax(vf x) { return _mm512_reduce_max_ps(x); }
INL float hsum(vf x) { return _mm512_reduce_add_ps(x); }

// exp(x) for x <= 0 as 2^n * 2^r, with a relative error of about 1e-7; exp(-inf) = 0, exp(NaN) = NaN.
INL vf vexp(vf x) {
    x = max(set1(-200.0f), x);
    vf n = _mm512_roundscale_ps(mul(x, set1(1.44269504f)), 8);
    vf r = _mm512_fmsub_ps(x, set1(1.44269504f), n);
    vf p = fma(set1(1.535336188e-4f), r, set1(1.339887440e-3f));
    p = fma(p, r, set1(9.618437357e-3f));
    p = fma(p, r, set1(5.550332471e-2f));
    p = fma(p, r, set1(2.402264791e-1f));
    p = fma(p, r, set1(6.931472028e-1f));
    return _mm512_scalef_ps(fma(p, r, set1(1.0f)), n);
}

// 0, 1, 2, ...
INL vf lane_numbers() { return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }
// For vectors [key][4 rows]: p[row] for every key; p[key] for every row; the maximum and the sum over the keys,
// repeated.
INL vf broadcast_rows(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
INL vf broadcast_keys(const float* p) {
    const __m512i at = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    return _mm512_permutexvar_ps(at, _mm512_castps128_ps512(_mm_loadu_ps(p)));
}
INL vf max_over_keys(vf x) {
    x = max(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return max(x, _mm512_shuffle_f32x4(x, x, 0xb1));
}
INL vf sum_over_keys(vf x) {
    x = add(x, _mm512_shuffle_f32x4(x, x, 0x4e));
    return add(x, _mm512_shuffle_f32x4(x, x, 0xb1));
}
// In each 128-bit part: the sums of that part of a, of b, of c, of d.
INL vf sum4(vf a, vf b, vf c, vf d) {
    vf ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    vf cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d x = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d y = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return add(_mm512_castpd_ps(x), _mm512_castpd_ps(y));
}
// Sums each a[key][row] over its lanes: one vector [key][row].
INL vf sum_lanes(vf (&a)[kKeysPerVector][4]) {
    vf t0 = sum4(a[0][0], a[0][1], a[0][2], a[0][3]), t1 = sum4(a[1][0], a[1][1], a[1][2], a[1][3]);
    vf t2 = sum4(a[2][0], a[2][1], a[2][2], a[2][3]), t3 = sum4(a[3][0], a[3][1], a[3][2], a[3][3]);
    vf x = add(_mm512_shuffle_f32x4(t0, t1, 0x88), _mm512_shuffle_f32x4(t0, t1, 0xdd));
    vf y = add(_mm512_shuffle_f32x4(t2, t3, 0x88), _mm512_shuffle_f32x4(t2, t3, 0xdd));
    return add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}

INL __mmask16 lane_mask(int n) { return n >= 16 ? 0xffff : (__mmask16)((1u << n) - 1); }

// N stored numbers from element i on, divided by raw_unit(T). If n < N, only n are read and the other lanes are 0.
template <Dtype T>
INL vf load_raw(const char* p, int64_t i, int n = N) {
    const __mmask16 m = lane_mask(n);
    if constexpr (T == Dtype::f32) {
        return _mm512_maskz_loadu_ps(m, p + 4 * i);
    } else if constexpr (T == Dtype::f16) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p + 2 * i));
    } else if constexpr (T == Dtype::bf16) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p + 2 * i)), 16));
    } else if constexpr (T == Dtype::i8) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, p + i)));
    } else if constexpr (T == Dtype::e5m2) {  // the upper byte of a float16
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, p + i)), 8));
    } else {  // e4m3: exponent and mantissa of a float16, see raw_unit; S.1111.111 is the only NaN
        __m256i x = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, p + i));
        __m256i low = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
        __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
        vf y = _mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(low, 7)));
        __mmask16 nan = _mm256_cmpeq_epi16_mask(low, _mm256_set1_epi16(0x7f));
        return _mm512_mask_mov_ps(y, nan, set1(__builtin_nanf("")));
    }
}

// 4 N fp8 numbers as float16, divided by raw_unit(T): those at even places and those at odd places.
struct Fp8Halves {
    __m512i even, odd;
};
// N of them as float32. Parts 0 and 1: the even and the odd ones of the first 2 N numbers; 2 and 3: of the last 2 N.
template <int kPart>
INL vf widen(const Fp8Halves& x) {
    const __m512i half = kPart % 2 ? x.odd : x.even;
    return _mm512_cvtph_ps(kPart < 2 ? _mm512_castsi512_si256(half) : _mm512_extracti64x4_epi64(half, 1));
}
// Replaces what fp8_to_halves makes of e4m3's only NaN, S.1111.111, by a NaN of float16.
INL __m512i restore_nan(__m512i half) {
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_or_si512(half, _mm512_set1_epi16((short)0x8000)),
                                                  _mm512_set1_epi16((short)0xbf80));
    return _mm512_mask_mov_epi16(half, nan, _mm512_set1_epi16(0x7e00));
}
template <Dtype T>
INL Fp8Halves fp8_to_halves(__m512i x) {
    if constexpr (T == Dtype::e5m2)  // the upper byte of a float16
        return {_mm512_slli_epi16(x, 8), _mm512_and_si512(x, _mm512_set1_epi16((short)0xff00))};
    // S.EEEE.MMM becomes S.0EEEE.MMM: an arithmetic shift to the right, then the copy of the sign is cleared
    const __m512i mask = _mm512_set1_epi16((short)0xbf80);
    Fp8Halves y{_mm512_and_si512(_mm512_maddubs_epi16(_mm512_set1_epi16(128), x), mask),  // even bytes times 128
                _mm512_and_si512(_mm512_srai_epi16(x, 1), mask)};
    const __m512i magnitude = _mm512_or_si512(x, _mm512_set1_epi8(-128));
    if (__builtin_expect(_mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(-1)) != 0, 0))
        y = {restore_nan(y.even), restore_nan(y.odd)};
    return y;
}
template <Dtype T>
INL Fp8Halves load_fp8_halves(const char* p, int64_t i) {
    return fp8_to_halves<T>(_mm512_loadu_si512(p + i));
}

// 2 N stored numbers from element i on, divided by raw_unit(T); deinterleaved if loads_deinterleaved(T).
template <Dtype T>
INL void load_two_vectors(const char* p, int64_t i, vf& a, vf& b) {
    if constexpr (T == Dtype::bf16) {  // a word holds two: the lower one is shifted up, of the upper one the lower bits
                                       // are cleared
        __m512i x = _mm512_loadu_si512(p + 2 * i);
        a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
        b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
    } else if constexpr (is_float8(T)) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
        const Fp8Halves halves = fp8_to_halves<T>(_mm512_zextsi256_si512(x));
        a = widen<0>(halves), b = widen<1>(halves);
    } else {
        a = load_raw<T>(p, i), b = load_raw<T>(p, i + N);
    }
}

// 2 N numbers in order -> the even ones in a, the odd ones in b; interleave is the inverse.
INL void deinterleave(vf& a, vf& b) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const vf x = _mm512_permutex2var_ps(a, even, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b);
    a = x;
}
INL void interleave(vf& a, vf& b) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const vf x = _mm512_permutex2var_ps(a, low, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
    a = x;
}

// As f16 or bf16, rounded to nearest even.
INL __m256i to_16_bits(Dtype t, vf x) {
    if (t == Dtype::f16) {
        return _mm512_cvtps_ph(x, 8);
    } else {
        __m512i u = _mm512_castps_si512(x);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
        __m512i y = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        y = _mm512_mask_mov_epi32(y, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
        return _mm512_cvtepi32_epi16(y);
    }
}

// Stores the first n lanes from element i on, as f32, f16 or bf16.
INL void store_as(Dtype t, char* p, int64_t i, vf x, int n = N) {
    if (t == Dtype::f32)
        _mm512_mask_storeu_ps(p + 4 * i, lane_mask(n), x);
    else
        _mm256_mask_storeu_epi16(p + 2 * i, lane_mask(n), to_16_bits(t, x));
}
// The same for N lanes, with a non-temporal store: see can_stream_out.
INL void stream_as(Dtype t, char* p, int64_t i, vf x) {
    if (t == Dtype::f32)
        _mm512_stream_ps(reinterpret_cast<float*>(p) + i, x);
    else
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p + 2 * i), to_16_bits(t, x));
}
INL void stream_fence() { _mm_sfence(); }

INL vw as_words(vf x) { return _mm512_castps_si512(x); }
INL vf as_floats(vw x) { return _mm512_castsi512_ps(x); }
INL vw load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
INL void store_words(uint32_t* p, vw x) { _mm512_storeu_si512(p, x); }
INL vw set1_word(const uint32_t* p) { return _mm512_set1_epi32((int)*p); }
INL vw zero_words() { return _mm512_setzero_si512(); }

// Stores the columns of a 16 x 16 block of words as rows at d, d + stride, ...
INL void transpose(vw (&r)[N], uint32_t* d, int64_t stride) {
    vw t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        store_words(d + i * stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        store_words(d + (i + 8) * stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        store_words(d + (i + 4) * stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        store_words(d + (i + 12) * stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
}

// The numbers of the sixteen codes of 4 bits.
struct Table16 {
    vf numbers;
};
INL Table16 load_table(const int8_t* numbers) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))))};
}
// The number of the code in the bits kShift to kShift + 3 of each word.
template <int kShift>
INL vf look_up(const Table16& table, vw words) {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, kShift), table.numbers);
}
constexpr bool kCodesInPlace = false;  // look_up takes one permutation
template <int kPlace>
vf code_in_place(vw words);  // never called

// Into all cache levels; into the second and third.
INL void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }
INL void prefetch_far(const char* p) { _mm_prefetch(p, _MM_HINT_T1); }

}  // namespace JATTN_ISA
