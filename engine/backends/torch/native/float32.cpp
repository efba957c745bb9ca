// Weights of float32: [outputs/16][inputs][16], padded with zeros to 16 outputs. An output is one accumulator to which
// its inputs are added in their order, each product and sum rounded once.

#include "floating.h"
#include "packing.h"

using namespace ericllm;

namespace {

struct Float32Kernel {
    using Value = float;
    static constexpr int64_t kRows = floating::kTileRows;
    static constexpr int64_t kInputBytes = kBlock * 4;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, floating::blocks_for<1>(rows)); }
    static int64_t panel_stride(const Layer& l) { return (round_up(l.inputs, 16) + 16) * 4; }  // spreads over the cache
    static bool reads(const Call& call) { return call.rows <= 4 || call.x_stride * 4 % kCrowdingBytes != 0; }
    static void lay(const Layer& l, const float* row, char* panel, int64_t r) {
        std::memcpy(panel + r * panel_stride(l), row, static_cast<size_t>(l.inputs) * sizeof *row);
    }

    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         const Ahead& ahead, float* sums) {
        const int64_t stride = l.inputs * kBlock;
        const float* weight = static_cast<const float*>(l.weight) + block * stride;
        const floating::Next next{reinterpret_cast<const char*>(weight) + ahead.bytes, stride * 4, ahead.step};
        floating::multiply<floating::Floats>(weight, stride, x, x_stride, rows, l.inputs, blocks, next, sums);
    }
};

}  // namespace

extern "C" {

// Lay out the weight whose rows lie in `parts` as the product below reads it, on at most `threads` threads.
void ericllm_pack_float32(int32_t threads, const Layer* shape, const Part* parts, void* packed) {
    pack<float>(threads, *shape, parts, shape->inputs, packed);
}

// The product, on at most `threads` threads.
void ericllm_linear_float32(int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                            int64_t rows, void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
    Product<Float32Kernel>(call).run(threads);
}

}  // extern "C"
