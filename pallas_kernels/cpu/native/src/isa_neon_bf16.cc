// NEON with bfloat16 products (bfdot), for bfloat16 queries; isa_neon.cc serves the others.
#define JATTN_ISA neon_bf16
#include "simd_neon.h"
// simd_*.h comes first: it defines the vectors that the others use
#include "bf16_neon.h"
#include "compute_bf16.h"
#include "matmul.h"
#include "kernels.h"
#include "product_bf16.h"

namespace jattn {
extern const IsaKernels kNeonBf16;
const IsaKernels kNeonBf16 = {
    "neon_bf16",
    {nullptr, nullptr, neon_bf16::attend<neon_bf16::ComputeBf16<Dtype::bf16>>,
     neon_bf16::attend<neon_bf16::ComputeBf16<Dtype::e4m3>>, neon_bf16::attend<neon_bf16::ComputeBf16<Dtype::e5m2>>,
     neon_bf16::attend<neon_bf16::ComputeBf16<Dtype::i8>>},
    64,
    neon_bf16::write_tokens,
    neon_bf16::draw,
    {nullptr, nullptr, &neon_bf16::product_kernel<neon_bf16::ProductBf16>},
    {},
    {},
};
}  // namespace jattn
