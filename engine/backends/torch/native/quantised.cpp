// Products with quantised weights: each row of x becomes int8 too, group by group, and every group is summed in int32
// before it is scaled and added, in order, to the output's one accumulator of float32.

#include "quantised.h"

using namespace ericllm;

namespace {

// A group of a row as it lies in a panel: codes, what they are multiplied by, and what a sum over them begins with.
template <class Format>
struct Group {
    int8_t codes[Format::kGroup];
    float scale;
    int32_t start;
};

#if defined(__AVX512VNNI__)

constexpr int64_t kTileRows = 8;  // x 2 blocks: 16 of 32 registers add up, and none has to be put away
constexpr int64_t blocks_for(int64_t rows) { return rows <= 6 ? 4 : 2; }
constexpr int kOffset = kZero;  // what codes of weights are too high by

using Codes = __m512i;  // of 16 outputs x 4 inputs
using Sums = __m512i;

inline Sums all(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats floats(Sums x) { return {_mm512_cvtepi32_ps(x)}; }

// As instructions, since gcc 12 moves the sums of many such intrinsics to and fro.
inline void add_dot(Sums& sum, Codes w, const int8_t* four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int32_t*>(four)));
}

inline void unpack(const uint8_t* from, Codes (&w)[1]) { w[0] = _mm512_loadu_si512(from); }
inline void unpack(const uint8_t* from, Codes (&w)[2]) {
    alignas(16) uint8_t bytes[16];
    for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(kTable[i] + kZero);
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m512i low = _mm512_set1_epi8(15), both = _mm512_loadu_si512(from);
    w[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(both, low));
    w[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
}

inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) != 0; }

// Put sixteen whole numbers from -127 to 127 into `to`, and return their sum with `sum`.
inline Sums put(Floats x, int8_t* to, Sums sum) {
    const __m512i whole = _mm512_cvtps_epi32(x.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(whole));
    return _mm512_add_epi32(sum, whole);
}
inline int32_t total(Sums x) { return _mm512_reduce_add_epi32(x); }

#else  // AVX2: without bytes that are too high, as products of bytes are added up in pairs of 16 bits

constexpr int64_t kTileRows = 4;  // x 2 registers of one block: 8 of 16
constexpr int64_t blocks_for(int64_t) { return 1; }
constexpr int kOffset = 0;

struct Codes {
    __m256i low, high;
};
struct Sums {
    __m256i low, high;
};

inline Sums all(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Floats floats(Sums x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// |w| * (x with the sign of w), of which two never leave 16 bits.
inline __m256i dot(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline void add_dot(Sums& sum, Codes w, const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    const __m256i x = _mm256_set1_epi32(four);
    sum = {dot(sum.low, w.low, x), dot(sum.high, w.high, x)};
}

inline void unpack(const uint8_t* from, Codes (&w)[1]) {
    const auto* halves = reinterpret_cast<const __m256i*>(from);
    const __m256i sign = _mm256_set1_epi8(static_cast<char>(kZero));
    w[0] = {_mm256_xor_si256(_mm256_loadu_si256(halves), sign), _mm256_xor_si256(_mm256_loadu_si256(halves + 1), sign)};
}
inline void unpack(const uint8_t* from, Codes (&w)[2]) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTable)));
    const auto* halves = reinterpret_cast<const __m256i*>(from);
    const __m256i low = _mm256_set1_epi8(15), both[2] = {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
    const auto code = [&](__m256i place) { return _mm256_shuffle_epi8(table, _mm256_and_si256(place, low)); };
    w[0] = {code(both[0]), code(both[1])};
    w[1] = {code(_mm256_srli_epi16(both[0], 4)), code(_mm256_srli_epi16(both[1], 4))};
}

inline bool has_nan(Floats x) {
    const __m256 both = _mm256_add_ps(x.low, x.high);
    return _mm256_movemask_ps(_mm256_cmp_ps(both, both, _CMP_UNORD_Q)) != 0;
}

inline Sums put(Floats x, int8_t* to, Sums sum) {
    const __m256i low = _mm256_cvtps_epi32(x.low), high = _mm256_cvtps_epi32(x.high);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    return sum;
}
inline int32_t total(Sums) { return 0; }

