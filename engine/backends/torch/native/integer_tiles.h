// Products of rows in 8 bits with a block of a weight in the tile registers of AMX, 16 rows at a time.
//
// Groups are summed in int32, which is exact, and scaled and added in the order and by the operations of the products
// without tiles: so results are equal to the bit, and few rows, which do not fill a tile, go without.

#pragma once

#include "integers.h"
#include "tiles.h"

namespace ericllm {

// A block of 16 outputs as tiles take it, in units of inputs that share a scale.
struct UnpackedBlock {
    int8_t* codes;  // [unit][inputs/4][16][4]
    float* scales;  // [unit][16]
    float* minima;  // [unit][16], or null where weights have none
    int64_t units;
};

// What is fetched meanwhile: `bytes` with every unit, `at` is the first of them.
struct NextUnits {
    const char* at;
    int64_t bytes;
};

class IntegerTiles {
  public:
    static constexpr int64_t kRows = TileRegisters::kRows;
    static constexpr int64_t kMinRows = kTileRows + 1;  // fewer are one tile without these, and faster

    // Put the products of `rows` rows, kMinRows to kRows, into sums [rows][kMaxStep * 16].  x: Groups, each of which has
    // the codes of kParts units, their scale, and minus_sum where there are minima.
    template <class Group, int kParts>
    void multiply(const UnpackedBlock& block, const char* x, int64_t x_stride, int64_t rows, const NextUnits& next, float* sums) {
        constexpr int64_t inputs = sizeof(Group::codes) / kParts;
        if (rows != rows_ || inputs != inputs_) {
            registers_.configure({{rows, TileRegisters::kRowBytes}, {rows, inputs}, {inputs / 4, TileRegisters::kRowBytes}});
            rows_ = rows, inputs_ = inputs;
        }
        with_rows<one_block, kRows, 1>(rows, 0, [&](auto r, auto, int64_t) {
            if constexpr (r() >= kMinRows) add_up<Group, kParts, r()>(block, x, x_stride, next, sums);
        });
    }

    // Memory of this thread for a block of so many inputs and units, the `place`-th of kMaxStep.
    static UnpackedBlock memory(int64_t place, int64_t inputs, int64_t units) {
        static thread_local Scratch codes, scales;
        auto* block_codes = codes.of<int8_t>(kMaxStep * kBlock * inputs) + place * kBlock * inputs;
        auto* block_scales = scales.of<float>(kMaxStep * 2 * kBlock * units) + place * 2 * kBlock * units;
        return {block_codes, block_scales, block_scales + kBlock * units, units};
    }

  private:
    static constexpr int64_t one_block(int64_t) { return 1; }

    // Tiles of a unit while the sums of the one before it are scaled.
    template <class Group, int kParts, int R>
    static void add_up(const UnpackedBlock& block, const char* x, int64_t x_stride, const NextUnits& next, float* to) {
        constexpr int64_t inputs = sizeof(Group::codes) / kParts;
        alignas(64) int32_t sums[2][kRows * kBlock];
        Floats total[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) total[r] = all(0.0f);
        const auto multiply_unit = [&](int64_t unit) {
            _tile_zero(0);
            _tile_loadd(1, x + unit / kParts * sizeof(Group) + unit % kParts * inputs, x_stride);
            _tile_loadd(2, block.codes + unit * inputs * kBlock, TileRegisters::kRowBytes);
            _tile_dpbssd(0, 1, 2);
            _tile_stored(0, sums[unit % 2], TileRegisters::kRowBytes);
        };
        asm volatile("" ::: "memory");  // what was laid into a panel and unpacked is there before a tile reads it
        multiply_unit(0);
        const char* fetched = next.at;
        const char* quads[(R + 3) / 4];  // or compilers hold the addresses of all rows, more than there are registers for
        for (int q = 0; q < (R + 3) / 4; ++q) quads[q] = x + 4 * q * x_stride;
        const auto row = [&](int r) {
            return reinterpret_cast<const Group*>(quads[r / 4] + r % 4 * x_stride);
        };
        for (int64_t unit = 0; unit < block.units; ++unit) {
            if (unit + 1 < block.units) multiply_unit(unit + 1);
            for (int64_t at = 0; at < next.bytes; at += kLineBytes) _mm_prefetch(fetched + at, _MM_HINT_T1);
            fetched += next.bytes;
            const Floats scale = load(block.scales + unit * kBlock);
            const int32_t* found = sums[unit % 2];
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Floats whole = floats(_mm512_load_si512(found + r * kBlock)) * all(row(r)->scale);
                total[r] = fused(whole, scale, total[r]);
            }
            if constexpr (Group::kHasMinusSum) {
                if (block.minima) {
                    const Floats minimum = load(block.minima + unit * kBlock);
#pragma GCC unroll 16
                    for (int r = 0; r < R; ++r) total[r] = fused(all(row(r)->minus_sum), minimum, total[r]);
                }
            }
            if (unit % kParts == kParts - 1)
                for (const char*& quad : quads) {
                    quad += sizeof(Group);
                    asm("" : "+r"(quad));
                }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) store(to + r * kMaxStep * kBlock, total[r]);
    }

    TileRegisters registers_;
    int64_t rows_ = 0, inputs_ = 0;  // what the registers are shaped for
};

}  // namespace ericllm
