// The custom calls, as XLA sees them: attention over pages or packed keys, the write into the pool, and a new pool.
// Every array is checked before it is used, and no exception leaves a call: XLA is built without exceptions.
#include "xla/ffi/api/ffi.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "arrays.h"
#include "dispatch.h"
#include "run.h"

using namespace jattn;
using Any = ffi::AnyBuffer;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

namespace {

constexpr int kMaxDim = 512;

ffi::Error refuse(const char* call, const std::string& why) {
    return ffi::Error::InvalidArgument(std::string("jattn_cpu_") + call + ": " + why);
}

// Runs the body of a call and turns exceptions into errors.
template <class F>
ffi::Error guarded(const char* call, F&& body) {
    try {
        try {
            return body();
        } catch (const std::bad_alloc& error) {
            return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string("jattn_cpu_") + call + ": " + error.what());
        } catch (const std::exception& error) {
            return ffi::Error::Internal(std::string("jattn_cpu_") + call + ": " + error.what());
        }
    } catch (...) {  // no memory for the message either
        return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory");
    }
}

const float* given(const Floats& x) { return x.element_count() ? x.typed_data() : nullptr; }  // no elements: None

std::string unknown_isa(std::string_view isa) {
    return "isa=" + std::string(isa) + " does not run here; use one of " + known_isas();
}

// Asks for 2 MiB pages for large arrays: fewer page faults in fresh memory (with 4 KiB pages those of the output take a
// third of a float32 prefill's time), and fewer TLB misses when a pool is read.
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

// What is wrong with the arrays of attention; "" if nothing is.
std::string wrong_with(const Any& q, const Any& k, const Any& v, const Floats& k_token, const Floats& v_token,
                       const Ints& query_start, const Ints& seq_len, const Ints& kv_len, const Ints& table,
                       const Ints& kv_start, const Ints& causal, const Floats& slopes, const Floats& sinks,
                       const Floats& q_scale, const Floats& k_scale, const Floats& v_scale, const Any& out,
                       const Floats& lse, int32_t kv_type, bool heads_first) {
    Arrays arrays;
    Dtype type;
    const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
    arrays.must(type_of(q.element_type(), type), "queries must be float32, float16, bfloat16, fp8 or int8");
    arrays.must(type_of(out.element_type(), type) && bytes_of(type) > 1, "out must be float32, float16 or bfloat16");
    arrays.must(kv_type >= 0 && kv_type < kDtypes, "kv_type is no type of keys and values");
    arrays.must(holds(k.element_type(), (Dtype)kv_type) && holds(v.element_type(), (Dtype)kv_type),
                "keys and values must be arrays of the one type that kv_type names");
    arrays.rank("q", q, 3);
    arrays.must(kd.size() == 3 || kd.size() == 4, "keys must be packed [Tk K D] or pages of rank 4");
    arrays.rank("v", v, kd.size());
    arrays.rank("seq_lens", seq_len, 1);
    arrays.rank("block_table", table, 2);
    if (!arrays.wrong.empty()) return arrays.wrong;

    const bool paged = kd.size() == 4;
    const int64_t tokens = qd[0], heads = qd[1], requests = seq_len.dimensions()[0];
    const int64_t kv_heads = kd[paged && !heads_first ? 2 : 1], width = paged ? table.dimensions().back() : 0;
    arrays.count("the number of tokens", tokens, 0);
    arrays.count("the number of requests", requests, 0, INT32_MAX / 4);
    arrays.count("the number of query heads", heads, 1);
    arrays.count("the number of kv heads", kv_heads, 1);
    arrays.count("head_dim", qd[2], 1, kMaxDim);
    arrays.count("v_head_dim", vd.back(), 1, kMaxDim);
    if (!arrays.wrong.empty()) return arrays.wrong;
    arrays.must(heads % kv_heads == 0, "query heads must be a multiple of kv heads");
    if (paged) {
        arrays.shape("k", k, {kd[0], kd[1], kd[2], qd[2]});
        arrays.shape("v", v, {kd[0], kd[1], kd[2], vd[3]});
        arrays.count("the page size", kd[heads_first ? 2 : 1], 0);
        arrays.shape("block_table", table, {requests, width});
        arrays.count("the width of the block table", width, 0);
        arrays.shape_or_none("k_token_scale", k_token, {kd[0], kd[1], kd[2]});
        arrays.shape_or_none("v_token_scale", v_token, {kd[0], kd[1], kd[2]});
    } else {
        arrays.shape("k", k, {kd[0], kd[1], qd[2]});
        arrays.shape("v", v, {kd[0], kd[1], vd[2]});
        arrays.shape("kv_start", kv_start, {requests});
        arrays.shape_or_none("k_token_scale", k_token, {kd[0], kd[1]});
        arrays.shape_or_none("v_token_scale", v_token, {kd[0], kd[1]});
    }
    arrays.shape("query_start_loc", query_start, {requests + 1});
    arrays.shape("kv_lens", kv_len, {requests});
    arrays.shape_or_none("causal", causal, {requests});
    arrays.shape_or_none("alibi_slopes", slopes, {heads});
    arrays.shape_or_none("sinks", sinks, {heads});
    arrays.shape_or_none("q_scale", q_scale, {heads});
    arrays.shape_or_none("k_scale", k_scale, {kv_heads});
    arrays.shape_or_none("v_scale", v_scale, {kv_heads});
    arrays.shape("out", out, {tokens, heads, vd.back()});
    arrays.shape("lse", lse, {tokens, heads});
    return arrays.wrong;
}

