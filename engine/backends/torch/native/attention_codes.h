// Keys and values that lie in pages as codes, and are decoded block by block before they are multiplied.
//
// A tile has rows of 32 codes and then its scales, float16 [group][token]. A row of keys has two elements of sixteen
// tokens, one of values sixteen elements of two tokens, in the order in which they are multiplied; so one loop reads both.

#pragma once

#include "attention_pages.h"
#include "codes.h"

namespace ericllm::attention {

// What a model of `Value` multiplies by where its keys and values are codes. Bfloat16 would be made into floats again
// where the CPU does not multiply it.
#if defined(__AVX512BF16__)
template <class Value>
using DecodedInto = std::conditional_t<std::is_same_v<Value, Bfloat16>, Pair, Single<float>>;
#else
template <class Value>
using DecodedInto = Single<Value>;
#endif

// Units that were decoded, and lie in the nearest caches already.
template <class Units>
struct Decoded : Units {
    static constexpr bool kFetches = false;
};

// The scales of the two halves of a row.
struct Scales {
    Floats first, second;
};

// How the codes of a row stand for units.  place: of what is number `one` of sixteen and number `two` of two.
// keys: of the scales of sixteen tokens.  values: of those of two tokens.  put: both halves, `stride` units apart where
// they are units of their own.
template <class Units>
struct Order {
    static constexpr int64_t place(int64_t one, int64_t two) { return two * kLanes + one; }
    static Scales keys(Floats scales) { return {scales, scales}; }
    static Scales values(const float* scales) { return {all(scales[0]), all(scales[1])}; }
    static void put(Floats first, Floats second, uint32_t* to, int64_t stride) {
        store(reinterpret_cast<float*>(to), first);
        store(reinterpret_cast<float*>(to + stride), second);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Order<Pair> {
    static constexpr int64_t place(int64_t one, int64_t two) { return one * 2 + two; }
    static Scales keys(Floats scales) {
        const __m512i first = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        return {{_mm512_permutexvar_ps(first, scales.v)}, {_mm512_permutexvar_ps(second, scales.v)}};
    }
    static Scales values(const float* scales) {
        double two;
        std::memcpy(&two, scales, sizeof two);
        const Floats both{_mm512_castpd_ps(_mm512_set1_pd(two))};
        return {both, both};
    }
    static void put(Floats first, Floats second, uint32_t* to, int64_t) {
        _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v)));
    }
};
#endif

template <class ValueOfRows, class Codes>
class CodedPages {
  public:
    using Value = ValueOfRows;
    using Kind = Decoded<DecodedInto<Value>>;

    explicit CodedPages(const Layer& layer)
        : size_(layer.head_dim), spread_(layer.spread), group_(layer.group), codes_(kTile * size_ * Codes::kBits / 8) {}

    void take_query(const Heads<Value>& heads, int64_t row, int64_t head, float* spare, Value* to) const {
        heads.widen(row, head, spare);
        hadamard(spare, size_, spread_);
        for (int64_t i = 0; i < size_; i += kLanes) store(to + i, load(spare + i));
    }

    void lay_key(const Heads<Value>& heads, int64_t row, int64_t head, float* spare, char* tile, int64_t column) const {
        heads.widen(row, head, spare);
        auto* codes = encoded(spare);
        char* codes_row = tile;
        for (int64_t i = 0; i < size_; i += 2, codes_row += Codes::kRowBytes)
            for (int64_t n = 0; n < 2; ++n) Codes::put(codes_row, InOrder::place(column, n), codes[i + n]);
        put_scales(spare, tile, column);
    }

    void lay_value(const Heads<Value>& heads, int64_t row, int64_t head, float* spare, char* tile, int64_t column,
                   bool last) const {
        heads.widen_as_it_is(row, head, spare);
        auto* codes = encoded(spare);
        char* rows = tile + column / 2 * (size_ / kLanes) * Codes::kRowBytes;
        for (int64_t i = 0; i < size_; i += kLanes, rows += Codes::kRowBytes)
            for (int64_t n = 0; n < kLanes; ++n) Codes::put(rows, InOrder::place(n, column % 2), codes[i + n]);
        put_scales(spare, tile, column);
        if (column % 2 == 0 && last)  // see PlainPages
            for (int64_t g = 0; g < size_ / group_; ++g) scales_of(tile)[g * kTile + column + 1] = 0;
    }

