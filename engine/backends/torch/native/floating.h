// Products by multiplying and adding floats: an output is one accumulator to which its inputs are added in their order.

#pragma once

#include "linear.h"

namespace ericllm::floating {

#if defined(__AVX512F__)

constexpr int64_t kTileRows = 14;  // x 2 blocks: 28 of 32 registers accumulate
template <int kInputs>
constexpr int64_t blocks_for(int64_t rows) {
    return rows <= 6 ? 4 : 2;
}

inline Vector zeros() { return _mm512_setzero_ps(); }
inline Vector same(float value) { return _mm512_set1_ps(value); }
inline Vector loaded(const float* from) { return _mm512_loadu_ps(from); }
inline Vector added(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
inline void put(float* to, Vector x) { _mm512_store_ps(to, x); }

#else  // AVX2 and FMA

constexpr int64_t kTileRows = 6;  // x 2 registers of one block: 12 of 16 accumulate
template <int kInputs>
constexpr int64_t blocks_for(int64_t rows) {
    return rows <= (kInputs == 2 ? 2 : 3) ? 2 : 1;  // one more register separates the halves of pairs
}

inline Vector zeros() { return _mm256_setzero_ps(); }
inline Vector same(float value) { return _mm256_set1_ps(value); }
inline Vector loaded(const float* from) { return _mm256_loadu_ps(from); }
inline Vector added(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
inline void put(float* to, Vector x) { _mm256_store_ps(to, x); }

#endif

constexpr int kWidth = sizeof(Vector) / sizeof(float), kParts = kBlock / kWidth;  // of a block

// How weights lie: what of a block lies together, of how many inputs, and those of the i-th.
struct Floats {
    using Unit = float;
    static constexpr int kInputs = 1;
    template <int>
    static Vector input(const Unit* from) {
        return loaded(from);
    }
};
struct Pairs {
    using Unit = uint32_t;
    static constexpr int kInputs = 2;
    template <int i>
    static Vector input(const Unit* from) {
        return i ? second_of(from) : first_of(from);
    }
};

// What is fetched meanwhile for each block, from the first one on: `step` bytes further with every unit.
struct Next {
    const char* at;
    int64_t stride;  // bytes from block to block
    int64_t step;
};

// R rows of floats times C blocks from `weight` on, each `stride` units behind the one before it. One input after the
// other, so that few registers hold weights.
template <class Weights, int64_t R, int64_t C>
void tile(const char* x, int64_t x_stride, const typename Weights::Unit* weight, int64_t stride, int64_t units,
          const Next& next, float* sums) {
    Vector sum[R][C * kParts];
#pragma GCC unroll 16  // early: or gcc keeps the sums in memory
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C * kParts; ++c) sum[r][c] = zeros();
    const char* fetched = next.at;
    const auto add = [&](int64_t u, auto i) {
        Vector w[C * kParts];
        for (int c = 0; c < C * kParts; ++c)
            w[c] = Weights::template input<i()>(weight + c / kParts * stride + u * kBlock + c % kParts * kWidth);
        for (int r = 0; r < R; ++r) {
            const Vector a = same(reinterpret_cast<const float*>(x + r * x_stride)[u * Weights::kInputs + i()]);
            for (int c = 0; c < C * kParts; ++c) sum[r][c] = added(sum[r][c], w[c], a);
        }
    };
    for (int64_t u = 0; u < units; ++u, fetched += next.step) {
        for (int c = 0; c < C; ++c) _mm_prefetch(fetched + c * next.stride, R <= 8 ? _MM_HINT_T1 : _MM_HINT_T0);
        add(u, std::integral_constant<int, 0>());
        if constexpr (Weights::kInputs == 2) add(u, std::integral_constant<int, 1>());
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C * kParts; ++c) put(sums + r * kMaxStep * kBlock + c * kWidth, sum[r][c]);
}

// `blocks` blocks from `weight` on.
template <class Weights>
void multiply(const typename Weights::Unit* weight, int64_t stride, const char* x, int64_t x_stride, int64_t rows,
              int64_t units, int64_t blocks, const Next& next, float* sums) {
    in_tiles<kTileRows, blocks_for<Weights::kInputs>>(rows, blocks, [&](auto r, auto c, int64_t block) {
        const Next from{next.at + block * next.stride, next.stride, next.step};
        tile<Weights, r(), c()>(x, x_stride, weight + block * stride, stride, units, from, sums + block * kBlock);
    });
}

}  // namespace ericllm::floating