#endif

// Some blocks of a weight, and where those lie that are used next.
struct Blocks {
    const uint8_t* codes;
    const Bfloat16* scales;
    int64_t groups;
    Ahead ahead;
    int64_t scales_ahead;
};

// Prefetch into the first level where enough rows use the same blocks that loads are slow.
template <bool slow>
void fetch(const void* from) {
    if constexpr (slow)
        _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T0);
    else
        _mm_prefetch(static_cast<const char*>(from), _MM_HINT_T1);
}

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
                total[r][c] = ericllm::all(0.0f);
            else
                store(to + r * kMaxStep * kBlock + c * kBlock, ericllm::all(0.0f));
    for (int64_t g = 0; g < groups; ++g, codes += Format::kBytes, scales += kBlock) {
        const Group<Format>* row[R];
        for (int r = 0; r < R; ++r) row[r] = reinterpret_cast<const Group<Format>*>(x + r * x_stride) + g;
        Sums sum[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sum[r][c] = all(row[r]->start);
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
                const Floats part = floats(sum[r][c]) * ericllm::all(row[r]->scale);
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

// Put sixteen or fewer numbers of a row, scaled so that the largest of their group is 127, into its panel. What is not
// finite makes the group's scale NaN.
template <class Format, class Value>
void lay_group(const Value* row, int64_t count, Group<Format>& to) {
    constexpr int parts = Format::kGroup / kLanes;
    Floats x[parts], largest = ericllm::all(0.0f), unfit = ericllm::all(0.0f);
    for (int p = 0; p < parts; ++p) {
        const int64_t some = std::clamp<int64_t>(count - p * kLanes, 0, kLanes);
        x[p] = some > 0 ? load_some(row + p * kLanes, some) : ericllm::all(0.0f);
        largest = most(largest, magnitude(x[p]));
        unfit = fused(x[p], ericllm::all(0.0f), unfit);
    }
    const float most_of_all = highest(largest);
    const Floats inverse = ericllm::all(most_of_all > 0.0f ? 127.0f / most_of_all : 0.0f);
    Sums codes = all(0);
    for (int p = 0; p < parts; ++p) codes = put(x[p] * inverse, to.codes + p * kLanes, codes);
    to.scale = has_nan(unfit) ? NAN : most_of_all / 127.0f;
    to.start = -kOffset * total(codes);
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

    static void lay(const Layer& l, const Value* row, char* to) {
        auto* groups = reinterpret_cast<Group<Format>*>(to);
        for (int64_t k = 0; k < l.inputs; k += Format::kGroup)
            lay_group<Format>(row + k, l.inputs - k, groups[k / Format::kGroup]);
    }

    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         const Ahead& ahead, float* sums) {
        multiply_blocks(Quantised<Format>(l, l.weight), x, x_stride, rows, block, blocks, ahead, sums);
    }
};

template <class Format, class Value>
void product(const Threads* by, int32_t threads, const Layer* layer, const void* x, int64_t x_stride, int64_t rows,
             void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
    Product<Kernel<Format, Value>>(call).run(*by, threads);
}

}  // namespace

extern "C" {

// The products, on at most `threads` threads: for x of bfloat16 and of float32.
void ericllm_linear_int8_bfloat16(const Threads* by, int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                         int64_t rows, void* out, const void* residual) {
    product<Int8, Bfloat16>(by, threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_int4_bfloat16(const Threads* by, int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                         int64_t rows, void* out, const void* residual) {
    product<Int4, Bfloat16>(by, threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_int8_float32(const Threads* by, int32_t threads, const Layer* layer, const void* x,
                                 int64_t x_stride, int64_t rows, void* out, const void* residual) {
    product<Int8, float>(by, threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_int4_float32(const Threads* by, int32_t threads, const Layer* layer, const void* x,
                                 int64_t x_stride, int64_t rows, void* out, const void* residual) {
    product<Int4, float>(by, threads, layer, x, x_stride, rows, out, residual);
}

}  // extern "C"
