// The matrix products of prefill, on words: C[kBlockRows][cols] = rescale * C + A[kBlockRows][depth] * B[depth][cols].
// rescale is one factor per row; kAdd = false: C = A * B.
#pragma once
#include "common.h"

namespace JATTN_ISA {

constexpr int kBlockRows = 6;  // of a register block, which has kBlockRows x kBlockVectors accumulators
constexpr int kDepthStep = 1;  // `depth` is rounded up to a multiple: A and B have zeros there

template <class Compute, int NV, bool kAdd>
static __attribute__((noinline)) void register_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                                                     int depth, float* c, int64_t ldc, const float* rescale) {
    vf x[kBlockRows][NV];
#pragma GCC unroll 6
    for (int m = 0; m < kBlockRows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) x[m][n] = kAdd ? mul(load(c + m * ldc + n * N), set1(rescale[m])) : zero();
    for (int k = 0; k < depth; k++) {
        vw y[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) y[n] = load_words(b + k * ldb + n * N);
#pragma GCC unroll 6
        for (int m = 0; m < kBlockRows; m++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) x[m][n] = Compute::multiply_add(x[m][n], a + m * lda + k, y[n]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < kBlockRows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < NV; n++) store(c + m * ldc + n * N, x[m][n]);
}

struct MatmulScope {};  // only matmul_amx.h has something to set up

// One block of kBlockRows rows; `vectors` * N columns.
template <class Compute, bool kAdd>
static void matmul(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c, int64_t ldc,
                   int vectors, const float* rescale) {
    int n = 0;
    for (; n + kBlockVectors <= vectors; n += kBlockVectors)
        register_block<Compute, kBlockVectors, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, rescale);
    switch (vectors - n) {
        case 3:
            if constexpr (kBlockVectors > 3)
                register_block<Compute, 3, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, rescale);
            break;
        case 2:
            if constexpr (kBlockVectors > 2)
                register_block<Compute, 2, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, rescale);
            break;
        case 1: register_block<Compute, 1, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, rescale); break;
    }
}

}  // namespace JATTN_ISA
