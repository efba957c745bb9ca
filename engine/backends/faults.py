"""What kind of failure an exception out of torch, or of a library over it, is."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device or the host ran out of memory, so that a smaller step might have worked."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def device_is_lost(error: Exception) -> bool:
    """Whether every later call would fail too, so that only a new process helps.

    torch has its own type for it from 2.8 on; before, it is a RuntimeError whose text begins with "CUDA error".
    """
    if is_out_of_memory(error):
        return False
    lost = getattr(torch, "AcceleratorError", None)
    return (lost is not None and isinstance(error, lost)) or str(error).startswith("CUDA error")


def reason(error: Exception) -> str:
    """Why a request failed, for its user."""
    if is_out_of_memory(error):
        return f"there is not enough memory left to work on it: {error}"
    return f"the model failed while working on it: {type(error).__name__}: {error}"
