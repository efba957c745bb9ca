"""The most that a GPU can, worked out of what NVML says. Nothing is guessed: one that is not in the table has no limit,
nor has a slice of one. Pure."""

from __future__ import annotations

from typing import NamedTuple

from engine.snapshot import DeviceLimits


class _Generation(NamedTuple):
    """A multiprocessor. cores: FP32 units.  tensor: operations per clock of dense 16-bit products that are summed in 32
    bits; halved: whether GeForce cards do half of that."""

    cores: int
    tensor: int
    halved: bool = False


_GENERATIONS: dict[tuple[int, int], _Generation] = {
    (7, 0): _Generation(64, 1024),
    (7, 5): _Generation(64, 1024, halved=True),
    (8, 0): _Generation(64, 2048),
    (8, 6): _Generation(128, 1024, halved=True),
    (8, 9): _Generation(128, 1024, halved=True),
    (9, 0): _Generation(128, 4096),
    (10, 0): _Generation(128, 8192),
    (12, 0): _Generation(128, 1024, halved=True),
}
"""By compute capability, from NVIDIA's white papers of Volta to Blackwell: their peak rate over multiprocessors and
boost clock."""


def nvidia_limits(
    *,
    capability: tuple[int, int] | None,
    geforce: bool,
    cores: int | None,
    clock_mhz: int | None,
    memory_bits: int | None,
    memory_mhz: int | None,
) -> DeviceLimits | None:
    """What a GPU can at its highest clocks; None where nothing of it is known.

    Memory moves two bits per wire and clock as NVML counts clocks, whatever the kind of memory.
    """
    generation = _GENERATIONS.get(capability) if capability is not None else None
    per_s = memory_bits / 8 * 2 * memory_mhz * 1e6 if memory_bits and memory_mhz else None
    if generation is None or not cores or not clock_mhz:
        return DeviceLimits(bytes_per_s=per_s) if per_s else None
    clocks_per_s = clock_mhz * 1e6
    tensor = generation.tensor / (2 if generation.halved and geforce else 1)
    return DeviceLimits(
        flops_16bit_per_s=cores / generation.cores * tensor * clocks_per_s,
        flops_32bit_per_s=cores * 2 * clocks_per_s,
        bytes_per_s=per_s,
    )
