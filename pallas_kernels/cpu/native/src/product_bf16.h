// Products of bfloat16 rows with bfloat16 weights, two inputs at a time. A word is two inputs of a row.
#pragma once
#include "product.h"

namespace JATTN_ISA {

struct ProductBf16 {
    static constexpr Dtype kDtype = Dtype::bf16;
    static constexpr int kStep = 2;
    using Weights = vw;
    INL void load_weights(const char* w, int64_t stride, vw& a, vw& b) {
        const vw x = load_bf16<Dtype::bf16>(w, 0), y = load_bf16<Dtype::bf16>(w + stride, 0);
        a = zip_low(x, y), b = zip_high(x, y);
    }
    INL vw load_copy(const uint32_t* p) { return load_words(p); }
    INL void store_copy(uint32_t* p, vw w) { store_words(p, w); }
    INL vf multiply_add(vw w, const uint32_t* x, vf sum) { return dot_bf16(sum, w, set1_word(x)); }
    INL void restore_order(float* sums) { unzip_columns(sums, kTileColumns); }
    static void pack_row(const char* row, int64_t inputs, uint32_t* to, int stride) {
        const int64_t pairs = inputs / 2;
        for (int64_t s = 0; s < pairs; s++) std::memcpy(to + s * stride, row + 4 * s, 4);
        if (inputs % 2) {
            uint16_t last;
            std::memcpy(&last, row + 4 * pairs, 2);
            to[pairs * stride] = last;
        }
    }

    using Part = vw;
    INL vw load_part(const char* row, int64_t k) { return load_bf16<Dtype::bf16>(row, k); }
    INL vw load_tail(const char* row, int64_t k, int n) { return load_bf16<Dtype::bf16>(row, k, n); }
    INL vf dot(vw x, vw y, vf sum) { return dot_bf16(sum, x, y); }
};

}  // namespace JATTN_ISA
