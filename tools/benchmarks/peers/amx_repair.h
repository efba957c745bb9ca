// Included before every C++ file of llama.cpp (-include). gcc 12 takes no notice that loading a tile configuration
// reads memory, and drops the stores that made it: the tiles are then used unconfigured, and the process dies.
#if defined(__AMX_TILE__) && defined(__GNUC__)
#include <immintrin.h>
static inline void repaired_tile_loadconfig(const void *configuration) {
    __asm__ volatile("" ::: "memory");
    _tile_loadconfig(configuration);
}
#define _tile_loadconfig repaired_tile_loadconfig
#endif
