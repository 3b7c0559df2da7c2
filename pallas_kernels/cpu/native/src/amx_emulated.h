// The AMX instructions that matmul_amx.h uses, in C++: processors without AMX can test its layout.
#pragma once
#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release

namespace jattn {

struct EmulatedTile {
    uint32_t words[16][16];
};
inline thread_local EmulatedTile emulated[8];

inline float upper_half_as_float(uint32_t word) {
    word &= 0xffff0000u;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}
inline void emulated_load(int tile, const void* from, int64_t stride) {
    for (int m = 0; m < 16; m++) std::memcpy(emulated[tile].words[m], (const char*)from + m * stride, 64);
}
inline void emulated_store(int tile, void* to, int64_t stride) {
    for (int m = 0; m < 16; m++) std::memcpy((char*)to + m * stride, emulated[tile].words[m], 64);
}
inline void emulated_dot(int sums, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++) {
                float sum;
                std::memcpy(&sum, &emulated[sums].words[m][n], 4);
                const uint32_t x = emulated[a].words[m][k], y = emulated[b].words[k][n];
                sum += upper_half_as_float(x << 16) * upper_half_as_float(y << 16);
                sum += upper_half_as_float(x) * upper_half_as_float(y);
                std::memcpy(&emulated[sums].words[m][n], &sum, 4);
            }
}

}  // namespace jattn

#define _tile_loadconfig(shapes) ((void)(shapes))
#define _tile_release() ((void)0)
#define _tile_zero(tile) std::memset(&jattn::emulated[tile], 0, sizeof(jattn::EmulatedTile))
#define _tile_loadd(tile, from, stride) jattn::emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) jattn::emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) jattn::emulated_dot(sums, a, b)
