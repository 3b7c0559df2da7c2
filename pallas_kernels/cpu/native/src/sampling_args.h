// The arguments of a draw as plain structs: see draw.h and sampling_floor.h.
#pragma once
#include <cstdint>

namespace jattn {

constexpr int kFloorBuckets = 1 << 11;  // of a histogram
constexpr int kFloorTables = 4;         // that a histogram is added up from
constexpr int kFloorGroup = 32;         // logits of which the maximum is known; a multiple of every N

inline int64_t num_groups(int64_t n) { return (n + kFloorGroup - 1) / kFloorGroup; }

// Rows of logits, and the rules by which a token of each is drawn. A scaled logit is the logit minus the maximum of its
// row, divided by the temperature; a draw takes the largest sum of scaled logit and noise.
struct DrawArgs {
    const float* logits;       // [rows vocab]
    const float* temperature;  // [rows]; 0 or less, or NaN: no draw but the likeliest token
    const int32_t* top_k;      // [rows]; 0 or less, or `vocab` or more: off
    const float* top_p;        // [rows]; 1 or more, or NaN: off
    const float* least;        // [rows] tokens whose scaled logit is less are not drawn; -inf, or NaN: off
    const uint32_t* keys;      // [rows 2] of the noise
    int32_t* tokens;           // [rows]
    float* floors;             // [rows] the least scaled logit that top_k and top_p keep; -inf: they keep all
    int64_t rows, vocab;
    bool has_top_k(int64_t row) const { return top_k[row] > 0 && top_k[row] < vocab; }
    bool has_top_p(int64_t row) const { return top_p[row] < 1.0f; }
};

// Memory of one row.
struct DrawScratch {
    double* sums;   // [kFloorTables kFloorBuckets]
    float* logits;  // [vocab]
    float* maxima;  // [num_groups(vocab), rounded up to a multiple of kFloorGroup]
};

}  // namespace jattn
