// Products with weights in the codes of a GGUF file: each row of x becomes int8, 32 inputs at a time, every group is summed
// in int32, and that is scaled and added, in order, to the output's one accumulator of float32.

#include "gguf.h"

#if defined(ERICLLM_INTEGER_TILES)
#include "integer_tiles.h"
#endif

using namespace ericllm;
using namespace ericllm::gguf;

namespace {

// A group of a row as it lies in a panel: codes, what they are multiplied by, the sums of their two halves, and minus the
// whole sum times the scale.
struct alignas(16) Group {
    int8_t codes[kGroup];
    float scale;
    float minus_sum;
    int32_t sums[2];
};

constexpr int64_t kRecordGroups = 8;  // of the longest record

template <class Format>
constexpr int kHigh = Format::kBits == 8 ? kOffset : Format::kZeroCode;  // by how much codes are higher than they count

#if defined(__AVX512VNNI__)

using Bytes64 = __m512i;
inline Bytes64 bytes_of(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes64 both(Bytes64 a, Bytes64 b) { return _mm512_or_si512(a, b); }
template <int bits>  // to the left, or to the right if below 0
inline Bytes64 moved(Bytes64 x, int mask) {
    if constexpr (bits > 0) x = _mm512_slli_epi16(x, bits);
    if constexpr (bits < 0) x = _mm512_srli_epi16(x, -bits);
    return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask)));
}
inline Codes codes_of(Bytes64 x) { return x; }
template <class Format>
constexpr bool kPaired = false;  // whether two fours of a row are added up at once
template <class Format>
constexpr bool kNarrow = false;  // whether sums of a group are of 16 bits, twice as many
inline Sums widened(Sums sum, int32_t) { return sum; }
template <class Format>
inline void add_pair(Sums& sum, const Codes (&w)[2], const int8_t* eight) {
    for (int f = 0; f < 2; ++f) add_dot(sum, w[f], eight + 4 * f);
}

#else

struct Bytes64 {
    __m256i low, high;
};
inline Bytes64 bytes_of(const uint8_t* from) {
    const auto* halves = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Bytes64 both(Bytes64 a, Bytes64 b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
template <int bits>
inline __m256i moved(__m256i x, int mask) {
    if constexpr (bits > 0) x = _mm256_slli_epi16(x, bits);
    if constexpr (bits < 0) x = _mm256_srli_epi16(x, -bits);
    return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask)));
}
template <int bits>
inline Bytes64 moved(Bytes64 x, int mask) {
    return {moved<bits>(x.low, mask), moved<bits>(x.high, mask)};
}
// Products of codes are added up in 16 bits as far as these surely hold them, which takes fewer instructions: of codes
// of 4 bits all of a group (8 times two of 15 * 127), of 5 and 6 bits two times two.
template <class Format>
constexpr bool kPaired = Format::kBits < 8;
template <class Format>
constexpr bool kNarrow = Format::kBits == 4;
inline __m256i in_pairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
inline Sums widened(Sums narrow, int32_t start) {
    const __m256i from = _mm256_set1_epi32(start);
    return {_mm256_add_epi32(in_pairs(narrow.low), from), _mm256_add_epi32(in_pairs(narrow.high), from)};
}
inline __m256i all_of(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return _mm256_set1_epi32(four);
}
template <class Format>
inline void add_pair(Sums& sum, const Codes (&w)[2], const int8_t* eight) {
    if constexpr (Format::kBits == 8) {
        for (int f = 0; f < 2; ++f) add_dot(sum, w[f], eight + 4 * f);
        return;
    }
    const __m256i first = all_of(eight), second = all_of(eight + 4);
    const auto both = [&](__m256i a, __m256i b) {
        return _mm256_add_epi16(_mm256_maddubs_epi16(a, first), _mm256_maddubs_epi16(b, second));
    };
    const __m256i low = both(w[0].low, w[1].low), high = both(w[0].high, w[1].high);
    if constexpr (kNarrow<Format>)
        sum = {_mm256_add_epi16(sum.low, low), _mm256_add_epi16(sum.high, high)};
    else
        sum = {_mm256_add_epi32(sum.low, in_pairs(low)), _mm256_add_epi32(sum.high, in_pairs(high))};
}
inline Codes codes_of(Bytes64 x) { return {x.low, x.high}; }

