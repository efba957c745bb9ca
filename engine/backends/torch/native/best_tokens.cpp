// The likeliest token of each row of logits.

#include "common.h"
#include "vector.h"

using namespace ericllm;

namespace {

constexpr int64_t kStretch = 1024;  // logits whose highest is found before it is known which it is

float highest_of(const float* logits, int64_t count) {
    Floats found = all(-INFINITY);
    for (int64_t n = 0; n + kLanes <= count; n += kLanes) found = most(load(logits + n), found);
    float best = highest(found);
    for (int64_t n = count / kLanes * kLanes; n < count; ++n) best = std::max(best, logits[n]);
    return best;
}

// Whether one is NaN, which comparisons pass over.
bool any_nan(const float* logits, int64_t count) {
    uint32_t found = 0;
    for (int64_t n = 0; n < count; ++n) {
        uint32_t bits;
        std::memcpy(&bits, logits + n, sizeof bits);
        found |= (bits & 0x7fffffffu) > 0x7f800000u;
    }
    return found != 0;
}

// The first of the highest; -1 where that is not finite, or there is a NaN.
int64_t best_of(const float* logits, int64_t count) {
    float best = -INFINITY;
    int64_t first = 0;
    for (int64_t n = 0; n < count; n += kStretch) {
        const int64_t size = std::min(kStretch, count - n);
        if (any_nan(logits + n, size)) return -1;
        const float here = highest_of(logits + n, size);
        if (here > best) best = here, first = n;
    }
    if (!std::isfinite(best)) return -1;
    while (logits[first] != best) ++first;
    return first;
}

}  // namespace

extern "C" {

// Put the id of the highest of each of `rows` rows of logits [rows, count] into `ids`, the lowest among equals; -1 where
// that is not finite, or a logit is NaN.
void ericllm_best_tokens(int32_t threads, const float* logits, int64_t rows, int64_t count, int64_t* ids) {
    on_threads(threads, rows, [&](Tasks& tasks) {
        for (int64_t row; (row = tasks.next()) >= 0;) ids[row] = best_of(logits + row * count, count);
    });
}

}  // extern "C"
