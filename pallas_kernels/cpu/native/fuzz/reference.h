// Checks the results of both calls against a float64 computation, one key at a time. Masks and page addresses are taken
// from args.h: the Python tests check those. This checks SIMD, layouts, conversions and the merge of splits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "clamped_lengths.h"
#include "stored_values.h"

namespace jattn {

struct AttendCheck {
    AttentionArgs args;  // a copy: all_tokens clamps its lengths
    bool bf16_products;  // weights are rounded to the 8 bits of a bfloat16
    double worst = 0.0;  // the largest error so far, over the tolerance

    // True if out and lse of this token and head are within the tolerance.
    bool row(int request, int64_t token, int64_t position, int head) {
        const int kv_head = head / args.group_size;
        const KeyRange keys = visible_keys(args, request, position);
        const double scale = args.scale * (double)(args.k_scale ? args.k_scale[kv_head] : 1.0f);
        std::vector<double> logits, values(args.v_head_dim, 0.0), mass(args.v_head_dim, 0.0);
        double top = -INFINITY, size = 0.0;
        for (int64_t j = keys.begin; j < keys.end; j++) {
            const int64_t at = pool_row(args, request, kv_head, j);
            double x = 0.0, terms = 0.0;
            for (int d = 0; d < args.head_dim; d++) {
                const int behind = d - args.latent_dim;  // the column of k; below 0: a column of the latent
                const double term =
                    stored_value(args.q_dtype, args.q, (token * args.num_heads + head) * args.head_dim + d) *
                    (behind < 0 ? stored_value(args.kv_dtype, args.v, at * args.v_row + d)
                                : stored_value(args.kv_dtype, args.k, at * args.k_row + behind));
                x += term, terms += std::fabs(term);
            }
            const double factor = scale * (args.k_token_scale ? args.k_token_scale[at] : 1.0f);
            x *= factor;
            size = std::max(size, terms * std::fabs(factor));
            if (args.soft_cap != 0.0f) x = args.soft_cap * std::tanh(x / args.soft_cap);
            if (args.alibi_slopes) x += args.alibi_slopes[head] * (double)(j - position);
            size = std::max(size, std::fabs(x));
            logits.push_back(x);
            top = std::max(top, x);
        }
        const bool empty = logits.empty();
        if (args.sinks && !empty) top = std::max(top, (double)args.sinks[head]);
        double sum = args.sinks && !empty ? std::exp(args.sinks[head] - top) : 0.0;
        for (int64_t j = keys.begin; j < keys.end; j++) {
            const int64_t at = pool_row(args, request, kv_head, j);
            const double weight = std::exp(logits[j - keys.begin] - top);
            const double scaled = weight * (args.v_token_scale ? args.v_token_scale[at] : 1.0f);
            sum += weight;
            for (int d = 0; d < args.v_head_dim; d++) {
                const double x = scaled * stored_value(args.kv_dtype, args.v, at * args.v_row + d);
                values[d] += x, mass[d] += std::fabs(x);
            }
        }
        const double factor = empty ? 0.0 : (args.v_scale ? args.v_scale[kv_head] : 1.0f) / sum;
        const double relative = 1e-5 + 1e-6 * size + (bf16_products ? std::ldexp(1, -8) : 0.0);
        bool good = within(args.lse[token * args.num_heads + head], empty ? -INFINITY : top + std::log(sum),
                           1e-5 + 2e-6 * size);
        for (int d = 0; d < args.v_head_dim; d++) {
            const double wanted = values[d] * factor;
            const double limit = mass[d] * factor * relative + std::fabs(wanted) * relative_step(args.out_dtype) + 1e-6;
            good &=
                within(stored_value(args.out_dtype, args.out, (token * args.num_heads + head) * args.v_head_dim + d),
                       wanted, limit);
        }
        return good;
    }

    bool within(double seen, double wanted, double limit) {
        if (seen == wanted) return true;
        const double error = std::fabs(seen - wanted) / limit;
        worst = std::max(worst, error);
        return error <= 1.0;
    }

    // Checks every token, and that those of no request are out = 0, lse = -inf.
    bool all_tokens() {
        ClampedLengths lengths(args);
        bool good = true;
        int64_t token = 0;
        auto check_cleared = [&](int64_t end) {
            for (; token < end; token++)
                for (int head = 0; head < args.num_heads; head++) {
                    good &= args.lse[token * args.num_heads + head] == -INFINITY;
                    for (int d = 0; d < args.v_head_dim; d++)
                        good &= stored_value(args.out_dtype, args.out,
                                             (token * args.num_heads + head) * args.v_head_dim + d) == 0.0;
                }
        };
        check_cleared(args.query_start_loc[0]);
        for (int r = 0; r < args.num_reqs; r++) {
            const int64_t end = args.query_start_loc[r + 1];
            for (int64_t i = token; i < end; i++)
                for (int head = 0; head < args.num_heads; head++) good &= row(r, i, args.seq_lens[r] - end + i, head);
            token = std::max(token, end);
        }
        check_cleared(args.num_tokens);
        return good;
    }
};

// True if every slot holds the keys of the last token that was written to it, rounded to the nearest number of the
// cache's dtype, and the other slots are unchanged.
inline bool check_write(const WriteArgs& args, int64_t num_tokens) {
    std::vector<int64_t> last_token(args.num_blocks * args.block_size, -1);
    for (int64_t t = 0; t < num_tokens; t++)
        if (args.slot_mapping[t] >= 0 && args.slot_mapping[t] < args.num_blocks * args.block_size)
            last_token[args.slot_mapping[t]] = t;
    bool good = true;
    for (int64_t slot = 0; slot < (int64_t)last_token.size(); slot++)
        for (int head = 0; head < args.num_kv_heads; head++) {
            const int64_t row = slot / args.block_size * args.block_stride + head * args.head_stride +
                                slot % args.block_size * args.slot_stride;
            for (int d = 0; d < args.head_dim; d++) {
                const double seen = stored_value(args.kv_dtype, args.k_pool, row * args.head_dim + d);
                if (last_token[slot] < 0) {
                    good &= seen == 0.0;
                    continue;
                }
                const double x = stored_value(args.input_dtype, args.k,
                                              (last_token[slot] * args.num_kv_heads + head) * args.head_dim + d) /
                                 (args.k_scale ? args.k_scale[head] : 1.0f) /
                                 (args.k_token_scale ? args.k_token_scale[row] : 1.0f);
                const double limit =
                    std::max(std::fabs(x) * relative_step(args.kv_dtype), smallest_step(args.kv_dtype)) * 0.5001 + 1e-9;
                good &= std::fabs(seen - x) <= limit;
            }
        }
    return good;
}

}  // namespace jattn