#endif

// The vector of upper bits that goes with a part of a group, if its codes have any.
template <class Format>
inline Bytes64 upper_bits(const uint8_t* group, int part) {
    const uint8_t* behind = group + kFours / 2 * kVector;
    return Format::kBits == 5 || Format::kBits == 6 ? bytes_of(behind + part * kVector) : Bytes64{};
}

// The codes of the two fours of inputs in the `pair`-th place of a group, whose upper bits are the lowest ones of `upper`;
// those of the next two are then.
template <class Format>
inline void unpack(const uint8_t* group, int pair, Bytes64& upper, Codes (&w)[2]) {
    if constexpr (Format::kBits == 8) {
        for (int i = 0; i < 2; ++i) w[i] = ericllm::codes_of(group + (2 * pair + i) * kVector);
        return;
    }
    const Bytes64 low = bytes_of(group + pair * kVector);
    Bytes64 found[2] = {moved<0>(low, 15), moved<-4>(low, 15)};
    if constexpr (Format::kBits == 5) {
        found[0] = both(found[0], moved<4>(upper, 16)), found[1] = both(found[1], moved<3>(upper, 16));
        upper = moved<-2>(upper, 63);
    }
    if constexpr (Format::kBits == 6) {
        found[0] = both(found[0], moved<4>(upper, 48)), found[1] = both(found[1], moved<2>(upper, 48));
        upper = moved<-4>(upper, 15);
    }
    for (int i = 0; i < 2; ++i) w[i] = codes_of(found[i]);
}

// Some blocks of one format, `stride` bytes apart.  ahead: bytes to what is used next.
struct Blocks {
    const uint8_t* first;
    int64_t stride;
    int64_t records;
    int64_t ahead;
};

// R rows times C blocks, `slow` where many other rows use these too. Few sums stay in registers from group to group.
template <class Format, int64_t R, int64_t C>
void tile(const char* x, int64_t x_stride, const Blocks& weight, float* to) {
    using Scales = typename Format::Scales;
    constexpr bool kept = R * C <= kTileRows / 2;
    constexpr int64_t kShare = Format::kCodeBytes / (kFours / 2);  // of a vector of two fours
    constexpr int parts = Scales::kParts, pairs = kFours / 2 / parts;  // vectors of two fours in each part
    Floats totals[kept ? R : 1][kept ? C : 1];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            if constexpr (kept)
                totals[r][c] = all(0.0f);
            else
                store(to + r * kMaxStep * kBlock + c * kBlock, all(0.0f));
    const uint8_t* record = weight.first;
    for (int64_t k = 0; k < weight.records; ++k, record += Format::kRecordBytes) {
        for (int c = 0; c < C; ++c)
            for (int64_t line = 0; line < Scales::kBytes; line += kLineBytes)
                fetch<false>(record + c * weight.stride + line + weight.ahead);
#pragma GCC unroll 1  // or gcc keeps sums in memory
        for (int64_t g = 0; g < Scales::kGroups; ++g) {
            const uint8_t* codes = record + Scales::kBytes + g * Format::kCodeBytes;
            const Group* row[R];
            for (int r = 0; r < R; ++r)
                row[r] = reinterpret_cast<const Group*>(x + r * x_stride) + k * Scales::kGroups + g;
#pragma GCC unroll 1
            for (int part = 0; part < parts; ++part) {
                Sums sum[R][C];
                int32_t start[R];
                for (int r = 0; r < R; ++r) {
                    const int32_t whole = parts == 2 ? row[r]->sums[part] : row[r]->sums[0] + row[r]->sums[1];
                    start[r] = kHigh<Format> ? -kHigh<Format> * whole : 0;
                    for (int c = 0; c < C; ++c) sum[r][c] = sums_of(kNarrow<Format> ? 0 : start[r]);
                }
                Bytes64 upper[C];
                for (int c = 0; c < C; ++c) upper[c] = upper_bits<Format>(codes + c * weight.stride, part);
#pragma GCC unroll 1
                for (int pair = part * pairs; pair < (part + 1) * pairs; ++pair) {
                    Codes w[C][2];
                    for (int c = 0; c < C; ++c) {
                        unpack<Format>(codes + c * weight.stride, pair, upper[c], w[c]);
                        const uint8_t* next = codes + c * weight.stride + pair * kShare + weight.ahead;
                        fetch<false>(next);
                        if constexpr (kShare > kLineBytes) fetch<false>(next + kShare - 1);
                    }
                    if constexpr (kPaired<Format>)
                        for (int r = 0; r < R; ++r)
                            for (int c = 0; c < C; ++c) add_pair<Format>(sum[r][c], w[c], row[r]->codes + pair * 8);
                    else
                        for (int f = 0; f < 2; ++f)
                            for (int r = 0; r < R; ++r)
                                for (int c = 0; c < C; ++c) add_dot(sum[r][c], w[c][f], row[r]->codes + pair * 8 + f * 4);
                }
                if constexpr (kNarrow<Format>)
                    for (int r = 0; r < R; ++r)
                        for (int c = 0; c < C; ++c) sum[r][c] = widened(sum[r][c], start[r]);
                for (int c = 0; c < C; ++c) {
                    const Floats scale = Scales::scale(record + c * weight.stride, g, part);
                    Floats minimum;
                    if constexpr (Scales::kHasMinimum) minimum = Scales::minimum(record + c * weight.stride, g);
                    for (int r = 0; r < R; ++r) {
                        const Floats whole = floats(sum[r][c]) * all(row[r]->scale);
                        float* at = to + r * kMaxStep * kBlock + c * kBlock;
                        Floats total;
                        if constexpr (kept)
                            total = totals[r][c];
                        else
                            total = load(at);
                        total = fused(whole, scale, total);
                        if constexpr (Scales::kHasMinimum) total = fused(all(row[r]->minus_sum), minimum, total);
                        if constexpr (kept)
                            totals[r][c] = total;
                        else
                            store(at, total);
                    }
                }
                if constexpr (!kept) asm volatile("" ::: "memory");  // or gcc keeps a second copy of them on the stack
            }
        }
    }
    if constexpr (kept)
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(to + r * kMaxStep * kBlock + c * kBlock, totals[r][c]);
}

