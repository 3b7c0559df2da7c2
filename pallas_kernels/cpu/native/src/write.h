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
// N words, and N bytes, with the operators of the compiler's own vectors.
typedef uint32_t Words __attribute__((vector_size(4 * N)));
typedef uint8_t Bytes __attribute__((vector_size(N)));

INL Words bits_of(vf x) { return (Words)as_words(x); }

// Nearest fp8 codes, ties to even, saturating; NaN stays NaN.
template <int kMantissa, int kBias, uint32_t kLargest>
INL Words to_fp8(vf x) {
    const Words u = bits_of(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
    const int shift = 23 - kMantissa;
    const Words normal = ((a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift) - ((127u - kBias) << kMantissa);
    // a subnormal: adding 2^(23 + 1 - bias - mantissa) leaves the rounded code in the low bits
    const uint32_t magic = (uint32_t)(127 + 23 + 1 - kBias - kMantissa) << 23;
    const Words small = bits_of(add(as_floats((vw)a), set1(bits_to_float(magic)))) - magic;
    const Words limit = Words{} + ((uint32_t)(128 - kBias) << 23), largest = Words{} + kLargest;  // limit: least normal
    Words code = a < limit ? small : normal;
    code = code > largest ? largest : code;
    code = a > 0x7f800000u ? Words{} + 0x7fu : code;
    return sign | code;
}

INL Words to_int8(vf x) {  // half away from zero; NaN becomes 0
    const Words half = (bits_of(x) & 0x80000000u) | 0x3f000000u;
    vf y = max(set1(-127.0f), min(set1(127.0f), add(x, as_floats((vw)half))));
    y = where_equal(x, x, y, zero());
    typedef float Floats __attribute__((vector_size(4 * N)));
    typedef int32_t Ints __attribute__((vector_size(4 * N)));
    return (Words) __builtin_convertvector((Floats)y, Ints);
}

INL Words encode(Dtype to, vf x) {
    return to == Dtype::e4m3 ? to_fp8<3, 7, 0x7e>(x) : to == Dtype::e5m2 ? to_fp8<2, 15, 0x7b>(x) : to_int8(x);
}

static void encode_row(Dtype to, const float* x, int n, float scale, bool scaled, char* out) {
    const bool bytes = bytes_of(to) == 1;
    for (int i = 0; i < n; i += N) {
        const vf y = scaled || bytes ? div(load(x + i), set1(JATTN_MUTANT(scale_not_divided, 1.0f, scale))) : load(x + i);
        const int left = n - i < N ? n - i : N;
        if (!bytes) {
            storef(to, out, i, y, left);
            continue;
        }
        const Bytes codes = __builtin_convertvector(encode(to, y), Bytes);
        if (left == N)
            __builtin_memcpy(out + i, &codes, N);
        else
            __builtin_memcpy(out + i, &codes, left);
    }
}

// x /= scale in place; the largest magnitude, NaN where there is one. Numbers behind the last are zeros.
INL float divide_and_peak(float* x, int n, float scale) {
    vf top = zero();
    bool nan = false;
    for (int i = 0; i < n; i += N) {
        vf y = load(x + i);
        if (scale != 1.0f) store(x + i, y = div(y, set1(scale)));
        nan |= any_differs(y, y);
        top = max(top, max(y, sub(zero(), y)));
    }
    return nan ? __builtin_nanf("") : hmax(top);
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
        const float peak = divide_and_peak(x, dim, scales ? scale : 1.0f);
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
        if (JATTN_MUTANT(negative_slot_written, slot < 0, false)) slot += w.blocks * w.block_size;
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
