// The bfloat16 instructions that bf16_avx512.h uses, in terms of AVX-512 F: processors without them can test its
// layout.
#pragma once
#include <immintrin.h>

namespace jattn {

inline __m512 emulated_dot_bf16(__m512 sum, __m512i x, __m512i y) {
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    const auto low = [](__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); };
    const auto high = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_and_si512(v, upper)); };
    return _mm512_fmadd_ps(low(x), low(y), _mm512_fmadd_ps(high(x), high(y), sum));
}

inline __m256i emulated_narrow(__m512 x) {  // rounded to nearest even
    const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i y = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(y, nan, _mm512_set1_epi32(0x7fc0)));
}

inline __m512i emulated_narrow_two(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_narrow(low)), emulated_narrow(high), 1);
}

}  // namespace jattn

#define _mm512_dpbf16_ps(sum, x, y) jattn::emulated_dot_bf16(sum, (__m512i)(x), (__m512i)(y))
#define _mm512_cvtne2ps_pbh(high, low) jattn::emulated_narrow_two(high, low)
