// Rows that a later tile reads: fetched a few at a time while a product keeps the arithmetic busy.
#pragma once
#include "common.h"

namespace JATTN_ISA {

struct Ahead {
    const char* pool;
    const int64_t* idx;
    int count;
    int64_t row_bytes;
    INL void row(const Ahead& x, int t) {
        for (int64_t c = 0; c < x.row_bytes; c += 64) prefetch_far(x.pool + x.idx[t] * x.row_bytes + c);
    }
    INL void all(const Ahead& x) {
        for (int t = 0; t < x.count; t++) row(x, t);
    }
    // The share of the `block` rows from row m on, of `rows` in all.
    INL void fetch(const Ahead& x, int m, int block, int rows) {
        const int first = x.count * m / rows, last = m + block >= rows ? x.count : x.count * (m + block) / rows;
        for (int t = first; t < last; t++) row(x, t);
    }
};

}  // namespace JATTN_ISA
