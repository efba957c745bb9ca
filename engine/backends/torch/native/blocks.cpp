// A step of a model in one call, from ids of tokens to logits: between two products nothing is left to Python, and what
// blocks hand on lies in the same memory for each of them.

#include "attention_call.h"
#include "linear.h"

namespace ericllm {

// A product as the kernels have it, and with what. `Linear` of native/stack.py has the same fields.
struct Linear {
    void (*product)(int32_t, const Layer*, const void*, int64_t, int64_t, void*, const void*);
    const Layer* layer;
};

// Attention and a gated MLP. `Block` of native/stack.py has the same fields.
struct Block {
    Linear qkv, o, gated, down;
    const attention::Layer* attention;
    int64_t rotary;  // number of what turns its heads; -1: nothing does
};

// What turns heads, by position: parts of kAngleRows positions, each [kAngleRows][turned] of the cosines of half of the
// angles, then their sines. `Rotary` of native/stack.py has the same fields.
struct Rotary {
    const float* const* parts;
    int64_t turned;
};

constexpr int64_t kAngleRows = 256;

// The states of tokens before the first block: rows of a table, or of a weight in the codes of a GGUF file, times `scale`.
// `Embedding` of native/stack.py has the same fields.
struct Embedding {
    const char* table;  // [ids][size]; or null
    bool (*look_up)(int32_t, const Layer*, const int64_t*, int64_t, void*);
    const Layer* coded;
    int64_t ids;
    int64_t size;
    float scale;
};

// `Model` of native/stack.py has the same fields.
struct Model {
    Embedding embedding;
    const Block* blocks;
    int64_t num_blocks;
    const Rotary* rotaries;
    int64_t num_rotaries;
    int64_t width;    // elements of a row that a block works in: what goes into its attention and comes out, or into `down`
    Linear head;      // after the last norm, to float32
    int32_t floats;   // states are float32, or else bfloat16
};

namespace {

// Rows of `bytes` each, as `taken` names them.
void take(const char* from, int64_t bytes, const int64_t* taken, int64_t rows, char* to) {
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(to + r * bytes, from + taken[r] * bytes, static_cast<size_t>(bytes));
}

void scale_all(float* values, int64_t count, float scale) {
    for (int64_t n = 0; n < count; ++n) values[n] *= scale;
}

void scale_all(Bfloat16* values, int64_t count, float scale) {
    for (int64_t n = 0; n < count; ++n) values[n] = to_bfloat16(to_float(values[n]) * scale);
}

// False where an id is not in the table.
bool embed(int32_t threads, const Embedding& embedding, const int64_t* ids, int64_t rows, int64_t bytes, char* hidden) {
    if (!embedding.table) return embedding.look_up(threads, embedding.coded, ids, rows, hidden);
    for (int64_t r = 0; r < rows; ++r)
        if (ids[r] < 0 || ids[r] >= embedding.ids) return false;
    take(embedding.table, embedding.size * bytes, ids, rows, hidden);
    return true;
}

// Cosines, then sines of all rows of a step, as attention has them: see Rows in attention_call.h.
void lay_angles(const Rotary& rotary, const attention::Step& step, int64_t rows, float* to) {
    const int64_t turned = rotary.turned, half = turned / 2;
    const size_t bytes = static_cast<size_t>(half) * sizeof(float);
    for (int64_t c = 0; c < step.count; ++c) {
        const attention::Chunk& chunk = step.chunks[c];
        for (int64_t r = 0; r < chunk.rows; ++r) {
            const int64_t position = chunk.start + r;
            const float* from = rotary.parts[position / kAngleRows] + position % kAngleRows * turned;
            float *cosines = to + (chunk.row + r) * turned, *sines = cosines + rows * turned;
            std::memcpy(cosines, from, bytes);
            std::memcpy(cosines + half, from, bytes);
            for (int64_t i = 0; i < half; ++i) sines[i] = -from[half + i];
            std::memcpy(sines + half, from + half, bytes);
        }
    }
}

}  // namespace
}  // namespace ericllm

