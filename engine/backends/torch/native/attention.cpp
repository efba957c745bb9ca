// Attention over pages, from the rows of the fused projection to what each of their queries attended.
//
// The keys of a sequence fall into blocks at absolute positions. For every query each block gives its highest score, the
// sum of its probabilities and the values that they weigh, all from nothing; what blocks gave is merged in their order
// (Dao et al. 2022). That sequence of operations depends on the query and its keys alone: neither chunks, the rest of a
// batch, tiles nor threads change an answer, be blocks merged as they come or computed apart and merged later.

#include "attention_tile.h"

#include <vector>

namespace ericllm::attention {
namespace {

constexpr int64_t kGroupRows = 96;      // queries that share a pass over the keys, about
constexpr int64_t kLaidTokens = 64;     // that one task lays into pages
constexpr int64_t kPartsPerThread = 3;  // below that, long sequences are split

}  // namespace

// What stays the same for a layer. `Layer` of native/attention.py has the same fields.
struct Layer {
    char* pages;
    const float* norm;  // [heads + kv_heads, head_dim], of an RMS norm of each head; or null
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t page_tokens;
    int64_t window;  // keys that a query sees at most; 0: all
    float epsilon;
    float scale;
    float cap;  // 0: none
};

// Adjacent rows that are tokens of one sequence, from position `start` on.
struct Chunk {
    int32_t row;
    int32_t rows;
    int32_t start;
    int32_t pages;  // where its page numbers begin
};

// A step. `Step` of native/attention.py has the same fields.
struct Step {
    const Chunk* chunks;
    int64_t count;
    const int32_t* pages;
};

// The rows of a step in a layer.
struct Rows {
    const void* fused;  // [rows][heads + 2 * kv_heads, head_dim]
    int64_t stride;     // from one row to the next
    const float* cosines;  // [rows][turned] of angles, those of half of them twice; or null
    const float* sines;    // the same of their sines, the first half negated
    int64_t turned;        // first elements of a head that are turned, each half against the other
    void* out;             // [rows][heads * head_dim] without gaps
};

namespace {

// Queries of some tokens of a chunk and of one key head, over some blocks of keys.
struct Task {
    int32_t chunk;
    int32_t head;
    int32_t first, last;        // tokens of the chunk
    int32_t block, end;         // of keys
    int32_t split;              // number of what it is a part of; -1: it is all
    bool lays;                  // the keys and values of its tokens too
};

// Tokens whose blocks are computed apart: what those gave, and how many parts are missing.
struct Split {
    int32_t block, blocks;
    int64_t results;
    int32_t missing;
};

template <class Kind>
class Attention {
  public:
    using Value = typename Kind::Value;
    using Kept = typename Kind::Kept;

    Attention(const Layer& layer, const Step& step, const Rows& rows)
        : l_(layer), step_(step), rows_(rows), shared_(layer.heads / layer.kv_heads),
          units_(layer.head_dim / Kind::kPerUnit), group_(std::max<int64_t>(1, kGroupRows / shared_)) {}

    void run(const Threads& by, int threads) {
        static thread_local std::vector<Task> tasks;
        static thread_local std::vector<Split> splits;
        static thread_local Scratch results;
        plan(tasks, splits, threads);
        splits_ = splits.data();
        tasks_ = tasks.data();
        results_ = results.of<float>(results_size_);
        lay_long_chunks(by, threads);
        const auto count = static_cast<int64_t>(tasks.size());
        on_threads(by, threads, count, [this](const auto& next) {
            for (int64_t task = next(), after; task >= 0; task = after) {
                after = next();
                attend(tasks_[task], after < 0 ? nullptr : &tasks_[after]);
            }
        });
    }

  private:
    // The queries of a task. Row r is query head r % shared of token r / shared.
    struct Group {
        int64_t rows, tiles;
        Kept* queries;  // [tiles][units][kMaxRows]
        State state;
        float* spare;       // [head_dim]
    };

