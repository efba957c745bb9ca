// From the rows of a weight to where products look for them: blocks of 16 outputs side by side.

#pragma once

#include "linear.h"

namespace ericllm {

// Some of a weight's rows. `Part` of rows.py has the same fields.
struct Part {
    const void* rows;
    int64_t count;
    int64_t stride;  // elements from one row to the next
};

// Rows that lie in parts, those of the next one after those of the one before.
template <class Value>
const Value* row_of(const Part* part, int64_t n) {
    for (; n >= part->count; ++part) n -= part->count;
    return static_cast<const Value*>(part->rows) + n * part->stride;
}

constexpr int64_t kUnit = 4;  // bytes that stay together

// Transpose the units of 16 rows, of a given size in bytes: to[u][n] is the u-th of row n. Zeros where there is none.
inline void lay_out(const char* const* rows, int64_t count, int64_t bytes, int64_t units, uint32_t* to) {
    const int64_t whole = bytes / kUnit;
    if (count < kBlock || whole < units) std::memset(to, 0, static_cast<size_t>(units * kBlock * kUnit));
    for (int64_t first = 0; first < whole; first += kBlock) {  // few enough that all their lines stay near
        const int64_t end = std::min(whole, first + kBlock);
        for (int64_t n = 0; n < count; ++n)
            for (int64_t u = first; u < end; ++u) std::memcpy(to + u * kBlock + n, rows[n] + u * kUnit, kUnit);
    }
    for (int64_t n = 0; n < count && bytes % kUnit; ++n)
        std::memcpy(to + whole * kBlock + n, rows[n] + whole * kUnit, static_cast<size_t>(bytes % kUnit));
}

// Lay out a weight of Values in blocks of `units`.
template <class Value>
void pack(int threads, const Layer& l, const Part* parts, int64_t units, void* packed) {
    on_threads(threads, l.blocks(), [&](Tasks& tasks) {
        for (int64_t block; (block = tasks.next()) >= 0;) {
            const char* rows[kBlock];
            const int64_t count = l.count(block);
            for (int64_t n = 0; n < count; ++n)
                rows[n] = reinterpret_cast<const char*>(row_of<Value>(parts, l.first(block) + n));
            auto* to = static_cast<uint32_t*>(packed) + block * units * kBlock;
            lay_out(rows, count, l.inputs * static_cast<int64_t>(sizeof(Value)), units, to);
        }
    });
}

}  // namespace ericllm
