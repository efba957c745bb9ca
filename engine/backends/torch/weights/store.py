"""Where the tensors of a decoder come from and lie, as far as who builds one has to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.backends.torch.model.linear import Linear
from engine.backends.torch.native.library import aligned

Made = TypeVar("Made")

Make = Callable[[bool], Made]
"""Makes a tensor or a layer. It is told whether it may keep what is only lent (`WeightReader.lend`), as a copy is taken
of what it makes."""


class WeightStore(Protocol):
    """Where a decoder's tensors come from.

    complete: whether all are there, and take no more memory.  shared_bytes: how many bytes all workers have once.
    """

    complete: bool
    shared_bytes: int

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """The tensor of that key, made by `make` where it is not there yet."""

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """The linear layer of that key, made by `make` where it is not there yet."""

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where a weight that is packed in a `make` is to lie. An OSError is for that `make` to let pass."""

    def enlarge_pages(self) -> None:
        """Have the memory backed by large pages where it can be, by a thread. That keeps others from touching new
        memory, so it is for when the load is over."""


class OwnWeights:
    """Every tensor is this worker's own."""

    complete = False
    shared_bytes = 0

    def tensor(self, key: str, make: Make[Tensor]) -> Tensor:
        """What `make` makes."""
        return make(False)

    def linear(self, key: str, make: Make[Linear]) -> Linear:
        """What `make` makes."""
        return make(False)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """In this process's memory."""
        return aligned(shape, dtype)

    def enlarge_pages(self) -> None:
        """It is left as it is."""
