// Many rows against tiles of kTileKeys keys: keys are packed transposed, values in rows, and both products run from
// the first two cache levels. Rows and columns that nobody sees are trimmed, not masked, where whole vectors allow.
#pragma once
#include "finish.h"
#include "product.h"

namespace JATTN_ISA {

constexpr int kTileVectors = kTileKeys / N;

// Keys idx[0..n-1] as words [depth][kTileKeys].
template <class F>
static void pack_keys(const char* k, const int64_t* idx, int n, int64_t row_bytes, int dim, uint32_t* to) {
    const int64_t depth = F::words(dim);
    for (int u = 0; u < n; u += N)
        for (int64_t c = 0; c < depth; c += N) {
            const int words_left = F::kPairs ? (dim + 1) / 2 : dim;
            vw r[N];
            for (int i = 0; i < N; i++) {
                bool there = u + i < n && c < words_left;
                r[i] = there ? F::key_words(k + idx[u + i] * row_bytes, (int)c, dim) : zero_words();
            }
            transpose(r, to + c * kTileKeys + u, kTileKeys);
        }
}

// Logits of one row and n keys -> shaped in place; returns their maximum in every lane. hi - lo keys are seen.
INL vf shape_row(const Problem& p, float* x, int n, float mult, float slope, float far, int lo, int hi,
                 const float* k_scales) {
    const int vectors = (n + N - 1) / N;
    vf top = set1(-kInf);
    const vf factor = set1(mult);
    bool cut = lo > 0 || hi < vectors * N;
    if (!cut && !k_scales && p.soft_cap == 0.0f && !p.slopes) {
        for (int i = 0; i < vectors; i++) {
            vf y = mul(load(x + i * N), factor);
            store(x + i * N, y);
            top = max(top, y);
        }
        return top;
    }
    const vf first = set1((float)lo), end = set1((float)hi);
    const vf cap = set1(p.soft_cap), inverse = set1(p.soft_cap != 0.0f ? 1.0f / p.soft_cap : 0.0f);
    vf at = lane_number();
    for (int i = 0; i < vectors; i++, at = add(at, set1(N))) {
        vf y = mul(load(x + i * N), factor);
        if (k_scales) y = mul(y, load(k_scales + i * N));
        if (p.soft_cap != 0.0f) y = mul(cap, tanh_(mul(y, inverse)));
        if (p.slopes) y = fma(set1(slope), add(set1(far), at), y);
        if (cut) y = keep(y, at, first, end, set1(-kInf));
        store(x + i * N, y);
        top = max(top, y);
    }
    return top;
}

template <class F>
static void attend_long(const Problem& p, const Work& w, int head, float* partials, int32_t* counters,
                        char* scratch) {
    Arena arena{scratch};
    const int rows = w.rows(), padded = (int)round_up(rows, kRows), count = w.end - w.begin;
    const int64_t depth = F::words(p.dim), vdim = padded_vdim(p);
    const int64_t k_bytes = p.dim * bytes_of(F::kType), v_bytes = p.vdim * bytes_of(F::kType);
    constexpr int kPWords = F::kPairs ? kTileKeys / 2 : kTileKeys;
    uint32_t* q = arena.take<uint32_t>(padded * depth);
    uint32_t* keys = arena.take<uint32_t>(depth * kTileKeys);
    uint32_t* values = arena.take<uint32_t>(kPWords * vdim);
    uint32_t* weights = arena.take<uint32_t>(padded * kPWords);
    float* logits = arena.take<float>(padded * kTileKeys);
    float* acc = arena.take<float>(padded * vdim);
    float* tops = arena.take<float>(padded + N);
    float* found = arena.take<float>(padded + N);
    float* fade = arena.take<float>(padded + N);
    float* sums = arena.take<float>(padded + N);
    float* k_scales = arena.take<float>(kTileKeys);
    float* v_scales = arena.take<float>(kTileKeys);
    int64_t* idx = arena.take<int64_t>(kTileKeys);
    RowRule rule = row_rules(p, w, head, padded, arena);

    for (int r = 0; r < padded; r++) {
        if (r < rows) {
            Row row = row_of(p, w, head, r);
            F::load_query(p, p.q + (row.token * p.heads + row.head) * p.dim * bytes_of(p.q_type), q + r * depth);
        } else {
            __builtin_memset(q + r * depth, 0, depth * 4);
            __builtin_memset(weights + r * kPWords, 0, kPWords * 4);
        }
    }
    fill(tops, padded + N, -kInf);
    fill(found, padded + N, -kInf);
    fill(sums, padded + N, 0.0f);
    fill(acc, padded * vdim, 0.0f);
    __builtin_memset(values, 0, kPWords * vdim * 4);

    for (int t0 = 0; t0 < count; t0 += kTileKeys) {
        const int n = count - t0 < kTileKeys ? count - t0 : kTileKeys, vectors = (n + N - 1) / N;
        for (int t = 0; t < n;) {
            int64_t at = row_index(p, w.req, head, w.begin + t0 + t);
            int run = p.table ? p.block_size - (w.begin + t0 + t) % p.block_size : n - t;
            for (int i = run < n - t ? run : n - t; i > 0; i--, at += p.slot_stride) idx[t++] = at;
        }
        if (p.k_token_scale) fill(k_scales, kTileKeys, 0.0f), gather(p.k_token_scale, idx, n, k_scales);
        if (p.v_token_scale) fill(v_scales, kTileKeys, 0.0f), gather(p.v_token_scale, idx, n, v_scales);
        pack_keys<F>(p.k, idx, n, k_bytes, p.dim, keys);
        const int p_depth = F::pack_values(p.v, idx, n, v_bytes, p.vdim, values, vdim);

        product<F, false>(rows, q, depth, keys, kTileKeys, (int)depth, logits, kTileKeys, vectors, nullptr);
        for (int r = 0; r < rows; r++) {
            int lo = rule.lo[r] - w.begin - t0, hi = rule.hi[r] - w.begin - t0;
            lo = lo < 0 ? 0 : lo > n ? n : lo;
            hi = hi < 0 ? 0 : hi > n ? n : hi;
            found[r] = hmax(shape_row(p, logits + r * kTileKeys, n, rule.mult[r], rule.slope[r],
                                      (float)t0 - rule.position[r], lo, hi, p.k_token_scale ? k_scales : nullptr));
        }
        for (int r = 0; r < rows; r += N) {  // the new maximum, how far it fades the old sums, what to subtract
            vf old = load(tops + r), top = max(old, load(found + r)), shift = shift_of(top);
            vf x = exp_(sub(old, shift));
            store(tops + r, top);
            store(fade + r, x);
            store(found + r, shift);
            store(sums + r, mul(load(sums + r), x));
        }
        for (int r = 0; r < rows; r++) {
            const float* x = logits + r * kTileKeys;
            const vf shift = set1(found[r]);
            vf sum = zero(), y[kTileVectors];
#pragma GCC unroll 16
            for (int i = 0; i < kTileVectors; i++) {
                y[i] = i < vectors ? exp_(sub(load(x + i * N), shift)) : zero();
                sum = add(sum, y[i]);
                if (p.v_token_scale) y[i] = mul(y[i], load(v_scales + i * N));
            }
            sums[r] += hsum(sum);
            F::pack_weights(y, kTileVectors, weights + r * kPWords);
        }
        product<F, true>(rows, weights, kPWords, values, vdim, p_depth, acc, vdim, (int)(vdim / N), fade);
    }
    finish<F>(p, w, head, tops, sums, acc, partials, counters);
}

}  // namespace JATTN_ISA
