// A thread pool with the interface of XLA's that parallel_for uses, for the fuzz driver.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace jattn {

class StdPool {
   public:
    explicit StdPool(int threads) {
        for (int i = 0; i < threads; i++) threads_.emplace_back([this] { work(); });
    }
    ~StdPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            closed_ = true;
        }
        more_.notify_all();
        for (auto& thread : threads_) thread.join();
    }
    int64_t num_threads() const { return (int64_t)threads_.size(); }
    void Schedule(std::function<void()> task) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            tasks_.push_back(std::move(task));
        }
        more_.notify_one();
    }

   private:
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> tasks_;
    std::vector<std::thread> threads_;
    bool closed_ = false;

    void work() {
        for (;;) {
            std::function<void()> task;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                more_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
                if (tasks_.empty()) return;
                task = std::move(tasks_.front());
                tasks_.pop_front();
            }
            task();
        }
    }
};

}  // namespace jattn
