// The kernels of one ISA as a table; included once by each isa_*.cc.
#pragma once
#include "decode.h"
#include "prefill.h"
#include "write.h"

namespace JATTN_ISA {

// Few rows by one flavour, many by the same or another.
template <class Short, class Long = Short>
static void attend(const Problem& p, const Queue& queue, int64_t item, float* partials, int32_t* counters,
                   Arena scratch) {
    const Work& w = queue.works[item / p.kv_heads];
    const int head = (int)(item % p.kv_heads);
    if (w.is_short)
        attend_short<Short>(p, w, head, queue, partials, counters, scratch);
    else
        attend_long<Long>(p, w, head, partials, counters, scratch);
}

}  // namespace JATTN_ISA
