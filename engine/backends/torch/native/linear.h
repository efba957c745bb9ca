// out = epilogue(prologue(x) @ weight.T + bias): the driver that all kernels share.
//
// A weight [outputs, inputs] lies as blocks of 16 outputs side by side, each block in one piece, in the order of its
// inputs. The rows of x are laid into panels as a kernel reads them, after the prologue; a kernel adds up tiles of some
// rows and some blocks in float32; the epilogue makes of the sums what goes out.
//
// Every output is computed from its own row alone, by one sequence of operations that is the same whatever the number of
// rows, of threads, and the tile that it falls into. So neither threads nor the rest of a batch change an answer.

#pragma once

#include "common.h"
#include "vector.h"

namespace ericllm {

constexpr int64_t kBlock = 16;  // outputs side by side
constexpr int64_t kPadInputs = 32;
constexpr int64_t kMaxStep = 4;             // blocks that a tile takes at most
constexpr int64_t kPanelBytes = 256 << 10;  // of rows: part of a usual second-level cache

enum class Activation : int32_t { none, silu, gelu, gelu_tanh };

// What stays the same from call to call. `Layer` of library.py has the same fields.
struct Layer {
    int64_t inputs;
    int64_t outputs;
    const void* weight;
    const void* scales;      // those of a quantised weight, as its kernel reads them
    int64_t group;           // inputs that share one of them
    const void* bias;        // [outputs], of the type of x; or null
    const void* norm;        // prologue: the weight [inputs] of an RMSNorm, or null
    float epsilon;           // the norm's
    int32_t norm_is_float;   // float32, or else of the type of x
    int32_t interleaved;     // blocks of the first and the second half of the outputs take turns
    Activation activation;   // epilogue: activation(first half) * second half
    float alpha;             // epilogue: residual + alpha * product, in a call with a residual
    int32_t out_is_float;    // or else of the type of x

    int64_t width() const { return activation == Activation::none ? outputs : outputs / 2; }
    int64_t blocks() const { return interleaved ? 2 * divide_up(outputs / 2, kBlock) : divide_up(outputs, kBlock); }
    // The first output of a block, and how many it has.
    int64_t first(int64_t block) const {
        return interleaved ? block / 2 * kBlock + block % 2 * (outputs / 2) : block * kBlock;
    }
    int64_t count(int64_t block) const {
        return interleaved ? std::min(kBlock, outputs / 2 - block / 2 * kBlock) : std::min(kBlock, outputs - first(block));
    }
};

struct Call {
    const Layer& layer;
    const void* x;  // [rows, inputs], of the kernel's Value
    int64_t x_stride;
    int64_t rows;
    void* out;             // [rows, width] without gaps
    const void* residual;  // the same of Value, may be out itself; or null
};

template <class T>
Floats load_some(const T* from, int64_t count) {
    return count == kLanes ? load(from) : load(from, count);
}

template <class T>
void store_some(T* to, Floats x, int64_t count) {
    if (count == kLanes)
        store(to, x);
    else
        store(to, x, count);
}

// Put row [count] / rms(row) * weight into `to`: in float32, rounded once.
template <class Value, class Weight>
void normalise(const Value* row, const Weight* weight, int64_t count, float epsilon, Value* to) {
    Floats squares = all(0.0f);
    for (int64_t k = 0; k < count; k += kLanes) {
        const Floats x = load_some(row + k, std::min(kLanes, count - k));
        squares = fused(x, x, squares);
    }
    const Floats scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(count) + epsilon));
    for (int64_t k = 0; k < count; k += kLanes) {
        const int64_t some = std::min(kLanes, count - k);
        store_some(to + k, load_some(row + k, some) * scale * load_some(weight + k, some), some);
    }
}

// Put what the epilogue makes of sums [rows][stride] of blocks from `block` on into rows of `out` from `row` on.
template <class Value, class Out>
void finish(const Call& call, const float* sums, int64_t stride, int64_t row, int64_t rows, int64_t block,
            int64_t blocks) {
    const Layer& l = call.layer;
    const auto* biases = static_cast<const Value*>(l.bias);
    const auto* residual = static_cast<const Value*>(call.residual);
    auto* out = static_cast<Out*>(call.out);
    const Floats alpha = all(l.alpha);
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = l.first(block + b), count = l.count(block + b);
        const Floats bias = biases ? load_some(biases + first, count) : all(0.0f);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = (row + r) * l.outputs + first;
            Floats value = load(sums + r * stride + b * kBlock) + bias;
            if (residual) value = fused(alpha, value, load_some(residual + at, count));
            store_some(out + at, value, count);
        }
    }
}

