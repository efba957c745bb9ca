// What attention over pages is made of: how keys and values lie in a page, and the arithmetic of a tile of queries.
//
// A page has for each head its keys and then its values, both in "units" of 32 bits: a pair of bfloat16 or one float.
// Sixteen tokens are a tile. Keys lie as [tile][unit of the head][token], so that a vector has one unit of sixteen keys;
// values as [tile][unit of tokens][element], a vector having sixteen elements of one or two tokens. Both are multiplied
// as they lie; where they are codes (attention_codes.h), as they lie once they are decoded.

#pragma once

#include "common.h"
#include "vector.h"

namespace ericllm::attention {

constexpr int64_t kTile = 16;     // tokens side by side
constexpr int64_t kBlock = 128;   // keys that one softmax is taken over, at absolute positions
constexpr int64_t kTiles = kBlock / kTile;
constexpr float kNone = -INFINITY;  // the score of a key that is not seen
constexpr float kLog2E = 1.44269504088896341f;

static_assert(kTile == kLanes, "a vector has one unit of each token of a tile");

#if defined(__AVX512F__)
constexpr int64_t kVectorRows = 12;
#if defined(__AVX512BF16__)
constexpr int64_t kWideRows = 6;
#else
constexpr int64_t kWideRows = 4;  // keys take two registers where they are multiplied as floats
#endif
constexpr int64_t columns_for(int64_t rows) { return rows <= kWideRows ? 4 : 2; }
#else
constexpr int64_t kVectorRows = 4;
constexpr int64_t columns_for(int64_t) { return 1; }
#endif

// Queries that are multiplied by vectors, the rows of a unit side by side.
struct Vectors {
    static constexpr int64_t kRows = kVectorRows;
    static int64_t place(int64_t row, int64_t unit, int64_t) { return unit * kRows + row; }
};

// How sums of products of units are made. Value: what the rows have.  kPerUnit: how many numbers make a unit; a single one
// is a float whatever the rows have.  kRows: max queries of a tile.  place: where of these a unit of a query lies.
// Kept: a unit of a query or of its probabilities, as it is multiplied; `kept` makes it.
// kFetches: whether units of the next block are worth fetching meanwhile.
template <class ValueOfRows>
struct Single : Vectors {
    using Value = ValueOfRows;
    using Wide = Floats;
    using One = Floats;
    using Kept = float;
    static constexpr int64_t kPerUnit = 1;
    static constexpr bool kFetches = true;
    static Kept kept(const Value* unit) { return to_float(*unit); }
    static Wide wide(const uint32_t* units) { return load(reinterpret_cast<const float*>(units)); }
    static One one(const Kept* unit) { return all(*unit); }
    static Floats add(Floats sum, Wide a, One b) { return fused(a, b, sum); }
};

#if defined(ERICLLM_AMX)

// Multiplied in the tile registers of AMX, see attention_amx.h.
struct Pair {
    using Value = Bfloat16;
    using Kept = uint32_t;
    static constexpr int64_t kRows = 16, kPerUnit = 2;
    static constexpr bool kFetches = true;
    static int64_t place(int64_t row, int64_t unit, int64_t units) { return row * units + unit; }
    static Kept kept(const Value* unit) { return static_cast<Kept>(unit[1].bits) << 16 | unit[0].bits; }
};

#elif defined(__AVX512BF16__)

struct Pair : Vectors {
    using Value = Bfloat16;
    using Wide = __m512bh;
    using One = __m512bh;
    using Kept = uint32_t;
    static constexpr int64_t kPerUnit = 2;
    static constexpr bool kFetches = true;
    static Kept kept(const Value* unit) { return static_cast<Kept>(unit[1].bits) << 16 | unit[0].bits; }
    static Wide wide(const uint32_t* units) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(units)); }
    static One one(const Kept* unit) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*unit))); }
    static Floats add(Floats sum, Wide a, One b) { return {_mm512_dpbf16_ps(sum.v, a, b)}; }
};

#else

struct Pair : Vectors {
    struct Halves {
        Floats first, second;
    };
    struct Kept {
        float first, second;
    };
    using Value = Bfloat16;
    using Wide = Halves;
    using One = Halves;
    static constexpr int64_t kPerUnit = 2;
    static constexpr bool kFetches = true;
    static Kept kept(const Value* unit) { return {to_float(unit[0]), to_float(unit[1])}; }
    static Wide wide(const uint32_t* units) { return {firsts_of(units), seconds_of(units)}; }
    static One one(const Kept* unit) { return {all(unit->first), all(unit->second)}; }
    static Floats add(Floats sum, Wide a, One b) { return fused(a.second, b.second, fused(a.first, b.first, sum)); }
};

#endif

// `x` where low <= at <= high, else `other`.
inline Floats where_within(Floats at, Floats low, Floats high, Floats x, Floats other) {
#if defined(__AVX512F__)
    const __mmask16 within = _mm512_cmp_ps_mask(low.v, at.v, _CMP_LE_OQ) & _mm512_cmp_ps_mask(at.v, high.v, _CMP_LE_OQ);
    return {_mm512_mask_blend_ps(within, other.v, x.v)};
#else
    const auto pick = [](__m256 at, __m256 low, __m256 high, __m256 x, __m256 other) {
        const __m256 within = _mm256_and_ps(_mm256_cmp_ps(low, at, _CMP_LE_OQ), _mm256_cmp_ps(at, high, _CMP_LE_OQ));
        return _mm256_blendv_ps(other, x, within);
    };
    return {pick(at.low, low.low, high.low, x.low, other.low), pick(at.high, low.high, high.high, x.high, other.high)};
#endif
}

