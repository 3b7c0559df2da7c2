// Attention of few rows: keys and values are read once, from where they are in the pool, in tiles of kDecodeTileKeys
// keys. The logits of a tile are stored as [key][4 rows], so that four rows share each load of a key.
//
// The keys of a tile are read in kKeyStreams interleaved streams: the first key of each stream, then the second of
// each, and so on. Several pages are then read at the same time, which keeps several of the hardware's prefetch streams
// busy.
//
// A latent row (kLatent) is key and value. Its tiles have kLatentTileKeys keys, so that a tile stays in the L2 cache
// while each group of four rows of q reads it twice, as keys and as values. The next tile is prefetched meanwhile.
#pragma once
#include "epilogue.h"
#include "prefetch.h"
#include "prefetch_tuner.h"

namespace JATTN_ISA {

constexpr int kKeyStreams = 4;  // measured: 1 and 2 are slower with small pages, 8 is slower with large ones

// Values that are added between a load and a store of the accumulators; even. Few, because the columns are computed in
// groups: after many values, the rows of the first group would have left the cache when the second group reads them.
template <class Compute>
constexpr int kKeysPerPass = 16 / Compute::kItemBytes;

constexpr int kLatentTileKeys = 64;

// Keys of one stream of a tile of n keys. The n % kKeyStreams keys that remain are read last.
INL int stream_length(int n) { return n / kKeyStreams; }

// The pool rows of keys [t0, t0 + n) of a unit, in the order in which they are read.
INL void locate_decode_tile(const AttentionArgs& args, const WorkUnit& work, int kv_head, int t0, int n, int64_t* to) {
    const int length = stream_length(n), in_streams = length * kKeyStreams;
    for (int s = 0; s < kKeyStreams; s++)
        locate_keys(args, work, kv_head, t0 + s * length, length, to + s, kKeyStreams);
    locate_keys(args, work, kv_head, t0 + in_streams, n - in_streams, to + in_streams);
}

// The numbers of those keys within the tile, in the same order; n behind the last, up to a whole vector.
INL void number_tile_keys(int n, float* key_number) {
    const int length = stream_length(n), in_streams = length * kKeyStreams;
    for (int s = 0; s < kKeyStreams; s++)
        for (int k = 0; k < length; k++) key_number[k * kKeyStreams + s] = (float)(s * length + k);
    for (int t = in_streams; t < n + kKeysPerVector; t++) key_number[t] = (float)(t < n ? t : n);
}

// Dot products of one tile with rows r .. r + 3 -> logits, in place: scale, soft cap, ALiBi, mask. Returns the maximum
// of each row over the keys, repeated for every key of the vector.
INL vf shape_logits(const AttentionArgs& args, const RowParams& params, int r, int t0, int n, const float* key_number,
                    const float* k_scales, int unit_begin, float* logits) {
    const int vectors = (n + kKeysPerVector - 1) / kKeysPerVector;
    const vf scale = broadcast_rows(params.scale + r);
    bool masked = n % kKeysPerVector != 0;
    float begin4[4], end4[4], offset4[4];
    for (int g = 0; g < 4; g++) {
        int begin = params.key_begin[r + g] - unit_begin - t0, end = params.key_end[r + g] - unit_begin - t0;
        masked |= begin > 0 || end < n;
        begin4[g] = (float)(begin < 0 ? 0 : begin > n ? n : begin);
        end4[g] = (float)(end < 0 ? 0 : end > n ? n : end);
        offset4[g] = (float)t0 - params.position[r + g];
    }
    vf row_max = set1(-kInf);
    if (!masked && !k_scales && args.soft_cap == 0.0f && !args.alibi_slopes) {
        for (int i = 0; i < vectors; i++) {
            vf x = mul(load(logits + i * N), scale);
            store(logits + i * N, x);
            row_max = max(row_max, x);
        }
        return max_over_keys(row_max);
    }
    const vf begin = broadcast_rows(begin4), end = broadcast_rows(end4);
    const vf offset = broadcast_rows(offset4), slope = broadcast_rows(params.alibi_slope + r);
    const vf cap = set1(args.soft_cap), inverse_cap = set1(args.soft_cap != 0.0f ? 1.0f / args.soft_cap : 0.0f);
    for (int i = 0; i < vectors; i++) {
        const vf key = broadcast_keys(key_number + i * kKeysPerVector);
        vf x = mul(load(logits + i * N), scale);
        if (k_scales) x = mul(x, broadcast_keys(k_scales + i * kKeysPerVector));
        if (args.soft_cap != 0.0f && !JATTN_MUTANT(soft_cap_ignored, true, false))
            x = mul(cap, vtanh(mul(x, inverse_cap)));
        if (args.alibi_slopes) x = fma(slope, add(offset, key), x);
        if (masked) x = select_in_range(x, key, begin, end, set1(-kInf));
        store(logits + i * N, x);
        row_max = max(row_max, x);
    }
    return max_over_keys(row_max);
}

// Dot products of kKeysPerVector keys with 4 rows of q: one vector [key][row]. next_rows: rows to prefetch, or nullptr.
// latent: pointers to the first parts of latent keys; k: to the rest.
template <class Compute, bool kLatent>
INL vf dot_keys(const AttentionArgs& args, const uint32_t* q, int64_t stride, const char* const* latent,
                const char* const* k, const char* const* next_rows) {
    vf a[kKeysPerVector][4];
#pragma GCC unroll 4
    for (int t = 0; t < kKeysPerVector; t++)
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) a[t][g] = zero();
    if constexpr (kLatent) {
        Compute::add_products(a, q, stride, latent, args.latent_dim, nullptr);
        q += Compute::row_words(args.latent_dim);
    }
    Compute::add_products(a, q, stride, k, kLatent ? k_dim(args) : args.head_dim, next_rows);
    return sum_lanes(a);
}

