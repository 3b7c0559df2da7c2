// NEON, which every arm64 processor has: products in float32.
#define JATTN_ISA neon
#include "simd_neon.h"
// simd_*.h comes first: it defines the vectors that the others use
#include "compute_f32.h"
#include "matmul.h"
#include "kernels.h"
#include "product_packed.h"

namespace jattn {
extern const IsaKernels kNeon;
const IsaKernels kNeon = {
    "neon",
    {neon::attend<neon::ComputeF32<Dtype::f32>>, neon::attend<neon::ComputeF32<Dtype::f16>>,
     neon::attend<neon::ComputeF32<Dtype::bf16>>, neon::attend<neon::ComputeF32<Dtype::e4m3>>,
     neon::attend<neon::ComputeF32<Dtype::e5m2>>, neon::attend<neon::ComputeF32<Dtype::i8>>},
    64,
    neon::write_tokens,
    neon::draw,
    {&neon::product_kernel<neon::ProductF32<Dtype::f32>>, &neon::product_kernel<neon::ProductF32<Dtype::f16>>,
     &neon::product_kernel<neon::ProductF32<Dtype::bf16>>},
    {{neon::packed_int8, neon::packed_int8, neon::packed_int8},
     {neon::packed_fp8, neon::packed_fp8, neon::packed_fp8},
     {neon::packed_int4, neon::packed_int4, neon::packed_int4},
     {neon::packed_fp4, neon::packed_fp4, neon::packed_fp4}},
    {&neon::packed_transposed_kernel<Dtype::i8>, &neon::packed_transposed_kernel<Dtype::e4m3>},
};
}  // namespace jattn
