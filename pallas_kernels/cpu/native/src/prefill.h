// Attention of many rows, in tiles of kPrefillTileKeys keys: keys are packed transposed, values in rows, and both
// matrix products (matmul.h, or matmul_amx.h: the ISA includes one of them) read from the first two cache levels. Keys
// that no row of a block sees are left out where these are whole vectors; the others are masked.
#pragma once
#include "epilogue.h"
#include "prefetch.h"

namespace JATTN_ISA {

// The keys of pool rows pool_rows[0..n-1] as words [depth][kPrefillTileKeys].
template <class Compute>
static void pack_keys(const char* k, const int64_t* pool_rows, int n, int64_t row_bytes, int dim, uint32_t* to) {
    const int64_t depth = Compute::row_words(dim);
    for (int u = 0; u < n; u += N)
        for (int64_t c = 0; c < depth; c += N) {
            const int words_left = Compute::kBf16Pairs ? (dim + 1) / 2 : dim;
            vw r[N];
            for (int i = 0; i < N; i++) {
                bool exists = u + i < n && c < words_left;
                r[i] = exists ? Compute::load_key_words(k + pool_rows[u + i] * row_bytes, (int)c, dim) : zero_words();
            }
            transpose(r, to + c * kPrefillTileKeys + u, kPrefillTileKeys);
        }
}

// True if keys begin .. end - 1 of a tile are all keys of its first `vectors` vectors.
INL bool sees_all(int begin, int end, int vectors) { return begin == 0 && end >= vectors * N; }

// True if a row's dot products need nothing but their scale, which the exponential then applies.
INL bool needs_only_scale(const AttentionArgs& args, float scale, int begin, int end, int vectors,
                          const float* k_scales) {
    return sees_all(begin, end, vectors) && !k_scales && args.soft_cap == 0.0f && !args.alibi_slopes && scale >= 0.0f;
}

INL float max_of_row(const float* x, int vectors) {
    vf top = load(x);
    for (int i = 1; i < vectors; i++) top = max(top, load(x + i * N));
    return hmax(top);
}

// Dot products of one row -> logits, in place; -inf outside of keys begin .. end - 1. Returns their maximum.
// ALiBi adds slope * (offset + number of the key within the tile).
INL float shape_row(const AttentionArgs& args, float* x, int vectors, float scale, float slope, float offset, int begin,
                    int end, const float* k_scales) {
    vf top = set1(-kInf);
    const vf factor = set1(scale), first = set1((float)begin), behind = set1((float)end);
    const vf cap = set1(args.soft_cap), inverse_cap = set1(args.soft_cap != 0.0f ? 1.0f / args.soft_cap : 0.0f);
    const bool masked = !sees_all(begin, end, vectors);
    vf key = lane_numbers();
    for (int i = 0; i < vectors; i++, key = add(key, set1(N))) {
        vf y = mul(load(x + i * N), factor);
        if (k_scales) y = mul(y, load(k_scales + i * N));
        if (args.soft_cap != 0.0f && !JATTN_MUTANT(soft_cap_ignored, true, false))
            y = mul(cap, vtanh(mul(y, inverse_cap)));
        if (args.alibi_slopes) y = fma(set1(slope), add(set1(offset), key), y);
        if (masked) y = select_in_range(y, key, first, behind, set1(-kInf));
        store(x + i * N, y);
        top = max(top, y);
    }
    return hmax(top);
}

// The pool rows of keys t0 .. t0 + kPrefillTileKeys - 1 of a unit; returns how many there are.
INL int locate_prefill_tile(const AttentionArgs& args, const WorkUnit& work, int kv_head, int t0, int64_t* to) {
    const int left = work.key_end - work.key_begin - t0;
    const int n = left < 0 ? 0 : left < kPrefillTileKeys ? left : kPrefillTileKeys;
    locate_keys(args, work, kv_head, t0, n, to);
    return n;
}

constexpr int kFirstQueryRows = 36;  // loaded before the first products; the others are prefetched meanwhile

// Rows q_rows[0..n-1] of q as words, zeros up to a whole block of rows.
template <class Compute>
static void load_queries(const AttentionArgs& args, const int64_t* q_rows, int n, uint32_t* to) {
    const int64_t depth = query_words<Compute>(args), padded_rows = round_up(n, kBlockRows);
    for (int r = 0; r < n; r++) load_query<Compute>(args, q_rows[r], to + r * depth);
    __builtin_memset(to + n * depth, 0, (padded_rows - n) * depth * 4);
}

// The softmax between the two products of a tile: the state of every row, and buffers for one block of kBlockRows rows.
// Arrays over rows are padded, so that a whole vector may be read at the last row.
struct TileSoftmax {
    RowParams params;
    float *row_max, *row_sum;                   // of every row: running maximum and sum
    float *rescale, *tile_max, *pending_scale;  // of the block: factor of the old sums, maximum of this tile, and the
                                                // scale that logits_to_weights has yet to apply
    float* logits;                              // [kBlockRows][kPrefillTileKeys]
    uint32_t* weights;                          // exp(logit - maximum) in the words of the second product
    const float *k_scales, *v_scales;           // of the tile's keys; nullptr: none
};

// Stores the first `count` lanes.
INL void store_first_lanes(float* to, vf x, int count) {
    store_as(Dtype::f32, reinterpret_cast<char*>(to), 0, x, count);
}

// Dot products of rows r .. r + m - 1 -> weights. The tile holds keys t0 .. t0 + n - 1 of a unit whose first key is
// unit_begin; these rows see at most the first `seen` keys of the tile.
template <class Compute>
static void logits_to_weights(const AttentionArgs& args, const TileSoftmax& s, int unit_begin, int t0, int n, int seen,
                              int r, int m) {
    const int vectors = (seen + N - 1) / N;
    for (int i = 0; i < m; i++) {
        int begin = s.params.key_begin[r + i] - unit_begin - t0, end = s.params.key_end[r + i] - unit_begin - t0;
        begin = begin < 0 ? 0 : begin > n ? n : begin;
        end = end < 0 ? 0 : end > n ? n : end;
        float* x = s.logits + i * kPrefillTileKeys;
        const float scale = s.params.scale[r + i], offset = (float)t0 - s.params.position[r + i];
        const bool only_scale = vectors && needs_only_scale(args, scale, begin, end, vectors, s.k_scales);
        s.pending_scale[i] = only_scale ? scale : 1.0f;
        s.tile_max[i] = only_scale ? max_of_row(x, vectors) * scale
                                   : shape_row(args, x, vectors, scale, s.params.alibi_slope[r + i], offset, begin, end,
                                               s.k_scales);
    }
    for (int i = 0; i < m; i += N) {  // new maximum, factor of the old sums, and in tile_max what to subtract
        vf old_max = load(s.row_max + r + i), new_max = max(old_max, load(s.tile_max + i)),
           shift = softmax_shift(new_max);
        vf rescale = vexp(sub(old_max, shift));
        store_first_lanes(s.row_max + r + i, new_max, m - i);
        store_first_lanes(s.row_sum + r + i, mul(load(s.row_sum + r + i), rescale), m - i);
        store(s.rescale + i, JATTN_MUTANT(prefill_tiles_not_rescaled, set1(1.0f), rescale));
        store(s.tile_max + i, shift);
    }
    for (int i = 0; i < m; i++) {
        const float* x = s.logits + i * kPrefillTileKeys;
        uint32_t* to = s.weights + i * kPrefillTileKeys;
        const vf shift = set1(-s.tile_max[i]), scale = set1(s.pending_scale[i]);
        vf sum = zero();
        for (int c = 0; c < vectors; c += 2) {
            vf y[2];
            y[0] = vexp(fma(load(x + c * N), scale, shift));
            y[1] = c + 1 < vectors ? vexp(fma(load(x + (c + 1) * N), scale, shift)) : zero();
            sum = add(sum, add(y[0], y[1]));
            if (s.v_scales)
                for (int j = 0; j < 2; j++) y[j] = mul(y[j], load(s.v_scales + (c + j) * N));
            Compute::pack_prefill_weights(y, 2, to + (Compute::kBf16Pairs ? c * N / 2 : c * N));
        }
        s.row_sum[r + i] += hsum(sum);
    }
}

template <class Compute>
static void attend_prefill(const AttentionArgs& args, const WorkUnit& work, int kv_head, float* partials,
                           int32_t* counters, Arena arena) {
    const MatmulScope scope;
    (void)scope;
    const int rows = work.num_rows(), padded_rows = (int)round_up(rows, kBlockRows);
    const int count = work.key_end - work.key_begin;
    const int64_t latent_depth = Compute::row_words(args.latent_dim), depth = query_words<Compute>(args);
    const int64_t v_dim = padded_v_dim(args);
    const int64_t q_bytes = args.head_dim * bytes_of(args.q_dtype);
    const int64_t k_bytes = args.k_row * bytes_of(Compute::kDtype), v_bytes = args.v_row * bytes_of(Compute::kDtype);
    constexpr int max_value_depth = Compute::kBf16Pairs ? kPrefillTileKeys / 2 : kPrefillTileKeys;
    uint32_t* q = arena.take<uint32_t>(padded_rows * depth);
    uint32_t* keys = arena.take<uint32_t>(depth * kPrefillTileKeys);
    uint32_t* values = arena.take<uint32_t>(max_value_depth * v_dim);
    float* acc = arena.take<float>(padded_rows * v_dim);
    float* k_scales = arena.take<float>(kPrefillTileKeys);
    float* v_scales = arena.take<float>(kPrefillTileKeys);
    int64_t* pool_rows = arena.take<int64_t>(kPrefillTileKeys);
    int64_t* next_pool_rows = arena.take<int64_t>(kPrefillTileKeys);
    int64_t* q_rows = arena.take<int64_t>(padded_rows);
    TileSoftmax s{};
    float** const row_arrays[] = {&s.row_max, &s.row_sum, &s.rescale, &s.tile_max, &s.pending_scale};
    for (float** x : row_arrays) *x = arena.take<float>(padded_rows + N);
    s.logits = arena.take<float>(kBlockRows * kPrefillTileKeys);
    s.weights = arena.take<uint32_t>(kBlockRows * kPrefillTileKeys);
    s.k_scales = args.k_token_scale ? k_scales : nullptr;
    s.v_scales = args.v_token_scale ? v_scales : nullptr;
    for (int r = 0; r < rows; r++) {
        const QueryRow row = query_row(args, work, kv_head, r);
        q_rows[r] = row.token * args.num_heads + row.head;
    }
    const int first_rows = (int)round_up(kFirstQueryRows, kBlockRows);
    const PoolRows queries{args.q, q_bytes, q_rows, rows};
    for (int r = 0; r < rows && r < first_rows; r++) prefetch_row_far(queries, r);
    int next_n = locate_prefill_tile(args, work, kv_head, 0, next_pool_rows);
    prefetch_rows_far({args.k, k_bytes, next_pool_rows, next_n});
    prefetch_rows_far({args.v, v_bytes, next_pool_rows, next_n});
    s.params = load_row_params(args, work, kv_head, padded_rows, Compute::kRawUnit, arena);
    fill(s.row_max, padded_rows + N, -kInf);
    fill(s.row_sum, padded_rows + N, 0.0f);
    fill(s.tile_max, kBlockRows + N, -kInf);
    if (count == 0) fill(acc, padded_rows * v_dim, 0.0f);
    __builtin_memset(s.weights, 0, kBlockRows * kPrefillTileKeys * 4);
    __builtin_memset(values, 0, max_value_depth * v_dim * 4);

    for (int t0 = 0; t0 < count; t0 += kPrefillTileKeys) {
        const int n = next_n;
        int64_t* current = next_pool_rows;
        next_pool_rows = pool_rows;
        pool_rows = current;
        next_n = locate_prefill_tile(args, work, kv_head, t0 + kPrefillTileKeys, next_pool_rows);
        const PoolRows next_keys{args.k, k_bytes, next_pool_rows, next_n};
        const PoolRows next_values{args.v, v_bytes, next_pool_rows, next_n};
        if (args.k_token_scale)
            fill(k_scales, kPrefillTileKeys, 0.0f), gather_scales(args.k_token_scale, pool_rows, n, k_scales);
        if (args.v_token_scale)
            fill(v_scales, kPrefillTileKeys, 0.0f), gather_scales(args.v_token_scale, pool_rows, n, v_scales);
        if (args.latent_dim) pack_keys<Compute>(args.v, pool_rows, n, v_bytes, args.latent_dim, keys);
        pack_keys<Compute>(args.k, pool_rows, n, k_bytes, k_dim(args), keys + latent_depth * kPrefillTileKeys);
        const int value_depth = Compute::pack_values(args.v, pool_rows, n, v_bytes, args.v_head_dim, values, v_dim);
        if (n < kPrefillTileKeys)  // the product rounds its depth up to kDepthStep
            __builtin_memset(values + value_depth * v_dim, 0,
                             (round_up(value_depth, kDepthStep) - value_depth) * v_dim * 4);
        for (int r = 0; r < rows; r += kBlockRows) {
            const int m = rows - r < kBlockRows ? rows - r : kBlockRows;
            if (t0 == 0) {  // queries are loaded as late as possible: the products before hide the latency
                if (r % first_rows == 0)
                    load_queries<Compute>(args, q_rows + r, rows - r < first_rows ? rows - r : first_rows,
                                          q + r * depth);
                for (int i = r + first_rows; i < r + first_rows + kBlockRows && i < rows; i++)
                    prefetch_row_far(queries, i);
            }
            prefetch_share_far(next_keys, r, kBlockRows, rows);
            prefetch_share_far(next_values, r, kBlockRows, rows);
            int seen = 0;  // no row of the block sees a key of this tile behind these
            for (int i = r; i < r + m; i++) {
                const int end = s.params.key_end[i] - work.key_begin - t0;
                seen = end > seen ? end : seen;
            }
            seen = seen < n ? seen : n;
            matmul<Compute, false>(q + r * depth, depth, keys, kPrefillTileKeys, (int)depth, s.logits, kPrefillTileKeys,
                                   (seen + N - 1) / N, nullptr);
            logits_to_weights<Compute>(args, s, work.key_begin, t0, n, seen, r, m);
            const int seen_depth = Compute::kBf16Pairs ? (seen + 1) / 2 : seen, columns = (int)(v_dim / N);
            float* const sum = acc + r * v_dim;
            if (t0 == 0)
                matmul<Compute, false>(s.weights, kPrefillTileKeys, values, v_dim, seen_depth, sum, v_dim, columns,
                                       nullptr);
            else
                matmul<Compute, true>(s.weights, kPrefillTileKeys, values, v_dim, seen_depth, sum, v_dim, columns,
                                      s.rescale);
        }
    }
    finish_rows<Compute>(args, work, kv_head, s.row_max, s.row_sum, acc, partials, counters);
}

}  // namespace JATTN_ISA
