// Products with weights of bfloat16. An output is one accumulator to which its inputs are added in their order.

#include "bfloat16.h"
#include "floating.h"
#include "packing.h"

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

constexpr int64_t kTileRows = 12;  // x 2 blocks: 24 of 32 registers accumulate
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }

// Rows that are bound by how fast weights come from memory: it gives them fastest as one stream, block after block, which is
// fetched a little ahead. Sums of that few rows over one block at a time wait for each other, but for less long.
constexpr int64_t kStreamRows = 9;
constexpr int64_t one_block(int64_t) { return 1; }
constexpr Ahead kStream{16 << 10, kLineBytes};

inline uint32_t pair_at(const char* x, int64_t p) {
    uint32_t pair;
    std::memcpy(&pair, x + 4 * p, sizeof pair);
    return pair;
}

// R rows of pairs times C blocks from `weight` on, each `stride` behind the one before it.
template <int64_t R, int64_t C>
void tile(const char* x, int64_t x_stride, const uint32_t* weight, int64_t stride, int64_t pairs, const Ahead& ahead,
          float* sums) {
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
        for (int c = 0; c < C; ++c) _mm512_store_ps(sums + r * kMaxStep * kBlock + c * kBlock, sum[r][c]);
}

struct Arithmetic : PairPanel {
    static constexpr int64_t kRows = kTileRows;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, blocks_for(rows)); }
    static bool reads(const Call& call) { return call.layer.inputs % 2 == 0 && !crowds(call); }

    void multiply(const uint32_t* weight, int64_t stride, const char* x, int64_t x_stride, int64_t rows, int64_t pairs,
                  int64_t blocks, const Ahead& ahead, float* sums) {
        if (rows <= kStreamRows && ahead.alone)
            return in_tiles<kStreamRows, one_block>(rows, blocks, [&](auto r, auto c, int64_t block) {
                tile<r(), c()>(x, x_stride, weight + block * stride, stride, pairs, kStream, sums + block * kBlock);
            });
        in_tiles<kTileRows, blocks_for>(rows, blocks, [&](auto r, auto c, int64_t block) {
            tile<r(), c()>(x, x_stride, weight + block * stride, stride, pairs, ahead, sums + block * kBlock);
        });
    }
};

#else

struct Arithmetic : FloatPanel {
    static constexpr int64_t kRows = floating::kTileRows;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, floating::blocks_for<1>(rows)); }
    static bool reads(const Call&) { return false; }

    // Blocks that many rows use are made into floats once where that is a larger part of the work than to read those.
    void begin(const Layer& l, int64_t block, int64_t blocks, int64_t groups) {
        static thread_local Scratch scratch;
        const int64_t floats = 2 * blocks * block_pairs(l.inputs);
        wide_ = nullptr;
        if (groups < kManyGroups || floats * static_cast<int64_t>(sizeof(float)) > kMostWide) return;
        wide_ = scratch.of<float>(floats);
        const uint32_t* from = static_cast<const uint32_t*>(l.weight) + block * block_pairs(l.inputs);
        for (float* to = wide_; to < wide_ + floats; to += 2 * kBlock, from += kBlock) {
            store(to, firsts_of(from));
            store(to + kBlock, seconds_of(from));
        }
    }

    void multiply(const uint32_t* weight, int64_t stride, const char* x, int64_t x_stride, int64_t rows, int64_t pairs,
                  int64_t blocks, const Ahead& ahead, float* sums) {
        const char* at = reinterpret_cast<const char*>(weight) + ahead.bytes;
        const floating::Next next{at, stride * 4, wide_ ? ahead.step / 2 : ahead.step};
        if (wide_)
            floating::multiply<floating::Floats>(wide_, 2 * stride, x, x_stride, rows, 2 * pairs, blocks, next, sums);
        else
            floating::multiply<floating::Pairs>(weight, stride, x, x_stride, rows, pairs, blocks, next, sums);
    }

  private:
#if defined(__AVX512F__)
    static constexpr int64_t kManyGroups = INT64_MAX;
#else
    static constexpr int64_t kManyGroups = 8;
#endif
    static constexpr int64_t kMostWide = 256 << 10;  // bytes: part of the second level
    float* wide_ = nullptr;                          // the blocks' weights
};

#endif

struct Bfloat16Kernel : Arithmetic {
    using Value = Bfloat16;
    static constexpr int64_t kInputBytes = kBlock * 2;

    void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                  const Ahead& ahead, float* sums) {
        const int64_t stride = block_pairs(l.inputs), pairs = divide_up(l.inputs, 2);
        const uint32_t* weight = static_cast<const uint32_t*>(l.weight) + block * stride;
        Arithmetic::multiply(weight, stride, x, x_stride, rows, pairs, blocks, ahead, sums);
    }
};

#endif

}  // namespace

extern "C" {

// Lay out the weight whose rows lie in `parts` as the products below read it, on at most `threads` threads.
void ericllm_pack_bfloat16(int32_t threads, const Layer* shape, const Part* parts, void* packed) {
    pack<Bfloat16>(threads, *shape, parts, block_pairs(shape->inputs) / kBlock, packed);
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
void ericllm_linear_bfloat16(int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                             int64_t rows, void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
    Product<Bfloat16Kernel>(call).run(threads);
}

}  // extern "C"
