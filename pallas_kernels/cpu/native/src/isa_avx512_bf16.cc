// AVX-512 with bfloat16 products: for bfloat16 queries; other queries are served by isa_avx512.cc.
#define JATTN_ISA avx512_bf16
#include "simd_avx512.h"
// the vectors come first
#include "pairs_avx512.h"
#include "flavour_bf16.h"
#include "product.h"
#include "kernels.h"

namespace jattn {
extern const Kernels kAvx512Bf16;
const Kernels kAvx512Bf16 = {
    "avx512_bf16",
    {nullptr, nullptr, avx512_bf16::attend<avx512_bf16::Bfloat16<Dtype::bf16>>,
     avx512_bf16::attend<avx512_bf16::Bfloat16<Dtype::e4m3>>, avx512_bf16::attend<avx512_bf16::Bfloat16<Dtype::e5m2>>,
     avx512_bf16::attend<avx512_bf16::Bfloat16<Dtype::i8>>},
    avx512_bf16::write_rows,
    avx512_bf16::N,
};
}  // namespace jattn
