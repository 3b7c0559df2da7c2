// Checks of the arrays that XLA passes to a call. The first check that fails becomes the call's error. Checks run on
// every call, so they build no text unless they fail.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <sstream>
#include <string>

#include "args.h"
#include "xla/ffi/api/ffi.h"

namespace jattn {

namespace ffi = xla::ffi;

inline bool dtype_of(ffi::DataType type, Dtype& dtype) {
    switch (type) {
        case ffi::F32: dtype = Dtype::f32; return true;
        case ffi::F16: dtype = Dtype::f16; return true;
        case ffi::BF16: dtype = Dtype::bf16; return true;
        case ffi::F8E4M3FN: dtype = Dtype::e4m3; return true;
        case ffi::F8E5M2: dtype = Dtype::e5m2; return true;
        case ffi::S8: dtype = Dtype::i8; return true;
        default: return false;
    }
}

// True if arrays of this type can hold numbers of `stored`: as themselves, or as unsigned integers of the same size.
inline bool can_hold(ffi::DataType type, Dtype stored) {
    Dtype own;
    if (dtype_of(type, own)) return own == stored;
    return (type == ffi::U16 && bytes_of(stored) == 2) || (type == ffi::U8 && bytes_of(stored) == 1);
}

class ArrayChecks {
   public:
    std::string error;  // of the first check that failed; empty: none

    void require(bool holds, const char* sentence) {
        if (!holds && error.empty()) error = sentence;
    }
    // kv_dtype: if given, named in the text before `wanted`.
    template <class B>
    void dtype(const char* name, const B& x, bool is_allowed, const char* wanted, const char* kv_dtype = nullptr) {
        if (!is_allowed && error.empty()) wrong_dtype(name, x.element_type(), wanted, kv_dtype);
    }
    template <class B>
    void shape(const char* name, const B& x, std::initializer_list<int64_t> wanted) {
        const auto seen = x.dimensions();
        if (seen.size() != wanted.size() || !std::equal(seen.begin(), seen.end(), wanted.begin()))
            wrong(name, text(seen), text(wanted));
    }
    // An array without elements stands for None.
    template <class B>
    void shape_or_none(const char* name, const B& x, std::initializer_list<int64_t> wanted) {
        if (x.element_count()) shape(name, x, wanted);
    }
    template <class B>
    void rank(const char* name, const B& x, size_t wanted) {
        if (x.dimensions().size() != wanted) wrong(name, text(x.dimensions()), "of rank " + std::to_string(wanted));
    }
    void count(const char* name, int64_t seen, int64_t least, int64_t most = INT32_MAX) {  // kernels use 32 bits
        if (seen < least || seen > most)
            wrong(name, std::to_string(seen), std::to_string(least) + " to " + std::to_string(most));
    }
    void multiple(const char* name, int64_t seen, const char* of_name, int64_t of) {
        if (seen % of)
            wrong(name, std::to_string(seen), std::string("a multiple of ") + of_name + ", " + std::to_string(of));
    }

   private:
    [[gnu::cold, gnu::noinline]] void wrong(const char* name, const std::string& seen, const std::string& wanted) {
        if (error.empty()) error = std::string(name) + " is " + seen + " and must be " + wanted;
    }
    [[gnu::cold, gnu::noinline]] void wrong_dtype(const char* name, ffi::DataType seen, const char* wanted,
                                                  const char* kv_dtype) {
        std::ostringstream text;
        text << name << " has dtype " << seen << " and must have ";
        if (kv_dtype) text << kv_dtype << ", ";
        text << wanted;
        error = text.str();
    }
    template <class D>
    [[gnu::cold, gnu::noinline]] static std::string text(const D& dims) {
        std::string all = "[";
        for (const int64_t n : dims) all += (all.size() > 1 ? " " : "") + std::to_string(n);
        return all + "]";
    }
};

}  // namespace jattn
