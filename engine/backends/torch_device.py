"""A device of torch: the memory that it can still give, refusal of what would not fit, and kinds of its failures."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import InsufficientMemory, WorkerFailed, first_line
from engine.system.memory import read_ram

# Workspaces of cuBLAS: up to 32 MiB for each stream that multiplied, which torch keeps until it is asked for them.


def clear_workspaces() -> None:
    """Give them back to torch's allocator; the next product on a stream takes a new one."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # only where torch is built for CUDA
    if clear is not None:
        clear()


def release_cached() -> None:
    """Return what torch keeps of freed GPU memory to the driver. That of a lost device goes with the process, so no
    error here hides why it was lost."""
    try:
        clear_workspaces()
        torch.cuda.empty_cache()
    except Exception as error:
        if not is_device_lost(error):
            raise
        _logger.warning("the memory of a lost device is not given back before the process ends: %s", first_line(error))


_logger = logging.getLogger(__name__)
_MIB = 1 << 20


def free_bytes(device: torch.device) -> int:
    """Bytes that `device` can still give: the driver's number on CUDA, else RAM within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_ram().free_bytes


@contextmanager
def room_for(needed_bytes: int, device: torch.device, purpose: str) -> Iterator[None]:
    """Allocate `needed_bytes` for `purpose` inside this. Raises InsufficientMemory with the numbers, before the block
    where `device` has less free, and in place of torch's own error where an allocation still fails."""
    available = free_bytes(device)
    if needed_bytes > available:
        raise insufficient(needed_bytes, available, str(device), purpose)
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise insufficient(needed_bytes, free_bytes(device), str(device), purpose) from None


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on the caller's thread alone inside this: for a little work on a CPU, as torch's other threads
    sleep by then, and one that has to share its core with another process wakes up milliseconds late."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def give_back(device: torch.device) -> None:
    """Return freed memory to the driver or the system: both allocators keep some of it otherwise, as do cycles."""
    gc.collect()
    if device.type == "cuda":
        release_cached()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def insufficient(needed_bytes: int, available: int, device: str, purpose: str) -> InsufficientMemory:
    """The refusal of `needed_bytes` for `purpose` on a device that has `available` bytes."""
    short = max(0, needed_bytes - available)
    return InsufficientMemory(
        f"{purpose} need {-(-needed_bytes // _MIB)} MiB on {device}, which has {available // _MIB} MiB free"
        + (f": short by {-(-short // _MIB)} MiB" if short else ", but not in one piece"),
        device=device,
        needed_bytes=needed_bytes,
        free_bytes=available,
        short_bytes=short,
    )


# Failures that torch, or a library over it, raises.

_NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""How memory that did not come from torch's caching allocator runs out: of the host, of a graph, of a library."""

_OF_THE_DEVICE = ("CUDA error", "Triton Error [CUDA]")

_OF_ONE_CALL = (
    *("CUBLAS_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_INVALID_VALUE", "CUBLAS_STATUS_ARCH_MISMATCH"),
    *("no kernel image is available", "device kernel image is invalid", "PTX", "invalid device function"),
    *(
        "invalid argument",
        "invalid configuration argument",
        "resources requested for launch",
        "operation not supported",
    ),
)
"""What such errors say where the call alone failed: a kernel that is not for this card or driver, or sizes that none is
for (CUDA Runtime API, cudaError_t: of the others many leave the process in a state in which all calls fail)."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the device or the host ran out of memory, so that a smaller step might have worked."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in _NO_MEMORY)


def is_device_lost(error: Exception) -> bool:
    """Return whether every later call would fail too, so that only a new process helps.

    torch has its own type for it from 2.8 on; before, it is a RuntimeError whose text begins with "CUDA error". Work
    that could not be recorded fails with the same type and costs the recording alone, as do kernels that do not fit the
    device or its driver.
    """
    text = str(error)
    reason = text.partition("\n")[0]  # what follows is advice
    if is_out_of_memory(error) or "captur" in text or any(sign in reason for sign in _OF_ONE_CALL):
        return False
    lost = getattr(torch, "AcceleratorError", None)
    return (lost is not None and isinstance(error, lost)) or text.startswith(_OF_THE_DEVICE)


@contextmanager
def ends_worker() -> Iterator[None]:
    """Raise WorkerFailed in place of an exception that says that the device is lost."""
    try:
        yield
    except Exception as error:
        if is_device_lost(error):
            raise WorkerFailed(f"the worker lost its device: {str(error).splitlines()[0]}") from error
        raise


def failure_reason(error: Exception) -> str:
    """Why a request failed, for its user."""
    if is_out_of_memory(error):
        return f"out of memory in its step: {error}"
    return f"the model failed in its step: {type(error).__name__}: {error}"
