// From the blocks of a GGUF file, as ggml-common.h (llama.cpp) lays them out, to where products look for their codes and
// scales: sixteen outputs side by side. No number is rounded. And back: the weights of one output, as an embedding needs.

#include "gguf.h"
#include "packing.h"

using namespace ericllm;
using namespace ericllm::gguf;

namespace {

// A group of one output. codes: four bytes each. scales: float16 where all are such, else one whole number for each part;
// minimum likewise. wide, wide_minimum: the float16 that whole numbers are multiplied by.
struct Group {
    uint32_t codes[kFours];
    uint16_t scale, minimum, wide, wide_minimum;
    uint8_t whole[2], whole_minimum;
};

uint16_t half_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, sizeof half);
    return half;
}

uint32_t four_at(const uint8_t* at) {
    uint32_t four;
    std::memcpy(&four, at, sizeof four);
    return four;
}

// The same bits of each of four bytes.
constexpr uint32_t each(uint32_t bits) { return bits * 0x01010101; }

// Lower halves of 16 bytes, then their upper ones.
void read_halves(const uint8_t* bytes, uint32_t* codes) {
    for (int64_t f = 0; f < kFours / 2; ++f) {
        const uint32_t four = four_at(bytes + 4 * f);
        codes[f] = four & each(15), codes[f + kFours / 2] = four >> 4 & each(15);
    }
}
void read_fifths(const uint8_t* bytes, uint32_t* codes) {
    const uint32_t bits = four_at(bytes);
    read_halves(bytes + sizeof bits, codes);
    // Four bits in a row go to the lowest places of four bytes: the factor shifts them by 0, 7, 14 and 21.
    for (int64_t f = 0; f < kFours; ++f) codes[f] |= ((bits >> 4 * f & 15) * 0x00204081 & each(1)) << 4;
}

// Bytes of a block of each format, its groups, and the g-th of them.
template <class Format>
struct Block;

template <>
struct Block<Q8_0> {
    static constexpr int64_t kBytes = 34, kGroups = 1;
    static void read(const uint8_t* block, int64_t, Group& to) {
        to.scale = half_at(block);
        for (int64_t f = 0; f < kFours; ++f) to.codes[f] = four_at(block + 2 + 4 * f) ^ each(kZero);
    }
};
template <>
struct Block<Q4_0> {
    static constexpr int64_t kBytes = 18, kGroups = 1;
    static void read(const uint8_t* block, int64_t, Group& to) {
        to.scale = half_at(block);
        read_halves(block + 2, to.codes);
    }
};
template <>
struct Block<Q4_1> {
    static constexpr int64_t kBytes = 20, kGroups = 1;
    static void read(const uint8_t* block, int64_t, Group& to) {
        to.scale = half_at(block), to.minimum = half_at(block + 2);
        read_halves(block + 4, to.codes);
    }
};
template <>
struct Block<Q5_0> {
    static constexpr int64_t kBytes = 22, kGroups = 1;
    static void read(const uint8_t* block, int64_t, Group& to) {
        to.scale = half_at(block);
        read_fifths(block + 2, to.codes);
    }
};
template <>
struct Block<Q5_1> {
    static constexpr int64_t kBytes = 24, kGroups = 1;
    static void read(const uint8_t* block, int64_t, Group& to) {
        to.scale = half_at(block), to.minimum = half_at(block + 2);
        read_fifths(block + 4, to.codes);
    }
};

// Six bits each of eight scales and eight minima in twelve bytes.
void read_sixths(const uint8_t* block, int64_t g, Group& to) {
    const uint8_t* packed = block + 4;
    to.wide = half_at(block), to.wide_minimum = half_at(block + 2);
    if (g < 4) {
        to.whole[0] = packed[g] & 63, to.whole_minimum = packed[g + 4] & 63;
    } else {
        to.whole[0] = static_cast<uint8_t>((packed[g + 4] & 15) | packed[g - 4] >> 6 << 4);
        to.whole_minimum = static_cast<uint8_t>(packed[g + 4] >> 4 | packed[g] >> 6 << 4);
    }
}
void read_quarter(const uint8_t* codes, int64_t g, Group& to) {
    for (int64_t f = 0; f < kFours; ++f) to.codes[f] = four_at(codes + g / 2 * kGroup + 4 * f) >> g % 2 * 4 & each(15);
}

