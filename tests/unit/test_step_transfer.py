"""A step's tensors on their way to a device: in one piece, unchanged, and never written over on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.paged_attention import gathered
from engine.backends.paged_attention.interface import PagedAttention
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.step_transfer import BlockingUploader, PinnedUploader, Wait, offsets, upload_plan
from engine.backends.torch.model.step_plan import HeadCounts, StepPlan, StepPlanner, map_tensors

CPU = torch.device("cpu")


class CountedUploader(BlockingUploader):
    sends = 0

    def send(self, buffer: Tensor, target: Tensor | None = None) -> Tensor:
        self.sends += 1
        return super().send(buffer.clone(), target)


def planned(paged: PagedAttention | None) -> StepPlan:
    planner = StepPlanner(frozenset({None, 12}), HeadCounts(2, 1, 16), 8, dtype=torch.bfloat16, device=CPU, paged=paged)
    return planner.plan(
        [
            ChunkInput([5], 20, [3, 1, 9], sample=True),
            ChunkInput([7], 3, [4], sample=True),
            ChunkInput(list(range(40)), 0, [11, 10, 12, 13, 15], sample=True),
            ChunkInput(list(range(3)), 9, [2, 8], sample=False, prompt_states=range(2)),
        ]
    )


def flat(plan: StepPlan) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(plan, note)
    return found


def test_a_step_arrives_as_it_was_with_one_copy() -> None:
    for paged in (None, gathered.paged_attention):
        plan, staging = planned(paged), CountedUploader(CPU)
        arrived = upload_plan(plan, staging)
        assert staging.sends == 1
        ours, theirs = flat(arrived), flat(plan)
        assert len(ours) == len(theirs) > 5
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype == other.dtype and torch.equal(mine, other)
        assert len({tensor.untyped_storage().data_ptr() for tensor in ours}) == 1
        assert arrived.prompt_states == plan.prompt_states and arrived.sizes(8) == plan.sizes(8)


@given(st.lists(st.integers(0, 100), max_size=9))
def test_parts_of_a_buffer_lie_apart_and_where_any_number_may(sizes: list[int]) -> None:
    starts, total = offsets(sizes)
    assert len(starts) == len(sizes)
    assert total >= sum(sizes)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(start % 16 == 0 for start in starts)
    assert all(end <= after for end, after in zip(ends, [*starts[1:], total], strict=False))


class Queue:
    """A device that copies only when it gets to it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.waits = 0

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def copied(self) -> Wait:
        upto = len(self.waiting)
        done = self.waiting[upto - 1] if upto else None

        def wait() -> None:
            while done in self.waiting:
                self.waits += 1
                self.waiting.pop(0)()

        return wait


class Lazy(PinnedUploader):
    """Its copies take place when the queue comes to them, and read the buffer as it is then."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(CPU, lambda size: torch.empty(size, dtype=torch.uint8), queue.copied)
        self._queue = queue

    def send(self, buffer: Tensor, target: Tensor | None = None) -> Tensor:
        copy = torch.zeros(len(buffer), dtype=torch.uint8)
        self._queue.waiting.append(lambda: copy.copy_(buffer))
        self._waits[self._current] = self._queue.copied()
        return copy


def test_a_buffer_is_written_to_again_only_once_its_copy_is_done() -> None:
    queue = Queue()
    staging = Lazy(queue)
    sent = []
    for step in range(7):
        host = staging.buffer(4 + step)
        host.fill_(step)
        sent.append(staging.send(host))
        assert len(queue.waiting) <= PinnedUploader.BUFFERS
    queue.run()
    assert [set(each.tolist()) for each in sent] == [{step} for step in range(7)]
    assert queue.waits == 7 - PinnedUploader.BUFFERS
