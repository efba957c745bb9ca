// The tile registers of AMX: eight of up to 16 rows of 64 bytes.

#pragma once

#include <immintrin.h>

#include "common.h"

#if defined(ERICLLM_TILES)
#include ERICLLM_TILES  // stands in for the registers, where there are none
#endif

namespace ericllm {

class TileRegisters {
  public:
    static constexpr int64_t kRows = 16, kRowBytes = 64;

    struct Shape {
        int64_t rows;
        int64_t row_bytes;
    };

    TileRegisters() = default;
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
    ~TileRegisters() {
        if (configured_) _tile_release();
    }

    // Shape the first `count` registers, and leave the others unused.
    template <size_t count>
    void configure(const Shape (&shapes)[count]) {
        static_assert(count <= 8, "there are eight registers");
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (size_t t = 0; t < count; ++t) {
            config.rows[t] = static_cast<uint8_t>(shapes[t].rows);
            config.row_bytes[t] = static_cast<uint16_t>(shapes[t].row_bytes);
        }
        // The intrinsic reads more than compilers know of: without this they leave out what was written above.
        asm volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
        configured_ = true;
    }

  private:
    bool configured_ = false;
};

}  // namespace ericllm
