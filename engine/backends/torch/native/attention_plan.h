// How the work of a step is cut into tasks.

#pragma once

#include "attention.h"
#include "attention_call.h"

namespace ericllm::attention {

constexpr int64_t kGroupRows = 192;     // queries that share a pass over the keys, about
constexpr int64_t kLaidTokens = 64;     // that one task lays into pages
constexpr int64_t kPartsPerThread = 3;  // below that, long sequences are split
constexpr int64_t kSpansPerDoubling = 4;
constexpr int64_t kLongestSpan = 16;

// Blocks [first, end) of keys that are merged with each other before they are with what lies before them. At absolute
// positions, and no longer than a quarter of what lies before them, nor than one of the window: so a sequence can be cut
// into parts of about equal length, and a long one gives few results that lie in memory until all parts are computed.
struct Span {
    int64_t number, first, end;
};

inline Span span_of(const Layer& l, int64_t block) {
    const int64_t quarter = l.window ? l.window / kBlock / kSpansPerDoubling : kLongestSpan;
    int64_t length = 1, number = 0, first = 0;
    for (int64_t count = 2 * kSpansPerDoubling;
         2 * length <= std::min(quarter, kLongestSpan) && block >= first + count * length; length *= 2) {
        number += count, first += count * length;
        count = kSpansPerDoubling;
    }
    const int64_t after = (block - first) / length;
    return {number + after, first + after * length, first + (after + 1) * length};
}

// Queries of some tokens of a chunk and of one key head, over some blocks of keys.
struct Task {
    int32_t chunk;
    int32_t head;
    int32_t first, last;  // tokens of the chunk
    int32_t block, end;   // of keys
    int32_t split;        // number of what it is a part of; -1: it is all
    bool lays;            // the keys and values of its tokens too
};

// Tokens whose spans are computed apart: what those gave, and how many parts are missing.
struct Split {
    int32_t span, spans;
    int64_t results;
    int32_t missing;
};

// rows: of a tile.
inline int64_t state_floats(const Layer& l, int64_t tiles, int64_t rows) {
    return tiles * (2 * kLanes + rows * l.head_dim);
}

class Plan {
  public:
    List<Task> tasks;
    List<Split> splits;
    List<Task> laying;  // of tokens that several tasks read: before any of those
    int64_t results = 0;       // floats that all splits together give

    // rows: max queries of a tile.
    void make(const Layer& layer, const Step& step, int64_t rows, int threads) {
        l_ = &layer, step_ = &step, tile_rows_ = rows;
        shared_ = layer.heads / layer.kv_heads;
        group_ = std::max<int64_t>(1, kGroupRows / shared_);
        tasks.clear(), splits.clear(), laying.clear();
        results = 0;
        int64_t total = 0;
        each_group([&](int64_t c, int64_t first, int64_t last) {
            const Blocks blocks = blocks_of(c, first, last);
            total += (blocks.end - blocks.first) * divide_up((last - first) * shared_, tile_rows_) * layer.kv_heads;
        });
        const int64_t most = threads > 1 ? divide_up(total, threads * kPartsPerThread) : total;
        each_group([&](int64_t c, int64_t first, int64_t last) {
            for (int64_t head = 0; head < layer.kv_heads; ++head) attend(c, head, first, last, most);
        });
        for (int64_t c = 0; c < step.count; ++c)
            if (step.chunks[c].rows > group_) lay(c);
    }

  private:
    struct Blocks {
        int64_t first, end;
    };

    template <class Work>
    void each_group(const Work& work) const {
        for (int64_t c = 0; c < step_->count; ++c)
            for (int64_t first = 0, rows = step_->chunks[c].rows; first < rows; first += group_)
                work(c, first, std::min(rows, first + group_));
    }

    Blocks blocks_of(int64_t c, int64_t first, int64_t last) const {
        const int64_t start = step_->chunks[c].start;
        return {first_key(*l_, start + first) / kBlock, (start + last - 1) / kBlock + 1};
    }

    void attend(int64_t c, int64_t head, int64_t first, int64_t last, int64_t most) {
        const auto [block, end] = blocks_of(c, first, last);
        const int64_t rows = (last - first) * shared_, size = std::max<int64_t>(1, most / divide_up(rows, tile_rows_));
        const int64_t parts = divide_up(end - block, size);
        Task task{static_cast<int32_t>(c),    static_cast<int32_t>(head),  static_cast<int32_t>(first),
                  static_cast<int32_t>(last), static_cast<int32_t>(block), static_cast<int32_t>(end),
                  -1,                         step_->chunks[c].rows <= group_};
        const auto begun = static_cast<int64_t>(tasks.size());
        for (int64_t part = 1, from = block; from < end; ++part) {
            const int64_t to = part < parts ? span_of(*l_, block + (end - block) * part / parts).first : end;
            if (to <= from) continue;
            task.block = static_cast<int32_t>(from);
            task.end = static_cast<int32_t>(to);
            tasks.push_back(task);
            from = to;
        }
        const auto made = static_cast<int64_t>(tasks.size()) - begun;
        if (made == 1) return;
        const int64_t first_span = span_of(*l_, block).number, spans = span_of(*l_, end - 1).number + 1 - first_span;
        for (int64_t t = begun; t < begun + made; ++t) tasks[t].split = static_cast<int32_t>(splits.size());
        splits.push_back({static_cast<int32_t>(first_span), static_cast<int32_t>(spans), results, static_cast<int32_t>(made)});
        results += spans * state_floats(*l_, divide_up(rows, tile_rows_), tile_rows_);
    }

    void lay(int64_t c) {
        const Chunk& chunk = step_->chunks[c];
        for (int32_t first = 0, last; first < chunk.rows; first = last) {
            last = static_cast<int32_t>((chunk.start + first) / kLaidTokens + 1) * kLaidTokens - chunk.start;
            last = std::min(last, chunk.rows);
            laying.push_back({static_cast<int32_t>(c), 0, first, last, 0, 0, -1, true});
        }
    }

    const Layer* l_ = nullptr;
    const Step* step_ = nullptr;
    int64_t shared_ = 1, group_ = 1, tile_rows_ = 1;
};

}  // namespace ericllm::attention
