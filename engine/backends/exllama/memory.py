"""The GPUs as a load sees them: how many there are and what each has left."""

from __future__ import annotations

import gc
from typing import Protocol


class Gpus(Protocol):
    """The visible GPUs, numbered as torch numbers them."""

    def count(self) -> int:
        """How many there are."""

    def free_bytes(self, number: int) -> int:
        """Bytes that a GPU can still give."""

    def give_back(self) -> None:
        """Collect what nothing refers to any more, and return it to the driver."""


class CudaGpus:
    """The GPUs of torch.cuda."""

    def count(self) -> int:
        """How many there are."""
        import torch

        return torch.cuda.device_count()

    def free_bytes(self, number: int) -> int:
        """The driver's number, and what torch has cached and can use again."""
        import torch

        cached = torch.cuda.memory_reserved(number) - torch.cuda.memory_allocated(number)
        return int(torch.cuda.mem_get_info(number)[0]) + int(cached)

    def give_back(self) -> None:
        """Collect garbage, cycles too, and empty torch's cache."""
        import torch

        from engine.backends.cublas import clear_workspaces

        gc.collect()
        if torch.cuda.is_initialized():
            clear_workspaces()
            torch.cuda.empty_cache()
