"""PageCopies: KV pages between a device and the host, through pinned memory. What needs CUDA was not yet run on one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Wait = Callable[[], object]


class PageCopies:
    """Copies rows of bytes from and to one device, as fast as its bus: by way of one pinned buffer for each direction,
    which grows to the largest copy.

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
