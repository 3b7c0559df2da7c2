// Vectors of 4 floats (arm64). simd_avx512.h explains the names.
#pragma once
#include <arm_neon.h>

#include "args.h"

#define INL static inline __attribute__((always_inline))

namespace JATTN_ISA {
using namespace jattn;

constexpr int N = 4;
constexpr int kKeysPerVector = N / 4;
constexpr int kBlockVectors = 4;
using vf = float32x4_t;
using vw = uint32x4_t;

INL vf zero() { return vdupq_n_f32(0.0f); }
INL vf set1(float x) { return vdupq_n_f32(x); }
INL vf load(const float* p) { return vld1q_f32(p); }
INL void store(float* p, vf x) { vst1q_f32(p, x); }
INL vf add(vf a, vf b) { return vaddq_f32(a, b); }
INL vf sub(vf a, vf b) { return vsubq_f32(a, b); }
INL vf mul(vf a, vf b) { return vmulq_f32(a, b); }
INL vf div(vf a, vf b) { return vdivq_f32(a, b); }
INL vf approx_div(vf a, vf b) { return div(a, b); }
INL vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INL vf max(vf a, vf b) { return vmaxq_f32(a, b); }  // NaN if one of them is NaN
INL vf min(vf a, vf b) { return vminq_f32(a, b); }

INL vf select_in_range(vf x, vf key, vf begin, vf end, vf other) {
    return vbslq_f32(vandq_u32(vcgeq_f32(key, begin), vcltq_f32(key, end)), x, other);
}
INL vf where_equal(vf x, vf y, vf then, vf otherwise) { return vbslq_f32(vceqq_f32(x, y), then, otherwise); }
INL bool any_differs(vf x, vf y) { return vminvq_u32(vceqq_f32(x, y)) == 0; }
INL float hmax(vf x) { return vmaxvq_f32(x); }
INL float hsum(vf x) { return vaddvq_f32(x); }

INL vw as_words(vf x) { return vreinterpretq_u32_f32(x); }
INL vf as_floats(vw x) { return vreinterpretq_f32_u32(x); }

// exp(x) for x <= 0 with a relative error of about 1e-7; 0 for x < -87, NaN for NaN.
INL vf vexp(vf x) {
    const vw is_zero = vcltq_f32(x, set1(-87.0f));
    x = max(set1(-87.0f), x);
    vf n = vrndnq_f32(mul(x, set1(1.44269504f)));
    vf r = fma(x, set1(1.44269504f), vnegq_f32(n));
    vf p = fma(set1(1.535336188e-4f), r, set1(1.339887440e-3f));
    p = fma(p, r, set1(9.618437357e-3f));
    p = fma(p, r, set1(5.550332471e-2f));
    p = fma(p, r, set1(2.402264791e-1f));
    p = fma(p, r, set1(6.931472028e-1f));
    p = fma(p, r, set1(1.0f));
    int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return as_floats(vbicq_u32(as_words(mul(p, vreinterpretq_f32_s32(power))), is_zero));
}

INL vf lane_numbers() {
    const float lanes[4] = {0, 1, 2, 3};
    return load(lanes);
}
// A vector [key][4 rows] holds one key: there is nothing to reduce over keys.
INL vf broadcast_rows(const float* p) { return load(p); }
INL vf broadcast_keys(const float* p) { return set1(p[0]); }
INL vf max_over_keys(vf x) { return x; }
INL vf sum_over_keys(vf x) { return x; }
INL vf sum_lanes(vf (&a)[kKeysPerVector][4]) {
    return vpaddq_f32(vpaddq_f32(a[0][0], a[0][1]), vpaddq_f32(a[0][2], a[0][3]));
}

// The first `bytes` bytes, at most 8; the others are 0.
INL uint64_t first_bytes(const char* p, int bytes) {
    uint64_t x = 0;
    if (bytes >= 8) {
        __builtin_memcpy(&x, p, 8);
    } else if (bytes == 4) {
        __builtin_memcpy(&x, p, 4);
    } else {
        for (int i = 0; i < bytes; i++) x |= (uint64_t)(uint8_t)p[i] << (8 * i);
    }
    return x;
}

template <Dtype T>
INL vf load_raw(const char* p, int64_t i, int n = N) {
    n = n < N ? n : N;
    if constexpr (T == Dtype::f32) {
        const float* f = reinterpret_cast<const float*>(p) + i;
        if (n == N) return load(f);
        float tail[N] = {};
        for (int j = 0; j < n; j++) tail[j] = f[j];
        return load(tail);
    } else if constexpr (T == Dtype::f16) {
        return vcvt_f32_f16(vreinterpret_f16_u64(vcreate_u64(first_bytes(p + 2 * i, 2 * n))));
    } else if constexpr (T == Dtype::bf16) {
        return as_floats(vshlq_n_u32(vmovl_u16(vcreate_u16(first_bytes(p + 2 * i, 2 * n))), 16));
    } else if constexpr (T == Dtype::i8) {
        int16x8_t x = vmovl_s8(vcreate_s8(first_bytes(p + i, n)));
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
    } else {
        uint16x4_t x = vget_low_u16(vmovl_u8(vcreate_u8(first_bytes(p + i, n))));
        if constexpr (T == Dtype::e5m2) return vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(x, 8)));
        uint16x4_t low = vand_u16(x, vdup_n_u16(0x7f)), sign = vshl_n_u16(vand_u16(x, vdup_n_u16(0x80)), 8);
        uint16x4_t nan = vand_u16(vceq_u16(low, vdup_n_u16(0x7f)), vdup_n_u16(0x7e00));
        uint16x4_t half = vorr_u16(vorr_u16(sign, vshl_n_u16(low, 7)), nan);
        return vcvt_f32_f16(vreinterpret_f16_u16(half));
    }
}

