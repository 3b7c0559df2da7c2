// Products of bfloat16 rows with weights in 4 or 8 bits, two inputs at a time (vdpbf16ps): their numbers are exact in
// bfloat16.
#pragma once
#include "product_bf16.h"
#include "product_packed.h"

namespace JATTN_ISA {

// The bits of a small integer as bfloat16.
constexpr uint16_t bf16_bits(int number) {
    const int magnitude = number < 0 ? -number : number;
    if (!magnitude) return 0;
    int exponent = 0;
    while (magnitude >> (exponent + 1)) exponent++;
    return (uint16_t)((number < 0) << 15 | (127 + exponent) << 7 | (magnitude << (7 - exponent) & 0x7f));
}

// The numbers of the sixteen codes, twice, so that the fifth bit of an index does not matter.
template <class Format>
struct Bf16Numbers {
    uint16_t bits[32];
    constexpr Bf16Numbers() : bits() {
        for (int i = 0; i < 32; i++) bits[i] = bf16_bits(Format::kNumbers[i % 16]);
    }
};
template <class Format>
alignas(64) static constexpr Bf16Numbers<Format> kBf16Numbers{};

template <class Format>
struct Packed4Pairs {
    static constexpr int kInputs = 8, kStep = 2, kBytes = 4, kRows = 1, kDecodings = 2;
    static constexpr bool kIsDeinterleaved = false;
    static constexpr float kUnit = Format::kUnit;
    using Raw = vw;
    using Weights = vw;
    using Numbers = vw;
    INL vw numbers() { return _mm512_load_si512(kBf16Numbers<Format>.bits); }
    INL void load(const char* w, int64_t stride, vw (&raw)[kPackedVectors]) { Packed4<Format>::load(w, stride, raw); }
    template <int kWord>
    INL vw decode(vw raw, vw numbers) {
        return _mm512_permutexvar_epi16(_mm512_srli_epi32(raw, 4 * kWord), numbers);
    }
    INL vw load_copy(const uint32_t* p) { return load_words(p); }
    INL void store_copy(uint32_t* p, vw w) { store_words(p, w); }
    INL vf multiply_add(vw w, const uint32_t* x, vf sum) { return dot_bf16(sum, w, set1_word(x)); }
    static void pack_row(Dtype, const char* row, int64_t inputs, uint32_t* to, int stride) {
        ProductBf16::pack_row(row, inputs, to, stride);
    }
};

// Two rows of weights: their numbers as float32, of which bfloat16 is the upper half.
template <Dtype T>
struct Packed8Pairs {
    static constexpr int kInputs = 2, kStep = 2, kBytes = 1, kRows = 2, kDecodings = 1;
    static constexpr bool kIsDeinterleaved = is_float8(T);
    static constexpr float kUnit = raw_unit(T);
    struct Raw {
        vf first, second;
    };
    using Weights = vw;
    struct Numbers {};
    INL Numbers numbers() { return {}; }
    INL void load(const char* w, int64_t stride, Raw (&raw)[kPackedVectors]) {
        vf first[kPackedVectors], second[kPackedVectors];
        Packed8<T>::load(w, stride, first), Packed8<T>::load(w + stride, stride, second);
#pragma GCC unroll 4
        for (int v = 0; v < kPackedVectors; v++) raw[v] = {first[v], second[v]};
    }
    template <int>
    INL vw decode(const Raw& raw, Numbers) {
        constexpr __mmask32 kUpperHalves = 0xaaaaaaaa;
        return _mm512_mask_blend_epi16(kUpperHalves, _mm512_srli_epi32(as_words(raw.first), 16), as_words(raw.second));
    }
    INL vw load_copy(const uint32_t* p) { return load_words(p); }
    INL void store_copy(uint32_t* p, vw w) { store_words(p, w); }
    INL vf multiply_add(vw w, const uint32_t* x, vf sum) { return dot_bf16(sum, w, set1_word(x)); }
    static void pack_row(Dtype, const char* row, int64_t inputs, uint32_t* to, int stride) {
        ProductBf16::pack_row(row, inputs, to, stride);
    }
};

constexpr const ProductKernel* packed_int8_pairs = &packed_kernel<Packed8Pairs<Dtype::i8>>;
constexpr const ProductKernel* packed_fp8_pairs = &packed_kernel<Packed8Pairs<Dtype::e4m3>>;
constexpr const ProductKernel* packed_int4_pairs = &packed_kernel<Packed4Pairs<Int4>>;
constexpr const ProductKernel* packed_fp4_pairs = &packed_kernel<Packed4Pairs<Fp4>>;

}  // namespace JATTN_ISA
