// Software prefetch of rows of the pool. Decode asks for each row a fixed distance before it is read, so that the
// memory is always busy and the row is still in L1 when its turn comes. Prefill asks for the next tile during its
// products.
#pragma once
#include "common.h"

namespace JATTN_ISA {

// Rows of a pool in the order in which they are read.
struct PoolRows {
    const char* pool;
    int64_t row_bytes;
    const int64_t* rows;
    int count;
    const char* at(int t) const { return pool + rows[t] * row_bytes; }
};

// For decode. The products read a row of their own and prefetch next_rows[t] beside it.
struct DecodePrefetch {
    const char* next_rows[kDecodeTileKeys + 4 * N];  // padded: the products read whole vectors of keys

    DecodePrefetch(int64_t row_bytes, int64_t distance_bytes) {
        const int64_t rows = distance_bytes / (row_bytes ? row_bytes : 1) / kKeysPerVector * kKeysPerVector;
        distance_ = (int)(rows < kKeysPerVector        ? kKeysPerVector
                          : rows > kDecodeTileKeys / 2 ? kDecodeTileKeys / 2
                                                       : rows);
    }
    // Prefetches the first rows of a unit at once.
    void start(const PoolRows& rows) {
        for (int t = 0; t < distance_ && t < rows.count; t++) prefetch_row(rows.at(t), 0, rows.row_bytes);
    }
    // The products will now read the rows `current`, and after them `following`: sets next_rows to the row that is
    // distance_ rows later.
    void set_rows(const PoolRows& current, const PoolRows& following) {
        const int own = current.count > distance_ ? current.count - distance_ : 0;
        const int missed = distance_ - (current.count - own);  // rows of `following` that have no row of `current` left
        count_ = 0, requested_bytes_ = current.row_bytes, following_bytes_ = following.count ? following.row_bytes : 0;
        for (int t = 0; t < own; t++) next_rows[count_++] = current.at(distance_ + t);
        for (int t = 0; t < missed && t < following.count; t++) prefetch_row(following.at(t), 0, following.row_bytes);
        for (int t = missed; t < distance_ && t < following.count; t++) next_rows[count_++] = following.at(t);
        for (int t = count_; t < current.count + 4 * N; t++)
            next_rows[t] = count_ ? next_rows[count_ - 1] : current.pool;
        first_following_ = own;
    }
    // Prefetches the ends of the following rows where they are longer than the current ones.
    void finish_rows() {
        if (requested_bytes_ < following_bytes_)
            for (int t = first_following_; t < count_; t++)
                prefetch_row(next_rows[t], requested_bytes_, following_bytes_);
    }

   private:
    int64_t requested_bytes_ = 0, following_bytes_ = 0;  // of a row
    int distance_ = 0, count_ = 0, first_following_ = 0;
    INL void prefetch_row(const char* row, int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; c += 64) prefetch(row + c);
    }
};

// Prefetches bytes begin .. begin + kBytes - 1 of a row; `begin` is a multiple of kBytes.
template <int kBytes>
INL void prefetch_part(const char* row, int64_t begin) {
    if (kBytes >= 64 || begin % 64 == 0)
        for (int c = 0; c < kBytes; c += 64) prefetch(row + begin + c);
}

// For prefill: whole rows, into the second cache level.
INL void prefetch_row_far(const PoolRows& rows, int t) {
    for (int64_t c = 0; c < rows.row_bytes; c += 64) prefetch_far(rows.at(t) + c);
}
INL void prefetch_rows_far(const PoolRows& rows) {
    for (int t = 0; t < rows.count; t++) prefetch_row_far(rows, t);
}
// Divides `rows` over num_queries query rows and prefetches the share of query rows r .. r + block - 1.
INL void prefetch_share_far(const PoolRows& rows, int r, int block, int num_queries) {
    const int first = rows.count * r / num_queries;
    const int last = r + block >= num_queries ? rows.count : rows.count * (r + block) / num_queries;
    for (int t = first; t < last; t++) prefetch_row_far(rows, t);
}

}  // namespace JATTN_ISA