    const Chunk& chunk_of(const Task& task) const { return step_.chunks[task.chunk]; }
    int64_t first_key(int64_t position) const { return l_.window ? std::max<int64_t>(0, position - l_.window + 1) : 0; }
    int64_t state_floats(int64_t tiles) const { return tiles * (2 * kLanes + kMaxRows * l_.head_dim); }

    void plan(std::vector<Task>& tasks, std::vector<Split>& splits, int threads) {
        tasks.clear();
        splits.clear();
        int64_t total = 0;
        for (int64_t c = 0; c < step_.count; ++c) {
            const Chunk& chunk = step_.chunks[c];
            for (int64_t first = 0; first < chunk.rows; first += group_) {
                const int64_t last = std::min<int64_t>(chunk.rows, first + group_);
                const int64_t block = first_key(chunk.start + first) / kBlock, end = (chunk.start + last - 1) / kBlock + 1;
                total += (end - block) * divide_up((last - first) * shared_, kMaxRows) * l_.kv_heads;
            }
        }
        const int64_t most = threads > 1 ? divide_up(total, threads * kPartsPerThread) : total;
        for (int64_t c = 0; c < step_.count; ++c) {
            const Chunk& chunk = step_.chunks[c];
            for (int64_t first = 0; first < chunk.rows; first += group_)
                for (int64_t head = 0; head < l_.kv_heads; ++head)
                    add(tasks, splits, c, head, first, std::min<int64_t>(chunk.rows, first + group_), most);
        }
    }

    void add(std::vector<Task>& tasks, std::vector<Split>& splits, int64_t c, int64_t head, int64_t first, int64_t last,
             int64_t most) {
        const Chunk& chunk = step_.chunks[c];
        const int64_t block = first_key(chunk.start + first) / kBlock, end = (chunk.start + last - 1) / kBlock + 1;
        const int64_t rows = (last - first) * shared_, size = std::max<int64_t>(1, most / divide_up(rows, kMaxRows));
        const int64_t parts = divide_up(end - block, size);
        Task task{static_cast<int32_t>(c),    static_cast<int32_t>(head),  static_cast<int32_t>(first),
                  static_cast<int32_t>(last), static_cast<int32_t>(block), static_cast<int32_t>(end),
                  -1,                         chunk.rows <= group_};
        if (parts > 1) {
            task.split = static_cast<int32_t>(splits.size());
            splits.push_back({task.block, static_cast<int32_t>(end - block), results_size_, static_cast<int32_t>(parts)});
            results_size_ += (end - block) * state_floats(divide_up(rows, kMaxRows));
        }
        for (int64_t part = 0; part < parts; ++part) {
            task.block = static_cast<int32_t>(block + (end - block) * part / parts);
            task.end = static_cast<int32_t>(block + (end - block) * (part + 1) / parts);
            tasks.push_back(task);
        }
    }

    // --- keys and values ---------------------------------------------------------------------------------------------

    uint32_t* tile_at(const Chunk& chunk, int64_t head, int64_t position) const {
        const int64_t page = step_.pages[chunk.pages + position / l_.page_tokens];
        const int64_t head_units = l_.page_tokens * units_;
        return reinterpret_cast<uint32_t*>(l_.pages) + (page * l_.kv_heads + head) * 2 * head_units +
               position % l_.page_tokens / kTile * kTile * units_;
    }

    int64_t to_values() const { return l_.page_tokens * units_; }

    // The tiles of the keys from `block` on; beyond `end`, the last one once more.
    View view_of(const Chunk& chunk, int64_t head, int64_t block, int64_t end) const {
        View view;
        for (int64_t t = 0; t < kTiles; ++t) {
            view.keys[t] = tile_at(chunk, head, std::min(block * kBlock + t * kTile, end - 1));
            view.values[t] = view.keys[t] + to_values();
        }
        return view;
    }

    const Value* row_of(const Chunk& chunk, int64_t token) const {
        return static_cast<const Value*>(rows_.fused) + (chunk.row + token) * rows_.stride;
    }