template <class Value>
void lay_group(const Value* row, int64_t count, Group& to) {
    to.scale = round_group<kGroup>(row, count, to.codes);
    for (int half = 0; half < 2; ++half) to.sums[half] = sum_of(to.codes + half * kGroup / 2, kGroup / 2);
    to.minus_sum = -to.scale * static_cast<float>(to.sums[0] + to.sums[1]);
}

inline int64_t groups_of(const Layer& l) { return round_up(divide_up(l.inputs, kGroup), kRecordGroups); }

template <class X>
struct Kernel {
    using Value = X;
    static constexpr int64_t kRows = kTileRows;

    static int64_t step(int64_t rows) { return std::max<int64_t>(2, blocks_for(rows)); }

    // An odd number of lines, so that rows spread over the cache.
    static int64_t panel_stride(const Layer& l) {
        return round_up(groups_of(l) * static_cast<int64_t>(sizeof(Group)), 128) + 64;
    }

    static bool reads(const Call&) { return false; }

    static void lay(const Layer& l, const Value* row, char* panel, int64_t r) {
        auto* group = reinterpret_cast<Group*>(panel + r * panel_stride(l));
        const int64_t count = groups_of(l);
        for (int64_t g = 0; g < count; ++g, ++group)
            if (g * kGroup < l.inputs)
                lay_group(row + g * kGroup, l.inputs - g * kGroup, *group);
            else
                *group = Group{};
    }

