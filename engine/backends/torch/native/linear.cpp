// out = x @ weight.T + bias, for bfloat16 x and weight, accumulated in float32.
//
// A weight [N, K] lies as [N/16][K/2][16][2]: for each block of 16 outputs, pair after pair of inputs, so that a tile
// reads it once and in order, 64 bytes at a time. N is padded with zeros to 16, K to 32.
//
// Every output is one accumulator to which the inputs are added in their order, whatever the number of rows, of
// threads, and the tile that it falls into. So neither threads nor the rest of the batch change an answer.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int64_t kBlock = 16;              // outputs side by side
constexpr int64_t kPadInputs = 32;
constexpr int64_t kPanelBytes = 256 << 10;  // of x: half of a usual second-level cache
constexpr int64_t kPrefetchBytes = 4096;

// The least inputs (a stride of 2 KiB) by which rows of x crowd the same few sets of the first-level cache.
constexpr int64_t kCrowdingStride = 1024;

struct Bfloat16 {
    uint16_t bits;
};

struct Linear {
    const Bfloat16* x;
    int64_t x_stride;
    int64_t rows;
    int64_t inputs;
    const uint32_t* weight;
    int64_t outputs;
    const Bfloat16* bias;  // or null
    void* out;             // [rows, outputs], float or Bfloat16
    bool out_is_float;

    int64_t pairs() const { return (inputs + 1) / 2; }
    int64_t blocks() const { return (outputs + kBlock - 1) / kBlock; }
    int64_t block_stride() const { return (inputs + kPadInputs - 1) / kPadInputs * kPadInputs / 2 * kBlock; }
};

inline uint32_t pair_at(const Bfloat16* address) {
    uint32_t pair;
    std::memcpy(&pair, address, sizeof pair);
    return pair;
}

#if defined(ERICLLM_AVX512_BF16)

constexpr int kMaxRows = 12;  // x 2 blocks: 24 of 32 registers accumulate
constexpr int kMaxBlocks = 4;
constexpr int blocks_for(int rows) { return rows <= 6 ? 4 : 2; }

// Rows [0, R) from `x` on times C blocks from `block` on, into rows of `out` from `row` on.
template <int R, int C>
void tile(const Linear& l, const Bfloat16* x, int64_t x_stride, int64_t row, int64_t block) {
    const uint32_t* weight = l.weight + block * l.block_stride();
    const int64_t stride = l.block_stride(), pairs = l.pairs();
    __m512 sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
        __m512bh w[C];
        for (int c = 0; c < C; ++c) {
            const uint32_t* from = weight + c * stride + p * kBlock;
            _mm_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes, _MM_HINT_T0);
            w[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
        }
        for (int r = 0; r < R; ++r) {
            const auto a = reinterpret_cast<__m512bh>(
                _mm512_set1_epi32(static_cast<int>(pair_at(x + r * x_stride + 2 * p))));
            for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], w[c], a);
        }
    }
    for (int c = 0; c < C; ++c) {
        const int64_t first = (block + c) * kBlock;
        const auto mask = static_cast<__mmask16>(0xffffu >> (kBlock - std::min(kBlock, l.outputs - first)));
        __m512 bias = _mm512_setzero_ps();
        if (l.bias) {
            const __m256i bits = _mm256_maskz_loadu_epi16(mask, l.bias + first);
            bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        }
        for (int r = 0; r < R; ++r) {
            const __m512 value = _mm512_add_ps(sum[r][c], bias);
            const int64_t at = (row + r) * l.outputs + first;
            if (l.out_is_float) {
                _mm512_mask_storeu_ps(static_cast<float*>(l.out) + at, mask, value);
            } else {
                const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value));
                _mm256_mask_storeu_epi16(static_cast<Bfloat16*>(l.out) + at, mask, rounded);
            }
        }
    }
}

#else  // AVX2 and FMA

constexpr int kMaxRows = 4;  // 8 of 16 registers accumulate
constexpr int kMaxBlocks = 1;
constexpr int blocks_for(int) { return 1; }

inline __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

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