    // Head number `head` of a row, normed and turned, into `to` [head_dim]; rounded once.
    void prepare(const Chunk& chunk, int64_t token, int64_t head, float* wide, Value* to) const {
        const int64_t size = l_.head_dim;
        const Value* from = row_of(chunk, token) + head * size;
        if (!l_.norm && !rows_.cosines) {
            std::memcpy(to, from, static_cast<size_t>(size) * sizeof(Value));
            return;
        }
        if (l_.norm) {
            const float* weight = l_.norm + head * size;
            Floats squares = all(0.0f);
            for (int64_t i = 0; i < size; i += kLanes) squares = fused(load(from + i), load(from + i), squares);
            const Floats scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + l_.epsilon));
            for (int64_t i = 0; i < size; i += kLanes) store(wide + i, load(from + i) * scale * load(weight + i));
        } else {
            for (int64_t i = 0; i < size; i += kLanes) store(wide + i, load(from + i));
        }
        if (rows_.cosines) turn((chunk.row + token) * rows_.turned, wide);
        for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(wide + i));
    }

    void turn(int64_t at, float* wide) const {
        const int64_t half = rows_.turned / 2;
        const float *cosines = rows_.cosines + at, *sines = rows_.sines + at + half;
        int64_t i = 0;
        for (; i + kLanes <= half; i += kLanes) turn<kLanes>(cosines + i, sines + i, wide + i, wide + half + i);
        for (; i < half; ++i) turn<1>(cosines + i, sines + i, wide + i, wide + half + i);
    }

    template <int64_t N>
    static void turn(const float* cosine, const float* sine, float* a, float* b) {
        if constexpr (N == 1) {
            const float x = *a, y = *b;
            *a = std::fma(-y, *sine, x * *cosine);
            *b = std::fma(x, *sine, y * *cosine);
        } else {
            const Floats x = load(a), y = load(b), c = load(cosine), s = load(sine);
            store(a, fused(all(0.0f) - y, s, x * c));
            store(b, fused(x, s, y * c));
        }
    }

    // Keys and values of one head of tokens [first, last) into their pages.
    void lay(const Chunk& chunk, int64_t head, int64_t first, int64_t last) const {
        static thread_local Scratch scratch;
        float* wide = scratch.of<float>(2 * l_.head_dim);
        auto* key = reinterpret_cast<uint32_t*>(wide + l_.head_dim);
        for (int64_t token = first; token < last; ++token) {
            const int64_t position = chunk.start + token, column = position % kTile;
            uint32_t* keys = tile_at(chunk, head, position);
            prepare(chunk, token, l_.heads + head, wide, reinterpret_cast<Value*>(key));
            for (int64_t u = 0; u < units_; ++u) keys[u * kTile + column] = key[u];
            const Value* from = row_of(chunk, token) + (l_.heads + l_.kv_heads + head) * l_.head_dim;
            auto* values = reinterpret_cast<Value*>(keys + to_values());
            values += column / Kind::kPerUnit * l_.head_dim * Kind::kPerUnit + column % Kind::kPerUnit;
            for (int64_t i = 0; i < l_.head_dim; ++i) values[i * Kind::kPerUnit] = from[i];
            // The other half of a unit is multiplied by zero, which stale bits must not turn into NaN.
            if (Kind::kPerUnit == 2 && column % 2 == 0 && token + 1 == chunk.rows)
                for (int64_t i = 0; i < l_.head_dim; ++i) values[2 * i + 1] = Value{};
        }
    }

    // Where several tasks read what a chunk brings, it is laid before any of them.
    void lay_long_chunks(const Threads& by, int threads) const {
        static thread_local std::vector<Task> tasks;
        tasks.clear();
        for (int64_t c = 0; c < step_.count; ++c) {
            const Chunk& chunk = step_.chunks[c];
            if (chunk.rows <= group_) continue;
            for (int32_t first = 0, last; first < chunk.rows; first = last) {
                last = static_cast<int32_t>((chunk.start + first) / kLaidTokens + 1) * kLaidTokens - chunk.start;
                last = std::min(last, chunk.rows);
                tasks.push_back({static_cast<int32_t>(c), 0, first, last, 0, 0, -1, true});
            }
        }
        on_threads(by, threads, static_cast<int64_t>(tasks.size()), [this, &all = tasks](const auto& next) {
            for (int64_t task; (task = next()) >= 0;)
                for (int64_t head = 0; head < l_.kv_heads; ++head)
                    lay(chunk_of(all[task]), head, all[task].first, all[task].last);
        });
    }

    // --- attention ---------------------------------------------------------------------------------------------------

    void attend(const Task& task, const Task* after) const {
        const Chunk& chunk = chunk_of(task);
        if (task.lays) {
            const auto first = std::max<int64_t>(task.first, task.block * kBlock - chunk.start);
            lay(chunk, task.head, first, std::min<int64_t>(task.last, task.end * kBlock - chunk.start));
        }
        const Group group = prepare_group(task, chunk);
        const int64_t end = chunk.start + task.last;
        View view = view_of(chunk, task.head, task.block, end);
        for (int64_t block = task.block; block < task.end; ++block) {
            View ahead = view;
            if (block + 1 < task.end)
                ahead = view_of(chunk, task.head, block + 1, end);
            else if (after)
                ahead = view_of(chunk_of(*after), after->head, after->block, chunk_of(*after).start + after->last);
            const State state = task.split < 0 ? group.state : state_of(splits_[task.split], group.tiles, block);
            if (task.split >= 0) begin(state, group.tiles);
            for (int64_t tile = 0; tile < group.tiles; ++tile)
                attend_tile(task, group, tile, block, view, tile ? view : ahead, state);
            view = ahead;
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
        group.tiles = divide_up(group.rows, kMaxRows);
        const int64_t size = group.tiles * units_ * kMaxRows * static_cast<int64_t>(sizeof(Kept));
        const int64_t queries = size / static_cast<int64_t>(sizeof(float)), states = state_floats(group.tiles);
        float* memory = scratch.of<float>(queries + states + 2 * l_.head_dim);
        group.queries = reinterpret_cast<Kept*>(memory);
        group.state = laid_out(memory + queries, group.tiles);
        group.spare = memory + queries + states;
        std::memset(memory, 0, static_cast<size_t>(size));
        begin(group.state, group.tiles);
        auto* query = reinterpret_cast<Value*>(group.spare + l_.head_dim);
        for (int64_t tile = 0; tile < group.tiles; ++tile) {
            const int64_t from = first_row(group, tile), to = first_row(group, tile + 1);
            Kept* place = group.queries + tile * units_ * kMaxRows;
            for (int64_t row = from; row < to; ++row, ++place) {
                prepare(chunk, task.first + row / shared_, task.head * shared_ + row % shared_, group.spare,
                        query);
                for (int64_t u = 0; u < units_; ++u) place[u * kMaxRows] = Kind::kept(query + u * Kind::kPerUnit);
            }
        }
        return group;
    }

    static State laid_out(float* memory, int64_t tiles) {
        return {memory, memory + tiles * kLanes, memory + 2 * tiles * kLanes};
    }

    // That of one block of what is computed in parts.
    State state_of(const Split& split, int64_t tiles, int64_t block) const {
        return laid_out(results_ + split.results + (block - split.block) * state_floats(tiles), tiles);
    }

    void begin(const State& state, int64_t tiles) const {
        std::fill_n(state.highest, tiles * kLanes, kNone);
        std::fill_n(state.sums, tiles * kLanes, 0.0f);
        std::fill_n(state.out, tiles * kMaxRows * l_.head_dim, 0.0f);
    }

    void attend_tile(const Task& task, const Group& group, int64_t tile, int64_t block, const View& view,
                     const View& ahead, const State& state) const {
        const int64_t row = first_row(group, tile), rows = first_row(group, tile + 1) - row, key = block * kBlock;
        const int64_t position = chunk_of(task).start + task.first;
        const int64_t first = position + row / shared_, last = position + (row + rows - 1) / shared_;
        Shape shape;
        shape.begin = std::max<int64_t>(0, first_key(first) - key) / kTile * kTile;
        shape.end = std::min(kBlock, last + 1 - key);
        if (shape.begin >= shape.end) return;
        shape.scale = l_.scale;
        shape.cap = l_.cap;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = position + (row + r) / shared_;
            shape.low[r] = static_cast<float>(std::clamp<int64_t>(first_key(at) - key, 0, kBlock));
            shape.high[r] = static_cast<float>(std::clamp<int64_t>(at - key, -1, kBlock));
        }
        shape.all_seen = key + round_up(shape.end, kTile) <= first + 1 && first_key(last) <= key + shape.begin;
        attend_block<Kind>(group.queries + tile * units_ * kMaxRows, rows, l_.head_dim, shape, view, ahead,
                           {state.highest + tile * kLanes, state.sums + tile * kLanes,
                            state.out + tile * kMaxRows * l_.head_dim});
    }

    // What the blocks of a split gave, in their order, into the state of `group`.
    void merge(const Split& split, const Group& group) const {
        const State& all_of = group.state;
        begin(all_of, group.tiles);
        alignas(64) float old_share[kLanes], new_share[kLanes];
        for (int64_t block = split.block; block < split.block + split.blocks; ++block) {
            const State part = state_of(split, group.tiles, block);
            for (int64_t tile = 0; tile < group.tiles; ++tile) {
                share(all_of.highest + tile * kLanes, all_of.sums + tile * kLanes, part.highest + tile * kLanes,
                      part.sums + tile * kLanes, old_share, new_share);
                for (int64_t row = 0; row < kMaxRows; ++row) {
                    const int64_t at = (tile * kMaxRows + row) * l_.head_dim;
                    const Floats before = all(old_share[row]), now = all(new_share[row]);
                    for (int64_t i = at; i < at + l_.head_dim; i += kLanes)
                        store(all_of.out + i, fused(load(all_of.out + i), before, load(part.out + i) * now));
                }
            }
        }
    }

    void finish(const Task& task, const Chunk& chunk, const Group& group) const {
        for (int64_t tile = 0; tile < group.tiles; ++tile) {
            const int64_t from = first_row(group, tile), to = first_row(group, tile + 1);
            for (int64_t row = from; row < to; ++row) {
                const Floats total = all(group.state.sums[tile * kLanes + row - from]);
                const float* out = group.state.out + (tile * kMaxRows + row - from) * l_.head_dim;
                const int64_t token = chunk.row + task.first + row / shared_;
                const int64_t head = task.head * shared_ + row % shared_;
                Value* to_row = static_cast<Value*>(rows_.out) + (token * l_.heads + head) * l_.head_dim;
                for (int64_t i = 0; i < l_.head_dim; i += kLanes) store(to_row + i, load(out + i) / total);
            }
        }
    }

    const Layer& l_;
    const Step& step_;
    const Rows& rows_;
    const int64_t shared_, units_, group_;
    const Task* tasks_ = nullptr;
    Split* splits_ = nullptr;
    float* results_ = nullptr;
    int64_t results_size_ = 0;
};

}  // namespace
}  // namespace ericllm::attention

extern "C" {

// Lay the keys and values of rows into their pages, and attend. See Rows; floats: whether all of it is float32, or else
// bfloat16.
void ericllm_attention(const ericllm::Threads* by, int32_t threads, const ericllm::attention::Layer* layer,
                       const ericllm::attention::Step* step, const void* fused, int64_t stride, const float* cosines,
                       const float* sines, int64_t turned, void* out, int32_t floats) {
    using namespace ericllm::attention;
    const Rows rows{fused, stride, cosines, sines, turned, out};
    if (floats)
        Attention<Single>(*layer, *step, rows).run(*by, threads);
    else
        Attention<Pair>(*layer, *step, rows).run(*by, threads);
}

}  // extern "C"
