// The order in which the short kernel reads a piece (keys of a block, its values, keys of the next), walked kLead bytes
// ahead of the products. A few lines at a time, evenly between them: a burst of prefetches fills the miss buffers, and
// the products behind it wait.
#pragma once
#include "common.h"

namespace JATTN_ISA {

constexpr int kLead = 8192;  // measured on Zen 5: from 6 to 16 KiB it hardly matters, 4 KiB is too short

struct Stream {
    const char* pool[2];  // keys, values
    int64_t row_bytes[2];
    const int64_t* idx;  // rows in the pools, `count` of them
    int count;
    int half, block, t, stop;  // row t of a block's keys or values, which end at `stop`
    const char *at, *end;      // what is left of that row
    int due;                   // bytes asked for that do not fill a line yet

    Stream(const Problem& p, int64_t k_bytes, int64_t v_bytes, const int64_t* idx, int count)
        : pool{p.k, p.v}, row_bytes{k_bytes, v_bytes}, idx(idx), count(count) {
        go(0, 0, 0);
        if (count) fetch(kLead);
    }

    // The products now begin with a block's keys (0) or values (1).
    void seek(int now, int first) { go(now, first, (int)(kLead / row_bytes[now])); }

    // The products are about to consume this many bytes.
    inline __attribute__((always_inline)) void fetch(int bytes) {
        for (due += bytes; due >= 64; due -= 64, at += 64) {
            if (at >= end) {
                if (++t >= stop) turn();
                enter();
            }
            prefetch(at);
        }
    }

   private:
    void go(int now, int first, int rows) {
        half = now, block = first, t = first + rows, due = 0;
        stop = block + kBlockKeys < count ? block + kBlockKeys : count;
        if (const int over = t - stop; over >= 0) {
            turn();
            t += over;
        }
        if (count) enter();
    }
    void turn() {
        if (half) {
            block += kBlockKeys;
            stop = block + kBlockKeys < count ? block + kBlockKeys : count;
        }
        half = !half;
        t = block;
    }
    void enter() {  // behind the end of the piece: its last row, which is there already
        at = pool[half] + idx[t < count ? t : count - 1] * row_bytes[half];
        end = at + row_bytes[half];
    }
};

}  // namespace JATTN_ISA