ffi::Error attend_call(ffi::ThreadPool pool, Any q, Any k, Any v, Floats k_token, Floats v_token, Ints query_start,
                       Ints seq_len, Ints kv_len, Ints table, Ints kv_start, Ints causal, Floats slopes, Floats sinks,
                       Floats q_scale, Floats k_scale, Floats v_scale, ffi::Result<Any> out, ffi::Result<Floats> lse,
                       float scale, float soft_cap, int32_t left, int32_t right, int32_t chunk, int32_t kv_type,
                       bool heads_first, std::string_view isa, int32_t threads) {
    return guarded("attend", [&] {
        const std::string wrong =
            wrong_with(q, k, v, k_token, v_token, query_start, seq_len, kv_len, table, kv_start, causal, slopes, sinks,
                       q_scale, k_scale, v_scale, *out, *lse, kv_type, heads_first);
        if (!wrong.empty()) return refuse("attend", wrong);
        Problem p{};
        const auto qd = q.dimensions(), kd = k.dimensions();
        type_of(q.element_type(), p.q_type), type_of(out->element_type(), p.out_type);
        p.kv_type = (Dtype)kv_type;
        p.q = static_cast<const char*>(q.untyped_data());
        p.k = static_cast<const char*>(k.untyped_data());
        p.v = static_cast<const char*>(v.untyped_data());
        p.k_token_scale = given(k_token), p.v_token_scale = given(v_token);
        p.query_start = query_start.typed_data(), p.seq_len = seq_len.typed_data(), p.kv_len = kv_len.typed_data();
        p.causal = causal.element_count() ? causal.typed_data() : nullptr;
        p.slopes = given(slopes), p.sinks = given(sinks);
        p.q_scale = given(q_scale), p.k_scale = given(k_scale), p.v_scale = given(v_scale);
        p.out = static_cast<char*>(out->untyped_data());
        p.lse = lse->typed_data();
        p.tokens = qd[0], p.heads = (int32_t)qd[1], p.dim = (int32_t)qd[2];
        p.requests = seq_len.dimensions()[0];
        p.vdim = (int32_t)v.dimensions().back();
        p.paged = kd.size() == 4;
        if (p.paged) {
            p.table = table.typed_data();
            p.table_width = table.dimensions()[1];
            p.blocks = kd[0];
            p.kv_heads = (int32_t)(heads_first ? kd[1] : kd[2]);
            p.block_size = (int32_t)(heads_first ? kd[2] : kd[1]);
            set_strides(p, heads_first);
        } else {
            p.kv_start = kv_start.typed_data();
            p.packed_keys = kd[0];
            p.kv_heads = (int32_t)kd[1];
            p.block_size = 1, p.slot_stride = p.kv_heads, p.head_stride = 1;
        }
        p.group = p.heads / p.kv_heads;
        p.scale = scale, p.soft_cap = soft_cap, p.left = left, p.right = right, p.chunk = chunk;
        const Kernels* kernels = choose(std::string(isa), (int)p.q_type, p.kv_type);
        if (!kernels) return refuse("attend", unknown_isa(isa));

        on_large_pages(p.out, out->size_bytes());
        p.stream_out = out->size_bytes() >= (8u << 20) && may_stream(p);
        run_attend(pool, p, *kernels, threads);
        return ffi::Error::Success();
    });
}

