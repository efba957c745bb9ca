// Attention over pages, from the rows of the fused projection to what each of their queries attended.
//
// The keys of a sequence fall into blocks at absolute positions. For every query each block gives its highest score, the
// sum of its probabilities and the values that they weigh, all from nothing; what the blocks of a span gave is merged in
// their order (Dao et al. 2022), and what spans gave in theirs. That sequence of operations depends on the query and its
// keys alone: neither chunks, the rest of a batch, tiles nor threads change an answer, be spans merged as they come or
// computed apart and merged later.

#include "attention_codes.h"
#include "attention_plan.h"

namespace ericllm::attention {
namespace {

// Pages: how keys and values lie; see PlainPages.
template <class Pages>
class Attention {
  public:
    using Kind = typename Pages::Kind;
    using Value = typename Kind::Value;
    using Kept = typename Kind::Kept;
    static constexpr int64_t kRows = Kind::kRows;

    Attention(const Layer& layer, const Step& step, const Rows& rows)
        : l_(layer), step_(step), out_(static_cast<Value*>(rows.out)), heads_(layer, rows), pages_(layer),
          shared_(layer.heads / layer.kv_heads), units_(layer.head_dim / Kind::kPerUnit) {}

    void run(int threads) {
        static thread_local Plan plan;
        static thread_local Scratch results;
        plan.make(l_, step_, kRows, threads);
        splits_ = plan.splits.data();
        results_ = results.of<float>(plan.results);
        on_threads(threads, static_cast<int64_t>(plan.laying.size()), [this, &all = plan.laying](Tasks& tasks) {
            for (int64_t task; (task = tasks.next()) >= 0;)
                for (int64_t head = 0; head < l_.kv_heads; ++head)
                    lay(chunk_of(all[task]), head, all[task].first, all[task].last);
        });
        on_threads(threads, static_cast<int64_t>(plan.tasks.size()), [this, &all = plan.tasks](Tasks& tasks) {
            for (int64_t task; (task = tasks.next()) >= 0;) {
                const int64_t after = tasks.likely();
                attend(all[task], after < 0 ? nullptr : &all[after]);
            }
        });
    }

  private:
    // The queries of a task. Row r is query head r % shared of token r / shared.
    struct Group {
        int64_t rows, tiles;
        Kept* queries;  // [tiles][kRows * units], see Kind::place
        State state, span;  // of all blocks so far, and of those of a span
        float* spare;  // [head_dim]
    };

    const Chunk& chunk_of(const Task& task) const { return step_.chunks[task.chunk]; }
    int64_t end_of(const Task& task) const { return chunk_of(task).start + task.last; }
    View view_of(const Task& task, int64_t block) const {
        return attention::view_of(l_, step_, chunk_of(task), task.head, block, end_of(task));
    }

    // Keys and values of one head of tokens [first, last) into their pages.
    void lay(const Chunk& chunk, int64_t head, int64_t first, int64_t last) const {
        static thread_local Scratch scratch;
        auto* spare = scratch.of<float>(2 * l_.head_dim);
        for (int64_t token = first; token < last; ++token) {
            const int64_t row = chunk.row + token, position = chunk.start + token, column = position % kTile;
            char* tile = tile_at(l_, step_, chunk, head, position);
            pages_.lay_key(heads_, row, l_.heads + head, spare, tile, column);
            pages_.lay_value(heads_, row, l_.heads + l_.kv_heads + head, spare, tile + to_values(l_), column,
                             token + 1 == chunk.rows);
        }
    }

