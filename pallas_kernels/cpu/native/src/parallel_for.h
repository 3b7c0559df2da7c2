// A parallel loop on a thread pool: XLA's, or any class with num_threads() and Schedule(task). An exception in the body
// ends the loop early and is rethrown on the calling thread.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>

namespace jattn {

// Calls f(i, next) for i = 0 .. n-1. Threads take items one by one in ascending order; `next` is the item that will be
// taken next, so that f can prefetch its data. threads <= 0: those of the pool.
// The calling thread takes items too, and returns once every item is done. It waits only for items that a running
// thread has taken, never for a task in the pool's queue, so calls that share a pool cannot deadlock. A task that
// starts late finds no item left and returns.
template <class Pool, class F>
void parallel_for(Pool& pool, int64_t n, int64_t threads, F&& f) {
    if (threads <= 0) threads = pool.num_threads();
    if (threads > n) threads = n;
    struct State {
        std::atomic<int64_t> next{0}, done{0};
        std::mutex mutex;
        std::condition_variable all_done;
        std::atomic<bool> failed{false};
        std::exception_ptr failure;  // of the first item that failed
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
    auto state = std::make_shared<State>();  // late tasks use it after this function has returned
    auto* body = &f;  // used only by threads that took an item: this function still waits for them
    auto work = [state, body, n](bool in_pool) {
        int64_t taken = 0, i;
        while ((i = state->next.fetch_add(1, std::memory_order_relaxed)) < n) {
            try {
                if (!state->failed.load(std::memory_order_relaxed)) (*body)(i, state->next);
            } catch (...) {
                state->fail();
            }
            taken++;
        }
        if (taken && state->done.fetch_add(taken, std::memory_order_acq_rel) + taken == n && in_pool) {
            std::lock_guard<std::mutex> lock(state->mutex);
            state->all_done.notify_one();
        }
    };
    try {
        for (int64_t t = 1; t < threads; t++) pool.Schedule([work] { work(true); });
    } catch (const std::bad_alloc&) {  // continue with fewer threads
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
