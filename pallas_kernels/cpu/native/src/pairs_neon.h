// Words of two bfloat16 (FEAT_BF16), 8 numbers a vector. The names are those of pairs_avx512.h.
#pragma once
#include "common.h"

namespace JATTN_ISA {

INL vf dot_pairs(vf sum, vw x, vw y) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_u32(x), vreinterpretq_bf16_u32(y));
}
INL vw narrow_pairs(vf first, vf second) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
}
INL uint16x8_t halves(vw x) { return vreinterpretq_u16_u32(x); }
INL vw zip_first(vw x, vw y) { return vreinterpretq_u32_u16(vzip1q_u16(halves(x), halves(y))); }
INL vw zip_second(vw x, vw y) { return vreinterpretq_u32_u16(vzip2q_u16(halves(x), halves(y))); }
INL vw pair_keys(vf x, vf y) {
    vw both = narrow_pairs(x, y);
    return zip_first(both, vreinterpretq_u32_u64(vdupq_laneq_u64(vreinterpretq_u64_u32(both), 1)));
}
INL void unzip_columns(float*, int64_t) {}  // a zip keeps the order of the columns

template <Dtype T>
INL vw load_pairs(const char* p, int64_t i, int n = 2 * N) {
    if constexpr (T == Dtype::bf16)
        if (n >= 2 * N) return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p + 2 * i)));
    vf second = n > N ? loadf<T>(p, i + N, n - N) : zero();
    return narrow_pairs(loadf<T>(p, i, n), second);
}

}  // namespace JATTN_ISA
