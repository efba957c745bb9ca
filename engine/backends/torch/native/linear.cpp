// Weights of bfloat16, in pairs of inputs: [outputs/16][inputs/2][16][2], padded with zeros to 16 outputs and 32 inputs.
// A tile reads them once and in order, 64 bytes at a time; an output is one accumulator to which its inputs are added in
// their order.

#include "linear.h"

using namespace ericllm;

namespace {

constexpr int64_t kPrefetchBytes = 4096;

// The least stride, 2 KiB, by which rows of x crowd the same few sets of the first-level cache.
constexpr int64_t kCrowdingStride = 1024;

int64_t block_stride(int64_t inputs) { return round_up(inputs, kPadInputs) / 2 * kBlock; }  // in pairs

inline uint32_t pair_at(const char* x, int64_t p) {
    uint32_t pair;
    std::memcpy(&pair, x + 4 * p, sizeof pair);
    return pair;
}

inline void prefetch(const uint32_t* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + kPrefetchBytes, _MM_HINT_T0);
}

#if defined(ERICLLM_AVX512_BF16)

constexpr int64_t kTileRows = 12;  // x 2 blocks: 24 of 32 registers accumulate
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }

// R rows times C blocks from `weight` on.
template <int R, int C>
void tile(const char* x, int64_t x_stride, const uint32_t* weight, int64_t stride, int64_t pairs, float* sums) {
    __m512 sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
        __m512bh w[C];
        for (int c = 0; c < C; ++c) {
            const uint32_t* from = weight + c * stride + p * kBlock;
            prefetch(from);
            w[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
        }
        for (int r = 0; r < R; ++r) {
            const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair_at(x + r * x_stride, p))));
            for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], w[c], a);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * kMaxStep * kBlock + c * kBlock, sum[r][c]);
}

#else  // AVX2 and FMA

constexpr int64_t kTileRows = 4;  // 8 of 16 registers accumulate
constexpr int64_t blocks_for(int64_t) { return 1; }

inline __m256 first_of(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_of(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}

template <int R, int C>
void tile(const char* x, int64_t x_stride, const uint32_t* weight, int64_t, int64_t pairs, float* sums) {
    static_assert(C == 1, "two registers a block: more blocks would leave too few");
    __m256 sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t p = 0; p < pairs; ++p) {
        const uint32_t* from = weight + p * kBlock;
        prefetch(from);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kBlock / 2));
        for (int r = 0; r < R; ++r) {
            const __m256i a = _mm256_set1_epi32(static_cast<int>(pair_at(x + r * x_stride, p)));
            const __m256 first = first_of(a), second = second_of(a);
            sum[r][0] = _mm256_fmadd_ps(second_of(low), second, _mm256_fmadd_ps(first_of(low), first, sum[r][0]));
            sum[r][1] = _mm256_fmadd_ps(second_of(high), second, _mm256_fmadd_ps(first_of(high), first, sum[r][1]));
        }
    }
    for (int r = 0; r < R; ++r) {
        _mm256_store_ps(sums + r * kMaxStep * kBlock, sum[r][0]);
        _mm256_store_ps(sums + r * kMaxStep * kBlock + kBlock / 2, sum[r][1]);
    }
}

#endif

template <int C, int R = kTileRows>
void tile_of(int64_t rows, const char* x, int64_t x_stride, const uint32_t* weight, int64_t stride, int64_t pairs,
             float* sums) {
    if constexpr (C <= blocks_for(R)) {
        if (rows == R) return tile<R, C>(x, x_stride, weight, stride, pairs, sums);
    }
    if constexpr (R > 1) tile_of<C, R - 1>(rows, x, x_stride, weight, stride, pairs, sums);
}

struct Bfloat16Kernel {
    using Value = Bfloat16;
    static constexpr int64_t kRows = kTileRows;

    static int64_t step(int64_t rows) { return blocks_for(rows); }
    static int64_t panel_stride(const Layer& l) { return (round_up(l.inputs, 32) + 32) * 2; }  // spreads over the cache

    static bool reads(const Call& call) {
        return call.layer.inputs % 2 == 0 && (call.rows <= 4 || call.x_stride % kCrowdingStride);
    }

    static void lay(const Layer& l, const Bfloat16* row, char* to) {
        std::memcpy(to, row, static_cast<size_t>(l.inputs) * sizeof *row);
        std::memset(to + l.inputs * 2, 0, static_cast<size_t>(round_up(l.inputs, kPadInputs) - l.inputs) * sizeof *row);
    }

    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         float* sums) {
        const int64_t stride = block_stride(l.inputs), pairs = divide_up(l.inputs, 2);
        const uint32_t* weight = static_cast<const uint32_t*>(l.weight) + block * stride;
        const int64_t wide = blocks_for(rows);
        for (int64_t b = 0; b < blocks;) {
            const int64_t c = blocks - b >= wide ? wide : blocks - b >= 2 && wide > 2 ? 2 : 1;
            const uint32_t* from = weight + b * stride;
            float* to = sums + b * kBlock;
            if (c == 4)
                tile_of<4>(rows, x, x_stride, from, stride, pairs, to);
            else if (c == 2)
                tile_of<2>(rows, x, x_stride, from, stride, pairs, to);
            else
                tile_of<1>(rows, x, x_stride, from, stride, pairs, to);
            b += c;
        }
    }
};

}  // namespace

extern "C" {

// Lay out `weight` [outputs, inputs] with rows `stride` apart as the products below read it.
void ericllm_pack(const uint16_t* weight, int64_t stride, int64_t outputs, int64_t inputs, uint16_t* packed) {
    Layer l{};
    l.inputs = inputs, l.outputs = outputs;
    std::memset(packed, 0, static_cast<size_t>(l.blocks() * block_stride(inputs) * 2) * sizeof *packed);
    for (int64_t block = 0; block < l.blocks(); ++block) {
        uint16_t* to = packed + block * block_stride(inputs) * 2;
        for (int64_t n = 0; n < l.count(block); ++n) {
            const uint16_t* from = weight + (l.first(block) + n) * stride;
            for (int64_t k = 0; k < inputs; ++k) to[(k / 2 * kBlock + n) * 2 + k % 2] = from[k];
        }
    }
}

// The product, on at most `threads` threads.
void ericllm_linear(const Threads* by, int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                    int64_t rows, void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
    Product<Bfloat16Kernel>(call).run(*by, threads);
}

}  // extern "C"
