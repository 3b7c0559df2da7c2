// Vectors of words that hold two bfloat16 each (FEAT_BF16): 8 numbers. bf16_avx512.h explains the names.
#pragma once
#include "common.h"

namespace JATTN_ISA {

INL vf dot_bf16(vf sum, vw x, vw y) { return vbfdotq_f32(sum, vreinterpretq_bf16_u32(x), vreinterpretq_bf16_u32(y)); }
INL vw to_bf16_pairs(vf first, vf second) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}
INL uint16x8_t as_16_bits(vw x) { return vreinterpretq_u16_u32(x); }
INL vw zip_low(vw x, vw y) { return vreinterpretq_u32_u16(vzip1q_u16(as_16_bits(x), as_16_bits(y))); }
INL vw zip_high(vw x, vw y) { return vreinterpretq_u32_u16(vzip2q_u16(as_16_bits(x), as_16_bits(y))); }
INL vw pack_key_pairs(vf x, vf y) {
    vw both = to_bf16_pairs(x, y);
    return zip_low(both, vreinterpretq_u32_u64(vdupq_laneq_u64(vreinterpretq_u64_u32(both), 1)));
}
INL void unzip_columns(float*, int64_t) {}  // zip_low and zip_high keep the order of the columns

template <Dtype T>
INL vw load_bf16(const char* p, int64_t i, int n = 2 * N) {
    if constexpr (T == Dtype::bf16)
        if (n >= 2 * N) return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p + 2 * i)));
    vf second = n > N ? load_float<T>(p, i + N, n - N) : zero();
    return to_bf16_pairs(load_float<T>(p, i, n), second);
}

}  // namespace JATTN_ISA
