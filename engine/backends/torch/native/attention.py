"""NativeAttention: attention over pages by the native kernel, called once per layer of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.backends.common.kv_format import HeadFormat
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.native.library import NativeLibrary
from engine.config import CacheBits

TILE_TOKENS: Final = 16
"""Page sizes must be multiples of this."""

DTYPES: Final = frozenset({torch.bfloat16, torch.float32})
"""Dtypes of queries, keys and values."""

_ADDRESS, _SIZE, _FLAG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The heads of a layer.

    window: max tokens that a query attends to.  scale, cap: see `attention.Scores`.
    norm: float32 [heads + kv_heads, head_dim], weights of an RMS norm per query and key head; None where there is none,
    or it is computed before.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scale: float
    cap: float = 0.0
    norm: Tensor | None = None
    epsilon: float = 0.0


class Layer(ctypes.Structure):
    """`Layer` of attention_call.h, which documents the fields."""

    _fields_ = (
        ("pages", _ADDRESS),
        ("norm", _ADDRESS),
        ("heads", _SIZE),
        ("kv_heads", _SIZE),
        ("head_dim", _SIZE),
        ("page_tokens", _SIZE),
        ("window", _SIZE),
        ("head_bytes", _SIZE),
        ("bits", _SIZE),
        ("spread", _SIZE),
        ("group", _SIZE),
        ("epsilon", _FLOAT),
        ("scale", _FLOAT),
        ("cap", _FLOAT),
    )


class Step(ctypes.Structure):
    """`Step` of attention_call.h."""

    _fields_ = (("chunks", _ADDRESS), ("count", _SIZE), ("pages", _ADDRESS))


class NativeAttention:
    """Attention of all layers of a model over their pages. Keys and values are stored there in the kernel's own layout.

    A query's result depends only on itself and the keys before it, not on the rest of the batch, the chunks of its
    sequence, or the number of threads.

    floats: True if all is float32.  addresses: of the layers' descriptors.
    """

    def __init__(
        self,
        library: NativeLibrary,
        layers: Sequence[Heads],
        pages: Sequence[Tensor],
        *,
        dtype: torch.dtype,
        bits: CacheBits = 16,
    ) -> None:
        """pages: per layer, [pages, page_tokens, 2 * kv_heads, ...], any dtype of that size in bytes.
        dtype: of queries, keys and values, one of DTYPES.  bits: of stored keys and values; 16 for plain ones.
        Raises AttributeError where the library lacks the kernel."""
        self._library, self._layers, self._pages = library, layers, pages  # kept alive for their addresses
        self._dtype, self._page_tokens = dtype, pages[0].shape[1]
        self.floats: Final = dtype is torch.float32
        self._descriptors = (Layer * len(layers))(
            *(
                _describe(heads, layer_pages, HeadFormat(heads.head_dim, bits, dtype.itemsize))
                for heads, layer_pages in zip(layers, pages, strict=True)
            )
        )
        first = ctypes.addressof(self._descriptors)
        self.addresses: Final = [first + index * ctypes.sizeof(Layer) for index in range(len(layers))]
        self._attend = library.functions["ericllm_attention"]
        self._attend.restype = None
        self._attend.argtypes = (
            *(_FLAG, _ADDRESS, _ADDRESS),
            *(_ADDRESS, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _FLAG),
        )

    def norms(self, layer: int) -> bool:
        """Return whether the kernel norms the layer's query and key heads."""
        return self._layers[layer].norm is not None

    def step(self, chunks: Sequence[ChunkInput]) -> NativeStep:
        """Return the indices of a step with these chunks, the same for every layer."""
        return NativeStep(self, chunks, self._page_tokens)

    def attend(self, layer: int, qkv: Tensor, step: NativeStep, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return attention outputs [T, heads * head_dim] of rows `qkv` [T, heads + 2 * kv_heads, head_dim], and write
        their keys and values to the pages. angles: float32, of `RotaryEmbedding.angles`."""
        if qkv.dtype is not self._dtype or not qkv[0].is_contiguous():
            raise ValueError(f"attention of {self._dtype} got rows of {qkv.dtype} with strides {qkv.stride()}")
        heads = self._layers[layer]
        out = torch.empty((qkv.shape[0], heads.heads * heads.head_dim), dtype=self._dtype)
        cosines, sines = angles or (None, None)
        self._attend(
            torch.get_num_threads(),
            self.addresses[layer],
            step.address,
            qkv.data_ptr(),
            qkv.stride(0),
            None if cosines is None else cosines.data_ptr(),
            None if sines is None else sines.data_ptr(),
            0 if cosines is None else cosines.shape[-1],
            out.data_ptr(),
            self.floats,
        )
        return out


class NativeStep:
    """Index arrays of a step: the rows and pages of each sequence. Plain arrays, as most steps have few of either.

    positions: of every row.  last_rows: the last row of each chunk.
    """

    __slots__ = ("_chunks", "_pages", "_step", "address", "attention", "last_rows", "positions")

    def __init__(self, attention: NativeAttention, chunks: Sequence[ChunkInput], page_tokens: int) -> None:
        self.attention = attention
        self.positions: list[int] = []
        self.last_rows: list[int] = []
        self._chunks, self._pages = array("i"), array("i")  # int32, `Chunk` of attention_call.h and page ids
        for chunk in chunks:
            first, end = len(self.positions), chunk.end
            self._chunks.extend((first, end - chunk.start, chunk.start, len(self._pages)))
            self._pages.extend(chunk.pages[: -(-end // page_tokens)])
            self.positions.extend(range(chunk.start, end))
            self.last_rows.append(len(self.positions) - 1)
        self._step = Step(self._chunks.buffer_info()[0], len(chunks), self._pages.buffer_info()[0])
        self.address = ctypes.addressof(self._step)

    def attend(self, layer: int, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run `NativeAttention.attend` for this step."""
        return self.attention.attend(layer, qkv, self, angles)


def _describe(heads: Heads, pages: Tensor, format: HeadFormat) -> Layer:
    return Layer(
        pages=pages.data_ptr(),
        norm=None if heads.norm is None else heads.norm.data_ptr(),
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        page_tokens=pages.shape[1],
        window=heads.window or 0,
        head_bytes=format.head_bytes,
        bits=format.bits,
        spread=format.hadamard_size if format.is_quantised else 0,
        group=format.group if format.is_quantised else 0,
        epsilon=heads.epsilon,
        scale=heads.scale,
        cap=heads.cap,
    )