    void attend(const Task& task, const Task* after) const {
        const Chunk& chunk = chunk_of(task);
        if (task.lays) {
            const auto first = std::max<int64_t>(task.first, task.block * kBlock - chunk.start);
            lay(chunk, task.head, first, std::min<int64_t>(task.last, task.end * kBlock - chunk.start));
        }
        const Group group = prepare_group(task, chunk);
        const int64_t begin = first_key(l_, chunk.start + task.first), end = end_of(task);
        View lying = view_of(task, task.block);
        Products<Kind> products;
        for (int64_t block = task.block; block < task.end; ++block) {
            View ahead = lying;
            if (block + 1 < task.end)
                ahead = view_of(task, block + 1);
            else if (after)
                ahead = view_of(*after, after->block);
            const Span span = span_of(l_, block);
            const bool apart = task.split >= 0 || span.end - span.first > 1;
            const State state = task.split >= 0 ? state_of(splits_[task.split], group.tiles, span.number)
                                : apart         ? group.span
                                                : group.state;
            if (apart && (block == span.first || block == task.block)) clear(state, group.tiles);
            const int64_t key = block * kBlock;
            const View view = pages_.read(lying, ahead, std::max<int64_t>(0, begin - key), std::min(kBlock, end - key));
            for (int64_t tile = 0; tile < group.tiles; ++tile)
                attend_tile(products, task, group, tile, block, view, tile ? view : ahead, state);
            if (apart && task.split < 0 && (block + 1 == span.end || block + 1 == task.end))
                merge(group.span, group.state, group.tiles);
            lying = ahead;
        }
        if (task.split >= 0) {
            if (__atomic_sub_fetch(&splits_[task.split].missing, 1, __ATOMIC_ACQ_REL) > 0) return;
            merge(splits_[task.split], group);
        }
        finish(task, chunk, group);
    }

    // The first row of a tile; tiles are about equally large.
    static int64_t first_row(const Group& group, int64_t tile) { return group.rows * tile / group.tiles; }

    Group prepare_group(const Task& task, const Chunk& chunk) const {
        static thread_local Scratch scratch;
        Group group;
        group.rows = (task.last - task.first) * shared_;
        group.tiles = divide_up(group.rows, kRows);
        const int64_t size = group.tiles * units_ * kRows * static_cast<int64_t>(sizeof(Kept));
        const int64_t queries = size / static_cast<int64_t>(sizeof(float)), states = state_floats(l_, group.tiles, kRows);
        auto* memory = scratch.of<float>(queries + 2 * states + 2 * l_.head_dim);
        group.queries = reinterpret_cast<Kept*>(memory);
        group.state = laid_out(memory + queries, group.tiles);
        group.span = laid_out(memory + queries + states, group.tiles);
        group.spare = memory + queries + 2 * states;
        std::memset(memory, 0, static_cast<size_t>(size));
        clear(group.state, group.tiles);
        auto* query = reinterpret_cast<Value*>(group.spare + l_.head_dim);
        for (int64_t tile = 0; tile < group.tiles; ++tile) {
            const int64_t from = first_row(group, tile), to = first_row(group, tile + 1);
            Kept* queries = group.queries + tile * units_ * kRows;
            for (int64_t row = from; row < to; ++row) {
                const int64_t token = chunk.row + task.first + row / shared_, head = task.head * shared_ + row % shared_;
                pages_.take_query(heads_, token, head, group.spare, query);
                for (int64_t u = 0; u < units_; ++u)
                    queries[Kind::place(row - from, u, units_)] = Kind::kept(query + u * Kind::kPerUnit);
            }
        }
        return group;
    }

    static State laid_out(float* memory, int64_t tiles) {
        return {memory, memory + tiles * kLanes, memory + 2 * tiles * kLanes};
    }

    // That of one span of what is computed in parts.
    State state_of(const Split& split, int64_t tiles, int64_t span) const {
        return laid_out(results_ + split.results + (span - split.span) * state_floats(l_, tiles, kRows), tiles);
    }

    void clear(const State& state, int64_t tiles) const {
        std::fill_n(state.highest, tiles * kLanes, kNone);
        std::fill_n(state.sums, tiles * kLanes, 0.0f);
        std::fill_n(state.out, tiles * kRows * l_.head_dim, 0.0f);
    }

