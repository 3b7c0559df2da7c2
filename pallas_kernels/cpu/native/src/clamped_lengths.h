// Copies of the caller's lengths, clamped so that no kernel leaves its arrays whatever the caller passed.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "args.h"
#include "memory.h"

namespace jattn {

// query_start_loc ascends and ends within the tokens; a request's keys stay within its row of the block table, or
// within the packed keys. The arguments point into `memory` for as long as this object lives.
struct ClampedLengths {
    std::vector<int32_t, Allocator<int32_t>> memory;
    explicit ClampedLengths(AttentionArgs& args) : memory(3 * args.num_reqs + 1) {
        int32_t *query_start = memory.data(), *kv_len = query_start + args.num_reqs + 1,
                *kv_start = kv_len + args.num_reqs;
        int32_t previous = 0;
        for (int64_t r = 0; r <= args.num_reqs; r++)
            previous = query_start[r] =
                (int32_t)std::min<int64_t>(std::max(args.query_start_loc[r], previous), args.num_tokens);
        const int64_t table_keys = args.num_blocks == 0 ? 0 : args.table_width * args.block_size;
        for (int64_t r = 0; r < args.num_reqs; r++) {
            kv_start[r] =
                args.paged ? 0 : (int32_t)std::min<int64_t>(std::max(args.kv_start[r], 0), args.num_packed_keys);
            const int64_t limit = args.paged ? table_keys : args.num_packed_keys - kv_start[r];
            kv_len[r] = (int32_t)std::max<int64_t>(0, std::min<int64_t>(args.kv_lens[r], limit));
            if (JATTN_MUTANT(last_page_dropped, args.paged, false))
                kv_len[r] = kv_len[r] / args.block_size * args.block_size;
        }
        args.query_start_loc = query_start;
        args.kv_lens = kv_len;
        args.kv_start = kv_start;
    }
};

}  // namespace jattn