// Prefetches a tile of latent rows step by step, while the tile before it is read.
class LatentPrefetch {
   public:
    LatentPrefetch(const PoolRows& latents, const PoolRows& keys, int64_t latent_bytes, int64_t key_bytes, int steps)
        : latents_(latents), keys_(keys), latent_bytes_(latent_bytes), key_bytes_(key_bytes), steps_(steps) {}
    void step() {
        const int end = latents_.count * ++step_ / steps_;
        for (; done_ < end; done_++) {
            for (int64_t c = 0; c < latent_bytes_; c += 64) prefetch_far(latents_.at(done_) + c);
            for (int64_t c = 0; c < key_bytes_; c += 64) prefetch_far(keys_.at(done_) + c);
        }
    }

   private:
    PoolRows latents_, keys_;
    int64_t latent_bytes_, key_bytes_;
    int steps_, step_ = 0, done_ = 0;
};

// The pool rows of the first tile of the item that this thread will probably take next. Returns their number; 0 if that
// item runs the prefill kernel.
static int locate_next_item(const AttentionArgs& args, const WorkQueue& queue, int max_keys, int64_t* to) {
    const int64_t item = queue.next_item.load(std::memory_order_relaxed);
    if (item >= queue.num_items || !queue.units[item / args.num_kv_heads].is_decode) return 0;
    const WorkUnit& work = queue.units[item / args.num_kv_heads];
    const int count = work.key_end - work.key_begin < max_keys ? work.key_end - work.key_begin : max_keys;
    locate_decode_tile(args, work, (int)(item % args.num_kv_heads), 0, count, to);
    return count;
}