    // Blocks next to each other that have one format are one run.
    static void multiply(const Layer& l, const char* x, int64_t x_stride, int64_t rows, int64_t block, int64_t blocks,
                         float* sums) {
        const auto* weight = static_cast<const uint8_t*>(l.weight);
        const Place* places = reinterpret_cast<const Place*>(weight) + block;
        for (int64_t first = 0, end; first < blocks; first = end) {
            for (end = first + 1; end < blocks && places[end].format == places[first].format;) ++end;
            with_format(places[first].format, [&](auto format) {
                using F = decltype(format);
                const int64_t stride = F::block_bytes(l.inputs), ahead = std::min((end - first) * stride, kFarthest);
                in_tiles<kTileRows, blocks_for>(rows, end - first, [&](auto r, auto c, int64_t b) {
                    const Blocks some{weight + places[first + b].offset, stride, F::records(l.inputs), ahead};
                    tile<F, r(), c()>(x, x_stride, some, sums + (first + b) * kBlock);
                });
            });
        }
    }
};

#if defined(ERICLLM_INTEGER_TILES)

// A block as tiles read it, unpacked for all rows at once.
template <class Format>
struct TiledBlock {
    static constexpr int64_t kParts = Format::Scales::kParts, kInputs = kGroup / kParts;
    static constexpr bool kMinima = Format::Scales::kHasMinimum;
    const int8_t* first;
    const float* scales;
    const float* minima;
    int64_t units;

    const int8_t* codes(int64_t unit) const { return first + unit * kInputs * kBlock; }
    Floats scale(int64_t unit) const { return load(scales + unit * kBlock); }
    Floats minimum(int64_t group) const { return load(minima + group * kBlock); }
};

// One of 8 bits, where it lies.
template <>
struct TiledBlock<Q8_0> {
    static constexpr int64_t kParts = 1, kInputs = kGroup;
    static constexpr bool kMinima = false;
    const uint8_t* first;
    int64_t units;

    const int8_t* codes(int64_t unit) const {
        return reinterpret_cast<const int8_t*>(record(unit) + Halves::kBytes + unit % Halves::kGroups * Q8_0::kCodeBytes);
    }
    Floats scale(int64_t unit) const { return Halves::scale(record(unit), unit % Halves::kGroups, 0); }
    const uint8_t* record(int64_t unit) const { return first + unit / Halves::kGroups * Q8_0::kRecordBytes; }
};

template <class Format>
void unpack_block(const uint8_t* record, int64_t records, int8_t* codes_to, float* scales, float* minima) {
    using Scales = typename Format::Scales;
    constexpr int parts = Scales::kParts, pairs = kFours / 2 / parts;
    const __m512i high = _mm512_set1_epi8(static_cast<char>(kHigh<Format>));
    for (int64_t k = 0; k < records; ++k, record += Format::kRecordBytes)
        for (int64_t g = 0; g < Scales::kGroups; ++g) {
            const uint8_t* codes = record + Scales::kBytes + g * Format::kCodeBytes;
            if constexpr (Scales::kHasMinimum) store(minima, Scales::minimum(record, g)), minima += kBlock;
            for (int part = 0; part < parts; ++part, scales += kBlock) {
                store(scales, Scales::scale(record, g, part));
                Bytes64 upper = upper_bits<Format>(codes, part);
                for (int pair = part * pairs; pair < (part + 1) * pairs; ++pair) {
                    Codes w[2];
                    unpack<Format>(codes, pair, upper, w);
                    for (int f = 0; f < 2; ++f, codes_to += kVector) _mm512_store_si512(codes_to, _mm512_sub_epi8(w[f], high));
                }
            }
        }
}

template <class X>
class TiledKernel {
  public:
    using Value = X;
    static constexpr int64_t kRows = IntegerTiles::kRows;

    static int64_t step(int64_t) { return 2; }
    static int64_t panel_stride(const Layer& l) { return rows_of(l, nullptr).bytes_for_row(); }
    static bool reads(const Call&) { return false; }

    static void lay(const Layer& l, const Value* row, char* panel, int64_t r) {
        const auto to = rows_of(l, panel + r / kRows * kRows * panel_stride(l));
        const int64_t n = r % kRows;
        if (n == 0) to.clear();
        for (int64_t g = 0; g < groups_of(l); ++g) {
            int8_t* codes = to.codes(n) + g * kGroup;
            if (g * kGroup >= l.inputs) {
                std::memset(codes, 0, kGroup);
                continue;
            }
            const float scale = round_group<kGroup>(row + g * kGroup, l.inputs - g * kGroup, codes);
            to.scales(g)[n] = scale;
            to.minus_sums(g)[n] = -scale * static_cast<float>(sum_of(codes, kGroup));
        }
    }

