// One whole call on the threads of a pool; XLA's FFI and the fuzz driver both run it.
#pragma once
#include <cstring>
#include <limits>

#include "lengths.h"
#include "schedule.h"
#include "thread_pool.h"

namespace jattn {

constexpr double kInlineCost = 60000;  // below this a batch is not worth waking a second thread

inline void clear_rows(const Problem& p, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const int64_t row = (int64_t)p.heads * p.vdim * bytes_of(p.out_type);
    std::memset(p.out + begin * row, 0, (end - begin) * row);
    std::fill(p.lse + begin * p.heads, p.lse + end * p.heads, -std::numeric_limits<float>::infinity());
}

// Clamps the lengths, clears the rows of no request, cuts the work into items and runs them.
template <class Pool>
void run_attend(Pool& pool, Problem p, const Kernels& kernels, int64_t threads) {
    Lengths lengths(p);
    clear_rows(p, 0, p.query_start[0]);
    clear_rows(p, JATTN_MUTANT(padding_not_cleared, p.tokens, p.query_start[p.requests]), p.tokens);
    Schedule schedule = make_schedule(p);
    const CallMemory memory(4 * (schedule.partial_floats + schedule.counters));
    float* const partials = reinterpret_cast<float*>(memory.data);
    int32_t* const counters = reinterpret_cast<int32_t*>(partials + schedule.partial_floats);
    if (schedule.counters) std::memset(counters, 0, 4 * schedule.counters);
    const int64_t scratch = scratch_bytes(p);
    const auto kernel = kernels.attend[(int)p.kv_type];
    if (threads <= 0 && schedule.cost < kInlineCost) threads = 1;
    const int64_t items = (int64_t)schedule.works.size() * p.kv_heads;
    parallel_for(pool, items, threads, [&](int64_t i, const std::atomic<int64_t>& claimed) {
        static thread_local Buffer own;  // a few MiB, whatever the lengths are
        kernel(p, Queue{schedule.works.data(), items, claimed}, i, partials, counters, Arena(own.get(scratch), scratch));
    });
}

template <class Pool>
void run_write(Pool& pool, const Write& w, const Kernels& kernels, int64_t rows, int64_t threads) {
    // Rows that share a slot must not race and the last must win: one thread then, as for few rows.
    bool ascending = true;
    for (int64_t t = 1, last = rows ? w.slots[0] : -1; t < rows && ascending; t++)
        if (w.slots[t] >= 0) ascending = w.slots[t] > last, last = w.slots[t];
    const bool many = rows * w.kv_heads * ((int64_t)w.dim + w.vdim) > 65536;
    const int64_t piece = ascending && many ? std::max<int64_t>(8, rows / 64) : rows;
    parallel_for(pool, piece ? (rows + piece - 1) / piece : 0, threads, [&](int64_t i, auto&) {
        kernels.write(w, i * piece, std::min(rows, (i + 1) * piece));
    });
}

}  // namespace jattn
