// Sixteen floats at a time, on AVX512 or AVX2: a Vector or two. first_of and second_of take one half of each of as many
// pairs of bfloat16 as a Vector has floats, firsts_of and seconds_of of sixteen.

#pragma once

#include <immintrin.h>

#include "common.h"

namespace ericllm {

constexpr int64_t kLanes = 16;

#if defined(__AVX512F__)

using Vector = __m512;
struct Floats {
    Vector v;
};

inline __mmask16 lanes(int64_t count) { return static_cast<__mmask16>(0xffffu >> (kLanes - count)); }

inline Floats all(float value) { return {_mm512_set1_ps(value)}; }
inline Floats load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline Floats load(const float* from, int64_t count) { return {_mm512_maskz_loadu_ps(lanes(count), from)}; }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x.v); }
inline void store(float* to, Floats x, int64_t count) { _mm512_mask_storeu_ps(to, lanes(count), x.v); }

inline Floats widened(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Floats load(const Bfloat16* from) { return widened(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline Floats load(const Bfloat16* from, int64_t count) {
    return widened(_mm256_maskz_loadu_epi16(lanes(count), from));
}
inline __m256i narrowed(Floats x) {  // as to_bfloat16
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v));
#else
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i nearest = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(nearest, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
#endif
}
inline void store(Bfloat16* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrowed(x)); }
inline void store(Bfloat16* to, Floats x, int64_t count) { _mm256_mask_storeu_epi16(to, lanes(count), narrowed(x)); }

inline Vector first_of(const uint32_t* pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline Vector second_of(const uint32_t* pairs) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(0xaaaaaaaau, pairs));
}
inline Floats firsts_of(const uint32_t* pairs) { return {first_of(pairs)}; }
inline Floats seconds_of(const uint32_t* pairs) { return {second_of(pairs)}; }

inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fused(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
inline Floats least(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats most(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats rounded(Floats x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Floats magnitude(Floats x) { return {_mm512_abs_ps(x.v)}; }
inline Floats with_sign_of(Floats x, Floats sign) {  // of x >= 0
    const __m512i bit = _mm512_and_si512(_mm512_castps_si512(sign.v), _mm512_set1_epi32(INT32_MIN));
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x.v), bit))};
}
// x * 2^n for whole n, with n + 127 from 1 to 254.
inline Floats scaled(Floats x, Floats n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline __m256 halves_added(Floats x) {
    const __m512d high = _mm512_castps_pd(x.v);
    return _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(high, 1)));
}
inline float highest(Floats x) { return _mm512_reduce_max_ps(x.v); }

#else  // AVX2 and FMA

using Vector = __m256;
struct Floats {
    Vector low, high;
};

inline Floats all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}

inline __m256 widened(__m128i bits) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)); }
inline Floats load(const Bfloat16* from) {
    const auto* halves = reinterpret_cast<const __m128i*>(from);
    return {widened(_mm_loadu_si128(halves)), widened(_mm_loadu_si128(halves + 1))};
}
inline __m256i narrowed(__m256 x) {  // as to_bfloat16, in 32 bits each
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_blendv_epi8(nearest, quiet, nan), 16);
}
inline void store(Bfloat16* to, Floats x) {
    const __m256i packed = _mm256_packus_epi32(narrowed(x.low), narrowed(x.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline __m256i pairs_at(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Vector first_of(const uint32_t* pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs_at(pairs), 16)); }
inline Vector second_of(const uint32_t* pairs) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm256_castsi256_ps(_mm256_and_si256(pairs_at(pairs), upper));
}
inline Floats firsts_of(const uint32_t* pairs) { return {first_of(pairs), first_of(pairs + 8)}; }
inline Floats seconds_of(const uint32_t* pairs) { return {second_of(pairs), second_of(pairs + 8)}; }

template <class T>
Floats load(const T* from, int64_t count) {
    T all[kLanes] = {};
    std::memcpy(all, from, static_cast<size_t>(count) * sizeof(T));
    return load(all);
}
template <class T>
void store(T* to, Floats x, int64_t count) {
    T all[kLanes];
    store(all, x);
    std::memcpy(to, all, static_cast<size_t>(count) * sizeof(T));
}

inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Floats fused(Floats a, Floats b, Floats c) {  // a * b + c
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Floats least(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Floats most(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline __m256 rounded(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats rounded(Floats x) { return {rounded(x.low), rounded(x.high)}; }
inline Floats magnitude(Floats x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high)};
}
inline Floats with_sign_of(Floats x, Floats sign) {  // of x >= 0
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(x.low, _mm256_and_ps(bit, sign.low)), _mm256_or_ps(x.high, _mm256_and_ps(bit, sign.high))};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
// x * 2^n for whole n, with n + 127 from 1 to 254.
inline Floats scaled(Floats x, Floats n) { return x * Floats{power_of_two(n.low), power_of_two(n.high)}; }
inline __m256 halves_added(Floats x) { return _mm256_add_ps(x.low, x.high); }
inline float highest(Floats x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#endif

// The sum of all lanes, always by the same tree: that of lanes half of them apart, of those a quarter apart, and so on.
inline float sum(Floats x) {
    const __m256 eight = halves_added(x);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Put the sum, or what else `merge` makes of two vectors and `alone` of the numbers of one, of each of up to sixteen vectors
// into `to`. Many go together, each by the order of `sum`.
template <class Merge, class Alone>
void for_each_vector(int64_t count, const Floats* x, float* to, const Merge& merge, const Alone& alone) {
#if defined(__AVX512F__)
    constexpr int64_t kFew = 4;
    if (count > kFew) {
        const auto merged = [&](__m512 a, __m512 b) { return merge(Floats{a}, Floats{b}).v; };
        const auto halves = [&](__m512 a, __m512 b) {
            return merged(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        };
        const auto quarters = [&](__m512 a, __m512 b) {
            return merged(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
        };
        const auto pairs = [&](__m512 a, __m512 b) { return merged(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)); };
        const auto ones = [&](__m512 a, __m512 b) { return merged(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); };
        const auto at = [&](int64_t n) { return x[std::min(n, count - 1)].v; };
        __m512 four[4];
        for (int64_t p = 0; p < 4; ++p) four[p] = quarters(halves(at(p), at(p + 4)), halves(at(p + 8), at(p + 12)));
        store(to, Floats{ones(pairs(four[0], four[1]), pairs(four[2], four[3]))}, count);
        return;
    }
#endif
    for (int64_t n = 0; n < count; ++n) to[n] = alone(x[n]);
}

}  // namespace ericllm
