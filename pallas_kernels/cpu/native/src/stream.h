// The rows that the next half of a block reads (the values of this block, the keys of the next one): every product asks
// for one of them while it consumes its own, so the memory is never idle and never asked in a burst. Neighbours in this
// order lie kStreams-ths of a block apart: pages that are read side by side keep as many of the hardware's own streams
// going (twice the bandwidth of one page after the other, measured on Ice Lake with pages of 4 KiB).
#pragma once
#include "common.h"

namespace JATTN_ISA {

constexpr int kStreams = 8;  // 4 and 16 are within noise of it; 1 is a quarter slower

struct Stream {
    const char* next[kBlockKeys + 4 * N];  // the row that a product asks for beside its own; whole vectors of keys
    int64_t row_bytes = 0, asked = 0;      // of a row, and how many of them the products ask for
    int rows = 0;

    // From now on the products ask for rows idx[0..count-1] of `pool`, `used` bytes of each.
    void aim(const char* pool, int64_t bytes, int64_t used, const int64_t* idx, int count) {
        rows = 0, row_bytes = bytes, asked = used;
        const int run = (count + kStreams - 1) / kStreams;
        for (int step = 0; step < run; step++)
            for (int t = step; t < count; t += run) next[rows++] = pool + idx[t] * bytes;
        for (int t = rows; t < kBlockKeys + 4 * N; t++) next[t] = rows ? next[rows - 1] : pool;
    }
    // What the products did not ask for: the far end of longer rows, or whole rows where there was no product.
    void rest() {
        if (asked < row_bytes)
            for (int t = 0; t < rows; t++)
                for (int64_t c = asked; c < row_bytes; c += 64) prefetch(next[t] + c);
    }
};

// Bytes from .. from + kBytes - 1 of a row; `from` is a multiple of kBytes.
template <int kBytes>
INL void ask(const char* row, int64_t from) {
    if (kBytes >= 64 || from % 64 == 0)
        for (int c = 0; c < kBytes; c += 64) prefetch(row + from + c);
}

}  // namespace JATTN_ISA