extern "C" {

void ericllm_attention(int32_t threads, const ericllm::attention::Layer* layer,
                       const ericllm::attention::Step* step, const void* fused, int64_t stride, const float* cosines,
                       const float* sines, int64_t turned, void* out, int32_t floats);
void ericllm_best_tokens(int32_t threads, const float* logits, int64_t rows, int64_t count, int64_t* ids);

// Compute a step of `rows` tokens; false, with nothing computed, where an id is not one of the embedding.
// taken: the rows of which logits are wanted, in order; not read where all are.
// hidden: where the states [rows, hidden size] come to lie after all blocks, or before the last where fewer are taken.
// memory: `width` elements for each row, and hidden size for each that is taken.
// logits [taken rows, outputs], best [taken rows]: null where they are not wanted.
bool ericllm_step(int32_t threads, const ericllm::Model* model, const ericllm::attention::Step* step,
                  const int64_t* ids, int64_t rows, const int64_t* taken, int64_t taken_rows, char* hidden, char* memory,
                  float* logits, int64_t* best) {
    using namespace ericllm;
    static thread_local Scratch angles_of_rows;
    const int64_t size = model->floats ? sizeof(float) : sizeof(Bfloat16), hidden_size = model->embedding.size;
    if (!embed(threads, model->embedding, ids, rows, size, hidden)) return false;
    if (const float scale = model->embedding.scale; scale != 1.0f) {
        if (model->floats)
            scale_all(reinterpret_cast<float*>(hidden), rows * hidden_size, scale);
        else
            scale_all(reinterpret_cast<Bfloat16*>(hidden), rows * hidden_size, scale);
    }
    int64_t wide = 0;
    for (int64_t n = 0; n < model->num_rotaries; ++n) wide += 2 * model->rotaries[n].turned;
    float* const angles = angles_of_rows.of<float>(rows * wide);
    for (int64_t n = 0, at = 0; n < model->num_rotaries; at += 2 * model->rotaries[n++].turned)
        lay_angles(model->rotaries[n], *step, rows, angles + rows * at);
    const auto multiply = [&](const Linear& by_what, const void* x, void* out, const void* residual) {
        by_what.product(threads, by_what.layer, x, by_what.layer->inputs, rows, out, residual);
    };
    const Block* const end = model->blocks + model->num_blocks;
    for (const Block* block = model->blocks; block < end; ++block) {
        const int64_t fused_width = block->qkv.layer->outputs;
        char *fused = memory, *attended = memory + rows * fused_width * size, *inner = memory;  // when the heads are done with
        const float *cosines = nullptr, *sines = nullptr;
        int64_t turned = 0;
        if (block->rotary >= 0) {
            cosines = angles;
            for (int64_t n = 0; n < block->rotary; ++n) cosines += 2 * rows * model->rotaries[n].turned;
            turned = model->rotaries[block->rotary].turned, sines = cosines + rows * turned;
        }
        multiply(block->qkv, hidden, fused, nullptr);
        ericllm_attention(threads, block->attention, step, fused, fused_width, cosines, sines, turned, attended,
                          model->floats);
        if (taken_rows < rows && block + 1 == end) {
            char* const states = memory + rows * model->width * size;
            take(attended, block->o.layer->inputs * size, taken, taken_rows, fused);
            take(hidden, hidden_size * size, taken, taken_rows, states);
            attended = fused, hidden = states, rows = taken_rows;
        }
        multiply(block->o, attended, hidden, hidden);
        multiply(block->gated, hidden, inner, nullptr);
        multiply(block->down, inner, hidden, hidden);
    }
    if (logits) multiply(model->head, hidden, logits, nullptr);
    if (best) ericllm_best_tokens(threads, logits, rows, model->head.layer->outputs, best);
    return true;
}

}  // extern "C"
