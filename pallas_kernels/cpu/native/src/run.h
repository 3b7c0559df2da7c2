// Runs one whole call on the threads of a pool. XLA's custom calls and the fuzz driver use it.
#pragma once
#include <cstring>
#include <limits>

#include "clamped_lengths.h"
#include "parallel_for.h"
#include "schedule.h"

namespace jattn {

constexpr double kOneThreadCost = 60000;  // a cheaper batch runs on the calling thread: a second one costs more to wake
constexpr int64_t kOneThreadLogits = 16384;  // the same, of a draw

// Sets tokens begin .. end - 1 to out = 0, lse = -inf.
inline void clear_tokens(const AttentionArgs& args, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const int64_t token_bytes = (int64_t)args.num_heads * args.v_head_dim * bytes_of(args.out_dtype);
    std::memset(args.out + begin * token_bytes, 0, (end - begin) * token_bytes);
    std::fill(args.lse + begin * args.num_heads, args.lse + end * args.num_heads,
              -std::numeric_limits<float>::infinity());
}

template <class Pool>
void run_attend(Pool& pool, AttentionArgs args, const IsaKernels& kernels, int64_t threads) {
    ClampedLengths lengths(args);
    clear_tokens(args, 0, args.query_start_loc[0]);  // tokens of no request: before the first and behind the last
    clear_tokens(args, JATTN_MUTANT(padding_not_cleared, args.num_tokens, args.query_start_loc[args.num_reqs]),
                 args.num_tokens);
    Schedule schedule = make_schedule(args, kernels.latent_decode_rows);
    const CallMemory memory(4 * (schedule.partial_floats + schedule.num_counters));
    float* const partials = reinterpret_cast<float*>(memory.data);
    int32_t* const counters = reinterpret_cast<int32_t*>(partials + schedule.partial_floats);
    if (schedule.num_counters) std::memset(counters, 0, 4 * schedule.num_counters);
    const int64_t scratch = scratch_bytes(args);
    const auto kernel = kernels.attend[(int)args.kv_dtype];
    if (threads <= 0 && schedule.cost < kOneThreadCost) threads = 1;
    const int64_t items = (int64_t)schedule.units.size() * args.num_kv_heads;
    parallel_for(pool, items, threads, [&](int64_t i, const std::atomic<int64_t>& next_item) {
        static thread_local Buffer buffer;  // a few MiB: its size does not depend on the lengths
        kernel(args, WorkQueue{schedule.units.data(), items, next_item}, i, partials, counters,
               Arena(buffer.get(scratch), scratch));
    });
}

template <class Pool>
void run_write(Pool& pool, const WriteArgs& args, const IsaKernels& kernels, int64_t tokens, int64_t threads) {
    // Several threads only where slots ascend. Then no two tokens share a slot; if they do, the last one has to win.
    bool ascending = true;
    for (int64_t t = 1, last = tokens ? args.slot_mapping[0] : -1; t < tokens && ascending; t++)
        if (args.slot_mapping[t] >= 0) ascending = args.slot_mapping[t] > last, last = args.slot_mapping[t];
    const bool is_large = tokens * args.num_kv_heads * ((int64_t)args.head_dim + args.v_head_dim) > 65536;
    const int64_t part = ascending && is_large ? std::max<int64_t>(8, tokens / 64) : tokens;
    parallel_for(pool, part ? (tokens + part - 1) / part : 0, threads,
                 [&](int64_t i, auto&) { kernels.write(args, i * part, std::min(tokens, (i + 1) * part)); });
}

template <class Pool>
void run_draw(Pool& pool, const DrawArgs& args, const IsaKernels& kernels, int64_t threads) {
    const int64_t num_sums = kFloorTables * kFloorBuckets, groups = round_up(num_groups(args.vocab), kFloorGroup);
    const int64_t scratch = sizeof(double) * num_sums + sizeof(float) * (args.vocab + groups) + 3 * 64;
    if (threads <= 0 && args.rows * args.vocab < kOneThreadLogits) threads = 1;
    parallel_for(pool, args.rows, threads, [&](int64_t row, auto&) {
        static thread_local Buffer buffer;
        Arena arena(buffer.get(scratch), scratch);
        auto* const sums = arena.take<double>(num_sums);
        kernels.draw(args, row, {sums, arena.take<float>(args.vocab), arena.take<float>(groups)});
    });
}

}  // namespace jattn
