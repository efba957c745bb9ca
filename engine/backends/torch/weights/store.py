"""WeightStore: source and memory of a decoder's tensors; OwnWeights: the worker's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.backends.torch.model.linear import Linear
from engine.backends.torch.native.library import allocate_aligned

Result = TypeVar("Result")

Make = Callable[[bool], Result]
"""Makes a tensor or a layer. Argument: True if the result is copied at once, so that it may refer to file contents
(`WeightReader.view`)."""


class WeightStore(Protocol):
    """Source of a decoder's tensors.

    complete: True if all exist already and need no more memory.  shared_bytes: memory shared by all workers.
    """

    complete: bool
    shared_bytes: int

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """Return the tensor of that key, made by `make` if it does not exist."""

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """Return the linear layer of that key, made by `make` if it does not exist."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate memory for a weight that a `make` packs, which must not catch an OSError of this."""

    def enlarge_pages(self) -> None:
        """Back the memory with large pages where possible, in a thread. That delays page faults of other threads, so it
        is for the end of a load."""


class OwnWeights:
    """Tensors in this worker's own memory."""

    complete = False
    shared_bytes = 0

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """Return the result of `make`."""
        return make(False)

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """Return the result of `make`."""
        return make(False)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate in this process's memory."""
        return allocate_aligned(shape, dtype)

    def enlarge_pages(self) -> None:
        """Do nothing."""
