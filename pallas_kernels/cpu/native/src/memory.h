// Memory of the kernels. A failed allocation is an error with its size; scratch memory is checked for overruns; memory kept
// between calls is bounded.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

// A build for tests says here which allocations fail: tests/kernels/cpu/test_native_memory.py, fuzz/fuzz.cc.
#ifndef JATTN_ALLOCATION_FAILS
#define JATTN_ALLOCATION_FAILS(bytes) false
#endif

namespace jattn {

class NoMemory : public std::bad_alloc {
   public:
    explicit NoMemory(size_t bytes) {
        std::snprintf(text_, sizeof text_, "%zu bytes of memory were wanted and are not to be had", bytes);
    }
    const char* what() const noexcept override { return text_; }

   private:
    char text_[96];
};

constexpr size_t kPage = 4096;

// Allocator of standard containers that throws NoMemory.
template <class T>
struct Allocator {
    using value_type = T;
    Allocator() = default;
    template <class U>
    Allocator(const Allocator<U>&) {}
    T* allocate(size_t n) {
        void* p = n > SIZE_MAX / sizeof(T) || JATTN_ALLOCATION_FAILS(n * sizeof(T)) ? nullptr : std::malloc(n * sizeof(T));
        if (!p) throw NoMemory(n * sizeof(T));
        return static_cast<T*>(p);
    }
    void deallocate(T* p, size_t) { std::free(p); }
    friend bool operator==(const Allocator&, const Allocator&) { return true; }
    friend bool operator!=(const Allocator&, const Allocator&) { return false; }
};

// Pages that are kept and used again: a fresh page costs a page fault.
class Buffer {
   public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }
    size_t size() const { return size_; }
    // At least `wanted` bytes, of any content; NoMemory leaves the buffer empty.
    char* get(size_t wanted) {
        if (wanted <= size_) return data_;
        std::free(data_);
        data_ = nullptr, size_ = 0;
        if (wanted > SIZE_MAX - kPage) throw NoMemory(wanted);
        const size_t whole = (wanted + kPage - 1) / kPage * kPage;
        data_ = JATTN_ALLOCATION_FAILS(wanted) ? nullptr : static_cast<char*>(std::aligned_alloc(kPage, whole));
        if (!data_) throw NoMemory(wanted);
        size_ = whole;
        return data_;
    }

   private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

constexpr size_t kKeptBytes = 64u << 20;

// Memory for one call. The process keeps one buffer of at most kKeptBytes for the next call; larger buffers, and all but
// one of calls that ran at the same time, are freed.
class CallMemory {
   public:
    char* data = nullptr;
    explicit CallMemory(size_t bytes) {
        if (!bytes) return;
        own_.reset(kept_.exchange(nullptr));
        if (!own_) own_ = std::make_unique<Buffer>();
        data = own_->get(bytes);
    }
    ~CallMemory() {
        if (own_ && own_->size() <= kKeptBytes) own_.reset(kept_.exchange(own_.release()));
    }
    static size_t kept_bytes() {  // for tests, while no call runs
        const Buffer* kept = kept_.load();
        return kept ? kept->size() : 0;
    }

   private:
    std::unique_ptr<Buffer> own_;
    static inline std::atomic<Buffer*> kept_{nullptr};  // never freed: threads may run as long as the process
};

// Scratch memory of one work item, handed out in pieces aligned to cache lines.
class Arena {
   public:
    Arena(char* begin, int64_t bytes) : at_(begin), left_(bytes) {}
    template <class T>
    T* take(int64_t n) {
        const int64_t bytes = (n * (int64_t)sizeof(T) + 63) / 64 * 64;
        if (bytes > left_) overrun();
        T* p = reinterpret_cast<T*>(at_);
        at_ += bytes, left_ -= bytes;
        return p;
    }

   private:
    char* at_;
    int64_t left_;
    [[noreturn]] static void overrun() { throw std::length_error("a kernel needs more scratch memory than scratch_bytes()"); }
};

}  // namespace jattn
