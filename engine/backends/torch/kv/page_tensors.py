"""KvPool: the tensors of the KV pages of every layer, addressed by page and by slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.base import LoadProgress
from engine.backends.common.kv_format import HeadFormat
from engine.backends.common.model_config import ModelConfig
from engine.backends.torch.huge_pages import advise_huge_pages
from engine.backends.torch.kv.codec import HeadCodec
from engine.backends.torch.kv.page_file import PageFile
from engine.backends.torch.layout import Layout

Wait = Callable[[], object]


class KvPool:
    """Per layer one tensor [pages, page_tokens, 2 * kv_heads, head_dim]: a token's key heads, then its value heads.

    Keys and values of a token are adjacent, so that one copy writes both and one gather of whole pages reads both. A
    slot is page * page_tokens + offset. A layer's pages are on the device of its weights. Gathers on a device share one
    scratch buffer, which grows to the largest: for long contexts, page faults of new memory would take longer than the
    gather.

    With native attention, pages are as many bytes, in the kernels' own layout; see native/attention.h.

    page_bytes: of a page, all layers together.  in_host_memory: True if all pages are in RAM.
    file: that has the pages, of a model on a CPU; None where they are this process's own.
    codec: encodes heads; a page then has their bytes, [..., head_bytes]. None for plain heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_tokens: int,
        *,
        heads: HeadFormat,
        dtype: torch.dtype,
        layout: Layout,
        report: Callable[[LoadProgress], None],
        file_name: str = "",
    ) -> None:
        """Allocate and count zeroed pages (stale bits could be NaN, which masks do not hide), touched so that the
        memory is really reserved. Raises InsufficientMemory with the numbers.

        file_name: of a RAM file to have them in, or to find those of an earlier worker in; "" for neither.
        """
        self.page_tokens = page_tokens
        devices = [memory.device for memory in layout.memories]
        self.codec = HeadCodec(heads, devices) if heads.is_quantised else None
        stored_dtype, size = (torch.uint8, heads.head_bytes) if heads.is_quantised else (dtype, heads.head_dim)
        shape = (num_pages, page_tokens, 2 * config.kv_heads, size)
        layer_bytes = num_pages * page_tokens * 2 * config.kv_heads * heads.head_bytes
        self.total_bytes = layer_bytes * config.layers
        self.page_bytes = self.total_bytes // num_pages
        self.in_host_memory = all(device.type == "cpu" for device in devices)
        self._scratch = {device: _Scratch(shape[1:], stored_dtype, device) for device in devices}
        self._decoded = {device: _Scratch((*shape[1:-1], heads.head_dim), dtype, device) for device in devices}
        self.layers: list[Tensor] = []
        on_cpu = self.in_host_memory and len(layout.spans) == 1 and not layout.first.simulated
        wanted = (file_name, self.total_bytes, num_pages)
        self.file = PageFile.find(*wanted) if file_name and on_cpu else None
        if self.file is not None:
            self.layers = list(_in_file(self.file, config.layers, shape, stored_dtype))
            layout.first.kv_bytes += self.total_bytes
            return
        for span in layout.spans:
            span_bytes = layer_bytes * len(span.layers)
            where = "" if len(layout.spans) == 1 else f" for {len(span.layers)} of {config.layers} layers"
            with span.memory.room_for(span_bytes, f"{num_pages} KV pages of {page_tokens} tokens{where}"):
                self.file = PageFile.create(*wanted) if file_name and on_cpu else None
                if self.file is not None:
                    allocated = _in_file(self.file, config.layers, shape, stored_dtype)
                else:
                    allocated = _allocate_untouched(len(span.layers), shape, stored_dtype, span.device)
                for layer, pages in zip(span.layers, allocated, strict=True):
                    self.layers.append(pages if self.file is not None else pages.zero_())
                    report(LoadProgress(phase="kv_cache", done=layer_bytes * (layer + 1), total=self.total_bytes))
            span.memory.kv_bytes += span_bytes

    def write(self, layer: int, slots: Tensor, keys_values: Tensor, *, attended: bool = True) -> None:
        """Store `keys_values` [T, 2 * kv_heads, head_dim] at `slots` [T].

        With a codec, those that are `attended` to where they are become what `read` will return, rotated and rounded,
        so that tokens of the same step attend to the same values as later ones, and answers do not depend on how a
        prompt is split into chunks.
        """
        rows = keys_values
        if self.codec is not None:
            rows = self.codec.encode(keys_values)
            if attended:
                keys_values.copy_(self.codec.decode(rows, torch.empty_like(keys_values)))
        self.layers[layer].flatten(0, 1).index_copy_(0, slots, rows)

    @torch.inference_mode()
    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """Return the bytes of each of these pages, layer after layer.

        The pages must be computed, and stay as they are meanwhile: on a GPU nothing else that it computes is waited
        for.
        """
        if self.in_host_memory:
            return [b"".join([rows[page].data for rows in self._host_rows]) for page in pages]
        parts = [
            self._copies[device].to_host(partial(_gather, layers, pages, device))
            for device, layers in self._device_layers
        ]
        return [b"".join(part[row].data for part in parts) for row in range(len(pages))]

    @torch.inference_mode()
    def write_pages(self, pages: Sequence[int], contents: bytes | memoryview) -> None:
        """Fill these pages with what `read_pages` returned of each, which follow each other in `contents`."""
        content_rows = np.frombuffer(contents, dtype=np.uint8).reshape(len(pages), self.page_bytes)
        start = 0
        for device, layers in self._device_layers:
            sizes = [layer[0].nbytes for layer in layers]
            rows = content_rows[:, start : start + sum(sizes)]
            start += sum(sizes)
            if self.in_host_memory:
                parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
                for host_layer, part in zip(self._host_rows, parts, strict=True):
                    host_layer[pages] = part
                continue
            ids = torch.tensor(pages, device=device)
            for layer, sent in zip(layers, self._copies[device].to_device(rows).split(sizes, dim=1), strict=True):
                layer.index_copy_(0, ids, sent.contiguous().view(layer.dtype).view(len(pages), *layer.shape[1:]))

    @cached_property
    def _device_layers(self) -> list[tuple[torch.device, list[Tensor]]]:
        """The layers in order, by the devices that have them."""
        return [(device, list(layers)) for device, layers in groupby(self.layers, lambda layer: layer.device)]

    @cached_property
    def _copies(self) -> dict[torch.device, PageCopies]:
        return {device: PageCopies(device) for device, _ in self._device_layers}

    @cached_property
    def _host_rows(self) -> list[NDArray[np.uint8]]:
        """Per layer, the bytes of each page."""
        return [layer.flatten(1).view(torch.uint8).numpy() for layer in self.layers]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of all pages, [pages, page_tokens, kv_heads, head_dim]; with a codec
        int8, [..., head_bytes]."""
        pages = self.layers[layer]
        keys, values = (pages if self.codec is None else pages.view(torch.int8)).chunk(2, dim=2)
        return keys, values

    def read(self, layer: int, pages: Tensor | slice, sequences: int) -> Tensor:
        """Return the tokens of `pages` (equally many for each of `sequences`): [sequences, tokens, 2 * kv_heads, d].

        The result is valid until the next `read`, and must be released before it: a view for a slice of plain pages,
        else a copy.
        """
        pool = self.layers[layer]
        if isinstance(pages, slice):
            tokens = pool[pages]
        else:
            tokens = torch.index_select(pool, 0, pages, out=self._scratch[pool.device].pages(len(pages)))
        if self.codec is not None:
            tokens = self.codec.decode(tokens, self._decoded[pool.device].pages(len(tokens)))
        return tokens.view(sequences, -1, *tokens.shape[2:])


def _allocate_untouched(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Sequence[Tensor]:
    """Allocate pages of some layers; in RAM as one piece, so that huge pages back it."""
    if device.type != "cpu":
        return [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
    return advise_huge_pages(torch.empty((layers, *shape), dtype=dtype)).unbind()


def _gather(layers: Sequence[Tensor], pages: Sequence[int], device: torch.device) -> Tensor:
    """Return the bytes of these pages of some layers of a device, [pages, bytes]."""
    ids = torch.tensor(pages, device=device)
    return torch.cat([layer[ids].flatten(1).view(torch.uint8) for layer in layers], dim=1)


def _in_file(file: PageFile, layers: int, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the pages of each layer, which are one after the other in a file."""
    return file.pages.view(dtype).view(layers, *shape).unbind()


