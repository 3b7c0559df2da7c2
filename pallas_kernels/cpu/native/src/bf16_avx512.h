// Vectors of words that hold two bfloat16 each (vdpbf16ps): 32 numbers. fp8 and int8 numbers have at most 8 significant
// bits, so bfloat16 represents them exactly; fp8 is converted by a table of the 128 magnitudes. bf16_neon.h defines the
// same names.
#pragma once
#include "common.h"
#ifdef JATTN_EMULATE_AVX512_BF16
#include "bf16_emulated.h"
#endif

namespace JATTN_ISA {

using vb = __m512bh;

// Adds to each lane of `sum` the products of the two numbers of that lane's words.
INL vf dot_bf16(vf sum, vw x, vw y) { return _mm512_dpbf16_ps(sum, (vb)x, (vb)y); }

// 2 N numbers, rounded to bfloat16.
INL vw to_bf16_pairs(vf first, vf second) { return (vw)_mm512_cvtne2ps_pbh(second, first); }

// Words of two rows x and y -> words with one column of x and of y each, for a product over pairs of keys. The columns
// are in the order of the instruction; unzip_columns restores it in the accumulators.
INL vw zip_low(vw x, vw y) { return _mm512_unpacklo_epi16(x, y); }
INL vw zip_high(vw x, vw y) { return _mm512_unpackhi_epi16(x, y); }
INL void unzip_columns(float* acc, int64_t columns) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int64_t c = 0; c < columns; c += 32) {
        vf lo = load(acc + c), hi = load(acc + c + 16);
        store(acc + c, _mm512_permutex2var_ps(lo, first, hi));
        store(acc + c + 16, _mm512_permutex2var_ps(lo, second, hi));
    }
}

// [2 kKeysPerVector keys][4 rows] as floats -> [kKeysPerVector pairs of keys][4 rows] as words.
INL vw pack_key_pairs(vf x, vf y) {
    const __m512i order = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16,  //
                                           15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0);
    return _mm512_permutexvar_epi16(order, to_bf16_pairs(x, y));
}

// The bits of the bfloat16 number with the 7-bit fp8 code `code`.
constexpr uint16_t fp8_magnitude_as_bf16(Dtype t, int code) {
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
struct Fp8ToBf16Table {
    uint16_t bits[128];
    constexpr Fp8ToBf16Table() : bits() {
        for (int i = 0; i < 128; i++) bits[i] = fp8_magnitude_as_bf16(T, i);
    }
};
template <Dtype T>
alignas(64) static constexpr Fp8ToBf16Table<T> kFp8ToBf16{};

INL __mmask32 lane_mask32(int n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }

// 2 N stored numbers from element i on, as bfloat16. If n < 2 N, only n are read and the others are 0.
template <Dtype T>
INL vw load_bf16(const char* p, int64_t i, int n = 2 * N) {
    const __mmask32 m = lane_mask32(n);
    if constexpr (T == Dtype::bf16) {
        return _mm512_maskz_loadu_epi16(m, p + 2 * i);
    } else if constexpr (T == Dtype::i8) {
        __m256i x = _mm256_maskz_loadu_epi8(m, p + i);
        vf lo = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(x)));
        vf hi = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(x, 1)));
        return to_bf16_pairs(lo, hi);
    } else {
        const uint16_t* table = kFp8ToBf16<T>.bits;
        __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(m, p + i));
        __m512i lo = _mm512_permutex2var_epi16(_mm512_load_si512(table), x, _mm512_load_si512(table + 32));
        __m512i hi = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), x, _mm512_load_si512(table + 96));
        __m512i y = _mm512_mask_mov_epi16(lo, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), hi);
        return _mm512_ternarylogic_epi32(y, _mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000), 0xf8);
    }
}

}  // namespace JATTN_ISA
