// Random arguments of both calls, and their memory. Every buffer has exactly the size that a kernel may access, so that
// a sanitizer reports an access one element behind it.
#pragma once
#include <algorithm>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "dispatch.h"
#include "stored_values.h"

namespace jattn {

template <class T>
class ExactBuffer {  // std::vector may allocate more than its size
   public:
    // n elements that end where their memory ends. `offset`: bytes from a cache line to the first one, a multiple of
    // sizeof(T).
    void make(size_t n, T fill, size_t offset = 0) {
        data_.reset(new (std::align_val_t(64)) char[offset + n * sizeof(T)]);
        begin_ = reinterpret_cast<T*>(data_.get() + offset);
        for (size_t i = 0; i < n; i++) begin_[i] = fill;
    }
    T* get() { return begin_; }
    const T* get() const { return begin_; }
    T& operator[](size_t i) { return begin_[i]; }

   private:
    struct Free {
        void operator()(char* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };
    std::unique_ptr<char[], Free> data_;
    T* begin_ = nullptr;
};

class RandomBatch {
   public:
    AttentionArgs attend{};
    WriteArgs write{};
    bool valid;  // lengths, block table and packed keys as a scheduler makes them; otherwise any numbers

    RandomBatch(unsigned seed, bool valid_lengths) : valid(valid_lengths), rng_(seed) {
        choose_shapes();
        choose_lengths();
        choose_options();
        choose_write();
        maybe_pack();
    }

   private:
    std::mt19937 rng_;
    ExactBuffer<char> q_, k_, v_, out_, new_k_, new_v_, k_pool_, v_pool_;
    ExactBuffer<float> lse_, token_scale_, head_scale_, slopes_, sinks_, k_token_, v_token_;
    ExactBuffer<int32_t> start_, seq_, kv_, causal_, table_, kv_start_, slots_;

    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    // Mostly 0 .. high; one of four is an extreme of 32 bits, or -1, 0 or 1.
    int32_t any_int(int high) {
        const int32_t extreme[] = {INT32_MIN, INT32_MIN + 1, -1, 0, 1, INT32_MAX - 1, INT32_MAX};
        return pick(0, 3) ? pick(0, high) : extreme[pick(0, 6)];
    }
    // Sets `to` to `count` random numbers of dtype t.
    const char* fill_random(ExactBuffer<char>& to, Dtype t, int64_t count) {
        to.make(count * bytes_of(t), 0, pick(0, 3) ? 0 : bytes_of(t));
        for (int64_t i = 0; i < count; i++) random_number(t, rng_, to.get(), i);
        return to.get();
    }

    void choose_shapes() {
        attend.kv_dtype = (Dtype)pick(0, kNumDtypes - 1);
        attend.q_dtype = (Dtype)pick(0, 2);
        attend.out_dtype = attend.q_dtype;
        attend.num_kv_heads = pick(1, 3), attend.group_size = pick(1, 5),
        attend.num_heads = attend.num_kv_heads * attend.group_size;
        attend.head_dim = pick(1, 70), attend.v_head_dim = pick(1, 70), attend.num_blocks = pick(1, 40);
        attend.block_size = pick(0, 7) ? pick(1, 9) : pick(1, 70);  // large pages: several tiles of keys, and splits
        attend.num_tokens = pick(1, 90), attend.num_reqs = pick(1, 4), attend.table_width = pick(1, 60);
        switch (pick(0, 47)) {  // now and then one size is 0
            case 0: attend.num_tokens = 0; break;
            case 1: attend.num_reqs = 0; break;
            case 2: attend.table_width = 0; break;
            case 3: attend.num_blocks = 0; break;
            case 4: attend.block_size = 0; break;
        }
        attend.k_row = attend.head_dim, attend.v_row = attend.v_head_dim;
        const int form = pick(0, 5);  // 0: latent rows in two pools; 1: whole latent rows
        if (form < 2) attend.latent_dim = attend.v_head_dim, attend.head_dim += attend.latent_dim;
        if (form == 1) attend.k_row = attend.v_row = attend.head_dim;
        const bool heads_first = pick(0, 1);
        attend.block_stride = (int64_t)attend.num_kv_heads * attend.block_size;
        attend.head_stride = heads_first ? attend.block_size : 1,
        attend.slot_stride = heads_first ? 1 : attend.num_kv_heads;
        const int64_t rows = attend.num_blocks * attend.block_stride;
        attend.q = fill_random(q_, attend.q_dtype, attend.num_tokens * attend.num_heads * attend.head_dim);
        attend.k = fill_random(k_, attend.kv_dtype, rows * attend.k_row);
        attend.v = fill_random(v_, attend.kv_dtype, rows * attend.v_row);
        if (form == 1) attend.k = attend.v + attend.latent_dim * bytes_of(attend.kv_dtype);
        out_.make(attend.num_tokens * attend.num_heads * attend.v_head_dim * bytes_of(attend.out_dtype), 0x55,
                  pick(0, 3) ? 0 : bytes_of(attend.out_dtype));
        lse_.make(attend.num_tokens * attend.num_heads, 7.0f);
        attend.out = out_.get(), attend.lse = lse_.get();
        attend.stream_out = pick(0, 1) && can_stream_out(attend);
    }

