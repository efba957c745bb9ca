// Weights of bfloat16, in pairs of inputs: [outputs/16][inputs/2][16][2], padded with zeros to 16 outputs and 32 inputs.
// A tile reads them once and in order. 32 inputs of a block, 1 KiB, are what AMX takes as a tile.

#pragma once

#include "linear.h"

namespace ericllm {

inline int64_t block_pairs(int64_t inputs) { return round_up(inputs, kPadInputs) / 2 * kBlock; }

// Rows of x as they are, with zeros up to 32 inputs.
struct PairPanel {
    static int64_t panel_stride(const Layer& l) { return (round_up(l.inputs, 32) + 32) * 2; }  // spreads over the cache

    static bool crowds(const Call& call) { return call.rows > 4 && call.x_stride * 2 % kCrowdingBytes == 0; }

    static void lay(const Layer& l, const Bfloat16* row, char* panel, int64_t r) {
        char* to = panel + r * panel_stride(l);
        std::memcpy(to, row, static_cast<size_t>(l.inputs) * sizeof *row);
        std::memset(to + l.inputs * 2, 0, static_cast<size_t>(round_up(l.inputs, kPadInputs) - l.inputs) * sizeof *row);
    }
};

// Rows of x as floats.
struct FloatPanel {
    static int64_t panel_stride(const Layer& l) { return (round_up(l.inputs, 16) + 16) * 4; }

    static void lay(const Layer& l, const Bfloat16* row, char* panel, int64_t r) {
        auto* floats = reinterpret_cast<float*>(panel + r * panel_stride(l));
        for (int64_t k = 0; k < l.inputs; k += kLanes)
            store(floats + k, load_some(row + k, std::min(kLanes, l.inputs - k)));
    }
};

}  // namespace ericllm
