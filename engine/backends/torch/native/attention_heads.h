// The heads of a step's rows: normed and turned as they are taken from there.

#pragma once

#include "attention_call.h"
#include "vector.h"

namespace ericllm::attention {

template <class Value>
class Heads {
  public:
    Heads(const Layer& layer, const Rows& rows) : l_(layer), rows_(rows) {}

    const Value* at(int64_t row, int64_t head) const {
        return static_cast<const Value*>(rows_.fused) + row * rows_.stride + head * l_.head_dim;
    }

    // A query or key head, normed and turned, as floats.
    void widen(int64_t row, int64_t head, float* wide) const {
        const int64_t size = l_.head_dim;
        const Value* from = at(row, head);
        if (l_.norm) {
            const float* weight = l_.norm + head * size;
            Floats squares = all(0.0f);
            for (int64_t i = 0; i < size; i += kLanes) squares = fused(load(from + i), load(from + i), squares);
            const Floats scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + l_.epsilon));
            for (int64_t i = 0; i < size; i += kLanes) store(wide + i, load(from + i) * scale * load(weight + i));
        } else {
            widen_as_it_is(row, head, wide);
        }
        if (rows_.cosines) turn(row * rows_.turned, wide);
    }

    // Any head, as floats.
    void widen_as_it_is(int64_t row, int64_t head, float* wide) const {
        const Value* from = at(row, head);
        for (int64_t i = 0; i < l_.head_dim; i += kLanes) store(wide + i, load(from + i));
    }

    // The same as widen, rounded once. spare: [head_dim]
    void take(int64_t row, int64_t head, float* spare, Value* to) const {
        if (!l_.norm && !rows_.cosines) {
            std::memcpy(to, at(row, head), static_cast<size_t>(l_.head_dim) * sizeof(Value));
            return;
        }
        widen(row, head, spare);
        for (int64_t i = 0; i < l_.head_dim; i += kLanes) store(to + i, load(spare + i));
    }

  private:
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

    const Layer& l_;
    const Rows& rows_;
};

}  // namespace ericllm::attention
