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

// Random rows in groups, each with a matrix of its own, in the same way. Rows without a group are not computed.
template <class Args>
class RandomGroupedProduct {
   public:
    Args args{};

    // The largest error over the tolerance.
    double worst() const {
        double largest = 0.0;
        for (int64_t row = 0; row < (int64_t)matrix_of_row_.size(); row++)
            for (int64_t column = 0; column < args.columns; column++) {
                double value = 0.0, size = 0.0;
                for (int64_t k = 0; k < args.inputs; k++) {
                    const int64_t at = (matrix_of_row_[row] * args.inputs + k) * args.columns + column;
                    const double term = stored_value(dtype_, x_.get(), row * args.inputs + k) *
                                        stored_value(dtype_, w_.get(), at);
                    value += term, size += std::fabs(term);
                }
                const double rounding = out_dtype_ == Dtype::f32 ? 0.0 : relative_step(out_dtype_);
                const double limit = 1e-7 * (args.inputs + 2) * size + rounding * std::fabs(value) +
                                     smallest_step(out_dtype_) + 1e-30;
                const double seen = stored_value(out_dtype_, y_.get(), row * args.columns + column);
                largest = std::max(largest, std::isfinite(seen) ? std::fabs(seen - value) / limit : INFINITY);
            }
        return largest;
    }
    Dtype dtype() const { return dtype_; }

   protected:
    std::mt19937 rng_;
    ExactBuffer<char> x_, w_, y_;
    std::vector<int64_t> matrix_of_row_;
    Dtype dtype_, out_dtype_;

    explicit RandomGroupedProduct(unsigned seed) : rng_(seed) {
        dtype_ = (Dtype)pick(0, kNumFloats - 1), out_dtype_ = pick(0, 1) ? Dtype::f32 : dtype_;
        args.inputs = pick(0, 70), args.columns = pick(0, 7) ? pick(0, 80) : pick(500, 700);
    }
    void draw(int64_t rows, int64_t matrices) {
        numbers(x_, rows * args.inputs), numbers(w_, matrices * args.inputs * args.columns);
        y_.make(rows * args.columns * bytes_of(out_dtype_), (char)0x7f, 0);
    }
    int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng_); }

   private:
    void numbers(ExactBuffer<char>& buffer, int64_t n) {
        buffer.make(n * bytes_of(dtype_), 0, bytes_of(dtype_) * pick(0, 3));
        for (int64_t i = 0; i < n; i++) random_number(dtype_, rng_, buffer.get(), i);
    }
};

class RandomHeadProduct : public RandomGroupedProduct<HeadProductArgs> {
   public:
    explicit RandomHeadProduct(unsigned seed) : RandomGroupedProduct(seed) {
        args.heads = pick(0, 5), args.rows = pick(0, 7) ? pick(0, 20) : pick(190, 200);
        args.dtype = dtype_, args.out_dtype = out_dtype_;
        draw(args.heads * args.rows, args.heads);
        args.x = x_.get(), args.w = w_.get(), args.y = y_.get();
        for (int64_t row = 0; row < args.heads * args.rows; row++) matrix_of_row_.push_back(row / args.rows);
    }
};

// Some experts have no rows, some sizes are arbitrary numbers.
class RandomExpertProduct : public RandomGroupedProduct<ExpertProductArgs> {
   public:
    explicit RandomExpertProduct(unsigned seed) : RandomGroupedProduct(seed) {
        const int experts = pick(0, 6), rows = pick(0, 7) ? pick(0, 40) : pick(190, 420);
        std::vector<int32_t> sizes(experts);
        for (int e = 0; e < experts; e++) {
            sizes[e] = !pick(0, 2) ? 0 : pick(0, 15) ? pick(0, rows) : (int32_t)rng_();
            for (int64_t left = std::min<int64_t>(sizes[e], rows - (int64_t)matrix_of_row_.size()); left > 0; left--)
                matrix_of_row_.push_back(e);
        }
        draw(rows, experts);
        args.form.dtype = dtype_, args.form.out_dtype = out_dtype_;
        args.form.rows = rows, args.form.inputs = args.inputs, args.form.x = x_.get();
        args.first = {w_.get(), y_.get(), args.columns};
        args.w_bytes = args.inputs * args.columns * bytes_of(dtype_);
        for (bool done = false; !done;) try {
                args.active.clear();
                args.set_sizes(sizes.data(), experts);
                done = true;
            } catch (const OutOfMemory&) {
            }
    }
};

}  // namespace jattn
