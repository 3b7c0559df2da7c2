// Drives PrefetchTuner on a simulated clock. In the first of four phases, a byte costs 1 ns at the near distance and
// `worse` ns at the far one; each phase swaps the two. Prints for each phase the share of units, of its second half,
// that were read at the better distance. Arguments: worse, noise, bytes of a unit.
#include <cstdio>
#include <cstdlib>

#define JATTN_ISA simulated
#include "prefetch_tuner.h"

struct SimulatedClock {
    using duration = std::chrono::nanoseconds;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<SimulatedClock>;
    static inline time_point time{};
    static time_point now() { return time; }
};

int main(int argc, char** argv) {
    const double worse = std::atof(argv[1]), noise = std::atof(argv[2]);
    const long bytes = std::atol(argv[3]), units = 4096;
    simulated::PrefetchTuner<SimulatedClock> tuner;
    unsigned state = 1;
    for (int phase = 0; phase < 4; phase++) {
        long good = 0;
        for (long i = 0; i < units; i++) {
            const long distance = tuner.begin_unit(bytes);
            if (distance != simulated::kNearDistance && distance != simulated::kFarDistance) return 1;
            const bool better = (distance == simulated::kNearDistance) == (phase % 2 == 0);
            state = state * 1664525u + 1013904223u;
            const double jitter = 1.0 + noise * ((state >> 8) / 16777216.0);
            SimulatedClock::time += SimulatedClock::duration((long)((better ? 1.0 : worse) * jitter * bytes));
            if (state % 997 == 0)
                SimulatedClock::time +=
                    SimulatedClock::duration(10000000);  // 10 ms in which another program had the core
            tuner.end_unit();
            good += better && i >= units / 2;
        }
        std::printf("%.3f ", 2.0 * good / units);
    }
}
