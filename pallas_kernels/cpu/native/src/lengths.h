// What a caller passes as lengths, made safe.
#pragma once
#include <algorithm>
#include <cstdint>
#include <memory>

#include "problem.h"

namespace jattn {

// Lengths as they may safely be used, whatever was passed: ascending starts within T, keys within the table.
struct Lengths {
    std::unique_ptr<int32_t[]> memory;
    Lengths(Problem& p) : memory(new int32_t[2 * p.requests + 1]) {
        int32_t *start = memory.get(), *kv = start + p.requests + 1, most = (int32_t)p.tokens, before = 0;
        for (int64_t r = 0; r <= p.requests; r++)
            before = start[r] = std::min(std::max(p.query_start[r], before), most);
        int64_t room = p.table ? p.table_width * p.block_size : p.packed_keys;
        bool nothing = p.table ? p.blocks == 0 : p.packed_keys == 0;
        room = nothing ? 0 : std::min<int64_t>(room, INT32_MAX);
        for (int64_t r = 0; r < p.requests; r++) kv[r] = std::max(0, (int)std::min<int64_t>(p.kv_len[r], room));
        p.query_start = start;
        p.kv_len = kv;
    }
};

}  // namespace jattn
