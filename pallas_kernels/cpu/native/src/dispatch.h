// Which ISAs this library holds and this machine runs, best first; and the kernel for a pair of types.
#pragma once
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "problem.h"

namespace jattn {

extern const Kernels kAmxBf16, kAvx512Bf16, kAvx512, kAvx2, kNeonBf16, kNeon;

#if defined(__x86_64__)
// AMX with bf16 products, which Linux grants to a process that asks for the tiles' memory.
inline bool may_use_amx() {
#if defined(JATTN_AMX_EMULATED)
    return true;
#elif defined(__linux__)
    unsigned a, b, c, d;
    const unsigned tiles = 1u << 24, bf16 = 1u << 22;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & tiles) || !(d & bf16)) return false;
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

inline const std::vector<const Kernels*>& runnable() {
    static const std::vector<const Kernels*> found = [] {
        std::vector<const Kernels*> list;
#if defined(__x86_64__)
        __builtin_cpu_init();
        bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef JATTN_PAIRS_EMULATED
        bool pairs = avx512;
#else
        bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
#endif
        (void)pairs;
#ifdef JATTN_HAVE_AMX_BF16
        if (pairs && may_use_amx()) list.push_back(&kAmxBf16);
#endif
#ifdef JATTN_HAVE_AVX512_BF16
        if (pairs) list.push_back(&kAvx512Bf16);
#endif
#ifdef JATTN_HAVE_AVX512
        if (avx512) list.push_back(&kAvx512);
#endif
#ifdef JATTN_HAVE_AVX2
        if (avx2) list.push_back(&kAvx2);
#endif
#elif defined(__aarch64__)
#if defined(JATTN_HAVE_NEON_BF16) && defined(__linux__)
        const unsigned long bf16 = 1ul << 14;
        if (getauxval(AT_HWCAP2) & bf16) list.push_back(&kNeonBf16);
#endif
#ifdef JATTN_HAVE_NEON
        list.push_back(&kNeon);
#endif
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