// One call, whose threads share it. A kernel is a type with
//   Value: that of x, bias, residual and, if not float, out
//   kRows: rows of a tile at most;  step(rows): blocks of a tile of so many rows, at most kMaxStep
//   panel_stride(layer): bytes from one row of a panel to the next, a multiple of 64
//   reads(call): whether x can be read where it lies;  lay(layer, row, to): put a row into a panel
//   multiply(layer, x, x_stride in bytes, rows, block, blocks, sums): put the products into sums [rows][kMaxStep * 16]
template <class Kernel>
class Product {
  public:
    using Value = typename Kernel::Value;

    explicit Product(const Call& call) : call_(call), in_place_(!call.layer.norm && Kernel::reads(call)) {
        const Layer& l = call.layer;
        stride_ = in_place_ ? call.x_stride * static_cast<int64_t>(sizeof(Value)) : Kernel::panel_stride(l);
        const int64_t fitting = kPanelBytes / Kernel::panel_stride(l) / Kernel::kRows * Kernel::kRows;
        panel_rows_ = std::max<int64_t>(std::min<int64_t>(fitting, 16 * Kernel::kRows), 4 * Kernel::kRows);
        if (call.rows < 2 * panel_rows_) panel_rows_ = std::max<int64_t>(1, call.rows);
        panel_tasks_ = divide_up(l.blocks(), kTaskBlocks);
    }

    void run(const Threads& by, int threads) const {
        const int64_t tasks = divide_up(call_.rows, panel_rows_) * panel_tasks_;
        on_threads(by, threads, tasks, [this](const auto& next) {
            int64_t prepared = -1;
            const char* x = nullptr;
            for (int64_t task; (task = next()) >= 0;) {
                const int64_t panel = task / panel_tasks_, row = panel * panel_rows_;
                const int64_t rows = std::min(panel_rows_, call_.rows - row);
                if (panel != prepared) x = prepare(row, rows);
                prepared = panel;
                multiply(x, row, rows, task % panel_tasks_ * kTaskBlocks);
            }
        });
    }

  private:
    static constexpr int64_t kTaskBlocks = 4;

    const char* prepare(int64_t row, int64_t rows) const {
        static thread_local Scratch panels, normed;
        const Layer& l = call_.layer;
        const Value* x = static_cast<const Value*>(call_.x) + row * call_.x_stride;
        if (in_place_) return reinterpret_cast<const char*>(x);
        char* panel = panels.of<char>(rows * stride_);
        for (int64_t r = 0; r < rows; ++r, x += call_.x_stride) {
            const Value* from = x;
            if (l.norm) {
                Value* to = normed.of<Value>(l.inputs);
                if (l.norm_is_float)
                    normalise(x, static_cast<const float*>(l.norm), l.inputs, l.epsilon, to);
                else
                    normalise(x, static_cast<const Value*>(l.norm), l.inputs, l.epsilon, to);
                from = to;
            }
            Kernel::lay(l, from, panel + r * stride_);
        }
        return panel;
    }

    void multiply(const char* x, int64_t row, int64_t rows, int64_t block) const {
        const Layer& l = call_.layer;
        const int64_t end = std::min(l.blocks(), block + kTaskBlocks), groups = divide_up(rows, Kernel::kRows);
        const int64_t step = Kernel::step(divide_up(rows, groups));
        alignas(64) float sums[Kernel::kRows * kMaxStep * kBlock];
        for (; block < end; block += step) {
            const int64_t blocks = std::min(step, end - block);
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t from = rows * g / groups, size = rows * (g + 1) / groups - from;
                Kernel::multiply(l, x + from * stride_, stride_, size, block, blocks, sums);
                if (l.out_is_float)
                    finish<Value, float>(call_, sums, kMaxStep * kBlock, row + from, size, block, blocks);
                else
                    finish<Value, Value>(call_, sums, kMaxStep * kBlock, row + from, size, block, blocks);
            }
        }
    }

    const Call& call_;
    bool in_place_;
    int64_t stride_, panel_rows_, panel_tasks_;
};

}  // namespace ericllm
