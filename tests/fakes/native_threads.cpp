// Jobs on the threads of the native kernels, for tests: `native_threads CASE`; ends with 0 where the promise is held.

#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

using ericllm::on_threads;
using ericllm::Tasks;

namespace {

void expect(bool held, const char* what) {
    if (held) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

// A job of some tasks, whose memory is gone right after it. Plain ints: ThreadSanitizer reports whoever races.
void job(std::mt19937& random) {
    const int64_t count = 1 + random() % 40;
    auto done = std::make_unique<std::vector<int>>(count);
    int lives = 1;
    on_threads(1 + random() % 8, count, [&lives, ints = done.get(), count](Tasks& tasks) {
        std::minstd_rand own(count);
        for (int64_t task; (task = tasks.next()) >= 0;) {
            expect(lives == 1 && tasks.likely() < count, "a task of a job that has ended");
            ++(*ints)[task];
            if (own() % 16 == 0) std::this_thread::yield();
            for (volatile unsigned wait = own() % 1000; wait; wait = wait - 1) {}
        }
    });
    lives = 0;
    for (const int times : *done) expect(times == 1, "a task was not done once");
    if (random() % 50 == 0) usleep(random() % 200);  // longer than helpers spin
}

void jobs(int number, int seed) {
    std::mt19937 random(seed);
    while (number--) job(random);
}

void several_callers() {
    std::vector<std::thread> callers;
    for (int seed = 0; seed < 3; ++seed) callers.emplace_back(jobs, 2000, seed);
    for (auto& caller : callers) caller.join();
}

// A helper that has done its tasks and goes on for as long as `gate` is locked.
void held_up() {
    static std::mutex gate;
    static std::atomic<bool> helped{false};
    const auto main = std::this_thread::get_id();
    gate.lock();
    while (!helped) {
        on_threads(2, 64, [main](Tasks& tasks) {
            bool any = false;
            while (tasks.next() >= 0) any = true, std::this_thread::yield();
            if (std::this_thread::get_id() == main || !any) return;
            helped = true;
            gate.lock();
            gate.unlock();
        });
    }
    int done = 0;  // by this thread alone
    on_threads(2, 1000, [&done](Tasks& tasks) {
        while (tasks.next() >= 0) ++done;
    });
    expect(done == 1000, "a job did not leave its tasks to the caller");
    gate.unlock();
}

// A caller that sleeps until a helper has done what it holds.
void slept() {
    std::atomic<bool> helps{false}, done{false};
    const auto main = std::this_thread::get_id();
    on_threads(2, 2, [&](Tasks& tasks) {
        while (tasks.next() >= 0) {
            if (std::this_thread::get_id() == main) {
                while (!helps) std::this_thread::yield();
            } else {
                helps = true;
                usleep(5000);  // longer than the caller spins
                done = true;
            }
        }
    });
    expect(done, "a job was over before its last task");
}

// Jobs of a caller that flushes denormals to zero, and of one that keeps them, on the helpers of either.
void rounded() {
    const auto main = std::this_thread::get_id();
    for (const unsigned flushes : {0u, 0x8040u, 0u}) {
        __builtin_ia32_ldmxcsr(0x1f80u | flushes);
        std::atomic<bool> helps{false}, differs{false};
        on_threads(2, 2, [&](Tasks& tasks) {
            while (tasks.next() >= 0) {
                if ((__builtin_ia32_stmxcsr() & 0x8040u) != flushes) differs = true;
                if (std::this_thread::get_id() != main) helps = true;
                while (!helps) std::this_thread::yield();
            }
        });
        expect(!differs, "a helper computed in another mode than its caller");
    }
}

// Children of a process that has helpers, while another of its threads has a job.
void forked() {
    std::atomic<bool> ends{false};
    std::thread other([&ends] {
        std::mt19937 random(1);
        while (!ends) job(random);
    });
    for (int number = 0; number < 20; ++number) {
        const pid_t child = fork();
        if (!child) {
            jobs(100, number);
            std::exit(0);  // which ends helpers too
        }
        int status = 0;
        waitpid(child, &status, 0);
        expect(status == 0, "a child failed");
    }
    ends = true;
    other.join();
}

#ifdef REFUSES_THREADS
bool refuses = true;

// A system that makes no thread at first.
void refused() {
    const auto main = std::this_thread::get_id();
    int jobs = 0;
    for (; jobs < 3; ++jobs) {
        on_threads(2, 2, [main](Tasks& tasks) {
            while (tasks.next() >= 0) expect(std::this_thread::get_id() == main, "a helper that was refused");
        });
    }
    refuses = false;
    for (std::atomic<bool> helped{false}; !helped; ++jobs) {
        expect(jobs < 100'000, "no thread was asked for again");
        on_threads(2, 64, [main, &helped](Tasks& tasks) {
            while (tasks.next() >= 0) {
                if (std::this_thread::get_id() != main) helped = true;
                else std::this_thread::yield();
            }
        });
    }
    expect(jobs > 1000, "a system that refuses was asked with every job");
}
#endif

}  // namespace

#ifdef REFUSES_THREADS
extern "C" int __real_pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
extern "C" int __wrap_pthread_create(pthread_t* made, const pthread_attr_t* how, void* (*run)(void*), void* argument) {
    return refuses ? EAGAIN : __real_pthread_create(made, how, run, argument);
}
#endif

int main(int count, char** arguments) {
    const char* name = count > 1 ? arguments[1] : "";
    if (!std::strcmp(name, "several_callers")) several_callers();
    else if (!std::strcmp(name, "held_up")) held_up();
    else if (!std::strcmp(name, "slept")) slept();
    else if (!std::strcmp(name, "rounded")) rounded();
    else if (!std::strcmp(name, "forked")) forked();
#ifdef REFUSES_THREADS
    else if (!std::strcmp(name, "refused")) refused();
#endif
    else expect(false, "no such case");
}
