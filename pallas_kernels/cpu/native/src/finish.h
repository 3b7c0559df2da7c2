// From (maximum, sum, accumulators) to (out, lse); pieces of a split request are merged in order by whoever is last.
#pragma once
#include "common.h"

namespace JATTN_ISA {

INL float log_(float x) { return __builtin_logf(x); }
INL float expf_(float x) {
    float lanes[N];
    store(lanes, exp_(set1(x)));
    return lanes[0];
}

// One row: acc[vdim] in natural order is overwritten. A sink is one more column whose value is dropped.
INL void finish_row(const Problem& p, const Row& row, int head, float m, float l, float value_unit, const float* acc) {
    bool empty = m == -kInf && l == 0.0f;  // a row of nothing but NaN has no maximum either
    float shift = shift_of(m), weight = 1.0f;
    if (p.sinks && !empty) {
        float sink = p.sinks[row.head], top = sink > shift ? sink : shift;
        weight = expf_(shift - top);
        l = l * weight + JATTN_MUTANT(sink_twice, 2.0f, 1.0f) * expf_(sink - top);
        shift = top;
    }
    const float* const v_scale = JATTN_MUTANT(scales_swapped, p.k_scale, p.v_scale);
    float factor = empty ? 0.0f : weight / l * value_unit * (v_scale ? v_scale[head] : 1.0f);
    int64_t at = row.token * p.heads + row.head;
    p.lse[at] = empty ? -kInf : (shift + log_(l)) * JATTN_MUTANT(lse_in_base_two, 1.44269504f, 1.0f);
    char* out = p.out + at * p.vdim * bytes_of(p.out_type);
    vf f = set1(factor);
    if (p.stream_out) {
        for (int c = 0; c < p.vdim; c += N) streamf(p.out_type, out, c, empty ? zero() : mul(load(acc + c), f));
        return;
    }
    for (int c = 0; c < p.vdim; c += N) {
        int left = p.vdim - c;
        storef(p.out_type, out, c, empty ? zero() : mul(load(acc + c), f), left < N ? left : N);
    }
}

// Write the rows out, or leave them as a piece; the last piece to arrive merges all, in their order.
template <class F>
static void finish(const Problem& p, const Work& w, int head, float* m, float* l, float* acc, float* partials,
                   int32_t* counters) {
    const int rows = w.rows();
    const int64_t vdim = padded_vdim(p), rows8 = round_up(rows, 8), size = partial_floats(p, rows);
    if (w.splits > 1) {
        float* group = partials + w.partial + (int64_t)head * w.splits * size;
        float* mine = group + w.split * size;
        __builtin_memcpy(mine, acc, rows * vdim * 4);
        __builtin_memcpy(mine + rows8 * vdim, m, rows * 4);
        __builtin_memcpy(mine + rows8 * (vdim + 1), l, rows * 4);
        if (__atomic_add_fetch(counters + w.counter + head, 1, __ATOMIC_ACQ_REL) < w.splits) return;
        for (int r = 0; r < rows; r++) {
            float top = -kInf, total = 0.0f;
            for (int s = 0; s < w.splits; s++) {
                float x = group[s * size + rows8 * vdim + r];
                if (x > top || x != x) top = x;
            }
            fill(acc + r * vdim, vdim, 0.0f);
            for (int s = 0; s < w.splits; s++) {
                const float* piece = group + s * size;
                if (piece[rows8 * vdim + r] == -kInf && piece[rows8 * (vdim + 1) + r] == 0.0f) continue;
                float weight = JATTN_MUTANT(pieces_not_faded, 1.0f, expf_(piece[rows8 * vdim + r] - top));
                total += piece[rows8 * (vdim + 1) + r] * weight;
                vf f = set1(weight);
                for (int c = 0; c < vdim; c += N)
                    store(acc + r * vdim + c, fma(load(piece + r * vdim + c), f, load(acc + r * vdim + c)));
            }
            m[r] = top;
            l[r] = total;
        }
    }
    for (int r = 0; r < rows; r++) {
        F::unpermute(acc + r * vdim, p.vdim);
        finish_row(p, row_of(p, w, head, r), head, m[r], l[r], F::kUnit, acc + r * vdim);
    }
    if (p.stream_out) stream_fence();
}

}  // namespace JATTN_ISA
