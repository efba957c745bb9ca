// Products with quantised weights: each row of x becomes int8 too, group by group, and every group is summed in int32
// before it is scaled and added, in order, to the output's one accumulator of float32.

#include "quantised.h"

#if defined(ERICLLM_INTEGER_TILES)
#include "integer_tiles.h"
#endif

using namespace ericllm;

namespace {

// A group of a row as it lies in a panel: codes, what they are multiplied by, and what a sum over them begins with.
template <class Format>
struct Group {
    int8_t codes[Format::kGroup];
    float scale;
    int32_t start;
};

inline void unpack(const uint8_t* from, Codes (&w)[1]) { w[0] = codes_of(from); }

#if defined(__AVX512VNNI__)

inline void unpack(const uint8_t* from, Codes (&w)[2]) {
    alignas(16) uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(kTable[i] + kOffset);
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i low = _mm512_set1_epi8(15), both = _mm512_loadu_si512(from);
    w[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(both, low));
    w[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
}

#else

inline void unpack(const uint8_t* from, Codes (&w)[2]) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable)));
    const auto* halves = reinterpret_cast<const __m256i*>(from);
    const __m256i low = _mm256_set1_epi8(15), both[2] = {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
    const auto code = [&](__m256i place) { return _mm256_shuffle_epi8(table, _mm256_and_si256(place, low)); };
    w[0] = {code(both[0]), code(both[1])};
    w[1] = {code(_mm256_srli_epi16(both[0], 4)), code(_mm256_srli_epi16(both[1], 4))};
}

#endif

// Some blocks of a weight, and where those lie that are used next.
struct Blocks {
    const uint8_t* codes;
    const Bfloat16* scales;
    int64_t groups;
    Ahead ahead;
    int64_t scales_ahead;
};

constexpr int64_t kSlowStep = kLineBytes / 3;  // of Ahead, where three or more groups of rows use the same blocks

// R rows times C blocks, `slow` where many other rows use these too. Few sums stay in registers from group to group; the
// order of what is added to each is the same.
template <class Format, int64_t R, int64_t C, bool slow>
void tile(const char* x, int64_t x_stride, const Blocks& weight, float* to) {
    const uint8_t* codes = weight.codes;
    const Bfloat16* scales = weight.scales;
    const int64_t groups = weight.groups;
    const char* next = reinterpret_cast<const char*>(codes) + weight.ahead.bytes;
    constexpr bool kept = R * C <= kTileRows / 2;
    constexpr int fours = Format::kFours, vectors = Format::kGroup / 4 / fours;
    Floats total[kept ? R : 1][kept ? C : 1];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            if constexpr (kept)
                total[r][c] = all(0.0f);
            else
                store(to + r * kMaxStep * kBlock + c * kBlock, all(0.0f));
    for (int64_t g = 0; g < groups; ++g, codes += Format::kBytes, scales += kBlock) {
        const Group<Format>* row[R];
        for (int r = 0; r < R; ++r) row[r] = reinterpret_cast<const Group<Format>*>(x + r * x_stride) + g;
        Sums sum[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sum[r][c] = sums_of(row[r]->start);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v, next += weight.ahead.step) {
            Codes w[C][fours];
            for (int c = 0; c < C; ++c) {
                fetch<slow>(next + c * groups * Format::kBytes);
                unpack(codes + c * groups * Format::kBytes + v * 64, w[c]);
            }
            for (int f = 0; f < fours; ++f)
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) add_dot(sum[r][c], w[c][f], row[r]->codes + (v * fours + f) * 4);
        }
        for (int c = 0; c < C; ++c) {
            const Floats scale = load(scales + c * groups * kBlock);
            fetch<slow>(scales + c * groups * kBlock + weight.scales_ahead);
            for (int r = 0; r < R; ++r) {
                const Floats part = floats(sum[r][c]) * all(row[r]->scale);
                if constexpr (kept) {
                    total[r][c] = fused(part, scale, total[r][c]);
                } else {
                    float* at = to + r * kMaxStep * kBlock + c * kBlock;
                    store(at, fused(part, scale, load(at)));
                }
            }
        }
        if constexpr (!kept) asm volatile("" ::: "memory");  // or gcc keeps a second copy of them on the stack
    }
    if constexpr (kept)
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(to + r * kMaxStep * kBlock + c * kBlock, total[r][c]);
}

template <class Format>
void multiply_blocks(const Quantised<Format>& weight, const char* x, int64_t x_stride, int64_t rows, int64_t block,
                     int64_t blocks, const Ahead& ahead, float* sums) {
    in_tiles<kTileRows, blocks_for>(rows, blocks, [&](auto r, auto c, int64_t b) {
        const Blocks some{weight.codes_of(block + b), weight.scales_of(block + b), weight.groups, ahead,
                          blocks * weight.groups * kBlock};
        if constexpr (2 * r() > kTileRows)
            if (ahead.step <= kSlowStep) return tile<Format, r(), c(), true>(x, x_stride, some, sums + b * kBlock);
        tile<Format, r(), c(), false>(x, x_stride, some, sums + b * kBlock);
    });
}

