// The matrix products of a tile on AMX: 16 x 16 sums from 16 x 16 words of A and of B a time, in the layout of
// product.h. JATTN_AMX_EMULATED computes the same without the instructions, for processors that have none.
#pragma once
#include "common.h"
#ifdef JATTN_AMX_EMULATED
#include "amx_emulated.h"
#endif

namespace JATTN_ISA {

constexpr int kTile = 16;  // rows of a tile
constexpr int kRows = 2 * kTile;
constexpr int kDepthStep = 16;  // words of a tile of A: weights and values are zero up to here

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The intrinsics do not tell the compiler that they read and write memory.
INL void memory_fence() { __asm__ volatile("" ::: "memory"); }

// Two blocks of rows meet NV of columns, so that every tile that is loaded serves two products: B comes from the second
// cache level. Tiles 0..3 hold the sums [row block][column block], 4 and 5 those of A, 6 and 7 those of B. Tile numbers
// are literals.
template <int NV, bool kAdd>
static void tile_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c, int64_t ldc,
                       const float* fade) {
    float* const lower = c + kTile * ldc;
    if (kAdd) {
        for (int m = 0; m < kRows; m++)
            for (int n = 0; n < NV; n++) store(c + m * ldc + n * N, mul(load(c + m * ldc + n * N), set1(fade[m])));
        memory_fence();
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
        _tile_loadd(5, a + kTile * lda + k, lda * 4);
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

// The unit is set up for as long as this lives.
struct Tiles {
    Tiles() {
        const TileShapes shapes;
        memory_fence();
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
};

template <class F, bool kAdd>
static void product(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int depth, float* c, int64_t ldc,
                    int vectors, const float* fade) {
    memory_fence();
    int n = 0;
    for (; n + 2 <= vectors; n += 2) tile_block<2, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, fade);
    if (n < vectors) tile_block<1, kAdd>(a, lda, b + n * N, ldb, depth, c + n * N, ldc, fade);
    memory_fence();
}

}  // namespace JATTN_ISA
