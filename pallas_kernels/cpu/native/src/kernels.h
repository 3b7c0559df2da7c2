// The kernels of one ISA, as its table of IsaKernels names them. Each isa_*.cc includes this once, after its vectors.
#pragma once
#include "cache_write.h"
#include "decode.h"
#include "draw.h"
#include "prefill.h"

namespace JATTN_ISA {

// Runs one item. Decode and prefill may compute differently: see isa_amx_bf16.cc.
template <class DecodeCompute, class PrefillCompute = DecodeCompute>
static void attend(const AttentionArgs& args, const WorkQueue& queue, int64_t item, float* partials, int32_t* counters,
                   Arena scratch) {
    const WorkUnit& work = queue.units[item / args.num_kv_heads];
    const int kv_head = (int)(item % args.num_kv_heads);
    if (work.is_decode && args.latent_dim)
        attend_decode<DecodeCompute, true>(args, work, kv_head, queue, partials, counters, scratch);
    else if (work.is_decode)
        attend_decode<DecodeCompute, false>(args, work, kv_head, queue, partials, counters, scratch);
    else
        attend_prefill<PrefillCompute>(args, work, kv_head, partials, counters, scratch);
}

}  // namespace JATTN_ISA
