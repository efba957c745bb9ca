// exllamav3's own decoding of a tile (exl3_dq.cuh, codebook.cuh) on a CPU: what its CUDA kernels call, in C++.
// Reads tiles from standard input and writes the float16 values of each, lane after lane, to standard output.
// Arguments: whole bits, codebook (0 plain, 1 mcg, 2 mul1), 1 for half a bit more.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define USE_ROCM 1  // plain C++ in place of PTX
#define __device__
#define __forceinline__ inline

using half = _Float16;
using __half = half;

struct half2 {
    half x, y;
};

inline half __ushort_as_half(uint16_t bits) {
    half value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline half __hadd(half a, half b) { return static_cast<half>(static_cast<float>(a) + static_cast<float>(b)); }
inline half __hfma(half a, half b, half c) { return static_cast<half>(std::fma(double(a), double(b), double(c))); }
inline half __low2half(half2 v) { return v.x; }
inline half __high2half(half2 v) { return v.y; }
inline half2 __halves2half2(half a, half b) { return {a, b}; }
inline half2 __half2half2(half a) { return {a, a}; }
inline half2 __lows2half2(half2 a, half2 b) { return {a.x, b.x}; }
inline half2 __highs2half2(half2 a, half2 b) { return {a.y, b.y}; }
inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline float __half2float(half a) { return static_cast<float>(a); }
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 0xff) * (b >> shift & 0xff);
    return sum;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

union half2_uint32 {
    uint32_t as_uint32;
    half2 as_half2;
    half2_uint32(uint32_t value) : as_uint32(value) {}
};
union half_uint16 {
    uint16_t as_uint16;
    half as_half;
    half_uint16(uint16_t value) : as_uint16(value) {}
};
struct FragB {
    half2 elems[2];
    half2& operator[](int i) { return elems[i]; }
};

#define FSHF_IMM(dst, lo, hi, imm) (dst) = exl3_shf_r_wrap((lo), (hi), (imm))
#define BFE16_IMM(dst, src, imm) (dst) = exl3_bfe_u32_16((src), (imm))
#include "../ptx_portable.cuh"
inline uint32_t bfe64(uint32_t low, uint32_t high, int offset, int length) {
    return exl3_bfe_u64(static_cast<uint64_t>(high) << 32 | low, offset, length);
}
#include "exl3_dq.cuh"

template <int bits, int codebook, bool half_bit>
void decode() {
    std::vector<uint32_t> tile(8 * bits + (half_bit ? 4 : 0));
    while (std::fread(tile.data(), 4, tile.size(), stdin) == tile.size())
        for (int lane = 0; lane < 32; ++lane) {
            FragB fragments[2];
            dq_dispatch<bits, codebook, half_bit>(tile.data(), 8 * lane, fragments[0], fragments[1]);
            std::fwrite(fragments, sizeof fragments, 1, stdout);
        }
}

template <int bits>
void decode_in(int codebook, bool half_bit) {
    if constexpr (bits <= 3)
        if (half_bit) return decode<bits, 2, true>();
    if (codebook == 0) return decode<bits, 0, false>();
    if (codebook == 1) return decode<bits, 1, false>();
    decode<bits, 2, false>();
}

int main(int, char** arguments) {
    const int codebook = std::atoi(arguments[2]);
    const bool half_bit = std::atoi(arguments[3]);
    switch (std::atoi(arguments[1])) {
        case 1: decode_in<1>(codebook, half_bit); break;
        case 2: decode_in<2>(codebook, half_bit); break;
        case 3: decode_in<3>(codebook, half_bit); break;
        case 4: decode_in<4>(codebook, half_bit); break;
        case 5: decode_in<5>(codebook, half_bit); break;
        case 6: decode_in<6>(codebook, half_bit); break;
        case 7: decode_in<7>(codebook, half_bit); break;
        case 8: decode_in<8>(codebook, half_bit); break;
    }
}
