// NEON with bfloat16 products (bfdot): for bfloat16 queries; other queries are served by isa_neon.cc.
#define JATTN_ISA neon_bf16
#include "simd_neon.h"
// the vectors come first
#include "pairs_neon.h"
#include "flavour_bf16.h"
#include "product.h"
#include "kernels.h"

namespace jattn {
extern const Kernels kNeonBf16;
const Kernels kNeonBf16 = {
    "neon_bf16",
    {nullptr, nullptr, neon_bf16::attend<neon_bf16::Bfloat16<Dtype::bf16>>,
     neon_bf16::attend<neon_bf16::Bfloat16<Dtype::e4m3>>, neon_bf16::attend<neon_bf16::Bfloat16<Dtype::e5m2>>,
     neon_bf16::attend<neon_bf16::Bfloat16<Dtype::i8>>},
    neon_bf16::write_rows,
    neon_bf16::N,
};
}  // namespace jattn
