"""Tensors that oneDNN packed, taken apart into plain bytes and put together again over memory of ours.

A packed tensor is opaque to torch: its bytes mean something only together with oneDNN's description of their layout.
torch's ahead-of-time compiler keeps both in a file and maps them back (torch/_inductor/codecache.py); the functions are
those that it uses, of torch's stable C interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_LIBRARY = "libtorch_cpu.so"
_CHECK_SHAPE = (96, 64)


class Packed(NamedTuple):
    """Where the bytes of a tensor lie, how many they are, and oneDNN's description of their layout."""

    address: int
    size_bytes: int
    layout: bytes

    def view(self) -> memoryview:
        """The bytes themselves, while the tensor lives."""
        return memoryview((ctypes.c_ubyte * self.size_bytes).from_address(self.address)).cast("B")


def pack_weight(weight: Tensor) -> Tensor:
    """`weight` [out, in] as oneDNN lays it out for this machine. Raises RuntimeError where it cannot."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def taken_apart(tensor: Tensor) -> Packed:
    """The parts of a packed tensor, which must outlive their use."""
    layout: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor)
    return Packed(torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor), bytes(layout.tolist()))


def put_together(address: int, shape: Sequence[int], dtype: torch.dtype, layout: bytes) -> Tensor:
    """A packed tensor [out, in] over the bytes at `address`, which must stay there for as long as it is used.

    Raises RuntimeError where torch refuses.
    """
    library = _library()
    rows, columns = shape
    handle = ctypes.c_void_p()
    failed = library.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(2),
        (ctypes.c_int64 * 2)(rows, columns),
        (ctypes.c_int64 * 2)(columns, 1),
        ctypes.c_int64(0),
        ctypes.c_int32(getattr(library, f"aoti_torch_dtype_{dtype_name(dtype)}")()),
        ctypes.c_int32(library.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(library.aoti_torch_layout__mkldnn()),
        layout,
        ctypes.c_int64(len(layout)),
    )
    if failed:
        raise RuntimeError("torch made no packed tensor over memory of ours")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    (tensor,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule(handle, None, None)])
    return tensor


@cache
def can_put_together(dtype: torch.dtype) -> bool:
    """Whether all of this works here for `dtype`, tried on a small weight: the product must be the same to the bit."""
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_CHECK_SHAPE, generator=generator).to(dtype)
        ours = pack_weight(weight)
        parts = taken_apart(ours)
        memory = ctypes.create_string_buffer(parts.size_bytes + 64)
        address = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(address, parts.address, parts.size_bytes)
        rebuilt = put_together(address, weight.shape, dtype, parts.layout)
        x = torch.randn(3, _CHECK_SHAPE[1], generator=generator).to(dtype)
        return bool(torch.equal(_product(x, ours), _product(x, rebuilt)))
    except (RuntimeError, AttributeError, OSError):
        return False


@cache
def _library() -> ctypes.CDLL:
    """The library that torch has loaded already. Raises OSError where it is called otherwise."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))


def dtype_name(dtype: torch.dtype) -> str:
    """As ModelSpec.dtype has it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _product(x: Tensor, packed: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return product
