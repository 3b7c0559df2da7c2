// AVX-512 F, BW, DQ, VL: products in float32.
#define JATTN_ISA avx512
#include "simd_avx512.h"
// simd_*.h comes first: it defines the vectors that the others use
#include "compute_f32.h"
#include "matmul.h"
#include "kernels.h"
#include "product_packed.h"

namespace jattn {
extern const IsaKernels kAvx512;
const IsaKernels kAvx512 = {
    "avx512",
    {avx512::attend<avx512::ComputeF32<Dtype::f32>>, avx512::attend<avx512::ComputeF32<Dtype::f16>>,
     avx512::attend<avx512::ComputeF32<Dtype::bf16>>, avx512::attend<avx512::ComputeF32<Dtype::e4m3>>,
     avx512::attend<avx512::ComputeF32<Dtype::e5m2>>, avx512::attend<avx512::ComputeF32<Dtype::i8>>},
    64,
    avx512::write_tokens,
    avx512::draw,
    {&avx512::product_kernel<avx512::ProductF32<Dtype::f32>>, &avx512::product_kernel<avx512::ProductF32<Dtype::f16>>,
     &avx512::product_kernel<avx512::ProductF32<Dtype::bf16>>},
    {{avx512::packed_int8, avx512::packed_int8, avx512::packed_int8},
     {avx512::packed_fp8, avx512::packed_fp8, avx512::packed_fp8},
     {avx512::packed_int4, avx512::packed_int4, avx512::packed_int4},
     {avx512::packed_fp4, avx512::packed_fp4, avx512::packed_fp4}},
    {&avx512::packed_transposed_kernel<Dtype::i8>, &avx512::packed_transposed_kernel<Dtype::e4m3>},
};
}  // namespace jattn