    void choose_lengths() {
        const int room = (int)(attend.num_blocks ? attend.table_width * attend.block_size : 0);
        start_.make(attend.num_reqs + 1, 0), seq_.make(attend.num_reqs, 0), kv_.make(attend.num_reqs, 0);
        causal_.make(attend.num_reqs, 0), table_.make(attend.num_reqs * attend.table_width, 0);
        for (int i = 0; i <= attend.num_reqs; i++) start_[i] = valid ? 0 : any_int((int)attend.num_tokens);
        for (int i = 0; i < attend.num_reqs; i++) {
            const int left = (int)attend.num_tokens - start_[i];
            if (valid) start_[i + 1] = start_[i] + pick(0, i + 1 == attend.num_reqs ? left : left / 2);
            const int count = valid ? start_[i + 1] - start_[i] : 0;
            kv_[i] = valid ? pick(0, room) : any_int(100);
            seq_[i] = valid ? (kv_[i] > count ? kv_[i] : count) : any_int(100);
            causal_[i] = pick(0, 1);
        }
        for (int i = 0; i < attend.num_reqs * attend.table_width; i++)
            table_[i] = valid ? pick(0, std::max(0, (int)attend.num_blocks - 1)) : any_int((int)attend.num_blocks);
        attend.query_start_loc = start_.get(), attend.seq_lens = seq_.get(), attend.kv_lens = kv_.get(),
        attend.block_table = table_.get();
        attend.paged = true;
    }

    // Sometimes reads the same memory as packed keys, one request after the other. Called last, because the write uses
    // the page layout.
    void maybe_pack() {
        if (pick(0, 3) || attend.latent_dim) return;
        attend.num_packed_keys = attend.num_blocks * attend.block_size;
        kv_start_.make(attend.num_reqs, 0);
        int64_t next = 0;
        for (int i = 0; i < attend.num_reqs; i++) {
            if (valid) kv_[i] = (int32_t)std::min<int64_t>(kv_[i], attend.num_packed_keys - next);
            if (valid) seq_[i] = std::max(kv_[i], start_[i + 1] - start_[i]);
            kv_start_[i] = valid ? (int32_t)next : any_int((int)attend.num_packed_keys + 3);
            next += valid ? kv_[i] : 0;
        }
        attend.paged = false, attend.kv_start = kv_start_.get(), attend.block_table = nullptr;
        attend.table_width = attend.num_blocks = 0;
        attend.block_size = 1, attend.slot_stride = attend.num_kv_heads, attend.head_stride = 1;
    }

    void choose_options() {
        slopes_.make(attend.num_heads, 0.0f), sinks_.make(attend.num_heads, 0.0f),
            head_scale_.make(attend.num_kv_heads, 0.0f);
        token_scale_.make(attend.num_blocks * attend.block_stride, 1.0f);
        for (int h = 0; h < attend.num_heads; h++) slopes_[h] = 0.02f * pick(1, 9), sinks_[h] = 0.1f * pick(-9, 9);
        for (int h = 0; h < attend.num_kv_heads; h++) head_scale_[h] = 0.25f * pick(1, 5);
        for (int64_t i = 0; i < attend.num_blocks * attend.block_stride; i++) token_scale_[i] = 0.25f * pick(1, 5);
        attend.causal = pick(0, 1) ? causal_.get() : nullptr;
        attend.alibi_slopes = pick(0, 1) ? slopes_.get() : nullptr, attend.sinks = pick(0, 1) ? sinks_.get() : nullptr;
        attend.k_scale = pick(0, 1) ? head_scale_.get() : nullptr,
        attend.v_scale = pick(0, 1) ? head_scale_.get() : nullptr;
        const bool is_in_two_pools = attend.latent_dim && attend.k_row < attend.head_dim;
        if (pick(0, 1) && !is_in_two_pools) attend.k_token_scale = attend.v_token_scale = token_scale_.get();
        attend.scale = 0.3f, attend.soft_cap = pick(0, 1) ? 2.0f : 0.0f;
        attend.window_left = pick(0, 1) ? pick(0, 30) : -1, attend.window_right = pick(0, 1) ? pick(0, 9) : -1;
        attend.chunk_size = pick(0, 2) ? 0 : pick(1, 40);
    }

    void choose_write() {
        write.input_dtype = (Dtype)pick(0, 2), write.kv_dtype = attend.kv_dtype;
        write.num_blocks = attend.num_blocks, write.block_size = attend.block_size,
        write.num_kv_heads = attend.num_kv_heads, write.head_dim = attend.head_dim,
        write.v_head_dim = attend.v_head_dim;
        write.block_stride = attend.block_stride, write.head_stride = attend.head_stride,
        write.slot_stride = attend.slot_stride;
        write.k = fill_random(new_k_, write.input_dtype, attend.num_tokens * attend.num_kv_heads * attend.head_dim);
        write.v = fill_random(new_v_, write.input_dtype, attend.num_tokens * attend.num_kv_heads * attend.v_head_dim);
        const int64_t rows = attend.num_blocks * attend.block_stride;
        k_pool_.make(rows * attend.head_dim * bytes_of(write.kv_dtype), 0),
            v_pool_.make(rows * attend.v_head_dim * bytes_of(write.kv_dtype), 0);
        write.k_pool = k_pool_.get(), write.v_pool = v_pool_.get();
        k_token_.make(rows, 0.0f), v_token_.make(rows, 0.0f);
        const bool quantised = bytes_of(write.kv_dtype) == 1;
        if (quantised && pick(0, 1)) write.k_token_scale = k_token_.get(), write.v_token_scale = v_token_.get();
        if (quantised) write.k_scale = write.v_scale = head_scale_.get();
        slots_.make(attend.num_tokens, 0);
        for (int64_t t = 0; t < attend.num_tokens; t++) slots_[t] = any_int(attend.num_blocks * attend.block_size);
        write.slot_mapping = slots_.get();
    }
};

}  // namespace jattn
