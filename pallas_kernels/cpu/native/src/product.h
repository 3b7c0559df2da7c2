// The matrix products of a tile, on words: C[rows][cols] = fade * C + A[rows][depth] * B[depth][cols].
#pragma once
#include "ahead.h"

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

// `rows` is rounded up to kRows: the scratch behind the last row must exist. seen[m / kRows] keys are visible to a
// register block: columns of q k, depth of p v (kDepth); what lies behind is not computed.
template <class F, bool kDepth, bool kAdd>
static void product(int rows, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c,
                    int64_t ldc, int vectors, const float* fade, const int* seen, const Ahead& ahead) {
    for (int m = 0; m < rows; m += kRows) {
        Ahead::fetch(ahead, m, kRows, rows);
        if (kDepth)
            depth = F::kPairs ? (seen[m / kRows] + 1) / 2 : seen[m / kRows];
        else
            vectors = (seen[m / kRows] + N - 1) / N;
        const uint32_t* am = a + m * lda;
        float* cm = c + m * ldc;
        const float* fm = kAdd ? fade + m : nullptr;
        int n = 0;
        for (; n + kPanel <= vectors; n += kPanel)
            register_block<F, kPanel, kAdd>(am, lda, b + n * N, ldb, depth, cm + n * N, ldc, fm);
        switch (vectors - n) {
            case 3:
                if constexpr (kPanel > 3)
                    register_block<F, 3, kAdd>(am, lda, b + n * N, ldb, depth, cm + n * N, ldc, fm);
                break;
            case 2:
                if constexpr (kPanel > 2)
                    register_block<F, 2, kAdd>(am, lda, b + n * N, ldb, depth, cm + n * N, ldc, fm);
                break;
            case 1: register_block<F, 1, kAdd>(am, lda, b + n * N, ldb, depth, cm + n * N, ldc, fm); break;
        }
    }
}

}  // namespace JATTN_ISA
