// Weights of float32: [outputs/16][inputs][16], padded with zeros to 16 outputs. An output is one accumulator to which
// its inputs are added in their order, each product and sum rounded once.

#include "linear.h"

using namespace ericllm;

namespace {

#if defined(__AVX512F__)
constexpr int64_t kTileRows = 12;  // x 2 blocks: 24 of 32 registers accumulate
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int64_t kTileRows = 6;  // x 2 registers of one block: 12 of 16
constexpr int64_t blocks_for(int64_t rows) { return rows <= 3 ? 2 : 1; }
#endif

// R rows times C blocks from `weight` on, each `stride` behind the one before it.
template <int R, int C>
void tile(const char* x, int64_t x_stride, const float* weight, int64_t stride, int64_t inputs,
          const Ahead& ahead, float* sums) {
    constexpr int64_t kRow = kMaxStep * kBlock;
    Floats sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = all(0.0f);
    const char* next = reinterpret_cast<const char*>(weight) + ahead.bytes;
    for (int64_t k = 0; k < inputs; ++k, next += ahead.step) {
        Floats w[C];
        for (int c = 0; c < C; ++c) {
            _mm_prefetch(next + c * stride * 4, R <= 8 ? _MM_HINT_T1 : _MM_HINT_T0);
            w[c] = load(weight + c * stride + k * kBlock);
        }
        for (int r = 0; r < R; ++r) {
            const Floats a = all(reinterpret_cast<const float*>(x + r * x_stride)[k]);
            for (int c = 0; c < C; ++c) sum[r][c] = fused(w[c], a, sum[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + r * kRow + c * kBlock, sum[r][c]);
}

template <int C, int R = kTileRows>
void tile_of(int64_t rows, const char* x, int64_t x_stride, const float* weight, int64_t stride, int64_t inputs,
          const Ahead& ahead,
             float* sums) {
    if constexpr (C <= blocks_for(R)) {
        if (rows == R) return tile<R, C>(x, x_stride, weight, stride, inputs, ahead, sums);
    }
    if constexpr (R > 1) tile_of<C, R - 1>(rows, x, x_stride, weight, stride, inputs, ahead, sums);
}

struct Float32Kernel {
    using Value = float;
    static constexpr int64_t kRows = kTileRows;
    static constexpr int64_t kInputBytes = kBlock * 4;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, blocks_for(rows)); }
    static int64_t panel_stride(const Layer& l) { return (round_up(l.inputs, 16) + 16) * 4; }  // spreads over the cache
    static bool reads(const Call& call) { return call.rows <= 4 || call.x_stride * 4 % kCrowdingBytes != 0; }
    static void lay(const Layer& l, const float* row, char* to) {
        std::memcpy(to, row, static_cast<size_t>(l.inputs) * sizeof *row);
    }

    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         const Ahead& ahead, float* sums) {
        const int64_t stride = l.inputs * kBlock;
        const float* weight = static_cast<const float*>(l.weight) + block * stride;
        const int64_t wide = blocks_for(rows);
        for (int64_t b = 0; b < blocks;) {
            const int64_t c = blocks - b >= wide ? wide : blocks - b >= 2 && wide > 2 ? 2 : 1;
            const float* from = weight + b * stride;
            float* to = sums + b * kBlock;
            if (c == 4)
                tile_of<4>(rows, x, x_stride, from, stride, l.inputs, ahead, to);
            else if (c == 2)
                tile_of<2>(rows, x, x_stride, from, stride, l.inputs, ahead, to);
            else
                tile_of<1>(rows, x, x_stride, from, stride, l.inputs, ahead, to);
            b += c;
        }
    }
};

}  // namespace

extern "C" {

// Lay out `weight` [outputs, inputs] with rows `stride` apart as the product below reads it.
void ericllm_pack_float32(const float* weight, int64_t stride, int64_t outputs, int64_t inputs, int32_t interleaved,
                          float* packed) {
    const Layer l = shape(outputs, inputs, interleaved);
    std::memset(packed, 0, static_cast<size_t>(l.blocks() * inputs * kBlock) * sizeof *packed);
    for (int64_t block = 0; block < l.blocks(); ++block, packed += inputs * kBlock)
        for (int64_t n = 0; n < l.count(block); ++n) {
            const float* from = weight + (l.first(block) + n) * stride;
            for (int64_t k = 0; k < inputs; ++k) packed[k * kBlock + n] = from[k];
        }
}

// The product, on at most `threads` threads.
void ericllm_linear_float32(const Threads* by, int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                            int64_t rows, void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
    Product<Float32Kernel>(call).run(*by, threads);
}

}  // extern "C"
