"""Which steps are recorded, in which sizes, and what is written to where recordings look for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.backends.paged_attention import gathered
from engine.backends.scheduler.batch import ChunkInput
from engine.backends.torch.cuda.decode_graphs import Bucket, Buckets, DecodeGraphs, StepInputs
from engine.backends.torch.cuda.step_transfer import BlockingUploader
from engine.backends.torch.model.step_plan import StepPlan, StepPlanner
from tests.fakes.recording import FakeRecorder

PAGE_TOKENS = 16
CPU = torch.device("cpu")


def decode(tokens: int, first_page: int = 0) -> ChunkInput:
    """The token after so many, whose pages are numbered from `first_page` on."""
    pages = list(range(first_page, first_page + tokens // PAGE_TOKENS + 1))
    return ChunkInput([tokens % 7], tokens, pages, sample=True)


@given(st.integers(1, 300), st.integers(1, 20_000))
def test_every_number_of_sequences_has_a_size_that_is_not_much_larger(sequences: int, tokens: int) -> None:
    buckets = Buckets.up_to(sequences, tokens, PAGE_TOKENS)
    assert buckets.batches[-1] == sequences
    assert list(buckets.batches) == sorted(set(buckets.batches))
    assert buckets.pages[-1] == -(-tokens // PAGE_TOKENS)
    for count in range(1, sequences + 1):
        found = buckets.smallest_for([decode(0)] * count, PAGE_TOKENS)
        assert found is not None
        assert count <= found.batch < 2 * count
        assert count < 64 or found.batch <= 1.25 * count


def test_sizes_are_few() -> None:
    buckets = Buckets.up_to(128, 8192, PAGE_TOKENS)
    assert buckets.batches == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
    assert buckets.pages == (128, 256, 512)


def test_the_smallest_size_that_holds_a_step_is_taken() -> None:
    buckets = Buckets.up_to(64, 8192, PAGE_TOKENS)
    assert buckets.smallest_for([decode(100)] * 3, PAGE_TOKENS) == Bucket(4, 128)
    assert buckets.smallest_for([decode(2047)], PAGE_TOKENS) == Bucket(1, 128)
    assert buckets.smallest_for([decode(2048)], PAGE_TOKENS) == Bucket(1, 256)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2]},
        {"sample": False},
        {"adapter": "a"},
        {"num_drafts": 1},
        {"prompt_states": range(1)},
    ],
    ids=str,
)
def test_a_step_with_anything_but_single_tokens_of_the_model_alone_is_none(changes: dict[str, Any]) -> None:
    buckets = Buckets.up_to(8, 512, PAGE_TOKENS)
    assert buckets.smallest_for([decode(5), replace(decode(5), **changes)], PAGE_TOKENS) is None


def test_nothing_too_many_and_too_long_is_none() -> None:
    buckets = Buckets.up_to(8, 512, PAGE_TOKENS)
    assert buckets.smallest_for([], PAGE_TOKENS) is None
    assert buckets.smallest_for([decode(5)] * 9, PAGE_TOKENS) is None
    assert buckets.smallest_for([decode(512)], PAGE_TOKENS) is None


@given(st.lists(st.integers(0, 700), min_size=1, max_size=12))
def test_what_is_written_is_the_step_as_it_is_planned_for_pages(lengths: list[int]) -> None:
    chunks = [decode(tokens, first_page=50 * number) for number, tokens in enumerate(sorted(lengths))]
    bucket = Bucket(16, 64)
    inputs = StepInputs.over(torch.full((StepInputs.size_bytes(bucket) + 99,), 77, dtype=torch.uint8), bucket)
    inputs.fill(chunks, PAGE_TOKENS)
    planned = StepPlanner(
        frozenset({None}), 1, PAGE_TOKENS, dtype=torch.float32, device=CPU, paged=gathered.paged_attention
    ).plan(chunks)
    assert planned.paged is not None
    [group] = planned.paged.groups
    count, width = group.block_table.shape
    pairs = [
        (inputs.ids, planned.ids),
        (inputs.positions, planned.positions),
        (inputs.slots, planned.slots),
        (inputs.lengths, group.lengths),
        (inputs.block_table[:, :width], group.block_table),
    ]
    for ours, theirs in pairs:
        assert ours[:count].tolist() == theirs.tolist()
        assert all(row == theirs[0].tolist() for row in ours[count:].tolist())  # the shortest one again
    assert not inputs.block_table[:, width:].any()


class Counting:
    """A model whose logits are its inputs' lengths, with recordings of it."""

    def __init__(self, recorder: FakeRecorder, *, room: int = 99) -> None:
        self.room = room
        self.graphs = DecodeGraphs(
            Buckets.up_to(4, 4096, PAGE_TOKENS),
            vocab_size=3,
            page_tokens=PAGE_TOKENS,
            device=CPU,
            attention=gathered.paged_attention,
            compute=self.compute,
            recorder=recorder,
            uploader=BlockingUploader(CPU),
            has_room=lambda: recorder.recorded < self.room,
        )

    @staticmethod
    def compute(plan: StepPlan) -> torch.Tensor:
        assert plan.paged is not None
        return plan.paged.groups[0].lengths.float()[:, None].expand(-1, 3)


def test_a_recording_is_made_once_and_done_again_on_new_inputs() -> None:
    recorder = FakeRecorder()
    graphs = Counting(recorder).graphs
    graphs.prepare()
    assert (recorder.recorded, graphs.recorded_buckets) == (3, {Bucket(size, 128) for size in (1, 2, 4)})
    for lengths in ([5, 6, 7], [9, 8, 7], [1]):
        logits = graphs.logits([decode(tokens) for tokens in lengths])
        assert logits is not None and logits[:, 0].tolist() == [tokens + 1 for tokens in lengths]
    assert (recorder.recorded, recorder.replayed) == (3, 6)


def test_longer_sequences_are_recorded_when_there_are_some() -> None:
    recorder = FakeRecorder()
    graphs = Counting(recorder).graphs
    graphs.prepare()
    assert graphs.logits([decode(3000)]) is not None
    assert graphs.recorded_buckets - {Bucket(size, 128) for size in (1, 2, 4)} == {Bucket(1, 256)}


@pytest.mark.parametrize(("fails_from", "room"), [(2, 99), (None, 2)], ids=["fails", "no room"])
def test_where_memory_is_short_there_are_as_many_recordings_as_there_were(
    fails_from: int | None, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = Counting(FakeRecorder(fails_from), room=room).graphs
    graphs.prepare()
    assert graphs.recorded_buckets == {Bucket(1, 128), Bucket(2, 128)}
    assert graphs.logits([decode(5)] * 3) is None
    assert graphs.logits([decode(5)] * 2) is not None
    assert caplog.text.count("decode graphs end at") == 1


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ],
)
def test_a_recording_that_the_device_refuses_costs_no_more_than_the_recording(message: str) -> None:
    graphs = Counting(FakeRecorder(1, torch.AcceleratorError(message))).graphs
    graphs.prepare()
    assert graphs.recorded_buckets == {Bucket(1, 128)}


def test_a_device_that_is_lost_while_it_records_is_lost() -> None:
    graphs = Counting(FakeRecorder(1, torch.AcceleratorError("CUDA error: unspecified launch failure"))).graphs
    with pytest.raises(torch.AcceleratorError, match="launch failure"):
        graphs.prepare()