struct Fp8Halves {
    uint16x8_t even, odd;
};
template <int kPart>
INL vf widen(const Fp8Halves& x) {
    const uint16x8_t half = kPart % 2 ? x.odd : x.even;
    return vcvt_f32_f16(vreinterpret_f16_u16(kPart < 2 ? vget_low_u16(half) : vget_high_u16(half)));
}
INL uint16x8_t restore_nan(uint16x8_t half) {
    const uint16x8_t nan = vceqq_u16(vorrq_u16(half, vdupq_n_u16(0x8000)), vdupq_n_u16(0xbf80));
    return vorrq_u16(half, vandq_u16(nan, vdupq_n_u16(0x7e00)));
}
template <Dtype T>
INL Fp8Halves fp8_to_halves(uint8x16_t x) {
    const uint16x8_t words = vreinterpretq_u16_u8(x), first = vshlq_n_u16(words, 8);
    if constexpr (T == Dtype::e5m2) return {first, vandq_u16(words, vdupq_n_u16(0xff00))};
    auto halved = [](uint16x8_t y) __attribute__((always_inline)) {
        const uint16x8_t shifted = vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(y), 1));
        return vandq_u16(shifted, vdupq_n_u16(0xbf80));
    };
    Fp8Halves y{halved(first), halved(words)};
    if (__builtin_expect(vmaxvq_u8(vorrq_u8(x, vdupq_n_u8(0x80))) == 0xff, 0))
        y = {restore_nan(y.even), restore_nan(y.odd)};
    return y;
}
template <Dtype T>
INL Fp8Halves load_fp8_halves(const char* p, int64_t i) {
    return fp8_to_halves<T>(vld1q_u8(reinterpret_cast<const uint8_t*>(p + i)));
}

template <Dtype T>
INL void load_two_vectors(const char* p, int64_t i, vf& a, vf& b) {
    if constexpr (T == Dtype::bf16) {
        vw x = vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p + 2 * i)));
        a = as_floats(vshlq_n_u32(x, 16));
        b = as_floats(vandq_u32(x, vdupq_n_u32(0xffff0000u)));
    } else if constexpr (is_float8(T)) {
        const Fp8Halves halves =
            fp8_to_halves<T>(vcombine_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p + i)), vdup_n_u8(0)));
        a = widen<0>(halves), b = widen<1>(halves);
    } else {
        a = load_raw<T>(p, i), b = load_raw<T>(p, i + N);
    }
}

