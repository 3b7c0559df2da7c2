// Writes new keys and values into the pool. Rounding and saturation are those of pallas_kernels/algebra/quant.py as XLA
// computes it, with one exception: XLA may replace the division by a scale by a product with its inverse, so a number
// within float32 rounding of a tie between two codes may get the other code.
#pragma once
#include "common.h"

namespace JATTN_ISA {

INL float bits_to_float(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
// Vectors of N words and of N bytes, as the compiler's vector types: they have the usual operators.
typedef uint32_t Words __attribute__((vector_size(4 * N)));
typedef uint8_t Bytes __attribute__((vector_size(N)));

INL Words bits_of(vf x) { return (Words)as_words(x); }

// Nearest fp8 codes, ties to even, saturating; NaN stays NaN.
template <int kMantissa, int kBias, uint32_t kLargest>
INL Words to_fp8(vf x) {
    const Words u = bits_of(x), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
    const int shift = 23 - kMantissa;
    const Words normal =
        ((a + ((1u << (shift - 1)) - 1) + ((a >> shift) & 1u)) >> shift) - ((127u - kBias) << kMantissa);
    // subnormal codes: adding 2^(23 + 1 - bias - mantissa) leaves the rounded code in the low bits of the float
    const uint32_t magic = (uint32_t)(127 + 23 + 1 - kBias - kMantissa) << 23;
    const Words small = bits_of(add(as_floats((vw)a), set1(bits_to_float(magic)))) - magic;
    const Words least_normal = Words{} + ((uint32_t)(128 - kBias) << 23), largest = Words{} + kLargest;
    Words code = a < least_normal ? small : normal;
    code = code > largest ? largest : code;
    code = a > 0x7f800000u ? Words{} + 0x7fu : code;
    return sign | code;
}

// Rounds halves away from zero; NaN becomes 0.
INL Words to_int8(vf x) {
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

// Stores n numbers as dtype `to`, divided by `scale` if `scaled` or if `to` is a dtype of one byte.
static void encode_row(Dtype to, const float* x, int n, float scale, bool scaled, char* out) {
    const bool is_byte = bytes_of(to) == 1;
    for (int i = 0; i < n; i += N) {
        const vf y =
            scaled || is_byte ? div(load(x + i), set1(JATTN_MUTANT(scale_not_divided, 1.0f, scale))) : load(x + i);
        const int left = n - i < N ? n - i : N;
        if (!is_byte) {
            store_as(to, out, i, y, left);
            continue;
        }
        const Bytes codes = __builtin_convertvector(encode(to, y), Bytes);
        if (left == N)
            __builtin_memcpy(out + i, &codes, N);
        else
            __builtin_memcpy(out + i, &codes, left);
    }
}

// Divides x by scale in place and returns the largest magnitude; NaN if one number is NaN. Elements behind the last, up
// to a whole vector, must be 0.
INL float divide_and_abs_max(float* x, int n, float scale) {
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

// Writes the key or the value of one token and head into a row of its pool. `x` is scratch for the row as floats.
INL void write_row(const WriteArgs& args, const char* from, int64_t token, int head, int64_t row, int dim, char* pool,
                   float* token_scale, const float* scales, float* x) {
    const char* src = from + (token * args.num_kv_heads + head) * dim * bytes_of(args.input_dtype);
    char* to = pool + row * dim * bytes_of(args.kv_dtype);
    if (args.input_dtype == args.kv_dtype && !scales) {
        __builtin_memcpy(to, src, dim * bytes_of(args.kv_dtype));
        return;
    }
    to_floats(args.input_dtype, src, dim, x);
    float scale = scales ? scales[head] : 1.0f;
    if (token_scale) {
        const float abs_max = divide_and_abs_max(x, dim, scales ? scale : 1.0f);
        const float largest = args.kv_dtype == Dtype::e4m3 ? 448.0f : args.kv_dtype == Dtype::e5m2 ? 57344.0f : 127.0f;
        scale = abs_max * (1.0f / largest);  // as XLA divides by a constant
        if (scale < 1e-6f) scale = 1e-6f;
        token_scale[row] = scale;
    }
    encode_row(args.kv_dtype, x, dim, scale, scales != nullptr, to);
}

static void write_tokens(const WriteArgs& args, int64_t begin, int64_t end) {
    alignas(64) float x[kMaxHeadDim + N];
    for (int64_t token = begin; token < end; token++) {
        int64_t slot = args.slot_mapping[token];
        if (JATTN_MUTANT(negative_slot_written, slot < 0, false)) slot += args.num_blocks * args.block_size;
        if (slot < 0 || slot >= args.num_blocks * args.block_size) continue;
        for (int head = 0; head < args.num_kv_heads; head++) {
            int64_t row = slot / args.block_size * args.block_stride + head * args.head_stride +
                          slot % args.block_size * args.slot_stride;
            write_row(args, args.k, token, head, row, args.head_dim, args.k_pool, args.k_token_scale, args.k_scale, x);
            write_row(args, args.v, token, head, row, args.v_head_dim, args.v_pool, args.v_token_scale, args.v_scale,
                      x);
        }
    }
}

}  // namespace JATTN_ISA
