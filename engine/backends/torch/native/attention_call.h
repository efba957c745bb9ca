// Arguments of attention over pages: a layer, a step, and the rows of the step in that layer.

#pragma once

#include "common.h"

namespace ericllm::attention {

// What stays the same for a layer. `Layer` of native/attention.py has the same fields.
struct Layer {
    char* pages;
    const float* norm;  // [heads + kv_heads, head_dim], of an RMS norm of each head; or null
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t page_tokens;
    int64_t window;      // keys that a query sees at most; 0: all
    int64_t head_bytes;  // that a key or value head takes in a page
    int64_t bits;        // of its numbers; 8 and 4: they are codes, see attention_codes.h
    int64_t spread;      // adjacent numbers that a Hadamard turn spreads before they become codes
    int64_t group;       // adjacent codes that share a scale
    float epsilon;
    float scale;
    float cap;  // 0: none
};

// Adjacent rows that are tokens of one sequence, from position `start` on.
struct Chunk {
    int32_t row;
    int32_t rows;
    int32_t start;
    int32_t pages;  // where its page numbers begin
};

// A step. `Step` of native/attention.py has the same fields.
struct Step {
    const Chunk* chunks;
    int64_t count;
    const int32_t* pages;
};

// The rows of a step in a layer.
struct Rows {
    const void* fused;     // [rows][heads + 2 * kv_heads, head_dim]
    int64_t stride;        // from one row to the next
    const float* cosines;  // [rows][turned] of angles, those of half of them twice; or null
    const float* sines;    // the same of their sines, the first half negated
    int64_t turned;        // first elements of a head that are turned, each half against the other
    void* out;             // [rows][heads * head_dim] without gaps
};

inline int64_t first_key(const Layer& l, int64_t position) {
    return l.window ? std::max<int64_t>(0, position - l.window + 1) : 0;
}

}  // namespace ericllm::attention
