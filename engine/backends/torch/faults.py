"""What kind of failure an exception of torch is."""

from __future__ import annotations

import torch


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller step might have worked."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def device_is_lost(error: Exception) -> bool:
    """Whether every later step would fail too, so that only a new process helps."""
    lost = getattr(torch, "AcceleratorError", None)  # torch 2.8 and later
    return lost is not None and isinstance(error, lost) and not is_out_of_memory(error)
