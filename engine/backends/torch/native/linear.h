// out = epilogue(prologue(x) @ weight.T + bias): the driver that all kernels share.
//
// A weight [outputs, inputs] lies as blocks of 16 outputs side by side, each block in one piece, in the order of its
// inputs. The rows of x are laid into panels as a kernel reads them, after the prologue; a kernel adds up tiles of some
// rows and some blocks in float32; the epilogue makes of the sums what goes out.
//
// Every output is computed from its own row alone, by one sequence of operations that is the same whatever the number of
// rows, of threads, and the tile that it falls into. So neither threads nor the rest of a batch change an answer.

#pragma once

#include "functions.h"

namespace ericllm {

constexpr int64_t kBlock = 16;  // outputs side by side
constexpr int64_t kPadInputs = 32;
constexpr int64_t kMaxStep = 4;             // blocks that are added up at once at most
constexpr int64_t kPanelBytes = 256 << 10;  // of rows: part of a usual second-level cache
constexpr int64_t kCrowdingBytes = 2 << 10; // the least stride by which rows crowd the same few sets of the first level

// What stays the same from call to call. `Layer` of library.py has the same fields.
struct Layer {
    int64_t inputs;
    int64_t outputs;
    const void* weight;
    const void* bias;        // [outputs], of the type of x; or null
    const void* norm;        // prologue: the weight [inputs] of an RMSNorm, or null
    float epsilon;           // the norm's
    int32_t norm_is_float;   // float32, or else of the type of x
    int32_t interleaved;     // blocks of the first and the second half of the outputs take turns
    Activation activation;   // epilogue: activation(first half) * second half
    float alpha;             // epilogue: residual + alpha * product, without a gate
    int32_t out_is_float;    // or else of the type of x

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

// What the epilogue makes of sums [rows][kMaxStep * 16] of some blocks, `rows` of them from `row` on: for a kernel's
// Value, and what goes out as Out.
template <class Value, class Out>
class Epilogue {
  public:
    explicit Epilogue(const Call& call)
        : layer_(call.layer),
          biases_(static_cast<const Value*>(call.layer.bias)),
          residual_(static_cast<const Value*>(call.residual)),
          out_(static_cast<Out*>(call.out)) {}

    void operator()(const float* sums, int64_t row, int64_t rows, int64_t block, int64_t blocks) const {
        const bool gated = layer_.activation != Activation::none;
        for (int64_t b = 0; b < blocks; b += gated ? 2 : 1)
            if (gated)
                gate(sums + b * kBlock, row, rows, block + b);
            else
                add(sums + b * kBlock, row, rows, block + b);
    }

  private:
    Floats bias(int64_t block) const {
        return biases_ ? load_some(biases_ + layer_.first(block), layer_.count(block)) : all(0.0f);
    }

    void add(const float* sums, int64_t row, int64_t rows, int64_t block) const {
        const Floats added = bias(block), alpha = all(layer_.alpha);
        const int64_t count = layer_.count(block);
        for (int64_t r = 0; r < rows; ++r, sums += kMaxStep * kBlock) {
            const int64_t at = (row + r) * layer_.outputs + layer_.first(block);
            Floats value = load(sums) + added;
            value = residual_ ? fused(alpha, value, load_some(residual_ + at, count)) : alpha * value;
            store_some(out_ + at, value, count);
        }
    }

    void gate(const float* sums, int64_t row, int64_t rows, int64_t block) const {
        const Floats first = bias(block), second = bias(block + 1);
        const int64_t width = layer_.outputs / 2, count = layer_.count(block);
        for (int64_t r = 0; r < rows; ++r, sums += kMaxStep * kBlock) {
            const Floats opened = activated(layer_.activation, load(sums) + first);
            store_some(out_ + (row + r) * width + layer_.first(block), opened * (load(sums + kBlock) + second), count);
        }
    }

