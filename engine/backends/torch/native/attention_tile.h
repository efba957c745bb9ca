// A tile of queries over a block of keys: scores, probabilities, and the values that they weigh.

#pragma once

#include "attention.h"

#if defined(ERICLLM_AMX)
#include "attention_amx.h"
#endif

namespace ericllm::attention {

// What some queries have attended so far; a vector of the first two has those of a tile, row by row.
struct State {
    float* highest;  // [tiles][kLanes]: score, as a power of 2
    float* sums;     // [tiles][kLanes]: of the probabilities
    float* out;      // [tiles][kRows][head_dim]: values, weighed by these
};

// What scores become before the softmax, and which keys a row sees: [low, high] of the block's.
struct Shape {
    float scale;
    float cap;
    int64_t begin, end;   // keys of the block that any row sees
    float low[kLanes];
    float high[kLanes];
    bool all_seen;
};

// Products of R queries [units][kRows] and C tiles of keys.
template <class Kind, int64_t R, int64_t C>
void multiply_keys(const typename Kind::Kept* queries, int64_t units, const uint32_t* const* keys, const uint32_t* const* ahead,
                   float* scores) {
    Floats sums[R][C];
#pragma GCC unroll 16  // early: or gcc keeps the sums in memory
    for (int64_t r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int64_t c = 0; c < C; ++c) sums[r][c] = all(0.0f);
    for (int64_t u = 0; u < units; ++u) {
        typename Kind::Wide wide[C];
        for (int64_t c = 0; c < C; ++c) {
            wide[c] = Kind::wide(keys[c] + u * kTile);
            if (Kind::kFetches) fetch(ahead[c] + u * kTile);
        }
        for (int64_t r = 0; r < R; ++r) {
            const typename Kind::One one = Kind::one(queries + Kind::place(r, u, units));
            for (int64_t c = 0; c < C; ++c) sums[r][c] = Kind::add(sums[r][c], wide[c], one);
        }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int64_t c = 0; c < C; ++c) store(scores + r * kBlock + c * kTile, sums[r][c]);
}

template <class Kind, int64_t R>
void score_rows(const typename Kind::Kept* queries, int64_t units, int64_t begin, int64_t end, const View& view, const View& ahead,
                float* scores) {
    constexpr int64_t kColumns = columns_for(R);
    for (int64_t t = begin / kTile / kColumns * kColumns; t * kTile < end; t += kColumns)
        multiply_keys<Kind, R, kColumns>(queries, units, view.keys + t, ahead.keys + t, scores + t * kTile);
}

// Sums of values, of C * kLanes elements from `column` on, weighed by R rows of probabilities: merged into `out`.
template <class Kind, int64_t R, int64_t C>
void multiply_values(const typename Kind::Kept* kept, int64_t begin, int64_t end, int64_t size, int64_t column, const View& view,
                     const View& ahead, const float* old_share, const float* new_share, float* out) {
    constexpr int64_t kSteps = kTile / Kind::kPerUnit;
    Floats sums[R][C];
#pragma GCC unroll 16  // early: or gcc keeps the sums in memory
    for (int64_t r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int64_t c = 0; c < C; ++c) sums[r][c] = all(0.0f);
    const int64_t last = divide_up(end, Kind::kPerUnit);
    for (int64_t t = begin / kTile; t * kSteps < last; ++t) {
        const uint32_t* values = view.values[t] + column;
        const uint32_t* next = ahead.values[t] + column;
        const typename Kind::Kept* weights = kept + t * kSteps;
        const int64_t steps = std::min(kSteps, last - t * kSteps);
        for (int64_t s = 0; s < steps; ++s) {
            typename Kind::Wide wide[C];
            for (int64_t c = 0; c < C; ++c) {
                wide[c] = Kind::wide(values + s * size + c * kLanes);
                if (Kind::kFetches) fetch(next + s * size + c * kLanes);
            }
            for (int64_t r = 0; r < R; ++r) {
                const typename Kind::One one = Kind::one(weights + r * kKeptUnits<Kind> + s);
                for (int64_t c = 0; c < C; ++c) sums[r][c] = Kind::add(sums[r][c], wide[c], one);
            }
        }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < R; ++r) {
        const Floats before = all(old_share[r]), now = all(new_share[r]);
#pragma GCC unroll 4
        for (int64_t c = 0; c < C; ++c) {
            float* to = out + r * size + column + c * kLanes;
            store(to, fused(load(to), before, sums[r][c] * now));
        }
    }
}

template <class Kind, int64_t R>
void weigh_rows(const typename Kind::Kept* kept, int64_t begin, int64_t end, int64_t size, const View& view, const View& ahead,
                const float* old_share, const float* new_share, float* out) {
    constexpr int64_t kColumns = columns_for(R);
    int64_t column = 0;
    for (; column + kColumns * kLanes <= size; column += kColumns * kLanes)
        multiply_values<Kind, R, kColumns>(kept, begin, end, size, column, view, ahead, old_share, new_share, out);
    for (; column < size; column += kLanes)
        multiply_values<Kind, R, 1>(kept, begin, end, size, column, view, ahead, old_share, new_share, out);
}

// Call work(the least number of rows that there is code for and that is not less than `rows`).
template <class Work>
void for_rows(int64_t rows, const Work& work) {
    if (rows <= 1) return work(std::integral_constant<int64_t, 1>());
    if (rows <= 2) return work(std::integral_constant<int64_t, 2>());
    if (rows <= 3) return work(std::integral_constant<int64_t, 3>());
    if constexpr (kVectorRows == 4) return work(std::integral_constant<int64_t, 4>());
    if (rows <= 4) return work(std::integral_constant<int64_t, 4>());
    if (rows <= 6) return work(std::integral_constant<int64_t, 6>());
    if (rows <= 8) return work(std::integral_constant<int64_t, 8>());
    return work(std::integral_constant<int64_t, kVectorRows>());
}

// The keys of a block that a row sees, sixteen at a time.
class Seen {
  public:
    Seen(const Shape& shape, int64_t row) : all_(shape.all_seen), low_(all(shape.low[row])), high_(all(shape.high[row])) {}
    Floats operator()(int64_t key, Floats x, Floats other) const {
        return all_ ? x : where_within(counted_from(static_cast<float>(key)), low_, high_, x, other);
    }

