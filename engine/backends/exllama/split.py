"""How a model is spread over the GPUs: a pure decision. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config import ModelSpec
from engine.errors import BackendUnavailable, InvalidRequest

SplitKind = Literal["one", "given", "automatic", "tensor_parallel"]

FIRST_RESERVE_BYTES = 192 << 20
"""Left free on the first GPU by default: it also holds what a desktop or a display needs."""

OTHER_RESERVE_BYTES = 64 << 20

_ALL_GB = 99999.0
"""The library's word for "as much as there is"."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Split:
    """kind: whole layers on one GPU, by given sizes or as they fit, or every layer over all GPUs.

    gigabytes: per GPU for weights and buffers, in units of 1024**3; None leaves it to the library.
    reserve_bytes: left free on each visible GPU.  numbers: the GPUs that may be used.
    """

    kind: SplitKind
    gigabytes: tuple[float, ...] | None
    reserve_bytes: tuple[int, ...]
    numbers: tuple[int, ...]

    @property
    def sizes_cache_first(self) -> bool:
        """Whether the cache's size has to be known before the weights are loaded."""
        return self.kind in ("automatic", "tensor_parallel")

    @property
    def names(self) -> str:
        """The GPUs that may be used, for messages."""
        return ", ".join(f"cuda:{number}" for number in self.numbers)


def plan_split(spec: ModelSpec, gpus: int) -> Split:
    """The split that `spec` asks for on a machine of `gpus` GPUs. Raises InvalidRequest naming the setting."""
    if gpus < 1:
        raise BackendUnavailable("exllamav2 computes on NVIDIA GPUs, and torch sees none here", param="backend")
    reserve = _reserve(spec, gpus)
    number = _number(spec.device, gpus)
    everywhere = tuple(range(gpus))
    for param, is_set in (("gpu_split", bool(spec.gpu_split_gb)), ("tensor_parallel", spec.tensor_parallel)):
        if is_set and number is not None:
            raise InvalidRequest(
                f"{param} spreads a model over the GPUs, and device names one: {spec.device}", param=param
            )
    if len(spec.gpu_split_gb) > gpus:
        raise InvalidRequest(
            f"gpu_split names {len(spec.gpu_split_gb)} GPUs; this machine has {gpus}", param="gpu_split"
        )
    gigabytes = spec.gpu_split_gb or None
    if spec.tensor_parallel:
        return Split("tensor_parallel", gigabytes, reserve, everywhere)
    if gigabytes is not None:
        given = tuple(number for number, size in enumerate(gigabytes) if size > 0)
        return Split("given", gigabytes, reserve, given or everywhere)
    if number is not None:
        return Split("one", whole(number), reserve, (number,))
    return Split("automatic", None, reserve, everywhere)


def whole(number: int) -> tuple[float, ...]:
    """A split that puts everything on one GPU."""
    return (*(0.0,) * number, _ALL_GB)


def _reserve(spec: ModelSpec, gpus: int) -> tuple[int, ...]:
    if len(spec.gpu_reserve_mib) > gpus:
        raise InvalidRequest(
            f"gpu_reserve names {len(spec.gpu_reserve_mib)} GPUs; this machine has {gpus}", param="gpu_reserve"
        )
    default = [FIRST_RESERVE_BYTES, *[OTHER_RESERVE_BYTES] * (gpus - 1)]
    asked = [mebibytes * _MIB for mebibytes in spec.gpu_reserve_mib]
    return tuple(asked + default[len(asked) :])


def _number(device: str, gpus: int) -> int | None:
    """The GPU that `device` names; None where it names none."""
    if device == "auto":
        return None
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidRequest(f"device is {device}; exllamav2 computes on cuda:0, cuda:1, ... alone", param="device")
    if int(number or "0") >= gpus:
        raise InvalidRequest(f"device is {device}; this machine has {gpus} GPUs, from cuda:0 on", param="device")
    return int(number or "0")
