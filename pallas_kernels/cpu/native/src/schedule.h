// Divides a batch into units of work, the most expensive first. How a request is divided depends on that request alone,
// and its splits are merged in a fixed order: its result does not depend on the rest of the batch or on the number of
// threads.
#pragma once
#include <algorithm>
#include <vector>

#include "work.h"

namespace jattn {

struct Schedule {
    std::vector<WorkUnit, Allocator<WorkUnit>> units;
    int64_t partial_floats = 0, num_counters = 0;  // memory for the partial results and counters of all splits
    double cost = 0;
};

// Appends these rows, divided into units of at most split_keys keys. Only keys that some row sees are included.
inline void add_rows(const AttentionArgs& args, Schedule& schedule, WorkUnit work, int64_t split_keys) {
    int64_t num_queries = (int64_t)args.query_start_loc[work.request + 1] - args.query_start_loc[work.request];
    int64_t begin = INT64_MAX, end = 0;
    for (int i = 0; i < work.num_queries; i++) {
        const int64_t position = args.seq_lens[work.request] - num_queries + work.first_query + i;
        KeyRange keys = visible_keys(args, work.request, position);
        if (keys.begin < keys.end) begin = std::min(begin, keys.begin), end = std::max(end, keys.end);
    }
    if (begin >= end) begin = end = 0;
    work.num_splits = (int32_t)std::max<int64_t>(1, (end - begin + split_keys - 1) / split_keys);
    if (work.num_splits > 1) {
        work.partial_offset = schedule.partial_floats;
        work.counter_offset = schedule.num_counters;
        schedule.partial_floats += (int64_t)args.num_kv_heads * work.num_splits * partial_floats(args, work.num_rows());
        schedule.num_counters += args.num_kv_heads;
    }
    for (work.split = 0; work.split < work.num_splits; work.split++) {
        work.key_begin = (int32_t)(begin + work.split * split_keys);
        work.key_end = (int32_t)std::min<int64_t>(end, work.key_begin + split_keys);
        const int cost_per_key = work.is_decode ? 16 + 2 * work.num_rows() : 4 * work.num_rows();
        work.cost =
            200.0 + double(work.key_end - work.key_begin) * (args.head_dim + args.v_head_dim) / 256 * cost_per_key;
        schedule.cost += work.cost * args.num_kv_heads;
        schedule.units.push_back(work);
    }
}

inline Schedule make_schedule(const AttentionArgs& args, int latent_decode_rows) {
    Schedule schedule;
    // Latent caches of 2 or 4 bytes a number have a limit of their own. Those of 1 byte do not: the decode kernel
    // converts their numbers again for every four rows of q, the prefill kernel only once.
    const bool is_wide_latent = args.latent_dim && bytes_of(args.kv_dtype) > 1;
    const int decode_rows = is_wide_latent ? latent_decode_rows : kDecodeMaxRows;
    for (int32_t r = 0; r < args.num_reqs; r++) {
        int32_t num_queries = args.query_start_loc[r + 1] - args.query_start_loc[r];
        if (num_queries <= 0) continue;
        WorkUnit work{};
        work.request = r;
        if ((int64_t)num_queries * args.group_size <= decode_rows) {
            work.num_queries = num_queries, work.num_heads = args.group_size, work.is_decode = true;
            add_rows(args, schedule, work, kDecodeSplitKeys);
            continue;
        }
        int32_t heads = std::min(args.group_size, kPrefillMaxRows), queries = std::max(1, kPrefillMaxRows / heads);
        int64_t split_keys = args.latent_dim ? kDecodeSplitKeys : kPrefillSplitKeys;
        if (num_queries > 2 * queries) split_keys = INT32_MAX;  // many units: enough for the threads without splits
        for (work.first_query = 0; work.first_query < num_queries; work.first_query += queries)
            for (work.first_head = 0; work.first_head < args.group_size; work.first_head += heads) {
                work.num_queries = std::min(queries, num_queries - work.first_query);
                work.num_heads = std::min(heads, args.group_size - work.first_head);
                add_rows(args, schedule, work, split_keys);
            }
    }
    std::stable_sort(schedule.units.begin(), schedule.units.end(),
                     [](const WorkUnit& a, const WorkUnit& b) { return a.cost > b.cost; });
    return schedule;
}

}  // namespace jattn