  private:
    bool all_;
    Floats low_, high_;
};

// Scores [rows][kBlock] capped, as powers of 2.
inline void cap_scores(const Shape& shape, int64_t rows, float* scores) {
    const Floats scale = all(shape.scale / shape.cap), cap = all(shape.cap * kLog2E);
    for (int64_t row = 0; row < rows; ++row, scores += kBlock)
        for (int64_t key = shape.begin; key < shape.end; key += kTile)
            store(scores + key, hyperbolic_tangent(load(scores + key) * scale) * cap);
}

constexpr int64_t kPair = 2 * kTile;

// Probabilities as they are multiplied, relative to the one that the highest score of a row has; the highest as a power of
// 2, kNone where a row sees no key, and their sums: [kLanes].
template <class Kind>
void soften(const Shape& shape, int64_t rows, float* scores, typename Kind::Kept* kept, float* highest, float* sums) {
    if (shape.cap != 0.0f) cap_scores(shape, rows, scores);
    const Floats scale = all(shape.cap != 0.0f ? 1.0f : shape.scale * kLog2E);
    Floats found[kLanes];
    for (int64_t row = 0; row < rows; ++row) {
        const Seen seen(shape, row);
        Floats top = all(kNone);
        for (int64_t key = shape.begin; key < shape.end; key += kTile)
            top = most(top, seen(key, load(scores + row * kBlock + key), all(kNone)));
        found[row] = top;
    }
    for_each_vector(
        rows, found, highest, [](Floats a, Floats b) { return most(a, b); }, [](Floats x) { return ericllm::highest(x); });
    store(highest, load(highest) * scale);
    for (int64_t row = 0; row < rows; ++row) {
        const Seen seen(shape, row);
        const Floats top = all(highest[row] == kNone ? 0.0f : highest[row]);
        Floats total = all(0.0f);
        const auto at = [&](int64_t key) {
            const Floats x = load(scores + row * kBlock + key) * scale - top;  // 0 for the highest: rounded as that was
            return seen(key, probability(x, Kind()), all(0.0f));
        };
        // Two vectors at absolute positions, so that all add up in one order.
        for (int64_t key = shape.begin / kPair * kPair; key < shape.end; key += kPair) {
            const Floats first = key < shape.begin ? all(0.0f) : at(key);
            const Floats second = key + kTile >= shape.end ? all(0.0f) : at(key + kTile);
            total = total + keep(first, second, Kind(), kept + row * kKeptUnits<Kind> + key / Kind::kPerUnit);
        }
        found[row] = total;
    }
    for_each_vector(
        rows, found, sums, [](Floats a, Floats b) { return a + b; }, [](Floats x) { return sum(x); });
}

// Bring [kLanes] states up to those of further keys; what the old and the new values then count for.
inline void share(float* highest, float* sums, const float* new_highest, const float* new_sums, float* old_share,
                  float* new_share) {
    const Floats before = load(highest), now = load(new_highest), top = most(before, now);
    const Floats zero = where_within(top, all(kNone), all(kNone), all(0.0f), top);
    const Floats old = power_of_two_to(before - zero), fresh = power_of_two_to(now - zero);
    store(highest, top);
    store(sums, fused(load(sums), old, load(new_sums) * fresh));
    store(old_share, old);
    store(new_share, fresh);
}

// Products of up to kRows queries and a block of keys, and of their probabilities and its values, by vectors.
template <class Kind>
struct VectorProducts {
    // Put those of `rows` queries and keys [begin, end) into scores [kRows][kBlock].
    void score(const typename Kind::Kept* queries, int64_t rows, int64_t size, int64_t begin, int64_t end, const View& view,
               const View& ahead, float* scores) {
        for_rows(rows, [&](auto count) {
            score_rows<Kind, count()>(queries, size / Kind::kPerUnit, begin, end, view, ahead, scores);
        });
    }

