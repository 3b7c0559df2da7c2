// Runs random batches, products and draws through every ISA of this processor, from several threads at the same
// time. Half of the batches have valid lengths; their outputs are compared with a float64 reference. The other half
// have arbitrary lengths; a sanitizer checks their accesses. One allocation of sixteen fails: the call must end with
// OutOfMemory, and the repeated call must be right. See __main__.py.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

static std::atomic<unsigned> allocations{0};
static thread_local bool in_reference = false;  // the reference's own allocations do not fail
#define JATTN_ALLOCATION_FAILS(bytes) (!in_reference && ++allocations % 16 == 0)

#include "random_batch.h"
#include "random_draw.h"
#include "random_packed.h"
#include "random_product.h"
#include "dispatch.h"
#include "reference.h"
#include "run.h"
#include "run_product.h"
#include "std_pool.h"

using namespace jattn;

static std::atomic<unsigned> next_seed{0}, num_attended{0}, num_products{0}, num_draws{0}, num_out_of_memory{0},
    num_wrong{0};

static void run_batch(StdPool& pool, const IsaKernels& kernels, unsigned seed) {
    RandomBatch batch(seed, seed % 2 == 0);
    const int choices[] = {1, 2, 3, 17, 33}, threads = choices[seed % 5];
    run_write(pool, batch.write, kernels, batch.attend.num_tokens, threads);
    bool good = check_write(batch.write, batch.attend.num_tokens);
    double worst = 0.0;
    if (supports(kernels, batch.attend.q_dtype, batch.attend.kv_dtype)) {
        for (bool done = false; !done;) try {
                run_attend(pool, batch.attend, kernels, threads);
                done = true;
            } catch (const OutOfMemory&) {
                num_out_of_memory++;
            }
        if (batch.valid) {
            AttendCheck check{batch.attend, bytes_of(batch.attend.q_dtype) == 2 && !kernels.attend[0]};
            in_reference = true;
            good &= check.all_tokens();
            in_reference = false;
            worst = check.worst;
        }
        num_attended++;
    }
    if (!good) {
        std::fprintf(stderr, "%s: batch %u differs from the reference (%.2f times the tolerance)\n", kernels.name, seed,
                     worst);
        num_wrong++;
    }
}

template <class Product>
static void run_random_product(StdPool& pool, const IsaKernels& kernels, const ProductKernel* kernel, unsigned seed,
                               const Product& product, const char* what) {
    const int choices[] = {1, 2, 3, 17, 33};
    if (!kernel) return;
    for (bool done = false; !done;) try {
            run_product(pool, product.args, *kernel, choices[seed % 5]);
            done = true;
        } catch (const OutOfMemory&) {
            num_out_of_memory++;
        }
    num_products++;
    if (const double worst = product.worst(); !(worst <= 1.0)) {
        std::fprintf(stderr, "%s: %s %u differs from the reference (%.2f times the tolerance)\n", kernels.name,
                     what, seed, worst);
        num_wrong++;
    }
}

template <class Product>
static void run_random_groups(StdPool& pool, const IsaKernels& kernels, unsigned seed, const Product& product,
                              const char* what) {
    const int choices[] = {1, 2, 3, 17, 33};
    const ProductKernel* kernel = kernels.product[(int)product.dtype()];
    if (!kernel) return;
    for (bool done = false; !done;) try {
            run_grouped_products(pool, product.args, *kernel, choices[seed % 5]);
            done = true;
        } catch (const OutOfMemory&) {
            num_out_of_memory++;
        }
    num_products++;
    if (const double worst = product.worst(); !(worst <= 1.0)) {
        std::fprintf(stderr, "%s: %s %u differs from the reference (%.2f times the tolerance)\n", kernels.name,
                     what, seed, worst);
        num_wrong++;
    }
}

static void run_random_draw(StdPool& pool, const IsaKernels& kernels, unsigned seed) {
    RandomDraw draw(seed);
    const int choices[] = {1, 2, 3, 17, 33};
    for (bool done = false; !done;) try {
            run_draw(pool, draw.args, kernels, choices[seed % 5]);
            done = true;
        } catch (const OutOfMemory&) {
            num_out_of_memory++;
        }
    num_draws++;
    if (!draw.is_right()) {
        std::fprintf(stderr, "%s: draw %u differs from the reference\n", kernels.name, seed);
        num_wrong++;
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
                while (Clock::now() < end && num_wrong < 10) {
                    const unsigned seed = next_seed++;
                    for (const IsaKernels* kernels : runnable_isas()) {
                        run_batch(pool, *kernels, seed);
                        const RandomProduct product(seed);
                        run_random_product(pool, *kernels, kernels->product[(int)product.args.dtype], seed, product,
                                           "product");
                        run_random_groups(pool, *kernels, seed, RandomHeadProduct(seed), "head product");
                        run_random_groups(pool, *kernels, seed, RandomExpertProduct(seed), "expert product");
                        run_random_draw(pool, *kernels, seed);
                        const RandomPackedProduct packed(seed);
                        const int format = (int)packed.format;
                        const ProductKernel* kernel = packed.transposed
                                                          ? kernels->packed_transposed[format]
                                                          : kernels->packed[format][(int)packed.args.dtype];
                        if (kernel && packed.args.divides(kernel->step))
                            run_random_product(pool, *kernels, kernel, seed, packed, "packed product");
                    }
                }
            });
        for (auto& thread : threads) thread.join();
    }
    std::printf(
        "%u random batches (%u attended, %u products, %u draws, %u calls out of memory) on %s, %d callers at once: "
        "%u wrong\n",
        next_seed - first, num_attended.load(), num_products.load(), num_draws.load(), num_out_of_memory.load(),
        isa_names().c_str(), callers, num_wrong.load());
    return num_wrong != 0;
}
