// A token of a row, drawn by the Gumbel trick: the first largest sum of scaled logit and noise.
//
// The noise of token i is -log(-log(u_i)), where u_i is 23 bits of threefry: jax.random.gumbel(key, [vocab], float32),
// whose logarithms this file computes in float64 and rounds to float32. Noise is at most 15.95, and noise of w or more
// has a probability below exp(-w). So the group with the likeliest token is drawn from first. A group whose maximum is
// then more than 16 below the best sum is not read; in the others nearly every u_i is too small to win, which a bound
// without a logarithm shows.
#pragma once
#include <cfloat>

#include "cache_write.h"
#include "sampling_floor.h"

namespace JATTN_ISA {

constexpr int kGroupVectors = kFloorGroup / N;

// One round of threefry for the tokens of a group. Its vectors advance together, since each waits for its own last
// instruction.
template <int kBits>
INL void threefry_round(Words (&x)[kGroupVectors], Words (&y)[kGroupVectors]) {
#pragma GCC unroll 8
    for (int i = 0; i < kGroupVectors; i++) {
        x[i] += y[i];
        y[i] = (y[i] << kBits | y[i] >> (32 - kBits)) ^ x[i];
    }
}
template <int kA, int kB, int kC, int kD>
INL void threefry_rounds(Words (&x)[kGroupVectors], Words (&y)[kGroupVectors], uint32_t to_x, uint32_t to_y) {
    threefry_round<kA>(x, y), threefry_round<kB>(x, y), threefry_round<kC>(x, y), threefry_round<kD>(x, y);
#pragma GCC unroll 8
    for (int i = 0; i < kGroupVectors; i++) x[i] += to_x, y[i] += to_y;
}

// Sets `to` to 1 + u of the tokens first .. first + kFloorGroup - 1. u is the first 23 bits of the xor of both words of
// threefry2x32 of (0, token), as in jax.random with jax_threefry_partitionable. False if no 1 + u is above `below`.
INL bool uniform_group(const uint32_t* key, uint32_t first, float below, float* to) {
    const uint32_t a = key[0], b = key[1], c = a ^ b ^ 0x1bd11bdau;
    Words x[kGroupVectors], y[kGroupVectors], lanes;
    for (int i = 0; i < N; i++) lanes[i] = i;
#pragma GCC unroll 8
    for (int i = 0; i < kGroupVectors; i++) x[i] = Words{} + a, y[i] = lanes + (first + i * N + b);
    threefry_rounds<13, 15, 26, 6>(x, y, b, c + 1);
    threefry_rounds<17, 29, 16, 24>(x, y, c, a + 2);
    threefry_rounds<13, 15, 26, 6>(x, y, a, b + 3);
    threefry_rounds<17, 29, 16, 24>(x, y, b, c + 4);
    threefry_rounds<13, 15, 26, 6>(x, y, c, a + 5);
    vf largest = set1(below);
#pragma GCC unroll 8
    for (int i = 0; i < kGroupVectors; i++) {
        const vf one_to_two = as_floats((vw)((x[i] ^ y[i]) >> 9 | 0x3f800000u));
        store(to + i * N, one_to_two);
        largest = max(largest, one_to_two);
    }
    return any_differs(largest, set1(below));
}

// u: 0 stands for the smallest normal number.
INL float noise_of(float u) {
    const float negative_log = -(float)std::log((double)(u == 0.0f ? FLT_MIN : u));
    return -(float)std::log((double)negative_log);
}

// The best token of the groups that were added.
class RowDraw {
   public:
    RowDraw(const ScaledRow& row, const uint32_t* key, float floor, const float* maxima)
        : row_(row), key_(key), floor_(floor), maxima_(maxima) {}
    int32_t token = 0;

