"""Copies of KV pages between a device and the host: one pinned buffer each way, never overwritten while in use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.backends.common import kv_tiers
from engine.backends.common.kv_tiers import KvTiers
from engine.backends.torch.kv.page_tensors import PageCopies, Wait
from tests.fakes.tiered import FakePages


class QueuedCopies(PageCopies):
    """A device whose copies are done when their mark is waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.allocated: list[int] = []
        self.under_way: list[Tensor] = []
        self.filled_early = False

    def allocate(self, size_bytes: int) -> Tensor:
        if size_bytes:
            self.allocated.append(size_bytes)
        return super().allocate(size_bytes)

    def mark(self) -> Wait:
        self.under_way.append(self._in)
        return self.under_way.clear

    def to_device(self, rows: np.ndarray) -> Tensor:  # type: ignore[type-arg]
        sent = super().to_device(rows)
        self.filled_early |= len(self.under_way) > 1
        return sent


def test_a_buffer_is_filled_only_once_its_last_copy_to_the_device_is_done() -> None:
    copies = QueuedCopies()
    for number in range(5):
        rows = np.full((4, 100), number, dtype=np.uint8)
        assert (copies.to_device(rows) == number).all()
        assert len(copies.under_way) == 1, "it is not waited for"
    assert not copies.filled_early
    assert copies.allocated == [400]


def test_pages_are_on_the_host_when_a_copy_from_the_device_returns() -> None:
    copies = QueuedCopies()
    found: list[Callable[[], Tensor]] = [lambda: torch.full((4, 100), 1, dtype=torch.uint8)]
    assert (copies.to_host(found[0]) == 1).all()
    assert not copies.under_way, "it was waited for"
    assert (copies.to_host(lambda: torch.full((2, 50), 2, dtype=torch.uint8)) == 2).all()
    assert copies.allocated == [400]


def test_the_buffers_of_all_batches_are_within_what_placement_sets_aside() -> None:
    for page_bytes in (1 << 10, 360 << 10, 3 << 20, 16 << 20):
        tiers = KvTiers([], FakePages(page_bytes))
        assert tiers.batch_pages * page_bytes <= len(tiers._batches.take()) <= kv_tiers._BATCH_BYTES
