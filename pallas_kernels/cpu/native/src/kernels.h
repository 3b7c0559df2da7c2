// The kernels of one ISA as a table; included once by each isa_*.cc.
#pragma once
#include "decode.h"
#include "prefill.h"
#include "write.h"

namespace JATTN_ISA {

template <class F>
static void attend(const Problem& p, const Work& w, int head, float* partials, int32_t* counters, char* scratch) {
    if (w.is_short)
        attend_short<F>(p, w, head, partials, counters, scratch);
    else
        attend_long<F>(p, w, head, partials, counters, scratch);
}

}  // namespace JATTN_ISA
