// Blocks of attention and a gated MLP, one after another in one call: between two products nothing is left to Python, and
// what they hand on lies in the same memory for every block.

#include "linear.h"

namespace ericllm {
namespace attention {
struct Layer;
struct Step;
}  // namespace attention

// A product as the kernels have it, and with what. `Linear` of native/stack.py has the same fields.
struct Linear {
    void (*product)(int32_t, const Layer*, const void*, int64_t, int64_t, void*, const void*);
    const Layer* layer;
};

// `Block` of native/stack.py has the same fields.
struct Block {
    Linear qkv, o, gated, down;
    const attention::Layer* attention;
    int64_t angles;  // number of what turns its heads; -1: nothing does
};

// What turns the heads of rows: see Rows in attention_call.h. `Angles` of native/stack.py has the same fields.
struct Angles {
    const float* cosines;
    const float* sines;
    int64_t turned;
};

// Rows of `bytes` each, as `taken` names them.
inline void take(const char* from, int64_t bytes, const int64_t* taken, int64_t rows, char* to) {
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(to + r * bytes, from + taken[r] * bytes, static_cast<size_t>(bytes));
}

}  // namespace ericllm

extern "C" {

void ericllm_attention(int32_t threads, const ericllm::attention::Layer* layer,
                       const ericllm::attention::Step* step, const void* fused, int64_t stride, const float* cosines,
                       const float* sines, int64_t turned, void* out, int32_t floats);

// Take `hidden` [rows, hidden size] through `count` blocks, in its place. All of it is float32, or else bfloat16.
// memory: for each row, as many elements as go into a block's attention and come out of it, or go into `down`.
// taken: the rows whose states are wanted at the end, which come to lie in `out`; null where all are, in their place.
void ericllm_blocks(int32_t threads, const ericllm::Block* blocks, int64_t count,
                    const ericllm::attention::Step* step, const ericllm::Angles* angles, char* hidden, int64_t rows,
                    char* memory, int32_t floats, const int64_t* taken, int64_t taken_rows, char* out) {
    using namespace ericllm;
    const int64_t size = floats ? sizeof(float) : sizeof(Bfloat16);
    for (const Block* block = blocks; block < blocks + count; ++block) {
        const auto multiply = [&](const Linear& by_what, const void* x, void* out, const void* residual) {
            by_what.product(threads, by_what.layer, x, by_what.layer->inputs, rows, out, residual);
        };
        const int64_t width = block->qkv.layer->outputs;
        char *fused = memory, *attended = memory + rows * width * size, *inner = memory;  // when the heads are done with
        const Angles turns = block->angles < 0 ? Angles{} : angles[block->angles];
        multiply(block->qkv, hidden, fused, nullptr);
        ericllm_attention(threads, block->attention, step, fused, width, turns.cosines, turns.sines,
                          turns.turned, attended, floats);
        if (taken && block + 1 == blocks + count) {
            take(attended, block->o.layer->inputs * size, taken, taken_rows, fused);
            take(hidden, block->o.layer->outputs * size, taken, taken_rows, out);
            attended = fused, hidden = out, rows = taken_rows;
        }
        multiply(block->o, attended, hidden, hidden);
        multiply(block->gated, hidden, inner, nullptr);
        multiply(block->down, inner, hidden, hidden);
    }
}

}  // extern "C"
