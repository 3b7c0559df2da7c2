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
// What the processor can do and the operating system saves. CPUID itself: not every compiler's runtime library fills in
// what __builtin_cpu_supports reads.
struct X86Features {
    bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;

    X86Features() {
        unsigned a, b, c, d, saved, upper;
        const unsigned fma_osxsave_avx_f16c = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
        if (!__get_cpuid(1, &a, &b, &c, &d) || (c & fma_osxsave_avx_f16c) != fma_osxsave_avx_f16c) return;
        __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));  // XCR0: the registers that the system saves
        const unsigned ymm = 0x6, zmm = 0xe6, tiles = 0x60000;
        if ((saved & ymm) != ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = b & 1u << 5;
        const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, tile_and_bf16 = 1u << 24 | 1u << 22;
        avx512 = avx2 && (b & f_dq_bw_vl) == f_dq_bw_vl && (saved & zmm) == zmm;
        amx_bf16 = (d & tile_and_bf16) == tile_and_bf16 && (saved & tiles) == tiles;
        avx512_bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
#ifdef JATTN_EMULATE_AVX512_BF16
        avx512_bf16 = avx512;
#endif
#ifdef JATTN_EMULATE_AMX
        amx_bf16 = true;
#endif
    }
};

// Linux requires a process to request permission for the tile registers.
inline bool request_amx() {
#if defined(JATTN_EMULATE_AMX)
    return true;
#elif defined(__linux__)
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
        const X86Features here;
#ifdef JATTN_HAVE_AMX_BF16
        if (here.avx512_bf16 && here.amx_bf16 && request_amx()) list.push_back(&kAmxBf16);
#endif
#ifdef JATTN_HAVE_AVX512_BF16
        if (here.avx512_bf16) list.push_back(&kAvx512Bf16);
#endif
#ifdef JATTN_HAVE_AVX512
        if (here.avx512) list.push_back(&kAvx512);
#endif
#ifdef JATTN_HAVE_AVX2
        if (here.avx2) list.push_back(&kAvx2);
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

// The product of `isa` for this dtype, or of the next best ISA that has one; nullptr if `isa` does not run here.
inline const ProductKernel* find_product(const std::string& isa, Dtype dtype) {
    bool found = isa == "auto";
    for (const IsaKernels* kernels : runnable_isas()) {
        found = found || isa == kernels->name;
        if (found && kernels->product[(int)dtype]) return kernels->product[(int)dtype];
    }
    return nullptr;
}

// The product of `isa` for weights of this format and these rows, as `find_product`: the first whose words of inputs
// divide the chunks.
inline const ProductKernel* find_packed_product(const std::string& isa, Format format, const ProductArgs& args,
                                                bool transposed) {
    bool found = isa == "auto";
    for (const IsaKernels* kernels : runnable_isas()) {
        found = found || isa == kernels->name;
        const int f = (int)format;
        const ProductKernel* kernel = !transposed                  ? kernels->packed[f][(int)args.dtype]
                                      : f < kNumTransposedFormats ? kernels->packed_transposed[f]
                                                                  : nullptr;
        if (found && kernel && args.divides(kernel->step)) return kernel;
    }
    return nullptr;
}

}  // namespace jattn
