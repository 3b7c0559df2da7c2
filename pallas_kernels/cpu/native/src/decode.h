// Few rows against many keys: keys and values are streamed once from where they lie, in blocks of kBlockKeys.
// Logits of a block are [key][4 rows], so that four rows share every load of a key.
#pragma once
#include "finish.h"
#include "pace.h"
#include "stream.h"

namespace JATTN_ISA {

// Values between two visits of an accumulator; even. A panel of columns is narrower than a large row: over many of them,
// the memory would be read in two sweeps, which costs more than the visits.
template <class F>
constexpr int kValueRun = 16 / F::kBytes;

// Logits of one block and four rows: scale, soft cap, ALiBi, mask; returns their maximum over keys in every lane.
// `place` is the number of each key in the block, as they are read.
INL vf shape_block(const Problem& p, const RowRule& rule, int r, int t0, int n, const float* place,
                   const float* k_scales, int begin, float* logits) {
    const int vectors = (n + NT - 1) / NT;
    const vf mult = repeat4(rule.mult + r);
    bool cut = n % NT != 0;
    float lo4[4], hi4[4], far4[4];
    for (int g = 0; g < 4; g++) {
        int lo = rule.lo[r + g] - begin - t0, hi = rule.hi[r + g] - begin - t0;
        cut |= lo > 0 || hi < n;
        lo4[g] = (float)(lo < 0 ? 0 : lo > n ? n : lo);
        hi4[g] = (float)(hi < 0 ? 0 : hi > n ? n : hi);
        far4[g] = (float)t0 - rule.position[r + g];
    }
    vf top = set1(-kInf);
    if (!cut && !k_scales && p.soft_cap == 0.0f && !p.slopes) {
        for (int i = 0; i < vectors; i++) {
            vf x = mul(load(logits + i * N), mult);
            store(logits + i * N, x);
            top = max(top, x);
        }
        return fold4max(top);
    }
    const vf lo = repeat4(lo4), hi = repeat4(hi4), far = repeat4(far4), slope = repeat4(rule.slope + r);
    const vf cap = set1(p.soft_cap), inverse = set1(p.soft_cap != 0.0f ? 1.0f / p.soft_cap : 0.0f);
    for (int i = 0; i < vectors; i++) {
        const vf at = spread4(place + i * NT);
        vf x = mul(load(logits + i * N), mult);
        if (k_scales) x = mul(x, spread4(k_scales + i * NT));
        if (p.soft_cap != 0.0f && !JATTN_MUTANT(soft_cap_ignored, true, false)) x = mul(cap, tanh_(mul(x, inverse)));
        if (p.slopes) x = fma(slope, add(far, at), x);
        if (cut) x = keep(x, at, lo, hi, set1(-kInf));
        store(logits + i * N, x);
        top = max(top, x);
    }
    return fold4max(top);
}

// The first keys of the piece that this thread will most likely claim next; returns how many, none if it is a long one.
static int next_keys(const Problem& p, const Queue& queue, int64_t* idx) {
    const int64_t item = queue.claimed.load(std::memory_order_relaxed);
    if (item >= queue.items || !queue.works[item / p.kv_heads].is_short) return 0;
    const Work& w = queue.works[item / p.kv_heads];
    const int count = w.end - w.begin < kBlockKeys ? w.end - w.begin : kBlockKeys;
    find_block(p, w, (int)(item % p.kv_heads), 0, count, idx);
    return count;
}

template <class F>
static void attend_short(const Problem& p, const Work& w, int head, const Queue& queue, float* partials,
                         int32_t* counters, Arena arena) {
    const int rows = w.rows(), blocks4 = (rows + 3) / 4, padded = blocks4 * 4, count = w.end - w.begin;
    const int64_t q_stride = F::words(p.dim), vdim = padded_vdim(p);
    const int64_t k_bytes = p.dim * bytes_of(F::kType), v_bytes = p.vdim * bytes_of(F::kType);
    uint32_t* q = arena.take<uint32_t>(padded * q_stride);
    float* acc = arena.take<float>(padded * vdim);
    float* logits = arena.take<float>(4 * kBlockKeys + 8 * N);
    uint32_t* pairs = arena.take<uint32_t>(2 * kBlockKeys + 4 * N);
    float* k_scales = arena.take<float>(kBlockKeys + N);
    float* v_scales = arena.take<float>(kBlockKeys + N);
    float* place = arena.take<float>(kBlockKeys + N);
    int64_t* idx = arena.take<int64_t>(kShortChunk + 64);
    int64_t* upcoming = arena.take<int64_t>(kBlockKeys);
    float* sums = arena.take<float>(blocks4 * N);
    float* tops = arena.take<float>(padded);
    RowRule rule = row_rules(p, w, head, padded, F::kUnit, arena);

    for (int r = 0; r < padded; r++) {
        Row row = row_of(p, w, head, r < rows ? r : 0);
        F::load_query(p, p.q + (row.token * p.heads + row.head) * p.dim * bytes_of(p.q_type), q + r * q_stride);
        tops[r] = -kInf;
    }
    fill(acc, padded * vdim, 0.0f);
    fill(sums, blocks4 * N, 0.0f);
    auto size_of = [&](int t0) { return count - t0 < kBlockKeys ? count - t0 : kBlockKeys; };
    for (int t0 = 0; t0 < count; t0 += kBlockKeys) find_block(p, w, head, t0, size_of(t0), idx + t0);
    const int64_t last = count ? idx[count - 1] : 0;
    for (int t = count; t < count + 64; t++) idx[t] = last;

    static thread_local Pace<> pace;
    Stream stream(k_bytes, pace.begin(count * (k_bytes + v_bytes)));
    stream.begin({p.k, k_bytes, idx, size_of(0)});
    for (int t0 = 0, numbered = 0; t0 < count; t0 += kBlockKeys) {
        const int n = size_of(t0), vectors = (n + NT - 1) / NT;
        const Rows keys{p.k, k_bytes, idx + t0, n}, values{p.v, v_bytes, idx + t0, n};
        if (n != numbered) number_block(numbered = n, place);
        if (p.k_token_scale) gather(p.k_token_scale, idx + t0, vectors * NT, k_scales);
        if (p.v_token_scale) gather(p.v_token_scale, idx + t0, vectors * NT, v_scales);
        for (int b = 0; b < blocks4; b++) {
            const uint32_t* q4 = q + b * 4 * q_stride;
            const char* const* const ahead = b ? nullptr : stream.next;
            if (ahead) stream.aim(keys, values);
            for (int i = 0; i < vectors; i++) {
                const char* k[NT];
                for (int t = 0; t < NT; t++) k[t] = p.k + idx[t0 + i * NT + t] * k_bytes;
                store(logits + i * N, F::dots(q4, q_stride, k, p.dim, ahead ? ahead + i * NT : nullptr));
            }
            if (ahead) stream.rest();
            vf found = shape_block(p, rule, b * 4, t0, n, place, p.k_token_scale ? k_scales : nullptr, w.begin, logits);

            vf old = repeat4(tops + b * 4), top = max(old, found), shift = shift_of(top);
            vf fade = exp_(sub(old, shift)), sum = mul(load(sums + b * N), fade);
            float lanes[N];
            store(lanes, top);
            for (int g = 0; g < 4; g++) tops[b * 4 + g] = lanes[g];
            if (t0 && !JATTN_MUTANT(blocks_not_faded, true, false) && any_differs(old, top)) {
                store(lanes, fade);
                for (int g = 0; g < 4; g++)
                    for (int c = 0; c < vdim; c += N) {
                        float* a = acc + (b * 4 + g) * vdim + c;
                        store(a, mul(load(a), set1(lanes[g])));
                    }
            }
            for (int i = 0; i < vectors; i++) {
                vf x = exp_(sub(load(logits + i * N), shift));
                sum = add(sum, x);
                if (p.v_token_scale) x = mul(x, spread4(v_scales + i * NT));
                store(logits + i * N, x);
            }
            store(sums + b * N, sum);
            for (int i = vectors; i * NT < n + 8; i++) store(logits + i * N, zero());

            const uint32_t* weights = F::weights(logits, n, pairs);
            if (ahead && t0 + n < count)
                stream.aim(values, {p.k, k_bytes, idx + t0 + n, size_of(t0 + n)});
            else if (ahead)
                stream.aim(values, {p.k, k_bytes, upcoming, next_keys(p, queue, upcoming)});
            for (int t = 0; t < n; t += kValueRun<F>)
                F::accumulate(acc + b * 4 * vdim, vdim, weights + t * (F::kPairs ? 2 : 4), idx + t0 + t,
                              n - t < kValueRun<F> ? n - t : kValueRun<F>, p.v, v_bytes, p.vdim,
                              ahead ? ahead + t : nullptr);
            if (ahead) stream.rest();
        }
    }
    pace.done();
    float* m = tops;
    float* l = arena.take<float>(padded);
    for (int b = 0; b < blocks4; b++) {
        float lanes[N];
        store(lanes, fold4sum(load(sums + b * N)));
        for (int g = 0; g < 4; g++) l[b * 4 + g] = lanes[g];
    }
    finish<F>(p, w, head, m, l, acc, partials, counters);
}

}  // namespace JATTN_ISA
