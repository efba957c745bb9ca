// Sums of products of bytes in int32: of 16 outputs and four inputs at a time, and how many of such sums fit the registers.

#pragma once

#include "linear.h"

#if defined(ERICLLM_AMX) && defined(__AVX512VNNI__)
#define ERICLLM_INTEGER_TILES  // many rows are summed in tiles, and scaled by AVX512
#endif

namespace ericllm {

constexpr int kZero = 128;  // the byte of code 0, where codes are signed

#if defined(__AVX512VNNI__)

constexpr int64_t kTileRows = 8;  // x 2 blocks: 16 of 32 registers add up, and none has to be put away
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }
constexpr int kOffset = kZero;  // what codes of weights are too high by

using Codes = __m512i;  // of 16 outputs x 4 inputs
using Sums = __m512i;

inline Sums sums_of(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats floats(Sums x) { return {_mm512_cvtepi32_ps(x)}; }

// As instructions, since gcc 12 moves the sums of many such intrinsics to and fro.
inline void add_dot(Sums& sum, Codes w, const int8_t* four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(four)));
}

inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) != 0; }

// Put sixteen whole numbers from -127 to 127 into `to`, and return their sum with `sum`.
inline Sums put(Floats x, int8_t* to, Sums sum) {
    const __m512i whole = _mm512_cvtps_epi32(x.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(whole));
    return _mm512_add_epi32(sum, whole);
}
inline int32_t total(Sums x) { return _mm512_reduce_add_epi32(x); }

#else  // AVX2: without bytes that are too high, as products of bytes are added up in pairs of 16 bits

constexpr int64_t kTileRows = 4;  // x 2 registers of one block: 8 of 16
constexpr int64_t blocks_for(int64_t) { return 1; }
constexpr int kOffset = 0;

struct Codes {
    __m256i low, high;
};
struct Sums {
    __m256i low, high;
};

inline Sums sums_of(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Floats floats(Sums x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// |w| * (x with the sign of w), of which two never leave 16 bits.
inline __m256i dot(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline void add_dot(Sums& sum, Codes w, const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    const __m256i x = _mm256_set1_epi32(four);
    sum = {dot(sum.low, w.low, x), dot(sum.high, w.high, x)};
}

inline bool has_nan(Floats x) {
    const __m256 both = _mm256_add_ps(x.low, x.high);
    return _mm256_movemask_ps(_mm256_cmp_ps(both, both, _CMP_UNORD_Q)) != 0;
}

inline Sums put(Floats x, int8_t* to, Sums sum) {
    const __m256i low = _mm256_cvtps_epi32(x.low), high = _mm256_cvtps_epi32(x.high);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    return sum;
}
inline int32_t total(Sums) { return 0; }

#endif

// A group of a row in 8 bits. scale: what codes are multiplied by; NaN where a number is not finite.
// sum: of the codes, or 0 where codes of weights are not too high.
struct Rounded {
    float scale;
    int32_t sum;
};

// Put the first `count` of a group's numbers into `codes`, scaled so that the largest is 127, and zeros for the rest.
template <int64_t kGroup, class Value>
Rounded round_group(const Value* row, int64_t count, int8_t* codes) {
    constexpr int parts = kGroup / kLanes;
    Floats x[parts], largest = all(0.0f), unfit = all(0.0f);
    for (int p = 0; p < parts; ++p) {
        const int64_t some = std::clamp<int64_t>(count - p * kLanes, 0, kLanes);
        x[p] = some > 0 ? load_some(row + p * kLanes, some) : all(0.0f);
        largest = most(largest, magnitude(x[p]));
        unfit = fused(x[p], all(0.0f), unfit);
    }
    const float most_of_all = highest(largest);
    const Floats inverse = all(most_of_all > 0.0f ? 127.0f / most_of_all : 0.0f);
    Sums sum = sums_of(0);
    for (int p = 0; p < parts; ++p) sum = put(x[p] * inverse, codes + p * kLanes, sum);
    return {has_nan(unfit) ? NAN : most_of_all / 127.0f, total(sum)};
}

// Prefetch into the first level where enough rows use the same blocks that loads are slow.
template <bool slow>
void fetch(const void* from) {
    if constexpr (slow)
        _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0);
    else
        _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T1);
}

}  // namespace ericllm
