// The order in which the keys of a block are read, and the rows that products ask for while they consume others: at every
// moment a little ahead, so the memory is never idle, never asked in a burst, and what was asked for is still in L1 when
// its turn comes. Neighbours in this order lie a kStreams-th of a block apart: pages read side by side keep as many of
// the hardware's own streams going.
#pragma once
#include "common.h"

namespace JATTN_ISA {

constexpr int kStreams = 4;  // 1 or 2 are slower where pages are small, 8 get in each other's way where they are large

// Of a block of n keys, kStreams runs of this length are read side by side, a key of each in turn; the n % kStreams keys
// that are left come last.
INL int run_of(int n) { return n / kStreams; }

// Keys [t0, t0 + n) of a piece, as they are read.
INL void find_block(const Problem& p, const Work& w, int head, int t0, int n, int64_t* idx) {
    const int run = run_of(n), even = run * kStreams;
    for (int s = 0; s < kStreams; s++) find_keys(p, w, head, t0 + s * run, run, idx + s, kStreams);
    find_keys(p, w, head, t0 + even, n - even, idx + even);
}

// The numbers of those keys within the block, in the same order; `n` behind the last, up to the next whole vector.
INL void number_block(int n, float* place) {
    const int run = run_of(n), even = run * kStreams;
    for (int s = 0; s < kStreams; s++)
        for (int k = 0; k < run; k++) place[k * kStreams + s] = (float)(s * run + k);
    for (int t = even; t < n + NT; t++) place[t] = (float)(t < n ? t : n);
}

// Rows of a pool that are read one after the other.
struct Rows {
    const char* pool;
    int64_t bytes;  // of a row
    const int64_t* idx;
    int count;
    const char* at(int t) const { return pool + idx[t] * bytes; }
};

struct Stream {
    const char* next[kBlockKeys + 4 * N];  // the row that a product asks for beside its own; whole vectors of keys
    int64_t asked = 0, longest = 0;        // bytes of a row that the products ask for, and that there are
    int ahead = 0, count = 0;

    Stream(int64_t row_bytes, int64_t ahead_bytes) {
        const int64_t rows = ahead_bytes / (row_bytes ? row_bytes : 1) / NT * NT;
        ahead = (int)(rows < NT ? NT : rows > kBlockKeys / 2 ? kBlockKeys / 2 : rows);
    }
    // The first rows that anybody reads: nobody could ask for them.
    void begin(const Rows& x) {
        for (int t = 0; t < ahead && t < x.count; t++) row(x.at(t), 0, x.bytes);
    }
    // From now on products consume the rows `now`, then those of `then`; each asks for the row `ahead` of its own.
    void aim(const Rows& now, const Rows& then) {
        const int own = now.count > ahead ? now.count - ahead : 0, short_of = ahead - (now.count - own);
        count = 0, asked = now.bytes, longest = then.count ? then.bytes : 0;
        for (int t = 0; t < own; t++) next[count++] = now.at(ahead + t);
        for (int t = 0; t < short_of && t < then.count; t++) row(then.at(t), 0, then.bytes);
        for (int t = short_of; t < ahead && t < then.count; t++) next[count++] = then.at(t);
        for (int t = count; t < now.count + 4 * N; t++) next[t] = count ? next[count - 1] : now.pool;
        first_then = own;
    }
    // What the products did not ask for, where the rows that follow are longer than theirs.
    void rest() {
        if (asked < longest)
            for (int t = first_then; t < count; t++) row(next[t], asked, longest);
    }

   private:
    int first_then = 0;
    INL void row(const char* row, int64_t from, int64_t to) {
        for (int64_t c = from; c < to; c += 64) prefetch(row + c);
    }
};

// Bytes from .. from + kBytes - 1 of a row; `from` is a multiple of kBytes.
template <int kBytes>
INL void ask(const char* row, int64_t from) {
    if (kBytes >= 64 || from % 64 == 0)
        for (int c = 0; c < kBytes; c += 64) prefetch(row + from + c);
}

}  // namespace JATTN_ISA
