// One call, whole, on the threads of a pool: what XLA's FFI and the fuzz driver both run.
#pragma once
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "lengths.h"
#include "schedule.h"
#include "thread_pool.h"

namespace jattn {

constexpr double kInlineCost = 60000;  // below this a batch is not worth waking a second thread

// Memory of one thread that only grows: large temporaries would cost page faults on every call.
struct Buffer {
    char* data = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(data); }
    char* get(size_t wanted) {
        if (wanted > size) {
            std::free(data);
            size = (wanted + 4095) / 4096 * 4096;
            data = static_cast<char*>(std::aligned_alloc(4096, size));
            if (!data) throw std::bad_alloc();
        }
        return data;
    }
};

inline void clear_rows(const Problem& p, int64_t begin, int64_t end) {
    if (begin >= end) return;
    int64_t row = p.heads * p.vdim * bytes_of(p.out_type);
    std::memset(p.out + begin * row, 0, (end - begin) * row);
    std::fill(p.lse + begin * p.heads, p.lse + end * p.heads, -std::numeric_limits<float>::infinity());
}

// Lengths are made safe, work is cut and done, rows of nobody are cleared.
template <class Pool>
void run_attend(Pool& pool, Problem p, const Kernels& kernels, int64_t threads) {
    Lengths lengths(p);
    clear_rows(p, 0, p.query_start[0]);
    clear_rows(p, p.query_start[p.requests], p.tokens);
    Schedule schedule = make_schedule(p);
    static thread_local Buffer shared;
    char* memory = shared.get(4 * (schedule.partial_floats + schedule.counters) + 64);
    float* partials = reinterpret_cast<float*>(memory);
    int32_t* counters = reinterpret_cast<int32_t*>(memory + 4 * schedule.partial_floats);
    std::memset(counters, 0, 4 * schedule.counters);
    const size_t scratch = scratch_bytes(p);
    const auto kernel = kernels.attend[(int)p.kv_type];
    if (threads <= 0 && schedule.cost < kInlineCost) threads = 1;
    const int64_t items = (int64_t)schedule.works.size() * p.kv_heads;
    parallel_for(pool, items, threads, [&](int64_t i, const std::atomic<int64_t>& claimed) {
        static thread_local Buffer own;
        kernel(p, Queue{schedule.works.data(), items, claimed}, i, partials, counters, own.get(scratch));
    });
}

template <class Pool>
void run_write(Pool& pool, const Write& w, const Kernels& kernels, int64_t rows, int64_t threads) {
    // Rows that share a slot must not race and the last must win: one thread then, as for few rows.
    bool ascending = true;
    for (int64_t t = 1, last = rows ? w.slots[0] : -1; t < rows && ascending; t++)
        if (w.slots[t] >= 0) ascending = w.slots[t] > last, last = w.slots[t];
    const int64_t piece = ascending && rows * w.kv_heads * (w.dim + w.vdim) > 65536 ? std::max<int64_t>(8, rows / 64) : rows;
    parallel_for(pool, piece ? (rows + piece - 1) / piece : 0, threads, [&](int64_t i, auto&) {
        kernels.write(w, i * piece, std::min(rows, (i + 1) * piece));
    });
}

}  // namespace jattn