    void attend_tile(Products<Kind>& products, const Task& task, const Group& group, int64_t tile, int64_t block,
                     const View& view, const View& ahead, const State& state) const {
        const int64_t row = first_row(group, tile), rows = first_row(group, tile + 1) - row, key = block * kBlock;
        const int64_t position = chunk_of(task).start + task.first;
        const int64_t first = position + row / shared_, last = position + (row + rows - 1) / shared_;
        Shape shape;
        shape.begin = std::max<int64_t>(0, first_key(l_, first) - key) / kTile * kTile;
        shape.end = std::min(kBlock, last + 1 - key);
        if (shape.begin >= shape.end) return;
        shape.scale = l_.scale;
        shape.cap = l_.cap;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = position + (row + r) / shared_;
            shape.low[r] = static_cast<float>(std::clamp<int64_t>(first_key(l_, at) - key, 0, kBlock));
            shape.high[r] = static_cast<float>(std::clamp<int64_t>(at - key, -1, kBlock));
        }
        shape.all_seen = key + round_up(shape.end, kTile) <= first + 1 && first_key(l_, last) <= key + shape.begin;
        attend_block<Kind>(products, group.queries + tile * units_ * kRows, rows, l_.head_dim, shape, view, ahead,
                           {state.highest + tile * kLanes, state.sums + tile * kLanes,
                            state.out + tile * kRows * l_.head_dim});
    }

    // What the spans of a split gave, in their order, into the state of `group`.
    void merge(const Split& split, const Group& group) const {
        clear(group.state, group.tiles);
        for (int64_t span = split.span; span < split.span + split.spans; ++span)
            merge(state_of(split, group.tiles, span), group.state, group.tiles);
    }

    // What further keys gave into what those before them did.
    void merge(const State& part, const State& all_of, int64_t tiles) const {
        alignas(64) float old_share[kLanes], new_share[kLanes];
        for (int64_t tile = 0; tile < tiles; ++tile) {
            share(all_of.highest + tile * kLanes, all_of.sums + tile * kLanes, part.highest + tile * kLanes,
                  part.sums + tile * kLanes, old_share, new_share);
            for (int64_t row = 0; row < kRows; ++row) {
                const int64_t at = (tile * kRows + row) * l_.head_dim;
                const Floats before = all(old_share[row]), now = all(new_share[row]);
                for (int64_t i = at; i < at + l_.head_dim; i += kLanes)
                    store(all_of.out + i, fused(load(all_of.out + i), before, load(part.out + i) * now));
            }
        }
    }

    void finish(const Task& task, const Chunk& chunk, const Group& group) const {
        for (int64_t tile = 0; tile < group.tiles; ++tile) {
            const int64_t from = first_row(group, tile), to = first_row(group, tile + 1);
            for (int64_t row = from; row < to; ++row) {
                const Floats total = all(group.state.sums[tile * kLanes + row - from]);
                float* attended = group.state.out + (tile * kRows + row - from) * l_.head_dim;
                pages_.restore(attended);
                const int64_t token = chunk.row + task.first + row / shared_;
                const int64_t head = task.head * shared_ + row % shared_;
                Value* to_row = out_ + (token * l_.heads + head) * l_.head_dim;
                for (int64_t i = 0; i < l_.head_dim; i += kLanes) store(to_row + i, load(attended + i) / total);
            }
        }
    }

    const Layer& l_;
    const Step& step_;
    Value* const out_;
    const Heads<Value> heads_;
    const Pages pages_;
    const int64_t shared_, units_;
    Split* splits_ = nullptr;
    float* results_ = nullptr;
};

template <class PlainKind>
void attend(int threads, const Layer& layer, const Step& step, const Rows& rows) {
    using Value = typename PlainKind::Value;
    switch (layer.bits) {
        case Bytes::kBits:
            return Attention<CodedPages<Value, Bytes>>(layer, step, rows).run(threads);
        case Nibbles::kBits:
            return Attention<CodedPages<Value, Nibbles>>(layer, step, rows).run(threads);
        default:
            return Attention<PlainPages<PlainKind>>(layer, step, rows).run(threads);
    }
}

}  // namespace
}  // namespace ericllm::attention

extern "C" {

// Lay the keys and values of rows into their pages, and attend. See Rows; floats: whether all of it is float32, or else
// bfloat16.
void ericllm_attention(int32_t threads, const ericllm::attention::Layer* layer,
                       const ericllm::attention::Step* step, const void* fused, int64_t stride, const float* cosines,
                       const float* sines, int64_t turned, void* out, int32_t floats) {
    using namespace ericllm::attention;
    const Rows rows{fused, stride, cosines, sines, turned, out};
    if (floats)
        attend<Single<float>>(threads, *layer, *step, rows);
    else
        attend<Pair>(threads, *layer, *step, rows);
}

}  // extern "C"
