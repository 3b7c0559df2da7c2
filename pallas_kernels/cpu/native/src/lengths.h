// The caller's lengths, clamped so that kernels never leave their arrays.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "problem.h"

namespace jattn {

// Clamped lengths: starts ascend within T; a request's keys stay within its table row, or within the packed keys.
struct Lengths {
    std::vector<int32_t, Allocator<int32_t>> memory;
    explicit Lengths(Problem& p) : memory(3 * p.requests + 1) {
        int32_t *start = memory.data(), *kv = start + p.requests + 1, *first = kv + p.requests;
        int32_t before = 0;
        for (int64_t r = 0; r <= p.requests; r++)
            before = start[r] = (int32_t)std::min<int64_t>(std::max(p.query_start[r], before), p.tokens);
        const int64_t room = p.blocks == 0 ? 0 : p.table_width * p.block_size;
        for (int64_t r = 0; r < p.requests; r++) {
            first[r] = p.paged ? 0 : (int32_t)std::min<int64_t>(std::max(p.kv_start[r], 0), p.packed_keys);
            const int64_t most = p.paged ? room : p.packed_keys - first[r];
            kv[r] = (int32_t)std::max<int64_t>(0, std::min<int64_t>(p.kv_len[r], most));
            if (JATTN_MUTANT(last_page_dropped, p.paged, false)) kv[r] = kv[r] / p.block_size * p.block_size;
        }
        p.query_start = start;
        p.kv_len = kv;
        p.kv_start = first;
    }
};

}  // namespace jattn
