// Products of attention in the tile registers of AMX: 16 queries and 16 keys, or elements of values, at a time.
//
// Sixteen units of a tile of keys are what AMX takes as a tile; of values, whose tile has eight units of tokens, half of
// one. A tile adds up its inputs from nothing and then adds them to what it holds, by an order of its own; so that a query's
// result does not depend on how many there are, a single one goes through tiles as well.

#pragma once

#include "attention.h"
#include "tiles.h"

namespace ericllm::attention {

template <class Kind>
class TileProducts {
  public:
    void score(const uint32_t* queries, int64_t rows, int64_t size, int64_t begin, int64_t end, const View& view,
               const View& ahead, float* scores) {
        if (rows != rows_) configure(rows);
        const int64_t units = size / Kind::kPerUnit;
        const bool fetches = Kind::kFetches && &view != &ahead;
        int64_t t = begin / kTile;
        const int64_t last = divide_up(end, kTile);
        for (; t + 4 <= last; t += 4) score<4>(queries, units, view, ahead, fetches, t, scores);
        for (; t < last; ++t) score<1>(queries, units, view, ahead, fetches, t, scores);
        for (; fetches && t < kTiles; ++t)
            for (int64_t i = 0; i < units; ++i) fetch(ahead.keys[t] + i * kTile);
    }

    void weigh(const uint32_t* kept, int64_t rows, int64_t size, int64_t begin, int64_t end, const View& view,
               const View& ahead, const float* old_share, const float* new_share, float* out) {
        View whole = view;
        const int64_t last = (end - 1) / kTile;
        if (end % kTile) whole.values[last] = cut(view.values[last], divide_up(end % kTile, 2) * size, kTileUnits * size);
        Values v{kept, rows, size, begin / kTile, last + 1, whole, ahead, Kind::kFetches && &view != &ahead};
        v.old_share = old_share, v.new_share = new_share;
        int64_t column = 0;
        for (; column + 4 * kLanes <= size; column += 4 * kLanes) weigh<4>(v, column, out);
        for (; column < size; column += kLanes) weigh<1>(v, column, out);
    }

  private:
    static constexpr int64_t kUnits = 16, kTileUnits = kTile / 2;  // that a register takes; of values in a tile

    struct Values {
        const uint32_t* kept;
        int64_t rows, size, first, end;  // tiles [first, end)
        const View& view;
        const View& ahead;
        bool fetches;
        const float *old_share = nullptr, *new_share = nullptr;
    };

    // Registers 0 to 3 hold sums; 4 and 6 queries or probabilities, of 16 units and of 8; 5 and 7 keys or values likewise.
    void configure(int64_t rows) {
        registers_.configure({{rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {rows, 64}, {kUnits, 64}, {rows, 32}, {kTileUnits, 64}});
        rows_ = rows;
    }

    // The first `units` units of a tile of values, with zeros after them: what lies there was never written.
    static const uint32_t* cut(const uint32_t* values, int64_t units, int64_t all_units) {
        static thread_local Scratch scratch;
        auto* copied = scratch.of<uint32_t>(all_units);
        std::copy_n(values, units, copied);
        std::fill_n(copied + units, all_units - units, 0u);
        return copied;
    }

    template <int C>
    static void clear() {
        _tile_zero(0);
        if constexpr (C > 1) {
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        asm volatile("" ::: "memory");  // what was written is there before a tile reads it
    }

    template <int C>
    static void put(float* to, int64_t row_bytes) {
        _tile_stored(0, to, row_bytes);
        if constexpr (C > 1) {
            _tile_stored(1, to + kLanes, row_bytes);
            _tile_stored(2, to + 2 * kLanes, row_bytes);
            _tile_stored(3, to + 3 * kLanes, row_bytes);
        }
        asm volatile("" ::: "memory");
    }

    // C tiles of keys from `t` on.
    template <int C>
    static void score(const uint32_t* queries, int64_t units, const View& view, const View& ahead, bool fetches, int64_t t,
                      float* scores) {
        clear<C>();
        int64_t u = 0;
        for (; u + kUnits <= units; u += kUnits) {
            _tile_loadd(4, queries + u, units * 4);
            _tile_loadd(5, view.keys[t] + u * kTile, 64);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (C > 1) {
                _tile_loadd(5, view.keys[t + 1] + u * kTile, 64);
                _tile_dpbf16ps(1, 4, 5);
                _tile_loadd(5, view.keys[t + 2] + u * kTile, 64);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(5, view.keys[t + 3] + u * kTile, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        if (u < units) {
            _tile_loadd(6, queries + u, units * 4);
            _tile_loadd(7, view.keys[t] + u * kTile, 64);
            _tile_dpbf16ps(0, 6, 7);
            if constexpr (C > 1) {
                _tile_loadd(7, view.keys[t + 1] + u * kTile, 64);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, view.keys[t + 2] + u * kTile, 64);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, view.keys[t + 3] + u * kTile, 64);
                _tile_dpbf16ps(3, 6, 7);
            }
        }
        if (fetches)  // here, so that no tile waits for it
            for (int64_t c = 0; c < C; ++c)
                for (int64_t i = 0; i < units; ++i) fetch(ahead.keys[t + c] + i * kTile);
        put<C>(scores + t * kTile, kBlock * 4);
    }

    // C * 16 elements of values from `column` on.
    template <int C>
    static void weigh(const Values& v, int64_t column, float* out) {
        clear<C>();
        const int64_t row_bytes = v.size * 4;
        for (int64_t t = v.first; t < v.end; ++t) {
            const uint32_t* values = v.view.values[t] + column;
            _tile_loadd(6, v.kept + t * kTileUnits, kKeptUnits<Kind> * 4);
            _tile_loadd(7, values, row_bytes);
            _tile_dpbf16ps(0, 6, 7);
            if constexpr (C > 1) {
                _tile_loadd(7, values + kLanes, row_bytes);
                _tile_dpbf16ps(1, 6, 7);
                _tile_loadd(7, values + 2 * kLanes, row_bytes);
                _tile_dpbf16ps(2, 6, 7);
                _tile_loadd(7, values + 3 * kLanes, row_bytes);
                _tile_dpbf16ps(3, 6, 7);
            }
            if (v.fetches)
                for (int64_t i = 0; i < kTileUnits; ++i)
                    for (int64_t c = 0; c < C; ++c) fetch(v.ahead.values[t] + i * v.size + column + c * kLanes);
        }
        for (int64_t t = v.end; v.fetches && t < kTiles; ++t)
            for (int64_t i = 0; i < kTileUnits; ++i)
                for (int64_t c = 0; c < C; ++c) fetch(v.ahead.values[t] + i * v.size + column + c * kLanes);
        alignas(64) float sums[Kind::kRows * C * kLanes];
        put<C>(sums, C * kLanes * 4);
        for (int64_t r = 0; r < v.rows; ++r) {
            const Floats before = all(v.old_share[r]), now = all(v.new_share[r]);
            for (int64_t i = 0; i < C * kLanes; i += kLanes) {
                float* to = out + r * v.size + column + i;
                store(to, fused(load(to), before, load(sums + r * C * kLanes + i) * now));
            }
        }
    }

    TileRegisters registers_;
    int64_t rows_ = 0;  // what they are configured for
};

}  // namespace ericllm::attention
