// Random rows of logits with their cuts, their memory, and the check of their floors against sorted rows and sums in
// float64. Every buffer ends where its memory ends.
#pragma once
#include "random_batch.h"
#include "sampling_args.h"

namespace jattn {

class RandomFloor {
   public:
    FloorArgs args{};

    explicit RandomFloor(unsigned seed) : rng_(seed) {
        args.rows = pick(0, 5), args.vocab = pick(0, 7) ? pick(0, 300) : pick(8000, 12000);
        scaled_.make(args.rows * args.vocab, 0.0f, 4 * pick(0, 3));
        top_k_.make(args.rows, 0), top_p_.make(args.rows, 1.0f), floor_.make(args.rows, 0x7f7f7f7fu);
        is_odd_ = pick(0, 3) == 0;
        for (int64_t row = 0; row < args.rows; row++) make_row(row);
        args.scaled = scaled_.get(), args.top_k = top_k_.get(), args.top_p = top_p_.get(), args.floor = floor_.get();
    }

    // True if each row keeps at least the fewest and at most the most tokens that top_p, give or take its rounding,
    // allows. Rows of any bits are not checked.
    bool is_right() const {
        for (int64_t row = 0; row < args.rows && !is_odd_; row++) {
            const double p = args.top_p[row], step = args.has_top_p(row) ? 1e-6 * std::fabs(p) : 0.0;
            std::vector<float> sorted(args.scaled + row * args.vocab, args.scaled + (row + 1) * args.vocab);
            std::sort(sorted.begin(), sorted.end(), std::greater<float>());
            const int64_t kept = std::count_if(sorted.begin(), sorted.end(),
                                               [&](float x) { return ordered(x) >= args.floor[row]; });
            if (kept < num_kept(row, sorted, p - step) || kept > num_kept(row, sorted, p + step)) return false;
        }
        return true;
    }

   private:
    std::mt19937 rng_;
    ExactBuffer<float> scaled_, top_p_;
    ExactBuffer<int32_t> top_k_;
    ExactBuffer<uint32_t> floor_;
    bool is_odd_;

    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    void make_row(int64_t row) {
        const int64_t vocab = args.vocab;
        float* const x = scaled_.get() + row * vocab;
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
        for (int64_t i = 0; is_odd_ && i < vocab; i++)
            if (const uint32_t bits = (uint32_t)rng_(); pick(0, 1)) std::memcpy(x + i, &bits, 4);
    }
    static uint32_t ordered(float x) {
        uint32_t bits;
        const float value = x == 0.0f ? 0.0f : x;
        std::memcpy(&bits, &value, 4);
        return std::signbit(value) ? ~bits : bits | 1u << 31;
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
