// Sums of products of bytes in int32: of 16 outputs and four inputs at a time, and how many of such sums fit the registers.

#pragma once

#include "linear.h"

#if defined(ERICLLM_AMX) && defined(__AVX512VNNI__)
#define ERICLLM_INTEGER_TILES  // many rows are summed in tiles, and scaled by AVX512
#endif

namespace ericllm {

// The byte of code 0 in weights of 8 bits: as products of bytes without sign take it, unless tiles, which take signs, read
// weights where they lie.
#if defined(__AVX512VNNI__) && !defined(ERICLLM_INTEGER_TILES)
constexpr int kZero = 128;
#else
constexpr int kZero = 0;
#endif

#if defined(__AVX512VNNI__)

constexpr int64_t kTileRows = 8;  // x 2 blocks: 16 of 32 registers add up, and none has to be put away
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }
constexpr int kOffset = 128;  // what codes of weights are too high by as they are multiplied

using Codes = __m512i;  // of 16 outputs x 4 inputs
using Sums = __m512i;

// Of weights of 8 bits.
inline Codes codes_of(const uint8_t* from) {
    const Codes codes = _mm512_loadu_si512(from);
    return kZero == kOffset ? codes : _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(kOffset)));
}

inline Sums sums_of(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats floats(Sums x) { return {_mm512_cvtepi32_ps(x)}; }

// As instructions, since gcc 12 moves the sums of many such intrinsics to and fro.
inline void add_dot(Sums& sum, Codes w, const int8_t* four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(four)));
}

inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) != 0; }

// Put sixteen whole numbers from -127 to 127 into `to`.
inline void put(Floats x, int8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

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

inline Codes codes_of(const uint8_t* from) {
    const auto* halves = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}

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

inline void put(Floats x, int8_t* to) {
    const __m256i low = _mm256_cvtps_epi32(x.low), high = _mm256_cvtps_epi32(x.high);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

#endif

// Put the first `count` of a group's numbers into `codes`, scaled so that the largest is 127, and zeros for the rest. Returns
// what codes are multiplied by; NaN where a number is not finite.
template <int64_t kGroup, class Value>
float round_group(const Value* row, int64_t count, int8_t* codes) {
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
    for (int p = 0; p < parts; ++p) put(x[p] * inverse, codes + p * kLanes);
    return has_nan(unfit) ? NAN : most_of_all / 127.0f;
}

#if defined(__AVX512VNNI__)

// Magnitudes are compared as they lie, 32 at a time: greater numbers have greater bits.
template <int64_t kGroup>
float round_group(const Bfloat16* row, int64_t count, int8_t* codes) {
    constexpr int halves = kGroup / 32;
    static_assert(halves == 1 || halves == 2, "a vector or two of bfloat16");
    __m512i x[2] = {}, largest = _mm512_setzero_si512();
    for (int h = 0; h < halves; ++h) {
        const int64_t some = std::clamp<int64_t>(count - h * 32, 0, 32);
        x[h] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << some) - 1), row + h * 32);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(x[h], _mm512_set1_epi16(0x7fff)));
    }
    const __m256i some = _mm256_max_epu16(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    const __m128i few = _mm_max_epu16(_mm256_castsi256_si128(some), _mm256_extracti128_si256(some, 1));
    const __m128i least = _mm_minpos_epu16(_mm_xor_si128(few, _mm_set1_epi16(-1)));
    const Bfloat16 bits{static_cast<uint16_t>(~_mm_cvtsi128_si32(least))};
    const float most_of_all = to_float(bits), found = 127.0f / most_of_all;
    const Floats inverse = all(std::isfinite(found) ? found : 0.0f);
    const auto wholes = [&](__m256i numbers) { return _mm512_cvtps_epi32((widened(numbers) * inverse).v); };
    __m512i words[2] = {};  // of both halves; 128 bits of each hold fours of its first sixteen numbers, then of its second
    for (int h = 0; h < halves; ++h)
        words[h] = _mm512_packs_epi32(wholes(_mm512_castsi512_si256(x[h])), wholes(_mm512_extracti64x4_epi64(x[h], 1)));
    const __m512i fours = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(fours, _mm512_packs_epi16(words[0], words[1]));
    if constexpr (halves == 2)
        _mm512_storeu_si512(codes, bytes);
    else
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_castsi512_si256(bytes));
    return bits.bits < 0x7f80 ? most_of_all / 127.0f : NAN;
}

#endif

// The sum of `count` codes, which sixteen divides.
inline int32_t sum_of(const int8_t* codes, int64_t count) {
    __m128i sums = _mm_setzero_si128();
    for (int64_t k = 0; k < count; k += 16) {
        const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + k));
        sums = _mm_add_epi64(sums, _mm_sad_epu8(_mm_xor_si128(some, _mm_set1_epi8(-128)), _mm_setzero_si128()));
    }
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 128 * static_cast<int32_t>(count);
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
