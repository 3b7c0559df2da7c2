// The arguments of the sampling floor as plain structs: see sampling_floor.h.
#pragma once
#include <cstdint>

namespace jattn {

constexpr int kFloorBuckets = 1 << 11;  // of a histogram
constexpr int kFloorTables = 4;         // that a histogram is added up from
constexpr int kFloorGroup = 32;         // logits of which the maximum is known; a multiple of every N

inline int64_t num_groups(int64_t n) { return (n + kFloorGroup - 1) / kFloorGroup; }

// Rows of logits minus their maximum, and what top_k and top_p keep of each.
struct FloorArgs {
    const float* scaled;   // [rows vocab]
    const int32_t* top_k;  // [rows]; 0 or less, or `vocab` or more: off
    const float* top_p;    // [rows]; 1 or more, or NaN: off
    uint32_t* floor;       // [rows] ordered bits
    int64_t rows, vocab;
    bool has_top_k(int64_t row) const { return top_k[row] > 0 && top_k[row] < vocab; }
    bool has_top_p(int64_t row) const { return top_p[row] < 1.0f && vocab > 0; }
};

// Memory of one row.
struct FloorScratch {
    double* sums;   // [kFloorTables kFloorBuckets]
    float* logits;  // [vocab]
    float* maxima;  // [num_groups(vocab)]
};

}  // namespace jattn
