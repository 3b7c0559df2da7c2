// The matrix products of a tile, on words: C[kRows][cols] = fade * C + A[kRows][depth] * B[depth][cols].
#pragma once
#include "common.h"

namespace JATTN_ISA {

constexpr int kRows = 6;  // rows of a register block: kRows * kPanel accumulators
constexpr int kDepthStep = 1;

template <class F, int NV, bool kAdd>
static __attribute__((noinline)) void register_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                                                     int depth, float* c, int64_t ldc, const float* fade) {
    vf x[kRows][NV];
#pragma GCC unroll 6
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) x[m][n] = kAdd ? mul(load(c + m * ldc + n * N), set1(fade[m])) : zero();
    for (int k = 0; k < depth; k++) {
        vw y[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) y[n] = load_words(b + k * ldb + n * N);
#pragma GCC unroll 6
        for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) x[m][n] = F::multiply(x[m][n], a + m * lda + k, y[n]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < kRows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) store(c + m * ldc + n * N, x[m][n]);
}

struct Tiles {};  // nothing to prepare: see product_amx.h

// One block of kRows rows; `vectors` columns of N.
template <class F, bool kAdd>
static void product(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c, int64_t ldc,
                    int vectors, const float* fade) {
    int n = 0;
    for (; n + kPanel <= vectors; n += kPanel)
        register_block<F, kPanel, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, fade);
    switch (vectors - n) {
        case 3:
            if constexpr (kPanel > 3) register_block<F, 3, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, fade);
            break;
        case 2:
            if constexpr (kPanel > 2) register_block<F, 2, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, fade);
            break;
        case 1: register_block<F, 1, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, fade); break;
    }
}

}  // namespace JATTN_ISA
