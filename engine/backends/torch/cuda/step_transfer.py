"""Transfers of a step: its plan to the device, in one copy from pinned memory that the host does not wait for, and
sampled ids back to the host. What needs CUDA was not yet run on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.torch.model.step_plan import StepPlan, map_tensors

_ALIGNED_BYTES = 16


class Uploader(Protocol):
    """Copies bytes to a device, in the order of its work."""

    def buffer(self, size_bytes: int) -> Tensor:
        """Return a buffer to fill, uint8 [size_bytes], which is the caller's until it is sent."""

    def send(self, buffer: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy a filled buffer to the device without waiting, to the start of `target` or to new memory."""


class BlockingUploader:
    """Copies synchronously: for devices without a queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, size_bytes: int) -> Tensor:
        """Allocate a buffer."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def send(self, buffer: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy it synchronously."""
        return buffer.to(self._device) if target is None else target[: len(buffer)].copy_(buffer)


Wait = Callable[[], object]
"""Returns once the work that was queued before it is done."""


class PinnedUploader:
    """Copies asynchronously from a ring of pinned buffers. A buffer is reused once its last copy is done, so the host
    runs max BUFFERS steps ahead of the device.

    pinned: allocates a pinned buffer.  queue_marker: returns a wait for the copies queued so far.
    """

    BUFFERS = 3

    def __init__(self, device: torch.device, pinned: Callable[[int], Tensor], queue_marker: Callable[[], Wait]) -> None:
        self._device, self._pinned, self._queue_marker = device, pinned, queue_marker
        self._buffers: list[Tensor | None] = [None] * self.BUFFERS
        self._waits: list[Wait | None] = [None] * self.BUFFERS
        self._current = 0

    def buffer(self, size_bytes: int) -> Tensor:
        """Return part of the next buffer, which grows to 1.5 times the largest requested size."""
        self._current = index = (self._current + 1) % self.BUFFERS
        if (wait := self._waits[index]) is not None:
            wait()
        buffer = self._buffers[index]
        if buffer is None or len(buffer) < size_bytes:
            self._buffers[index] = buffer = self._pinned(size_bytes + size_bytes // 2)
        return buffer[:size_bytes]

    def send(self, buffer: Tensor, target: Tensor | None = None) -> Tensor:
        """Queue the copy."""
        if target is None:
            target = torch.empty(len(buffer), dtype=torch.uint8, device=self._device)
        sent = target[: len(buffer)].copy_(buffer, non_blocking=True)
        self._waits[self._current] = self._queue_marker()
        return sent


def uploader_for(device: torch.device) -> Uploader | None:
    """Return the uploader to `device`; None for the CPU."""
    if device.type != "cuda":
        return None

    def pinned(size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    return PinnedUploader(device, pinned, partial(_event_wait, device))


def _event_wait(device: torch.device) -> Wait:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def offsets(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets of parts of these sizes in one buffer, and the buffer's size."""
    ends = list(itertools.accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes_bytes))
    return [0, *ends[:-1]] if ends else [], ends[-1] if ends else 0


def view(buffer: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return the tensor at an offset of a buffer of bytes."""
    return buffer[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(*shape)


def upload_plan(plan: StepPlan, uploader: Uploader) -> StepPlan:
    """Copy all tensors of a plan to the device at once; return the plan there."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(plan, collect)
    starts, size_bytes = offsets([tensor.nbytes for tensor in tensors])
    buffer = uploader.buffer(size_bytes)
    for tensor, start in zip(tensors, starts, strict=True):
        view(buffer, start, tensor.dtype, tensor.shape).copy_(tensor)
    sent = uploader.send(buffer)
    places = iter(zip(tensors, starts, strict=True))

    def on_device(tensor: Tensor) -> Tensor:
        original, start = next(places)
        assert original is tensor, "map_tensors has a fixed order"
        return view(sent, start, tensor.dtype, tensor.shape)

    uploaded_plan: StepPlan = map_tensors(plan, on_device)
    return uploaded_plan


# Token ids that a device samples: used by the next step there before the host has read them.


class Readback(Protocol):
    """Copies tensors from a device to the host, in the order of the device's work."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Queue a copy to host memory, and return that; valid after the wait of a later `mark`."""

    def mark(self) -> Wait:
        """Return a wait for the work queued so far."""


class CudaReadback:
    """Copies from one device into pinned memory, which torch reuses only once such a copy is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, tensor: Tensor) -> Tensor:
        """Queue the copy."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> Wait:
        """Return a wait for the work queued so far."""
        return _event_wait(self._device)


def readback_for(device: torch.device) -> Readback | None:
    """Return the readback from `device`; None where the host waits for every step."""
    return CudaReadback(device) if device.type == "cuda" else None


def fill_pending_ids(ids: Tensor, drawn: Tensor) -> None:
    """Replace `batch.pending_token_id` in `ids` [T] by the ids that the previous step sampled, `drawn` [R], on the
    device.

    A row without a valid sample (-1) gives token 0: its result is dropped once that is read back.
    """
    if not len(drawn):
        return
    drawn = drawn.to(ids.device, non_blocking=True)
    rows = (-1 - ids).clamp_(min=0)
    ids.copy_(drawn.clamp(min=0).index_select(0, rows).where(ids < 0, ids))
