// A batch as pieces of work, the dearest first. How a request is cut depends on that request alone, and pieces are
// merged in a fixed order: its bits never depend on the batch around it, nor on the number of threads.
#pragma once
#include <algorithm>
#include <vector>

#include "problem.h"

namespace jattn {

struct Schedule {
    std::vector<Work, Allocator<Work>> works;  // each stands for kv_heads items
    int64_t partial_floats = 0, counters = 0;
    double cost = 0;
};

inline void add_tile(const Problem& p, Schedule& s, Work w, int64_t chunk) {
    int64_t count = (int64_t)p.query_start[w.req + 1] - p.query_start[w.req], lo = INT64_MAX, hi = 0;
    for (int i = 0; i < w.nq; i++) {
        Range see = visible(p, w.req, p.seq_len[w.req] - count + w.q0 + i);
        if (see.lo < see.hi) lo = std::min(lo, see.lo), hi = std::max(hi, see.hi);
    }
    if (lo >= hi) lo = hi = 0;
    w.splits = (int32_t)std::max<int64_t>(1, (hi - lo + chunk - 1) / chunk);
    if (w.splits > 1) {
        w.partial = s.partial_floats;
        w.counter = s.counters;
        s.partial_floats += (int64_t)p.kv_heads * w.splits * partial_floats(p, w.rows());
        s.counters += p.kv_heads;
    }
    for (w.split = 0; w.split < w.splits; w.split++) {
        w.begin = (int32_t)(lo + w.split * chunk);
        w.end = (int32_t)std::min<int64_t>(hi, w.begin + chunk);
        w.cost = 200.0 + double(w.end - w.begin) * (p.dim + p.vdim) / 256 * (w.is_short ? 16 + 2 * w.rows() : 4 * w.rows());
        s.cost += w.cost * p.kv_heads;
        s.works.push_back(w);
    }
}

inline Schedule make_schedule(const Problem& p) {
    Schedule s;
    for (int32_t r = 0; r < p.requests; r++) {
        int32_t count = p.query_start[r + 1] - p.query_start[r];
        if (count <= 0) continue;
        Work w{};
        w.req = r;
        if ((int64_t)count * p.group <= kShortRows) {
            w.nq = count, w.ng = p.group, w.is_short = true;
            add_tile(p, s, w, kShortChunk);
            continue;
        }
        int32_t heads = std::min(p.group, kLongRows), queries = std::max(1, kLongRows / heads);
        int64_t chunk = count <= 2 * queries ? kLongChunk : INT32_MAX;
        for (w.q0 = 0; w.q0 < count; w.q0 += queries)
            for (w.g0 = 0; w.g0 < p.group; w.g0 += heads) {
                w.nq = std::min(queries, count - w.q0), w.ng = std::min(heads, p.group - w.g0);
                add_tile(p, s, w, chunk);
            }
    }
    std::stable_sort(s.works.begin(), s.works.end(), [](const Work& a, const Work& b) { return a.cost > b.cost; });
    return s;
}

}  // namespace jattn
