// AVX2, FMA, F16C: products in float32.
#define JATTN_ISA avx2
#include "simd_avx2.h"
// the vectors come first
#include "flavour_f32.h"
#include "product.h"
#include "kernels.h"

namespace jattn {
extern const Kernels kAvx2;
const Kernels kAvx2 = {
    "avx2",
    {avx2::attend<avx2::Float32<Dtype::f32>>, avx2::attend<avx2::Float32<Dtype::f16>>,
     avx2::attend<avx2::Float32<Dtype::bf16>>, avx2::attend<avx2::Float32<Dtype::e4m3>>,
     avx2::attend<avx2::Float32<Dtype::e5m2>>, avx2::attend<avx2::Float32<Dtype::i8>>},
    avx2::write_rows,
    avx2::N,
};
}  // namespace jattn
