// AMX tiles for the products of prefill, AVX-512 with bfloat16 products for decode: for bfloat16 queries.
#define JATTN_ISA amx_bf16
#include "simd_avx512.h"
// the vectors come first
#include "pairs_avx512.h"
#include "flavour_bf16.h"
#include "product_amx.h"
#include "kernels.h"

namespace jattn {
extern const Kernels kAmxBf16;
const Kernels kAmxBf16 = {
    "amx_bf16",
    {nullptr, nullptr, amx_bf16::attend<amx_bf16::Bfloat16<Dtype::bf16>>,
     amx_bf16::attend<amx_bf16::Bfloat16<Dtype::e4m3>>, amx_bf16::attend<amx_bf16::Bfloat16<Dtype::e5m2>>,
     amx_bf16::attend<amx_bf16::Bfloat16<Dtype::i8>>},
    amx_bf16::write_rows,
    amx_bf16::N,
};
}  // namespace jattn
