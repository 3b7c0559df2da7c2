// What the kernels of one ISA share: tanh, queries and rows of a piece of work.
#pragma once
#include "problem.h"

namespace JATTN_ISA {

constexpr float kInf = __builtin_inff();

// A number that load_raw or load_two brings stands for this many times itself: e4m3 comes with the exponent of a half.
constexpr float raw_unit(Dtype t) { return t == Dtype::e4m3 ? 256.0f : 1.0f; }
// True where load_two brings even and odd numbers apart.
constexpr bool is_split(Dtype t) { return t == Dtype::bf16 || is_float8(t); }

template <Dtype T>
INL vf loadf(const char* p, int64_t i, int n = N) {
    const vf x = load_raw<T>(p, i, n);
    return raw_unit(T) == 1.0f ? x : mul(x, set1(raw_unit(T)));
}

INL void fill(float* p, int64_t n, float x) {
    for (int64_t i = 0; i < n; i++) p[i] = x;
}

// tanh to a few ulp (rational approximation on +-7.9).
INL vf tanh_(vf x) {
    x = max(set1(-7.90531110763549805f), min(set1(7.90531110763549805f), x));
    vf s = mul(x, x);
    vf p = fma(s, set1(-2.76076847742355e-16f), set1(2.00018790482477e-13f));
    p = fma(s, p, set1(-8.60467152213735e-11f));
    p = fma(s, p, set1(5.12229709037114e-08f));
    p = fma(s, p, set1(1.48572235717979e-05f));
    p = fma(s, p, set1(6.37261928875436e-04f));
    p = fma(s, p, set1(4.89352455891786e-03f));
    vf q = fma(s, set1(1.19825839466702e-06f), set1(1.18534705686654e-04f));
    q = fma(s, q, set1(2.26843463243900e-03f));
    q = fma(s, q, set1(4.89352518554385e-03f));
    return quotient(mul(x, p), q);
}

// The maximum to subtract: 0 while nothing was seen.
INL float shift_of(float m) { return m == -kInf ? 0.0f : m; }
INL vf shift_of(vf m) { return where_equal(m, set1(-kInf), zero(), m); }

// Row r of a piece of work.
struct Row {
    int64_t token, head, position;
};

INL Row row_of(const Problem& p, const Work& w, int head, int r) {
    int64_t first = p.query_start[w.req], count = (int64_t)p.query_start[w.req + 1] - first;
    int64_t i = w.q0 + r / w.ng;
    const int64_t of_group = w.g0 + r % w.ng, query_head = head * (int64_t)p.group + of_group;
    return {first + i, JATTN_MUTANT(heads_interleaved, of_group * p.kv_heads + head, query_head), p.seq_len[w.req] - count + i};
}

// Where keys [first, first + count) of a piece lie in the pool, a page's run at a time; `step` apart in idx.
INL void find_keys(const Problem& p, const Work& w, int head, int first, int count, int64_t* idx, int step = 1) {
    for (int t = 0; t < count;) {
        const int key = w.begin + first + t;
        int64_t at = row_index(p, w.req, head, key);
        const int run = p.paged ? p.block_size - key % p.block_size : count - t;
        for (int n = run < count - t ? run : count - t; n > 0; n--, at += p.slot_stride) idx[t++ * step] = at;
    }
}

// Everything between a dot product and the mask that differs from row to row.
struct RowRule {
    float *mult, *slope, *position;
    int32_t *lo, *hi;  // keys seen
};

INL RowRule row_rules(const Problem& p, const Work& w, int head, int padded, float key_unit, Arena& arena) {
    RowRule rule{arena.take<float>(padded), arena.take<float>(padded), arena.take<float>(padded),
                 arena.take<int32_t>(padded), arena.take<int32_t>(padded)};
    const float* const k_scale = JATTN_MUTANT(scales_swapped, p.v_scale, p.k_scale);
    float scale = JATTN_MUTANT(scale_ignored, 1.0f, p.scale) * key_unit * (k_scale ? k_scale[head] : 1.0f);
    for (int r = 0; r < padded; r++) {
        if (r >= w.rows()) {
            rule.mult[r] = rule.slope[r] = rule.position[r] = 0.0f;
            rule.lo[r] = rule.hi[r] = w.begin;
            continue;
        }
        Row row = row_of(p, w, head, r);
        Range see = visible(p, w.req, row.position);
        rule.mult[r] = scale * (p.q_scale && !JATTN_MUTANT(query_scale_ignored, true, false) ? p.q_scale[row.head] : 1.0f);
        rule.slope[r] = p.slopes ? p.slopes[JATTN_MUTANT(slope_of_another_head, head, row.head)] : 0.0f;
        rule.position[r] = (float)(row.position - w.begin);
        rule.lo[r] = (int32_t)(see.lo < w.begin ? w.begin : see.lo > w.end ? w.end : see.lo);
        rule.hi[r] = (int32_t)(see.hi > w.end ? w.end : see.hi < w.begin ? w.begin : see.hi);
    }
    return rule;
}

template <Dtype T>
static void convert_row(const char* from, int n, float* to) {
    for (int i = 0; i < n; i += N) store(to + i, loadf<T>(from, i, n - i));
}

// n stored numbers as floats, zeros up to the next whole vector.
static inline void to_floats(Dtype t, const char* from, int n, float* to) {
    switch (t) {
        case Dtype::f32: return convert_row<Dtype::f32>(from, n, to);
        case Dtype::f16: return convert_row<Dtype::f16>(from, n, to);
        case Dtype::bf16: return convert_row<Dtype::bf16>(from, n, to);
        case Dtype::e4m3: return convert_row<Dtype::e4m3>(from, n, to);
        case Dtype::e5m2: return convert_row<Dtype::e5m2>(from, n, to);
        case Dtype::i8: return convert_row<Dtype::i8>(from, n, to);
    }
}

// Token scales of keys idx[0..n-1], gathered.
INL void gather(const float* scales, const int64_t* idx, int n, float* to) {
    for (int i = 0; i < n; i++) to[i] = scales[idx[JATTN_MUTANT(token_scale_of_a_neighbour, 0, i)]];
}

}  // namespace JATTN_ISA
