// Random batches whose lengths, tables and starts hold garbage, through every kernel that this machine runs; built with
// sanitizers by fuzz.sh, which then see every access. Buffers have exactly the size that the kernel may touch.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <vector>

#include "dispatch.h"
#include "lengths.h"
#include "schedule.h"

using namespace jattn;

static std::mt19937 rng;
static int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
static int32_t garbage(int high) {
    const int32_t extreme[] = {INT32_MIN, INT32_MIN + 1, -1, 0, 1, INT32_MAX - 1, INT32_MAX};
    return pick(0, 3) ? pick(0, high) : extreme[pick(0, 6)];
}
template <class T>
static std::unique_ptr<T[]> array(size_t n, T fill) {  // exactly n elements: one past is seen
    std::unique_ptr<T[]> x(new T[n]);
    for (size_t i = 0; i < n; i++) x[i] = fill;
    return x;
}

static void one(const Kernels& kernels) {
    Problem p{};
    p.kv_type = (Dtype)pick(0, kDtypes - 1);
    p.q_type = (Dtype)pick(0, 2);
    if (!serves(kernels, p.q_type, p.kv_type)) return;
    p.out_type = p.q_type;
    p.kv_heads = pick(1, 3), p.group = pick(1, 5), p.heads = p.kv_heads * p.group;
    p.dim = pick(1, 70), p.vdim = pick(1, 70), p.block_size = pick(1, 9), p.blocks = pick(1, 6);
    p.tokens = pick(1, 90), p.requests = pick(1, 4), p.table_width = pick(1, 40);
    const bool heads_first = pick(0, 1);
    p.block_stride = (int64_t)p.kv_heads * p.block_size;
    p.head_stride = heads_first ? p.block_size : 1, p.slot_stride = heads_first ? 1 : p.kv_heads;
    const size_t rows = p.blocks * p.block_stride;
    auto q = array<char>(p.tokens * p.heads * p.dim * bytes_of(p.q_type), 0);
    auto k = array<char>(rows * p.dim * bytes_of(p.kv_type), 0), v = array<char>(rows * p.vdim * bytes_of(p.kv_type), 0);
    auto out = array<char>(p.tokens * p.heads * p.vdim * bytes_of(p.out_type), 0);
    auto lse = array<float>(p.tokens * p.heads, 0.0f), token_scale = array<float>(rows, 1.0f);
    auto start = array<int32_t>(p.requests + 1, 0), seq = array<int32_t>(p.requests, 0);
    auto kv = array<int32_t>(p.requests, 0), causal = array<int32_t>(p.requests, 0);
    auto table = array<int32_t>(p.requests * p.table_width, 0);
    auto slopes = array<float>(p.heads, 0.5f), sinks = array<float>(p.heads, 0.1f);
    for (int i = 0; i <= p.requests; i++) start[i] = garbage((int)p.tokens);
    for (int i = 0; i < p.requests; i++)
        seq[i] = garbage(100), kv[i] = garbage(100), causal[i] = pick(0, 1);
    for (int i = 0; i < p.requests * p.table_width; i++) table[i] = garbage((int)p.blocks);
    p.q = q.get(), p.k = k.get(), p.v = v.get(), p.out = out.get(), p.lse = lse.get();
    p.query_start = start.get(), p.seq_len = seq.get(), p.kv_len = kv.get(), p.table = table.get();
    p.causal = pick(0, 1) ? causal.get() : nullptr;
    p.slopes = pick(0, 1) ? slopes.get() : nullptr, p.sinks = pick(0, 1) ? sinks.get() : nullptr;
    if (pick(0, 1)) p.k_token_scale = p.v_token_scale = token_scale.get();
    p.scale = 0.3f, p.soft_cap = pick(0, 1) ? 2.0f : 0.0f;
    p.left = pick(-1, 30), p.right = pick(-1, 9), p.chunk = pick(0, 1) ? pick(1, 40) : 0;

    Lengths lengths(p);
    Schedule schedule = make_schedule(p);
    auto partials = array<float>(schedule.partial_floats, 0.0f);
    auto counters = array<int32_t>(schedule.counters, 0);
    const size_t size = (scratch_bytes(p) + 4095) / 4096 * 4096;
    std::unique_ptr<char, decltype(&std::free)> scratch((char*)std::aligned_alloc(4096, size), &std::free);
    for (const Work& w : schedule.works)
        for (int head = 0; head < p.kv_heads; head++)
            kernels.attend[(int)p.kv_type](p, w, head, partials.get(), counters.get(), scratch.get());
}

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const std::time_t begin = std::time(nullptr);
    long batches = 0;
    for (; std::difftime(std::time(nullptr), begin) < seconds; batches++) {
        rng.seed((unsigned)batches);
        for (const Kernels* kernels : runnable()) one(*kernels);
    }
    std::printf("%ld random batches on %s: no access outside, no undefined behaviour\n", batches, known_isas().c_str());
}
