// The least likely token that top_k and top_p keep in a row of scaled logits.
//
// A lower bound of it is found first: for top_k from the largest logit of each group of 32, for top_p from the sum of
// all exponentials. Only the logits from the bound on are selected among, by their bits: a histogram of the first 11
// bits, then of the next 11 and the last 10 bits of those in the bucket with the threshold.
#pragma once
#include <algorithm>
#include <cmath>

#include "common.h"

namespace JATTN_ISA {

constexpr int kFloorChunk = 256;  // logits whose exponentials are computed together; a multiple of every N

struct Logits {
    const float* x;
    int64_t n;
};

// A row of finite maximum. Its scaled logits are computed where they are needed, one group at a time.
struct ScaledRow {
    const float* logits;
    int64_t n;
    float largest, temperature, least;  // see DrawArgs; here `least` is no NaN

    vf scaled(vf logit) const {
        const vf x = div(sub(logit, set1(largest)), set1(temperature));
        return select_in_range(x, x, set1(least), set1(kInf), set1(-kInf));
    }
    int group_size(int64_t g) const { return (int)std::min<int64_t>(n - g * kFloorGroup, kFloorGroup); }
    // Sets `to` to the scaled logits of group g; behind the row they are -inf.
    void load_group(int64_t g, float* to) const {
        const float* from = logits + g * kFloorGroup;
        if (const int size = group_size(g); size < kFloorGroup) {
            std::fill(std::copy(from, from + size, to), to + kFloorGroup, -kInf);
            from = to;
        }
        for (int i = 0; i < kFloorGroup; i += N) store(to + i, scaled(load(from + i)));
    }
};

// The order of floats as unsigned integers; -0 and 0 are equal.
INL uint32_t ordered_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (bits == 0x80000000u) bits = 0;
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}
// 0, which is below the bits of every float, gives -inf.
INL float float_of(uint32_t ordered) {
    if (ordered == 0) return -kInf;
    const uint32_t bits = ordered >> 31 ? ordered ^ 0x80000000u : ~ordered;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// What a selection adds up: the number of the logits, or their exponentials.
struct Counts {
    using Sum = uint32_t;
    void compute(const float*, int) {}
    uint32_t operator[](int) const { return 1; }
};
struct Exponentials {
    using Sum = double;
    alignas(64) float values[kFloorChunk];
    void compute(const float* x, int n) {
        const char* bytes = reinterpret_cast<const char*>(x);
        for (int i = 0; i < n; i += N) store(values + i, vexp(load_raw<Dtype::f32>(bytes, i, n - i)));
    }
    double operator[](int i) const { return values[i]; }
};

// The sum of n exponentials. chunk(first): the logits from `first` on, as many as are computed together.
template <class Chunk>
static double sum_of_exponentials(int64_t n, Chunk&& chunk) {
    constexpr int kLanes = 8;  // added independently, in an order that depends on n only
    double lanes[kLanes] = {}, sum = 0.0;
    Exponentials exps;
    for (int64_t first = 0; first < n; first += kFloorChunk) {
        const int count = (int)std::min<int64_t>(n - first, kFloorChunk);
        exps.compute(chunk(first), count);
        for (int i = count; i % kLanes; i++) exps.values[i] = 0.0f;
        for (int i = 0; i < count; i += kLanes)
            for (int lane = 0; lane < kLanes; lane++) lanes[lane] += exps.values[i + lane];
    }
    for (const double lane : lanes) sum += lane;
    return sum;
}
static double sum_of_exponentials(Logits logits) {
    return sum_of_exponentials(logits.n, [&](int64_t first) { return logits.x + first; });
}
static double sum_of_exponentials(const ScaledRow& row) {
    alignas(64) float chunk[kFloorChunk];
    return sum_of_exponentials(row.n, [&](int64_t first) {
        const int64_t g = first / kFloorGroup, end = std::min(g + kFloorChunk / kFloorGroup, num_groups(row.n));
        for (int64_t i = g; i < end; i++) row.load_group(i, chunk + (i - g) * kFloorGroup);
        return chunk;
    });
}

// sums[b]: the sum over the logits whose bucket is b. Successive logits often share a bucket. They are added in several
// tables, because an addition to a number in memory waits for the addition before it.
template <class Mass>
static void add_up(Logits logits, int shift, typename Mass::Sum* sums) {
    const int tables = logits.n > 4 * kFloorBuckets ? kFloorTables : 1;
    std::fill(sums, sums + tables * kFloorBuckets, 0);
    Mass mass;
    for (int64_t first = 0; first < logits.n; first += kFloorChunk) {
        const int count = (int)std::min<int64_t>(logits.n - first, kFloorChunk);
        mass.compute(logits.x + first, count);
        for (int i = 0; i < count; i++) {
            const uint32_t bucket = ordered_bits(logits.x[first + i]) >> shift & (kFloorBuckets - 1);
            sums[(i & (tables - 1)) * kFloorBuckets + bucket] += mass[i];
        }
    }
    for (int t = 1; t < tables; t++)
        for (int b = 0; b < kFloorBuckets; b++) sums[b] += sums[t * kFloorBuckets + b];
}

// The ordered bits of the largest logit such that it and all above it add up to `needed`, more than 0; 0 if none does.
// scratch.logits is overwritten; the logits may be there.
template <class Mass>
static uint32_t largest(Logits logits, double needed, const DrawScratch& scratch) {
    auto* const sums = reinterpret_cast<typename Mass::Sum*>(scratch.sums);
    double above = 0.0;
    uint32_t found = 0;
    for (const int shift : {21, 10, 0}) {  // 11, 11 and 10 new bits: the last pass sees bit 10 again
        add_up<Mass>(logits, shift, sums);
        int bucket = -1;  // the last one that is not empty
        bool is_reached = false;
        for (int b = kFloorBuckets - 1; b >= 0 && !is_reached; b--) {
            if (!(sums[b] > 0)) continue;
            if (bucket >= 0) above += sums[bucket];
            bucket = b;
            is_reached = above + sums[b] >= needed;
        }
        // A later pass adds in another order, so that its last sum may be rounded below `needed`.
        if (bucket < 0 || (shift == 21 && !is_reached)) return 0;
        found |= (uint32_t)bucket << shift;
        int64_t count = 0;
        for (int64_t i = 0; shift && i < logits.n; i++) {
            const float logit = logits.x[i];
            scratch.logits[count] = logit;
            count += ordered_bits(logit) >> shift == found >> shift;
        }
        logits = {scratch.logits, count};
    }
    return found;
}

// The scaled logits of a row from `bound` on, copied to scratch.logits. Groups whose maximum is below are not read.
static Logits at_least(float bound, const ScaledRow& row, const DrawScratch& scratch) {
    alignas(64) float group[kFloorGroup];
    int64_t count = 0;
    for (int64_t g = 0; g < num_groups(row.n); g++) {
        if (scratch.maxima[g] < bound) continue;
        row.load_group(g, group);
        for (int i = 0, size = row.group_size(g); i < size; i++) {
            scratch.logits[count] = group[i];
            count += group[i] >= bound;
        }
    }
    return {scratch.logits, count};
}

// The `keep`-th largest logit of a row. The `keep`-th largest maximum of a group is a lower bound.
static float kth_largest(int64_t keep, const ScaledRow& row, const DrawScratch& scratch) {
    const Logits maxima{scratch.maxima, num_groups(row.n)};
    const float bound = keep > maxima.n ? -kInf : float_of(largest<Counts>(maxima, keep, scratch));
    return float_of(largest<Counts>(at_least(bound, row, scratch), keep, scratch));
}

// The least scaled logit of row r that top_k and top_p keep; -inf if they keep all. scratch.maxima: the largest scaled
// logit of each group.
static float sampling_floor(const DrawArgs& args, int64_t r, const ScaledRow& row, const DrawScratch& scratch) {
    float kth = -kInf;
    Logits kept{};
    double sum = 0.0;
    if (args.has_top_k(r)) {
        const int64_t keep = args.top_k[r] + JATTN_MUTANT(top_k_off_by_one, 1, 0);
        kth = kth_largest(keep, row, scratch);
        if (!args.has_top_p(r)) return kth;
        kept = at_least(kth, row, scratch);
        // Logits that equal the k-th but are not among the first k are kept, but they do not count.
        const double ties = JATTN_MUTANT(top_p_of_all_ties, 0, kept.n - keep);
        sum = sum_of_exponentials(kept) - (ties > 0 ? ties * sum_of_exponentials(Logits{&kth, 1}) : 0.0);
    } else if (args.has_top_p(r)) {
        sum = sum_of_exponentials(row);
    } else {
        return -kInf;
    }
    const double top_p = args.top_p[r], needed = top_p * sum;
    if (!(needed > 0.0)) return 0.0f;  // that of the likeliest token
    if (!args.has_top_k(r)) {
        // All logits below it have less than half of what top_p leaves out: rounding does not matter.
        const double bound = std::log(0.5 * (1.0 - top_p) * sum / row.n);
        kept = at_least((float)bound, row, scratch);
    }
    return std::max(kth, float_of(largest<Exponentials>(kept, needed, scratch)));
}

}  // namespace JATTN_ISA
