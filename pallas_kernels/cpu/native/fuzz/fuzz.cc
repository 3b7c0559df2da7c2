// Random batches through every kernel that this machine runs, from several threads at once: half with sane lengths,
// compared with a float64 reference, half with garbage, whose accesses a sanitizer watches. One allocation of sixteen
// fails: that call must end with NoMemory, and the next one must be right. See __main__.py.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

static std::atomic<unsigned> allocations{0};
static thread_local bool judging = false;
#define JATTN_ALLOCATION_FAILS(bytes) (!judging && ++allocations % 16 == 0)

#include "batch.h"
#include "dispatch.h"
#include "reference.h"
#include "run.h"
#include "std_pool.h"

using namespace jattn;

static std::atomic<unsigned> next_seed{0}, attended{0}, refused{0}, wrong{0};

static void one(StdPool& pool, const Kernels& kernels, unsigned seed) {
    Batch batch(seed, seed % 2 == 0);
    const int threads[] = {1, 2, 3, 17, 33}, asked = threads[seed % 5];
    run_write(pool, batch.w, kernels, batch.p.tokens, asked);
    bool good = written(batch.w, batch.p.tokens);
    double worst = 0.0;
    if (serves(kernels, batch.p.q_type, batch.p.kv_type)) {
        for (bool done = false; !done;) try {
                run_attend(pool, batch.p, kernels, asked);
                done = true;
            } catch (const NoMemory&) {
                refused++;
            }
        if (batch.sane) {
            Judge judge{batch.p, bytes_of(batch.p.q_type) == 2 && !kernels.attend[0]};
            judging = true;
            good &= judge.all();
            judging = false;
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
        StdPool pool(32);
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
    std::printf("%u random batches (%u attended, %u calls out of memory) on %s, %d callers at once: %u wrong\n",
                next_seed - first, attended.load(), refused.load(), known_isas().c_str(), callers, wrong.load());
    return wrong != 0;
}
