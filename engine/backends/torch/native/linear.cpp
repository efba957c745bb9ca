// Products with weights of bfloat16. An output is one accumulator to which its inputs are added in their order.

#include "bfloat16.h"

#if defined(ERICLLM_AMX)
#include <sys/syscall.h>
#include <unistd.h>

#include "amx.h"
#endif

using namespace ericllm;

namespace {

#if defined(ERICLLM_AMX)

using Bfloat16Kernel = AmxKernel;

#else

#if defined(__AVX512BF16__)

using Panel = PairPanel;
constexpr bool reads_rows(const Call& call) { return call.layer.inputs % 2 == 0 && !PairPanel::crowds(call); }

inline uint32_t pair_at(const char* x, int64_t p) {
    uint32_t pair;
    std::memcpy(&pair, x + 4 * p, sizeof pair);
    return pair;
}

constexpr int64_t kTileRows = 12;  // x 2 blocks: 24 of 32 registers accumulate
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }

// R rows times C blocks from `weight` on, each `stride` behind the one before it.
template <int R, int C>
void tile(const char* x, int64_t x_stride, const uint32_t* weight, int64_t stride, int64_t pairs,
          const Ahead& ahead, float* sums) {
    constexpr int64_t kRow = kMaxStep * kBlock;
    __m512 sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = _mm512_setzero_ps();
    const char* next = reinterpret_cast<const char*>(weight) + ahead.bytes;
    for (int64_t p = 0; p < pairs; ++p, next += ahead.step) {
        __m512bh w[C];
        for (int c = 0; c < C; ++c) {
            const uint32_t* from = weight + c * stride + p * kBlock;
            _mm_prefetch(next + c * stride * 4, R <= 8 ? _MM_HINT_T1 : _MM_HINT_T0);
            w[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
        }
        for (int r = 0; r < R; ++r) {
            const auto a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair_at(x + r * x_stride, p))));
            for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], w[c], a);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * kRow + c * kBlock, sum[r][c]);
}

#elif defined(__AVX512F__)

using Panel = FloatPanel;
constexpr bool reads_rows(const Call&) { return false; }

constexpr int64_t kTileRows = 12;  // x 2 blocks: 24 of 32 registers accumulate
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }

// R rows times C blocks from `weight` on, each `stride` behind the one before it. Of a pair, first one half is added and
// then the other: each needs half as many registers as both.
template <int R, int C>
void tile(const char* x, int64_t x_stride, const uint32_t* weight, int64_t stride, int64_t pairs,
          const Ahead& ahead, float* sums) {
    constexpr int64_t kRow = kMaxStep * kBlock;
    Floats sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = all(0.0f);
    const char* next = reinterpret_cast<const char*>(weight) + ahead.bytes;
    const auto add = [&](const Floats (&w)[C], int64_t k) {
        for (int r = 0; r < R; ++r) {
            const Floats a = all(reinterpret_cast<const float*>(x + r * x_stride)[k]);
            for (int c = 0; c < C; ++c) sum[r][c] = fused(w[c], a, sum[r][c]);
        }
    };
    for (int64_t p = 0; p < pairs; ++p, next += ahead.step) {
        Floats w[C];
        for (int c = 0; c < C; ++c) {
            _mm_prefetch(next + c * stride * 4, R <= 8 ? _MM_HINT_T1 : _MM_HINT_T0);
            w[c] = first_of(weight + c * stride + p * kBlock);
        }
        add(w, 2 * p);
        for (int c = 0; c < C; ++c) w[c] = second_of(weight + c * stride + p * kBlock);
        add(w, 2 * p + 1);
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(sums + r * kRow + c * kBlock, sum[r][c]);
}

#else  // AVX2 and FMA

using Panel = FloatPanel;
constexpr bool reads_rows(const Call&) { return false; }

constexpr int64_t kTileRows = 4;  // x 2 registers of one block: 8 of 16
constexpr int64_t blocks_for(int64_t) { return 1; }

inline Floats first_of(const __m256i (&pairs)[2]) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs[0], 16)), _mm256_castsi256_ps(_mm256_slli_epi32(pairs[1], 16))};
}
inline Floats second_of(const __m256i (&pairs)[2]) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs[0], mask)), _mm256_castsi256_ps(_mm256_and_si256(pairs[1], mask))};
}

