// Uses CallMemory and Arena as calls of several sizes do, and prints what test_native_memory.py checks.
#include <cstring>
#include <thread>
#include <vector>

#include "memory.h"

using namespace jattn;

int main() {
    const size_t small = 1 << 20, large = kMaxCachedBytes + 1;
    size_t cached_after_small, cached_after_large, cached_after_many;
    bool is_reused, throws = false, is_aligned;
    char* first;
    {
        const CallMemory one(small);
        first = one.data;
    }
    {
        const CallMemory again(small / 2);
        is_reused = again.data == first;
    }
    cached_after_small = CallMemory::cached_bytes();
    {
        const CallMemory big(large);
        std::memset(big.data, 1, large);
    }
    cached_after_large = CallMemory::cached_bytes();
    std::vector<std::thread> callers;
    for (int i = 0; i < 33; i++)
        callers.emplace_back([&] {
            for (int j = 0; j < 50; j++) {
                const CallMemory mine(small);
                std::memset(mine.data, j, small);
            }
        });
    for (auto& caller : callers) caller.join();
    cached_after_many = CallMemory::cached_bytes();
    alignas(64) char memory[256];
    Arena arena(memory, sizeof memory);
    is_aligned = arena.take<float>(16) == (float*)memory && arena.take<char>(65) == memory + 64;
    is_aligned &= arena.take<int64_t>(8) == (int64_t*)(memory + 192);
    try {
        arena.take<char>(1);
    } catch (const std::length_error&) {
        throws = true;
    }
    std::printf("%d %zu %zu %zu %d %d\n", is_reused, cached_after_small / small, cached_after_large / small,
                cached_after_many / small, is_aligned, throws);
}
