// Checks of a call's arrays before a kernel touches them; the first one that fails becomes the call's error.
#pragma once
#include <initializer_list>
#include <string>

#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jattn {

namespace ffi = xla::ffi;

inline bool type_of(ffi::DataType t, Dtype& out) {
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

// True where an array of this type holds numbers of `stored`: as themselves, or as bits of the same width.
inline bool holds(ffi::DataType t, Dtype stored) {
    Dtype own;
    if (type_of(t, own)) return own == stored;
    return (t == ffi::U16 && bytes_of(stored) == 2) || (t == ffi::U8 && bytes_of(stored) == 1);
}

class Arrays {
   public:
    std::string wrong;  // the first failure; empty: none

    void must(bool good, const char* sentence) {
        if (!good && wrong.empty()) wrong = sentence;
    }
    template <class B>
    void shape(const char* name, const B& x, std::initializer_list<int64_t> wanted) {
        const auto seen = x.dimensions();
        if (!wrong.empty() || (seen.size() == wanted.size() && std::equal(seen.begin(), seen.end(), wanted.begin()))) return;
        wrong = std::string(name) + " is " + text(seen) + " and must be " + text(wanted);
    }
    // An array with no elements stands for None.
    template <class B>
    void shape_or_none(const char* name, const B& x, std::initializer_list<int64_t> wanted) {
        if (x.element_count()) shape(name, x, wanted);
    }
    template <class B>
    void rank(const char* name, const B& x, size_t wanted) {
        if (x.dimensions().size() != wanted && wrong.empty())
            wrong = std::string(name) + " is " + text(x.dimensions()) + " and must have rank " + std::to_string(wanted);
    }
    // Kernels hold these numbers in 32 bits.
    void count(const char* name, int64_t seen, int64_t least, int64_t most = INT32_MAX) {
        if ((seen < least || seen > most) && wrong.empty())
            wrong = std::string(name) + " is " + std::to_string(seen) + " and must be " + std::to_string(least) + " to " +
                    std::to_string(most);
    }

   private:
    template <class D>
    static std::string text(const D& dims) {
        std::string all = "[";
        for (const int64_t n : dims) all += (all.size() > 1 ? " " : "") + std::to_string(n);
        return all + "]";
    }
};

}  // namespace jattn
