// Which ISAs this library holds and this machine runs, best first; and the kernel for a pair of types.
#pragma once
#include <string>
#include <vector>

#include "problem.h"

namespace jattn {

extern const Kernels kAvx512Bf16, kAvx512, kAvx2;

inline const std::vector<const Kernels*>& runnable() {
    static const std::vector<const Kernels*> found = [] {
        std::vector<const Kernels*> list;
#if defined(__x86_64__)
        __builtin_cpu_init();
        bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef JATTN_HAVE_AVX512_BF16
        if (avx512 && __builtin_cpu_supports("avx512bf16")) list.push_back(&kAvx512Bf16);
#endif
#ifdef JATTN_HAVE_AVX512
        if (avx512) list.push_back(&kAvx512);
#endif
#ifdef JATTN_HAVE_AVX2
        if (avx2) list.push_back(&kAvx2);
#endif
        (void)avx512;
#endif
        return list;
    }();
    return found;
}

inline std::string known_isas() {
    std::string names = "auto";
    for (const Kernels* k : runnable()) names += std::string(", ") + k->name;
    return names;
}

// Products in bf16 need queries that are bf16 exactly; anything else goes on to the next ISA.
inline bool serves(const Kernels& k, Dtype q, Dtype kv) {
    bool narrow = q != Dtype::f32 && q != Dtype::f16;
    return k.attend[(int)kv] && (narrow || k.attend[(int)Dtype::f32]);
}

// The ISA to write with (q < 0), or to attend with; nullptr where `isa` is not runnable here.
inline const Kernels* choose(const std::string& isa, int q, Dtype kv) {
    bool found = isa == "auto";
    for (const Kernels* k : runnable()) {
        found = found || isa == k->name;
        if (found && (q < 0 || serves(*k, (Dtype)q, kv))) return k;
    }
    return nullptr;
}

}  // namespace jattn
