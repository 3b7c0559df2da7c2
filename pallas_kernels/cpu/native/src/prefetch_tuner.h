// Chooses the prefetch distance of decode. The better of two distances changes with the load that other programs put on
// the core and on the memory, so each thread times the other distance on some of its units and changes to it where that
// is faster. The distance affects the time only, never the result.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

namespace JATTN_ISA {

// Bytes. Measured: 1 and 2 KiB are no faster than the near distance, 8 to 24 KiB no faster than the far one.
constexpr int64_t kNearDistance = 3072, kFarDistance = 6144;

template <class Clock = std::chrono::steady_clock>
class PrefetchTuner {
   public:
    // Starts the clock for a unit that reads unit_bytes; returns the distance to use for it.
    int64_t begin_unit(int64_t unit_bytes) {
        bytes_ = unit_bytes;
        if (bytes_ < kMinBytes) return distance_;
        is_trial_ = ++units_ % kTrialInterval == 0;
        start_ = Clock::now();
        return is_trial_ ? other_distance() : distance_;
    }
    // Call when the unit has been read.
    void end_unit() {
        if (bytes_ < kMinBytes) return;
        const float cost = std::chrono::duration<float, std::nano>(Clock::now() - start_).count() / (float)bytes_;
        if (!is_trial_) {
            cost_ += cost_ > 0.0f ? (std::min(cost, 2 * cost_) - cost_) / kSmoothing : cost;
        } else if (cost_ > 0.0f) {
            trial_ratio_ += (std::min(cost / cost_, 2.0f) - trial_ratio_) / kSmoothing;
            if (trial_ratio_ < kSwitchRatio)
                distance_ = other_distance(), cost_ *= trial_ratio_, trial_ratio_ = 1.0f / trial_ratio_;
        }
    }

   private:
    static constexpr int64_t kMinBytes = 1 << 18;  // smaller units are not timed
    static constexpr int64_t kTrialInterval = 16;  // one unit of so many tries the other distance
    static constexpr float kSmoothing = 8.0f;      // an average moves by 1 / kSmoothing of each difference
    static constexpr float kSwitchRatio = 0.96f;   // change the distance where the other takes less than this share

    int64_t distance_ = kFarDistance, bytes_ = 0, units_ = 0;
    bool is_trial_ = false;
    float cost_ = 0.0f, trial_ratio_ = 1.0f;  // moving averages: nanoseconds per byte; the other distance's over it
    typename Clock::time_point start_;

    int64_t other_distance() const { return kNearDistance + kFarDistance - distance_; }
};

}  // namespace JATTN_ISA
