// What all kernels share: bfloat16, lists, and memory of a thread's own.
//
// Kernels use no more of C++'s library than its headers, so that they are linked to that of C alone: zig's compiler, for
// machines without another, would first have to compile it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "threads.h"

#if defined(_LIBCPP_VERSION)
// What calls the destructors of a thread that ends; C's library has it by another name.
extern "C" int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern "C" __attribute__((weak, visibility("hidden"))) int __cxa_thread_atexit(void (*end)(void*), void* object, void* library) {
    return __cxa_thread_atexit_impl(end, object, library);
}
#endif

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

// A vector of what can be copied as bytes.
template <class T>
class List {
  public:
    static_assert(std::is_trivially_copyable<T>::value, "copied as bytes");

    List() = default;
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    ~List() { std::free(data_); }

    int64_t size() const { return size_; }
    T* data() const { return data_; }
    T& operator[](int64_t n) const { return data_[n]; }
    void clear() { size_ = 0; }
    void push_back(const T& value) {
        if (size_ == room_) {
            room_ = std::max<int64_t>(64, 2 * room_);
            data_ = static_cast<T*>(std::realloc(static_cast<void*>(data_), static_cast<size_t>(room_) * sizeof(T)));
            if (!data_) std::abort();
        }
        data_[size_++] = value;
    }

  private:
    T* data_ = nullptr;
    int64_t size_ = 0, room_ = 0;
};

}  // namespace ericllm
