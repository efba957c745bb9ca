"""Kinds of failures that torch, or a library over it, raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import WorkerFailed

_NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
)
"""How memory that did not come from torch's caching allocator runs out: of the host, of a graph, of a library."""

_OF_THE_DEVICE = ("CUDA error", "Triton Error [CUDA]")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the device or the host ran out of memory, so that a smaller step might have worked."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in _NO_MEMORY)


def is_device_lost(error: Exception) -> bool:
    """Return whether every later call would fail too, so that only a new process helps.

    torch has its own type for it from 2.8 on; before, it is a RuntimeError whose text begins with "CUDA error". Work
    that could not be recorded fails with the same type and costs the recording alone.
    """
    text = str(error)
    if is_out_of_memory(error) or "captur" in text:
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
        return f"there is not enough memory left to work on it: {error}"
    return f"the model failed while working on it: {type(error).__name__}: {error}"
