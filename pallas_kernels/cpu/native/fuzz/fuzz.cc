// Random batches through every kernel that this machine runs, from several threads at once: half with sane lengths,
// compared with a float64 reference, half with garbage, whose accesses a sanitizer watches. See __main__.py.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "batch.h"
#include "dispatch.h"
#include "reference.h"
#include "run.h"
#include "std_pool.h"

using namespace jattn;

static std::atomic<unsigned> next_seed{0}, attended{0}, wrong{0};

static void one(StdPool& pool, const Kernels& kernels, unsigned seed) {
    Batch batch(seed, seed % 2 == 0);
    run_write(pool, batch.w, kernels, batch.p.tokens, 1 + seed % 3);
    bool good = written(batch.w, batch.p.tokens);
    double worst = 0.0;
    if (serves(kernels, batch.p.q_type, batch.p.kv_type)) {
        run_attend(pool, batch.p, kernels, 1 + seed % 3);
        if (batch.sane) {
            Judge judge{batch.p, bytes_of(batch.p.q_type) == 2 && !kernels.attend[0]};
            good &= judge.all();
            worst = judge.worst;
        }
        attended++;
    }
    if (!good) {
        std::fprintf(stderr, "%s: batch %u differs from the reference (%.2f of what is allowed)\n", kernels.name, seed,
                     worst);
        wrong++;
    }
}

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const int callers = argc > 2 ? std::atoi(argv[2]) : 2;
    const unsigned first = argc > 3 ? (unsigned)std::atol(argv[3]) : 0;
    next_seed = first;
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    {
        StdPool pool(2);
        std::vector<std::thread> threads;
        for (int i = 0; i < callers; i++)
            threads.emplace_back([&] {
                while (Clock::now() < end && wrong < 10) {
                    const unsigned seed = next_seed++;
                    for (const Kernels* kernels : runnable()) one(pool, *kernels, seed);
                }
            });
        for (auto& thread : threads) thread.join();
    }
    std::printf("%u random batches (%u attended) on %s, %d callers at once: %u wrong\n", next_seed - first,
                attended.load(), known_isas().c_str(), callers, wrong.load());
    return wrong != 0;
}
