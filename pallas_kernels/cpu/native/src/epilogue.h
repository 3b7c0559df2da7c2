// From a row's softmax state (maximum, sum, accumulators) to out and lse. The splits of a request are merged in their
// order by the thread that finishes last.
#pragma once
#include "common.h"

namespace JATTN_ISA {

INL float scalar_exp(float x) {
    float lanes[N];
    store(lanes, vexp(set1(x)));
    return lanes[0];
}

// One row; acc [v_head_dim] is in natural column order. A sink is a column of the softmax without a value.
INL void store_output_row(const AttentionArgs& args, const QueryRow& row, int kv_head, float row_max, float row_sum,
                          float raw_value_unit, const float* acc) {
    bool empty = row_max == -kInf && row_sum == 0.0f;  // a row whose logits are all NaN has maximum -inf, but a NaN sum
    float shift = softmax_shift(row_max), weight = 1.0f;
    if (args.sinks && !empty) {
        float sink = args.sinks[row.head], top = sink > shift ? sink : shift;
        weight = scalar_exp(shift - top);
        row_sum = row_sum * weight + JATTN_MUTANT(sink_twice, 2.0f, 1.0f) * scalar_exp(sink - top);
        shift = top;
    }
    const float* const v_scale = JATTN_MUTANT(scales_swapped, args.k_scale, args.v_scale);
    float factor = empty ? 0.0f : weight / row_sum * raw_value_unit * (v_scale ? v_scale[kv_head] : 1.0f);
    int64_t at = row.token * args.num_heads + row.head;
    args.lse[at] = empty ? -kInf : (shift + __builtin_logf(row_sum)) * JATTN_MUTANT(lse_in_base_two, 1.44269504f, 1.0f);
    char* out = args.out + at * args.v_head_dim * bytes_of(args.out_dtype);
    vf f = set1(factor);
    if (args.stream_out) {
        for (int c = 0; c < args.v_head_dim; c += N)
            stream_as(args.out_dtype, out, c, empty ? zero() : mul(load(acc + c), f));
        return;
    }
    for (int c = 0; c < args.v_head_dim; c += N) {
        int left = args.v_head_dim - c;
        store_as(args.out_dtype, out, c, empty ? zero() : mul(load(acc + c), f), left < N ? left : N);
    }
}

// Stores the rows of a unit. A unit that is one of several splits leaves its partial result in `partials` instead; the
// last split to arrive merges them all and stores the rows.
template <class Compute>
static void finish_rows(const AttentionArgs& args, const WorkUnit& work, int kv_head, float* row_max, float* row_sum,
                        float* acc, float* partials, int32_t* counters) {
    const int rows = work.num_rows();
    const int64_t v_dim = padded_v_dim(args), padded_rows = round_up(rows, 8), size = partial_floats(args, rows);
    if (work.num_splits > 1) {
        float* splits = partials + work.partial_offset + (int64_t)kv_head * work.num_splits * size;
        float* own = splits + work.split * size;
        __builtin_memcpy(own, acc, rows * v_dim * 4);
        __builtin_memcpy(own + padded_rows * v_dim, row_max, rows * 4);
        __builtin_memcpy(own + padded_rows * (v_dim + 1), row_sum, rows * 4);
        if (__atomic_add_fetch(counters + work.counter_offset + kv_head, 1, __ATOMIC_ACQ_REL) < work.num_splits) return;
        for (int r = 0; r < rows; r++) {
            float top = -kInf, total = 0.0f;
            for (int s = 0; s < work.num_splits; s++) {
                float x = splits[s * size + padded_rows * v_dim + r];
                if (x > top || x != x) top = x;
            }
            fill(acc + r * v_dim, v_dim, 0.0f);
            for (int s = 0; s < work.num_splits; s++) {
                const float* split = splits + s * size;
                const float &split_max = split[padded_rows * v_dim + r],
                            &split_sum = split[padded_rows * (v_dim + 1) + r];
                if (split_max == -kInf && split_sum == 0.0f) continue;
                float weight = JATTN_MUTANT(splits_not_rescaled, 1.0f, scalar_exp(split_max - top));
                total += split_sum * weight;
                vf f = set1(weight);
                for (int c = 0; c < v_dim; c += N)
                    store(acc + r * v_dim + c, fma(load(split + r * v_dim + c), f, load(acc + r * v_dim + c)));
            }
            row_max[r] = top;
            row_sum[r] = total;
        }
    }
    for (int r = 0; r < rows; r++) {
        Compute::restore_column_order(acc + r * v_dim, args.v_head_dim);
        store_output_row(args, query_row(args, work, kv_head, r), kv_head, row_max[r], row_sum[r], Compute::kRawUnit,
                         acc + r * v_dim);
    }
    if (args.stream_out) stream_fence();
}

}  // namespace JATTN_ISA