template <class Compute, bool kLatent>
static void attend_decode(const AttentionArgs& args, const WorkUnit& work, int kv_head, const WorkQueue& queue,
                          float* partials, int32_t* counters, Arena arena) {
    const int rows = work.num_rows(), row_groups = (rows + 3) / 4, padded_rows = row_groups * 4;
    const int count = work.key_end - work.key_begin;
    constexpr int kTileKeys = kLatent ? kLatentTileKeys : kDecodeTileKeys;
    constexpr int kPassKeys = kLatent ? kLatentTileKeys : kKeysPerPass<Compute>;
    const int64_t q_stride = query_words<Compute>(args), v_dim = padded_v_dim(args);
    const int64_t k_bytes = args.k_row * bytes_of(Compute::kDtype), v_bytes = args.v_row * bytes_of(Compute::kDtype);
    uint32_t* q = arena.take<uint32_t>(padded_rows * q_stride);
    float* acc = arena.take<float>(padded_rows * v_dim);
    float* logits = arena.take<float>(4 * kDecodeTileKeys + 8 * N);
    uint32_t* packed_weights = arena.take<uint32_t>(2 * kDecodeTileKeys + 4 * N);
    float* k_scales = arena.take<float>(kDecodeTileKeys + N);
    float* v_scales = arena.take<float>(kDecodeTileKeys + N);
    float* key_number = arena.take<float>(kDecodeTileKeys + N);
    int64_t* pool_rows = arena.take<int64_t>(kDecodeSplitKeys + 64);
    int64_t* next_pool_rows = arena.take<int64_t>(kDecodeTileKeys);
    float* row_sums =
        arena.take<float>(row_groups * N);  // [group][key of a vector][4 rows]: summed over keys at the end
    float* row_max = arena.take<float>(padded_rows);
    RowParams params = load_row_params(args, work, kv_head, padded_rows, Compute::kRawUnit, arena);

    for (int r = 0; r < padded_rows; r++) {
        QueryRow row = query_row(args, work, kv_head, r < rows ? r : 0);
        load_query<Compute>(args, row.token * args.num_heads + row.head, q + r * q_stride);
        row_max[r] = -kInf;
    }
    fill(acc, padded_rows * v_dim, 0.0f);
    fill(row_sums, row_groups * N, 0.0f);
    auto tile_keys = [&](int t0) { return count - t0 < kTileKeys ? count - t0 : kTileKeys; };
    for (int t0 = 0; t0 < count; t0 += kTileKeys)
        locate_decode_tile(args, work, kv_head, t0, tile_keys(t0), pool_rows + t0);
    const int64_t last = count ? pool_rows[count - 1] : 0;
    for (int t = count; t < count + 64; t++) pool_rows[t] = last;  // whole vectors of keys are read

    static thread_local PrefetchTuner<> tuner;
    DecodePrefetch prefetcher(k_bytes, tuner.begin_unit(count * (k_bytes + v_bytes)));
    if (!kLatent) prefetcher.start({args.k, k_bytes, pool_rows, tile_keys(0)});
    for (int t0 = 0, numbered = 0; t0 < count; t0 += kTileKeys) {
        const int n = tile_keys(t0), vectors = (n + kKeysPerVector - 1) / kKeysPerVector;
        const PoolRows keys{args.k, k_bytes, pool_rows + t0, n}, values{args.v, v_bytes, pool_rows + t0, n};
        if (n != numbered) number_tile_keys(numbered = n, key_number);
        if (args.k_token_scale) gather_scales(args.k_token_scale, pool_rows + t0, vectors * kKeysPerVector, k_scales);
        if (args.v_token_scale) gather_scales(args.v_token_scale, pool_rows + t0, vectors * kKeysPerVector, v_scales);
        PoolRows next{args.v, v_bytes, pool_rows + t0 + n, t0 + n < count ? tile_keys(t0 + n) : 0};
        if (kLatent && t0 + n >= count)
            next.rows = next_pool_rows, next.count = locate_next_item(args, queue, kTileKeys, next_pool_rows);
        LatentPrefetch latent_prefetch(next, {args.k, k_bytes, next.rows, next.count},
                                       args.latent_dim * bytes_of(Compute::kDtype),
                                       k_dim(args) * bytes_of(Compute::kDtype), row_groups * vectors);
        for (int b = 0; b < row_groups; b++) {
            const uint32_t* q4 = q + b * 4 * q_stride;
            const char* const* const next_rows =
                b || kLatent ? nullptr : prefetcher.next_rows;  // later groups find the keys in L1
            if (next_rows) prefetcher.set_rows(keys, values);
            for (int i = 0; i < vectors; i++) {
                const char *k[kKeysPerVector], *latent[kKeysPerVector];
                for (int t = 0; t < kKeysPerVector; t++) {
                    k[t] = args.k + pool_rows[t0 + i * kKeysPerVector + t] * k_bytes;
                    latent[t] = args.v + pool_rows[t0 + i * kKeysPerVector + t] * v_bytes;
                }
                if (kLatent) latent_prefetch.step();
                store(logits + i * N, dot_keys<Compute, kLatent>(args, q4, q_stride, latent, k,
                                                                 next_rows ? next_rows + i * kKeysPerVector : nullptr));
            }
            if (next_rows) prefetcher.finish_rows();
            vf tile_max = shape_logits(args, params, b * 4, t0, n, key_number, args.k_token_scale ? k_scales : nullptr,
                                       work.key_begin, logits);

            vf old_max = broadcast_rows(row_max + b * 4), new_max = max(old_max, tile_max),
               shift = softmax_shift(new_max);
            vf rescale = vexp(sub(old_max, shift)), sum = mul(load(row_sums + b * N), rescale);
            float lanes[N];
            store(lanes, new_max);
            for (int g = 0; g < 4; g++) row_max[b * 4 + g] = lanes[g];
            if (t0 && !JATTN_MUTANT(decode_tiles_not_rescaled, true, false) && any_differs(old_max, new_max)) {
                store(lanes, rescale);
                for (int g = 0; g < 4; g++)
                    for (int c = 0; c < v_dim; c += N) {
                        float* a = acc + (b * 4 + g) * v_dim + c;
                        store(a, mul(load(a), set1(lanes[g])));
                    }
            }
            for (int i = 0; i < vectors; i++) {
                vf x = vexp(sub(load(logits + i * N), shift));
                sum = add(sum, x);
                if (args.v_token_scale) x = mul(x, broadcast_keys(v_scales + i * kKeysPerVector));
                store(logits + i * N, x);
            }
            store(row_sums + b * N, sum);
            for (int i = vectors; i * kKeysPerVector < n + 8; i++) store(logits + i * N, zero());

            const uint32_t* weights = Compute::pack_decode_weights(logits, n, packed_weights);
            if (next_rows && t0 + n < count)
                prefetcher.set_rows(values, {args.k, k_bytes, pool_rows + t0 + n, tile_keys(t0 + n)});
            else if (next_rows)
                prefetcher.set_rows(values,
                                    {args.k, k_bytes, next_pool_rows,
                                     locate_next_item(args, queue, kTileKeys, next_pool_rows)});
            for (int t = 0; t < n; t += kPassKeys)
                Compute::add_values(acc + b * 4 * v_dim, v_dim, weights + t * (Compute::kBf16Pairs ? 2 : 4),
                                    pool_rows + t0 + t, n - t < kPassKeys ? n - t : kPassKeys, args.v, v_bytes,
                                    args.v_head_dim, next_rows ? next_rows + t : nullptr);
            if (next_rows) prefetcher.finish_rows();
        }
    }
    tuner.end_unit();
    float* row_sum = arena.take<float>(padded_rows);
    for (int b = 0; b < row_groups; b++) {
        float lanes[N];
        store(lanes, sum_over_keys(load(row_sums + b * N)));
        for (int g = 0; g < 4; g++) row_sum[b * 4 + g] = lanes[g];
    }
    finish_rows<Compute>(args, work, kv_head, row_max, row_sum, acc, partials, counters);
}

}  // namespace JATTN_ISA
