// How far ahead of its products a thread asks for keys. What is best changes by the hour, with whoever else uses the core
// and the memory: each thread tries the other distance on some of its pieces and changes to it where that is faster.
// Only the time depends on it, never a bit of a result.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>

namespace JATTN_ISA {

constexpr int64_t kNearBytes = 3072, kFarBytes = 6144;  // 1 and 2 KiB are no better than the one, 8 to 24 than the other

template <class Clock = std::chrono::steady_clock>
class Pace {
   public:
    // The distance for a piece of so many bytes, in bytes; done() says that it was read.
    int64_t begin(int64_t piece_bytes) {
        bytes_ = piece_bytes;
        if (bytes_ < kLeastBytes) return usual_;
        trying_ = ++pieces_ % kEvery == 0;
        began_ = Clock::now();
        return trying_ ? other() : usual_;
    }
    void done() {
        if (bytes_ < kLeastBytes) return;
        const float cost = std::chrono::duration<float, std::nano>(Clock::now() - began_).count() / (float)bytes_;
        if (!trying_) {
            cost_ += cost_ > 0.0f ? (std::min(cost, 2 * cost_) - cost_) / kMemory : cost;
        } else if (cost_ > 0.0f) {
            ratio_ += (std::min(cost / cost_, 2.0f) - ratio_) / kMemory;
            if (ratio_ < kBetter) usual_ = other(), cost_ *= ratio_, ratio_ = 1.0f / ratio_;
        }
    }

   private:
    static constexpr int64_t kLeastBytes = 1 << 18;  // shorter pieces say little
    static constexpr int64_t kEvery = 16;            // large pieces to a trial: what trials may cost is small
    static constexpr float kMemory = 8.0f, kBetter = 0.96f;

    int64_t usual_ = kFarBytes, bytes_ = 0, pieces_ = 0;
    bool trying_ = false;
    float cost_ = 0.0f, ratio_ = 1.0f;  // fading means: nanoseconds a byte, and how many times that by the other distance
    typename Clock::time_point began_;

    int64_t other() const { return kNearBytes + kFarBytes - usual_; }
};

}  // namespace JATTN_ISA
