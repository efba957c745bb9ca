// A job's tasks on the caller's thread and on helpers of its own: threads that are made once and wait for jobs.
//
// Tasks are claimed, not assigned: a helper that comes late finds nothing left, and a caller waits for tasks, never for a
// thread that has none. So the caller alone can do all of a job while helpers are not let onto a core.

#pragma once

#include <cstdint>

namespace ericllm {

constexpr int kMaxThreads = 256;

// The tasks 0, 1, ... of a job, as one of its threads takes them: adjacent ones in order, then those that others left.
class Tasks {
  public:
    // All of them, for the caller alone.
    explicit Tasks(int64_t count) : count_(count) {}
    // Those of a job on `threads` threads, for the one of number `me`.
    Tasks(uint32_t job, int me, int threads, int64_t count)
        : shared_(true), job_(job), me_(me), threads_(threads), count_(count) {}

    // Take the next task; -1 once all are taken. The one before is done with: what it was computed from may be gone.
    int64_t next();

    // The task that `next` will most likely give; -1 if none is left.
    int64_t likely() const;

    // Take the first task, ahead of the first `next`, which then gives it; false if none is left.
    bool begin();

  private:
    int64_t first(int run) const { return count_ * run / threads_; }
    int run_at(int turn) const { return me_ + turn < threads_ ? me_ + turn : me_ + turn - threads_; }
    int64_t claim();

    bool shared_ = false;
    uint32_t job_ = 0;
    int me_ = 0, threads_ = 1;
    int64_t count_;
    int64_t alone_ = 0;   // tasks that were taken, where the caller is alone
    int64_t begun_ = -1;  // taken by `begin`
    bool holds_ = false;  // a task that is not done with
};

using Work = void (*)(const void* data, Tasks& tasks);

// Have up to `threads` threads call work(data, tasks), the caller's among them; return once all tasks are done. False, and
// nothing is done, while another thread has a job here.
bool share_tasks(int threads, int64_t count, Work work, const void* data);

// Call work(tasks) on at most `threads` threads, each of which takes tasks until it gets -1.
template <class Each>
void on_threads(int threads, int64_t count, const Each& work) {
    if (count <= 0) return;
    const auto call = [](const void* data, Tasks& tasks) { (*static_cast<const Each*>(data))(tasks); };
    if (threads > 1 && count > 1 && share_tasks(threads, count, call, &work)) return;
    Tasks alone(count);
    work(alone);
}

}  // namespace ericllm