class _Scratch:
    """Buffer for copies of pages, which grows to the largest number requested."""

    def __init__(self, page_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pages = torch.empty((0, *page_shape), dtype=dtype, device=device)

    def pages(self, count: int) -> Tensor:
        """Return room for `count` pages; earlier contents are lost."""
        if len(self._pages) < count:
            self._pages = self._pages[:0].clone()  # frees the smaller buffer before the larger one is allocated
            self._pages = self._pages.new_empty((count, *self._pages.shape[1:]))
        return self._pages[:count]


class PageCopies:
    """Copies rows of bytes from and to one device, as fast as its bus: by way of one pinned buffer for each direction,
    which grows to the largest copy. What needs CUDA was not yet run on one.

    Out of the device, copies have a stream of their own, so they wait for no step; into it, they are in the order of
    the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = self._in = self.allocate(0)
        self._sent: Wait = lambda: None

    def allocate(self, size_bytes: int) -> Tensor:
        """Return a new buffer, pinned for a GPU."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def mark(self) -> Wait:
        """Return a wait for what is queued on the current stream."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def to_host(self, gather: Callable[[], Tensor]) -> NDArray[np.uint8]:
        """Return the bytes that `gather` returns on the device, [rows, bytes], once they are on the host; valid until
        the next call."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            rows = gather()
            if len(self._out) < rows.numel():
                self._out = self.allocate(rows.numel())
            host = self._out[: rows.numel()].view(rows.shape)
            host.copy_(rows, non_blocking=True)
            self.mark()()
        return host.numpy()

    def to_device(self, rows: NDArray[np.uint8]) -> Tensor:
        """Queue a copy of `rows` to the device, and return it."""
        self._sent()
        if len(self._in) < rows.size:
            self._in = self.allocate(rows.size)
        buffer = self._in[: rows.size].view(rows.shape)
        buffer.numpy()[:] = rows
        sent = buffer.to(self._device, non_blocking=True, copy=True)
        self._sent = self.mark()
        return sent

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
