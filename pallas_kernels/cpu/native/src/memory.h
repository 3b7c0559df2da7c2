// Memory of the kernels: an allocator and buffers that throw OutOfMemory with the size, one buffer that is reused from
// call to call, and an arena that checks its bounds.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

// Test builds define which allocations fail: tests/kernels/cpu/test_native_memory.py and fuzz/fuzz.cc.
#ifndef JATTN_ALLOCATION_FAILS
#define JATTN_ALLOCATION_FAILS(bytes) false
#endif

namespace jattn {

class OutOfMemory : public std::bad_alloc {
   public:
    explicit OutOfMemory(size_t bytes) { std::snprintf(text_, sizeof text_, "cannot allocate %zu bytes", bytes); }
    const char* what() const noexcept override { return text_; }

   private:
    char text_[96];
};

constexpr size_t kPage = 4096;

// Allocator for standard containers that throws OutOfMemory.
template <class T>
struct Allocator {
    using value_type = T;
    Allocator() = default;
    template <class U>
    Allocator(const Allocator<U>&) {}
    T* allocate(size_t n) {
        void* p =
            n > SIZE_MAX / sizeof(T) || JATTN_ALLOCATION_FAILS(n * sizeof(T)) ? nullptr : std::malloc(n * sizeof(T));
        if (!p) throw OutOfMemory(n * sizeof(T));
        return static_cast<T*>(p);
    }
    void deallocate(T* p, size_t) { std::free(p); }
    friend bool operator==(const Allocator&, const Allocator&) { return true; }
    friend bool operator!=(const Allocator&, const Allocator&) { return false; }
};

// Memory that only grows. Reusing it avoids a page fault for every 4 KiB.
class Buffer {
   public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }
    size_t size() const { return size_; }
    // At least `bytes` of uninitialised memory; the buffer is empty after OutOfMemory.
    char* get(size_t bytes) {
        if (bytes <= size_) return data_;
        std::free(data_);
        data_ = nullptr, size_ = 0;
        if (bytes > SIZE_MAX - kPage) throw OutOfMemory(bytes);
        const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
        data_ = JATTN_ALLOCATION_FAILS(bytes) ? nullptr : static_cast<char*>(std::aligned_alloc(kPage, rounded));
        if (!data_) throw OutOfMemory(bytes);
        size_ = rounded;
        return data_;
    }

   private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

constexpr size_t kMaxCachedBytes = 64u << 20;

// Memory of one call. The process caches one buffer of at most kMaxCachedBytes for the next call. Larger buffers are
// freed, and of concurrent calls all buffers but one.
class CallMemory {
   public:
    char* data = nullptr;
    explicit CallMemory(size_t bytes) {
        if (!bytes) return;
        buffer_.reset(cached_.exchange(nullptr));
        if (!buffer_) buffer_ = std::make_unique<Buffer>();
        data = buffer_->get(bytes);
    }
    ~CallMemory() {
        if (buffer_ && buffer_->size() <= kMaxCachedBytes) buffer_.reset(cached_.exchange(buffer_.release()));
    }
    static size_t cached_bytes() {  // for tests; not thread-safe
        const Buffer* cached = cached_.load();
        return cached ? cached->size() : 0;
    }

   private:
    std::unique_ptr<Buffer> buffer_;
    static inline std::atomic<Buffer*> cached_{nullptr};  // never freed: threads may still run at exit
};

// A bump allocator over the scratch memory of one item; every allocation is aligned to 64 bytes relative to `begin`.
class Arena {
   public:
    Arena(char* begin, int64_t bytes) : next_(begin), bytes_left_(bytes) {}
    template <class T>
    T* take(int64_t n) {
        const int64_t bytes = (n * (int64_t)sizeof(T) + 63) / 64 * 64;
        if (bytes > bytes_left_) overrun();
        T* p = reinterpret_cast<T*>(next_);
        next_ += bytes, bytes_left_ -= bytes;
        return p;
    }

   private:
    char* next_;
    int64_t bytes_left_;
    [[noreturn]] static void overrun() {
        throw std::length_error("a kernel needs more scratch memory than scratch_bytes() returns");
    }
};

}  // namespace jattn
