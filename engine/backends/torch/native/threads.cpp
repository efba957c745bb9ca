// The helpers, and how jobs are handed to them.
//
// A job has a number, which every word has from which its tasks are claimed: a helper that still looks at an earlier job
// claims nothing of a later one. It reads what describes a job before it claims a task, and believes it only if the claim
// succeeds: a job stays what it is while one of its tasks is not done with. So a late helper touches nothing of a job that
// has ended.

#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <utility>

// pthread_atfork, less what C's library has for static linking alone, and this library, whose handlers go when it does.
extern "C" int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* library);
extern "C" __attribute__((visibility("hidden"))) char __dso_handle;

namespace ericllm {
namespace {

using std::chrono::microseconds;

// As std::chrono::steady_clock, which would need C++'s library.
struct Clock {
    using duration = std::chrono::nanoseconds;
    using rep = duration::rep;
    using period = duration::period;
    using time_point = std::chrono::time_point<Clock, duration>;
    static constexpr bool is_steady = true;

    static time_point now() {
        timespec found;
        clock_gettime(CLOCK_MONOTONIC, &found);
        return time_point(std::chrono::seconds(found.tv_sec) + std::chrono::nanoseconds(found.tv_nsec));
    }
};

constexpr microseconds kHelperSpins{50};   // for the next job, before a helper sleeps
constexpr microseconds kCallerSpins{200};  // for tasks that helpers hold, before the caller sleeps
constexpr int kPauses = 16;                // between looks at the clock
constexpr uint32_t kRefusedJobs = 4096;    // without asking again for a thread: some steps of a small model

struct alignas(64) Run {
    std::atomic<uint64_t> next;  // number of the job << 32 | next of a thread's own tasks
};

struct alignas(64) Helper {
    std::atomic<uint32_t> sleeps;
    uint32_t seen;  // number of the last job before it was made
    pthread_t thread;
};

struct Pool {
    // The newest job.
    alignas(64) std::atomic<uint32_t> job;
    std::atomic<int> threads;
    std::atomic<int64_t> count;
    std::atomic<Work> work;
    std::atomic<const void*> data;
    std::atomic<unsigned> floating;  // the caller's MXCSR, by which results are rounded and denormals kept or not
    std::atomic<bool> stops;
    alignas(64) std::atomic<int64_t> done;
    std::atomic<uint32_t> caller_sleeps;
    alignas(64) std::atomic<bool> busy;  // a caller has all of it, and what follows to itself
    int helpers;                         // that were made
    int most;                            // threads of any job so far
    uint32_t waits;                      // jobs until the system is asked again for a thread that it did not make
    Run runs[kMaxThreads];
    Helper all[kMaxThreads];  // the caller's place, the first, is empty
};

Pool pool;  // zeros, and without a destructor

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    return syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Wake the thread that sleeps, if one still does.
void wake(std::atomic<uint32_t>& sleeps) {
    sleeps.store(0);
    futex(sleeps, FUTEX_WAKE, 1);
}

// Sleep, unless ready(): to be woken once it may be.
template <class Ready>
void sleep(std::atomic<uint32_t>& sleeps, const Ready& ready) {
    sleeps.store(1);
    if (!ready()) futex(sleeps, FUTEX_WAIT, 1);
    sleeps.store(0);
}

// Wait for ready(), for some time; whether it is.
template <class Ready>
bool spin(microseconds most, const Ready& ready) {
    if (ready()) return true;
    const auto until = Clock::now() + most;
    do {
        for (int i = 0; i < kPauses; ++i) {
            __builtin_ia32_pause();
            if (ready()) return true;
        }
    } while (Clock::now() < until);
    return false;
}

void* help(void* number) {
    const auto me = static_cast<int>(reinterpret_cast<intptr_t>(number));
    Helper& self = pool.all[me];
    uint32_t seen = self.seen;
    const auto called = [&seen] { return pool.job.load() != seen || pool.stops.load(); };
    for (;;) {
        while (!spin(kHelperSpins, called)) sleep(self.sleeps, called);
        if (pool.stops.load()) return nullptr;
        seen = pool.job.load();
        const int threads = pool.threads.load();
        const Work work = pool.work.load();
        const void* data = pool.data.load();
        const unsigned floating = pool.floating.load();
        Tasks tasks(seen, me, threads, pool.count.load());
        if (me >= threads || !tasks.begin()) continue;
        __builtin_ia32_ldmxcsr(floating);
        work(data, tasks);
    }
}

// In a child of fork, which has none of the threads. A job that was on them there goes on in the parent alone.
void forget_helpers() {
    pool.helpers = 0, pool.waits = 0;
    pool.busy.store(false);
}

void make_helpers(int wanted) {
    if (!pool.most) __register_atfork(nullptr, nullptr, forget_helpers, &__dso_handle);
    sigset_t ours, before;  // signals are for the threads of the program
    sigfillset(&ours);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&ours, fault);
    pthread_sigmask(SIG_BLOCK, &ours, &before);
    while (pool.helpers < wanted) {
        const int number = pool.helpers + 1;
        Helper& helper = pool.all[number];
        helper.sleeps.store(0);
        helper.seen = pool.job.load();
        auto* argument = reinterpret_cast<void*>(static_cast<intptr_t>(number));
        if (pthread_create(&helper.thread, nullptr, help, argument) != 0) {
            pool.waits = kRefusedJobs;
            break;
        }
        pool.helpers = number;
        char name[24];
        std::snprintf(name, sizeof name, "kernels-%d", number);
        pthread_setname_np(helper.thread, name);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Before the code that they run is unloaded.
__attribute__((destructor)) void end_helpers() {
    while (pool.busy.exchange(true)) sched_yield();  // and never given back: later jobs are their callers' alone
    pool.stops.store(true);
    for (int number = 1; number <= pool.helpers; ++number) wake(pool.all[number].sleeps);
    for (int number = 1; number <= pool.helpers; ++number) pthread_join(pool.all[number].thread, nullptr);
}

}  // namespace

int64_t Tasks::claim() {
    for (int turn = 0; turn < threads_; ++turn) {
        auto& word = pool.runs[run_at(turn)].next;
        const auto end = static_cast<uint64_t>(first(run_at(turn) + 1));
        uint64_t next = word.load();
        while (next >> 32 == job_ && (next & UINT32_MAX) < end)
            if (word.compare_exchange_weak(next, next + 1)) return static_cast<int64_t>(next & UINT32_MAX);
    }
    return -1;
}

bool Tasks::begin() {
    begun_ = claim();
    return holds_ = begun_ >= 0;
}

int64_t Tasks::next() {
    if (!shared_) return alone_ < count_ ? alone_++ : -1;
    if (begun_ >= 0) return std::exchange(begun_, -1);
    if (holds_ && pool.done.fetch_add(1) + 1 == count_ && pool.caller_sleeps.load()) wake(pool.caller_sleeps);
    const int64_t task = claim();
    holds_ = task >= 0;
    return task;
}

int64_t Tasks::likely() const {
    if (!shared_) return alone_ < count_ ? alone_ : -1;
    for (int turn = 0; turn < threads_; ++turn) {
        const uint64_t next = pool.runs[run_at(turn)].next.load(std::memory_order_relaxed);
        const auto task = static_cast<int64_t>(next & UINT32_MAX);
        if (next >> 32 == job_ && task < first(run_at(turn) + 1)) return task;
    }
    return -1;
}

bool share_tasks(int threads, int64_t count, Work work, const void* data) {
    threads = static_cast<int>(std::min<int64_t>({threads, count, kMaxThreads}));
    if (count > UINT32_MAX || pool.busy.exchange(true)) return false;
    if (pool.helpers < threads - 1 && !(pool.waits && pool.waits--)) make_helpers(threads - 1);
    const uint32_t job = pool.job.load() + 1;
    // The words first: whoever sees anything of this job then finds none of the one before in them.
    pool.most = std::max(pool.most, threads);
    for (int run = 0; run < pool.most; ++run)
        pool.runs[run].next.store(uint64_t{job} << 32 | static_cast<uint64_t>(count * std::min(run, threads) / threads),
                                  std::memory_order_release);
    pool.threads.store(threads, std::memory_order_release);
    pool.count.store(count, std::memory_order_release);
    pool.work.store(work, std::memory_order_release);
    pool.data.store(data, std::memory_order_release);
    pool.floating.store(__builtin_ia32_stmxcsr(), std::memory_order_release);
    pool.done.store(0, std::memory_order_release);
    pool.job.store(job);
    for (int number = 1; number <= std::min(pool.helpers, threads - 1); ++number)
        if (pool.all[number].sleeps.load()) wake(pool.all[number].sleeps);
    Tasks mine(job, 0, threads, count);
    work(data, mine);
    const auto all_done = [count] { return pool.done.load() == count; };
    while (!spin(kCallerSpins, all_done)) sleep(pool.caller_sleeps, all_done);
    pool.busy.store(false);
    return true;
}

}  // namespace ericllm
