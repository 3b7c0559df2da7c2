// Loops on a thread pool: XLA's own, or any with num_threads() and Schedule(task). The caller's thread takes part and waits
// for no task that has not begun. An exception ends the loop early and is thrown again on the caller's thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

namespace jattn {

// f(i, claimed) for i in 0..n-1, claimed one by one in order; `claimed` is the next item to be claimed, so that f can
// prefetch. Helpers that the pool starts late find nothing left and leave; the caller returns when every claimed item is
// done, so it can never wait for a queue (no deadlock when many executions share the pool).
template <class Pool, class F>
void parallel_for(Pool& pool, int64_t n, int64_t threads, F&& f) {
    if (threads <= 0) threads = pool.num_threads();
    if (threads > n) threads = n;
    struct State {
        std::atomic<int64_t> next{0}, done{0};
        std::mutex mutex;
        std::condition_variable all_done;
        std::atomic<bool> failed{false};
        std::exception_ptr failure;  // the first one
        void fail() {
            std::lock_guard<std::mutex> lock(mutex);
            if (!failure) failure = std::current_exception();
            failed = true;
        }
    };
    if (threads <= 1) {
        std::atomic<int64_t> next{0};
        for (int64_t i = 0; i < n; i++) {
            next.store(i + 1, std::memory_order_relaxed);
            f(i, next);
        }
        return;
    }
    auto state = std::make_shared<State>();  // outlives late helpers
    auto* body = &f;                         // only touched by those who claimed an item
    auto work = [state, body, n](bool helper) {
        int64_t mine = 0, i;
        while ((i = state->next.fetch_add(1, std::memory_order_relaxed)) < n) {
            try {
                if (!state->failed.load(std::memory_order_relaxed)) (*body)(i, state->next);
            } catch (...) {
                state->fail();
            }
            mine++;
        }
        if (mine && state->done.fetch_add(mine, std::memory_order_acq_rel) + mine == n && helper) {
            std::lock_guard<std::mutex> lock(state->mutex);
            state->all_done.notify_one();
        }
    };
    try {
        for (int64_t t = 1; t < threads; t++) pool.Schedule([work] { work(true); });
    } catch (const std::bad_alloc&) {  // then there are fewer helpers
    }
    work(false);
    for (int spin = 0; spin < 4000 && state->done.load(std::memory_order_acquire) < n; spin++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    if (state->done.load(std::memory_order_acquire) < n) {
        std::unique_lock<std::mutex> lock(state->mutex);
        state->all_done.wait(lock, [&] { return state->done.load(std::memory_order_acquire) >= n; });
    }
    if (state->failed) std::rethrow_exception(state->failure);
}

}  // namespace jattn
