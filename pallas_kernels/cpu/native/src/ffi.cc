// The custom calls, as XLA sees them: attention over pages or packed keys, the write into the pool, and a new pool.
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstring>
#include <string>
#include <string_view>

#include "dispatch.h"
#include "run.h"

namespace ffi = xla::ffi;
using namespace jattn;

namespace {

bool type_of(ffi::DataType t, Dtype& out) {
    switch (t) {
        case ffi::F32: out = Dtype::f32; return true;
        case ffi::F16: out = Dtype::f16; return true;
        case ffi::BF16: out = Dtype::bf16; return true;
        case ffi::F8E4M3FN: out = Dtype::e4m3; return true;
        case ffi::F8E5M2: out = Dtype::e5m2; return true;
        case ffi::S8: out = Dtype::i8; return true;
        default: return false;
    }
}

template <class T, class B>
const T* given(const B& x) {  // an empty array stands for None
    return x.element_count() ? static_cast<const T*>(x.untyped_data()) : nullptr;
}

ffi::Error unknown_isa(std::string_view isa) {
    return ffi::Error::InvalidArgument("isa=" + std::string(isa) + " does not run here; use one of " + known_isas());
}

// Fresh memory costs a page fault for every 4 KiB, a third of a float32 prefill's time for its output, and each such page
// of a pool an address translation of its own whenever it is read: ask for large pages.
void on_large_pages(const void* data, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = ((uintptr_t)data + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)data + bytes) & ~(page - 1);
    if (bytes >= (8u << 20) && end > begin) (void)madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

template <class P>
void set_strides(P& p, bool heads_first) {
    p.block_stride = (int64_t)p.kv_heads * p.block_size;
    p.head_stride = heads_first ? p.block_size : 1;
    p.slot_stride = heads_first ? 1 : p.kv_heads;
}

ffi::Error attend_call(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer k_token,
                  ffi::AnyBuffer v_token, ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> seq_len,
                  ffi::Buffer<ffi::S32> kv_len, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> kv_start,
                  ffi::Buffer<ffi::S32> causal, ffi::AnyBuffer slopes, ffi::AnyBuffer sinks, ffi::AnyBuffer q_scale,
                  ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<ffi::Buffer<ffi::F32>> lse, float scale, float soft_cap, int32_t left, int32_t right,
                  int32_t chunk, int32_t kv_type, bool heads_first, std::string_view isa, int32_t threads) {
    Problem p{};
    auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
    if (!type_of(q.element_type(), p.q_type) || !type_of(out->element_type(), p.out_type))
        return ffi::Error::InvalidArgument("queries must be float32, float16, bfloat16, fp8 or int8");
    p.kv_type = (Dtype)kv_type;
    p.q = static_cast<const char*>(q.untyped_data());
    p.k = static_cast<const char*>(k.untyped_data());
    p.v = static_cast<const char*>(v.untyped_data());
    p.k_token_scale = given<float>(k_token);
    p.v_token_scale = given<float>(v_token);
    p.query_start = query_start.typed_data();
    p.seq_len = seq_len.typed_data();
    p.kv_len = kv_len.typed_data();
    p.causal = given<int32_t>(causal);
    p.slopes = given<float>(slopes);
    p.sinks = given<float>(sinks);
    p.q_scale = given<float>(q_scale);
    p.k_scale = given<float>(k_scale);
    p.v_scale = given<float>(v_scale);
    p.out = static_cast<char*>(out->untyped_data());
    p.lse = lse->typed_data();
    p.tokens = qd[0], p.heads = (int32_t)qd[1], p.dim = (int32_t)qd[2];
    p.requests = seq_len.dimensions()[0];
    p.vdim = (int32_t)vd.back();
    if (kd.size() == 4) {
        p.table = table.typed_data();
        p.table_width = table.dimensions()[1];
        p.blocks = kd[0];
        p.kv_heads = (int32_t)(heads_first ? kd[1] : kd[2]);
        p.block_size = (int32_t)(heads_first ? kd[2] : kd[1]);
        set_strides(p, heads_first);
        if (p.table_width == 0) p.blocks = 0;
    } else {
        p.kv_start = kv_start.typed_data();
        p.packed_keys = kd[0];
        p.kv_heads = (int32_t)kd[1];
        p.block_size = 1, p.slot_stride = p.kv_heads, p.head_stride = 1;
    }
    p.group = p.heads / p.kv_heads;
    p.scale = scale, p.soft_cap = soft_cap, p.left = left, p.right = right, p.chunk = chunk;
    const Kernels* kernels = choose(std::string(isa), (int)p.q_type, p.kv_type);
    if (!kernels) return unknown_isa(isa);
    if (p.dim > 512 || p.vdim > 512) return ffi::Error::InvalidArgument("head dims above 512 are not supported");

    on_large_pages(p.out, out->size_bytes());
    p.stream_out = out->size_bytes() >= (8u << 20) && p.vdim * bytes_of(p.out_type) % 64 == 0 && (uintptr_t)p.out % 64 == 0;
    run_attend(pool, p, *kernels, threads);
    return ffi::Error::Success();
}

ffi::Error write_call(ffi::ThreadPool pool, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::Buffer<ffi::S32> slots,
                 ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, ffi::AnyBuffer k_in, ffi::AnyBuffer v_in,
                 ffi::AnyBuffer kt_in, ffi::AnyBuffer vt_in, ffi::Result<ffi::AnyBuffer> k_pool,
                 ffi::Result<ffi::AnyBuffer> v_pool, ffi::Result<ffi::AnyBuffer> k_token,
                 ffi::Result<ffi::AnyBuffer> v_token, int32_t kv_type, bool heads_first, std::string_view isa,
                 int32_t threads) {
    const std::pair<const ffi::AnyBuffer*, ffi::Result<ffi::AnyBuffer>*> pools[] = {
        {&k_in, &k_pool}, {&v_in, &v_pool}, {&kt_in, &k_token}, {&vt_in, &v_token}};
    for (auto& [from, to] : pools)  // XLA aliases them; should it ever not, the rest of the pool is still right
        if (from->size_bytes() && from->untyped_data() != (*to)->untyped_data())
            std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
    Write w{};
    auto kd = k.dimensions(), pd = k_in.dimensions();
    if (!type_of(k.element_type(), w.from) || k.element_type() != v.element_type())
        return ffi::Error::InvalidArgument("new keys and values must be of one float type");
    w.to = (Dtype)kv_type;
    w.k = static_cast<const char*>(k.untyped_data());
    w.v = static_cast<const char*>(v.untyped_data());
    w.k_pool = static_cast<char*>(k_pool->untyped_data());
    w.v_pool = static_cast<char*>(v_pool->untyped_data());
    w.k_token_scale = kt_in.element_count() ? static_cast<float*>(k_token->untyped_data()) : nullptr;
    w.v_token_scale = vt_in.element_count() ? static_cast<float*>(v_token->untyped_data()) : nullptr;
    w.slots = slots.typed_data();
    w.k_scale = given<float>(k_scale);
    w.v_scale = given<float>(v_scale);
    w.blocks = pd[0];
    w.block_size = (int32_t)(heads_first ? pd[2] : pd[1]);
    w.kv_heads = (int32_t)kd[1], w.dim = (int32_t)kd[2], w.vdim = (int32_t)v.dimensions()[2];
    set_strides(w, heads_first);
    const Kernels* kernels = choose(std::string(isa), -1, w.to);
    if (!kernels) return unknown_isa(isa);
    if (w.dim > 512 || w.vdim > 512) return ffi::Error::InvalidArgument("head dims above 512 are not supported");
    run_write(pool, w, *kernels, slots.dimensions()[0], threads);
    return ffi::Error::Success();
}

ffi::Error fill_call(ffi::ThreadPool pool, ffi::AnyBuffer value, ffi::Result<ffi::AnyBuffer> out) {
    const size_t width = value.size_bytes(), bytes = out->size_bytes(), piece = 16u << 20;
    if (value.element_count() != 1) return ffi::Error::InvalidArgument("one value fills an array");
    char pattern[4096];
    for (size_t i = 0; i + width <= sizeof pattern; i += width) std::memcpy(pattern + i, value.untyped_data(), width);
    char* const begin = static_cast<char*>(out->untyped_data());
    on_large_pages(begin, bytes);
    parallel_for(pool, (int64_t)((bytes + piece - 1) / piece), 0, [&](int64_t i, auto&) {
        const size_t end = std::min(bytes, (i + 1) * piece);
        for (size_t at = i * piece; at < end; at += sizeof pattern)
            std::memcpy(begin + at, pattern, std::min(sizeof pattern, end - at));
    });
    return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnAttend, attend_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()          // q, k, v, token scales
        .Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>()  // lengths, pages, causal
        .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()          // slopes, sinks, scales
        .Ret<Any>().Ret<ffi::Buffer<ffi::F32>>()
        .Attr<float>("scale").Attr<float>("soft_cap").Attr<int32_t>("left").Attr<int32_t>("right")
        .Attr<int32_t>("chunk").Attr<int32_t>("kv_type").Attr<bool>("heads_first").Attr<std::string_view>("isa")
        .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnWrite, write_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Any>().Arg<Any>().Arg<Ints>().Arg<Any>().Arg<Any>()  // k, v, slots, scales
        .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()              // the pool
        .Ret<Any>().Ret<Any>().Ret<Any>().Ret<Any>()
        .Attr<int32_t>("kv_type").Attr<bool>("heads_first").Attr<std::string_view>("isa").Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JattnFill, fill_call, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Ret<Any>());

extern "C" const char* jattn_isas() {  // "avx512_bf16, avx512, avx2": what runs here, best first
    static const std::string names = [] {
        std::string all = known_isas();
        return all.size() > 6 ? all.substr(6) : std::string();
    }();
    return names.c_str();
}
