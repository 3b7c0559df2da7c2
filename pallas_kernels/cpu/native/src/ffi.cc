// The custom calls that XLA makes: attention, the write of new keys and values, products, the draw of tokens, and the
// fill of a new pool.
// XLA is built without exceptions, so none may leave a call.
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "buffers.h"
#include "dispatch.h"
#include "run.h"
#include "run_product.h"

using namespace jattn;

namespace {

ffi::Error invalid_argument(const char* call, const std::string& why) {
    return ffi::Error::InvalidArgument(std::string("jattn_cpu_") + call + ": " + why);
}

ffi::Error unknown_isa(const char* call, std::string_view isa) {
    return invalid_argument(call, "isa=" + std::string(isa) + " does not run here; use one of auto, " + isa_names());
}

// Runs the body of a call and turns exceptions into errors.
template <class F>
ffi::Error catch_exceptions(const char* call, F&& body) {
    try {
        try {
            return body();
        } catch (const std::bad_alloc& error) {
            return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                              std::string("jattn_cpu_") + call + ": " + error.what());
        } catch (const std::exception& error) {
            return ffi::Error::Internal(std::string("jattn_cpu_") + call + ": " + error.what());
        }
    } catch (...) {  // no memory for the message
        return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
    }
}

// Asks Linux for 2 MiB pages for a large array: fewer page faults when it is written first, and fewer TLB misses when a
// pool is read. (With 4 KiB pages, the page faults of the output take a third of the time of a float32 prefill.)
void advise_huge_pages(const void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = ((uintptr_t)data + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)data + bytes) & ~(page - 1);
    if (bytes >= (8u << 20) && end > begin) (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

// The parameters of the calls are those of the bindings below, in their order.
ffi::Error attend_call(ffi::ThreadPool pool, AnyBuffer q, AnyBuffer k, AnyBuffer v, FloatBuffer k_token_scale,
                       FloatBuffer v_token_scale, Int32Buffer query_start_loc, Int32Buffer seq_lens,
                       Int32Buffer kv_lens, Int32Buffer block_table, Int32Buffer kv_start, Int32Buffer causal,
                       FloatBuffer alibi_slopes, FloatBuffer sinks, FloatBuffer q_scale, FloatBuffer k_scale,
                       FloatBuffer v_scale, ffi::Result<AnyBuffer> out, ffi::Result<FloatBuffer> lse, float scale,
                       float soft_cap, int32_t window_left, int32_t window_right, int32_t chunk_size,
                       int32_t latent_dim, int32_t kv_dtype, bool heads_first, std::string_view isa, int32_t threads) {
    return catch_exceptions("attend", [&] {
        const AttendBuffers buffers{q,        k,       v,           k_token_scale, v_token_scale, query_start_loc,
                                    seq_lens, kv_lens, block_table, kv_start,      causal,        alibi_slopes,
                                    sinks,    q_scale, k_scale,     v_scale,       *out,          *lse,
                                    latent_dim};
        const std::string error = buffers.error(kv_dtype, heads_first);
        if (!error.empty()) return invalid_argument("attend", error);
        AttentionArgs args = buffers.args(kv_dtype, heads_first);
        args.scale = scale, args.soft_cap = soft_cap;
        args.window_left = window_left, args.window_right = window_right, args.chunk_size = chunk_size;
        const IsaKernels* kernels = find_isa_for(std::string(isa), args.q_dtype, args.kv_dtype);
        if (!kernels) return unknown_isa("attend", isa);

        advise_huge_pages(args.out, out->size_bytes());
        args.stream_out = out->size_bytes() >= (8u << 20) && can_stream_out(args);  // larger than the caches
        run_attend(pool, args, *kernels, threads);
        return ffi::Error::Success();
    });
}

ffi::Error write_call(ffi::ThreadPool pool, AnyBuffer k, AnyBuffer v, Int32Buffer slot_mapping, FloatBuffer k_scale,
                      FloatBuffer v_scale, AnyBuffer k_pool, AnyBuffer v_pool, AnyBuffer k_token_scale,
                      AnyBuffer v_token_scale, ffi::Result<AnyBuffer> new_k_pool, ffi::Result<AnyBuffer> new_v_pool,
                      ffi::Result<AnyBuffer> new_k_token_scale, ffi::Result<AnyBuffer> new_v_token_scale,
                      int32_t kv_dtype, bool heads_first, std::string_view isa, int32_t threads) {
    return catch_exceptions("write", [&] {
        const WriteBuffers buffers{k,
                                   v,
                                   slot_mapping,
                                   k_scale,
                                   v_scale,
                                   {k_pool, *new_k_pool},
                                   {v_pool, *new_v_pool},
                                   {k_token_scale, *new_k_token_scale},
                                   {v_token_scale, *new_v_token_scale}};
        const std::string error = buffers.error(kv_dtype, heads_first);
        if (!error.empty()) return invalid_argument("write", error);
        buffers.copy_unaliased_pools();
        const IsaKernels* kernels = find_isa(std::string(isa));
        if (!kernels) return unknown_isa("write", isa);
        run_write(pool, buffers.args(kv_dtype, heads_first), *kernels, slot_mapping.dimensions()[0], threads);
        return ffi::Error::Success();
    });
}

// x times each matrix, into the result of the same place; or silu(x gate) * (x up).
ffi::Error product_call(ffi::ThreadPool pool, AnyBuffer x, ffi::RemainingArgs matrices, ffi::RemainingRets results,
                        bool transposed, bool silu, std::string_view isa, int32_t threads) {
    return catch_exceptions("product", [&] {
        ProductArgs args{};
        std::vector<ProductMatrix, Allocator<ProductMatrix>> parts(matrices.size());
        const std::string error = product_args(x, matrices, results, transposed, silu, args, parts.data());
        if (!error.empty()) return invalid_argument("product", error);
        args.matrices = parts.data();
        const ProductKernel* kernel = find_product(std::string(isa), args.dtype);
        if (!kernel) return unknown_isa("product", isa);
        run_product(pool, args, *kernel, threads);
        return ffi::Error::Success();
    });
}

// x[h] times w[h], for each head.
ffi::Error head_product_call(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer w, ffi::Result<AnyBuffer> y,
                             std::string_view isa, int32_t threads) {
    return catch_exceptions("head_product", [&] {
        HeadProductArgs args;
        const std::string error = head_product_args(x, w, *y, args);
        if (!error.empty()) return invalid_argument("head_product", error);
        const ProductKernel* kernel = find_product(std::string(isa), args.dtype);
        if (!kernel) return unknown_isa("head_product", isa);
        run_grouped_products(pool, args, *kernel, threads);
        return ffi::Error::Success();
    });
}

// The same with weights in 4 or 8 bits.
ffi::Error packed_product_call(ffi::ThreadPool pool, AnyBuffer x, ffi::RemainingArgs matrices,
                               ffi::RemainingRets results, int32_t format, bool transposed, std::string_view isa,
                               int32_t threads) {
    return catch_exceptions("packed_product", [&] {
        ProductArgs args{};
        std::vector<ProductMatrix, Allocator<ProductMatrix>> parts(results.size());
        const std::string error = packed_product_args(x, matrices, results, format, transposed, args, parts.data());
        if (!error.empty()) return invalid_argument("packed_product", error);
        args.matrices = parts.data();
        const ProductKernel* kernel = find_packed_product(std::string(isa), (Format)format, args, transposed);
        if (!kernel) return unknown_isa("packed_product", isa);
        run_product(pool, args, *kernel, threads);
        return ffi::Error::Success();
    });
}

// Rows in the order of their experts, times the weights of these.
ffi::Error expert_product_call(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer w, Int32Buffer sizes,
                               ffi::Result<AnyBuffer> y, std::string_view isa, int32_t threads) {
    return catch_exceptions("expert_product", [&] {
        ExpertProductArgs args{};
        const std::string error = expert_product_args(x, w, sizes, *y, args);
        if (!error.empty()) return invalid_argument("expert_product", error);
        const ProductKernel* kernel = find_product(std::string(isa), args.form.dtype);
        if (!kernel) return unknown_isa("expert_product", isa);
        run_grouped_products(pool, args, *kernel, threads);
        return ffi::Error::Success();
    });
}

// The same with weights in 4 or 8 bits.
ffi::Error packed_expert_product_call(ffi::ThreadPool pool, AnyBuffer x, AnyBuffer w, AnyBuffer scales,
                                      AnyBuffer zero_points, AnyBuffer factor, Int32Buffer sizes,
                                      ffi::Result<AnyBuffer> y, int32_t format, std::string_view isa,
                                      int32_t threads) {
    return catch_exceptions("packed_expert_product", [&] {
        ExpertProductArgs args{};
        const std::string error =
            packed_expert_product_args(x, w, scales, zero_points, factor, sizes, *y, format, args);
        if (!error.empty()) return invalid_argument("packed_expert_product", error);
        const ProductKernel* kernel = find_packed_product(std::string(isa), (Format)format, args.form, false);
        if (!kernel) return unknown_isa("packed_expert_product", isa);
        run_grouped_products(pool, args, *kernel, threads);
        return ffi::Error::Success();
    });
}

// A token of each row, drawn by its rules.
ffi::Error draw_call(ffi::ThreadPool pool, FloatBuffer logits, FloatBuffer temperature, Int32Buffer top_k,
                     FloatBuffer top_p, FloatBuffer least, Uint32Buffer keys, ffi::Result<Int32Buffer> tokens,
                     ffi::Result<FloatBuffer> floors, std::string_view isa, int32_t threads) {
    return catch_exceptions("draw", [&] {
        DrawArgs args;
        const std::string error = draw_args(logits, temperature, top_k, top_p, least, keys, *tokens, *floors, args);
        if (!error.empty()) return invalid_argument("draw", error);
        const IsaKernels* kernels = find_isa(std::string(isa));
        if (!kernels) return unknown_isa("draw", isa);
        run_draw(pool, args, *kernels, threads);
        return ffi::Error::Success();
    });
}

// Fills an array with one value.
ffi::Error fill_call(ffi::ThreadPool pool, AnyBuffer value, ffi::Result<AnyBuffer> out) {
    return catch_exceptions("fill", [&] {
        const size_t width = value.size_bytes(), bytes = out->size_bytes(), part = 16u << 20;
        char pattern[4096];
        const bool is_one = value.element_count() == 1 && value.element_type() == out->element_type();
        if (!is_one || !width || sizeof pattern % width)
            return invalid_argument("fill", "the value must be one element of the dtype of the array");
        for (size_t i = 0; i < sizeof pattern; i += width) std::memcpy(pattern + i, value.untyped_data(), width);
        char* const begin = static_cast<char*>(out->untyped_data());
        advise_huge_pages(begin, bytes);
        parallel_for(pool, (int64_t)((bytes + part - 1) / part), 0, [&](int64_t i, auto&) {
            const size_t end = std::min(bytes, (i + 1) * part);
            for (size_t at = i * part; at < end; at += sizeof pattern)
                std::memcpy(begin + at, pattern, std::min(sizeof pattern, end - at));
        });
        return ffi::Error::Success();
    });
}

}  // namespace

