// The ISAs that this library contains and this processor runs, best first, and the choice among them for given dtypes.
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

#include "work.h"

namespace jattn {

extern const IsaKernels kAmxBf16, kAvx512Bf16, kAvx512, kAvx2, kNeonBf16, kNeon;

#if defined(__x86_64__)
// True if AMX with bfloat16 products can be used. Linux requires a process to request permission for the tile
// registers.
inline bool request_amx() {
#if defined(JATTN_EMULATE_AMX)
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

inline const std::vector<const IsaKernels*>& runnable_isas() {
    static const std::vector<const IsaKernels*> found = [] {
        std::vector<const IsaKernels*> list;
#if defined(__x86_64__)
        __builtin_cpu_init();
        bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#ifdef JATTN_EMULATE_AVX512_BF16
        bool avx512_bf16 = avx512;
#else
        bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#endif
        (void)avx512_bf16;
#ifdef JATTN_HAVE_AMX_BF16
        if (avx512_bf16 && request_amx()) list.push_back(&kAmxBf16);
#endif
#ifdef JATTN_HAVE_AVX512_BF16
        if (avx512_bf16) list.push_back(&kAvx512Bf16);
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

inline std::string isa_names() {
    std::string names;
    for (const IsaKernels* kernels : runnable_isas()) names += (names.empty() ? "" : ", ") + std::string(kernels->name);
    return names;
}

// Products in bfloat16 need queries that bfloat16 represents exactly: float32 and float16 queries use the next ISA.
inline bool supports(const IsaKernels& kernels, Dtype q, Dtype kv) {
    bool fits_bf16 = q != Dtype::f32 && q != Dtype::f16;
    return kernels.attend[(int)kv] && (fits_bf16 || kernels.attend[(int)Dtype::f32]);
}

// The kernels of `isa` ("auto": the best), to write with; nullptr if it does not run here.
inline const IsaKernels* find_isa(const std::string& isa) {
    for (const IsaKernels* kernels : runnable_isas())
        if (isa == "auto" || isa == kernels->name) return kernels;
    return nullptr;
}

// The kernels of `isa`, or of the next best one that supports these dtypes; nullptr if `isa` does not run here.
inline const IsaKernels* find_isa_for(const std::string& isa, Dtype q, Dtype kv) {
    bool found = isa == "auto";
    for (const IsaKernels* kernels : runnable_isas()) {
        found = found || isa == kernels->name;
        if (found && supports(*kernels, q, kv)) return kernels;
    }
    return nullptr;
}

}  // namespace jattn