template <>
struct Block<Q4_K> {
    static constexpr int64_t kBytes = 144, kGroups = 8;
    static void read(const uint8_t* block, int64_t g, Group& to) {
        read_sixths(block, g, to);
        read_quarter(block + 16, g, to);
    }
};
template <>
struct Block<Q5_K> {
    static constexpr int64_t kBytes = 176, kGroups = 8;
    static void read(const uint8_t* block, int64_t g, Group& to) {
        read_sixths(block, g, to);
        read_quarter(block + 48, g, to);
        for (int64_t f = 0; f < kFours; ++f) to.codes[f] |= (four_at(block + 16 + 4 * f) >> g & each(1)) << 4;
    }
};
template <>
struct Block<Q6_K> {
    static constexpr int64_t kBytes = 210, kGroups = 8;
    static void read(const uint8_t* block, int64_t g, Group& to) {
        const int64_t half = g / 4, quarter = g % 4;
        const uint8_t *low = block + 64 * half + 32 * (quarter % 2), *high = block + 128 + 32 * half;
        for (int64_t f = 0; f < kFours; ++f)
            to.codes[f] = (four_at(low + 4 * f) >> quarter / 2 * 4 & each(15)) |
                          (four_at(high + 4 * f) >> quarter * 2 & each(3)) << 4;
        to.whole[0] = block[192 + 2 * g], to.whole[1] = block[193 + 2 * g], to.wide = half_at(block + 208);
    }
};

void put_half(uint8_t* to, int64_t place, uint16_t half) { std::memcpy(to + 2 * place, &half, sizeof half); }

void put(Halves, const Group& from, int64_t g, int64_t n, uint8_t* record) {
    put_half(record, g * kBlock + n, from.scale);
}
// What products take off is minus what Q4_1 and Q5_1 add.
void put(HalvesAndMinima, const Group& from, int64_t, int64_t n, uint8_t* record) {
    put_half(record, n, from.scale);
    put_half(record, kBlock + n, from.minimum ^ 0x8000);
}
void put(Sixths, const Group& from, int64_t g, int64_t n, uint8_t* record) {
    put_half(record, n, from.wide);
    put_half(record, kBlock + n, from.wide_minimum);
    uint8_t* whole = record + Sixths::kHead + g * 2 * kBlock + n;
    whole[0] = from.whole[0], whole[kBlock] = from.whole_minimum;
}
void put(HalfGroups, const Group& from, int64_t g, int64_t n, uint8_t* record) {
    put_half(record, n, from.wide);
    uint8_t* whole = record + HalfGroups::kHead + g * 2 * kBlock + n;
    whole[0] = from.whole[0], whole[kBlock] = from.whole[1];
}

// The codes of output n of a block.
template <int bits>
void put_codes(const uint32_t* codes, int64_t n, uint8_t* to) {
    const auto put_four = [&](int64_t vector, uint32_t four) {
        std::memcpy(to + vector * kVector + n * 4, &four, sizeof four);
    };
    if constexpr (bits == 8) {
        for (int64_t f = 0; f < kFours; ++f) put_four(f, codes[f]);
        return;
    }
    for (int64_t f = 0; f < kFours; f += 2) put_four(f / 2, (codes[f] & each(15)) | (codes[f + 1] & each(15)) << 4);
    uint32_t upper[2] = {};
    for (int64_t f = 0; f < kFours; ++f) {
        if constexpr (bits == 5) upper[0] |= (codes[f] >> 4 & each(1)) << f;
        if constexpr (bits == 6) upper[f / 4] |= (codes[f] >> 4 & each(3)) << f % 4 * 2;
    }
    for (int64_t part = 0; part < bits - 4; ++part) put_four(kFours / 2 + part, upper[part]);
}

template <class Format>
void pack_block(const Layer& l, const Part* parts, int64_t block, uint8_t* to) {
    using From = Block<Format>;
    using Scales = typename Format::Scales;
    std::memset(to, 0, static_cast<size_t>(Format::block_bytes(l.inputs)));
    for (int64_t n = 0; n < l.count(block); ++n) {
        const auto* row = row_of<uint8_t>(parts, l.first(block) + n);
        for (int64_t g = 0; g < l.inputs / kGroup; ++g) {
            Group group;
            From::read(row + g / From::kGroups * From::kBytes, g % From::kGroups, group);
            uint8_t* record = to + g / Scales::kGroups * Format::kRecordBytes;
            put(Scales{}, group, g % Scales::kGroups, n, record);
            put_codes<Format::kBits>(group.codes, n, record + Scales::kBytes + g % Scales::kGroups * Format::kCodeBytes);
        }
    }
}

