"""The tensors of a step's plan on their way to a device: packed side by side, so that a step costs one copy for all of
them, and out of pinned memory, so that nothing waits for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.torch.model.step_plan import StepPlan, mapped

_ALIGNED_BYTES = 16


class Staging(Protocol):
    """Bytes on their way from the host to a device, in the order of its work."""

    def host(self, size_bytes: int) -> Tensor:
        """Room to write to, uint8 [size_bytes]: nothing reads there any more. Until it is sent it is the caller's."""

    def send(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy what `host` gave to the device, into the first of these bytes or into new ones, without waiting."""


class PlainStaging:
    """Copies that are done when they return: for devices that have no queue of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host(self, size_bytes: int) -> Tensor:
        """New memory."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def send(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        """Copy it at once."""
        return host.to(self._device) if into is None else into[: len(host)].copy_(host)


Wait = Callable[[], object]
"""Returns once what was queued before it was made is done."""


class TurnStaging:
    """Copies out of a few buffers by turns: one is written to again only once its last copy is done, which it has been
    for long when its turn comes. So the host is at most so many steps ahead of the device.

    pinned: a buffer that a device can copy from by itself.  copied: a wait for the copies queued so far.
    """

    BUFFERS = 3

    def __init__(self, device: torch.device, pinned: Callable[[int], Tensor], copied: Callable[[], Wait]) -> None:
        self._device, self._pinned, self._copied = device, pinned, copied
        self._buffers: list[Tensor | None] = [None] * self.BUFFERS
        self._waits: list[Wait | None] = [None] * self.BUFFERS
        self._turn = 0

    def host(self, size_bytes: int) -> Tensor:
        """Room in the next buffer, which grows to the largest that was asked for and half as much again."""
        self._turn = turn = (self._turn + 1) % self.BUFFERS
        if (wait := self._waits[turn]) is not None:
            wait()
        buffer = self._buffers[turn]
        if buffer is None or len(buffer) < size_bytes:
            self._buffers[turn] = buffer = self._pinned(size_bytes + size_bytes // 2)
        return buffer[:size_bytes]

    def send(self, host: Tensor, into: Tensor | None = None) -> Tensor:
        """Queue the copy."""
        if into is None:
            into = torch.empty(len(host), dtype=torch.uint8, device=self._device)
        sent = into[: len(host)].copy_(host, non_blocking=True)
        self._waits[self._turn] = self._copied()
        return sent


def offsets(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of these many bytes begins in one buffer, so that any dtype may lie there; and the buffer's size."""
    ends = list(itertools.accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes_bytes))
    return [0, *ends[:-1]] if ends else [], ends[-1] if ends else 0


def view(buffer: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The part of a buffer of bytes that holds a tensor."""
    return buffer[start : start + dtype.itemsize * math.prod(shape)].view(dtype).view(*shape)


def uploaded(plan: StepPlan, staging: Staging) -> StepPlan:
    """The same plan with all its tensors on the device of `staging`, sent as one."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    mapped(plan, collect)
    starts, size_bytes = offsets([tensor.nbytes for tensor in tensors])
    host = staging.host(size_bytes)
    for tensor, start in zip(tensors, starts, strict=True):
        view(host, start, tensor.dtype, tensor.shape).copy_(tensor)
    sent = staging.send(host)
    places = iter(zip(tensors, starts, strict=True))

    def take(tensor: Tensor) -> Tensor:
        same, start = next(places)
        assert same is tensor, "a plan's tensors come in the same order every time"
        return view(sent, start, tensor.dtype, tensor.shape)

    moved: StepPlan = mapped(plan, take)
    return moved


# Token ids that are drawn on a device: taken by the next step there before the host has read them, and on their way
# to the host meanwhile.


class Readback(Protocol):
    """The way from a device back to the host, in the order of the device's work."""

    def fetch(self, tensor: Tensor) -> Tensor:
        """Memory of the host that `tensor` is copied to, without waiting; good after the wait of a later `mark`."""

    def mark(self) -> Wait:
        """A wait for all that was queued so far."""


def fill_pending_ids(ids: Tensor, drawn: Tensor) -> None:
    """Put the ids that the step before drew, `drawn` [R], into `ids` [T] on their device, where `batch.unread` stands.

    A row that nothing could be drawn for (-1) gives token 0: what is computed with it is dropped when that is read.
    """
    if not len(drawn):
        return
    rows = (-1 - ids).clamp_(min=0)
    ids.copy_(drawn.clamp(min=0).index_select(0, rows).where(ids < 0, ids))
