// A random product, its memory, and its check against sums in float64. Every buffer ends where its memory ends.
#pragma once
#include "product_args.h"
#include "random_batch.h"

namespace jattn {

class RandomProduct {
   public:
    ProductArgs args{};

    explicit RandomProduct(unsigned seed) : rng_(seed) {
        args.dtype = (Dtype)pick(0, kNumFloats - 1), args.out_dtype = pick(0, 1) ? Dtype::f32 : args.dtype;
        args.rows = pick(0, 7) ? pick(1, 26) : pick(90, 200);
        args.inputs = pick(0, 7) ? pick(0, 70) : pick(100, 300);
        args.transposed = pick(0, 2) == 0, args.silu = !args.transposed && pick(0, 1);
        args.num_matrices = args.silu ? 2 : pick(1, 3);
        args.x = numbers(x_, args.rows * args.inputs);
        for (int m = 0; m < args.num_matrices; m++) {
            matrices_[m].columns = pick(0, 7) ? pick(0, 80) : pick(100, 700);
            if (args.silu && m) matrices_[m].columns = matrices_[0].columns;
            matrices_[m].w = numbers(w_[m], args.inputs * matrices_[m].columns);
            y_[m].make(args.rows * matrices_[m].columns * bytes_of(args.out_dtype), (char)0x7f, 0);
            matrices_[m].y = y_[m].get();
        }
        args.matrices = matrices_;
    }

    // The largest error over the tolerance.
    double worst() const {
        double largest = 0.0;
        for (int m = 0; m < args.num_results(); m++)
            for (int64_t row = 0; row < args.rows; row++)
                for (int64_t column = 0; column < matrices_[m].columns; column++)
                    largest = std::max(largest, error(matrices_[m], row, column));
        return largest;
    }

   private:
    std::mt19937 rng_;
    ExactBuffer<char> x_, w_[3], y_[3];
    ProductMatrix matrices_[3];

    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    const char* numbers(ExactBuffer<char>& buffer, int64_t n) {
        buffer.make(n * bytes_of(args.dtype), 0, bytes_of(args.dtype) * pick(0, 3));
        for (int64_t i = 0; i < n; i++) random_number(args.dtype, rng_, buffer.get(), i);
        return buffer.get();
    }
    struct Sum {
        double value = 0.0, limit = 0.0;
    };
    Sum sum(const ProductMatrix& matrix, int64_t row, int64_t column) const {
        double value = 0.0, size = 0.0;
        for (int64_t k = 0; k < args.inputs; k++) {
            const int64_t at = args.transposed ? column * args.inputs + k : k * matrix.columns + column;
            const double term = stored_value(args.dtype, args.x, row * args.inputs + k) *
                                stored_value(args.dtype, matrix.w, at);
            value += term, size += std::fabs(term);
        }
        return {value, 1e-7 * (args.inputs + 2) * size + rounding(value)};
    }
    double rounding(double x) const {
        const double relative = args.out_dtype == Dtype::f32 ? 0.0 : relative_step(args.out_dtype) * std::fabs(x);
        return relative + smallest_step(args.out_dtype) + 1e-30;
    }
    double error(const ProductMatrix& matrix, int64_t row, int64_t column) const {
        Sum wanted = sum(matrix, row, column);
        if (args.silu) {  // its derivative is at most 1.1
            const Sum up = sum(matrices_[1], row, column);
            const double gate = wanted.value / (1.0 + std::exp(-wanted.value)), y = gate * up.value;
            const double of_gate = 1.1 * wanted.limit + 1e-6 * std::fabs(gate);
            wanted = {y, of_gate * (std::fabs(up.value) + up.limit) + up.limit * std::fabs(gate) + rounding(y)};
        }
        const double seen = stored_value(args.out_dtype, matrix.y, row * matrix.columns + column);
        return std::isfinite(seen) ? std::fabs(seen - wanted.value) / wanted.limit : INFINITY;
    }
};

// Random products of several heads, in the same way.
class RandomHeadProduct {
   public:
    HeadProductArgs args{};

    explicit RandomHeadProduct(unsigned seed) : rng_(seed) {
        args.dtype = (Dtype)pick(0, kNumFloats - 1), args.out_dtype = pick(0, 1) ? Dtype::f32 : args.dtype;
        args.heads = pick(0, 5), args.rows = pick(0, 7) ? pick(0, 20) : pick(190, 200);
        args.inputs = pick(0, 70), args.columns = pick(0, 7) ? pick(0, 80) : pick(500, 700);
        args.x = numbers(x_, args.heads * args.rows * args.inputs);
        args.w = numbers(w_, args.heads * args.inputs * args.columns);
        y_.make(args.heads * args.rows * args.columns * bytes_of(args.out_dtype), (char)0x7f, 0);
        args.y = y_.get();
    }

    // The largest error over the tolerance.
    double worst() const {
        double largest = 0.0;
        for (int64_t row = 0; row < args.heads * args.rows; row++)
            for (int64_t column = 0; column < args.columns; column++) {
                const int64_t head = row / args.rows;
                double value = 0.0, size = 0.0;
                for (int64_t k = 0; k < args.inputs; k++) {
                    const int64_t at = (head * args.inputs + k) * args.columns + column;
                    const double term = stored_value(args.dtype, args.x, row * args.inputs + k) *
                                        stored_value(args.dtype, args.w, at);
                    value += term, size += std::fabs(term);
                }
                const double rounding = args.out_dtype == Dtype::f32 ? 0.0 : relative_step(args.out_dtype);
                const double limit = 1e-7 * (args.inputs + 2) * size + rounding * std::fabs(value) +
                                     smallest_step(args.out_dtype) + 1e-30;
                const double seen = stored_value(args.out_dtype, args.y, row * args.columns + column);
                largest = std::max(largest, std::isfinite(seen) ? std::fabs(seen - value) / limit : INFINITY);
            }
        return largest;
    }

   private:
    std::mt19937 rng_;
    ExactBuffer<char> x_, w_, y_;
    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }
    const char* numbers(ExactBuffer<char>& buffer, int64_t n) {
        buffer.make(n * bytes_of(args.dtype), 0, bytes_of(args.dtype) * pick(0, 3));
        for (int64_t i = 0; i < n; i++) random_number(args.dtype, rng_, buffer.get(), i);
        return buffer.get();
    }
};

}  // namespace jattn