template <int R, int C>
void tile(const Linear& l, const Bfloat16* x, int64_t x_stride, int64_t row, int64_t block) {
    static_assert(C == 1, "two registers a block: more blocks would leave too few");
    const uint32_t* weight = l.weight + block * l.block_stride();
    const int64_t pairs = l.pairs();
    __m256 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
        const uint32_t* from = weight + p * kBlock;
        _mm_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes, _MM_HINT_T0);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kBlock / 2));
        for (int r = 0; r < R; ++r) {
            const __m256i a = _mm256_set1_epi32(static_cast<int>(pair_at(x + r * x_stride + 2 * p)));
            const __m256 first = first_of(a), second = second_of(a);
            sum[r][0] = _mm256_fmadd_ps(second_of(low), second, _mm256_fmadd_ps(first_of(low), first, sum[r][0]));
            sum[r][1] = _mm256_fmadd_ps(second_of(high), second, _mm256_fmadd_ps(first_of(high), first, sum[r][1]));
        }
    }
    const int64_t first = block * kBlock, count = std::min(kBlock, l.outputs - first);
    for (int r = 0; r < R; ++r) {
        float values[kBlock];
        _mm256_storeu_ps(values, sum[r][0]);
        _mm256_storeu_ps(values + kBlock / 2, sum[r][1]);
        const int64_t at = (row + r) * l.outputs + first;
        for (int64_t n = 0; n < count; ++n) {
            const float value = values[n] + (l.bias ? to_float(l.bias[first + n]) : 0.0f);
            if (l.out_is_float)
                static_cast<float*>(l.out)[at + n] = value;
            else
                static_cast<Bfloat16*>(l.out)[at + n] = to_bfloat16(value);
        }
    }
}

#endif

template <int C, int R = kMaxRows>
void tile_of(int rows, const Linear& l, const Bfloat16* x, int64_t x_stride, int64_t row, int64_t block) {
    if constexpr (C <= blocks_for(R)) {
        if (rows == R) return tile<R, C>(l, x, x_stride, row, block);
    }
    if constexpr (R > 1) tile_of<C, R - 1>(rows, l, x, x_stride, row, block);
}

// A copy of some rows of x whose stride spreads over the cache and that ends in a zero where the inputs are odd.
class Panel {
  public:
    ~Panel() { std::free(memory_); }

    const Bfloat16* copy(const Linear& l, int64_t row, int64_t rows, int64_t stride) {
        const size_t needed = static_cast<size_t>(rows * stride) * sizeof(Bfloat16);
        if (needed > size_) {
            std::free(memory_);
            memory_ = static_cast<Bfloat16*>(std::malloc(needed));
            size_ = memory_ ? needed : 0;
            if (!memory_) std::abort();
        }
        for (int64_t r = 0; r < rows; ++r) {
            std::memcpy(memory_ + r * stride, l.x + (row + r) * l.x_stride, l.inputs * sizeof(Bfloat16));
            if (l.inputs % 2) memory_[r * stride + l.inputs] = {0};
        }
        return memory_;
    }

  private:
    Bfloat16* memory_ = nullptr;
    size_t size_ = 0;
};

// What the threads of one product share. A task is one panel of rows times kTaskBlocks blocks of outputs.
struct Job {
    Linear linear;
    int64_t panel_rows;
    int64_t panel_tasks;
    int64_t tasks;
    bool copy;
    std::atomic<int64_t> next{0};
};

constexpr int64_t kTaskBlocks = 4;

void multiply(const Linear& l, const Bfloat16* x, int64_t x_stride, int64_t row, int64_t rows, int64_t block,
              int64_t blocks) {
    const int64_t groups = (rows + kMaxRows - 1) / kMaxRows;
    const int wide = std::min<int>(kMaxBlocks, blocks_for(static_cast<int>((rows + groups - 1) / groups)));
    for (int64_t b = 0; b < blocks;) {
        const int c = blocks - b >= wide ? wide : blocks - b >= 2 && wide > 2 ? 2 : 1;
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t from = rows * g / groups, size = rows * (g + 1) / groups - from;
            const Bfloat16* part = x + from * x_stride;
            const int r = static_cast<int>(size);
            switch (c) {
                case 4:
                    tile_of<4>(r, l, part, x_stride, row + from, block + b);
                    break;
                case 2:
                    tile_of<2>(r, l, part, x_stride, row + from, block + b);
                    break;
                default:
                    tile_of<1>(r, l, part, x_stride, row + from, block + b);
            }
        }
        b += c;
    }
}

