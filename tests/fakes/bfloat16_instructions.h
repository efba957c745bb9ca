// The instructions of AVX512-bf16 in plain C++, for CPUs that have AVX512 without them.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVX512BF16__ 1
#define _mm512_cvtneps_pbh fake_round_one
#define _mm512_cvtne2ps_pbh fake_round_two
#define _mm512_dpbf16_ps fake_dot

inline uint16_t fake_round(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline float fake_wide(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class Rounded, int kCount>
Rounded fake_rounded(const float* values) {
    uint16_t halves[kCount];
    for (int n = 0; n < kCount; ++n) halves[n] = fake_round(values[n]);
    Rounded rounded;
    std::memcpy(&rounded, halves, sizeof rounded);
    return rounded;
}

inline __m256bh fake_round_one(__m512 values) {
    float all[16];
    _mm512_storeu_ps(all, values);
    return fake_rounded<__m256bh, 16>(all);
}

inline __m512bh fake_round_two(__m512 second, __m512 first) {
    float all[32];
    _mm512_storeu_ps(all, first);
    _mm512_storeu_ps(all + 16, second);
    return fake_rounded<__m512bh, 32>(all);
}

inline __m512 fake_dot(__m512 sums, __m512bh a, __m512bh b) {
    uint16_t x[32], y[32];
    float all[16];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    _mm512_storeu_ps(all, sums);
    for (int n = 0; n < 16; ++n)
        for (int half = 1; half >= 0; --half) all[n] += fake_wide(x[2 * n + half]) * fake_wide(y[2 * n + half]);
    return _mm512_loadu_ps(all);
}
