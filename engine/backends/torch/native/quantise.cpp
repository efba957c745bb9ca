// From weights as a checkpoint has them to codes and scales.

#include "quantised.h"

using namespace ericllm;

namespace {

float largest_of(const float* x, int64_t count) {
    float most = 0.0f;
    for (int64_t k = 0; k < count; ++k) most = std::max(most, std::fabs(x[k]));
    return most;
}

// Put the codes of `x` into `codes`, one byte each, and return their scale, which codes are made for once it is rounded.
Bfloat16 encode(Int8, const float* x, uint8_t* codes) {
    const float exact = largest_of(x, Int8::kGroup) / 127.0f;
    Bfloat16 scale = to_bfloat16(exact);
    if (to_float(scale) < exact) ++scale.bits;  // or the largest would be cut
    const float inverse = exact > 0.0f ? 1.0f / to_float(scale) : 0.0f;
    for (int64_t k = 0; k < Int8::kGroup; ++k)
        codes[k] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(x[k] * inverse)) + kZero);
    return scale;
}

// The nearest codes of x * inverse: their values, and their places in kTable.
void nearest(const float* x, float inverse, float* values, uint8_t* places) {
    for (int64_t k = 0; k < Int4::kGroup; ++k) {
        const float scaled = x[k] * inverse;
        float value = kTable[0];
        int place = 0;
        for (int i = 0; i < 15; ++i) {
            const bool above = scaled > 0.5f * (kTable[i] + kTable[i + 1]);
            value += above ? static_cast<float>(kTable[i + 1] - kTable[i]) : 0.0f;
            place += above;
        }
        values[k] = value;
        places[k] = static_cast<uint8_t>(place);
    }
}

// Of 20 scales around the one by which the largest weight becomes the largest code, as it is or with the other sign,
// the one that loses least: with the best factor of the same codes, what is lost is |x|^2 - (x . codes)^2 / |codes|^2.
Bfloat16 encode(Int4, const float* x, uint8_t* codes) {
    float values[Int4::kGroup], most_kept = 0.0f, best = 0.0f;
    const float largest = largest_of(x, Int4::kGroup);
    for (int step = largest > 0.0f ? 11 : 21; step <= 20; ++step)
        for (const float sign : {1.0f, -1.0f}) {
            nearest(x, sign * 127.0f * 16.0f / (largest * static_cast<float>(step)), values, codes);
            Floats products = all(0.0f), squares = all(0.0f);
            for (int64_t k = 0; k < Int4::kGroup; k += kLanes) {
                const Floats value = load(values + k);
                products = fused(value, load(x + k), products);
                squares = fused(value, value, squares);
            }
            const float product = sum(products), square = sum(squares);
            if (product * product > most_kept * square) most_kept = product * product / square, best = product / square;
        }
    const Bfloat16 scale = to_bfloat16(best);
    const float rounded = to_float(scale);
    nearest(x, rounded != 0.0f ? 1.0f / rounded : 0.0f, values, codes);
    return scale;
}

// Put code `k` of output `n` of a group where products look for it.
void put(Int8, uint8_t code, int64_t k, int64_t n, uint8_t* group) { group[(k / 4 * kBlock + n) * 4 + k % 4] = code; }
void put(Int4, uint8_t code, int64_t k, int64_t n, uint8_t* group) {
    group[(k / 8 * kBlock + n) * 4 + k % 4] |= static_cast<uint8_t>(k / 4 % 2 ? code << 4 : code);
}

template <class Format, class Value>
void quantise_block(const Layer& l, const Value* weight, int64_t stride, int64_t block, void* out) {
    const Quantised<Format> to(l, out);
    auto* codes = const_cast<uint8_t*>(to.codes_of(block));
    auto* scales = const_cast<Bfloat16*>(to.scales_of(block));
    std::memset(codes, 0, static_cast<size_t>(to.groups * Format::kBytes));
    std::memset(scales, 0, static_cast<size_t>(to.groups * kBlock) * sizeof *scales);
    for (int64_t n = 0; n < l.count(block); ++n) {
        const Value* row = weight + (l.first(block) + n) * stride;
        for (int64_t g = 0; g < to.groups; ++g) {
            float x[Format::kGroup] = {};
            uint8_t found[Format::kGroup];
            const int64_t count = std::min(Format::kGroup, l.inputs - g * Format::kGroup);
            for (int64_t k = 0; k < count; ++k) x[k] = to_float(row[g * Format::kGroup + k]);
            scales[g * kBlock + n] = encode(Format{}, x, found);
            for (int64_t k = 0; k < Format::kGroup; ++k) put(Format{}, found[k], k, n, codes + g * Format::kBytes);
        }
    }
}

template <class Format, class Value>
void quantise(const Threads& by, int32_t threads, const Layer& l, const void* weight, int64_t stride, void* out) {
    on_threads(by, threads, l.blocks(), [&](const auto& next) {
        for (int64_t block; (block = next()) >= 0;)
            quantise_block<Format>(l, static_cast<const Value*>(weight), stride, block, out);
    });
}

}  // namespace

extern "C" {

// Lay out `weight` [outputs, inputs], bfloat16 or float32 with rows `stride` apart, in 8 or 4 bits.
void ericllm_quantise(const Threads* by, int32_t threads, const Layer* shape, int32_t bits, const void* weight,
                      int32_t is_float, int64_t stride, void* out) {
    if (bits == 8)
        (is_float ? quantise<Int8, float> : quantise<Int8, Bfloat16>)(*by, threads, *shape, weight, stride, out);
    else
        (is_float ? quantise<Int4, float> : quantise<Int4, Bfloat16>)(*by, threads, *shape, weight, stride, out);
}

}  // extern "C"