template <int R, int C>
void tile(const char* x, int64_t x_stride, const uint32_t* weight, int64_t, int64_t pairs, const Ahead& ahead, float* sums) {
    static_assert(C == 1, "two registers a block: more blocks would leave too few");
    Floats sum[R];
    for (int r = 0; r < R; ++r) sum[r] = all(0.0f);
    const char* next = reinterpret_cast<const char*>(weight) + ahead.bytes;
    for (int64_t p = 0; p < pairs; ++p, next += ahead.step) {
        const auto* from = reinterpret_cast<const __m256i*>(weight + p * kBlock);
        _mm_prefetch(next, _MM_HINT_T1);
        const __m256i both[2] = {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
        const Floats first = first_of(both), second = second_of(both);
        for (int r = 0; r < R; ++r) {
            const float* a = reinterpret_cast<const float*>(x + r * x_stride) + 2 * p;
            sum[r] = fused(second, all(a[1]), fused(first, all(a[0]), sum[r]));
        }
    }
    for (int r = 0; r < R; ++r) store(sums + r * kMaxStep * kBlock, sum[r]);
}

#endif

template <int C, int R = kTileRows>
void tile_of(int64_t rows, const char* x, int64_t x_stride, const uint32_t* weight, int64_t stride, int64_t pairs,
          const Ahead& ahead,
             float* sums) {
    if constexpr (C <= blocks_for(R)) {
        if (rows == R) return tile<R, C>(x, x_stride, weight, stride, pairs, ahead, sums);
    }
    if constexpr (R > 1) tile_of<C, R - 1>(rows, x, x_stride, weight, stride, pairs, ahead, sums);
}

struct Bfloat16Kernel : Panel {
    using Value = Bfloat16;
    static constexpr int64_t kRows = kTileRows;
    static constexpr int64_t kInputBytes = kBlock * 2;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, blocks_for(rows)); }
    static bool reads(const Call& call) { return reads_rows(call); }

    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         const Ahead& ahead, float* sums) {
        const int64_t stride = block_pairs(l.inputs), pairs = divide_up(l.inputs, 2);
        const uint32_t* weight = static_cast<const uint32_t*>(l.weight) + block * stride;
        const int64_t wide = blocks_for(rows);
        for (int64_t b = 0; b < blocks;) {
            const int64_t c = blocks - b >= wide ? wide : blocks - b >= 2 && wide > 2 ? 2 : 1;
            const uint32_t* from = weight + b * stride;
            float* to = sums + b * kBlock;
            if (c == 4)
                tile_of<4>(rows, x, x_stride, from, stride, pairs, ahead, to);
            else if (c == 2)
                tile_of<2>(rows, x, x_stride, from, stride, pairs, ahead, to);
            else
                tile_of<1>(rows, x, x_stride, from, stride, pairs, ahead, to);
            b += c;
        }
    }
};

#endif

}  // namespace

extern "C" {

// Lay out `weight` [outputs, inputs] with rows `stride` apart as the products below read it.
void ericllm_pack_bfloat16(const uint16_t* weight, int64_t stride, int64_t outputs, int64_t inputs, int32_t interleaved,
                           uint16_t* packed) {
    const Layer l = shape(outputs, inputs, interleaved);
    std::memset(packed, 0, static_cast<size_t>(l.blocks() * block_pairs(inputs) * 2) * sizeof *packed);
    for (int64_t block = 0; block < l.blocks(); ++block) {
        uint16_t* to = packed + block * block_pairs(inputs) * 2;
        for (int64_t n = 0; n < l.count(block); ++n) {
            const uint16_t* from = weight + (l.first(block) + n) * stride;
            for (int64_t k = 0; k < inputs; ++k) to[(k / 2 * kBlock + n) * 2 + k % 2] = from[k];
        }
    }
}

// Have the system let this process use what the kernels need; whether it does.
int32_t ericllm_permit() {
#if defined(ERICLLM_AMX) && !defined(ERICLLM_TILES)
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return 1;
#endif
}

// The product, on at most `threads` threads.
void ericllm_linear_bfloat16(const Threads* by, int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                             int64_t rows, void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
    Product<Bfloat16Kernel>(call).run(*by, threads);
}

}  // extern "C"
