// How weights lie that stay in the codes of a GGUF file: 32 inputs of one output are a group, a weight is scale * (code -
// zero) or scale * code - minimum.
//
// A weight begins with a place for each block of 16 outputs, as the outputs of one weight may come from tensors of several
// formats. A block is records of one or more groups: scales first, then the codes of one group after the other. Codes lie
// in vectors of 64 bytes, [16 outputs][4 inputs]: those of 8 bits as they are; of others the lower four bits of two fours
// of inputs in the halves of each byte, and the upper ones of several fours in the bits of the vectors that follow.

#pragma once

#include "codes.h"
#include "integers.h"

namespace ericllm::gguf {

constexpr int64_t kGroup = 32;
constexpr int64_t kFours = kGroup / 4;
constexpr int64_t kVector = 64;  // bytes

struct Place {
    int64_t format;
    int64_t offset;  // bytes from the weight's beginning
};

// Scales of a record, for 16 outputs next to each other: of kGroups groups, each in kParts parts with a scale of its own.

// float16, of two groups.
struct Halves {
    static constexpr int64_t kGroups = 2, kParts = 1, kBytes = 64;
    static constexpr bool kHasMinimum = false;
    static Floats scale(const uint8_t* record, int64_t group, int64_t) {
        return load_halves(reinterpret_cast<const uint16_t*>(record) + group * kBlock);
    }
};

// float16, and minima of float16.
struct HalvesAndMinima {
    static constexpr int64_t kGroups = 1, kParts = 1, kBytes = 64;
    static constexpr bool kHasMinimum = true;
    static Floats scale(const uint8_t* record, int64_t, int64_t) {
        return load_halves(reinterpret_cast<const uint16_t*>(record));
    }
    static Floats minimum(const uint8_t* record, int64_t) {
        return load_halves(reinterpret_cast<const uint16_t*>(record) + kBlock);
    }
};

inline Floats bytes_at(const uint8_t* from) { return to_floats(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }

// Whole numbers below 64 for scales and minima, times one float16 each for all eight groups.
struct Sixths {
    static constexpr int64_t kGroups = 8, kParts = 1, kHead = 64, kBytes = kHead + kGroups * 2 * kBlock;
    static constexpr bool kHasMinimum = true;
    static Floats scale(const uint8_t* record, int64_t group, int64_t) {
        return load_halves(reinterpret_cast<const uint16_t*>(record)) * bytes_at(record + kHead + group * 2 * kBlock);
    }
    static Floats minimum(const uint8_t* record, int64_t group) {
        const auto* halves = reinterpret_cast<const uint16_t*>(record) + kBlock;
        return load_halves(halves) * bytes_at(record + kHead + group * 2 * kBlock + kBlock);
    }
};

// A whole number for each half of a group, times one float16 for all eight groups.
struct HalfGroups {
    static constexpr int64_t kGroups = 8, kParts = 2, kHead = 64, kBytes = kHead + kGroups * 2 * kBlock;
    static constexpr bool kHasMinimum = false;
    static Floats scale(const uint8_t* record, int64_t group, int64_t part) {
        return load_halves(reinterpret_cast<const uint16_t*>(record)) * bytes_at(record + kHead + (group * 2 + part) * kBlock);
    }
};

// kBits: of a code.  kZeroCode: what stands for 0 where there is no minimum.
template <int bits, int zero, class Of>
struct Format {
    using Scales = Of;
    static constexpr int kBits = bits, kZeroCode = zero;
    static constexpr int64_t kCodeBytes = kVector * bits;  // of a group
    static constexpr int64_t kRecordBytes = Scales::kBytes + Scales::kGroups * kCodeBytes;

    static int64_t records(int64_t inputs) { return divide_up(inputs, kGroup * Scales::kGroups); }
    static int64_t block_bytes(int64_t inputs) { return records(inputs) * kRecordBytes; }
};

using Q8_0 = Format<8, kZero, Halves>;
using Q4_0 = Format<4, 8, Halves>;
using Q4_1 = Format<4, 0, HalvesAndMinima>;
using Q5_0 = Format<5, 16, Halves>;
using Q5_1 = Format<5, 0, HalvesAndMinima>;
using Q4_K = Format<4, 0, Sixths>;
using Q5_K = Format<5, 0, Sixths>;
using Q6_K = Format<6, 32, HalfGroups>;

// Call visit with the format of that number, whose order is that of CODED_FORMATS in gguf_codes.py.
template <class Visit>
void with_format(int64_t number, const Visit& visit) {
    switch (number) {
        case 0: return visit(Q8_0{});
        case 1: return visit(Q4_0{});
        case 2: return visit(Q4_1{});
        case 3: return visit(Q5_0{});
        case 4: return visit(Q5_1{});
        case 5: return visit(Q4_K{});
        case 6: return visit(Q5_K{});
        default: return visit(Q6_K{});
    }
}

}  // namespace ericllm::gguf
