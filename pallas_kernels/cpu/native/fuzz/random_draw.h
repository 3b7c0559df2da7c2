// Random rows of logits with their rules, their memory, and the check of their floors and tokens against sorted rows,
// and sums and noise in float64. Every buffer ends where its memory ends.
#pragma once
#include "random_batch.h"
#include "sampling_args.h"

namespace jattn {

class RandomDraw {
   public:
    DrawArgs args{};

    explicit RandomDraw(unsigned seed) : rng_(seed) {
        args.rows = pick(0, 5), args.vocab = pick(0, 7) ? pick(0, 300) : pick(8000, 12000);
        logits_.make(args.rows * args.vocab, 0.0f, 4 * pick(0, 3));
        top_k_.make(args.rows, 0), top_p_.make(args.rows, 1.0f), temperature_.make(args.rows, 1.0f);
        least_.make(args.rows, -INFINITY), keys_.make(2 * args.rows, 0);
        floors_.make(args.rows, NAN), tokens_.make(args.rows, -1);
        is_odd_ = pick(0, 3) == 0;
        for (int64_t row = 0; row < args.rows; row++) make_row(row);
        args.logits = logits_.get(), args.top_k = top_k_.get(), args.top_p = top_p_.get(), args.least = least_.get();
        args.temperature = temperature_.get(), args.keys = keys_.get();
        args.floors = floors_.get(), args.tokens = tokens_.get();
    }

    // True if each row keeps at least the fewest and at most the most tokens that top_p, give or take its rounding,
    // allows, and its token is one of those with the largest sum, give or take the rounding of float32. In rows of
    // arbitrary bits, only that the token is within the vocabulary. -1 exactly where there is no largest logit.
    bool is_right() const {
        for (int64_t row = 0; row < args.rows; row++) {
            const int64_t token = args.tokens[row], n = args.vocab;
            if (has_largest(row) != (token != -1) || token < -1 || token >= n) return false;
            if (is_odd_ || token == -1) continue;
            const std::vector<float> x = scaled(row);
            if (!(args.temperature[row] > 0.0f)) {
                const int64_t likeliest = std::max_element(x.begin(), x.end()) - x.begin();
                if (args.floors[row] != -INFINITY || token != likeliest) return false;
                continue;
            }
            const double p = args.top_p[row], step = args.has_top_p(row) ? 1e-6 * std::fabs(p) : 0.0;
            std::vector<float> sorted = x;
            std::sort(sorted.begin(), sorted.end(), std::greater<float>());
            const auto is_kept = [&](float x) { return x >= args.floors[row]; };
            const int64_t kept = std::count_if(sorted.begin(), sorted.end(), is_kept);
            if (kept < num_kept(row, sorted, p - step) || kept > num_kept(row, sorted, p + step)) return false;
            double best = -INFINITY;
            for (int64_t i = 0; i < n; i++)
                if (is_kept(x[i])) best = std::max(best, x[i] + noise(row, i));
            if (!is_kept(x[token]) || x[token] + noise(row, token) < best - 4e-6) return false;
        }
        return true;
    }

   private:
    std::mt19937 rng_;
    ExactBuffer<float> logits_, top_p_, temperature_, least_, floors_;
    ExactBuffer<int32_t> top_k_, tokens_;
    ExactBuffer<uint32_t> keys_;
    bool is_odd_;

    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    void make_row(int64_t row) {
        const int64_t vocab = args.vocab;
        float* const x = logits_.get() + row * vocab;
        const bool has_ties = pick(0, 1), has_infinities = pick(0, 3) == 0;
        std::normal_distribution<float> normal(0.0f, (float)pick(0, 8));
        for (int64_t i = 0; i < vocab; i++) {
            x[i] = has_ties ? std::round(normal(rng_)) : normal(rng_);
            if (has_infinities && pick(0, 1)) x[i] = -INFINITY;
        }
        if (vocab) x[pick(0, (int)vocab - 1)] = 40.0f / (float)pick(1, 40);
        const float most = vocab ? *std::max_element(x, x + vocab) : 0.0f;
        for (int64_t i = 0; i < vocab; i++) x[i] = pick(0, 7) || x[i] < most ? x[i] - most : -0.0f;
        const int32_t top_k[] = {0, 1, 2, 20, -1, INT32_MAX, INT32_MIN, (int32_t)vocab, pick(0, (int)vocab)};
        const float top_p[] = {1.0f, 0.95f, 0.5f, 0.0f, 1e-30f, 2.0f, -1.0f, NAN, (float)pick(1, 999) / 1000.0f};
        top_k_[row] = top_k[pick(0, 8)], top_p_[row] = top_p[pick(0, 8)];
        const float temperature[] = {1.0f, 0.7f, 3.0f, 1e-30f, 1e6f, 0.0f, -1.0f, NAN};
        temperature_[row] = temperature[pick(0, 7)];
        const float least[] = {-INFINITY, -INFINITY, NAN, -3.0f, 0.0f};
        least_[row] = least[pick(0, 4)];
        keys_[2 * row] = (uint32_t)rng_(), keys_[2 * row + 1] = (uint32_t)rng_();
        for (int64_t i = 0; is_odd_ && i < vocab; i++)
            if (const uint32_t bits = (uint32_t)rng_(); pick(0, 1)) std::memcpy(x + i, &bits, 4);
    }
    std::vector<float> scaled(int64_t row) const {
        const float* begin = args.logits + row * args.vocab;
        std::vector<float> x(begin, begin + args.vocab);
        const float most = *std::max_element(x.begin(), x.end());
        if (!(args.temperature[row] > 0.0f)) return x;
        for (float& each : x) {
            each = (each - most) / args.temperature[row];
            if (each < args.least[row]) each = -INFINITY;
        }
        return x;
    }
    // Whether the row has no NaN, and its maximum is finite.
    bool has_largest(int64_t row) const {
        float largest = -INFINITY;
        for (int64_t i = 0; i < args.vocab; i++) {
            const float x = args.logits[row * args.vocab + i];
            if (std::isnan(x)) return false;
            largest = std::max(largest, x);
        }
        return std::isfinite(largest);
    }

    double noise(int64_t row, int64_t token) const {
        const uint32_t k[] = {args.keys[2 * row], args.keys[2 * row + 1],
                              args.keys[2 * row] ^ args.keys[2 * row + 1] ^ 0x1bd11bda};
        const int rotations[] = {13, 15, 26, 6, 17, 29, 16, 24};
        uint32_t x = k[0], y = (uint32_t)token + k[1];
        for (uint32_t round = 0; round < 20; round++) {
            const int by = rotations[round % 8];
            x += y, y = (y << by | y >> (32 - by)) ^ x;
            if (round % 4 == 3) x += k[(round / 4 + 1) % 3], y += k[(round / 4 + 2) % 3] + round / 4 + 1;
        }
        return -std::log(-std::log(std::max(((x ^ y) >> 9) / 8388608.0, 1.1754943508222875e-38)));
    }
    int64_t num_kept(int64_t row, const std::vector<float>& sorted, double top_p) const {
        const int64_t n = args.vocab, k = args.has_top_k(row) ? args.top_k[row] : n;
        int64_t last = k - 1;
        if (args.has_top_p(row)) {
            double all = 0.0, sum = 0.0;
            for (int64_t i = 0; i < k; i++) all += std::exp((double)sorted[i]);
            for (last = 0; last < k - 1; last++)
                if ((sum += std::exp((double)sorted[last])) >= top_p * all) break;
        }
        return std::count_if(sorted.begin(), sorted.end(), [&](float x) { return x >= sorted[last]; });
    }
};

}  // namespace jattn