// The code of an input of a group: the f-th four, the i-th of it.
template <int bits>
int code_at(const uint8_t* codes, int64_t n, int64_t f, int64_t i) {
    codes += n * 4 + i;
    if constexpr (bits == 8) return kZero ? codes[f * kVector] : static_cast<int8_t>(codes[f * kVector]);
    const int low = codes[f / 2 * kVector] >> f % 2 * 4 & 15;
    const uint8_t* upper = codes + kFours / 2 * kVector;
    if constexpr (bits == 5) return low | (upper[0] >> f & 1) << 4;
    if constexpr (bits == 6) return low | (upper[f / 4 * kVector] >> f % 4 * 2 & 3) << 4;
    return low;
}

inline void set(float& to, float value) { to = value; }
inline void set(Bfloat16& to, float value) { to = to_bfloat16(value); }

// The weights of output n of a block.
template <class Format, class Value>
void unpack_row(const uint8_t* record, int64_t inputs, int64_t n, Value* to) {
    using Scales = typename Format::Scales;
    constexpr int64_t kPart = kGroup / Scales::kParts;
    float scales[kBlock], minima[kBlock] = {};
    for (int64_t first = 0; first < inputs; first += kGroup) {
        const int64_t g = first / kGroup % Scales::kGroups;
        if (first && !g) record += Format::kRecordBytes;
        const uint8_t* codes = record + Scales::kBytes + g * Format::kCodeBytes;
        if constexpr (Scales::kHasMinimum) store(minima, Scales::minimum(record, g));
        for (int64_t part = 0; part < Scales::kParts; ++part) {
            store(scales, Scales::scale(record, g, part));
            for (int64_t k = part * kPart; k < (part + 1) * kPart; ++k) {
                const int code = code_at<Format::kBits>(codes, n, k / 4, k % 4) - Format::kZeroCode;
                set(to[first + k], scales[n] * static_cast<float>(code) - minima[n]);
            }
        }
    }
}

constexpr int64_t kRowsOfTask = 8;

template <class Value>
bool look_up(int32_t threads, const Layer& l, const int64_t* ids, int64_t count, Value* to) {
    for (int64_t row = 0; row < count; ++row)
        if (ids[row] < 0 || ids[row] >= l.outputs) return false;
    const auto* weight = static_cast<const uint8_t*>(l.weight);
    const auto* places = reinterpret_cast<const Place*>(weight);
    on_threads(threads, divide_up(count, kRowsOfTask), [&](Tasks& tasks) {
        for (int64_t task; (task = tasks.next()) >= 0;)
            for (int64_t row = task * kRowsOfTask; row < std::min(count, (task + 1) * kRowsOfTask); ++row) {
                const Place& place = places[ids[row] / kBlock];
                with_format(place.format, [&](auto format) {
                    unpack_row<decltype(format)>(weight + place.offset, l.inputs, ids[row] % kBlock, to + row * l.inputs);
                });
            }
    });
    return true;
}

}  // namespace

extern "C" {

// Put the weights of the outputs `ids` into `to` [count, inputs]. False, and nothing is done, where there is no such output.
bool ericllm_look_up_gguf_bfloat16(int32_t threads, const Layer* layer, const int64_t* ids,
                                   int64_t count, void* to) {
    return look_up(threads, *layer, ids, count, static_cast<Bfloat16*>(to));
}

bool ericllm_look_up_gguf_float32(int32_t threads, const Layer* layer, const int64_t* ids, int64_t count,
                                  void* to) {
    return look_up(threads, *layer, ids, count, static_cast<float*>(to));
}

// Lay out the weight whose rows, bytes of a file, lie in `parts`, each in blocks of one format. Places of all blocks, which
// have outputs of one format each, are there.
void ericllm_pack_gguf(int32_t threads, const Layer* shape, const Part* parts, void* packed) {
    auto* weight = static_cast<uint8_t*>(packed);
    const auto* places = static_cast<const Place*>(packed);
    on_threads(threads, shape->blocks(), [&](Tasks& tasks) {
        for (int64_t block; (block = tasks.next()) >= 0;)
            with_format(places[block].format, [&](auto format) {
                pack_block<decltype(format)>(*shape, parts, block, weight + places[block].offset);
            });
    });
}

}  // extern "C"
