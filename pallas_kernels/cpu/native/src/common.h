// What the kernels of one ISA share: conversions, the rows of a unit of work, the places of its keys in the pool.
#pragma once
#include "work.h"

namespace JATTN_ISA {

constexpr float kInf = __builtin_inff();

// load_raw and load_two_vectors return the true number divided by this. A code of e4m3 is placed into a float16, whose
// exponent bias is larger by 8, so the result is 2^-8 of the number. The factor is applied once, to the scale.
constexpr float raw_unit(Dtype t) { return t == Dtype::e4m3 ? 256.0f : 1.0f; }
// True where load_two_vectors returns the even numbers in one vector and the odd ones in the other.
constexpr bool loads_deinterleaved(Dtype t) { return t == Dtype::bf16 || is_float8(t); }

template <Dtype T>
INL vf load_float(const char* p, int64_t i, int n = N) {
    const vf x = load_raw<T>(p, i, n);
    return raw_unit(T) == 1.0f ? x : mul(x, set1(raw_unit(T)));
}

template <Dtype T>
static void convert_row(const char* from, int n, float* to) {
    for (int i = 0; i < n; i += N) store(to + i, load_float<T>(from, i, n - i));
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

INL void fill(float* p, int64_t n, float x) {
    for (int64_t i = 0; i < n; i++) p[i] = x;
}

// tanh to a few ulp: a rational approximation on [-7.9, 7.9].
INL vf vtanh(vf x) {
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
    return approx_div(mul(x, p), q);
}

// What to subtract from a row's logits before the exponential: their maximum, or 0 while the row has seen no key.
INL float softmax_shift(float row_max) { return row_max == -kInf ? 0.0f : row_max; }
INL vf softmax_shift(vf row_max) { return where_equal(row_max, set1(-kInf), zero(), row_max); }

// The query of one row.
struct QueryRow {
    int64_t token, head, position;
};

// Row r of a unit: rows are ordered by query, then by head.
INL QueryRow query_row(const AttentionArgs& args, const WorkUnit& work, int kv_head, int r) {
    int64_t first = args.query_start_loc[work.request], count = (int64_t)args.query_start_loc[work.request + 1] - first;
    int64_t i = work.first_query + r / work.num_heads;
    const int64_t in_group = work.first_head + r % work.num_heads, head = kv_head * (int64_t)args.group_size + in_group;
    return {first + i, JATTN_MUTANT(heads_interleaved, in_group * args.num_kv_heads + kv_head, head),
            args.seq_lens[work.request] - count + i};
}

// What differs from row to row between a dot product and its masked logit.
struct RowParams {
    float *scale, *alibi_slope, *position;  // position: relative to the unit's first key
    int32_t *key_begin, *key_end;           // visible keys, within the unit's
};

INL RowParams load_row_params(const AttentionArgs& args, const WorkUnit& work, int kv_head, int padded_rows,
                              float raw_key_unit, Arena& arena) {
    RowParams rows{arena.take<float>(padded_rows), arena.take<float>(padded_rows), arena.take<float>(padded_rows),
                   arena.take<int32_t>(padded_rows), arena.take<int32_t>(padded_rows)};
    const float* const k_scale = JATTN_MUTANT(scales_swapped, args.v_scale, args.k_scale);
    float scale = JATTN_MUTANT(scale_ignored, 1.0f, args.scale) * raw_key_unit * (k_scale ? k_scale[kv_head] : 1.0f);
    for (int r = 0; r < padded_rows; r++) {
        if (r >= work.num_rows()) {
            rows.scale[r] = rows.alibi_slope[r] = rows.position[r] = 0.0f;
            rows.key_begin[r] = rows.key_end[r] = work.key_begin;
            continue;
        }
        QueryRow row = query_row(args, work, kv_head, r);
        KeyRange keys = visible_keys(args, work.request, row.position);
        const bool has_q_scale = args.q_scale && !JATTN_MUTANT(query_scale_ignored, true, false);
        rows.scale[r] = scale * (has_q_scale ? args.q_scale[row.head] : 1.0f);
        const int64_t slope_head = JATTN_MUTANT(slope_of_another_head, kv_head, row.head);
        rows.alibi_slope[r] = args.alibi_slopes ? args.alibi_slopes[slope_head] : 0.0f;
        rows.position[r] = (float)(row.position - work.key_begin);
        rows.key_begin[r] = (int32_t)(keys.begin < work.key_begin ? work.key_begin
                                      : keys.begin > work.key_end ? work.key_end
                                                                  : keys.begin);
        rows.key_end[r] = (int32_t)(keys.end > work.key_end     ? work.key_end
                                    : keys.end < work.key_begin ? work.key_begin
                                                                : keys.end);
    }
    return rows;
}

// A row of q in words: the part that meets the latent, then the part that meets k; each ends with a whole vector.
template <class Compute>
INL int64_t query_words(const AttentionArgs& args) {
    return Compute::row_words(args.latent_dim) + Compute::row_words(k_dim(args));
}
template <class Compute>
INL void load_query(const AttentionArgs& args, int64_t row, uint32_t* to) {
    const char* q = args.q + row * args.head_dim * bytes_of(args.q_dtype);
    if (args.latent_dim) Compute::load_query(args.q_dtype, q, JATTN_MUTANT(latent_not_in_keys, 1, args.latent_dim), to);
    Compute::load_query(args.q_dtype, q + args.latent_dim * bytes_of(args.q_dtype), k_dim(args),
                        to + Compute::row_words(args.latent_dim));
}

// The pool rows of keys first .. first + count - 1 of a unit, one page at a time, into to[0], to[step], to[2 * step],
// ...
INL void locate_keys(const AttentionArgs& args, const WorkUnit& work, int kv_head, int first, int count, int64_t* to,
                     int step = 1) {
    for (int t = 0; t < count;) {
        const int key = work.key_begin + first + t;
        int64_t row = pool_row(args, work.request, kv_head, key);
        const int in_page = args.paged ? args.block_size - key % args.block_size : count - t;
        for (int n = in_page < count - t ? in_page : count - t; n > 0; n--, row += args.slot_stride)
            to[t++ * step] = row;
    }
}

// The token scales of the keys in these pool rows.
INL void gather_scales(const float* scales, const int64_t* pool_rows, int n, float* to) {
    for (int i = 0; i < n; i++) to[i] = scales[pool_rows[JATTN_MUTANT(token_scale_of_another_key, 0, i)]];
}

}  // namespace JATTN_ISA
