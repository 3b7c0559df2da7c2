// A random product with weights in 4 or 8 bits, its memory, and its check against sums in float64. Every buffer ends
// where its memory ends.
#pragma once
#include "product_args.h"
#include "random_batch.h"

namespace jattn {

class RandomPackedProduct {
   public:
    ProductArgs args{};
    Format format;
    bool transposed;

    explicit RandomPackedProduct(unsigned seed) : rng_(seed) {
        format = (Format)pick(0, kNumFormats - 1), transposed = !is_4_bits() && pick(0, 3) == 0;
        args.dtype = (Dtype)pick(0, kNumFloats - 1), args.out_dtype = pick(0, 1) ? Dtype::f32 : args.dtype;
        args.scale_dtype = (Dtype)pick(0, kNumFloats);  // the last one is e4m3
        static_assert((int)Dtype::e4m3 == kNumFloats);
        args.rows = pick(0, 7) ? pick(1, 26) : pick(90, 200);
        const int groups = transposed ? 1 : pick(1, 4), unit = is_4_bits() ? 8 : 1;
        args.group_size = groups == 1 ? unit * pick(1, 160 / unit) : pick(0, 1) ? 32 * pick(1, 4) : unit * pick(1, 56 / unit);
        args.inputs = groups * args.group_size;
        args.has_zero_points = !transposed && pick(0, 1);
        args.num_matrices = pick(1, 3);
        args.x = numbers(x_, args.dtype, args.rows * args.inputs);
        for (int m = 0; m < args.num_matrices; m++) {
            ProductMatrix& matrix = matrices_[m];
            matrix.columns = pick(0, 7) ? pick(0, 80) : pick(100, 700);
            matrix.w = codes(w_[m], args.inputs * matrix.columns / (is_4_bits() ? 2 : 1));
            matrix.scales = numbers(scales_[m], args.scale_dtype, groups * matrix.columns);
            matrix.zero_points = numbers(zero_points_[m], Dtype::i8, groups * matrix.columns);
            const char* const factor = numbers(factors_[m], Dtype::f32, matrix.columns);
            if (pick(0, 1)) matrix.factor = reinterpret_cast<const float*>(factor);
            y_[m].make(args.rows * matrix.columns * bytes_of(args.out_dtype), (char)0x7f, 0);
            matrix.y = y_[m].get();
        }
        args.matrices = matrices_;
    }

    // The largest error over the tolerance.
    double worst() const {
        double largest = 0.0;
        for (int m = 0; m < args.num_matrices; m++)
            for (int64_t row = 0; row < args.rows; row++)
                for (int64_t column = 0; column < matrices_[m].columns; column++)
                    largest = std::max(largest, error(matrices_[m], row, column));
        return largest;
    }

   private:
    std::mt19937 rng_;
    ExactBuffer<char> x_, w_[3], scales_[3], zero_points_[3], factors_[3], y_[3];
    ProductMatrix matrices_[3];

    bool is_4_bits() const { return format == Format::int4 || format == Format::fp4; }
    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    const char* numbers(ExactBuffer<char>& buffer, Dtype t, int64_t n) {
        buffer.make(n * bytes_of(t), 0, bytes_of(t) * pick(0, 3));
        for (int64_t i = 0; i < n; i++) random_number(t, rng_, buffer.get(), i);
        return buffer.get();
    }
    const char* codes(ExactBuffer<char>& buffer, int64_t bytes) {
        buffer.make(bytes, 0, 4 * pick(0, 3));
        for (int64_t i = 0; i < bytes; i++) buffer[i] = (char)rng_();
        if (format == Format::fp8)
            for (int64_t i = 0; i < bytes; i++)
                if ((buffer[i] & 0x7f) == 0x7f) buffer[i] = 0;  // NaN
        return buffer.get();
    }
    double weight(const ProductMatrix& matrix, int64_t k, int64_t column) const {
        if (!is_4_bits())
            return stored_value(format == Format::int8 ? Dtype::i8 : Dtype::e4m3, matrix.w,
                                transposed ? column * args.inputs + k : k * matrix.columns + column);
        uint32_t word;
        std::memcpy(&word, matrix.w + 4 * (k / 8 * matrix.columns + column), 4);
        const int code = word >> (4 * (k % 8 / 2) + 16 * (k % 2)) & 15;
        const double fp4[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
        return format == Format::int4 ? code - 8 : code & 8 ? -fp4[code & 7] : fp4[code & 7];
    }
    double error(const ProductMatrix& matrix, int64_t row, int64_t column) const {
        double value = 0.0, size = 0.0;
        for (int64_t k = 0; k < args.inputs; k++) {
            const int64_t at = k / args.group_size * matrix.columns + column;
            const double scale = stored_value(args.scale_dtype, matrix.scales, at), w = weight(matrix, k, column);
            const double zero = args.has_zero_points ? stored_value(Dtype::i8, matrix.zero_points, at) : 0.0;
            const double x = stored_value(args.dtype, args.x, row * args.inputs + k);
            value += x * (w - zero) * scale, size += std::fabs(x * scale) * (std::fabs(w) + std::fabs(zero));
        }
        const double factor = matrix.factor ? matrix.factor[column] : 1.0;
        value *= factor, size *= std::fabs(factor);
        const double relative = args.out_dtype == Dtype::f32 ? 0.0 : relative_step(args.out_dtype) * std::fabs(value);
        const double limit = 1e-7 * (args.inputs + 8) * size + relative + smallest_step(args.out_dtype) + 1e-30;
        const double seen = stored_value(args.out_dtype, matrix.y, row * matrix.columns + column);
        if (args.out_dtype == Dtype::f16 && std::fabs(value) > 65000.0) return 0.0;  // it may be infinity
        return std::isfinite(seen) ? std::fabs(seen - value) / limit : INFINITY;
    }
};

}  // namespace jattn
