// What all kernels share: bfloat16, and memory of a thread's own.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "threads.h"

namespace ericllm {

struct Bfloat16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline Bfloat16 to_bfloat16(float value) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // stays NaN
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
constexpr int64_t round_up(int64_t value, int64_t to) { return divide_up(value, to) * to; }

// Memory that grows as it is asked for more and begins on a line of the cache. What lay there before is lost.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    template <class T>
    T* of(int64_t count) {
        const int64_t needed = round_up(count * static_cast<int64_t>(sizeof(T)), kLine);
        if (needed > size_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(kLine, static_cast<size_t>(needed));
            if (!memory_) std::abort();
            size_ = needed;
        }
        return static_cast<T*>(memory_);
    }

  private:
    static constexpr int64_t kLine = 64;
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace ericllm
