// Heads as codes of 8 or 4 bits: a Hadamard turn, and numbers rounded to nearest in small groups, each with a scale in
// float16. As HeadCodec in kv_codes.py makes them, but that sums of a turn are added up in another order.

#pragma once

#include "vector.h"

namespace ericllm {

constexpr int64_t kLeastCode = -128;  // stands for the number of a group that is furthest from 0; its sign is the scale's

// --- float16 ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
inline Floats load_halves(const uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
inline uint16_t to_half(float x) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_set1_ps(x), _MM_FROUND_TO_NEAREST_INT);
    return static_cast<uint16_t>(_mm256_cvtsi256_si32(halves));
}
#else
inline Floats load_halves(const uint16_t* from) {
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline uint16_t to_half(float x) {
    return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_NEAREST_INT)));
}
#endif

inline float from_half(uint16_t half) {
    uint16_t halves[kLanes] = {half};
    float floats[kLanes];
    store(floats, load_halves(halves));
    return floats[0];
}

// --- codes -----------------------------------------------------------------------------------------------------------

inline Floats to_floats(__m128i codes) {
#if defined(__AVX512F__)
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
#else
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
#endif
}

// Whole numbers from -128 to 127.
inline void store(int8_t* to, Floats x) {
#if defined(__AVX512F__)
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v));
#else
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)), 0xd8);
    const __m128i codes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#endif
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
}

constexpr int64_t kRowCodes = 2 * kLanes;  // that lie together

// A row of kRowCodes codes.  kBits: of each.  both: the first and the second half of them.
struct Bytes {
    static constexpr int64_t kBits = 8, kRowBytes = kRowCodes;

    static void both(const char* row, Floats& first, Floats& second) {
        const auto* codes = reinterpret_cast<const __m128i*>(row);
        first = to_floats(_mm_loadu_si128(codes)), second = to_floats(_mm_loadu_si128(codes + 1));
    }
    static void put(char* row, int64_t place, int8_t code) { row[place] = static_cast<char>(code); }
};

// Upper halves of bytes, whose lower ones are 0: the first half of a row in its bytes' lower halves, the second in the
// upper ones.
struct Nibbles {
    static constexpr int64_t kBits = 4, kRowBytes = kRowCodes / 2;

    static void both(const char* row, Floats& first, Floats& second) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row)), upper = _mm_set1_epi8(-16);
        first = to_floats(_mm_and_si128(_mm_slli_epi16(codes, 4), upper));
        second = to_floats(_mm_and_si128(codes, upper));
    }
    static void put(char* row, int64_t place, int8_t code) {
        char& byte = row[place % kLanes];
        const int upper = code & 0xf0;
        byte = static_cast<char>(place < kLanes ? (byte & 0xf0) | upper >> 4 : (byte & 0x0f) | upper);
    }
};

// --- heads -----------------------------------------------------------------------------------------------------------

// 1 and -1 in turns, `run` of each.
inline Floats signs(int64_t run) {
    float found[kLanes];
    for (int64_t n = 0; n < kLanes; ++n) found[n] = n / run % 2 ? -1.0f : 1.0f;
    return load(found);
}

// Sixteen numbers times Sylvester's matrix of sixteen: sums and differences of those 1, 2, 4 and 8 apart.
inline Floats turned(Floats x) {
#if defined(__AVX512F__)
    x = fused(x, signs(1), Floats{_mm512_permute_ps(x.v, 0xb1)});
    x = fused(x, signs(2), Floats{_mm512_permute_ps(x.v, 0x4e)});
    x = fused(x, signs(4), Floats{_mm512_shuffle_f32x4(x.v, x.v, 0xb1)});
    return fused(x, signs(8), Floats{_mm512_shuffle_f32x4(x.v, x.v, 0x4e)});
#else
    x = fused(x, signs(1), Floats{_mm256_permute_ps(x.low, 0xb1), _mm256_permute_ps(x.high, 0xb1)});
    x = fused(x, signs(2), Floats{_mm256_permute_ps(x.low, 0x4e), _mm256_permute_ps(x.high, 0x4e)});
    x = fused(x, signs(4), Floats{_mm256_permute2f128_ps(x.low, x.low, 1), _mm256_permute2f128_ps(x.high, x.high, 1)});
    return fused(x, signs(8), Floats{x.high, x.low});
#endif
}

// Turn each `spread` of `size` numbers by a Hadamard matrix. `spread` is a power of 2 that sixteen divides.
inline void hadamard(float* numbers, int64_t size, int64_t spread) {
    const Floats share = all(static_cast<float>(1.0 / std::sqrt(static_cast<double>(spread))));
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats sums = turned(load(numbers + i));
        store(numbers + i, spread == kLanes ? sums * share : sums);
    }
    for (int64_t step = kLanes; step < spread; step *= 2) {
        const Floats factor = 2 * step == spread ? share : all(1.0f);
        for (int64_t first = 0; first < size; first += 2 * step)
            for (int64_t i = first; i < first + step; i += kLanes) {
                const Floats a = load(numbers + i), b = load(numbers + i + step);
                store(numbers + i, (a + b) * factor);
                store(numbers + i + step, (a - b) * factor);
            }
    }
}

// The first of the numbers that are furthest from 0; NaN where one is.
inline float furthest(const float* numbers, int64_t count) {
    Floats above = all(0.0f), below = all(0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
        above = most(load(numbers + i), above);
        below = most(all(0.0f) - load(numbers + i), below);
    }
    const float highest_of_all = highest(above), lowest = -highest(below);
    if (highest_of_all != -lowest) return highest_of_all > -lowest ? highest_of_all : lowest;
    for (int64_t i = 0; i < count; ++i)
        if (!(std::fabs(numbers[i]) < highest_of_all)) return numbers[i];
    return highest_of_all;
}

// Codes of `size` turned numbers, each as a whole byte, and a scale for each `group` of them. A group with a number that
// is infinite or none comes back without any.
template <class Codes>
void encode(const float* numbers, int64_t size, int64_t group, int8_t* codes, uint16_t* scales) {
    constexpr int64_t kStep = 1 << (8 - Codes::kBits);
    const Floats low = all(kLeastCode / kStep), high = all(-kLeastCode / kStep - 1);
    for (int64_t first = 0; first < size; first += group) {
        const uint16_t scale = to_half(furthest(numbers + first, group) / kLeastCode);
        const float units = from_half(scale) * kStep;
        scales[first / group] = scale;
        for (int64_t i = first; i < first + group; i += kLanes) {
            const Floats whole = rounded(load(numbers + i) / all(units == 0.0f ? 1.0f : units));
            store(codes + i, least(most(whole, low), high) * all(kStep));
        }
    }
}

}  // namespace ericllm
