// AVX-512 with bfloat16 products, for bfloat16 queries; isa_avx512.cc serves the others.
#define JATTN_ISA avx512_bf16
#include "simd_avx512.h"
// simd_*.h comes first: it defines the vectors that the others use
#include "bf16_avx512.h"
#include "compute_bf16.h"
#include "matmul.h"
#include "kernels.h"
#include "product_packed_bf16.h"

namespace jattn {
extern const IsaKernels kAvx512Bf16;
const IsaKernels kAvx512Bf16 = {
    "avx512_bf16",
    {nullptr, nullptr, avx512_bf16::attend<avx512_bf16::ComputeBf16<Dtype::bf16>>,
     avx512_bf16::attend<avx512_bf16::ComputeBf16<Dtype::e4m3>>,
     avx512_bf16::attend<avx512_bf16::ComputeBf16<Dtype::e5m2>>,
     avx512_bf16::attend<avx512_bf16::ComputeBf16<Dtype::i8>>},
    64,
    avx512_bf16::write_tokens,
    avx512_bf16::draw,
    {nullptr, nullptr, &avx512_bf16::product_kernel<avx512_bf16::ProductBf16>},
    {{nullptr, nullptr, avx512_bf16::packed_int8_pairs},
     {nullptr, nullptr, avx512_bf16::packed_fp8_pairs},
     {nullptr, nullptr, avx512_bf16::packed_int4_pairs},
     {nullptr, nullptr, avx512_bf16::packed_fp4_pairs}},
    {},
};
}  // namespace jattn
