// Functions of sixteen floats at a time, to about two units in the last place where nothing else is said.

#pragma once

#include "vector.h"

namespace ericllm {

enum class Activation : int32_t { none, silu, gelu, gelu_tanh };

// e^x, for x beyond what float32 holds the least or greatest power within. By Cody and Waite's reduction and a Taylor
// polynomial over [-ln 2 / 2, ln 2 / 2].
inline Floats exp(Floats x) {
    x = most(all(-87.3f), least(all(88.3f), x));  // in this order NaN stays
    const Floats n = rounded(x * all(1.44269504f));
    Floats r = fused(n, all(-0.693359375f), x);
    r = fused(n, all(2.12194440e-4f), r);
    Floats sum = all(1.0f / 720.0f);
    for (const float coefficient : {1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f})
        sum = fused(sum, r, all(coefficient));
    return scaled(sum, n);
}

// x / (1 + e^-x).
inline Floats silu(Floats x) { return x / (all(1.0f) + exp(all(0.0f) - x)); }

// x / 2 * (1 + tanh(u)) for u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + e^-2u).
inline Floats gelu_tanh(Floats x) {
    const Floats u = x * fused(x * x, all(0.044715f), all(1.0f)) * all(-2.0f * 0.79788456f);
    return x / (all(1.0f) + exp(u));
}

// erf to 1.5e-7 in all, by Abramowitz and Stegun 7.1.26.
inline Floats erf(Floats x) {
    const Floats z = magnitude(x), t = all(1.0f) / fused(z, all(0.3275911f), all(1.0f));
    Floats sum = all(1.061405429f);
    for (const float coefficient : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        sum = fused(sum, t, all(coefficient));
    return with_sign_of(all(1.0f) - sum * t * exp(all(0.0f) - z * z), x);
}

inline Floats gelu(Floats x) { return x * all(0.5f) * (all(1.0f) + erf(x * all(0.70710678f))); }

inline Floats activated(Activation by, Floats x) {
    switch (by) {
        case Activation::silu:
            return silu(x);
        case Activation::gelu:
            return gelu(x);
        case Activation::gelu_tanh:
            return gelu_tanh(x);
        default:
            return x;
    }
}

}  // namespace ericllm
