// Prints what is left of memory.h's promises after calls of several sizes: see test_native_memory.py.
#include <cstring>
#include <thread>
#include <vector>

#include "problem.h"

using namespace jattn;

int main() {
    const size_t small = 1 << 20, large = kKeptBytes + 1;
    size_t kept_after_small, kept_after_large, kept_after_many;
    bool same, ended = false, exact;
    char* first;
    {
        const CallMemory one(small);
        first = one.data;
    }
    {
        const CallMemory again(small / 2);
        same = again.data == first;  // no new pages for the next call
    }
    kept_after_small = CallMemory::kept_bytes();
    {
        const CallMemory big(large);
        std::memset(big.data, 1, large);
    }
    kept_after_large = CallMemory::kept_bytes();
    std::vector<std::thread> callers;
    for (int i = 0; i < 33; i++)
        callers.emplace_back([&] { for (int j = 0; j < 50; j++) { const CallMemory mine(small); std::memset(mine.data, j, small); } });
    for (auto& caller : callers) caller.join();
    kept_after_many = CallMemory::kept_bytes();
    alignas(64) char memory[256];
    Arena arena(memory, sizeof memory);
    exact = arena.take<float>(16) == (float*)memory && arena.take<char>(65) == memory + 64;  // whole cache lines
    exact &= arena.take<int64_t>(8) == (int64_t*)(memory + 192);
    try {
        arena.take<char>(1);
    } catch (const std::length_error&) {
        ended = true;
    }
    std::printf("%d %zu %zu %zu %d %d\n", same, kept_after_small / small, kept_after_large / small,
                kept_after_many / small, exact, ended);
}
