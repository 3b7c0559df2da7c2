// The buffers of the calls as XLA passes them: checked, then turned into the arguments of the kernels.
#pragma once
#include <cstring>

#include "checks.h"
#include "product_args.h"
#include "sampling_args.h"

namespace jattn {

using AnyBuffer = ffi::AnyBuffer;
using Int32Buffer = ffi::Buffer<ffi::S32>;
using FloatBuffer = ffi::Buffer<ffi::F32>;
using Uint32Buffer = ffi::Buffer<ffi::U32>;

inline const float* data_or_null(const FloatBuffer& x) { return x.element_count() ? x.typed_data() : nullptr; }

// The strides of a pool of pages.
template <class Args>
void set_strides(Args& args, bool heads_first) {
    args.block_stride = (int64_t)args.num_kv_heads * args.block_size;
    args.head_stride = heads_first ? args.block_size : 1;
    args.slot_stride = heads_first ? 1 : args.num_kv_heads;
}

// A pool holds numbers of kv_dtype.
inline void check_kv_dtype(ArrayChecks& checks, const char* name, const AnyBuffer& x, int32_t kv_dtype) {
    checks.count("kv_dtype", kv_dtype, 0, kNumDtypes - 1);
    if (checks.error.empty())
        checks.dtype(name, x, can_hold(x.element_type(), (Dtype)kv_dtype),
                     "the kv_dtype, or unsigned integers of its size", kDtypeNames[kv_dtype]);
}

// Absent arrays have no elements. Keys and values are pages [N K S *] (heads_first) or [N S K *], or packed [Tk K *].
struct AttendBuffers {
    AnyBuffer q, k, v;
    FloatBuffer k_token_scale, v_token_scale;
    Int32Buffer query_start_loc, seq_lens, kv_lens, block_table, kv_start, causal;
    FloatBuffer alibi_slopes, sinks, q_scale, k_scale, v_scale;
    AnyBuffer out;
    FloatBuffer lse;
    int64_t latent_dim;  // of latent rows; 0: keys and values are separate

