// A random batch that owns its memory. Every buffer has exactly the size that a kernel may touch, so that a sanitizer
// sees one step too far.
#pragma once
#include <algorithm>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "dispatch.h"
#include "numbers.h"

namespace jattn {

template <class T>
class Exact {  // std::vector may keep more than it shows
   public:
    // n elements up to the end of their memory, `offset` bytes behind a cache line: a multiple of an element's size.
    void make(size_t n, T fill, size_t offset = 0) {
        data_.reset(new (std::align_val_t(64)) char[offset + n * sizeof(T)]);
        begin_ = reinterpret_cast<T*>(data_.get() + offset);
        for (size_t i = 0; i < n; i++) begin_[i] = fill;
    }
    T* get() { return begin_; }
    T& operator[](size_t i) { return begin_[i]; }

   private:
    struct Free {
        void operator()(char* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<char[], Free> data_;
    T* begin_ = nullptr;
};

class Batch {
   public:
    Problem p{};
    Write w{};
    bool sane;  // lengths and tables that a scheduler could have made

    Batch(unsigned seed, bool sane_lengths) : sane(sane_lengths), rng_(seed) {
        choose_shapes();
        choose_lengths();
        choose_options();
        choose_write();
        maybe_pack();
    }

   private:
    std::mt19937 rng_;
    Exact<char> q_, k_, v_, out_, new_k_, new_v_, k_pool_, v_pool_;
    Exact<float> lse_, token_scale_, head_scale_, slopes_, sinks_, k_token_, v_token_;
    Exact<int32_t> start_, seq_, kv_, causal_, table_, kv_start_, slots_;

    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    int32_t garbage(int high) {
        const int32_t extreme[] = {INT32_MIN, INT32_MIN + 1, -1, 0, 1, INT32_MAX - 1, INT32_MAX};
        return pick(0, 3) ? pick(0, high) : extreme[pick(0, 6)];
    }
    const char* numbers(Exact<char>& to, Dtype t, int64_t count) {
        to.make(count * bytes_of(t), 0, pick(0, 3) ? 0 : bytes_of(t));
        for (int64_t i = 0; i < count; i++) random_number(t, rng_, to.get(), i);
        return to.get();
    }

    void choose_shapes() {
        p.kv_type = (Dtype)pick(0, kDtypes - 1);
        p.q_type = (Dtype)pick(0, 2);
        p.out_type = p.q_type;
        p.kv_heads = pick(1, 3), p.group = pick(1, 5), p.heads = p.kv_heads * p.group;
        p.dim = pick(1, 70), p.vdim = pick(1, 70), p.blocks = pick(1, 40);
        p.block_size = pick(0, 7) ? pick(1, 9) : pick(1, 70);  // large: several blocks of keys, and pieces
        p.tokens = pick(1, 90), p.requests = pick(1, 4), p.table_width = pick(1, 60);
        switch (pick(0, 47)) {  // nothing of something
            case 0: p.tokens = 0; break;
            case 1: p.requests = 0; break;
            case 2: p.table_width = 0; break;
            case 3: p.blocks = 0; break;
            case 4: p.block_size = 0; break;
        }
        const bool heads_first = pick(0, 1);
        p.block_stride = (int64_t)p.kv_heads * p.block_size;
        p.head_stride = heads_first ? p.block_size : 1, p.slot_stride = heads_first ? 1 : p.kv_heads;
        const int64_t rows = p.blocks * p.block_stride;
        p.q = numbers(q_, p.q_type, p.tokens * p.heads * p.dim);
        p.k = numbers(k_, p.kv_type, rows * p.dim);
        p.v = numbers(v_, p.kv_type, rows * p.vdim);
        out_.make(p.tokens * p.heads * p.vdim * bytes_of(p.out_type), 0x55, pick(0, 3) ? 0 : bytes_of(p.out_type));
        lse_.make(p.tokens * p.heads, 7.0f);
        p.out = out_.get(), p.lse = lse_.get();
        p.stream_out = pick(0, 1) && may_stream(p);
    }

