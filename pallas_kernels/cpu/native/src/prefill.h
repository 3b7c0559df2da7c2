// Many rows against tiles of kTileKeys keys: keys are packed transposed, values in rows, and both products run from
// the first two cache levels (product.h, or product_amx.h: whichever the instruction set has included). Rows and
// columns that nobody sees are trimmed, not masked, where whole vectors allow.
#pragma once
#include "finish.h"

namespace JATTN_ISA {

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

// True where a row's logits need nothing but their factor: it is then applied inside the exponential.
INL bool is_plain(const Problem& p, float mult, int lo, int hi, int vectors, const float* k_scales) {
    return lo == 0 && hi >= vectors * N && !k_scales && p.soft_cap == 0.0f && !p.slopes && mult >= 0.0f;
}

INL float row_max(const float* x, int vectors) {
    vf top = load(x);
    for (int i = 1; i < vectors; i++) top = max(top, load(x + i * N));
    return hmax(top);
}

// Logits of one row -> shaped in place, -inf outside lo .. hi; returns their maximum.
INL float shape_row(const Problem& p, float* x, int vectors, float mult, float slope, float far, int lo, int hi,
                    const float* k_scales) {
    vf top = set1(-kInf);
    const vf factor = set1(mult), first = set1((float)lo), end = set1((float)hi);
    const vf cap = set1(p.soft_cap), inverse = set1(p.soft_cap != 0.0f ? 1.0f / p.soft_cap : 0.0f);
    vf at = lane_number();
    for (int i = 0; i < vectors; i++, at = add(at, set1(N))) {
        vf y = mul(load(x + i * N), factor);
        if (k_scales) y = mul(y, load(k_scales + i * N));
        if (p.soft_cap != 0.0f) y = mul(cap, tanh_(mul(y, inverse)));
        if (p.slopes) y = fma(set1(slope), add(set1(far), at), y);
        y = keep(y, at, first, end, set1(-kInf));
        store(x + i * N, y);
        top = max(top, y);
    }
    return hmax(top);
}

// The rows of keys t0 .. t0 + kTileKeys - 1 of the piece; returns how many there are.
INL int find_tile(const Problem& p, const Work& w, int head, int t0, int64_t* idx) {
    const int left = w.end - w.begin - t0, n = left < 0 ? 0 : left < kTileKeys ? left : kTileKeys;
    find_keys(p, w, head, t0, n, idx);
    return n;
}

constexpr int kFirstRows = 36;  // queries of the first products, while the others are on their way

// Rows idx[0..n-1] of q for the products, zeros up to a whole register block.
template <class F>
static void load_queries(const Problem& p, const int64_t* idx, int n, uint32_t* to) {
    const int64_t depth = F::words(p.dim), padded = round_up(n, kRows);
    for (int r = 0; r < n; r++) F::load_query(p, p.q + idx[r] * p.dim * bytes_of(p.q_type), to + r * depth);
    __builtin_memset(to + n * depth, 0, (padded - n) * depth * 4);
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
    int64_t* next_idx = arena.take<int64_t>(kTileKeys);
    float* factor = arena.take<float>(padded);
    int* seen = arena.take<int>(padded / kRows);
    const int64_t q_bytes = p.dim * bytes_of(p.q_type);
    int64_t* q_idx = arena.take<int64_t>(padded);  // rows of q
    for (int r = 0; r < rows; r++) {
        const Row row = row_of(p, w, head, r);
        q_idx[r] = row.token * p.heads + row.head;
    }
    const int first_rows = (int)round_up(kFirstRows, kRows);
    Ahead::all({p.q, q_idx, rows < first_rows ? rows : first_rows, q_bytes});
    int next_n = find_tile(p, w, head, 0, next_idx);
    Ahead::all({p.k, next_idx, next_n, k_bytes});
    RowRule rule = row_rules(p, w, head, padded, F::kUnit, arena);
    fill(tops, padded + N, -kInf);
    fill(found, padded + N, -kInf);
    fill(sums, padded + N, 0.0f);
    if (count == 0) fill(acc, padded * vdim, 0.0f);
    __builtin_memset(weights + rows * kPWords, 0, (padded - rows) * kPWords * 4);
    __builtin_memset(values, 0, kPWords * vdim * 4);

    for (int t0 = 0; t0 < count; t0 += kTileKeys) {
        const int n = next_n, vectors = (n + N - 1) / N;
        int64_t* now = next_idx;
        next_idx = idx;
        idx = now;
        next_n = find_tile(p, w, head, t0 + kTileKeys, next_idx);
        if (p.k_token_scale) fill(k_scales, kTileKeys, 0.0f), gather(p.k_token_scale, idx, n, k_scales);
        if (p.v_token_scale) fill(v_scales, kTileKeys, 0.0f), gather(p.v_token_scale, idx, n, v_scales);
        for (int m = 0; m < rows; m += kRows) {
            int most = 0;
            for (int r = m; r < m + kRows && r < rows; r++) {
                int hi = rule.hi[r] - w.begin - t0;
                most = hi > most ? hi : most;
            }
            seen[m / kRows] = most < n ? most : n;
        }
        const float* scales = p.k_token_scale ? k_scales : nullptr;
        pack_keys<F>(p.k, idx, n, k_bytes, p.dim, keys);
        const int step = t0 ? rows : first_rows;  // the first tile's products hide the arrival of the queries
        for (int r = 0; r < rows; r += step) {
            const int m = rows - r < step ? rows - r : step, more = rows - r - m < step ? rows - r - m : step;
            if (t0 == 0) load_queries<F>(p, q_idx + r, m, q + r * depth);
            product<F, false, false>(m, q + r * depth, depth, keys, kTileKeys, (int)depth, logits + r * kTileKeys,
                                     kTileKeys, vectors, nullptr, seen + r / kRows,
                                     more ? Ahead{p.q, q_idx + r + m, more, q_bytes} : Ahead{p.v, idx, n, v_bytes});
        }
        for (int r = 0; r < rows; r++) {
            const int full = (seen[r / kRows] + N - 1) / N;
            int lo = rule.lo[r] - w.begin - t0, hi = rule.hi[r] - w.begin - t0;
            lo = lo < 0 ? 0 : lo > n ? n : lo;
            hi = hi < 0 ? 0 : hi > n ? n : hi;
            float* x = logits + r * kTileKeys;
            const bool plain = full && is_plain(p, rule.mult[r], lo, hi, full, scales);
            factor[r] = plain ? rule.mult[r] : 1.0f;
            found[r] = plain ? row_max(x, full) * rule.mult[r]
                             : shape_row(p, x, full, rule.mult[r], rule.slope[r], (float)t0 - rule.position[r], lo, hi,
                                         scales);
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
            const vf shift = set1(-found[r]), mult = set1(factor[r]);
            const int full = (seen[r / kRows] + N - 1) / N;
            vf sum = zero();
            for (int i = 0; i < full; i += 2) {
                vf y[2];
                y[0] = exp_(fma(load(x + i * N), mult, shift));
                y[1] = i + 1 < full ? exp_(fma(load(x + (i + 1) * N), mult, shift)) : zero();
                sum = add(sum, add(y[0], y[1]));
                if (p.v_token_scale)
                    for (int j = 0; j < 2; j++) y[j] = mul(y[j], load(v_scales + (i + j) * N));
                F::pack_weights(y, 2, weights + r * kPWords + (F::kPairs ? i * N / 2 : i * N));
            }
            sums[r] += hsum(sum);
        }
        const int deep = F::pack_values(p.v, idx, n, v_bytes, p.vdim, values, vdim);
        if (n < kTileKeys)  // a product may round its depth up
            __builtin_memset(values + deep * vdim, 0, (round_up(deep, kDepthStep) - deep) * vdim * 4);
        const Ahead ahead{p.k, next_idx, next_n, k_bytes};
        const int columns = (int)(vdim / N);
        if (t0 == 0)
            product<F, true, false>(rows, weights, kPWords, values, vdim, 0, acc, vdim, columns, nullptr, seen, ahead);
        else
            product<F, true, true>(rows, weights, kPWords, values, vdim, 0, acc, vdim, columns, fade, seen, ahead);
    }
    finish<F>(p, w, head, tops, sums, acc, partials, counters);
}

}  // namespace JATTN_ISA
