// Where tiles lie in pages, and keys and values that lie there as they are.

#pragma once

#include "attention_heads.h"
#include "attention_tile.h"

namespace ericllm::attention {

// Where the keys of the tile lie that has the key at `position`.
inline char* tile_at(const Layer& l, const Step& step, const Chunk& chunk, int64_t head, int64_t position) {
    const int64_t page = step.pages[chunk.pages + position / l.page_tokens];
    return l.pages + ((page * l.kv_heads + head) * 2 * l.page_tokens + position % l.page_tokens / kTile * kTile) * l.head_bytes;
}

// From the keys of a tile to its values.
inline int64_t to_values(const Layer& l) { return l.page_tokens * l.head_bytes; }

// The tiles of the keys from `block` on; beyond `end`, the last one once more.
inline View view_of(const Layer& l, const Step& step, const Chunk& chunk, int64_t head, int64_t block, int64_t end) {
    View view;
    for (int64_t t = 0; t < kTiles; ++t) {
        const char* tile = tile_at(l, step, chunk, head, std::min(block * kBlock + t * kTile, end - 1));
        view.keys[t] = reinterpret_cast<const uint32_t*>(tile);
        view.values[t] = reinterpret_cast<const uint32_t*>(tile + to_values(l));
    }
    return view;
}

// Plain ones, which are multiplied as they lie.
template <class KindOfUnits>
class PlainPages {
  public:
    using Kind = KindOfUnits;
    using Value = typename Kind::Value;

    explicit PlainPages(const Layer& layer) : size_(layer.head_dim) {}

    // A query as keys are multiplied by it. spare: [head_dim]
    void take_query(const Heads<Value>& heads, int64_t row, int64_t head, float* spare, Value* to) const {
        heads.take(row, head, spare, to);
    }

    // A key into column `column` of its tile. spare: [2 * head_dim]
    void lay_key(const Heads<Value>& heads, int64_t row, int64_t head, float* spare, char* tile, int64_t column) const {
        auto* key = reinterpret_cast<uint32_t*>(spare + size_);
        heads.take(row, head, spare, reinterpret_cast<Value*>(key));
        auto* keys = reinterpret_cast<uint32_t*>(tile);
        for (int64_t u = 0; u < size_ / Kind::kPerUnit; ++u) keys[u * kTile + column] = key[u];
    }

    // A value. last: none lies beyond it yet.
    void lay_value(const Heads<Value>& heads, int64_t row, int64_t head, float*, char* tile, int64_t column, bool last) const {
        constexpr int64_t kEach = Kind::kPerUnit;
        const Value* from = heads.at(row, head);
        Value* values = reinterpret_cast<Value*>(tile) + column / kEach * size_ * kEach + column % kEach;
        for (int64_t i = 0; i < size_; ++i) values[i * kEach] = from[i];
        // The other half of a unit is multiplied by zero, which stale bits must not turn into NaN.
        if (kEach == 2 && column % 2 == 0 && last)
            for (int64_t i = 0; i < size_; ++i) values[2 * i + 1] = Value{};
    }

    // The keys [begin, end) of the block that lies in `view`, and their values, as they are multiplied.
    View read(const View& view, const View&, int64_t, int64_t) const { return view; }

    // What values add up to, as they were before they were laid.
    void restore(float*) const {}

  private:
    const int64_t size_;
};

}  // namespace ericllm::attention
