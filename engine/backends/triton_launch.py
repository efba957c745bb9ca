"""Triton kernels that are launched without Triton's own look at every argument, and whether they work on a device.

A decode of few requests waits for the host, and Triton's `run` takes 6 to 30 microseconds of Python for each launch. So
a kernel is compiled and loaded once for its constants, and then called with addresses and numbers.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import platformdirs
import torch
from torch import Tensor

from engine.backends.common.gguf_codes import CODES_CAPABILITY, triton_problem
from engine.backends.torch_device import is_device_lost
from engine.system.files import claim_folder

Number = int | float

_ALIGNED_BYTES = 16
_DIRECT_VERSIONS = ((3, 3), (3, 7))
"""The first and the last version of Triton whose compiled kernels are known to be launched by `run(x, y, z, stream,
function, metadata, launch_metadata, enter_hook, exit_hook, *arguments)`, constants among the arguments."""


class Kernel:
    """A Triton kernel with its constants on one device.

    function: takes tensors, numbers and constants, in this order; it is not specialised for the first numbers.
    kinds: dtypes of the tensors.  varying: the first numbers of some call, which each launch has its own of.  numbers:
    the others.  constants: those of the function, and the compiler's options.
    """

    def __init__(
        self,
        function: Any,
        device: torch.device,
        kinds: Sequence[torch.dtype],
        constants: Mapping[str, Any],
        *,
        varying: Sequence[Number] = (),
        numbers: Sequence[Number] = (),
    ) -> None:
        self._function, self._device, self._constants, self._numbers = function, device, constants, tuple(numbers)
        self._index = device.index or 0
        self._guarded = device.type == "cuda" and torch.cuda.device_count() > 1
        self._run: Callable[..., None] | None = None
        if not launches_directly(function):
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            compiled = function.warmup(*kinds, *varying, *numbers, grid=(1,), **constants)
            compiled.run  # noqa: B018 - loads it
        self._run, self._loaded, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._rest = (*numbers, *(constants[name] for name in function.arg_names if name in constants))
        self._current_stream = current_stream()

    def __call__(self, grid: tuple[int, int], *tensors: Tensor, varying: Sequence[Number] = ()) -> None:
        """Launch it on the device's current stream."""
        if self._guarded and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._device):
                self(grid, *tensors, varying=varying)
            return
        if self._run is None:
            self.launch(grid, varying, 0, tensors, None)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        self.launch(
            grid, varying, self._current_stream(self._index), tensors, None if bits % _ALIGNED_BYTES else addresses
        )

    def launch(
        self,
        grid: tuple[int, int],
        varying: Sequence[Number],
        stream: int,
        tensors: Sequence[Tensor],
        addresses: Sequence[int] | None,
    ) -> None:
        """Launch it on `stream`, the current one of the current device. addresses: of the tensors, where all are
        multiples of 16."""
        if self._run is not None and addresses is not None:
            # The hooks, all None, are those of Triton's profiler.
            x, y = grid
            self._run(
                x, y, 1, stream, self._loaded, self._metadata, None, None, None, *addresses, *varying, *self._rest
            )
        else:
            self._function[grid](*tensors, *varying, *self._numbers, **self._constants)


class Kernels:
    """The kernels that calls on one device need, each prepared by the first of these."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels: dict[Hashable, Kernel] = {}
        self.get: Final = self._kernels.get

    @property
    def all(self) -> Iterable[Kernel]:
        """Those that were needed."""
        return self._kernels.values()

    def add(
        self,
        key: Hashable,
        function: Any,
        tensors: Sequence[Tensor],
        *,
        varying: Sequence[Number] = (),
        numbers: Sequence[Number] = (),
        constants: Mapping[str, Any],
    ) -> Kernel:
        """Prepare a kernel for tensors like these, see `Kernel`, and keep it under `key`."""
        kinds = [tensor.dtype for tensor in tensors]
        kernel = Kernel(function, self._device, kinds, constants, varying=varying, numbers=numbers)
        self._kernels[key] = kernel
        return kernel


def is_interpreted(function: Any) -> bool:
    """Return whether Triton's interpreter runs the kernel, and no GPU."""
    return not isinstance(function, importlib.import_module("triton").runtime.JITFunction)


def launches_directly(function: Any) -> bool:
    """Return whether the installed Triton's compiled kernel can be launched without Triton."""
    version = tuple(int(part) for part in importlib.import_module("triton").__version__.split(".")[:2])
    return not is_interpreted(function) and _DIRECT_VERSIONS[0] <= version <= _DIRECT_VERSIONS[1]


def current_stream() -> Callable[[int], int]:
    """Return the function that gives the address of a device's current stream, by the device's number."""
    found: Callable[[int], int] = importlib.import_module("triton").runtime.driver.active.get_current_stream
    return found


def claim_triton_cache() -> None:
    """Have Triton load no library that another user could have put there: the folder that it makes by itself has the
    modes of the user's mask. One that TRITON_CACHE_DIR names is the operator's own affair."""
    if "TRITON_CACHE_DIR" not in os.environ:
        folder = platformdirs.user_cache_path("ericllm") / "triton"
        claim_folder(folder, 1)
        os.environ["TRITON_CACHE_DIR"] = str(folder)


# Sizes of launches.


class Gpu(NamedTuple):
    """A GPU as far as sizes depend on it: multiprocessors and compute capability."""

    processors: int
    capability: tuple[int, int]


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the sizes of `device`; for the interpreter, those of an H100."""
    if device.type != "cuda":
        return Gpu(processors=132, capability=(9, 0))
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, (found.major, found.minor))


def cdiv(size: int, block: int) -> int:
    """Return the blocks that `size` takes, the last maybe in part."""
    return -(-size // block)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


# Whether they can be used.


def kernels_problem(devices: Sequence[torch.device], kernels: str, trial: Callable[[torch.device], str]) -> str:
    """Return why `kernels` (as the subject of a sentence) cannot compute on `devices`, as a clause; "" where they can.

    trial: uses them on a device, and returns what is wrong there, if anything: a missing compiler or an unsupported GPU
    would make it raise. Raises where a device is lost.
    """
    if problem := triton_problem():
        return problem
    for device in devices:
        if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CODES_CAPABILITY:
            return "Triton needs compute capability 8.0, not {}.{}".format(*found)
    for device in devices:
        try:
            if problem := trial(device):
                return f"{problem} on {device}"
        except Exception as error:  # whatever a compiler, a driver or a library raises
            if is_device_lost(error):
                raise
            text = (str(error) or repr(error)).strip().splitlines()[0]
            return f"{kernels} fail on {device}: {type(error).__name__}: {text[:200]}"
    return ""
