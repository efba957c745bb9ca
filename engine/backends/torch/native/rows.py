"""A weight as it is given to be laid out for products: its rows in one tensor, or in several that lie anywhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rows = Tensor | tuple[Tensor, ...]
"""A weight [out, in], or the parts that its rows lie in, one after the other."""

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a new tensor of that shape and dtype that begins on a line of the cache, with anything in it."""

_ALIGNMENT = 64


class Part(ctypes.Structure):
    """Some of a weight's rows: `Part` of packing.h."""

    _fields_ = (("rows", ctypes.c_void_p), ("count", ctypes.c_int64), ("stride", ctypes.c_int64))


def parts_of(rows: Rows) -> tuple[Tensor, ...]:
    """The tensors that the rows lie in."""
    return (rows,) if isinstance(rows, Tensor) else rows


def shape_of(rows: Rows) -> torch.Size:
    """That of the weight: out, in."""
    parts = parts_of(rows)
    return torch.Size((sum(map(len, parts)), parts[0].shape[1]))


def joined(rows: Rows) -> Tensor:
    """The weight in one piece."""
    parts = parts_of(rows)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def without_gaps(rows: Rows) -> tuple[Tensor, ...]:
    """The same parts, the elements of each row side by side."""
    return tuple(part if part.stride(1) == 1 else part.contiguous() for part in parts_of(rows))


def described(parts: Sequence[Tensor]) -> ctypes.Array[Part]:
    """Where the parts lie, as the kernels are told; good for as long as the parts are."""
    return (Part * len(parts))(*(Part(part.data_ptr(), len(part), part.stride(0)) for part in parts))


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room in this process's own memory."""
    elements, spare = torch.Size(shape).numel(), _ALIGNMENT // dtype.itemsize
    memory = torch.empty(elements + spare, dtype=dtype)
    start = -memory.data_ptr() % _ALIGNMENT // dtype.itemsize
    return memory[start : start + elements].view(shape)
