// The matrix products of prefill on AMX, with the interface and layout of matmul.h. One instruction multiplies 16 x 16
// words of A with 16 x 16 words of B. JATTN_EMULATE_AMX replaces the instructions by C++, for processors without AMX.
#pragma once
#include "common.h"
#ifdef JATTN_EMULATE_AMX
#include "amx_emulated.h"
#endif

namespace JATTN_ISA {

constexpr int kAmxRows = 16;  // rows of a tile register
constexpr int kBlockRows = 2 * kAmxRows;
constexpr int kDepthStep = 16;  // `depth` is rounded up to a multiple: A and B have zeros there

struct alignas(64) AmxTileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The intrinsics do not tell the compiler that they read and write memory.
INL void compiler_fence() { __asm__ volatile("" ::: "memory"); }

// Two tiles of rows times NV tiles of columns: with NV = 2 each tile that is loaded is used in two products, which
// halves the reads of B from the second cache level. Tile registers: 0..3 hold the sums [row tile][column tile], 4 and
// 5 A, 6 and 7 B. The intrinsics accept only literals.
template <int NV, bool kAdd>
static void amx_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c, int64_t ldc,
                      const float* rescale) {
    float* const lower = c + kAmxRows * ldc;
    if (kAdd) {
        for (int m = 0; m < kBlockRows; m++)
            for (int n = 0; n < NV; n++) store(c + m * ldc + n * N, mul(load(c + m * ldc + n * N), set1(rescale[m])));
        compiler_fence();
        _tile_loadd(0, c, ldc * 4);
        _tile_loadd(2, lower, ldc * 4);
        if (NV > 1) _tile_loadd(1, c + N, ldc * 4);
        if (NV > 1) _tile_loadd(3, lower + N, ldc * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < depth; k += kDepthStep) {
        _tile_loadd(6, b + k * ldb, ldb * 4);
        _tile_loadd(4, a + k, lda * 4);
        _tile_loadd(5, a + kAmxRows * lda + k, lda * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (NV > 1) {
            _tile_loadd(7, b + k * ldb + N, ldb * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(2, lower, ldc * 4);
    if (NV > 1) _tile_stored(1, c + N, ldc * 4);
    if (NV > 1) _tile_stored(3, lower + N, ldc * 4);
}

// The tile registers are configured for as long as this object lives.
struct MatmulScope {
    MatmulScope() {
        const AmxTileConfig shapes;
        compiler_fence();
        _tile_loadconfig(&shapes);
    }
    ~MatmulScope() { _tile_release(); }
};

template <class Compute, bool kAdd>
static void matmul(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c, int64_t ldc,
                   int vectors, const float* rescale) {
    compiler_fence();
    int n = 0;
    for (; n + 2 <= vectors; n += 2) amx_block<2, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, rescale);
    if (n < vectors) amx_block<1, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, rescale);
    compiler_fence();
}

}  // namespace JATTN_ISA
