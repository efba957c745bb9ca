// What all kernels share: bfloat16, memory of a thread's own, and tasks on the threads that torch computes with.
//
// Kernels use no more of C++'s library than its headers, so that they are linked to that of C alone: zig's compiler, for
// machines without another, would first have to compile it.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

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

// The OpenMP runtime that torch computes with: its threads are ours, so the two never compete.
struct Threads {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, or null: the caller's thread alone
    int (*number)();                                               // omp_get_thread_num
};

// Tasks 0, 1, ... of a parallel region. Each thread takes adjacent ones in order; one that is done helps others.
class Tasks {
  public:
    static constexpr int kMaxThreads = 256;

    Tasks(int64_t count, int threads) : count_(count), threads_(threads) {
        for (int t = 0; t < threads_; ++t) runs_[t].next.store(first(t), std::memory_order_relaxed);
    }

    // The next task for thread `me`; -1 once all are taken.
    int64_t take(int me) {
        for (int t = 0; t < threads_; ++t) {
            const int run = me + t < threads_ ? me + t : me + t - threads_;
            if (runs_[run].next.load(std::memory_order_relaxed) >= first(run + 1)) continue;
            const int64_t task = runs_[run].next.fetch_add(1, std::memory_order_relaxed);
            if (task < first(run + 1)) return task;
        }
        return -1;
    }

  private:
    int64_t first(int run) const { return count_ * run / threads_; }

    struct alignas(64) Run {
        std::atomic<int64_t> next;
    };
    int64_t count_;
    int threads_;
    Run runs_[kMaxThreads];
};

// Call work(next) on at most `threads` threads, where next() gives a thread one task after another and -1 at the end.
template <class Work>
void on_threads(const Threads& by, int threads, int64_t tasks, const Work& work) {
    if (tasks <= 0) return;
    const auto wanted = static_cast<int>(std::min<int64_t>({threads, tasks, Tasks::kMaxThreads}));
    if (!by.parallel || wanted < 2) {
        int64_t task = 0;
        return work([&] { return task < tasks ? task++ : -1; });
    }
    struct Region {
        Tasks tasks;
        const Work& work;
        int (*number)();
    } region{{tasks, wanted}, work, by.number};
    by.parallel(
        [](void* data) {
            Region& shared = *static_cast<Region*>(data);
            const int me = shared.number();
            shared.work([&shared, me] { return shared.tasks.take(me); });
        },
        &region, static_cast<unsigned>(wanted), 0);
}

}  // namespace ericllm
