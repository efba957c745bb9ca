"""NativeAttention: attention over pages by the native kernel, called once per layer of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
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
    """Index arrays of a step: the rows and pages of each sequence.

    chunks: int32 [chunks, 4]: first row, rows, position of the first, and start of its pages in `pages`, int32.
    """

    __slots__ = ("_step", "address", "attention", "chunks", "pages")

    def __init__(self, attention: NativeAttention, chunks: Sequence[ChunkInput], page_tokens: int) -> None:
        rows = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        counts = -(-(starts + rows) // page_tokens)
        self.attention = attention
        self.chunks = np.stack((_exclusive_sums(rows), rows, starts, _exclusive_sums(counts)), axis=1)
        used = [chunk.pages[:count] for chunk, count in zip(chunks, counts.tolist(), strict=True)]
        self.pages = np.fromiter(chain.from_iterable(used), np.int32, int(counts.sum()))
        self._step = Step(self.chunks.ctypes.data, len(chunks), self.pages.ctypes.data)
        self.address = ctypes.addressof(self._step)

    def positions(self) -> Tensor:
        """Return the position of every row, int64 [T]."""
        first, rows, starts, _ = self.chunks.T
        return torch.from_numpy(np.arange(rows.sum()) + np.repeat(starts - first, rows))

    def attend(self, layer: int, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Run `NativeAttention.attend` for this step."""
        return self.attention.attend(layer, qkv, self, angles)


def _exclusive_sums(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return the exclusive cumulative sums."""
    return np.cumsum(counts, dtype=np.int32) - counts


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
