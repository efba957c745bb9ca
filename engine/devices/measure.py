"""`python -m engine.devices.measure THREADS`: what this machine's processor can, as one JSON object on stdout.

Each number is the best of a few rounds: others on the machine only ever make one slower.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from engine.snapshot import DeviceLimits

if TYPE_CHECKING:
    import torch

_SIDE = 2048
_MIN_SIDE = 256
_READ_BYTES = 512 << 20
_ROUNDS = 5
_ENOUGH_S = 4.0


def main(threads: int) -> None:
    """Measure and print."""
    import torch

    torch.set_num_threads(threads)
    with torch.inference_mode():
        short, wide = (product_flops_per_s(dtype, _SIDE) for dtype in (torch.bfloat16, torch.float32))
        found = DeviceLimits(
            flops_16bit_per_s=max(short, wide),  # bfloat16 is multiplied as float32 where that is faster
            flops_32bit_per_s=wide,
            bytes_per_s=_READ_BYTES / _best_s(torch.ones(_READ_BYTES // 4).sum),  # more than caches hold
        )
    sys.stdout.buffer.write(msgspec.json.encode(found))


def product_flops_per_s(dtype: torch.dtype, side: int) -> float:
    """Operations per second of a product of square matrices; of smaller ones where those of `side` take too long."""
    import torch

    left, right = torch.randn(2, side, side).to(dtype)
    first_s = _time_s(lambda: left @ right)
    if first_s > _ENOUGH_S / 2 and side > _MIN_SIDE:
        return product_flops_per_s(dtype, side // 2)
    return 2.0 * side**3 / min(first_s, _best_s(lambda: left @ right))


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several rounds."""
    best_s, spent_s = float("inf"), 0.0
    for _ in range(_ROUNDS):
        took_s = _time_s(work)
        best_s, spent_s = min(best_s, took_s), spent_s + took_s
        if spent_s > _ENOUGH_S:
            break
    return best_s


def _time_s(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main(int(sys.argv[1]))