    const Layer& layer_;
    const Value* biases_;
    const Value* residual_;
    Out* out_;
};

// Where the weights lie that are used next, so that they are fetched meanwhile: for a line of a block, `bytes` behind it,
// and for each next line of that block `step` more.
struct Ahead {
    int64_t bytes;
    int64_t step;
    bool alone = true;  // no other rows use the weights
};

constexpr int64_t kFarthest = 256 << 10;  // bytes that are fetched ahead at most: what the second level surely keeps
constexpr int64_t kLineBytes = 64;

// Whether a kernel fetches weights ahead: one that says how many bytes each input of a block has.
template <class Kernel, class = void>
struct Fetches : std::false_type {};
template <class Kernel>
struct Fetches<Kernel, std::void_t<decltype(Kernel::kInputBytes)>> : std::true_type {};

// True if a kernel prepares for some blocks and the number of row groups that use them.
template <class Kernel, class = void>
struct Begins : std::false_type {};
template <class Kernel>
struct Begins<Kernel, std::void_t<decltype(&Kernel::begin)>> : std::true_type {};

// Rows that a kernel's tile takes as fast as fewer, where that is more than one.
template <class Kernel>
inline constexpr int64_t kTogether = 1;

template <int64_t (*kBlocksFor)(int64_t), int64_t R, int64_t C, class Tile>
void with_rows(int64_t rows, int64_t block, const Tile& tile) {
    if constexpr (C <= kBlocksFor(R))
        if (rows == R) return tile(std::integral_constant<int64_t, R>(), std::integral_constant<int64_t, C>(), block);
    if constexpr (R > 1) with_rows<kBlocksFor, R - 1, C>(rows, block, tile);
}

// Call tile(rows, 1, 2 or 4 blocks, the first of them), the former two constants, until all `blocks` had their turn: with
// as many at once as registers can accumulate for that many rows, max kTileRows.
template <int64_t kTileRows, int64_t (*kBlocksFor)(int64_t), class Tile>
void in_tiles(int64_t rows, int64_t blocks, const Tile& tile) {
    const int64_t wide = kBlocksFor(rows);
    for (int64_t block = 0, some; block < blocks; block += some) {
        some = blocks - block >= wide ? wide : blocks - block >= 2 && wide > 2 ? 2 : 1;
        if (some == 4)
            with_rows<kBlocksFor, kTileRows, 4>(rows, block, tile);
        else if (some == 2)
            with_rows<kBlocksFor, kTileRows, 2>(rows, block, tile);
        else
            with_rows<kBlocksFor, kTileRows, 1>(rows, block, tile);
    }
}

// One call, whose threads share it. A kernel, of which each thread makes one for the call, is a type with
//   Value: that of x, bias, residual and, if not float, out
//   kRows: max rows of a tile;  step(rows): blocks of a tile of that many rows, 2 or 4
//   panel_stride(layer): bytes of a panel for each row, a multiple of 64
//   reads(call): whether x can be read where it lies;  lay(layer, row, panel, r): put a row into a panel as its r-th
//   multiply(layer, x, x_stride in bytes, rows, block, blocks, sums): put the products into sums [rows][kMaxStep * 16]
// or, to have weights fetched ahead, with
//   kInputBytes: of an input in a block of the weight
//   multiply(layer, x, x_stride in bytes, rows, block, blocks, ahead, sums)
// It may have begin(layer, block, blocks, groups): called before some blocks are multiplied by `groups` groups of rows.
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
    }

    void run(int threads) const {
        const int64_t pairs = divide_up(call_.layer.blocks(), 2);
        // As many for each thread, of blocks that differ by max one pair, so that threads end together.
        const int64_t parts = round_up(divide_up(pairs, kTaskPairs), threads);
        const int64_t tasks = divide_up(call_.rows, panel_rows_) * parts;
        on_threads(threads, tasks, [this, pairs, parts](Tasks& tasks) {
            Kernel kernel;
            int64_t prepared = -1;
            const char* x = nullptr;
            for (int64_t task; (task = tasks.next()) >= 0;) {
                const int64_t panel = task / parts, row = panel * panel_rows_, part = task % parts;
                const int64_t rows = std::min(panel_rows_, call_.rows - row);
                if (panel != prepared) x = prepare(row, rows);
                prepared = panel;
                multiply(kernel, x, row, rows, pairs * part / parts * 2, pairs * (part + 1) / parts * 2);
            }
        });
    }

  private:
    static constexpr int64_t kTaskPairs = 2;  // of blocks

    const char* prepare(int64_t row, int64_t rows) const {
        static thread_local Scratch panels, normed;
        const Layer& l = call_.layer;
        const Value* x = static_cast<const Value*>(call_.x) + row * call_.x_stride;
        if (in_place_) return reinterpret_cast<const char*>(x);
        char* panel = panels.of<char>(round_up(rows, kTogether<Kernel>) * stride_);
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
            Kernel::lay(l, from, panel, r);
        }
        return panel;
    }

    void multiply(Kernel& kernel, const char* x, int64_t row, int64_t rows, int64_t block, int64_t end) const {
        const Layer& l = call_.layer;
        end = std::min(l.blocks(), end);
        const int64_t groups = divide_up(rows, Kernel::kRows);
        const int64_t step = Kernel::step(divide_up(rows, groups));
        alignas(64) float sums[Kernel::kRows * kMaxStep * kBlock];
        for (; block < end; block += step) {
            const int64_t blocks = std::min(step, end - block);
            if constexpr (Begins<Kernel>::value) kernel.begin(l, block, blocks, groups);
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t from = first_row(rows, g, groups), size = first_row(rows, g + 1, groups) - from;
                const char* part = x + from * stride_;
                if constexpr (Fetches<Kernel>::value)
                    kernel.multiply(l, part, stride_, size, block, blocks, ahead(blocks, g, groups), sums);
                else
                    kernel.multiply(l, part, stride_, size, block, blocks, sums);
                if (l.out_is_float)
                    Epilogue<Value, float>{call_}(sums, row + from, size, block, blocks);
                else
                    Epilogue<Value, Value>{call_}(sums, row + from, size, block, blocks);
            }
        }
    }

    static int64_t first_row(int64_t rows, int64_t group, int64_t groups) {
        return std::min(rows, round_up(rows * group / groups, kTogether<Kernel>));
    }

    // Each group of rows that uses some blocks fetches its share of the blocks after them.
    Ahead ahead(int64_t blocks, int64_t group, int64_t groups) const {
        const int64_t block_bytes = round_up(call_.layer.inputs, kPadInputs) * Kernel::kInputBytes;
        if (blocks * block_bytes > kFarthest) return {kFarthest, kLineBytes, groups == 1};
        return {blocks * block_bytes + block_bytes * group / groups, kLineBytes / groups, groups == 1};
    }

    const Call& call_;
    bool in_place_;
    int64_t stride_, panel_rows_;
};

}  // namespace ericllm