    void begin(const Layer& l, int64_t block, int64_t blocks, int64_t) {
        static thread_local Scratch codes, scales;
        const int64_t units = groups_of(l) * kMaxParts;
        for (int64_t b = 0; b < kMaxStep; ++b) {
            codes_[b] = codes.of<int8_t>(kMaxStep * kBlock * groups_of(l) * kGroup) + b * kBlock * groups_of(l) * kGroup;
            scales_[b] = scales.of<float>(kMaxStep * 2 * kBlock * units) + b * 2 * kBlock * units;
        }
        for (int64_t b = 0; b < blocks; ++b)
            with_block(l, block + b, [&](auto format, const uint8_t* from) {
                using F = decltype(format);
                if constexpr (F::kBits < 8)
                    unpack_block<F>(from, F::records(l.inputs), codes_[b], scales_[b], scales_[b] + kBlock * units);
            });
        fetches_ = true;
    }

    void multiply(const Layer& l, const char* x, int64_t, int64_t rows, int64_t block, int64_t blocks, float* sums) {
        const auto tile = rows_of(l, const_cast<char*>(x));
        const int64_t units = groups_of(l) * kMaxParts;
        for (int64_t b = 0; b < blocks; ++b)
            with_block(l, block + b, [&](auto format, const uint8_t* from) {
                using F = decltype(format);
                constexpr int64_t record_units = F::Scales::kGroups * F::Scales::kParts;
                const int64_t count = F::records(l.inputs) * record_units;
                const int64_t ahead = std::min(blocks * F::block_bytes(l.inputs), kFarthest);
                const NextUnits next{reinterpret_cast<const char*>(from) + ahead, fetches_ ? F::kRecordBytes / record_units : 0};
                float* to = sums + b * kBlock;
                if constexpr (F::kBits < 8)
                    tiles_.multiply(TiledBlock<F>{codes_[b], scales_[b], scales_[b] + kBlock * units, count}, tile, rows, next, to);
                else
                    tiles_.multiply(TiledBlock<F>{from, count}, tile, rows, next, to);
            });
        fetches_ = false;
    }

  private:
    static constexpr int64_t kMaxParts = 2;  // of a group

    static RowTile<kGroup, true> rows_of(const Layer& l, char* memory) { return {groups_of(l), memory}; }

    template <class Visit>
    static void with_block(const Layer& l, int64_t block, const Visit& visit) {
        const auto* weight = static_cast<const uint8_t*>(l.weight);
        const Place& place = reinterpret_cast<const Place*>(weight)[block];
        with_format(place.format, [&](auto format) { visit(format, weight + place.offset); });
    }

    IntegerTiles tiles_;
    int8_t* codes_[kMaxStep];  // of the blocks that began last
    float* scales_[kMaxStep];  // and minima
    bool fetches_ = false;     // what comes after these blocks
};

#endif

}  // namespace

#if defined(ERICLLM_INTEGER_TILES)
template <class X>
inline constexpr int64_t ericllm::kTogether<TiledKernel<X>> = IntegerTiles::kRows;
#endif

namespace {

template <class Value>
void product(int32_t threads, const Layer* layer, const void* x, int64_t x_stride, int64_t rows,
             void* out, const void* residual) {
    const Call call{*layer, x, x_stride, rows, out, residual};
#if defined(ERICLLM_INTEGER_TILES)
    if (rows >= kMinTiledRows) return Product<TiledKernel<Value>>(call).run(threads);
#endif
    Product<Kernel<Value>>(call).run(threads);
}

}  // namespace

extern "C" {

// The products, on at most `threads` threads: for x of bfloat16 and of float32.
void ericllm_linear_gguf_bfloat16(int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                                  int64_t rows, void* out, const void* residual) {
    product<Bfloat16>(threads, layer, x, x_stride, rows, out, residual);
}

void ericllm_linear_gguf_float32(int32_t threads, const Layer* layer, const void* x, int64_t x_stride,
                                 int64_t rows, void* out, const void* residual) {
    product<float>(threads, layer, x, x_stride, rows, out, residual);
}

}  // extern "C"
