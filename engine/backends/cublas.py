"""Workspaces of cuBLAS: up to 32 MiB for each stream that multiplied, which torch keeps until it is asked for them."""

from __future__ import annotations

import torch


def clear_workspaces() -> None:
    """Give them back to torch's allocator; the next product on a stream takes a new one."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # only where torch is built for CUDA
    if clear is not None:
        clear()
