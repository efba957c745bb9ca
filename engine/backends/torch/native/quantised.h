// How quantised weights lie: groups of inputs of one output share a scale, a weight is its scale times a code.
//
// A block of 16 outputs is its groups in their order, each [group/4][16][4] codes: for every four inputs, those of one
// output after the other. int8 keeps a code as the byte code + kZero, int4 as its place in kTable, two to a byte: four
// inputs in the low halves, the next four in the high ones. Scales are bfloat16 [block][group][16] behind all codes.

#pragma once

#include "integers.h"

namespace ericllm {

// Codes of int4, least first: those that lose least of normally distributed weights, found by Lloyd's iterations over
// groups of 32 with the best scale for each.
constexpr int8_t kTable[16] = {-108, -84, -67, -52, -39, -26, -14, -3, 10, 22, 35, 49, 63, 80, 101, 127};

struct Int8 {
    static constexpr int64_t kGroup = 64;
    static constexpr int64_t kBytes = kBlock * kGroup;  // of a group of a block
    static constexpr int kFours = 1;                    // fours of inputs in 64 bytes
};

struct Int4 {
    static constexpr int64_t kGroup = 32;
    static constexpr int64_t kBytes = kBlock * kGroup / 2;
    static constexpr int kFours = 2;
};

// A weight as it lies at Layer.weight.
template <class Format>
struct Quantised {
    const uint8_t* codes;
    const Bfloat16* scales;
    int64_t groups;

    explicit Quantised(const Layer& l, const void* weight)
        : codes(static_cast<const uint8_t*>(weight)),
          scales(reinterpret_cast<const Bfloat16*>(codes + l.blocks() * divide_up(l.inputs, Format::kGroup) * Format::kBytes)),
          groups(divide_up(l.inputs, Format::kGroup)) {}

    const uint8_t* codes_of(int64_t block) const { return codes + block * groups * Format::kBytes; }
    const Bfloat16* scales_of(int64_t block) const { return scales + block * groups * kBlock; }
};

}  // namespace ericllm