using Pool = std::pair<const Any*, ffi::Result<Any>*>;  // input, output

std::string wrong_with(const Any& k, const Any& v, const Ints& slots, const Floats& k_scale, const Floats& v_scale,
                       const Pool (&pools)[4], int32_t kv_type, bool heads_first) {
    Arrays arrays;
    Dtype type;
    const auto kd = k.dimensions(), vd = v.dimensions(), pd = pools[0].first->dimensions();
    arrays.must(type_of(k.element_type(), type) && k.element_type() == v.element_type(),
                "new keys and values must be of one float type");
    arrays.must(kv_type >= 0 && kv_type < kDtypes, "kv_type is no type of keys and values");
    for (int i = 0; i < 2; i++)
        arrays.must(holds(pools[i].first->element_type(), (Dtype)kv_type), "pools must be arrays of the type that kv_type names");
    for (int i = 2; i < 4; i++) arrays.must(pools[i].first->element_type() == ffi::F32, "token scales must be float32");
    arrays.rank("k", k, 3);
    arrays.rank("v", v, 3);
    arrays.rank("the pool of keys", *pools[0].first, 4);
    if (!arrays.wrong.empty()) return arrays.wrong;

    arrays.count("the number of tokens", kd[0], 0);
    arrays.count("the number of kv heads", kd[1], 1);
    arrays.count("head_dim", kd[2], 1, kMaxDim);
    arrays.count("v_head_dim", vd[2], 1, kMaxDim);
    arrays.count("the page size", pd[heads_first ? 2 : 1], 0);
    arrays.shape("v", v, {kd[0], kd[1], vd[2]});
    arrays.shape("slot_mapping", slots, {kd[0]});
    arrays.shape_or_none("k_scale", k_scale, {kd[1]});
    arrays.shape_or_none("v_scale", v_scale, {kd[1]});
    const int64_t first = heads_first ? kd[1] : pd[1], second = heads_first ? pd[2] : kd[1];
    arrays.shape("the pool of keys", *pools[0].first, {pd[0], first, second, kd[2]});
    arrays.shape("the pool of values", *pools[1].first, {pd[0], first, second, vd[2]});
    for (int i = 2; i < 4; i++) arrays.shape_or_none("a pool's token scales", *pools[i].first, {pd[0], first, second});
    for (const auto& [from, to] : pools)
        arrays.must((*to)->size_bytes() == from->size_bytes(), "a pool must leave the call with the size it came with");
    return arrays.wrong;
}

