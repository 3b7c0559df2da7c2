// bfloat16 queries on processors with AMX: AMX tiles in prefill, float32 products in decode. (On these processors
// AVX-512's bfloat16 product takes two cycles: decode is 5 to 15 % faster with float32 products.)
#define JATTN_ISA amx_bf16
#include "simd_avx512.h"
// simd_*.h comes first: it defines the vectors that the others use
#include "bf16_avx512.h"
#include "compute_bf16.h"
#include "compute_f32.h"
#include "matmul_amx.h"
#include "kernels.h"
#include "product_bf16.h"

namespace jattn {
template <Dtype T>
constexpr auto attend_with_amx = amx_bf16::attend<amx_bf16::ComputeF32<T>, amx_bf16::ComputeBf16<T>>;

extern const IsaKernels kAmxBf16;
const IsaKernels kAmxBf16 = {
    "amx_bf16",
    {nullptr, nullptr, attend_with_amx<Dtype::bf16>, attend_with_amx<Dtype::e4m3>, attend_with_amx<Dtype::e5m2>,
     attend_with_amx<Dtype::i8>},
    16,
    amx_bf16::write_tokens,
    amx_bf16::draw,
    {nullptr, nullptr, &amx_bf16::product_kernel<amx_bf16::ProductBf16>},
    {},
    {},
};
}  // namespace jattn