    // The error of the first check that fails; empty if none does.
    std::string error(int32_t kv_dtype, bool heads_first) const {
        ArrayChecks checks;
        Dtype dtype;
        const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
        checks.dtype("q", q, dtype_of(q.element_type(), dtype), "float32, float16, bfloat16, fp8 or int8");
        checks.dtype("out", out, dtype_of(out.element_type(), dtype) && bytes_of(dtype) > 1,
                     "float32, float16 or bfloat16");
        check_kv_dtype(checks, "k", k, kv_dtype);
        check_kv_dtype(checks, "v", v, kv_dtype);
        checks.rank("q", q, 3);
        checks.require(kd.size() == 3 || kd.size() == 4, "k must be packed [Tk K D] or pages of rank 4");
        checks.rank("v", v, kd.size());
        checks.rank("seq_lens", seq_lens, 1);
        checks.rank("block_table", block_table, 2);
        if (!checks.error.empty()) return checks.error;

        const bool paged = kd.size() == 4;
        const int64_t num_tokens = qd[0], num_heads = qd[1], num_reqs = seq_lens.dimensions()[0];
        const int64_t num_kv_heads = kd[paged && !heads_first ? 2 : 1];
        const int64_t table_width = paged ? block_table.dimensions().back() : 0;
        const int64_t v_head_dim = latent_dim ? latent_dim : vd.back(), key_dim = qd[2] - latent_dim;
        checks.count("the number of tokens", num_tokens, 0);
        checks.count("the number of requests", num_reqs, 0, INT32_MAX / 4);
        checks.count("the number of query heads", num_heads, 1);
        checks.count("the number of kv heads", num_kv_heads, 1);
        checks.count("latent_dim", latent_dim, 0, kMaxHeadDim);
        checks.count(latent_dim ? "head_dim without latent_dim" : "head_dim", key_dim, 1, kMaxHeadDim);
        checks.count("v_head_dim", v_head_dim, 1, kMaxHeadDim);
        checks.require(!latent_dim || paged, "latent rows must be in pages");
        checks.require(!latent_dim || has_whole_rows() || !k_token_scale.element_count(),
                       "latent rows in two pools must not have token scales");
        if (!checks.error.empty()) return checks.error;
        checks.multiple("the number of query heads", num_heads, "the number of kv heads", num_kv_heads);
        if (latent_dim) {  // in two pools, or k and v are one pool of whole rows
            checks.shape("k", k, {kd[0], kd[1], kd[2], has_whole_rows() ? qd[2] : key_dim});
            checks.shape("v", v, {kd[0], kd[1], kd[2], has_whole_rows() ? qd[2] : latent_dim});
            checks.require(!has_whole_rows() || k.untyped_data() == v.untyped_data(),
                           "k and v must be the same array of whole latent rows");
        }
        if (paged) {
            if (!latent_dim) {
                checks.shape("k", k, {kd[0], kd[1], kd[2], qd[2]});
                checks.shape("v", v, {kd[0], kd[1], kd[2], vd[3]});
            }
            checks.count("block_size", kd[heads_first ? 2 : 1], 0);
            checks.shape("block_table", block_table, {num_reqs, table_width});
            checks.count("the width of block_table", table_width, 0);
            checks.shape_or_none("k_token_scale", k_token_scale, {kd[0], kd[1], kd[2]});
            checks.shape_or_none("v_token_scale", v_token_scale, {kd[0], kd[1], kd[2]});
        } else {
            checks.shape("k", k, {kd[0], kd[1], qd[2]});
            checks.shape("v", v, {kd[0], kd[1], vd[2]});
            checks.shape("kv_start", kv_start, {num_reqs});
            checks.shape_or_none("k_token_scale", k_token_scale, {kd[0], kd[1]});
            checks.shape_or_none("v_token_scale", v_token_scale, {kd[0], kd[1]});
        }
        checks.shape("query_start_loc", query_start_loc, {num_reqs + 1});
        checks.shape("kv_lens", kv_lens, {num_reqs});
        checks.shape_or_none("causal", causal, {num_reqs});
        checks.shape_or_none("alibi_slopes", alibi_slopes, {num_heads});
        checks.shape_or_none("sinks", sinks, {num_heads});
        checks.shape_or_none("q_scale", q_scale, {num_heads});
        checks.shape_or_none("k_scale", k_scale, {num_kv_heads});
        checks.shape_or_none("v_scale", v_scale, {num_kv_heads});
        checks.shape("out", out, {num_tokens, num_heads, v_head_dim});
        checks.shape("lse", lse, {num_tokens, num_heads});
        return checks.error;
    }

    // True if k holds whole latent rows.
    bool has_whole_rows() const { return latent_dim && k.dimensions().back() == q.dimensions()[2]; }

    // The arguments that the buffers determine; those of the attributes are left at 0.
    AttentionArgs args(int32_t kv_dtype, bool heads_first) const {
        AttentionArgs args{};
        const auto qd = q.dimensions(), kd = k.dimensions();
        dtype_of(q.element_type(), args.q_dtype), dtype_of(out.element_type(), args.out_dtype);
        args.kv_dtype = (Dtype)kv_dtype;
        args.q = static_cast<const char*>(q.untyped_data());
        args.k = static_cast<const char*>(k.untyped_data());
        args.v = static_cast<const char*>(v.untyped_data());
        args.k_token_scale = data_or_null(k_token_scale), args.v_token_scale = data_or_null(v_token_scale);
        args.query_start_loc = query_start_loc.typed_data();
        args.seq_lens = seq_lens.typed_data(), args.kv_lens = kv_lens.typed_data();
        args.causal = causal.element_count() ? causal.typed_data() : nullptr;
        args.alibi_slopes = data_or_null(alibi_slopes), args.sinks = data_or_null(sinks);
        args.q_scale = data_or_null(q_scale), args.k_scale = data_or_null(k_scale),
        args.v_scale = data_or_null(v_scale);
        args.out = static_cast<char*>(out.untyped_data());
        args.lse = lse.typed_data();
        args.num_tokens = qd[0], args.num_heads = (int32_t)qd[1], args.head_dim = (int32_t)qd[2];
        args.num_reqs = seq_lens.dimensions()[0];
        args.latent_dim = (int32_t)latent_dim;
        args.v_head_dim = latent_dim ? args.latent_dim : (int32_t)v.dimensions().back();
        args.k_row = kd.back(), args.v_row = v.dimensions().back();
        if (has_whole_rows()) args.k += latent_dim * bytes_of(args.kv_dtype);
        args.paged = kd.size() == 4;
        if (args.paged) {
            args.block_table = block_table.typed_data();
            args.table_width = block_table.dimensions()[1];
            args.num_blocks = kd[0];
            args.num_kv_heads = (int32_t)(heads_first ? kd[1] : kd[2]);
            args.block_size = (int32_t)(heads_first ? kd[2] : kd[1]);
            set_strides(args, heads_first);
        } else {
            args.kv_start = kv_start.typed_data();
            args.num_packed_keys = kd[0];
            args.num_kv_heads = (int32_t)kd[1];
            args.block_size = 1, args.slot_stride = args.num_kv_heads, args.head_stride = 1;
        }
        args.group_size = args.num_heads / args.num_kv_heads;
        return args;
    }
};

// A pool is an input that XLA aliases to an output.
struct PoolBuffer {
    AnyBuffer in, out;
};

struct WriteBuffers {
    AnyBuffer k, v;
    Int32Buffer slot_mapping;
    FloatBuffer k_scale, v_scale;
    PoolBuffer k_pool, v_pool, k_token_scale, v_token_scale;

