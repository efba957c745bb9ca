// From weights as a checkpoint has them to codes and scales, sixteen outputs at a time.

#include <cfloat>

#include "packing.h"
#include "quantised.h"

using namespace ericllm;

namespace {

using Word = uint32_t;

// A group of a block: weights, or codes as whole numbers, [group][16], one output next to the other.
template <class Format>
using Tile = float[Format::kGroup][kBlock];

#if defined(__AVX512F__)

inline Floats add_above(Floats sum, Floats x, Floats threshold, Floats more) {  // x > threshold ? sum + more : sum
    return {_mm512_mask_add_ps(sum.v, _mm512_cmp_ps_mask(x.v, threshold.v, _CMP_GT_OQ), sum.v, more.v)};
}

#else

inline __m256 add_above(__m256 sum, __m256 x, __m256 threshold, __m256 more) {
    return _mm256_add_ps(sum, _mm256_and_ps(_mm256_cmp_ps(x, threshold, _CMP_GT_OQ), more));
}
inline Floats add_above(Floats sum, Floats x, Floats threshold, Floats more) {
    return {add_above(sum.low, x.low, threshold.low, more.low), add_above(sum.high, x.high, threshold.high, more.high)};
}

#endif

template <class Format>
Floats largest_of(const Tile<Format>& x) {
    Floats most_of_all = all(0.0f);
    for (int64_t k = 0; k < Format::kGroup; ++k) most_of_all = most(most_of_all, magnitude(load(x[k])));
    return most_of_all;
}

// 1 / scale for sixteen scales that were rounded; 0 for those that are 0.
Floats inverse_of(const Bfloat16* scales) {
    alignas(64) float inverse[kBlock];
    for (int64_t n = 0; n < kBlock; ++n) {
        const float scale = to_float(scales[n]);
        inverse[n] = scale != 0.0f ? 1.0f / scale : 0.0f;
    }
    return load(inverse);
}

// Put the codes of `x` in its place, and their scales, for which codes are made once they are rounded, into `scales`.
void encode(Int8, Tile<Int8>& x, Bfloat16* scales) {
    alignas(64) float exact[kBlock];
    store(exact, largest_of<Int8>(x) / all(127.0f));
    for (int64_t n = 0; n < kBlock; ++n) {
        scales[n] = to_bfloat16(exact[n]);
        if (to_float(scales[n]) < exact[n]) ++scales[n].bits;  // or the largest would be cut
    }
    const Floats inverse = inverse_of(scales), zero = all(kZero);
    for (int64_t k = 0; k < Int8::kGroup; ++k) store(x[k], rounded(load(x[k]) * inverse) + zero);
}

constexpr float threshold(int i) { return 0.5f * (kTable[i] + kTable[i + 1]); }

Floats nearest_code(Floats x) {
    Floats code = all(kTable[0]);
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) code = add_above(code, x, all(threshold(i)), all(static_cast<float>(kTable[i + 1] - kTable[i])));
    return code;
}

Floats nearest_place(Floats x) {
    Floats place = all(0.0f);
#pragma GCC unroll 15
    for (int i = 0; i < 15; ++i) place = add_above(place, x, all(threshold(i)), all(1.0f));
    return place;
}

// The scale that loses least so far: with the best factor of some codes, |x|^2 - (x . codes)^2 / |codes|^2 is lost.
struct Best {
    Floats kept = all(0.0f), scale = all(0.0f);

    // Try the codes that are nearest to x * inverse.
    void attempt(const Tile<Int4>& x, Floats inverse) {
        Floats products = all(0.0f), squares = all(0.0f);
        for (int64_t k = 0; k < Int4::kGroup; ++k) {
            const Floats weight = load(x[k]), code = nearest_code(weight * inverse);
            products = fused(code, weight, products);
            squares = fused(code, code, squares);
        }
        const Floats factor = products / squares, now = products * factor;
        scale = add_above(scale, now, kept, factor - scale);
        kept = most(kept, now);
    }
};

// Of scales around the one by which the largest weight becomes the largest code, as it is or with the other sign, the
// best, then that which suits its codes, if it is better still.
void encode(Int4, Tile<Int4>& x, Bfloat16* scales) {
    const Floats size = most(largest_of<Int4>(x), all(FLT_TRUE_MIN));
    for (auto& lane : x) store(lane, load(lane) / size);
    Best best;
    for (const float share : {0.8125f, 0.90625f, 1.0f, 1.125f})
        for (const float sign : {1.0f, -1.0f}) best.attempt(x, all(sign * 127.0f / share));
    best.attempt(x, all(1.0f) / best.scale);
    store(scales, best.scale * size);
    const Floats inverse = size * inverse_of(scales);
    for (auto& lane : x) store(lane, nearest_place(load(lane) * inverse));
}

// Put codes where products look for them.
void put(Int8, const Tile<Int8>& codes, Word* to) {
    for (int64_t k = 0; k < Int8::kGroup; k += 4, to += kBlock)
        for (int64_t n = 0; n < kBlock; ++n) {
            Word word = 0;
            for (int i = 0; i < 4; ++i) word |= static_cast<Word>(static_cast<uint8_t>(static_cast<int32_t>(codes[k + i][n]))) << 8 * i;
            to[n] = word;
        }
}
void put(Int4, const Tile<Int4>& codes, Word* to) {
    for (int64_t k = 0; k < Int4::kGroup; k += 8, to += kBlock)
        for (int64_t n = 0; n < kBlock; ++n) {
            Word word = 0;
            for (int i = 0; i < 8; ++i)
                word |= static_cast<Word>(static_cast<int32_t>(codes[k + i][n])) << (8 * (i % 4) + i / 4 * 4);
            to[n] = word;
        }
}

template <class Format, class Value>
void quantise_block(const Layer& l, const Part* parts, int64_t block, void* out) {
    const Quantised<Format> to(l, out);
    auto* codes = const_cast<uint8_t*>(to.codes_of(block));
    auto* scales = const_cast<Bfloat16*>(to.scales_of(block));
    const Value* rows[kBlock];
    for (int64_t n = 0; n < l.count(block); ++n) rows[n] = row_of<Value>(parts, l.first(block) + n);
    for (int64_t g = 0; g < to.groups; ++g, codes += Format::kBytes, scales += kBlock) {
        alignas(64) Tile<Format> x = {};
        const int64_t first = g * Format::kGroup, count = std::min(Format::kGroup, l.inputs - first);
        for (int64_t n = 0; n < l.count(block); ++n)
            for (int64_t k = 0; k < count; ++k) x[k][n] = to_float(rows[n][first + k]);
        encode(Format{}, x, scales);
        put(Format{}, x, reinterpret_cast<Word*>(codes));
    }
}

template <class Format, class Value>
void quantise(int32_t threads, const Layer& l, const Part* parts, void* out) {
    on_threads(threads, l.blocks(), [&](Tasks& tasks) {
        for (int64_t block; (block = tasks.next()) >= 0;)
            quantise_block<Format, Value>(l, parts, block, out);
    });
}

}  // namespace

extern "C" {

// Lay out the weight whose rows, bfloat16 or float32, lie in `parts`, in 8 or 4 bits.
void ericllm_quantise(int32_t threads, const Layer* shape, const Part* parts, int32_t is_float,
                      int32_t bits, void* out) {
    if (bits == 8)
        (is_float ? quantise<Int8, float> : quantise<Int8, Bfloat16>)(threads, *shape, parts, out);
    else
        (is_float ? quantise<Int4, float> : quantise<Int4, Bfloat16>)(threads, *shape, parts, out);
}

}  // extern "C"
