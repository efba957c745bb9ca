// The tile registers of AMX in memory, as Intel's manual describes the instructions, for CPUs that have none.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace tiles {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct Registers {
    bool configured = false;
    Config config;
    uint8_t bytes[8][16][64];
};

inline Registers& registers() {
    static thread_local Registers all;
    return all;
}

inline void load_config(const void* from) {
    Registers& all = registers();
    std::memcpy(&all.config, from, sizeof all.config);
    if (all.config.palette != 1 || all.config.start_row != 0) std::abort();
    for (int t = 0; t < 8; ++t) {
        const int rows = all.config.rows[t], bytes = all.config.row_bytes[t];
        if (rows > 16 || bytes > 64 || bytes % 4 || (rows == 0) != (bytes == 0)) std::abort();
    }
    all.configured = true;
    std::memset(all.bytes, 0, sizeof all.bytes);
}

inline void release() { registers().configured = false; }

inline Registers& configured(int t) {
    if (!registers().configured || registers().config.rows[t] == 0) std::abort();
    return registers();
}

inline void zero(int t) { std::memset(configured(t).bytes[t], 0, sizeof registers().bytes[t]); }

inline void load(int t, const void* from, int64_t stride) {
    Registers& all = configured(t);
    zero(t);
    for (int r = 0; r < all.config.rows[t]; ++r)
        std::memcpy(all.bytes[t][r], static_cast<const char*>(from) + r * stride, all.config.row_bytes[t]);
}

inline void store(int t, void* to, int64_t stride) {
    Registers& all = configured(t);
    for (int r = 0; r < all.config.rows[t]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, all.bytes[t][r], all.config.row_bytes[t]);
}

// The registers, if c can take the products of a's rows with what b has for every four bytes of them.
inline Registers& fitting(int c, int a, int b) {
    Registers& all = configured(c);
    const bool rows_fit = all.config.rows[a] == all.config.rows[c] && all.config.row_bytes[b] == all.config.row_bytes[c];
    if (!rows_fit || all.config.row_bytes[a] == 0 || all.config.row_bytes[a] != 4 * all.config.rows[b]) std::abort();
    return all;
}

inline float wide(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, sizeof half);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// c += a @ b: even and odd inputs are added up apart from nothing, then together, then to c.
inline void multiply(int c, int a, int b) {
    Registers& all = fitting(c, a, b);
    for (int m = 0; m < all.config.rows[c]; ++m)
        for (int n = 0; n < all.config.row_bytes[c] / 4; ++n) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < all.config.rows[b]; ++k) {
                even = std::fma(wide(all.bytes[a][m] + 4 * k), wide(all.bytes[b][k] + 4 * n), even);
                odd = std::fma(wide(all.bytes[a][m] + 4 * k + 2), wide(all.bytes[b][k] + 4 * n + 2), odd);
            }
            std::memcpy(&sum, all.bytes[c][m] + 4 * n, sizeof sum);
            sum += even + odd;
            std::memcpy(all.bytes[c][m] + 4 * n, &sum, sizeof sum);
        }
}

// c += a @ b of signed bytes, in int32.
inline void multiply_bytes(int c, int a, int b) {
    Registers& all = fitting(c, a, b);
    for (int m = 0; m < all.config.rows[c]; ++m)
        for (int n = 0; n < all.config.row_bytes[c] / 4; ++n) {
            int32_t sum;
            std::memcpy(&sum, all.bytes[c][m] + 4 * n, sizeof sum);
            for (int k = 0; k < all.config.rows[b]; ++k)
                for (int i = 0; i < 4; ++i)
                    sum += static_cast<int8_t>(all.bytes[a][m][4 * k + i]) * static_cast<int8_t>(all.bytes[b][k][4 * n + i]);
            std::memcpy(all.bytes[c][m] + 4 * n, &sum, sizeof sum);
        }
}

}  // namespace tiles

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(from) tiles::load_config(from)
#define _tile_release() tiles::release()
#define _tile_zero(t) tiles::zero(t)
#define _tile_loadd(t, from, stride) tiles::load(t, from, stride)
#define _tile_stored(t, to, stride) tiles::store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) tiles::multiply(c, a, b)
#define _tile_dpbssd(c, a, b) tiles::multiply_bytes(c, a, b)