    // Decoded into memory of this thread, where they hold until the next call. What is `ahead` is fetched meanwhile.
    View read(const View& view, const View& ahead, int64_t begin, int64_t end) const {
        static thread_local Scratch scratch;
        const int64_t units = kTile * size_ / Kind::kPerUnit;
        auto* memory = scratch.of<uint32_t>(2 * kTiles * units);
        View decoded;
        const int64_t first = begin / kTile, last = divide_up(end, kTile) - 1;
        for (int64_t t = 0; t < kTiles; ++t) {
            uint32_t* keys = memory + std::clamp(t, first, last) * 2 * units;
            decoded.keys[t] = keys, decoded.values[t] = keys + units;
            if (t < first || t > last) continue;
            decode_keys(at(view.keys[t]), at(ahead.keys[t]), keys);
            decode_values(at(view.values[t]), at(ahead.values[t]), keys + units);
        }
        return decoded;
    }

    void restore(float* attended) const { hadamard(attended, size_, spread_); }

  private:
    using InOrder = Order<DecodedInto<Value>>;

    static const char* at(const uint32_t* tile) { return reinterpret_cast<const char*>(tile); }
    uint16_t* scales_of(char* tile) const { return reinterpret_cast<uint16_t*>(tile + codes_); }
    const uint16_t* scales_of(const char* tile) const { return reinterpret_cast<const uint16_t*>(tile + codes_); }

    // The codes of the head in `spare`, computed there; before them, its scales.
    int8_t* encoded(float* spare) const {
        hadamard(spare, size_, spread_);
        auto* scales = reinterpret_cast<uint16_t*>(spare + size_);
        auto* codes = reinterpret_cast<int8_t*>(scales + size_ / group_);
        encode<Codes>(spare, size_, group_, codes, scales);
        return codes;
    }

    void put_scales(const float* spare, char* tile, int64_t column) const {
        const auto* scales = reinterpret_cast<const uint16_t*>(spare + size_);
        for (int64_t g = 0; g < size_ / group_; ++g) scales_of(tile)[g * kTile + column] = scales[g];
    }

    void decode_keys(const char* tile, const char* ahead, uint32_t* to) const {
        constexpr int64_t kStride = kTile, kUnits = 2 / Kind::kPerUnit;
        for (int64_t g = 0; g < size_ / group_; ++g) {
            fetch(ahead + codes_ + g * kTile * 2);
            const Scales scales = InOrder::keys(load_halves(scales_of(tile) + g * kTile));
            for (int64_t row = g * group_ / 2; row < (g + 1) * group_ / 2; ++row)
                decode(tile, ahead, row, scales, to + row * kUnits * kTile, kStride);
        }
    }

    void decode_values(const char* tile, const char* ahead, uint32_t* to) const {
        constexpr int64_t kUnits = 2 / Kind::kPerUnit;
        const int64_t rows = size_ / kLanes;
        for (int64_t g = 0; g < size_ / group_; ++g) {
            fetch(ahead + codes_ + g * kTile * 2);
            float scales[kTile];
            store(scales, load_halves(scales_of(tile) + g * kTile));
            for (int64_t token = 0; token < kTile; token += 2) {
                const Scales two = InOrder::values(scales + token);
                for (int64_t i = g * group_; i < (g + 1) * group_; i += kLanes)
                    decode(tile, ahead, token / 2 * rows + i / kLanes, two, to + token / 2 * kUnits * size_ + i, size_);
            }
        }
    }

    static void decode(const char* tile, const char* ahead, int64_t row, const Scales& scales, uint32_t* to, int64_t stride) {
        Floats first, second;
        Codes::both(tile + row * Codes::kRowBytes, first, second);
        fetch(ahead + row * Codes::kRowBytes);
        InOrder::put(first * scales.first, second * scales.second, to, stride);
    }

    const int64_t size_, spread_, group_;
    const int64_t codes_;  // bytes of a tile's
};

}  // namespace ericllm::attention