    void add_group(int64_t g) {
        if (!(maxima_[g] >= best_ - most_noise_) || maxima_[g] < floor_) return;
        // To win, a token needs -log(u) <= exp(scaled - best), and 1 - u is less than -log(u). 1e-5 is more than the
        // sums are rounded by.
        const double exponent = ((double)maxima_[g] - best_ + 1e-5) * 1.4426950408889634;
        if (exponent < -23.0) return;  // u is at most 1 - 2^-23
        const double bound = exponent < 0.0 ? at_least_exp2(exponent) : 1.0;
        const float below = (float)(2.0 - bound) - 0x1p-23f;  // less than 1 + u of any token that can win
        alignas(64) float uniform[kFloorGroup], scaled[kFloorGroup];
        const uint32_t first = JATTN_MUTANT(groups_have_the_same_noise, 0, g * kFloorGroup);
        if (!uniform_group(key_, first, below, uniform)) return;
        row_.load_group(g, scaled);
        for (int i = 0; i < row_.group_size(g); i++) {
            if (uniform[i] <= below || scaled[i] < floor_ || !(scaled[i] >= best_ - most_noise_)) continue;
            const float sum = scaled[i] + noise_of(uniform[i] - 1.0f);
            const int32_t at = (int32_t)(g * kFloorGroup + i);
            if (sum < best_ || (sum == best_ && JATTN_MUTANT(likeliest_of_equal_sums, true, at > token))) continue;
            best_ = sum, token = at;
        }
    }

   private:
    const float most_noise_ = JATTN_MUTANT(large_noise_ignored, 8.0f, 16.0f);
    const ScaledRow& row_;
    const uint32_t* key_;
    float floor_;
    const float* maxima_;
    float best_ = -FLT_MAX;

    // 2^x or up to 6% more, for x from -126 to 0: between powers of 2 the bits of a float are a chord.
    static float at_least_exp2(double x) { return bits_to_float((uint32_t)((x + 127.0) * 0x1p23)); }
};

// Sets `maxima` to the maximum of each group of logits, then -inf up to a multiple of kFloorGroup, and `largest` to the
// maximum of the row. False if there is a NaN.
static bool find_maxima(Logits row, float* maxima, float& largest) {
    const int64_t groups = num_groups(row.n);
    std::fill(maxima + groups, maxima + round_up(groups, kFloorGroup), -kInf);
    bool has_nan = false;
    vf of_row = set1(-kInf);
    for (int64_t g = 0, first = 0; g < groups; g++, first += kFloorGroup) {
        alignas(64) float padded[kFloorGroup];
        const float* group = row.x + first;
        if (row.n - first < kFloorGroup) {
            std::fill(std::copy(group, row.x + row.n, padded), padded + kFloorGroup, -kInf);
            group = padded;
        }
        vf of_group = load(group);
        has_nan |= any_differs(of_group, of_group);
        for (int i = N; i < kFloorGroup; i += N) {
            const vf x = load(group + i);
            has_nan |= any_differs(x, x);
            of_group = max(of_group, x);
        }
        maxima[g] = hmax(of_group);
        of_row = max(of_row, of_group);
    }
    largest = hmax(of_row);
    return !has_nan;
}

// Row r of a draw. The token is -1 if the maximum of the row is not finite, or a logit is NaN.
static void draw(const DrawArgs& args, int64_t r, const DrawScratch& scratch) {
    const Logits logits{args.logits + r * args.vocab, args.vocab};
    args.tokens[r] = -1, args.floors[r] = -kInf;
    float largest;
    if (!find_maxima(logits, scratch.maxima, largest) || !std::isfinite(largest)) return;
    const int64_t groups = num_groups(args.vocab);
    int64_t likeliest = 0;
    while (scratch.maxima[likeliest] != largest) likeliest++;
    if (!(args.temperature[r] > 0.0f)) {
        int64_t token = likeliest * kFloorGroup;
        while (logits.x[token] != largest) token++;
        args.tokens[r] = (int32_t)token;
        return;
    }
    const float least = args.least[r];
    const ScaledRow row{logits.x, logits.n, largest, args.temperature[r], least >= -kInf ? least : -kInf};
    for (int64_t g = 0; g < groups; g += N) store(scratch.maxima + g, row.scaled(load(scratch.maxima + g)));
    args.floors[r] = sampling_floor(args, r, row, scratch);
    RowDraw drawn(row, args.keys + 2 * r, args.floors[r], scratch.maxima);
    drawn.add_group(likeliest);
    for (int64_t g = 0; g < groups; g++)
        if (g != likeliest) drawn.add_group(g);
    args.tokens[r] = drawn.token;
}

}  // namespace JATTN_ISA
