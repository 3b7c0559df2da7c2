// Many rows against tiles of kTileKeys keys: keys are packed transposed, values in rows, and both products run from
// the first two cache levels (product.h, or product_amx.h: whichever the instruction set has included). Rows and
// columns that nobody sees are trimmed, not masked, where whole vectors allow.
#pragma once
#include "ahead.h"
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

// True where keys lo .. hi - 1 are all that these vectors hold.
INL bool sees_all(int lo, int hi, int vectors) { return lo == 0 && hi >= vectors * N; }

// True where a row's logits need nothing but their factor: it is then applied inside the exponential.
INL bool is_plain(const Problem& p, float mult, int lo, int hi, int vectors, const float* k_scales) {
    return sees_all(lo, hi, vectors) && !k_scales && p.soft_cap == 0.0f && !p.slopes && mult >= 0.0f;
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
    const bool cut = !sees_all(lo, hi, vectors);
    vf at = lane_number();
    for (int i = 0; i < vectors; i++, at = add(at, set1(N))) {
        vf y = mul(load(x + i * N), factor);
        if (k_scales) y = mul(y, load(k_scales + i * N));
        if (p.soft_cap != 0.0f && !JATTN_MUTANT(soft_cap_ignored, true, false)) y = mul(cap, tanh_(mul(y, inverse)));
        if (p.slopes) y = fma(set1(slope), add(set1(far), at), y);
        if (cut) y = keep(y, at, first, end, set1(-kInf));
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

// A block of kRows rows between its two products; whole vectors behind the last row exist.
struct LongRows {
    RowRule rule;
    float *tops, *sums;           // of every row: running maximum and sum
    float *fade, *found, *factor; // of the block: what becomes of the old sums, this tile's maximum, a factor still due
    float* logits;                // [kRows][kTileKeys]
    uint32_t* weights;            // the same in words
    const float *k_scales, *v_scales;  // nullptr: none
};

// The first `count` lanes.
INL void store_rows(float* to, vf x, int count) { storef(Dtype::f32, reinterpret_cast<char*>(to), 0, x, count); }

// Logits of rows r .. r + m - 1 -> weights. The tile holds keys t0 .. t0 + n - 1 of the piece that begins at `begin`;
// these rows see at most the first `seen` of them.
template <class F>
static void weigh(const Problem& p, const LongRows& s, int begin, int t0, int n, int seen, int r, int m) {
    const int full = (seen + N - 1) / N;
    for (int i = 0; i < m; i++) {
        int lo = s.rule.lo[r + i] - begin - t0, hi = s.rule.hi[r + i] - begin - t0;
        lo = lo < 0 ? 0 : lo > n ? n : lo;
        hi = hi < 0 ? 0 : hi > n ? n : hi;
        float* x = s.logits + i * kTileKeys;
        const float mult = s.rule.mult[r + i], far = (float)t0 - s.rule.position[r + i];
        const bool plain = full && is_plain(p, mult, lo, hi, full, s.k_scales);
        s.factor[i] = plain ? mult : 1.0f;
        s.found[i] = plain ? row_max(x, full) * mult
                           : shape_row(p, x, full, mult, s.rule.slope[r + i], far, lo, hi, s.k_scales);
    }
    for (int i = 0; i < m; i += N) {  // the new maximum, how far it fades the old sums, what to subtract
        vf old = load(s.tops + r + i), top = max(old, load(s.found + i)), shift = shift_of(top);
        vf x = exp_(sub(old, shift));
        store_rows(s.tops + r + i, top, m - i);
        store_rows(s.sums + r + i, mul(load(s.sums + r + i), x), m - i);
        store(s.fade + i, JATTN_MUTANT(tiles_not_faded, set1(1.0f), x));
        store(s.found + i, shift);
    }
    for (int i = 0; i < m; i++) {
        const float* x = s.logits + i * kTileKeys;
        uint32_t* to = s.weights + i * kTileKeys;
        const vf shift = set1(-s.found[i]), mult = set1(s.factor[i]);
        vf sum = zero();
        for (int c = 0; c < full; c += 2) {
            vf y[2];
            y[0] = exp_(fma(load(x + c * N), mult, shift));
            y[1] = c + 1 < full ? exp_(fma(load(x + (c + 1) * N), mult, shift)) : zero();
            sum = add(sum, add(y[0], y[1]));
            if (s.v_scales)
                for (int j = 0; j < 2; j++) y[j] = mul(y[j], load(s.v_scales + (c + j) * N));
            F::pack_weights(y, 2, to + (F::kPairs ? c * N / 2 : c * N));
        }
        s.sums[r + i] += hsum(sum);
    }
}

template <class F>
static void attend_long(const Problem& p, const Work& w, int head, float* partials, int32_t* counters,
                        Arena arena) {
    const Tiles tiles;
    (void)tiles;
    const int rows = w.rows(), padded = (int)round_up(rows, kRows), count = w.end - w.begin;
    const int64_t depth = F::words(p.dim), vdim = padded_vdim(p), q_bytes = p.dim * bytes_of(p.q_type);
    const int64_t k_bytes = p.dim * bytes_of(F::kType), v_bytes = p.vdim * bytes_of(F::kType);
    uint32_t* q = arena.take<uint32_t>(padded * depth);
    uint32_t* keys = arena.take<uint32_t>(depth * kTileKeys);
    uint32_t* values = arena.take<uint32_t>((F::kPairs ? kTileKeys / 2 : kTileKeys) * vdim);
    float* acc = arena.take<float>(padded * vdim);
    float* k_scales = arena.take<float>(kTileKeys);
    float* v_scales = arena.take<float>(kTileKeys);
    int64_t* idx = arena.take<int64_t>(kTileKeys);
    int64_t* next_idx = arena.take<int64_t>(kTileKeys);
    int64_t* q_idx = arena.take<int64_t>(padded);  // rows of q
    LongRows s{};
    float** const of_rows[] = {&s.tops, &s.sums, &s.fade, &s.found, &s.factor};
    for (float** x : of_rows) *x = arena.take<float>(padded + N);
    s.logits = arena.take<float>(kRows * kTileKeys);
    s.weights = arena.take<uint32_t>(kRows * kTileKeys);
    s.k_scales = p.k_token_scale ? k_scales : nullptr;
    s.v_scales = p.v_token_scale ? v_scales : nullptr;
    for (int r = 0; r < rows; r++) {
        const Row row = row_of(p, w, head, r);
        q_idx[r] = row.token * p.heads + row.head;
    }
    const int first_rows = (int)round_up(kFirstRows, kRows);
    const Ahead queries{p.q, q_idx, rows, q_bytes};
    for (int r = 0; r < rows && r < first_rows; r++) Ahead::row(queries, r);
    int next_n = find_tile(p, w, head, 0, next_idx);
    Ahead::all({p.k, next_idx, next_n, k_bytes});
    Ahead::all({p.v, next_idx, next_n, v_bytes});
    s.rule = row_rules(p, w, head, padded, F::kUnit, arena);
    fill(s.tops, padded + N, -kInf);
    fill(s.sums, padded + N, 0.0f);
    fill(s.found, kRows + N, -kInf);
    if (count == 0) fill(acc, padded * vdim, 0.0f);
    __builtin_memset(s.weights, 0, kRows * kTileKeys * 4);
    __builtin_memset(values, 0, (F::kPairs ? kTileKeys / 2 : kTileKeys) * vdim * 4);

    for (int t0 = 0; t0 < count; t0 += kTileKeys) {
        const int n = next_n;
        int64_t* now = next_idx;
        next_idx = idx;
        idx = now;
        next_n = find_tile(p, w, head, t0 + kTileKeys, next_idx);
        const Ahead next_keys{p.k, next_idx, next_n, k_bytes}, next_values{p.v, next_idx, next_n, v_bytes};
        if (p.k_token_scale) fill(k_scales, kTileKeys, 0.0f), gather(p.k_token_scale, idx, n, k_scales);
        if (p.v_token_scale) fill(v_scales, kTileKeys, 0.0f), gather(p.v_token_scale, idx, n, v_scales);
        pack_keys<F>(p.k, idx, n, k_bytes, p.dim, keys);
        const int deep = F::pack_values(p.v, idx, n, v_bytes, p.vdim, values, vdim);
        if (n < kTileKeys)  // a product may round its depth up
            __builtin_memset(values + deep * vdim, 0, (round_up(deep, kDepthStep) - deep) * vdim * 4);
        for (int r = 0; r < rows; r += kRows) {
            const int m = rows - r < kRows ? rows - r : kRows;
            if (t0 == 0) {  // the first tile's products hide the arrival of the queries
                if (r % first_rows == 0)
                    load_queries<F>(p, q_idx + r, rows - r < first_rows ? rows - r : first_rows, q + r * depth);
                for (int i = r + first_rows; i < r + first_rows + kRows && i < rows; i++) Ahead::row(queries, i);
            }
            Ahead::fetch(next_keys, r, kRows, rows);
            Ahead::fetch(next_values, r, kRows, rows);
            int seen = 0;
            for (int i = r; i < r + m; i++) {
                const int hi = s.rule.hi[i] - w.begin - t0;
                seen = hi > seen ? hi : seen;
            }
            seen = seen < n ? seen : n;
            product<F, false>(q + r * depth, depth, keys, kTileKeys, (int)depth, s.logits, kTileKeys,
                              (seen + N - 1) / N, nullptr);
            weigh<F>(p, s, w.begin, t0, n, seen, r, m);
            const int deep_seen = F::kPairs ? (seen + 1) / 2 : seen, columns = (int)(vdim / N);
            float* const sum = acc + r * vdim;
            if (t0 == 0)
                product<F, false>(s.weights, kTileKeys, values, vdim, deep_seen, sum, vdim, columns, nullptr);
            else
                product<F, true>(s.weights, kTileKeys, values, vdim, deep_seen, sum, vdim, columns, s.fade);
        }
    }
    finish<F>(p, w, head, s.tops, s.sums, acc, partials, counters);
}

}  // namespace JATTN_ISA