// `x` where at >= low, else 0.
inline Floats where_not_below(Floats at, Floats low, Floats x) {
#if defined(__AVX512F__)
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(at.v, low.v, _CMP_GE_OQ), x.v)};
#else
    return {_mm256_and_ps(_mm256_cmp_ps(at.low, low.low, _CMP_GE_OQ), x.low),
            _mm256_and_ps(_mm256_cmp_ps(at.high, low.high, _CMP_GE_OQ), x.high)};
#endif
}

// first, first + 1, ...
inline Floats counted_from(float first) {
    alignas(64) static constexpr float kCounted[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(kCounted) + all(first);
}

// 2^f between -1/2 and 1/2, by the polynomial of Chebyshev for (2^f - 1) / f.
inline Floats power_of_two_near_0(Floats f) {
    Floats y = fused(f, all(1.5453162942e-04f), all(1.3390863364e-03f));
    y = fused(f, y, all(9.6180825573e-03f));
    y = fused(f, y, all(5.5503571142e-02f));
    y = fused(f, y, all(2.4022650761e-01f));
    y = fused(f, y, all(6.9314718803e-01f));
    return fused(f, y, all(1.0f));
}

// 2^x for x <= 0, to 1e-7 of itself: exactly 1 at 0, and 0 below 2^-126.
inline Floats power_of_two_to(Floats x) {
    constexpr float kLeast = -126.0f;
    const Floats bounded = most(x, all(kLeast)), whole = rounded(bounded), f = bounded - whole;
    return where_not_below(x, all(kLeast), scaled(power_of_two_near_0(f), whole));
}

// 2^f likewise, to 8e-6 of itself: enough for what bfloat16 then rounds to 4e-3.
inline Floats rough_power_of_two_near_0(Floats f) {
    Floats y = fused(f, all(9.6663736932e-03f), all(5.5838342726e-02f));
    y = fused(f, y, all(2.4022348941e-01f));
    y = fused(f, y, all(6.9313672641e-01f));
    return fused(f, y, all(1.0f));
}

// 2^x for x <= 0 in fewer operations: what is below 2^-125 becomes that, and NaN stays. Exactly 1 at 0.
template <class Near>
Floats normal_power_of_two_to(Floats x, const Near& near_0) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2^23: a sum's lowest bits are the nearest whole number
    const Floats bounded = most(all(-125.0f), x), whole = (bounded + shift) - shift, f = bounded - whole;
    return scaled(near_0(f), whole);
}

// tanh(x), to 2e-7 of itself. Near 0 by the polynomial of Chebyshev for (tanh(x) / x - 1) / x^2 over x^2.
inline Floats hyperbolic_tangent(Floats x) {
    constexpr float kSmall = 0.625f;
    const Floats size = magnitude(x), square = x * x;
    Floats near = fused(square, all(-6.0967082e-03f), all(2.09971737e-02f));
    near = fused(square, near, all(-5.3850908e-02f));
    near = fused(square, near, all(1.333276972e-01f));
    near = fused(square, near, all(-3.333332894e-01f));
    near = fused(size * square, near, size);
    const Floats e = power_of_two_to(size * all(-2.0f * kLog2E));  // e^(-2|x|)
    const Floats far = (all(1.0f) - e) / (all(1.0f) + e);
    return with_sign_of(where_within(size, all(0.0f), all(kSmall), near, far), x);
}

// A probability as precise as what it is rounded to.
template <class Value>
Floats probability(Floats x, Single<Value>) {
    return normal_power_of_two_to(x, power_of_two_near_0);
}
inline Floats probability(Floats x, Pair) { return normal_power_of_two_to(x, rough_power_of_two_near_0); }

// Put 32 probabilities as they are multiplied; return what they then add up to, in sixteen sums.
template <class Value>
Floats keep(Floats a, Floats b, Single<Value>, float* to) {
    store(to, a);
    store(to + kLanes, b);
    return a + b;
}
inline Floats keep(Floats a, Floats b, Pair, Pair::Kept* to) {
#if defined(__AVX512BF16__)
    const auto bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v));
    _mm512_storeu_si512(to, bits);
    return Floats{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))} +
           Floats{_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
#else
    alignas(64) Bfloat16 bits[2 * kLanes];
    store(bits, a);
    store(bits + kLanes, b);
    if constexpr (sizeof(Pair::Kept) == 2 * sizeof(Bfloat16)) {
        std::memcpy(to, bits, sizeof bits);
    } else {
        store(reinterpret_cast<float*>(to), load(bits));
        store(reinterpret_cast<float*>(to) + kLanes, load(bits + kLanes));
    }
    return load(bits) + load(bits + kLanes);
#endif
}

// The tiles of a block where they lie; beyond the last one that is needed, that one once more.
struct View {
    const uint32_t* keys[kTiles];
    const uint32_t* values[kTiles];
};

template <class Kind>
constexpr int64_t kKeptUnits = kBlock / Kind::kPerUnit;

// Into the second level: what is fetched there waits in more places than what the first level misses, and pages lie anywhere.
inline void fetch(const void* from) { _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1); }

}  // namespace ericllm::attention
