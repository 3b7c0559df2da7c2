// AMX tiles for the products of prefill, float32 for decode: for bfloat16 queries. (Processors with AMX take two cycles
// for AVX-512's products of bfloat16; decode is 5 to 15 % faster without them there.)
#define JATTN_ISA amx_bf16
#include "simd_avx512.h"
// the vectors come first
#include "pairs_avx512.h"
#include "flavour_bf16.h"
#include "flavour_f32.h"
#include "product_amx.h"
#include "kernels.h"

namespace jattn {
template <Dtype T>
constexpr auto attend_with_tiles = amx_bf16::attend<amx_bf16::Float32<T>, amx_bf16::Bfloat16<T>>;

extern const Kernels kAmxBf16;
const Kernels kAmxBf16 = {
    "amx_bf16",
    {nullptr, nullptr, attend_with_tiles<Dtype::bf16>, attend_with_tiles<Dtype::e4m3>, attend_with_tiles<Dtype::e5m2>,
     attend_with_tiles<Dtype::i8>},
    amx_bf16::write_rows,
    amx_bf16::N,
};
}  // namespace jattn