#pragma GCC visibility push(default)  // nothing else is exported: two libraries in one process share no symbols

// clang-format off
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnAttend, attend_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()          // q, k, v
        .Arg<FloatBuffer>().Arg<FloatBuffer>()                       // token scales
        .Arg<Int32Buffer>().Arg<Int32Buffer>().Arg<Int32Buffer>()    // query_start_loc, seq_lens, kv_lens
        .Arg<Int32Buffer>().Arg<Int32Buffer>().Arg<Int32Buffer>()    // block_table, kv_start, causal
        .Arg<FloatBuffer>().Arg<FloatBuffer>()                       // alibi_slopes, sinks
        .Arg<FloatBuffer>().Arg<FloatBuffer>().Arg<FloatBuffer>()    // scales
        .Ret<AnyBuffer>().Ret<FloatBuffer>()
        .Attr<float>("scale").Attr<float>("soft_cap").Attr<int32_t>("window_left").Attr<int32_t>("window_right")
        .Attr<int32_t>("chunk_size").Attr<int32_t>("latent_dim").Attr<int32_t>("kv_dtype").Attr<bool>("heads_first")
        .Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnWrite, write_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<Int32Buffer>()                      // k, v, slot_mapping
        .Arg<FloatBuffer>().Arg<FloatBuffer>()                                     // scales
        .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()       // pools and their token scales
        .Ret<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>().Ret<AnyBuffer>()
        .Attr<int32_t>("kv_dtype").Attr<bool>("heads_first").Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnProduct, product_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().RemainingArgs().RemainingRets()
        .Attr<bool>("transposed").Attr<bool>("silu").Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnHeadProduct, head_product_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>().Ret<AnyBuffer>()
        .Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnPackedProduct, packed_product_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().RemainingArgs().RemainingRets()
        .Attr<int32_t>("format").Attr<bool>("transposed").Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnExpertProduct, expert_product_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<Int32Buffer>().Ret<AnyBuffer>()  // x, w, sizes
        .Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnPackedExpertProduct, packed_expert_product_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<AnyBuffer>()                     // x, w, scales
        .Arg<AnyBuffer>().Arg<AnyBuffer>().Arg<Int32Buffer>().Ret<AnyBuffer>()  // zero points, factor, sizes
        .Attr<int32_t>("format").Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnDraw, draw_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<FloatBuffer>().Arg<FloatBuffer>().Arg<Int32Buffer>()     // logits, temperature, top_k
        .Arg<FloatBuffer>().Arg<FloatBuffer>().Arg<Uint32Buffer>()    // top_p, least, keys
        .Ret<Int32Buffer>().Ret<FloatBuffer>()                       // tokens, floors
        .Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnFill, fill_call, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<AnyBuffer>().Ret<AnyBuffer>());
// clang-format on

extern "C" const char* jattn_isas() {  // the ISAs that run here, best first: "avx512_bf16, avx512, avx2"
    static const std::string names = isa_names();
    return names.c_str();
}

#ifdef JATTN_MUTANTS
extern "C" void jattn_switch_on(int mutant) { jattn::mutant = (jattn::Mutant)mutant; }
#endif

#pragma GCC visibility pop