void work(void* data) {
    Job& job = *static_cast<Job*>(data);
    const Linear& l = job.linear;
    static thread_local Panel panel;
    const Bfloat16* x = nullptr;
    int64_t stride = l.x_stride, prepared = -1;
    for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.tasks;) {
        const int64_t index = task / job.panel_tasks, block = task % job.panel_tasks * kTaskBlocks;
        const int64_t row = index * job.panel_rows, rows = std::min(job.panel_rows, l.rows - row);
        if (index != prepared) {
            if (job.copy) stride = (l.inputs + 31) / 32 * 32 + 32;
            x = job.copy ? panel.copy(l, row, rows, stride) : l.x + row * l.x_stride;
            prepared = index;
        }
        multiply(l, x, stride, row, rows, block, std::min(kTaskBlocks, l.blocks() - block));
    }
}

}  // namespace

extern "C" {

// GOMP_parallel of the OpenMP runtime that torch computes with: its threads are ours, so the two never compete.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Elements of a packed weight.
int64_t ericllm_packed_elements(int64_t outputs, int64_t inputs) {
    const Linear l{nullptr, 0, 0, inputs, nullptr, outputs, nullptr, nullptr, false};
    return l.blocks() * l.block_stride() * 2;
}

// Lay out `weight` [outputs, inputs] with rows `stride` apart as the products below read it.
void ericllm_pack(const uint16_t* weight, int64_t stride, int64_t outputs, int64_t inputs, uint16_t* packed) {
    const Linear l{nullptr, 0, 0, inputs, nullptr, outputs, nullptr, nullptr, false};
    std::memset(packed, 0, static_cast<size_t>(l.blocks() * l.block_stride() * 2) * sizeof *packed);
    for (int64_t block = 0; block < l.blocks(); ++block) {
        uint16_t* to = packed + block * l.block_stride() * 2;
        const int64_t count = std::min(kBlock, outputs - block * kBlock);
        for (int64_t n = 0; n < count; ++n) {
            const uint16_t* from = weight + (block * kBlock + n) * stride;
            for (int64_t k = 0; k < inputs; ++k) to[(k / 2 * kBlock + n) * 2 + k % 2] = from[k];
        }
    }
}

// The product, on at most `threads` threads; on the caller's alone where `parallel` is null.
void ericllm_linear(Parallel parallel, unsigned threads, const uint16_t* x, int64_t x_stride, int64_t rows,
                    int64_t inputs, const uint16_t* weight, int64_t outputs, const uint16_t* bias, void* out,
                    int32_t out_is_float) {
    Job job;
    job.linear = {reinterpret_cast<const Bfloat16*>(x), x_stride,
                  rows,   inputs,
                  reinterpret_cast<const uint32_t*>(weight), outputs,
                  reinterpret_cast<const Bfloat16*>(bias),   out,
                  out_is_float != 0};
    const Linear& l = job.linear;
    const int64_t fitting = kPanelBytes / (l.inputs * 2 + 1) / kMaxRows * kMaxRows;
    job.panel_rows = std::max<int64_t>(std::min(fitting, int64_t{16 * kMaxRows}), 4 * kMaxRows);
    if (rows < 2 * job.panel_rows) job.panel_rows = std::max<int64_t>(1, rows);
    job.panel_tasks = (l.blocks() + kTaskBlocks - 1) / kTaskBlocks;
    job.tasks = (rows + job.panel_rows - 1) / job.panel_rows * job.panel_tasks;
    job.copy = inputs % 2 || (rows > 4 && x_stride % kCrowdingStride == 0);
    if (parallel && threads > 1 && job.tasks > 1)
        parallel(work, &job, static_cast<unsigned>(std::min<int64_t>(threads, job.tasks)), 0);
    else
        work(&job);
}

}  // extern "C"