INL void deinterleave(vf& a, vf& b) {
    const vf even = vuzp1q_f32(a, b);
    b = vuzp2q_f32(a, b);
    a = even;
}
INL void interleave(vf& a, vf& b) {
    const vf low = vzip1q_f32(a, b);
    b = vzip2q_f32(a, b);
    a = low;
}

INL void store_as(Dtype t, char* p, int64_t i, vf x, int n = N) {
    if (t == Dtype::f32) {
        float* f = reinterpret_cast<float*>(p) + i;
        if (n >= N) return store(f, x);
        float tail[N];
        store(tail, x);
        for (int j = 0; j < n; j++) f[j] = tail[j];
        return;
    }
    uint16x4_t y;
    if (t == Dtype::f16) {
        y = vreinterpret_u16_f16(vcvt_f16_f32(x));
    } else {  // rounded to nearest even
        vw u = as_words(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        y = vshrn_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
        y = vbsl_u16(vmovn_u32(vceqq_f32(x, x)), y, vdup_n_u16(0x7fc0));
    }
    const uint64_t bits = vget_lane_u64(vreinterpret_u64_u16(y), 0);
    if (n >= N) {
        __builtin_memcpy(p + 2 * i, &bits, 8);
    } else {
        for (int b = 0; b < 2 * n; b++) p[2 * i + b] = (char)(bits >> (8 * b));
    }
}
INL void stream_as(Dtype t, char* p, int64_t i, vf x) { store_as(t, p, i, x); }
INL void stream_fence() {}

INL vw load_words(const uint32_t* p) { return vld1q_u32(p); }
INL void store_words(uint32_t* p, vw x) { vst1q_u32(p, x); }
INL vw set1_word(const uint32_t* p) { return vld1q_dup_u32(p); }
INL vw zero_words() { return vdupq_n_u32(0); }

// Stores the columns of a 4 x 4 block of words as rows at d, d + stride, ...
INL void transpose(vw (&r)[N], uint32_t* d, int64_t stride) {
    auto halves = [](vw x) __attribute__((always_inline)) { return vreinterpretq_u64_u32(x); };
    auto words = [](uint64x2_t x) __attribute__((always_inline)) { return vreinterpretq_u32_u64(x); };
    uint64x2_t a = halves(vtrn1q_u32(r[0], r[1])), b = halves(vtrn2q_u32(r[0], r[1]));
    uint64x2_t e = halves(vtrn1q_u32(r[2], r[3])), f = halves(vtrn2q_u32(r[2], r[3]));
    store_words(d, words(vtrn1q_u64(a, e)));
    store_words(d + stride, words(vtrn1q_u64(b, f)));
    store_words(d + 2 * stride, words(vtrn2q_u64(a, e)));
    store_words(d + 3 * stride, words(vtrn2q_u64(b, f)));
}

struct Table16 {
    int8x16_t numbers;
};
INL Table16 load_table(const int8_t* numbers) { return {vld1q_s8(numbers)}; }
template <int kShift>
INL vf look_up(const Table16& table, vw words) {
    vw code = words;
    if constexpr (kShift > 0) code = vshrq_n_u32(words, kShift);
    const uint8x16_t index = vreinterpretq_u8_u32(vandq_u32(code, vdupq_n_u32(15)));
    const int32x4_t found = vreinterpretq_s32_s8(vqtbl1q_s8(table.numbers, index));
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(found, 24), 24));
}
constexpr bool kCodesInPlace = false;  // look_up takes one permutation
template <int kPlace>
vf code_in_place(vw words);  // never called

INL void prefetch(const char* p) { __builtin_prefetch(p, 0, 3); }
INL void prefetch_far(const char* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace JATTN_ISA