    void choose_lengths() {
        const int room = (int)(p.blocks ? p.table_width * p.block_size : 0);
        start_.make(p.requests + 1, 0), seq_.make(p.requests, 0), kv_.make(p.requests, 0);
        causal_.make(p.requests, 0), table_.make(p.requests * p.table_width, 0);
        for (int i = 0; i <= p.requests; i++) start_[i] = sane ? 0 : garbage((int)p.tokens);
        for (int i = 0; i < p.requests; i++) {
            const int left = (int)p.tokens - start_[i];
            if (sane) start_[i + 1] = start_[i] + pick(0, i + 1 == p.requests ? left : left / 2);
            const int count = sane ? start_[i + 1] - start_[i] : 0;
            kv_[i] = sane ? pick(0, room) : garbage(100);
            seq_[i] = sane ? (kv_[i] > count ? kv_[i] : count) : garbage(100);
            causal_[i] = pick(0, 1);
        }
        for (int i = 0; i < p.requests * p.table_width; i++)
            table_[i] = sane ? pick(0, std::max(0, (int)p.blocks - 1)) : garbage((int)p.blocks);
        p.query_start = start_.get(), p.seq_len = seq_.get(), p.kv_len = kv_.get(), p.table = table_.get();
        p.paged = true;
    }

    // The same memory as packed keys, every request's behind the others'. Called last: the write knows pages alone.
    void maybe_pack() {
        if (pick(0, 3)) return;
        p.packed_keys = p.blocks * p.block_size;
        kv_start_.make(p.requests, 0);
        int64_t next = 0;
        for (int i = 0; i < p.requests; i++) {
            if (sane) kv_[i] = (int32_t)std::min<int64_t>(kv_[i], p.packed_keys - next);
            if (sane) seq_[i] = std::max(kv_[i], start_[i + 1] - start_[i]);
            kv_start_[i] = sane ? (int32_t)next : garbage((int)p.packed_keys + 3);
            next += sane ? kv_[i] : 0;
        }
        p.paged = false, p.kv_start = kv_start_.get(), p.table = nullptr;
        p.table_width = p.blocks = 0;
        p.block_size = 1, p.slot_stride = p.kv_heads, p.head_stride = 1;
    }

    void choose_options() {
        slopes_.make(p.heads, 0.0f), sinks_.make(p.heads, 0.0f), head_scale_.make(p.kv_heads, 0.0f);
        token_scale_.make(p.blocks * p.block_stride, 1.0f);
        for (int h = 0; h < p.heads; h++) slopes_[h] = 0.02f * pick(1, 9), sinks_[h] = 0.1f * pick(-9, 9);
        for (int h = 0; h < p.kv_heads; h++) head_scale_[h] = 0.25f * pick(1, 5);
        for (int64_t i = 0; i < p.blocks * p.block_stride; i++) token_scale_[i] = 0.25f * pick(1, 5);
        p.causal = pick(0, 1) ? causal_.get() : nullptr;
        p.slopes = pick(0, 1) ? slopes_.get() : nullptr, p.sinks = pick(0, 1) ? sinks_.get() : nullptr;
        p.k_scale = pick(0, 1) ? head_scale_.get() : nullptr, p.v_scale = pick(0, 1) ? head_scale_.get() : nullptr;
        if (pick(0, 1)) p.k_token_scale = p.v_token_scale = token_scale_.get();
        p.scale = 0.3f, p.soft_cap = pick(0, 1) ? 2.0f : 0.0f;
        p.left = pick(0, 1) ? pick(0, 30) : -1, p.right = pick(0, 1) ? pick(0, 9) : -1;
        p.chunk = pick(0, 2) ? 0 : pick(1, 40);
    }

    void choose_write() {
        w.from = (Dtype)pick(0, 2), w.to = p.kv_type;
        w.blocks = p.blocks, w.block_size = p.block_size, w.kv_heads = p.kv_heads, w.dim = p.dim, w.vdim = p.vdim;
        w.block_stride = p.block_stride, w.head_stride = p.head_stride, w.slot_stride = p.slot_stride;
        w.k = numbers(new_k_, w.from, p.tokens * p.kv_heads * p.dim);
        w.v = numbers(new_v_, w.from, p.tokens * p.kv_heads * p.vdim);
        const int64_t rows = p.blocks * p.block_stride;
        k_pool_.make(rows * p.dim * bytes_of(w.to), 0), v_pool_.make(rows * p.vdim * bytes_of(w.to), 0);
        w.k_pool = k_pool_.get(), w.v_pool = v_pool_.get();
        k_token_.make(rows, 0.0f), v_token_.make(rows, 0.0f);
        const bool quantised = bytes_of(w.to) == 1;
        if (quantised && pick(0, 1)) w.k_token_scale = k_token_.get(), w.v_token_scale = v_token_.get();
        if (quantised) w.k_scale = w.v_scale = head_scale_.get();
        slots_.make(p.tokens, 0);
        for (int64_t t = 0; t < p.tokens; t++) slots_[t] = garbage(p.blocks * p.block_size);
        w.slots = slots_.get();
    }
};

}  // namespace jattn
