// AVX-512 F, BW, DQ, VL: products in float32.
#define JATTN_ISA avx512
#include "simd_avx512.h"
// the vectors come first
#include "flavour_f32.h"
#include "product.h"
#include "kernels.h"

namespace jattn {
extern const Kernels kAvx512;
const Kernels kAvx512 = {
    "avx512",
    {avx512::attend<avx512::Float32<Dtype::f32>>, avx512::attend<avx512::Float32<Dtype::f16>>,
     avx512::attend<avx512::Float32<Dtype::bf16>>, avx512::attend<avx512::Float32<Dtype::e4m3>>,
     avx512::attend<avx512::Float32<Dtype::e5m2>>, avx512::attend<avx512::Float32<Dtype::i8>>},
    avx512::write_rows,
    avx512::N,
};
}  // namespace jattn
