// AVX2, FMA, F16C: products in float32.
#define JATTN_ISA avx2
#include "simd_avx2.h"
// simd_*.h comes first: it defines the vectors that the others use
#include "compute_f32.h"
#include "matmul.h"
#include "kernels.h"
#include "product_packed.h"

namespace jattn {
extern const IsaKernels kAvx2;
const IsaKernels kAvx2 = {
    "avx2",
    {avx2::attend<avx2::ComputeF32<Dtype::f32>>, avx2::attend<avx2::ComputeF32<Dtype::f16>>,
     avx2::attend<avx2::ComputeF32<Dtype::bf16>>, avx2::attend<avx2::ComputeF32<Dtype::e4m3>>,
     avx2::attend<avx2::ComputeF32<Dtype::e5m2>>, avx2::attend<avx2::ComputeF32<Dtype::i8>>},
    64,
    avx2::write_tokens,
    avx2::draw,
    {&avx2::product_kernel<avx2::ProductF32<Dtype::f32>>, &avx2::product_kernel<avx2::ProductF32<Dtype::f16>>,
     &avx2::product_kernel<avx2::ProductF32<Dtype::bf16>>},
    {{avx2::packed_int8, avx2::packed_int8, avx2::packed_int8},
     {avx2::packed_fp8, avx2::packed_fp8, avx2::packed_fp8},
     {avx2::packed_int4, avx2::packed_int4, avx2::packed_int4},
     {avx2::packed_fp4, avx2::packed_fp4, avx2::packed_fp4}},
    {&avx2::packed_transposed_kernel<Dtype::i8>, &avx2::packed_transposed_kernel<Dtype::e4m3>},
};
}  // namespace jattn
