// Products of rows in 8 bits with a block of a weight in the tile registers of AMX, 16 rows at a time.
//
// Groups are summed in int32, which is exact, and scaled and added in the order and by the operations of the products
// without tiles: so results are equal to the bit, and few rows, which do not fill a tile, go without.

#pragma once

#include "integers.h"
#include "tiles.h"

namespace ericllm {

constexpr int64_t kMinTiledRows = kTileRows + 1;  // fewer are one tile without these, and faster

// 16 rows as tiles read them: their codes, one row after the other, in an odd number of lines, so that rows spread over
// the cache; then for each group of inputs the scales of all rows, and what minima are multiplied by, if there are any.
template <int64_t kGroup, bool kMinima>
class RowTile {
  public:
    static constexpr int64_t kRows = TileRegisters::kRows;

    // What is `groups` groups long, and lies from `memory` on.
    RowTile(int64_t groups, char* memory) : stride_(round_up(groups * kGroup, 2 * kLineBytes) + kLineBytes), groups_(groups), memory_(memory) {}

    int64_t bytes_for_row() const {
        return round_up(stride_ + groups_ * kFactors * static_cast<int64_t>(sizeof(float)), kLineBytes);
    }
    int64_t stride() const { return stride_; }
    int8_t* codes(int64_t row) const { return reinterpret_cast<int8_t*>(memory_ + row * stride_); }
    float* scales(int64_t group) const { return reinterpret_cast<float*>(memory_ + kRows * stride_) + group * kRows; }
    float* minus_sums(int64_t group) const { return scales(groups_ + group); }

    // Have rows that are not laid count as nothing: what lies there may be numbers that are slow to multiply.
    void clear() const { std::memset(scales(0), 0, static_cast<size_t>(groups_ * kFactors * kRows) * sizeof(float)); }

  private:
    static constexpr int64_t kFactors = kMinima ? 2 : 1;

    int64_t stride_, groups_;
    char* memory_;
};

// What is fetched meanwhile: `bytes` with every unit, `at` is the first of them.
struct NextUnits {
    const char* at;
    int64_t bytes;
};

class IntegerTiles {
  public:
    static constexpr int64_t kRows = TileRegisters::kRows;

    // Put the products of `rows` rows, 1 to kRows, into sums [kRows][kMaxStep * 16].
    //
    // A Block is 16 outputs, in `units` of kInputs inputs that share a scale, kParts of which are a group of the rows:
    // codes(unit) [kInputs/4][16][4], scale(unit), and where kMinima minimum(group).
    template <class Block, class Rows>
    void multiply(const Block& block, const Rows& x, int64_t rows, const NextUnits& next, float* sums) {
        if (rows != rows_ || Block::kInputs != inputs_) {
            registers_.configure(
                {{rows, TileRegisters::kRowBytes}, {rows, Block::kInputs}, {Block::kInputs / 4, TileRegisters::kRowBytes}});
            rows_ = rows, inputs_ = Block::kInputs;
        }
        if (rows > 12)
            add_up<16>(block, x, next, sums);
        else if (rows > 8)
            add_up<12>(block, x, next, sums);
        else
            add_up<8>(block, x, next, sums);
    }

  private:
    static constexpr int64_t kBefore = 2, kKept = 4;  // units that are multiplied before one is scaled, and whose sums are kept

    template <int R, class Block, class Rows>
    static void add_up(const Block& block, const Rows& x, const NextUnits& next, float* to) {
        alignas(64) int32_t sums[kKept][kRows * kBlock];
        Floats total[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) total[r] = all(0.0f);
        const auto multiply_unit = [&](int64_t unit) {
            _tile_zero(0);
            _tile_loadd(1, x.codes(0) + unit * Block::kInputs, x.stride());
            _tile_loadd(2, block.codes(unit), TileRegisters::kRowBytes);
            _tile_dpbssd(0, 1, 2);
            _tile_stored(0, sums[unit % kKept], TileRegisters::kRowBytes);
        };
        asm volatile("" ::: "memory");  // what was laid into a panel and unpacked is there before a tile reads it
        for (int64_t unit = 0; unit < std::min(kBefore, block.units); ++unit) multiply_unit(unit);
        const char* fetched = next.at;
        for (int64_t unit = 0; unit < block.units; ++unit) {
            if (unit + kBefore < block.units) multiply_unit(unit + kBefore);
            for (int64_t at = 0; at < next.bytes; at += kLineBytes) _mm_prefetch(fetched + at, _MM_HINT_T1);
            fetched += next.bytes;
            const Floats scale = block.scale(unit);
            const int32_t* found = sums[unit % kKept];
            const float* factors = x.scales(unit / Block::kParts);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Floats whole = floats(_mm512_load_si512(found + r * kBlock)) * all(factors[r]);
                total[r] = fused(whole, scale, total[r]);
            }
            if constexpr (Block::kMinima) {
                const Floats minimum = block.minimum(unit / Block::kParts);
                factors = x.minus_sums(unit / Block::kParts);
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) total[r] = fused(all(factors[r]), minimum, total[r]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(to + r * kMaxStep * kBlock, total[r]);
    }

    TileRegisters registers_;
    int64_t rows_ = 0, inputs_ = 0;  // what the registers are shaped for
};

}  // namespace ericllm