    std::string error(int32_t kv_dtype, bool heads_first) const {
        ArrayChecks checks;
        Dtype dtype;
        const auto kd = k.dimensions(), vd = v.dimensions(), pd = k_pool.in.dimensions();
        checks.dtype("k", k, dtype_of(k.element_type(), dtype), "float32, float16, bfloat16, fp8 or int8");
        checks.dtype("v", v, k.element_type() == v.element_type(), "the dtype of k");
        check_kv_dtype(checks, "k_pool", k_pool.in, kv_dtype);
        check_kv_dtype(checks, "v_pool", v_pool.in, kv_dtype);
        checks.dtype("k_token_scale", k_token_scale.in, k_token_scale.in.element_type() == ffi::F32, "float32");
        checks.dtype("v_token_scale", v_token_scale.in, v_token_scale.in.element_type() == ffi::F32, "float32");
        checks.rank("k", k, 3);
        checks.rank("v", v, 3);
        checks.rank("k_pool", k_pool.in, 4);
        if (!checks.error.empty()) return checks.error;

        checks.count("the number of tokens", kd[0], 0);
        checks.count("the number of kv heads", kd[1], 1);
        checks.count("head_dim", kd[2], 1, kMaxHeadDim);
        checks.count("v_head_dim", vd[2], 1, kMaxHeadDim);
        checks.count("block_size", pd[heads_first ? 2 : 1], 0);
        checks.shape("v", v, {kd[0], kd[1], vd[2]});
        checks.shape("slot_mapping", slot_mapping, {kd[0]});
        checks.shape_or_none("k_scale", k_scale, {kd[1]});
        checks.shape_or_none("v_scale", v_scale, {kd[1]});
        const int64_t first = heads_first ? kd[1] : pd[1], second = heads_first ? pd[2] : kd[1];
        checks.shape("k_pool", k_pool.in, {pd[0], first, second, kd[2]});
        checks.shape("v_pool", v_pool.in, {pd[0], first, second, vd[2]});
        checks.shape_or_none("k_token_scale", k_token_scale.in, {pd[0], first, second});
        checks.shape_or_none("v_token_scale", v_token_scale.in, {pd[0], first, second});
        for (const PoolBuffer* pool : {&k_pool, &v_pool, &k_token_scale, &v_token_scale})
            checks.require(pool->in.size_bytes() == pool->out.size_bytes(),
                           "a pool has another size as output than as input");
        return checks.error;
    }

    WriteArgs args(int32_t kv_dtype, bool heads_first) const {
        WriteArgs args{};
        const auto kd = k.dimensions(), pd = k_pool.in.dimensions();
        dtype_of(k.element_type(), args.input_dtype);
        args.kv_dtype = (Dtype)kv_dtype;
        args.k = static_cast<const char*>(k.untyped_data());
        args.v = static_cast<const char*>(v.untyped_data());
        args.k_pool = static_cast<char*>(k_pool.out.untyped_data());
        args.v_pool = static_cast<char*>(v_pool.out.untyped_data());
        if (k_token_scale.in.element_count())
            args.k_token_scale = static_cast<float*>(k_token_scale.out.untyped_data());
        if (v_token_scale.in.element_count())
            args.v_token_scale = static_cast<float*>(v_token_scale.out.untyped_data());
        args.slot_mapping = slot_mapping.typed_data();
        args.k_scale = data_or_null(k_scale), args.v_scale = data_or_null(v_scale);
        args.num_blocks = pd[0];
        args.block_size = (int32_t)(heads_first ? pd[2] : pd[1]);
        args.num_kv_heads = (int32_t)kd[1], args.head_dim = (int32_t)kd[2];
        args.v_head_dim = (int32_t)v.dimensions()[2];
        set_strides(args, heads_first);
        return args;
    }

