// Rows into the pool: rounding and saturation are those of pallas_kernels/algebra/quant.py as XLA computes it. (XLA may
// turn a division by one scale for all into a product with its inverse: a number that lies within float32 noise of a
// tie between two codes may then go to the other one.)
#pragma once
#include "common.h"

namespace JATTN_ISA {

INL float bits_to_float(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
INL uint32_t float_to_bits(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}

// Nearest fp8 code, ties to even, saturating; NaN stays NaN. Branch-free, so that compilers vectorise the loop.
template <int kMantissa, int kBias, uint32_t kLargest>
INL uint8_t to_fp8(float x) {
    const uint32_t u = float_to_bits(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
    const int shift = 23 - kMantissa;
    const uint32_t normal = ((a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1)) >> shift) - ((127u - kBias) << kMantissa);
    // a subnormal: adding 2^(23 + 1 - bias - mantissa) leaves the rounded code in the low bits
    const float magic = bits_to_float((uint32_t)(127 + 23 + 1 - kBias - kMantissa) << 23);
    const uint32_t small = float_to_bits(bits_to_float(a) + magic) - float_to_bits(magic);
    const uint32_t limit = (uint32_t)(128 - kBias) << 23;  // smallest normal
    uint32_t code = a < limit ? small : normal;
    code = code > kLargest ? kLargest : code;
    code = a > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(sign | code);
}

INL int8_t to_int8(float x) {  // half away from zero; NaN becomes 0
    float y = x + __builtin_copysignf(0.5f, x);
    y = y > 127.0f ? 127.0f : y;
    y = y < -127.0f ? -127.0f : y;
    return (int8_t)(int32_t)(x == x ? y : 0.0f);
}

static void encode_row(Dtype to, const float* x, int n, float scale, bool scaled, char* out) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
    switch (to) {
        case Dtype::e4m3:
            for (int i = 0; i < n; i++) bytes[i] = to_fp8<3, 7, 0x7e>(x[i] / scale);
            return;
        case Dtype::e5m2:
            for (int i = 0; i < n; i++) bytes[i] = to_fp8<2, 15, 0x7b>(x[i] / scale);
            return;
        case Dtype::i8:
            for (int i = 0; i < n; i++) bytes[i] = (uint8_t)to_int8(x[i] / scale);
            return;
        default:
            for (int i = 0; i < n; i += N)
                storef(to, out, i, scaled ? div(load(x + i), set1(scale)) : load(x + i), n - i < N ? n - i : N);
    }
}

INL void write_half(const Write& w, const char* from, int64_t token, int head, int64_t row, int dim, char* pool,
                    float* token_scale, const float* scales, float* x) {
    const char* src = from + (token * w.kv_heads + head) * dim * bytes_of(w.from);
    char* to = pool + row * dim * bytes_of(w.to);
    if (w.from == w.to && !scales) {
        __builtin_memcpy(to, src, dim * bytes_of(w.to));
        return;
    }
    to_floats(w.from, src, dim, x);
    float scale = scales ? scales[head] : 1.0f;
    if (token_scale) {
        float peak = 0.0f;
        for (int i = 0; i < dim; i++) {
            if (scales) x[i] = x[i] / scale;
            float size = __builtin_fabsf(x[i]);
            peak = size > peak || size != size ? size : peak;
        }
        const float largest = w.to == Dtype::e4m3 ? 448.0f : w.to == Dtype::e5m2 ? 57344.0f : 127.0f;
        scale = peak * (1.0f / largest);  // XLA divides by a constant so
        if (scale < 1e-6f) scale = 1e-6f;
        token_scale[row] = scale;
    }
    encode_row(w.to, x, dim, scale, scales != nullptr, to);
}

static void write_rows(const Write& w, int64_t begin, int64_t end) {
    alignas(64) float x[512 + N];
    for (int64_t token = begin; token < end; token++) {
        int64_t slot = w.slots[token];
        if (slot < 0 || slot >= w.blocks * w.block_size) continue;
        for (int head = 0; head < w.kv_heads; head++) {
            int64_t row = slot / w.block_size * w.block_stride + head * w.head_stride +
                          slot % w.block_size * w.slot_stride;
            write_half(w, w.k, token, head, row, w.dim, w.k_pool, w.k_token_scale, w.k_scale, x);
            write_half(w, w.v, token, head, row, w.vdim, w.v_pool, w.v_token_scale, w.v_scale, x);
        }
    }
}

}  // namespace JATTN_ISA
