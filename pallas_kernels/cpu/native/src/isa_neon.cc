// NEON, which every arm64 has: products in float32.
#define JATTN_ISA neon
#include "simd_neon.h"
// the vectors come first
#include "flavour_f32.h"
#include "product.h"
#include "kernels.h"

namespace jattn {
extern const Kernels kNeon;
const Kernels kNeon = {
    "neon",
    {neon::attend<neon::Float32<Dtype::f32>>, neon::attend<neon::Float32<Dtype::f16>>,
     neon::attend<neon::Float32<Dtype::bf16>>, neon::attend<neon::Float32<Dtype::e4m3>>,
     neon::attend<neon::Float32<Dtype::e5m2>>, neon::attend<neon::Float32<Dtype::i8>>},
    neon::write_rows,
    neon::N,
};
}  // namespace jattn