    // XLA aliases input and output of a pool. If it ever does not, the output still needs the old contents.
    void copy_unaliased_pools() const {
        for (const PoolBuffer* pool : {&k_pool, &v_pool, &k_token_scale, &v_token_scale})
            if (pool->in.size_bytes() && pool->in.untyped_data() != pool->out.untyped_data())
                std::memcpy(pool->out.untyped_data(), pool->in.untyped_data(), pool->in.size_bytes());
    }
};

// The arguments of a draw. Returns the error of the first check that fails.
inline std::string draw_args(const FloatBuffer& logits, const FloatBuffer& temperature, const Int32Buffer& top_k,
                             const FloatBuffer& top_p, const FloatBuffer& least, const Uint32Buffer& keys,
                             const Int32Buffer& tokens, const FloatBuffer& floors, DrawArgs& args) {
    ArrayChecks checks;
    checks.rank("logits", logits, 2);
    if (!checks.error.empty()) return checks.error;
    args.rows = logits.dimensions()[0], args.vocab = logits.dimensions()[1];
    checks.count("the size of the vocabulary", args.vocab, 0);
    checks.shape("temperature", temperature, {args.rows});
    checks.shape("top_k", top_k, {args.rows});
    checks.shape("top_p", top_p, {args.rows});
    checks.shape("least", least, {args.rows});
    checks.shape("keys", keys, {args.rows, 2});
    checks.shape("tokens", tokens, {args.rows});
    checks.shape("floors", floors, {args.rows});
    args.logits = logits.typed_data(), args.temperature = temperature.typed_data();
    args.top_k = top_k.typed_data(), args.top_p = top_p.typed_data(), args.least = least.typed_data();
    args.keys = keys.typed_data(), args.tokens = tokens.typed_data(), args.floors = floors.typed_data();
    return checks.error;
}

// False unless the array has float32, float16 or bfloat16; then `dtype` is it.
inline bool float_dtype_of(const AnyBuffer& array, Dtype& dtype) {
    return dtype_of(array.element_type(), dtype) && (int)dtype < kNumFloats;
}

// The same of scales, which may have e4m3.
inline bool scale_dtype_of(const AnyBuffer& array, Dtype& dtype) {
    return dtype_of(array.element_type(), dtype) && ((int)dtype < kNumFloats || dtype == Dtype::e4m3);
}

// The arguments of the products of several heads. Returns the error of the first check that fails.
inline std::string head_product_args(const AnyBuffer& x, const AnyBuffer& w, const AnyBuffer& y,
                                     HeadProductArgs& args) {
    ArrayChecks checks;
    checks.dtype("x", x, float_dtype_of(x, args.dtype), "float32, float16 or bfloat16");
    checks.dtype("w", w, w.element_type() == x.element_type(), "the dtype of x");
    checks.dtype("y", y, float_dtype_of(y, args.out_dtype), "float32, float16 or bfloat16");
    checks.rank("x", x, 3);
    checks.rank("w", w, 3);
    if (!checks.error.empty()) return checks.error;
    args.heads = x.dimensions()[0], args.rows = x.dimensions()[1], args.inputs = x.dimensions()[2];
    args.columns = w.dimensions()[2];
    checks.shape("w", w, {args.heads, args.inputs, args.columns});
    checks.shape("y", y, {args.heads, args.rows, args.columns});
    args.x = static_cast<const char*>(x.untyped_data()), args.w = static_cast<const char*>(w.untyped_data());
    args.y = static_cast<char*>(y.untyped_data());
    return checks.error;
}

// The arguments of a product; those of matrix m are parts[m]. Returns the error of the first check that fails.
inline std::string product_args(const AnyBuffer& x, ffi::RemainingArgs matrices, ffi::RemainingRets results,
                                bool transposed, bool silu, ProductArgs& args, ProductMatrix* parts) {
    ArrayChecks checks;
    checks.dtype("x", x, float_dtype_of(x, args.dtype), "float32, float16 or bfloat16");
    checks.rank("x", x, 2);
    if (silu)
        checks.require(matrices.size() == 2 && results.size() == 1 && !transposed,
                       "silu takes two matrices, not transposed, and makes one result");
    else
        checks.require(matrices.size() == results.size(), "there must be one result for each matrix");
    if (!checks.error.empty()) return checks.error;
    args.x = static_cast<const char*>(x.untyped_data());
    args.rows = x.dimensions()[0], args.inputs = x.dimensions()[1];
    args.num_matrices = (int64_t)matrices.size(), args.out_dtype = args.dtype;
    args.transposed = transposed, args.silu = silu;
    checks.count("the number of rows", args.rows, 0);
    checks.count("the number of inputs", args.inputs, 0);
    for (int64_t m = 0; m < args.num_matrices && checks.error.empty(); m++) {
        const auto w = matrices.get<AnyBuffer>(m);
        auto y = results.get<AnyBuffer>(silu ? 0 : m);
        if (!w.has_value() || !y.has_value()) return "matrices and results must be arrays";
        checks.dtype("w", *w, w->element_type() == x.element_type(), "the dtype of x");
        checks.rank("w", *w, 2);
        if (!checks.error.empty()) break;
        const int64_t columns = w->dimensions()[transposed ? 0 : 1];
        checks.count("the number of columns", columns, 0);
        checks.shape("w", *w, {transposed ? columns : args.inputs, transposed ? args.inputs : columns});
        checks.shape("y", **y, {args.rows, columns});
        Dtype out_dtype;
        checks.dtype("y", **y, float_dtype_of(**y, out_dtype) && (!m || out_dtype == args.out_dtype),
                     "float32, float16 or bfloat16, the same for all");
        args.out_dtype = out_dtype;
        parts[m] = {static_cast<const char*>(w->untyped_data()), static_cast<char*>((*y)->untyped_data()), columns};
    }
    return checks.error;
}

// The numbers of an array of float32; nullptr if it has none.
inline const float* floats_or_none(const AnyBuffer& array) {
    return array.element_count() ? static_cast<const float*>(array.untyped_data()) : nullptr;
}

// Groups that share scales: chunks of inputs must not have parts of two.
inline void group_checks(ArrayChecks& checks, int64_t groups, int64_t group_size, bool is_4_bits) {
    if (groups <= 1) return;
    checks.require(group_size % kPackedChunk == 0 || group_size % (kPackedChunk / 2) == 0 || group_size < kPackedChunk,
                   "groups have less than 64 inputs, or a multiple of 32");
    if (is_4_bits) checks.multiple("the inputs of a group", group_size, "the inputs of a word", 8);
}

// The same for weights in 4 or 8 bits: each matrix is four arrays, its values, scales, zero points and factor.
inline std::string packed_product_args(const AnyBuffer& x, ffi::RemainingArgs matrices, ffi::RemainingRets results,
                                       int32_t format, bool transposed, ProductArgs& args, ProductMatrix* parts) {
    ArrayChecks checks;
    checks.dtype("x", x, float_dtype_of(x, args.dtype), "float32, float16 or bfloat16");
    checks.rank("x", x, 2);
    checks.count("format", format, 0, (transposed ? kNumTransposedFormats : kNumFormats) - 1);
    checks.require(matrices.size() == 4 * results.size(), "there must be four arrays for each result");
    if (!checks.error.empty()) return checks.error;
    const bool is_4_bits = format >= (int)Format::int4;
    const auto stored = is_4_bits ? ffi::U32 : format == (int)Format::int8 ? ffi::S8 : ffi::U8;
    args.x = static_cast<const char*>(x.untyped_data());
    args.rows = x.dimensions()[0], args.inputs = x.dimensions()[1];
    args.num_matrices = (int64_t)results.size(), args.transposed = args.silu = false;
    args.out_dtype = args.scale_dtype = Dtype::f32, args.has_zero_points = false, args.group_size = args.inputs;
    checks.count("the number of rows", args.rows, 0);
    checks.count("the number of inputs", args.inputs, 0);
    if (is_4_bits) checks.multiple("the number of inputs", args.inputs, "the inputs of a word", 8);
    for (int64_t m = 0; m < args.num_matrices && checks.error.empty(); m++) {
        const auto w = matrices.get<AnyBuffer>(4 * m), scales = matrices.get<AnyBuffer>(4 * m + 1);
        const auto zero_points = matrices.get<AnyBuffer>(4 * m + 2), factor = matrices.get<AnyBuffer>(4 * m + 3);
        auto y = results.get<AnyBuffer>(m);
        if (!w.has_value() || !scales.has_value() || !zero_points.has_value() || !factor.has_value() || !y.has_value())
            return "matrices and results must be arrays";
        Dtype scale_dtype, out_dtype;
        checks.dtype("w", *w, w->element_type() == stored, "that of its format");
        checks.dtype("scales", *scales,
                     scale_dtype_of(*scales, scale_dtype) && (!m || scale_dtype == args.scale_dtype),
                     "float32, float16, bfloat16 or e4m3, the same for all");
        checks.dtype("zero_points", *zero_points, zero_points->element_type() == ffi::S8, "int8");
        checks.dtype("factor", *factor, factor->element_type() == ffi::F32, "float32");
        checks.dtype("y", **y, float_dtype_of(**y, out_dtype) && (!m || out_dtype == args.out_dtype),
                     "float32, float16 or bfloat16, the same for all");
        checks.rank("w", *w, 2);
        checks.rank("scales", *scales, 2);
        if (!checks.error.empty()) break;
        args.scale_dtype = scale_dtype, args.out_dtype = out_dtype;
        const int64_t columns = w->dimensions()[transposed ? 0 : 1], loads = args.inputs / (is_4_bits ? 8 : 1);
        const int64_t groups = scales->dimensions()[transposed ? 1 : 0];
        const bool has_zero_points = zero_points->element_count() > 0;
        checks.count("the number of columns", columns, 0);
        checks.count("the number of groups", groups, 1, transposed ? 1 : std::max<int64_t>(1, args.inputs));
        checks.shape("w", *w, {transposed ? columns : loads, transposed ? loads : columns});
        checks.shape("scales", *scales, {transposed ? columns : groups, transposed ? groups : columns});
        checks.shape_or_none("factor", *factor, {transposed ? columns : 1, transposed ? 1 : columns});
        checks.shape("y", **y, {args.rows, columns});
        if (!checks.error.empty()) break;
        checks.multiple("the number of inputs", args.inputs, "the number of groups", groups);
        const int64_t group_size = args.inputs / groups;
        group_checks(checks, groups, group_size, is_4_bits);
        if (has_zero_points) {
            checks.require(!transposed, "transposed matrices have no zero points");
            checks.rank("zero_points", *zero_points, 2);
            if (checks.error.empty()) checks.shape("zero_points", *zero_points, {groups, columns});
        }
        checks.require(!m || (group_size == args.group_size && has_zero_points == args.has_zero_points),
                       "all matrices must have groups of one size, and all zero points or none");
        args.group_size = std::max<int64_t>(1, group_size), args.has_zero_points = has_zero_points;
        parts[m] = {static_cast<const char*>(w->untyped_data()), static_cast<char*>((*y)->untyped_data()), columns,
                    static_cast<const char*>(scales->untyped_data()),
                    static_cast<const char*>(zero_points->untyped_data()), floats_or_none(*factor)};
    }
    return checks.error;
}

// The arguments of rows in the order of their experts: x [rows inputs], w [experts inputs columns], sizes [experts] of
// rows. Rows beyond the sum of the sizes are not computed.
inline std::string expert_product_args(const AnyBuffer& x, const AnyBuffer& w, const Int32Buffer& sizes,
                                       const AnyBuffer& y, ExpertProductArgs& args) {
    ArrayChecks checks;
    ProductArgs& form = args.form;
    checks.dtype("x", x, float_dtype_of(x, form.dtype), "float32, float16 or bfloat16");
    checks.dtype("w", w, w.element_type() == x.element_type(), "the dtype of x");
    checks.dtype("y", y, float_dtype_of(y, form.out_dtype), "float32, float16 or bfloat16");
    checks.rank("x", x, 2);
    checks.rank("w", w, 3);
    if (!checks.error.empty()) return checks.error;
    const int64_t experts = w.dimensions()[0];
    form.rows = x.dimensions()[0], form.inputs = args.inputs = x.dimensions()[1], args.columns = w.dimensions()[2];
    checks.shape("w", w, {experts, args.inputs, args.columns});
    checks.shape("sizes", sizes, {experts});
    checks.shape("y", y, {form.rows, args.columns});
    if (!checks.error.empty()) return checks.error;
    form.x = static_cast<const char*>(x.untyped_data());
    args.first = {static_cast<const char*>(w.untyped_data()), static_cast<char*>(y.untyped_data()), args.columns};
    args.w_bytes = args.inputs * args.columns * bytes_of(form.dtype);
    args.set_sizes(sizes.typed_data(), experts);
    return checks.error;
}

// The same for weights in 4 or 8 bits: scales and zero points [experts groups columns], factor [experts 1 columns].
inline std::string packed_expert_product_args(const AnyBuffer& x, const AnyBuffer& w, const AnyBuffer& scales,
                                              const AnyBuffer& zero_points, const AnyBuffer& factor,
                                              const Int32Buffer& sizes, const AnyBuffer& y, int32_t format,
                                              ExpertProductArgs& args) {
    ArrayChecks checks;
    ProductArgs& form = args.form;
    checks.count("format", format, 0, kNumFormats - 1);
    checks.dtype("x", x, float_dtype_of(x, form.dtype), "float32, float16 or bfloat16");
    checks.dtype("y", y, float_dtype_of(y, form.out_dtype), "float32, float16 or bfloat16");
    checks.dtype("scales", scales, scale_dtype_of(scales, form.scale_dtype), "float32, float16, bfloat16 or e4m3");
    checks.dtype("zero_points", zero_points, zero_points.element_type() == ffi::S8, "int8");
    checks.dtype("factor", factor, factor.element_type() == ffi::F32, "float32");
    checks.rank("x", x, 2);
    checks.rank("w", w, 3);
    checks.rank("scales", scales, 3);
    if (!checks.error.empty()) return checks.error;
    const bool is_4_bits = format >= (int)Format::int4;
    checks.dtype("w", w, w.element_type() == (is_4_bits ? ffi::U32 : format == (int)Format::int8 ? ffi::S8 : ffi::U8),
                 "that of its format");
    form.rows = x.dimensions()[0], form.inputs = args.inputs = x.dimensions()[1];
    if (is_4_bits) checks.multiple("the number of inputs", args.inputs, "the inputs of a word", 8);
    const int64_t experts = w.dimensions()[0], groups = scales.dimensions()[1];
    const int64_t loads = args.inputs / (is_4_bits ? 8 : 1);
    args.columns = w.dimensions()[2];
    checks.count("the number of groups", groups, 1, std::max<int64_t>(1, args.inputs));
    checks.shape("w", w, {experts, loads, args.columns});
    checks.shape("scales", scales, {experts, groups, args.columns});
    checks.shape_or_none("factor", factor, {experts, 1, args.columns});
    checks.shape("sizes", sizes, {experts});
    checks.shape("y", y, {form.rows, args.columns});
    form.has_zero_points = zero_points.element_count() > 0;
    if (form.has_zero_points) {
        checks.rank("zero_points", zero_points, 3);
        if (checks.error.empty()) checks.shape("zero_points", zero_points, {experts, groups, args.columns});
    }
    if (!checks.error.empty()) return checks.error;
    checks.multiple("the number of inputs", args.inputs, "the number of groups", groups);
    form.group_size = args.inputs / groups;
    group_checks(checks, groups, form.group_size, is_4_bits);
    form.x = static_cast<const char*>(x.untyped_data());
    args.first = {static_cast<const char*>(w.untyped_data()), static_cast<char*>(y.untyped_data()), args.columns,
                  static_cast<const char*>(scales.untyped_data()),
                  static_cast<const char*>(zero_points.untyped_data()), floats_or_none(factor)};
    args.w_bytes = loads * args.columns * (is_4_bits ? 4 : 1);
    args.scale_bytes = groups * args.columns * bytes_of(form.scale_dtype);
    args.zero_point_bytes = groups * args.columns;
    args.set_sizes(sizes.typed_data(), experts);
    return checks.error;
}

}  // namespace jattn
