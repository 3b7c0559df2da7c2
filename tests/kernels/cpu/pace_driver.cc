// Reads pieces on a clock of its own, where a byte costs one nanosecond at the near distance and `dear` at the far one,
// then the other way round, and so on for four eras; prints which share of each era's second half was read at the better.
#include <cstdio>
#include <cstdlib>

#define JATTN_ISA simulated
#include "pace.h"

struct Simulated {
    using duration = std::chrono::nanoseconds;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<Simulated>;
    static inline time_point time{};
    static time_point now() { return time; }
};

int main(int argc, char** argv) {
    const double dear = std::atof(argv[1]), noise = std::atof(argv[2]);
    const long bytes = std::atol(argv[3]), pieces = 4096;
    simulated::Pace<Simulated> pace;
    unsigned state = 1;
    for (int era = 0; era < 4; era++) {
        long good = 0;
        for (long i = 0; i < pieces; i++) {
            const long asked = pace.begin(bytes);
            if (asked != simulated::kNearBytes && asked != simulated::kFarBytes) return 1;
            const bool better = (asked == simulated::kNearBytes) == (era % 2 == 0);
            state = state * 1664525u + 1013904223u;
            const double jitter = 1.0 + noise * ((state >> 8) / 16777216.0);
            Simulated::time += Simulated::duration((long)((better ? 1.0 : dear) * jitter * bytes));
            if (state % 997 == 0) Simulated::time += Simulated::duration(10000000);  // somebody else had the core
            pace.done();
            good += better && i >= pieces / 2;
        }
        std::printf("%.3f ", 2.0 * good / pieces);
    }
}