ffi::Error write_call(ffi::ThreadPool pool, Any k, Any v, Ints slots, Floats k_scale, Floats v_scale, Any k_in, Any v_in,
                      Any kt_in, Any vt_in, ffi::Result<Any> k_pool, ffi::Result<Any> v_pool, ffi::Result<Any> k_token,
                      ffi::Result<Any> v_token, int32_t kv_type, bool heads_first, std::string_view isa, int32_t threads) {
    return guarded("write", [&] {
        const Pool pools[] = {{&k_in, &k_pool}, {&v_in, &v_pool}, {&kt_in, &k_token}, {&vt_in, &v_token}};
        const std::string wrong = wrong_with(k, v, slots, k_scale, v_scale, pools, kv_type, heads_first);
        if (!wrong.empty()) return refuse("write", wrong);
        for (auto& [from, to] : pools)  // XLA aliases input and output; if it ever does not, the rest of the pool is copied
            if (from->size_bytes() && from->untyped_data() != (*to)->untyped_data())
                std::memcpy((*to)->untyped_data(), from->untyped_data(), from->size_bytes());
        Write w{};
        const auto kd = k.dimensions(), pd = k_in.dimensions();
        type_of(k.element_type(), w.from);
        w.to = (Dtype)kv_type;
        w.k = static_cast<const char*>(k.untyped_data());
        w.v = static_cast<const char*>(v.untyped_data());
        w.k_pool = static_cast<char*>(k_pool->untyped_data());
        w.v_pool = static_cast<char*>(v_pool->untyped_data());
        w.k_token_scale = kt_in.element_count() ? static_cast<float*>(k_token->untyped_data()) : nullptr;
        w.v_token_scale = vt_in.element_count() ? static_cast<float*>(v_token->untyped_data()) : nullptr;
        w.slots = slots.typed_data();
        w.k_scale = given(k_scale), w.v_scale = given(v_scale);
        w.blocks = pd[0];
        w.block_size = (int32_t)(heads_first ? pd[2] : pd[1]);
        w.kv_heads = (int32_t)kd[1], w.dim = (int32_t)kd[2], w.vdim = (int32_t)v.dimensions()[2];
        set_strides(w, heads_first);
        const Kernels* kernels = choose(std::string(isa), -1, w.to);
        if (!kernels) return refuse("write", unknown_isa(isa));
        run_write(pool, w, *kernels, slots.dimensions()[0], threads);
        return ffi::Error::Success();
    });
}

ffi::Error fill_call(ffi::ThreadPool pool, Any value, ffi::Result<Any> out) {
    return guarded("fill", [&] {
        const size_t width = value.size_bytes(), bytes = out->size_bytes(), piece = 16u << 20;
        char pattern[4096];
        const bool one = value.element_count() == 1 && value.element_type() == out->element_type();
        if (!one || !width || sizeof pattern % width)
            return refuse("fill", "one value of the array's own type fills it");
        for (size_t i = 0; i < sizeof pattern; i += width) std::memcpy(pattern + i, value.untyped_data(), width);
        char* const begin = static_cast<char*>(out->untyped_data());
        on_large_pages(begin, bytes);
        parallel_for(pool, (int64_t)((bytes + piece - 1) / piece), 0, [&](int64_t i, auto&) {
            const size_t end = std::min(bytes, (i + 1) * piece);
            for (size_t at = i * piece; at < end; at += sizeof pattern)
                std::memcpy(begin + at, pattern, std::min(sizeof pattern, end - at));
        });
        return ffi::Error::Success();
    });
}

}  // namespace

#pragma GCC visibility push(default)  // only these are exported: two libraries in one process share no symbols

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnAttend, attend_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Floats>().Arg<Floats>()             // q, k, v, token scales
        .Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>().Arg<Ints>()  // lengths, pages, causal
        .Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>()    // slopes, sinks, scales
        .Ret<Any>().Ret<Floats>()
        .Attr<float>("scale").Attr<float>("soft_cap").Attr<int32_t>("left").Attr<int32_t>("right")
        .Attr<int32_t>("chunk").Attr<int32_t>("kv_type").Attr<bool>("heads_first").Attr<std::string_view>("isa")
        .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    JattnWrite, write_call,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<Any>().Arg<Any>().Arg<Ints>().Arg<Floats>().Arg<Floats>()  // k, v, slots, scales
        .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()                    // the pool
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

#ifdef JATTN_MUTANTS
extern "C" void jattn_switch_on(int mutant) { jattn::mutant = (jattn::Mutant)mutant; }
#endif

#pragma GCC visibility pop
