// What a kernel must find, computed in float64 one key at a time. Masks and pages are those of problem.h, which the
// Python suite judges; what is checked here are vectors, layouts, conversions and merging.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "lengths.h"
#include "numbers.h"

namespace jattn {

struct Judge {
    const Problem& p;
    bool narrow;  // products of bfloat16: weights are rounded to 8 bits
    double worst = 0.0;

    // Row `token` of query head `head`, query `position` of request `req`: true if as wanted.
    bool row(int req, int64_t token, int64_t position, int head) {
        const int kv_head = head / p.group;
        const Range see = visible(p, req, position);
        const double scale = p.scale * (double)(p.k_scale ? p.k_scale[kv_head] : 1.0f);
        std::vector<double> logits, values(p.vdim, 0.0), mass(p.vdim, 0.0);
        double top = -INFINITY, size = 0.0;
        for (int64_t j = see.lo; j < see.hi; j++) {
            const int64_t at = row_index(p, req, kv_head, j);
            double x = 0.0, terms = 0.0;
            for (int d = 0; d < p.dim; d++) {
                const double term = decode(p.q_type, p.q, (token * p.heads + head) * p.dim + d) *
                                    decode(p.kv_type, p.k, at * p.dim + d);
                x += term, terms += std::fabs(term);
            }
            const double factor = scale * (p.k_token_scale ? p.k_token_scale[at] : 1.0f);
            x *= factor;
            size = std::max(size, terms * std::fabs(factor));
            if (p.soft_cap != 0.0f) x = p.soft_cap * std::tanh(x / p.soft_cap);
            if (p.slopes) x += p.slopes[head] * (double)(j - position);
            size = std::max(size, std::fabs(x));
            logits.push_back(x);
            top = std::max(top, x);
        }
        const bool empty = logits.empty();
        if (p.sinks && !empty) top = std::max(top, (double)p.sinks[head]);
        double sum = p.sinks && !empty ? std::exp(p.sinks[head] - top) : 0.0;
        for (int64_t j = see.lo; j < see.hi; j++) {
            const int64_t at = row_index(p, req, kv_head, j);
            const double weight = std::exp(logits[j - see.lo] - top);
            const double scaled = weight * (p.v_token_scale ? p.v_token_scale[at] : 1.0f);
            sum += weight;
            for (int d = 0; d < p.vdim; d++) {
                const double x = scaled * decode(p.kv_type, p.v, at * p.vdim + d);
                values[d] += x, mass[d] += std::fabs(x);
            }
        }
        const double factor = empty ? 0.0 : (p.v_scale ? p.v_scale[kv_head] : 1.0f) / sum;
        const double relative = 1e-5 + 1e-6 * size + (narrow ? std::ldexp(1, -8) : 0.0);
        bool good = near(p.lse[token * p.heads + head], empty ? -INFINITY : top + std::log(sum), 1e-5 + 2e-6 * size);
        for (int d = 0; d < p.vdim; d++) {
            const double wanted = values[d] * factor;
            const double limit = mass[d] * factor * relative + std::fabs(wanted) * step_of(p.out_type) + 1e-6;
            good &= near(decode(p.out_type, p.out, (token * p.heads + head) * p.vdim + d), wanted, limit);
        }
        return good;
    }

    bool near(double seen, double wanted, double limit) {
        if (seen == wanted) return true;
        const double error = std::fabs(seen - wanted) / limit;
        worst = std::max(worst, error);
        return error <= 1.0;
    }

    // Every row of the batch, those of nobody included.
    bool all() {
        Problem& q = const_cast<Problem&>(p);
        const Problem given = p;
        Lengths lengths(q);
        bool good = true;
        int64_t token = 0;
        auto nobody = [&](int64_t end) {
            for (; token < end; token++)
                for (int head = 0; head < p.heads; head++) {
                    good &= p.lse[token * p.heads + head] == -INFINITY;
                    for (int d = 0; d < p.vdim; d++)
                        good &= decode(p.out_type, p.out, (token * p.heads + head) * p.vdim + d) == 0.0;
                }
        };
        nobody(p.query_start[0]);
        for (int r = 0; r < p.requests; r++) {
            const int64_t end = p.query_start[r + 1];
            for (int64_t i = token; i < end; i++)
                for (int head = 0; head < p.heads; head++) good &= row(r, i, p.seq_len[r] - end + i, head);
            token = std::max(token, end);
        }
        nobody(p.tokens);
        q = given;
        return good;
    }
};

// Every row that was written last to its slot holds its numbers, to the nearest code of the cache.
inline bool written(const Write& w, int64_t tokens) {
    std::vector<int64_t> last(w.blocks * w.block_size, -1);
    for (int64_t t = 0; t < tokens; t++)
        if (w.slots[t] >= 0 && w.slots[t] < w.blocks * w.block_size) last[w.slots[t]] = t;
    bool good = true;
    for (int64_t slot = 0; slot < (int64_t)last.size(); slot++)
        for (int head = 0; head < w.kv_heads; head++) {
            const int64_t row = slot / w.block_size * w.block_stride + head * w.head_stride +
                                slot % w.block_size * w.slot_stride;
            for (int d = 0; d < w.dim; d++) {
                const double seen = decode(w.to, w.k_pool, row * w.dim + d);
                if (last[slot] < 0) {
                    good &= seen == 0.0;
                    continue;
                }
                const double x = decode(w.from, w.k, (last[slot] * w.kv_heads + head) * w.dim + d) /
                                 (w.k_scale ? w.k_scale[head] : 1.0f) / (w.k_token_scale ? w.k_token_scale[row] : 1.0f);
                const double limit = std::max(std::fabs(x) * step_of(w.to), least_step(w.to)) * 0.5001 + 1e-9;
                good &= std::fabs(seen - x) <= limit;
            }
        }
    return good;
}

}  // namespace jattn