    // Merge those of probabilities `kept` [kRows][kKeptUnits] and values [begin, end) into out [kRows][size].
    void weigh(const typename Kind::Kept* kept, int64_t rows, int64_t size, int64_t begin, int64_t end, const View& view,
               const View& ahead, const float* old_share, const float* new_share, float* out) {
        for_rows(rows, [&](auto count) {
            weigh_rows<Kind, count()>(kept, begin, end, size, view, ahead, old_share, new_share, out);
        });
    }
};

#if defined(ERICLLM_AMX)
template <class Kind>
using Products = std::conditional_t<std::is_base_of_v<Pair, Kind>, TileProducts<Kind>, VectorProducts<Kind>>;
#else
template <class Kind>
using Products = VectorProducts<Kind>;
#endif

// A block of keys for a tile of `rows` queries of `size` elements, merged into its state.
template <class Kind>
void attend_block(Products<Kind>& products, const typename Kind::Kept* queries, int64_t rows, int64_t size,
                  const Shape& shape, const View& view, const View& ahead, const State& state) {
    alignas(64) float scores[Kind::kRows * kBlock];
    alignas(64) typename Kind::Kept kept[Kind::kRows * kKeptUnits<Kind>];
    alignas(64) float highest[kLanes], sums[kLanes], old_share[kLanes], new_share[kLanes];
    std::fill_n(highest, kLanes, kNone);
    std::fill_n(sums, kLanes, 0.0f);
    products.score(queries, rows, size, shape.begin, shape.end, view, ahead, scores);
    soften<Kind>(shape, rows, scores, kept, highest, sums);
    share(state.highest, state.sums, highest, sums, old_share, new_share);
    products.weigh(kept, rows, size, shape.begin, shape.end, view, ahead, old_share, new_share, state.out);
}

}  // namespace ericllm::attention
