// Reads and makes stored numbers of every dtype, one at a time and without SIMD: the reference for the kernels'
// conversions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#include "args.h"

namespace jattn {

inline double fp8_value(int code, int mantissa_bits, int bias) {
    const int e = (code & 0x7f) >> mantissa_bits, m = code & ((1 << mantissa_bits) - 1);
    const double x =
        e ? std::ldexp(1.0 + std::ldexp(m, -mantissa_bits), e - bias) : std::ldexp(m, 1 - bias - mantissa_bits);
    return code & 0x80 ? -x : x;
}

inline double stored_value(Dtype t, const char* p, int64_t i) {
    if (t == Dtype::f32) {
        float x;
        std::memcpy(&x, p + 4 * i, 4);
        return x;
    }
    if (t == Dtype::i8) return ((const int8_t*)p)[i];
    if (t == Dtype::e4m3) return fp8_value(((const uint8_t*)p)[i], 3, 7);
    if (t == Dtype::e5m2) return fp8_value(((const uint8_t*)p)[i], 2, 15);
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    if (t == Dtype::bf16) {
        const uint32_t bits = (uint32_t)half << 16;
        float x;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    const int e = half >> 10 & 31, m = half & 1023;
    const double x = e ? std::ldexp(1.0 + m / 1024.0, e - 15) : std::ldexp(m, -24);
    return half & 0x8000 ? -x : x;
}

// The distance of neighbouring numbers: relative, and the smallest absolute one.
inline double relative_step(Dtype t) {
    const double steps[kNumDtypes] = {std::ldexp(1, -23), std::ldexp(1, -10), std::ldexp(1, -7), 0.125, 0.25, 0.0};
    return steps[(int)t];
}
inline double smallest_step(Dtype t) {
    const double steps[kNumDtypes] = {0.0, std::ldexp(1, -24), 0.0, std::ldexp(1, -9), std::ldexp(1, -16), 1.0};
    return steps[(int)t];
}

// Writes a random finite number of moderate size, sometimes subnormal.
inline void random_number(Dtype t, std::mt19937& rng, char* p, int64_t i) {
    const uint32_t bits = rng(), sign = bits >> 31;
    if (t == Dtype::f32) {
        const float x = (float)((int32_t)bits / 1e9);
        std::memcpy(p + 4 * i, &x, 4);
    } else if (t == Dtype::f16 || t == Dtype::bf16) {
        const int mantissa = t == Dtype::f16 ? 10 : 7, one = t == Dtype::f16 ? 15 : 127;
        const uint16_t x = (uint16_t)(sign << 15 | (one - bits % 5) << mantissa | (bits >> 8 & ((1u << mantissa) - 1)));
        std::memcpy(p + 2 * i, &x, 2);
    } else if (t == Dtype::i8) {
        p[i] = (char)(int8_t)((int)(bits % 9) - 4);
    } else if (bits % 64 == 7) {  // any number up to 448: larger ones could overflow an output in float16
        const uint32_t code = bits >> 8 & 0x7f, largest = t == Dtype::e4m3 ? 0x7e : 0x5f;
        p[i] = (char)(sign << 7 | (code < largest ? code : largest));
    } else {  // one of 16 is subnormal
        const int mantissa = t == Dtype::e4m3 ? 3 : 2, one = t == Dtype::e4m3 ? 7 : 15;
        const uint32_t exponent = bits % 16 ? one - bits % 5 : 0;
        p[i] = (char)(sign << 7 | exponent << mantissa | (bits >> 8 & ((1u << mantissa) - 1)));
    }
}

}  // namespace jattn
