// Products of bfloat16 in the tile registers of AMX: 32 rows times two blocks at a time, 32 inputs by 32.
//
// A tile adds up 32 inputs from nothing and then adds them to what it holds, by an order of its own. So that a row's
// result does not depend on how many rows there are, a single row goes through tiles as well.

#pragma once

#include "bfloat16.h"
#include "tiles.h"

namespace ericllm {

class AmxKernel : public PairPanel {
  public:
    using Value = Bfloat16;
    static constexpr int64_t kRows = 32;
    static constexpr int64_t kInputBytes = kBlock * 2;

    static int64_t step(int64_t) { return 2; }
    static bool reads(const Call& call) { return call.layer.inputs % kPadInputs == 0 && !crowds(call); }

    void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                  const Ahead& ahead, float* sums) {
        const int64_t stride = block_pairs(l.inputs) * 4, tiles = divide_up(l.inputs, kPadInputs);
        const Operands operands{x, x_stride, static_cast<const char*>(l.weight) + block * stride, stride, tiles, ahead};
        if (rows != rows_) configure(rows);
        if (rows > kTileRows)
            blocks == 2 ? add_up<true, true>(operands, sums) : add_up<true, false>(operands, sums);
        else
            blocks == 2 ? add_up<false, true>(operands, sums) : add_up<false, false>(operands, sums);
    }

  private:
    static constexpr int64_t kTileRows = TileRegisters::kRows, kTileBytes = 1024;

    struct Operands {
        const char* x;
        int64_t x_stride;
        const char* weight;
        int64_t stride;
        int64_t tiles;
        const Ahead& ahead;
    };

    // Registers 0 to 3 hold sums of two times 16 rows and two blocks, 4 and 5 those rows, 6 and 7 those blocks.
    void configure(int64_t rows) {
        const int64_t upper = std::min(rows, kTileRows), lower = std::max<int64_t>(rows - upper, 1);
        const TileRegisters::Shape above{upper, 64}, below{lower, 64}, block{kTileRows, 64};
        registers_.configure({above, above, below, below, above, below, block, block});
        rows_ = rows;
    }

    template <bool Below, bool Beside>
    static void add_up(const Operands& o, float* sums) {
        _tile_zero(0);
        if constexpr (Beside) _tile_zero(1);
        if constexpr (Below) _tile_zero(2);
        if constexpr (Below && Beside) _tile_zero(3);
        asm volatile("" ::: "memory");  // rows that were laid into a panel are there before a tile reads them
        const char* lower = o.x + kTileRows * o.x_stride;
        const char* weight = o.weight;
        const char* next = weight + o.ahead.bytes;
        for (int64_t t = 0; t < o.tiles; ++t, weight += kTileBytes, next += o.ahead.step * kTileRows) {
            for (int64_t at = 0; at < o.ahead.step * kTileRows; at += kLineBytes) {
                _mm_prefetch(next + at, _MM_HINT_T1);
                if constexpr (Beside) _mm_prefetch(next + o.stride + at, _MM_HINT_T1);
            }
            _tile_loadd(4, o.x + t * 64, o.x_stride);
            _tile_loadd(6, weight, 64);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (Beside) {
                _tile_loadd(7, weight + o.stride, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (Below) {
                _tile_loadd(5, lower + t * 64, o.x_stride);
                _tile_dpbf16ps(2, 5, 6);
                if constexpr (Beside) _tile_dpbf16ps(3, 5, 7);
            }
        }
        constexpr int64_t kRowBytes = kMaxStep * kBlock * sizeof(float);
        float* below = sums + kTileRows * kMaxStep * kBlock;
        _tile_stored(0, sums, kRowBytes);
        if constexpr (Beside) _tile_stored(1, sums + kBlock, kRowBytes);
        if constexpr (Below) _tile_stored(2, below, kRowBytes);
        if constexpr (Below && Beside) _tile_stored(3, below + kBlock, kRowBytes);
        asm volatile("" ::: "memory");
    }

    TileRegisters registers_;
    int64_t rows_ = 0;  // what the registers are configured for
};

// Of rows that are shared out among groups, all but the last fill tiles.
template <>
inline constexpr int64_t kTogether<AmxKernel> = TileRegisters::kRows;

}  // namespace ericllm