template <class Format, class X>
struct Kernel {
    using Value = X;
    static constexpr int64_t kRows = kTileRows;
    static constexpr int64_t kInputBytes = Format::kBytes / Format::kGroup;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, blocks_for(rows)); }

    // An odd number of lines, so that rows spread over the cache.
    static int64_t panel_stride(const Layer& l) {
        const auto size = static_cast<int64_t>(sizeof(Group<Format>));
        return round_up(divide_up(l.inputs, Format::kGroup) * size, 128) + 64;
    }

    static bool reads(const Call&) { return false; }

    static void lay(const Layer& l, const Value* row, char* panel, int64_t r) {
        auto* groups = reinterpret_cast<Group<Format>*>(panel + r * panel_stride(l));
        for (int64_t k = 0; k < l.inputs; k += Format::kGroup) {
            Group<Format>& group = groups[k / Format::kGroup];
            group.scale = round_group<Format::kGroup>(row + k, l.inputs - k, group.codes);
            group.start = kOffset ? -kOffset * sum_of(group.codes, Format::kGroup) : 0;
        }
    }

    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         const Ahead& ahead, float* sums) {
        const Quantised<Format> weight(l, l.weight);
        multiply_blocks(weight, x, x_stride, rows, block, blocks, ahead, sums);
    }
};

#if defined(ERICLLM_INTEGER_TILES)

// Blocks as tiles read them: int8 lies so, codes of int4 are looked up for all rows at once.
template <class Format>
struct TiledBlock {
    static constexpr int64_t kInputs = Format::kGroup, kParts = 1;
    static constexpr bool kMinima = false;
    const int8_t* first;
    const Bfloat16* scales;
    int64_t units;

    const int8_t* codes(int64_t unit) const { return first + unit * kInputs * kBlock; }
    Floats scale(int64_t unit) const { return load(scales + unit * kBlock); }
};

template <class Format, class X>
class TiledKernel {
  public:
    using Value = X;
    static constexpr int64_t kRows = IntegerTiles::kRows;
    static constexpr int64_t kInputBytes = Format::kBytes / Format::kGroup;

    static int64_t step(int64_t) { return 2; }
    static int64_t panel_stride(const Layer& l) { return rows_of(l, nullptr).bytes_for_row(); }
    static bool reads(const Call&) { return false; }

    static void lay(const Layer& l, const Value* row, char* panel, int64_t r) {
        const auto to = rows_of(l, panel + r / kRows * kRows * panel_stride(l));
        if (r % kRows == 0) to.clear();
        for (int64_t k = 0; k < l.inputs; k += Format::kGroup)
            to.scales(k / Format::kGroup)[r % kRows] =
                round_group<Format::kGroup>(row + k, l.inputs - k, to.codes(r % kRows) + k);
    }

    void begin(const Layer& l, int64_t block, int64_t blocks, int64_t) {
        if constexpr (Format::kFours == 1) return;
        static thread_local Scratch memory;
        const Quantised<Format> weight(l, l.weight);
        const uint8_t* from = weight.codes_of(block);
        unpacked_ = memory.of<int8_t>(blocks * weight.groups * Format::kGroup * kBlock);
        for (int8_t* to = unpacked_; from < weight.codes_of(block + blocks); from += 64) {
            Codes w[Format::kFours];
            unpack(from, w);
            for (int f = 0; f < Format::kFours; ++f, to += 64)
                _mm512_store_si512(to, _mm512_xor_si512(w[f], _mm512_set1_epi8(static_cast<char>(kOffset))));
        }
    }

    void multiply(const Layer& l, const char* x, int64_t, int64_t rows, int64_t block, int64_t blocks, const Ahead& ahead,
                  float* sums) {
        const Quantised<Format> weight(l, l.weight);
        const auto tile = rows_of(l, const_cast<char*>(x));
        for (int64_t b = 0; b < blocks; ++b) {
            const auto* codes = reinterpret_cast<const int8_t*>(weight.codes_of(block + b));
            const NextUnits next{reinterpret_cast<const char*>(codes) + ahead.bytes, ahead.step * Format::kBytes / kLineBytes};
            if constexpr (Format::kFours > 1) codes = unpacked_ + b * weight.groups * Format::kGroup * kBlock;
            const TiledBlock<Format> some{codes, weight.scales_of(block + b), weight.groups};
            tiles_.multiply(some, tile, rows, next, sums + b * kBlock);
        }
    }

  private:
    static RowTile<Format::kGroup, false> rows_of(const Layer& l, char* memory) {
        return {divide_up(l.inputs, Format::kGroup), memory};
    }

    IntegerTiles tiles_;
    int8_t* unpacked_ = nullptr;  // codes of the blocks that began last
};

#endif

}  // namespace

#if defined(ERICLLM_INTEGER_TILES)
template <class Format, class X>
inline constexpr int64_t ericllm::kTogether<TiledKernel<Format, X>> = IntegerTiles::kRows;
#endif

namespace {

template <class Format, class Value>
void product(int32_t threads, const Layer* layer, const void* x, int64_t x_stride, int64_t rows,
             void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
#if defined(ERICLLM_INTEGER_TILES)
    if (rows >= kMinTiledRows) return Product<TiledKernel<Format, Value>>(call).run(threads);
#endif
    Product<Kernel<Format, Value>>(call).run(threads);
}

}  // namespace

extern "C" {

// The products, on at most `threads` threads: for x of bfloat16 and of float32.
void ericllm_linear_int8_bfloat16(int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                         int64_t rows, void* out, const void* residual) {
    product<Int8, Bfloat16>(threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_int4_bfloat16(int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                         int64_t rows, void* out, const void* residual) {
    product<Int4, Bfloat16>(threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_int8_float32(int32_t threads, const Layer* layer, const void* x,
                                 int64_t x_stride, int64_t rows, void* out, const void* residual) {
    product<Int8, float>(threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_int4_float32(int32_t threads, const Layer* layer, const void* x,
                                 int64_t x_stride, int64_t rows, void* out, const void* residual) {
    product<Int4, float>(threads, layer, x, x_stride, rows, out, residual);
}

}  // extern "C"
